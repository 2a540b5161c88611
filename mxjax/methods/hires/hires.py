"""Composes HiRes, the frozen quantizer of the paper, of its three stages.

Read `stage1`, `stage2` and `stage3` beside this file in that order: they are geometric
shaping, discrete realization and structural recovery. `next` composes the same
functions to the quantizers that go past the paper.

Paper: Section HiRes and Algorithm hiresmx.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.errors import ValueRefusal
from mxjax.methods.hires import stage1, stage2
from mxjax.methods.hires.stage3 import ATTENTION, MLP
from mxjax.methods.options import Share
from mxjax.methods.program import Program, Realization, Shaping
from mxjax.methods.recovery import RecoveryFit
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import InputMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiRes(Program):
  """The frozen three-stage quantizer; each option is one row of an ablation.

  Whatever `weights`, `rounding` and `damping` are, trials of the balance encode as the
  frozen quantizer does: GPTQ with damping .01 and the full rule.

  Attributes:
    use_interaction: Fit K; off means G = I.
    use_balance: Try D; off means D = I.
    weights: Reconstruct with `gptq`, or round with `rtn`.
    rounding: Round activations by the `full` one-code rule, by its `sensitivity` term
      alone (K_Q = 0), or to the `nearest` code.
    damping: Relative damping of GPTQ.
    storage: Dtype of the stored maps and one-code tables, float32 in the paper. Its
      bfloat16 halves both; a map is rounded before the weights are folded by it.
  """

  name: str = "hires"
  # In this order: the MLP is measured with attention's correction installed.
  recover: tuple[RecoveryFit, ...] = (ATTENTION, MLP)
  use_interaction: bool = True
  use_balance: bool = True
  weights: Literal["gptq", "rtn"] = "gptq"
  rounding: stage2.ActivationRule = "full"
  damping: Share = gptq.DAMPING
  storage: Literal["float32", "bfloat16"] = "float32"
  a4_options = ("rounding",)
  compiles_together: ClassVar[bool] = True

  def __post_init__(self) -> None:
    if self.weights == "rtn" and self.damping != gptq.DAMPING:
      raise ValueRefusal(
        self.name,
        expected="no damping for weights=rtn, which rounds to nearest",
        got=f"damping={self.damping}",
        mend="use weights=gptq, or leave damping out",
      )

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    """Stage I: finds T from chart and interaction, then D from three trials."""
    return stage1.shape(
      weight,
      inputs,
      use_interaction=self.use_interaction,
      use_balance=self.use_balance,
      dtype=jnp.dtype(self.storage),
    )

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realization:
    """Stage II: runs GPTQ in the installed coordinates and builds one-code tables."""
    return stage2.realize(
      weight,
      inputs,
      input_map,
      weights=self.weights,
      rounding=self.rounding,
      damping=self.damping,
      storage=self.storage,
    )

  @override
  def stored_map(self, blocks: int) -> InputMap:
    return input_maps.dense_like(blocks, self.storage)

  @override
  def stored_rounding(self, blocks: int) -> ActivationQuantizer:
    return stage2.stored_rule(blocks, self.rounding, self.storage)


HIRES = HiRes()
