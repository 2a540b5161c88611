"""The `Program` base class: the hooks that define a PTQ method, run by one pipeline."""

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
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Contract
from mxjax.numerics.realization import activation_quantizers, gptq
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import InputMap


class Realized(NamedTuple):
  """Legal codes in the installed coordinates, and the dynamic A4 rule.

  `correction`, `[blocks, 32, 32]`, multiplies mapped inputs if it is given.
  """

  weight: gptq.Reconstruction
  rounding: activation_quantizers.ActivationQuantizer
  correction: jax.Array | None = None


class Prepared(NamedTuple):
  """Result of `prepare`: the float model of this run, and what was learned.

  Operator error is measured against `params`. Hooks get `learned`, keyed by path such
  as `layers_0/self_attn/q_proj`, as `inputs.learned`; `record` is JSON for the report.
  """

  params: Params
  learned: Mapping[str, Any] = {}
  record: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Base program: no map, round to nearest, no recovery.

  Attributes:
    name: The name in results.
    recover: Recovery fits in order, each measured on the state left by the one before.
    upstream: Whether hooks see the inputs of the float model (reading A22) or those
      that the layers quantized so far produce.
    recovery_by: With `model`, each fit covers the whole model before the next begins
      (reading A16); with `layer`, all fits of a layer finish before the next layer.
    weighting: Whether tokens count equally in the moments that hooks see, or by their
      Fisher information, for which the model is differentiated once; see `fisher`.
    staged: Dtype in which captured activations, the inputs of linears and what recovery
      fits take from the float model, are kept between passes (reading A15): that of
      the computation, or float16, whose overflow is refused.
    tune: Scale distillation after everything else, or None.
  """

  name: str = "rtn"
  recover: tuple[RecoveryFit, ...] = ()
  upstream: Literal["float", "quantized"] = "float"
  recovery_by: Literal["model", "layer"] = "model"
  weighting: Literal["uniform", "fisher"] = "uniform"
  staged: Literal["compute", "float16"] = "compute"
  tune: ScaleDistillation | None = None

  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    """Rewrites the float model, keeping its function, or learns; runs first."""
    del calib, contract
    return Prepared(params)

  def shape_group(self, weights: Mapping[str, jax.Array], inputs: LinearInputs) -> Any:
    """Learns what linears that read one tensor share, before each is shaped.

    `weights` are float32 `[blocks, 32, out_features]` by linear name. `shape` and
    `quantize_weight` get the result as `inputs.group`; None by default.
    """
    del weights, inputs

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> InputMap | None:
    """Chooses the input map of one linear, or None for native coordinates.

    `weight` is feature-major, float32 `[blocks, 32, out_features]`.
    """
    del weight, inputs
    return None

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realized:
    """Chooses legal W4 codes and the A4 rule in the installed coordinates.

    `weight` is folded, float32 `[blocks, 32, out_features]`; `inputs` are in native
    coordinates, and `input_map` conjugates their Hessian.
    """
    del input_map
    codes = gptq.round_to_nearest(weight, inputs.rules)
    return Realized(codes, activation_quantizers.Nearest())

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """Runs `shape`, folds, and runs `quantize_weight`; override it to interleave them.

    `weight` is `[out_features, in_features]`; the returned leaf replaces it.
    """
    blocks = mxfp4.weight_blocks(weight)
    input_map = self.shape(blocks, inputs)
    with execution.one_lapack_thread():
      folded = fold(blocks, input_map)
    codes, rounding, correction = self.quantize_weight(folded, inputs, input_map)
    if correction is not None:
      input_map = input_maps.followed(input_map, correction)
    return QuantizedLinear(pack(codes), input_map, rounding, rules=inputs.rules)

  def describe(self) -> Mapping[str, Any]:
    """Returns name and options, JSON-ready, for results and checkpoints."""
    options = {
      field.name: getattr(self, field.name) for field in dataclasses.fields(self)
    }
    del options["name"], options["recover"], options["tune"]
    plain_options = {"staged": "compute", "two_sided": False, "refit_maps": False}
    plain_options |= {"changes": 0, "rounds_up": False}
    for name, plain in plain_options.items():
      if options.get(name) == plain:
        del options[name]  # Older runs and rows do not name it.
    for name, value in options.items():
      if isinstance(value, float) and not math.isfinite(value):
        options[name] = str(value)  # For strict JSON.
    if self.tune is not None:
      options["tune"] = dataclasses.asdict(self.tune)
    recover = [fit.label for fit in self.recover]
    return {"name": self.name, "recover": recover, "options": options}


@jax.jit
def pack(result: gptq.Reconstruction) -> mxfp4.MXTensor:
  """Packs legal codes into an `MXTensor` `[out_features, in_features]`."""
  return result.tensor()


@execution.jit()
def fold(blocks: jax.Array, input_map: InputMap | None) -> jax.Array:
  """Folds weights into a map's coordinates; computes in float64, returns float32."""
  if input_map is None:
    return blocks
  return input_map.fold(blocks.astype(jnp.float64)).astype(jnp.float32)


RTN = Program()
"""RTN: strict rounding of weights and activations, without calibration data."""
