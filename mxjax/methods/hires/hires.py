"""HiRes: geometric shaping, discrete realization, structural recovery.

Paper: Section HiRes and Appendix "Algorithm Details". In the order of Algorithm 1,
`shape` is Stage I (chart, interaction, and the balance in `balance`), `quantize_weight`
is Stage II (GPTQ and one-code refinement), `recover` is Stage III.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.gptq import reconstruct
from mxjax.methods.hires import balance, interaction, refit
from mxjax.methods.options import Count, Factor, Share
from mxjax.methods.program import Program, Realized
from mxjax.methods.recovery_fits import ATTENTION, MLP, RecoveryFit
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.realization.activation_quantizers import (
  FewCodes,
  Nearest,
  OneCode,
)
from mxjax.numerics.shaping import input_maps, local_interaction, reference_chart


@execution.jit()
def _weight_moments(weight: jax.Array) -> jax.Array:
  """Computes W'W / m of even and odd rows (A7), float64 `[2, blocks, 32, 32]`."""
  parts = [weight[..., fold::2] for fold in (0, 1)]
  return jnp.stack(
    [reference_chart.block_moment(p) / max(p.shape[-1], 1) for p in parts]
  )


Chart = Literal["reference", "geometric"]


@functools.partial(jax.jit, static_argnames=("kind", "max_condition"))
def _charts(
  moment: jax.Array, weight_moment: jax.Array, *, kind: Chart, max_condition: float
) -> tuple[jax.Array, ...]:
  """Computes P_ref, R_H P_ref and R_H P_ref^-T, float64 `[blocks, 32, 32]`.

  No result is converted in here: with that, this program hung on two busy cores.
  """
  kinds = {
    "reference": reference_chart.reference_chart,
    "geometric": reference_chart.geometric_chart,
  }
  chart = kinds[kind](moment, weight_moment, max_condition=max_condition)
  rotation = input_maps.hadamard(mxfp4.BLOCK_SIZE, jnp.float64)[None]
  return chart, rotation @ chart, rotation @ jnp.linalg.inv(chart).mT


