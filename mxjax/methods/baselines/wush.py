"""WUSH: a closed-form transform of every block, found while the weights are rounded.

The original rounds blocks from last to first. At each block it builds a transform from
the Cholesky factor of the Hessian and the singular vectors of the compensated weights,
which makes inputs and weights flat and equally large, and rounds the block in that
basis by nearest planes: GPTQ from the last column to the first. Everything runs in
float64; T is rounded to bfloat16 as stored.

Our contract changes the codec: its exponents and ties replace scales 2^E / 3 and ties
to even. Assumptions: inputs come from the float model (the original propagates
quantized ones), and a Hessian that is not definite is damped ten times more, which is
recorded, instead of up to 100 equal increments.

WUSH+R has the same geometry and codes with HiRes's one-code rule and recovery.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.gptq import not_definite
from mxjax.methods.hires.stage2 import ActivationRule, activation_rule, stored_rule
from mxjax.methods.hires.stage3 import ATTENTION, MLP
from mxjax.methods.options import Share
from mxjax.methods.program import LinearResult, Program, fold, pack
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping import input_maps, nearest_plane


def damped_factor(
  inputs: LinearInputs, damping: float = gptq.DAMPING
) -> tuple[jax.Array, float]:
  """Returns R of the damped Hessian, float64 `[d, d]`, upper triangular, and damping.

  Raises:
    ValueError: No damping tried made the Hessian positive definite.
  """
  hessian = inputs.hessian().astype(jnp.float64)
  for attempt in range(gptq.DAMPING_TRIES):
    used = damping * gptq.DAMPING_GROWTH**attempt
    factor = execution.block_on_cpu(
      nearest_plane.upper_cholesky(hessian, jnp.float64(used))
    )
    if bool(jnp.isfinite(factor).all()):
      return factor, used
  raise not_definite(inputs, damping)


def round_blocks(
  weight: jax.Array,
  factor: jax.Array,
  rules: mxfp4.Rules,
  basis: nearest_plane.Basis,
  dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[gptq.Reconstruction, jax.Array]:
  """Rounds a linear from its last block to its first, each in its own basis.

  `weight` is `[blocks, 32, out_features]`, `factor` R of the damped Hessian, float64
  `[d, d]`. Returns legal codes in the transformed coordinates (decoded in float64), and
  the transforms, `dtype` `[blocks, 32, 32]`.
  """
  blocks, size, rows = weight.shape
  # Copy because the residual's buffer is donated block by block.
  residual = jnp.array(weight.reshape(blocks * size, rows), jnp.float64, copy=True)
  rounded, transforms = [], []
  # A loop of calls and no scan: every block factors and multiplies, which rule 2 of
  # `mxjax.devices.execution` keeps in functions of their own.
  for index in reversed(range(blocks)):
    block = jnp.int32(index)
    target = execution.block_on_cpu(nearest_plane.target(factor, residual, block))
    lattice = execution.block_on_cpu(
      nearest_plane.plane(target.gram, target.factor, rows, basis, dtype)
    )
    residual, result = execution.block_on_cpu(
      nearest_plane.round_block(residual, target.value, lattice, block, rules)
    )
    rounded.append(gptq.Reconstruction(*result))
    transforms.append(lattice.transform)
  result = jax.tree.map(lambda *leaves: jnp.stack(leaves[::-1]), *rounded)
  return result, jnp.stack(transforms[::-1]).astype(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wush(Program):
  """WUSH, or WUSH+R with `rounding="full"` and recovery.

  Attributes:
    basis: `wush`, or one of the original's ablated variants.
    rounding: Round activations to the nearest code or by a one-code rule.
    transform_dtype: Dtype of the stored transforms.
    damping: Relative damping of the Hessian.
  """

  name: str = "wush"
  basis: nearest_plane.Basis = "wush"
  rounding: ActivationRule = "nearest"
  transform_dtype: Literal["bfloat16", "float32"] = "bfloat16"
  damping: Share = gptq.DAMPING
  a4_options = ("rounding",)

  @override
  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    blocks = mxfp4.weight_blocks(weight)
    factor, damping = damped_factor(inputs, self.damping)
    result, transforms = round_blocks(
      blocks, factor, inputs.rules, self.basis, jnp.dtype(self.transform_dtype)
    )
    input_map = input_maps.BlockDense(transforms)
    decoded = result.decoded.astype(jnp.float32)
    rounding = activation_rule(fold(blocks, input_map), decoded, self.rounding)
    leaf = QuantizedLinear(pack(result), input_map, rounding, rules=inputs.rules)
    return LinearResult(leaf, {"damping": damping})

  @override
  def stored_map(self, blocks: int) -> input_maps.InputMap:
    return input_maps.dense_like(blocks, self.transform_dtype)

  @override
  def stored_rounding(self, blocks: int) -> ActivationQuantizer:
    return stored_rule(blocks, self.rounding)


WUSH = Wush()
WUSH_R = Wush(name="wush+r", rounding="full", recover=(ATTENTION, MLP))
