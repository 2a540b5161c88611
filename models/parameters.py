"""What parameters a config implies, and the checked way from stored tensors to them."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.models.config import ModelConfig

Path = tuple[str, ...]
"""Keys from the root of the params to a leaf."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file, read when asked.

  Attributes:
    name: Its name in the file, for messages.
    shape: Its shape, `[out, in]` for linears.
    read: Returns the values, a numpy array of `shape` in their final dtype.
  """

  name: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


def parameter_shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
  """Lists every parameter of an unquantized model.

  Args:
    config: The model's description.

  Returns:
    The shape of each leaf by its path, in forward order.
  """
  width, vocabulary = config.hidden_size, config.vocab_size
  shapes: dict[Path, tuple[int, ...]] = {
    ("embed_tokens", "weight"): (vocabulary, width)
  }
  layer = dict(_layer_shapes(config))
  for index in range(config.num_layers):
    shapes |= {(f"layers_{index}", *path): shape for path, shape in layer.items()}
  shapes["norm", "weight"] = (width,)
  if not config.tie_embeddings:
    shapes["lm_head", "weight"] = (vocabulary, width)
  return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[Path, tuple[int, ...]]]:
  """Yields path and shape of each parameter of one layer."""
  width, hidden = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  values = config.num_kv_heads * config.head_dim
  qkv_bias = config.attention_bias or config.qkv_bias
  linears = [
    ("self_attn", "q_proj", queries, width, qkv_bias),
    ("self_attn", "k_proj", values, width, qkv_bias),
    ("self_attn", "v_proj", values, width, qkv_bias),
    ("self_attn", "o_proj", width, queries, config.attention_bias),
    ("mlp", "gate_proj", hidden, width, config.mlp_bias),
    ("mlp", "up_proj", hidden, width, config.mlp_bias),
    ("mlp", "down_proj", width, hidden, config.mlp_bias),
  ]
  for name in layer_norms(config):
    yield (name, "weight"), (width,)
  if config.qk_norm is not None:
    per_head = config.qk_norm == "head"
    yield ("self_attn", "q_norm", "weight"), (config.head_dim if per_head else queries,)
    yield ("self_attn", "k_norm", "weight"), (config.head_dim if per_head else values,)
  for block, name, out_features, in_features, has_bias in linears:
    yield (block, name, "weight"), (out_features, in_features)
    if has_bias:
      yield (block, name, "bias"), (out_features,)


def layer_norms(config: ModelConfig) -> tuple[str, str]:
  """Names of a layer's norms: of attention first, then of the MLP."""
  if config.is_post_norm:
    return "post_attention_layernorm", "post_feedforward_layernorm"
  return "input_layernorm", "post_attention_layernorm"


def check_shapes(
  stored: Mapping[Path, StoredTensor],
  expected: Mapping[Path, tuple[int, ...]],
  source: str,
) -> None:
  """Raises one error that names every tensor out of place.

  Args:
    stored: What the file has, by params path.
    expected: Shapes that the config implies.
    source: File or folder, for messages.

  Raises:
    ValueError: Tensors are missing, unexpected or of another shape.
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
    raise ValueError(
      f"{source}: expected the {len(expected)} tensors its config implies, got "
      f"{len(stored)}: {'; '.join(problems)}; use the config that belongs to these "
      "weights."
    )


def check_finite(values: Mapping[str, jax.Array], source: str) -> None:
  """Raises one error that names and counts what is not finite.

  Args:
    values: Arrays by the name to report.
    source: File or folder, for messages.

  Raises:
    ValueError: There is NaN or inf.
  """
  counts = {name: int(_count_nonfinite(value)) for name, value in values.items()}
  broken = [
    f"{n} has {count} of {values[n].size}" for n, count in counts.items() if count
  ]
  if broken:
    raise ValueError(
      f"{source}: expected finite weights, got NaN or inf: {'; '.join(broken)}; "
      "download the checkpoint again or repair those tensors."
    )


@jax.jit
def _count_nonfinite(value: jax.Array) -> jax.Array:
  """Counts NaN and inf entries."""
  return jnp.sum(~jnp.isfinite(value), dtype=jnp.int32)


def insert(params: dict[str, Any], path: Path, value: jax.Array) -> None:
  """Puts a leaf at a path, making the dicts on the way."""
  for key in path[:-1]:
    params = params.setdefault(key, {})
  params[path[-1]] = value
