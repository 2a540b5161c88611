r"""A plain Hugging Face folder whose linears hold the effective weight.

.. math::
  W_{\mathrm{eff}} = \operatorname{decode}(\tilde W)\, T

Any loader reads it, at the speed of the float model. Activations are not rounded: this
is weight-only quantization, whose perplexity is not that of the strict W4A4 model, and
one-code tables and clipping do not apply. Recoveries are linear in the outputs they
correct and are folded into rows and biases, if the family's config has such biases.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.config import ModelConfig
from mxjax.models.families import FAMILIES
from mxjax.models.loading.weights import tensor_name
from mxjax.numerics import precision
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.storage.export import features, folder

FORMAT = "dequant"


def cannot_hold(params: Mapping[str, Any], config: ModelConfig) -> dict[str, list[str]]:
  """Lists recoveries that need a bias which the family's config lacks."""
  present = features.features_of(params)
  flags = FAMILIES[config.family].flags if config.family in FAMILIES else ()
  values_have_bias = (
    config.attention_bias or config.qkv_bias or "attention_bias" in flags
  )
  mlp_has_bias = config.mlp_bias or "mlp_bias" in flags
  lacking = {"value-recovery": not values_have_bias, "mlp-recovery": not mlp_has_bias}
  return {name: paths for name, paths in present.items() if lacking.get(name)}


def check(params: Mapping[str, Any], config: ModelConfig) -> None:
  """Raises a ValueError if a recovery needs a bias that the family lacks."""
  place = f"{FORMAT} of the family {config.family}"
  features.refuse(place, cannot_hold(params, config))


def _scale_linear(linear: dict[str, Any], scale: jax.Array, offset: jax.Array) -> None:
  """Replaces outputs y by scale * y + offset, `[out_features]` or scalars."""
  rows = linear["weight"].shape[0]
  scale = jnp.broadcast_to(scale.astype(jnp.float64), (rows,))
  offset = jnp.broadcast_to(offset.astype(jnp.float64), (rows,))
  # s (W x + b) + t = (s W) x + (s b + t): rows of the weight are outputs.
  linear["weight"] = linear["weight"] * scale[:, None]
  linear["bias"] = linear.get("bias", jnp.zeros(rows, jnp.float64)) * scale + offset


def _fold_values(block: dict[str, Any], recovery: ValueRecovery) -> None:
  linear = block["v_proj"]
  # Rows of v_proj are ordered by head, so that each coefficient serves `head_dim` rows
  # in turn.
  repeat = linear["weight"].shape[0] // recovery.scale.shape[0]
  each_row = lambda of_heads: jnp.repeat(of_heads, repeat)
  _scale_linear(linear, each_row(recovery.scale), each_row(recovery.offset))


def _fold_mlp(block: dict[str, Any], recovery: MlpRecovery) -> None:
  wide = {key: value.astype(jnp.float64) for key, value in vars(recovery).items()}
  one, none = jnp.float64(1), jnp.zeros((), jnp.float64)
  # Paper: Eq. hires-mlp-update. Gate (1 + beta) g + alpha sigma_g, up (1 + eta) u,
  # before SiLU and product.
  shift = wide["gate_shift"] * wide["gate_deviation"]
  _scale_linear(block["gate_proj"], one + wide["gate_scale"], shift)
  _scale_linear(block["up_proj"], one + wide["up_scale"], none)


_FOLDS = {"value_recovery": _fold_values, "mlp_recovery": _fold_mlp}


def _effective_block(
  block: Mapping[str, Any], add_bias: bool, dtype: jax.typing.DTypeLike
) -> tuple[dict[str, Any], float]:
  """Folds maps and recovery into the linears and casts them to `dtype`.

  With `add_bias` all linears get a bias. Also returns their largest relative error.
  """
  # Recoveries are left out: what they do is folded into the linears below.
  result = {key: node for key, node in block.items() if key not in _FOLDS}
  linears = [part for part in result if part.endswith("_proj")]
  for part in linears:
    result[part] = {
      key: features.effective_weight(leaf)
      if isinstance(leaf, QuantizedLinear)
      else leaf.astype(jnp.float64)
      for key, leaf in block[part].items()
    }
  for key, fold in _FOLDS.items():
    if (recovery := block.get(key)) is not None:
      fold(result, recovery)
  largest = 0.0
  for part in linears:
    wide = result[part]
    if add_bias:
      wide.setdefault("bias", jnp.zeros(wide["weight"].shape[0], jnp.float64))
    # The only rounding: all folding before it is in float64.
    result[part] = {key: array.astype(dtype) for key, array in wide.items()}
    error = result[part]["weight"].astype(jnp.float64) - wide["weight"]
    norm = float(jnp.linalg.norm(wide["weight"]))
    largest = max(largest, float(jnp.linalg.norm(error)) / norm if norm else 0.0)
  return result, largest


def effective_params(
  params: Mapping[str, Any],
  config: ModelConfig,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[dict[str, Any], ModelConfig, float]:
  """Converts quantized weights to a float model without maps, tables and recovery.

  New weights and biases have `dtype`. Returns float params, their config with the
  biases that recoveries need, and the largest relative Frobenius error of a linear from
  rounding to `dtype`.
  """
  present = features.features_of(params)
  # Qwen2 has a bias on v already; others get one by `attention_bias`, which gives it to
  # q, k and o as well.
  values_need_bias = "value-recovery" in present and not config.qkv_bias
  new_config = dataclasses.replace(
    config,
    attention_bias=config.attention_bias or values_need_bias,
    mlp_bias=config.mlp_bias or "mlp-recovery" in present,
  )
  # A config's flag promises a bias on every linear of the block, zero where nothing is
  # folded.
  biased = {"self_attn": new_config.attention_bias, "mlp": new_config.mlp_bias}
  result: dict[str, Any] = {}
  largest = 0.0
  for key, value in params.items():
    if not key.startswith("layers_"):
      result[key] = value
      continue
    result[key] = dict(value)
    for name, add_bias in biased.items():
      with precision.float64_scope():
        result[key][name], error = _effective_block(value[name], add_bias, dtype)
      largest = max(largest, error)
  return result, new_config, largest


def write_dequant(
  out: str | os.PathLike[str],
  source: folder.Source,
  companions: folder.Companions = folder.NO_COMPANIONS,
  *,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  shard_bytes: int = folder.SHARD_BYTES,
) -> pathlib.Path:
  """Writes a folder that any Hugging Face loader reads; see `write_folder`.

  The linears have `dtype`: bfloat16, or float32 to avoid a second rounding.

  Raises:
    FileExistsError: The folder is not empty.
    NotImplementedError: The family's config cannot describe the model.
    ValueError: A recovery needs a bias that the family lacks.
  """
  check(source.params, source.config)
  present = features.features_of(source.params)
  params, config, error = effective_params(source.params, source.config, dtype)
  plain = dataclasses.replace(source, params=params, config=config)
  values = folder.hf_values(plain, companions)
  foldable = ("maps", "value-recovery", "mlp-recovery")
  return folder.write_folder(
    out,
    FORMAT,
    plain,
    companions,
    {tensor_name(path): leaf for path, leaf in features.nodes(params)},
    json_files={"config.json": values | {"torch_dtype": str(jnp.dtype(dtype))}},
    details={
      "activations": "not rounded: this folder computes weight-only quantization",
      "folded_into_weights": [name for name in foldable if name in present],
      "without_meaning_here": [n for n in ("refinement", "clipping") if n in present],
      "dtype": str(jnp.dtype(dtype)),
      "largest_relative_rounding_error": error,
    },
    shard_bytes=shard_bytes,
  )
