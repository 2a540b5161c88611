"""Parameter shapes that a config implies, and checks of stored tensors against them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.models.config import ModelConfig
from mxjax.numerics import float_bits

Path = tuple[str, ...]
"""Keys from the root of the params to a leaf."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A named tensor in a file; `read` returns its values, in the final dtype."""

  name: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


def parameter_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """Returns the parameter shapes of a float model by path, in forward order."""
  width, vocabulary = config.hidden_size, config.vocab_size
  shapes: dict[Path, tuple[int, ...]] = {
    ("embed_tokens", "weight"): (vocabulary, width)
  }
  layer: dict[Path, tuple[int, ...]] = {
    (name, "weight"): (width,) for name in layer_norms(config)
  }
  for name, size in attention_norms(config).items():
    layer["self_attn", name, "weight"] = (size,)
  for path, (in_features, out_features, use_bias) in layer_linears(config).items():
    layer[*path, "weight"] = (out_features, in_features)
    if use_bias:
      layer[*path, "bias"] = (out_features,)
  for index in range(config.num_layers):
    # All layers of these families are alike.
    shapes |= {(f"layers_{index}", *path): shape for path, shape in layer.items()}
  shapes["norm", "weight"] = (width,)
  if not config.tie_embeddings:
    shapes["lm_head", "weight"] = (vocabulary, width)
  return shapes


def layer_linears(config: ModelConfig) -> dict[tuple[str, str], tuple[int, int, bool]]:
  """Returns (inputs, outputs, has bias) of a layer's linears, in forward order."""
  width, hidden = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  values = config.num_kv_heads * config.head_dim
  # The flag of Llama gives o a bias as well, that of Qwen2 does not.
  qkv_bias = config.attention_bias or config.qkv_bias
  return {
    ("self_attn", "q_proj"): (width, queries, qkv_bias),
    ("self_attn", "k_proj"): (width, values, qkv_bias),
    ("self_attn", "v_proj"): (width, values, qkv_bias),
    ("self_attn", "o_proj"): (queries, width, config.attention_bias),
    ("mlp", "gate_proj"): (width, hidden, config.mlp_bias),
    ("mlp", "up_proj"): (width, hidden, config.mlp_bias),
    ("mlp", "down_proj"): (hidden, width, config.mlp_bias),
  }


def attention_norms(config: ModelConfig) -> dict[str, int]:
  """Returns the widths of the query and key norms by name; empty if there are none."""
  if config.qk_norm is None:
    return {}
  heads, kv_heads = config.num_heads, config.num_kv_heads
  if config.qk_norm == "head":
    # One scale of `head_dim`, which all heads share.
    heads = kv_heads = 1
  return {"q_norm": heads * config.head_dim, "k_norm": kv_heads * config.head_dim}


def layer_norms(config: ModelConfig) -> tuple[str, str]:
  """Returns the names of a layer's attention norm and MLP norm."""
  if config.is_post_norm:
    return "post_attention_layernorm", "post_feedforward_layernorm"
  return "input_layernorm", "post_attention_layernorm"


def check_shapes(
  stored: Mapping[Path, StoredTensor],
  expected: Mapping[Path, tuple[int, ...]],
  source: str,
) -> None:
  """Compares the tensors of `source` (a file or folder) with its config.

  Raises:
    ValueError: Tensors are missing, unexpected or mis-shaped; all are named.
  """
  problems = [f"{'.'.join(path)} is missing" for path in expected if path not in stored]
  problems += [
    f"{stored[path].name} is unexpected" for path in stored if path not in expected
  ]
  problems += [
    f"{stored[path].name} has shape {list(stored[path].shape)}, not {list(shape)}"
    for path, shape in expected.items()
    if path in stored and stored[path].shape != shape
  ]
  if problems:
    raise ValueRefusal(
      source,
      expected=f"the {len(expected)} tensors its config implies",
      got=f"{len(stored)}: {'; '.join(problems)}",
      mend="use the config that belongs to these weights",
    )


def check_finite(values: Mapping[str, jax.Array], source: str) -> None:
  """Checks that all arrays of `source` (a file or folder) are finite.

  Raises:
    ValueError: There is NaN or inf; the arrays are named, with their counts.
  """
  counts = {name: int(float_bits.count_not_finite(a)) for name, a in values.items()}
  broken = [
    f"{n} has {count} of {values[n].size}" for n, count in counts.items() if count
  ]
  if broken:
    raise ValueRefusal(
      source,
      expected="finite weights",
      got=f"NaN or inf: {'; '.join(broken)}",
      mend="download the checkpoint again or repair those tensors",
    )


def insert(params: dict[str, Any], path: Path, value: jax.Array) -> None:
  """Sets a leaf at a path, creating the dicts on the way."""
  for key in path[:-1]:
    params = params.setdefault(key, {})
  params[path[-1]] = value
