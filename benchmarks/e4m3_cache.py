"""What a key-value cache in E4M3 changes, of float models and of HiRes.

  python benchmarks/e4m3_cache.py [llama qwen3 mistral olmo2 smollm2] --data FOLDER

Each model, in float32, predicts WikiText-2 in windows of all its positions (8 of a
small trained model; one of SmolLM2-135M-Instruct, of 2,048 by default), with keys and
values in float32 and in E4M3 for the same tokens: KL between the two in nats a token,
by position; the share of predictions whose most likely token stays; and the divergence
of HiRes from the float model with each cache. Then it continues eight beginnings of
windows, 33 to 64 tokens long and in one batch, by 64 tokens with each: the share of
tokens before the first that differs. HiRes is calibrated on 8 rows of C4 of 512 tokens.
Errors of keys and values are those of the first layer's, relative in the mean square,
with our scale and with the largest value over 448. The result file is rewritten after
every model of a kind, and those already in it are kept.
"""

import functools
import json
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution
from mxjax.models import generation
from mxjax.models.loading import embedded
from mxjax.numerics import e4m3
from mxjax.run.quantize import run

FAMILIES = ("llama", "qwen3", "mistral", "olmo2", "smollm2")
FORMATS = ("compute", "e4m3")
KINDS = ("float", "hires")
CHUNK = 256
"""Tokens whose logits exist at once."""
CALIBRATION = 8, 512
NEW, PROMPTS = 64, 8
BANDS = 4
"""Parts of the context by position, of equal length."""


def texts(data, source, positions, windows):
  """Calibration rows of C4, and windows of WikiText-2."""
  tokenizer = models.load_tokenizer(source)
  lines = (data / common.C4).read_text().splitlines()
  documents = "\n\n".join(json.loads(line)["text"] for line in lines[:100])
  rows, length = CALIBRATION
  calibration = tokenizer.encode(documents)[: rows * length].reshape(rows, length)
  ids = tokenizer.encode((data / common.WIKITEXT).read_text())
  # Beginnings are of other text than windows, where there is as much.
  text = ids[: windows * positions].reshape(windows, positions)
  begun = ids[-PROMPTS * positions :].reshape(PROMPTS, positions)
  lengths = np.linspace(33, 64, PROMPTS).astype(int)
  prompts = [row[:n].astype(np.int32) for row, n in zip(begun, lengths, strict=True)]
  return calibration.astype(np.int32), text.astype(np.int32), prompts


@functools.partial(jax.jit, static_argnames=("model", "cache_format"))
def layer(model, params, hidden, cache_format):
  """One layer on whole sequences, which read what a cache of the format holds."""
  empty = model.empty_cache(*hidden.shape[:2], cache_format)
  hidden, filled = model.layer_with_cache(params, empty, hidden, 0)
  return hidden, filled["self_attn"]


def last_hidden(model, params, window, cache_format):
  """Final hidden states `[T, d]` of a window."""
  hidden = model.embed(params, jnp.asarray(window[None]))
  for index in range(model.num_layers):
    weights = params[model.layer_name(index)]
    hidden, _ = layer(model, weights, hidden, cache_format)
  return np.asarray(hidden[0])


@functools.partial(jax.jit, static_argnames="model")
def compared(model, params, others, exact, ours):
  """KL and whether the most likely token stays, of `[CHUNK, d]` each."""
  score = lambda params, hidden: jax.nn.log_softmax(
    model.logits(params, hidden[None])[0], axis=-1
  )
  exact, ours = score(params, exact), score(others, ours)
  divergence = (jnp.exp(exact) * (exact - ours)).sum(-1)
  return divergence, exact.argmax(-1) == ours.argmax(-1)


def agreement(model, params, others, exact, ours):
  """KL and agreement of hidden states by window, with the mean of each band."""
  kl, same = [], []
  for pair in zip(exact, ours, strict=True):
    for first in range(0, len(pair[0]), CHUNK):
      cut = [a[first : first + CHUNK] for a in pair]
      for values, found in zip(
        (kl, same), compared(model, params, others, *cut), strict=True
      ):
        values.append(np.asarray(found))
  kl = np.concatenate(kl).reshape(len(exact), -1)
  bands = np.array_split(kl, BANDS, axis=1)
  return {
    "kl": float(kl.mean()),
    "kl_p99": float(np.quantile(kl, 0.99)),
    "kl_by_position": [float(band.mean()) for band in bands],
    "agreement": float(np.concatenate(same).mean()),
  }


