r"""A plain Hugging Face folder whose linears hold the effective weight.

.. math::
  W_{\mathrm{eff}} = \operatorname{decode}(\tilde W)\, T

It loads everywhere and is no faster than the float model. Activations are not rounded:
what the folder computes is weight-only quantization, so its perplexity is not that of
the strict W4A4 model, and one-code tables and clipping, which act on activations, have
no meaning in it. Recoveries are linear in the outputs they correct and go into rows
and biases, where the family's config knows such biases.
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
from mxjax.models.families.hf_config_write import WITH_ATTENTION_BIAS, WITH_MLP_BIAS
from mxjax.models.loading.weights import tensor_name
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.storage.atomic_io import staged, write_json
from mxjax.storage.export import features
from mxjax.storage.export.folder import (
  SHARD_BYTES,
  Companions,
  Source,
  hf_values,
  write_companions,
  write_manifest,
  write_tensors,
)

FORMAT = "dequant"


def cannot_hold(params: Mapping[str, Any], config: ModelConfig) -> dict[str, list[str]]:
  """Recoveries that would need a bias which the family's config does not know."""
  found = features.held(params)
  values_have_bias = (
    config.attention_bias or config.qkv_bias or config.family in WITH_ATTENTION_BIAS
  )
  mlp_has_bias = config.mlp_bias or config.family in WITH_MLP_BIAS
  lacking = {"value-recovery": not values_have_bias, "mlp-recovery": not mlp_has_bias}
  return {name: paths for name, paths in found.items() if lacking.get(name)}


def check(params: Mapping[str, Any], config: ModelConfig) -> None:
  """Refuses a model that the format cannot hold.

  Raises:
    ValueError: A recovery needs a bias that the family does not know.
  """
  place = f"{FORMAT} of the family {config.family}"
  features.refuse(place, cannot_hold(params, config))


def _wide(leaf: Any) -> jax.Array:
  """A weight or bias in float64, maps and gains in it."""
  if isinstance(leaf, QuantizedLinear):
    return features.effective_weight(leaf)
  if isinstance(leaf, mxfp4.MXTensor):
    leaf = mxfp4.decode(leaf, jnp.float32)
  return leaf.astype(jnp.float64)


def _scale_linear(linear: dict[str, Any], scale: jax.Array, offset: jax.Array) -> None:
  """Outputs y become scale * y + offset, both `[out_features]` or scalars."""
  rows = linear["weight"].shape[0]
  scale = jnp.broadcast_to(scale.astype(jnp.float64), (rows,))
  offset = jnp.broadcast_to(offset.astype(jnp.float64), (rows,))
  linear["weight"] = linear["weight"] * scale[:, None]
  linear["bias"] = linear.get("bias", jnp.zeros(rows, jnp.float64)) * scale + offset


def _fold_values(block: dict[str, Any], recovery: ValueRecovery) -> None:
  linear = block["v_proj"]
  repeat = linear["weight"].shape[0] // recovery.scale.shape[0]
  _scale_linear(
    linear, jnp.repeat(recovery.scale, repeat), jnp.repeat(recovery.offset, repeat)
  )


def _fold_mlp(block: dict[str, Any], recovery: MlpRecovery) -> None:
  one, none = jnp.float64(1), jnp.zeros((), jnp.float64)
  wide = lambda scalar: scalar.astype(jnp.float64)
  shift = wide(recovery.gate_shift) * wide(recovery.gate_deviation)
  _scale_linear(block["gate_proj"], one + wide(recovery.gate_scale), shift)
  _scale_linear(block["up_proj"], one + wide(recovery.up_scale), none)


def _flat_layer(layer: Mapping[str, Any], biased: Mapping[str, bool]) -> dict[str, Any]:
  """A float64 layer with everything folded into weights and biases."""
  new: dict[str, Any] = {}
  folded: dict[str, dict[str, Any]]
  for name, block in layer.items():
    if name not in ("self_attn", "mlp"):
      new[name] = block
      continue
    folded = {
      part: (
        {key: _wide(leaf) for key, leaf in value.items()}
        if part.endswith("_proj")
        else dict(value)
      )
      for part, value in block.items()
      if isinstance(value, Mapping)
    }
    for fold, recovery in (
      (_fold_values, block.get("value_recovery")),
      (_fold_mlp, block.get("mlp_recovery")),
    ):
      if recovery is not None:
        fold(folded, recovery)
    for part, linear in folded.items():
      if part.endswith("_proj") and biased[name] and "bias" not in linear:
        linear["bias"] = jnp.zeros(linear["weight"].shape[0], jnp.float64)
    new[name] = folded
  return new


