"""RTN with one gain for every linear: a control, not a method of the paper.

The floor rule clips the largest values of most blocks, so every product comes out
slightly small, and part of a recovery's benefit may be undoing just that. This program
fits only one least-squares factor on each linear's outputs, from the float model's
inputs. Compare RTN under `even`, which does not shrink.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.program import LinearResult, Program
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization import gptq


def _gain_step(
  carry: jax.Array, blocks: jax.Array, _: jax.Array, rules: mxfp4.Rules, *weights: Any
) -> jax.Array:
  """Adds <y, y^> and <y^, y^> of a sequence's outputs for (weight, decoded codes)."""
  weight, decoded = weights
  flat = lambda a: a.reshape(-1, a.shape[-1])
  outputs = lambda x, w: jnp.einsum("dn,dm->nm", flat(x), flat(w), precision=HIGHEST)
  exact = outputs(blocks, weight)
  rounded = outputs(mxfp4.round_blocks(blocks, rules), decoded)
  sums = jnp.stack([(exact * rounded).sum(), jnp.square(rounded).sum()])
  return carry + sums.astype(jnp.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RtnGain(Program):
  """RTN, and the gain of each linear that fits its float outputs best."""

  name: str = "rtn+gain"

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    """See `Program.quantize_linear`."""
    leaf, record = super().quantize_linear(weight, inputs)
    blocks = mxfp4.weight_blocks(weight)
    rounded = execution.block_on_cpu(gptq.round_to_nearest(blocks, inputs.rules))
    zeros = jnp.zeros(2, jnp.float64)
    product, square = inputs.reduce(_gain_step, zeros, blocks, rounded.decoded)
    gain = jnp.where(square > 0, product / jnp.where(square > 0, square, 1.0), 1.0)
    return LinearResult(
      dataclasses.replace(leaf, gain=gain.astype(jnp.float32)), record
    )


RTN_GAIN = RtnGain()
"""Measures how much of a recovery's benefit is the floor rule's shrinkage."""