def errors(model, params, window):
  """Relative errors of the first layer's keys and values, by scale."""
  hidden = model.embed(params, jnp.asarray(window[None]))
  _, kept = layer(model, params[model.layer_name(0)], hidden, "compute")
  rows = {}
  for name, a in kept.items():
    largest = jnp.abs(a).max(-1, keepdims=True)
    finest = jnp.where(largest > 0, largest / e4m3.MAX, 1.0)
    by_float = (a / finest).astype(jnp.float8_e4m3fn).astype(jnp.float32) * finest
    made = {"power of two": e4m3.encode(a).decode(jnp.float32), "float32": by_float}
    rows[name] = {
      scale: float(jnp.sqrt(jnp.square(b - a).mean() / jnp.square(a).mean()))
      for scale, b in made.items()
    }
  return rows


def continued(model, params, prompts):
  """The share of tokens before the first that the cache changes."""
  made = [
    models.generate_each(
      model, params, prompts, max_new_tokens=NEW, cache_format=cache_format
    )
    for cache_format in FORMATS
  ]
  same = [
    np.flatnonzero(np.append(a != b, True))[0] for a, b in zip(*made, strict=True)
  ]
  lengths = np.array([len(prompt) for prompt in prompts])
  return float(np.mean((same - lengths).clip(max=NEW) / NEW))


def float_kind(model, params, text, prompts):
  """Compares the caches of the float model."""
  hidden = {
    how: [last_hidden(model, params, window, how) for window in text] for how in FORMATS
  }
  pair = [hidden[how] for how in FORMATS]
  return {
    "errors": errors(model, params, text[0]),
    **agreement(model, params, params, *pair),
    "continued": continued(model, params, prompts),
  }


def hires_kind(model, params, text, prompts, calibration):
  """Builds HiRes, and compares its caches and each with the float model."""
  start = time.perf_counter()
  built = run(
    params, Calibration(model, calibration), methods.HIRES, probe=False
  ).params
  seconds = round(time.perf_counter() - start, 1)
  exact = [last_hidden(model, params, window, "compute") for window in text]
  hidden = {
    how: [last_hidden(model, built, window, how) for window in text] for how in FORMATS
  }
  pair = [hidden[how] for how in FORMATS]
  return {
    "build_seconds": seconds,
    **agreement(model, built, built, *pair),
    "continued": continued(model, built, prompts),
    "against float": {
      how: agreement(model, params, built, exact, hidden[how]) for how in FORMATS
    },
  }


def measured(name, kind, data, longest):
  """Compares the caches of one model."""
  source = None if name == "smollm2" else str(embedded.trained_folder(name))
  model, params = models.from_pretrained(source)
  windows = 1 if name == "smollm2" else 8
  positions = min(model.config.max_positions, longest)
  calibration, text, prompts = texts(data, source, positions, windows)
  if kind == "float":
    found = float_kind(model, params, text, prompts)
  else:
    found = hires_kind(model, params, text, prompts, calibration)
  each = {how: generation.cache_bytes(model.config, how) for how in FORMATS}
  about = {
    "positions": positions,
    "windows": windows,
    "head_dim": model.config.head_dim,
  }
  return about | {"bytes_a_token": each} | found


def table(found):
  """A line for each model, float and HiRes."""
  head = ["model", "positions", "KL of E4M3", "in the last quarter", "same token"]
  lines = []
  for name, kinds in found.items():
    for kind, row in kinds.items():
      beside = ["", ""]
      if "against float" in row:
        beside = [f"{row['against float'][how]['kl']:.5f}" for how in FORMATS]
      lines.append(
        [
          f"{name}, {kind}",
          f"{row['positions']:,}",
          f"{row['kl']:.6f}",
          f"{row['kl_by_position'][-1]:.6f}",
          f"{row['agreement']:.4f}",
          f"{row['continued']:.2f}",
          *beside,
        ]
      )
  last = ["continued alike", "KL from float, cache in float32", "cache in E4M3"]
  return common.markdown([*head, *last], lines)


def main():
  """Measures what is asked for and is not in the result file."""
  parser = common.parser(__doc__, data=True)
  parser.add_argument("models", nargs="*", default=FAMILIES, metavar="MODEL")
  parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
  parser.add_argument("--positions", type=int, default=2048, help="at most so many")
  options = parser.parse_args()
  execution.keep_freed_memory()
  found = common.read(options.out, {"models": {}})["models"]
  stamp = common.stamp()
  for name in options.models:
    for kind in options.kinds:
      of_model = found.setdefault(name, {})
      if kind not in of_model:
        of_model[kind] = measured(name, kind, options.data, options.positions) | {
          "made": stamp
        }
      in_order = {one: found[one] for one in FAMILIES if one in found}
      common.write(options.out, {**stamp, "models": in_order}, table(in_order))


if __name__ == "__main__":
  main()
