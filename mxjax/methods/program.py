"""A PTQ program: the hooks that every quantizer is made of.

RTN, GPTQ, HiRes and every ablation of it are programs, run by one pipeline under one
contract. Nothing is special-cased by name.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.recovery_fits import RecoveryFit
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Contract
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Nearest,
)
from mxjax.numerics.shaping.input_maps import InputMap


class Realized(NamedTuple):
  """What `quantize_weight` returns: legal weights and the activation rule.

  Attributes:
    weight: Legal codes of the weights in the installed coordinates.
    rounding: The dynamic A4 rule.
  """

  weight: gptq.Reconstruction
  rounding: ActivationQuantizer


class Prepared(NamedTuple):
  """What `prepare` returns.

  Attributes:
    params: The float model of this run: its inputs calibrate, and operator error is
      measured against it.
    learned: What hooks get as `inputs.learned`, by path such as
      `layers_0/self_attn/q_proj`.
    record: What the report should show, JSON-ready.
  """

  params: Params
  learned: Mapping[str, Any] = {}
  record: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Base program: no map, round to nearest, no recovery.

  Attributes:
    name: How results name it.
    recover: Recovery fits in order, each measured on the state the previous left.
    upstream: Whether hooks see the inputs of the float model (reading A22) or those
      that the layers quantized so far produce.
    recovery_by: Each fit over the whole `model` before the next begins (reading A16),
      or all fits of a `layer` before the next layer is reached.
  """

  name: str = "rtn"
  recover: tuple[RecoveryFit, ...] = ()
  upstream: Literal["float", "quantized"] = "float"
  recovery_by: Literal["model", "layer"] = "model"

  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    """Rewrites the float model, or learns end to end, before anything else.

    Args:
      params: Float params.
      calib: Model and tokens.
      contract: The contract that realization will follow.

    Returns:
      A float model of the same function, and what was learned.
    """
    del calib, contract
    return Prepared(params)

  def shape_group(self, weights: Mapping[str, jax.Array], inputs: LinearInputs) -> Any:
    """Learns what the linears that read one tensor share, before each is shaped.

    Args:
      weights: Their float weights by name, float32 `[blocks, 32, out_features]`.
      inputs: Their calibration inputs.

    Returns:
      Available to `shape` and `quantize_weight` as `inputs.group`; None by default.
    """
    del weights, inputs

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> InputMap | None:
    """Chooses the input map of one linear.

    Args:
      weight: Float weights, float32 `[blocks, 32, out_features]`, feature-major.
      inputs: The linear's calibration inputs.

    Returns:
      A map of `input_maps`, or None for the native coordinates.
    """
    del weight, inputs
    return None

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realized:
    """Chooses legal W4 codes and the A4 rule in the installed coordinates.

    Args:
      weight: Folded weights, float32 `[blocks, 32, out_features]`.
      inputs: The linear's calibration inputs in native coordinates; `input_map`
        conjugates their Hessian.
      input_map: What `shape` returned.

    Returns:
      Codes and rounding.
    """
    del input_map
    return Realized(gptq.round_to_nearest(weight, inputs.rules), Nearest())

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """`shape`, fold, `quantize_weight`; overridden where the two interleave.

    Args:
      weight: Float weights, `[out_features, in_features]`.
      inputs: The linear's calibration inputs.

    Returns:
      The leaf that replaces the weight.
    """
    blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
    input_map = self.shape(blocks, inputs)
    folded = execution.block_on_cpu(fold(blocks, input_map))
    realized = self.quantize_weight(folded, inputs, input_map)
    return QuantizedLinear(
      weight=pack(realized.weight),
      input_map=input_map,
      rounding=realized.rounding,
      rules=inputs.rules,
    )

  def describe(self) -> Mapping[str, Any]:
    """Name and options, JSON-ready, for results and checkpoints."""
    options = {
      field.name: _plain(getattr(self, field.name))
      for field in dataclasses.fields(self)
      if field.name not in ("name", "recover")
    }
    return {
      "name": self.name,
      "recover": [fit.name for fit in self.recover],
      "options": options,
    }


def _plain(value: Any) -> Any:
  """A value as strict JSON has it: infinity becomes its name."""
  is_odd = isinstance(value, float) and not math.isfinite(value)
  return str(value) if is_odd else value


@jax.jit
def pack(result: gptq.Reconstruction) -> mxfp4.MXTensor:
  """Packs legal codes to an `MXTensor` `[out_features, in_features]`."""
  return result.tensor()


@jax.jit
def fold(blocks: jax.Array, input_map: InputMap | None) -> jax.Array:
  """Folds weights into a map's coordinates: solved in float64, returned in float32."""
  if input_map is None:
    return blocks
  return input_map.fold(blocks.astype(jnp.float64)).astype(jnp.float32)
