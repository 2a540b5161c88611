"""Stage II of HiRes: discrete realization, which chooses legal codes.

Paper: Section HiRes, "Discrete Realization". GPTQ makes the W4 codes with the curvature
of the mapped inputs before A4, and the codes that result guide the rounding of
activations: the one-code rule of Eq. hires-code-score with its tables G_Q and K_Q.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.gptq import reconstruct
from mxjax.methods.program import Realization
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode
from mxjax.numerics.shaping.input_maps import InputMap

ActivationRule = Literal["full", "sensitivity", "nearest"]


def realize(
  weight: jax.Array,
  inputs: LinearInputs,
  input_map: InputMap | None,
  *,
  weights: Literal["gptq", "rtn"] = "gptq",
  rounding: ActivationRule = "full",
  damping: float = gptq.DAMPING,
  storage: Literal["float32", "bfloat16"] = "float32",
) -> Realization:
  """Realizes a linear: W4 codes, then the dynamic A4 rule that fits them.

  Paper: Eq. hires-code-score.

  Args:
    weight: Weights in the map's coordinates, float32 `[blocks, 32, out_features]`.
    inputs: The linear's calibration inputs, in native coordinates.
    input_map: The map of Stage I, which conjugates the inputs' Hessian.
    weights: How W4 codes are chosen: by `gptq`, or the nearest ones, `rtn`.
    rounding: The A4 rule; see `activation_rule`.
    damping: Relative damping of the Hessian.
    storage: Dtype of the one-code tables.

  Raises:
    ValueError: No damping tried made the Hessian positive definite.
  """
  if weights == "rtn":
    codes, record = gptq.round_to_nearest(weight, inputs.rules), {}
  else:
    codes, record = reconstruct(weight, inputs, input_map, damping)
  # After the codes, because the tables are of the decoded weights.
  rule = activation_rule(weight, codes.decoded, rounding)
  if storage == "bfloat16":
    rule = rule.narrowed()
  return Realization(codes, rule, record=record)


def stored_rule(
  blocks: int, rule: ActivationRule, dtype: jax.typing.DTypeLike = jnp.float32
) -> Nearest | OneCode:
  """Returns the `activation_rule` of a linear, with shapes and dtypes but no values."""
  if rule == "nearest":
    return Nearest()
  table: Any = lambda *shape: jax.ShapeDtypeStruct((blocks, *shape), dtype)
  return OneCode(table(one_code.PACKED), table(mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE))


@execution.jit(static_argnames="rule")
def activation_rule(
  weight: jax.Array, decoded: jax.Array, rule: ActivationRule
) -> Nearest | OneCode:
  """Builds the dynamic A4 rule of a linear: nearest, or one-code with its tables.

  Paper: Eq. hires-code-score and Table onecode-rules.

  `weight` is the folded float weight and `decoded` its decoded W4 values, both float32
  `[blocks, 32, out_features]`. The rule `sensitivity` sets K_Q = 0.
  """
  if rule == "nearest":
    return Nearest()
  gram, cross = one_code.tables(weight, decoded)
  if rule == "sensitivity":
    cross = jnp.zeros_like(cross)
  return OneCode(one_code.pack_symmetric(gram), cross)
