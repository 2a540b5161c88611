"""TORQ: a rotation across blocks, a rotation inside blocks, then GPTQ.

The original reshapes every token to blocks by positions, equalizes the blocks' energy
by plane rotations, then rotates pairs of positions until the eight magnitudes are used
evenly; it has no GPTQ. Like the paper, we append strict GPTQ.

This follows a public port, not the authors' code, with one correction: the angle that
equalizes a pair, which in print diagonalizes it. Assumptions: linears that read one
tensor share a pair of rotations; the energy tolerance is relative; the 8192 rows come
from tokens evenly spaced over the calibration set; a pair's loss is evaluated exactly
at 4096 evenly spaced angles instead of random midpoints. The published results are
close to RTN's, so expect no more.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.gptq import Gptq
from mxjax.methods.options import Positive
from mxjax.methods.program import Shaping
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.shaping import input_maps, two_level


@execution.jit()
def _pooled(blocks: jax.Array, inter: jax.Array) -> jax.Array:
  mixed = jnp.einsum("ab,akn->bkn", inter, blocks, precision=HIGHEST)
  return jnp.moveaxis(mixed, 1, 0).reshape(mxfp4.BLOCK_SIZE, -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torq(Gptq):
  """Two-level rotation, then GPTQ.

  Attributes:
    name: The name in results.
    rows: Blocks of inputs, over all tokens, to which the inner rotation is fitted.
  """

  name: str = "torq"
  rows: Positive = 8192

  @override
  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    """Fits both rotations once for the linears that read one tensor.

    The first of these linears has the record of the fit.
    """
    del weight
    record: dict[str, Any] = {}

    def inter() -> jax.Array:
      covariance = execution.block_on_cpu(two_level.block_covariance(inputs.hessian()))
      rotation, deviation = execution.block_on_cpu(two_level.equalize(covariance))
      record["energy_deviation"] = float(deviation)
      return rotation.astype(jnp.float32)

    # On blocks as they are after the first rotation.
    def intra() -> jax.Array:
      # Every token gives a row for each of its blocks.
      sample = inputs.sample(max(1, self.rows // inputs.blocks))
      rotation, losses = two_level.even_out(_pooled(sample, across), inputs.rules)
      record["occupancy_losses"] = losses
      return jnp.asarray(rotation, jnp.float32)

    # The rotations depend on the encoder's rules, so the cache key includes them.
    rules = f"{inputs.rules.scale_rule}_{inputs.rules.tie_rule}_{self.rows}"
    across = inputs.cached("torq_inter", inter)
    within = inputs.cached(f"torq_intra_{rules}", intra)
    return Shaping(input_maps.TwoLevel(across, within), record)

  @override
  def stored_map(self, blocks: int) -> input_maps.TwoLevel:
    rotation: Any = lambda n: jax.ShapeDtypeStruct((n, n), jnp.float32)
    return input_maps.TwoLevel(rotation(blocks), rotation(mxfp4.BLOCK_SIZE))


TORQ = Torq()
