"""The payload from `fit` to `measure`: packed operands as bytes, without pickles."""

import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.tasks.ptq.interface import OF_LINEARS, PASSES
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Nearest,
)
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps

RECOVERIES: Mapping[tuple[str, str], type] = {
  ("self_attn", "value_recovery"): ValueRecovery,
  ("mlp", "mlp_recovery"): MlpRecovery,
}
"""Recovery leaves by block and name."""
DECIDED = {
  "arrange": ("order",),
  **{hook.name: ("map",) for hook in PASSES},
  "transform": ("map",),
  "balance": ("map",),
  "encode_weight": ("codes", "scales"),
  **{hook.name: ("codes", "scales") for hook in OF_LINEARS},
  "tables": ("gram", "cross"),
  **dict.fromkeys(("measure_value", "recover_value"), ("value_recovery",)),
  **dict.fromkeys(("measure_mlp", "recover_mlp"), ("mlp_recovery",)),
}
"""Fields or leaves whose content each hook decides."""


class Place(NamedTuple):
  """One typed leaf of the model: a linear's operands or a recovery fit."""

  layer: int
  block: str
  leaf: str

  def __str__(self) -> str:
    """Returns the name of its arrays in payloads and error messages."""
    return "/".join(map(str, self))


Operands = Mapping[Place, Mapping[str, Any]]
"""Arrays of each leaf by field."""


def of_params(params: Mapping[str, Any], model: Any) -> Operands:
  """Extracts the operands of a quantized model."""
  operands = {}
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    for block, name in model.projection_taps:
      operands[Place(index, block, name)] = _of_linear(layer[block][name]["weight"])
    for block, name in RECOVERIES:
      if (leaf := layer[block].get(name)) is not None:
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        operands[Place(index, block, name)] = fields
  return operands


def _of_linear(leaf: QuantizedLinear) -> dict[str, Any]:
  arrays: dict[str, Any] = {"codes": leaf.weight.codes, "scales": leaf.weight.scales}
  if leaf.input_map is not None:
    arrays["map"] = leaf.input_map.matrix  # pyright: ignore[reportAttributeAccessIssue]
  if (tables := leaf.rounding.tables()) is not None:
    arrays |= dict(zip(("gram", "cross"), tables, strict=True))
  return arrays


def to_params(
  operands: Operands,
  params: Mapping[str, Any],
  model: Any,
  rule: Callable[[Any, Any], ActivationQuantizer],
) -> dict[str, Any]:
  """Returns the float params with the leaves described by the operands of `of_params`.

  `rule` makes the A4 rule of a leaf with tables from these.

  Raises:
    ValueError: Codes or scales are not legal MXFP4.
  """
  result = dict(params)
  for index in range(model.num_layers):
    name = model.layer_name(index)
    layer = {block: dict(leaves) for block, leaves in params[name].items()}
    for block, leaf in model.projection_taps:
      place = Place(index, block, leaf)
      linear = _to_linear(operands[place], rule)
      mxfp4.check_legal(linear.weight, str(place))
      layer[block][leaf] = {**layer[block][leaf], "weight": linear}
    for (block, leaf), kind in RECOVERIES.items():
      if (arrays := operands.get(Place(index, block, leaf))) is not None:
        layer[block][leaf] = kind(**arrays)
    result[name] = layer
  return result


def _to_linear(
  arrays: Mapping[str, Any], rule: Callable[[Any, Any], ActivationQuantizer]
) -> QuantizedLinear:
  rounding: ActivationQuantizer = Nearest()
  if "gram" in arrays:
    rounding = rule(arrays["gram"], arrays["cross"])
  return QuantizedLinear(
    mxfp4.MXTensor(arrays["codes"], arrays["scales"]),
    input_maps.BlockDense(arrays["map"]) if "map" in arrays else None,
    rounding,  # pyright: ignore[reportArgumentType]
  )


def to_bytes(operands: Operands) -> bytes:
  """Serializes operands as an `.npz` file."""
  buffer = io.BytesIO()
  np.savez(buffer, **_by_name(operands))  # pyright: ignore[reportArgumentType]
  return buffer.getvalue()


def from_bytes(data: bytes) -> Operands:
  """Inverts `to_bytes`; rejects object arrays."""
  operands: dict[Place, dict[str, Any]] = {}
  with np.load(io.BytesIO(data), allow_pickle=False) as file:
    for key in file.files:
      layer, block, leaf, field = key.split("/")
      place = Place(int(layer), block, leaf)
      operands.setdefault(place, {})[field] = jnp.asarray(file[key])
  return operands


def _by_name(operands: Operands) -> dict[str, np.ndarray]:
  return {
    f"{place}/{field}": np.asarray(array)
    for place, arrays in operands.items()
    for field, array in arrays.items()
  }


def digests(operands: Operands) -> dict[str, str]:
  """Returns a digest of each hook's decisions."""
  arrays = sorted(_by_name(operands).items())
  contents = [(key, identity.digest(value.tobytes())) for key, value in arrays]
  return {
    hook: identity.digest(
      # A key is layer/block/leaf/field, so a part may be the name of a leaf or of a
      # field.
      [[key, content] for key, content in contents if set(key.split("/")) & set(parts)]
    )[:16]
    for hook, parts in DECIDED.items()
  }
