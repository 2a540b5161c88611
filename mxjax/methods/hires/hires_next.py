"""HiRes with two changes to how weights are realized; nothing else differs from it.

Exponents of weight blocks are searched: the floor rule clips what lies between 6 and 8
times the scale, and a block's compensated errors say whether that costs more than the
coarser codes of the next exponent. After GPTQ all codes are decided again by coordinate
descent on the same objective, now knowing the errors of all other columns. Both are
paid once, when a model is quantized; payload, maps, activation rule and recovery have
the form and the cost of HiRes. Not in the paper: `docs/results/hires_next.md` says what
it gains and what else was tried.
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
class HiResNext(HiRes):
  """See the module.

  Attributes:
    descent: Passes of coordinate descent over a linear's columns.
  """

  name: str = "hires-next"
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


HIRES_NEXT = HiResNext()