def _mean_moment(folds: jax.Array, rows: int) -> jax.Array:
  """Computes W'W / m over all rows."""
  # On the host: a compiled sum of products may contract and round once less.
  even, odd = np.asarray(folds)
  return jnp.asarray((even * (rows - rows // 2) + odd * (rows // 2)) / rows)


@jax.jit
def spectral_norm(matrices: jax.Array) -> jax.Array:
  """Computes the largest singular value of each matrix, `[..., q, q]` to `[...]`."""
  return jnp.linalg.svd(matrices, compute_uv=False)[..., 0]


ActivationRule = Literal["full", "sensitivity", "nearest"]


@execution.jit(static_argnames="rule")
def activation_rule(
  weight: jax.Array, decoded: jax.Array, rule: ActivationRule
) -> Nearest | OneCode:
  """Builds the dynamic A4 rule of a linear: nearest, or one-code with its tables.

  `weight` is the folded float weight and `decoded` its decoded W4 values, both float32
  `[blocks, 32, out_features]`. The rule `sensitivity` sets K_Q = 0.
  """
  if rule == "nearest":
    return Nearest()
  gram, cross = one_code.tables(weight, decoded)
  if rule == "sensitivity":
    cross = jnp.zeros_like(cross)
  return OneCode(one_code.pack_symmetric(gram), cross)


@execution.jit(static_argnames=("changes", "rounds_up"))
def few_codes_rule(decoded: jax.Array, changes: int, rounds_up: bool) -> FewCodes:
  """Builds the rule of a few codes for weights as in `activation_rule`."""
  gram, _ = one_code.tables(decoded, decoded)
  return FewCodes(one_code.pack_symmetric(gram), changes, rounds_up)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiRes(Program):
  """The frozen three-stage quantizer; each option is one row of an ablation.

  Whatever `weights`, `rounding`, `scales` and `damping` are, trials of the balance
  encode as the frozen quantizer does: GPTQ of fresh exponents, damping .01, full rule.

  Attributes:
    use_interaction: Fit K; off means G = I.
    use_balance: Try D; off means D = I.
    weights: Reconstruct with `gptq`, or round with `rtn`.
    rounding: Round activations by the `full` one-code rule, by its `sensitivity` term
      alone (K_Q = 0), or to the `nearest` code.
    balance_by: J_b of trials that quantize each `block` alone, or the whole linear
      (`layer`), read from column slices (reading A11).
    scales: Source of GPTQ's exponents (reading A12).
    damping: Relative damping of GPTQ.
  """

  name: str = "hires"
  recover: tuple[RecoveryFit, ...] = (ATTENTION, MLP)
  use_interaction: bool = True
  use_balance: bool = True
  weights: Literal["gptq", "rtn"] = "gptq"
  rounding: ActivationRule = "full"
  balance_by: balance.BalanceBy = "block"
  scales: gptq.ScaleSource = "fresh"
  damping: Share = gptq.DAMPING
  descent = 0  # No fields: only HiResDescent has these options.
  two_sided = False
  refit_maps = False
  changes = 0
  rounds_up = False
  chart = "reference"
  max_condition = reference_chart.MAX_CONDITION

  def __post_init__(self) -> None:
    if self.two_sided and self.weighting != "fisher":
      raise ValueError(
        f"{self.name}: two_sided=true needs the gradients of weighting=fisher, got "
        f"weighting={self.weighting}; give both."
      )
    if self.changes and self.rounding != "full":
      raise ValueError(
        f"{self.name}: changes={self.changes} refines activations and would ignore "
        f"rounding={self.rounding}; leave one of them out."
      )
    if self.rounds_up and not self.changes:
      raise ValueError(
        f"{self.name}: rounds_up=true is an option of the rule of a few codes, got "
        "changes=0; give changes=1 or more."
      )
    has = {"scales": self.scales, "damping": self.damping}
    has |= {"descent": self.descent, "two_sided": self.two_sided}
    unused = ("fresh", gptq.DAMPING, 0, False)
    given = zip(has.items(), unused, strict=True)
    ignored = [f"{name}={value}" for (name, value), none in given if value != none]
    if self.weights == "rtn" and ignored:
      raise ValueError(
        f"{self.name}: weights=rtn rounds to nearest and would ignore "
        f"{', '.join(ignored)}; use weights=gptq, or the method hires."
      )

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> input_maps.BlockDense:
    """Stage I: finds T from chart and interaction, then D from three trials."""
    moment, folds = inputs.moment(), _weight_moments(weight)
    if inputs.token_weights is None:
      used = _mean_moment(folds, weight.shape[-1])
    else:
      used = fisher.output_moment(weight, inputs)
    # In several jitted steps by rule 2 of `mxjax.devices.execution`.
    how: dict[str, Any] = {
      "kind": self.chart,
      "max_condition": float(self.max_condition),
    }
    charts = execution.call_in_batches(functools.partial(_charts, **how), moment, used)
    pairs = jnp.zeros_like(moment)
    if self.use_interaction:
      pairs = interaction.fitted(weight, inputs, folds, *charts)
    transform = execution.call_in_batches(
      local_interaction.shaping_transform, charts[0], pairs
    )
    norms = execution.call_in_batches(spectral_norm, pairs)
    inputs.record["interaction_spectral_norm"] = norms.tolist()
    if self.use_balance:
      transform = balance.balanced(weight, inputs, moment, transform, self.balance_by)
    return input_maps.BlockDense(transform.astype(jnp.float32))

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> Realized:
    """Stage II: runs GPTQ in the installed coordinates and builds one-code tables."""
    if self.weights == "rtn":
      result = gptq.round_to_nearest(weight, inputs.rules)
    else:
      moment = fisher.gradient_moment(inputs) if self.two_sided else None
      result = reconstruct(
        *(weight, inputs, input_map, self.damping, self.scales),
        descent=self.descent,
        output_moment=moment,
      )
    if self.changes:
      rounding = few_codes_rule(result.decoded, self.changes, self.rounds_up)
    else:
      rounding = activation_rule(weight, result.decoded, self.rounding)
    if not self.refit_maps:
      return Realized(result, rounding)
    correction, cross = refit.refitted(weight, result.decoded, inputs, input_map)
    if isinstance(rounding, OneCode) and self.rounding == "full":
      rounding = dataclasses.replace(rounding, cross=cross)
    return Realized(result, rounding, correction)


HIRES = HiRes()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiResDescent(HiRes):
  """HiRes with two changes in how weights are quantized.

  Exponents of weight blocks are searched: the floor rule clips values between 6 and 8
  times the scale, and a block's compensated errors decide whether that costs more than
  the coarser codes of the next exponent. After GPTQ, `descent` passes of coordinate
  descent revisit all codes on the same objective, now knowing the errors of all other
  columns. Both cost only quantization time. Not in the paper: see
  `docs/results/hires_descent.md` for gains and rejected ideas.

  Attributes:
    descent: Passes of coordinate descent.
    two_sided: Compensate errors of output rows in later rows, too, by the second moment
      of output gradients; see `two_sided` of the numerics. Needs `weighting="fisher"`,
      and each group of rows waits for the one before.
    refit_maps: Refit the maps to the rounded weights by least squares; see `map_refit`
      of the numerics.
    changes: Codes of an activation block that may change, by G_Q alone, which goes with
      refitted maps; see `few_codes` of the numerics. With 0, the one-code rule.
    rounds_up: Whether exponents of activation blocks round up from 7 scales; needs
      `changes`.
    chart: The paper's `reference` chart, or the `geometric` mean of both moments; see
      `reference_chart` of the numerics.
    max_condition: The chart's largest condition number, 8 in the paper.
  """

  name: str = "hires-descent"
  scales: gptq.ScaleSource = "searched"
  descent: Count = 3
  two_sided: bool = False
  refit_maps: bool = False
  changes: Count = 0
  rounds_up: bool = False
  chart: Chart = "reference"
  max_condition: Factor = reference_chart.MAX_CONDITION


HIRES_DESCENT = HiResDescent()