def _add_biases(params: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
  """The config of the folded model: recoveries may bring biases."""
  found = features.held(params)
  bias = config.attention_bias
  if "value-recovery" in found and not (bias or config.qkv_bias):
    bias = True
  return dataclasses.replace(
    config,
    attention_bias=bias,
    mlp_bias=config.mlp_bias or "mlp-recovery" in found,
  )


def effective_params(
  params: Mapping[str, Any],
  config: ModelConfig,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[dict[str, Any], ModelConfig, float]:
  """A float model of the quantized weights: no map, no table, no recovery leaf.

  Args:
    params: Quantized params.
    config: Their config.
    dtype: Of the new weights and biases.

  Returns:
    Float params, their config, which may have biases that the other had not, and the
    largest relative Frobenius error that rounding to `dtype` left on a linear.
  """
  new_config = _add_biases(params, config)
  biased = {"self_attn": new_config.attention_bias, "mlp": new_config.mlp_bias}
  result: dict[str, Any] = {}
  largest = 0.0
  for key, value in params.items():
    if not key.startswith("layers_"):
      result[key] = {
        name: mxfp4.decode(leaf) if isinstance(leaf, mxfp4.MXTensor) else leaf
        for name, leaf in value.items()
      }
      continue
    with precision.float64_scope():
      layer = _flat_layer(value, biased)
      for name in ("self_attn", "mlp"):
        for part, linear in layer[name].items():
          if not part.endswith("_proj"):
            continue
          exact = linear["weight"]
          layer[name][part] = {k: a.astype(dtype) for k, a in linear.items()}
          error = layer[name][part]["weight"].astype(jnp.float64) - exact
          norm = float(jnp.linalg.norm(exact))
          largest = max(largest, float(jnp.linalg.norm(error)) / norm if norm else 0.0)
    result[key] = layer
  return result, new_config, largest


def write_dequant(
  out: str | os.PathLike[str],
  source: Source,
  companions: Companions | None = None,
  *,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
  shard_bytes: int = SHARD_BYTES,
) -> pathlib.Path:
  """Writes a folder that any Hugging Face loader reads.

  Args:
    out: A new folder.
    source: The model.
    companions: Where tokenizer and config come from.
    dtype: Of the linears: bfloat16, or float32 where a second rounding is unwanted.
    shard_bytes: The largest shard.

  Returns:
    The folder.

  Raises:
    FileExistsError: The folder has something in it.
    NotImplementedError: The family's config cannot describe the model.
    ValueError: A recovery needs a bias that the family does not know.
  """
  companions = companions or Companions()
  check(source.params, source.config)
  found = features.held(source.params)
  params, config, error = effective_params(source.params, source.config, dtype)
  plain = dataclasses.replace(source, params=params, config=config)
  values = hf_values(plain, companions) | {"torch_dtype": str(jnp.dtype(dtype))}
  tensors = {tensor_name(path): leaf for path, leaf in features.nodes(params)}
  with staged(out) as folder:
    write_tensors(folder, tensors, shard_bytes=shard_bytes)
    write_json(folder / "config.json", values)
    write_companions(folder, config, companions)
    foldable = ("maps", "gains", "value-recovery", "mlp-recovery")
    details = {
      "activations": "not rounded: this folder computes weight-only quantization",
      "folded_into_weights": [name for name in foldable if name in found],
      "without_meaning_here": [n for n in ("refinement", "clipping") if n in found],
      "dtype": str(jnp.dtype(dtype)),
      "largest_relative_rounding_error": error,
    }
    write_manifest(folder, FORMAT, source, details)
  return pathlib.Path(out)
