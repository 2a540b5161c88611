"""HiRes with two changes in how weights are quantized.

Exponents of weight blocks are searched: the floor rule clips values between 6 and 8
times the scale, and a block's compensated errors decide whether that costs more than
the coarser codes of the next exponent. After GPTQ, coordinate descent revisits all
codes on the same objective, now knowing the errors of all other columns. Both cost only
quantization time; payload, maps, activation rule and recovery keep the form and cost of
HiRes. Not in the paper: see `docs/results/hires_next.md` for gains and rejected ideas.
"""

import dataclasses

import jax

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods.gptq import reconstruct
from mxjax.methods.hires.hires import HiRes, activation_rule
from mxjax.methods.program import Realized
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping.input_maps import InputMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiResDescent(HiRes):
  """HiRes with searched exponents and `descent` passes of coordinate descent."""

  name: str = "hires-descent"
  scales: gptq.ScaleSource = "searched"
  descent: int = 3

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realized:
    """Stage II: GPTQ, descent from its codes, then the one-code tables."""
    if self.weights != "gptq":
      return super().quantize_weight(weight, inputs, input_map)
    result = reconstruct(
      weight, inputs, input_map, self.damping, scales=self.scales, descent=self.descent
    )
    return Realized(result, activation_rule(weight, result.decoded, self.rounding))


HIRES_DESCENT = HiResDescent()
