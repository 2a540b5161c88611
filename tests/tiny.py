"""The tiny model of the tests: one config, one folder of it, and what tests read of it.

Tests that keep these widths share what is compiled.
"""

import jax
import jax.numpy as jnp
import tokenizers

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM, ModelConfig
from mxjax.models.families import to_hf_config
from mxjax.models.loading import weights

TEXT = "the cat sat on the mat and the dog ran over the hill " * 40


def config(**changes):
  """Two layers with grouped queries, every width a multiple of 32."""
  fields = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=128,
  )
  return ModelConfig(**(fields | changes))


def save_folder(path, **changes):
  """Writes a float model as Hugging Face does, its tokenizer, and a text of it."""
  model = CausalLM(config(vocab_size=64, **changes))
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  weights.save_folder(path, to_hf_config(model.config), params)
  return save_tokenizer(path, 64)


def save_tokenizer(path, size):
  """Writes a tokenizer of `size` tokens and the text that it was learned from."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False)
  backend.train_from_iterator([TEXT], trainer)
  backend.save(str(path / "tokenizer.json"))
  (path / "text.txt").write_text(TEXT)
  return path


def leaves_of(params):
  """The quantized linears of a pytree."""
  is_leaf = lambda node: isinstance(node, QuantizedLinear)
  return [x for x in jax.tree.leaves(params, is_leaf=is_leaf) if is_leaf(x)]
