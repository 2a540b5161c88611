"""The quantizers past the paper: the stages of HiRes with other choices inside them.

`hires-descent` changes how weights are quantized. Exponents of weight blocks are
searched: the floor rule clips values between 6 and 8 times the scale, and a block's
compensated errors decide whether that costs more than the coarser codes of the next
exponent. After GPTQ, passes of coordinate descent revisit all codes on the same
objective, now knowing the errors of all other columns. See
`docs/results/hires_descent.md` for gains and rejected ideas.

`hires-next` quantizes for the model's predictions instead of each layer's outputs.
Moments and the Hessian weight tokens and outputs by the Fisher information
(`mxjax.calibration.fisher`), which leaves fewer tokens that count; GPTQ therefore damps
the Hessian ten times as much, and compensates along both axes (`two_sided`). The chart
is the geometric mean of both moments. The maps are refitted to the rounded weights
(`map_refit` of the numerics), after which the activations' rule needs no K_Q and
changes up to two codes of a block (`few_codes`). Exponents are searched and codes are
revisited as in `hires-descent`. At the end scale distillation learns a factor for every
input channel, which multiplies the columns of the input map; after it, recovery brings
nothing and is left out. See `docs/results/hires_next.md`.

`hires-rotated` is `hires-next` with other maps: in place of the interaction and the
balance, the map of each block is followed by a rotation that is learned from the
rounding errors that the map makes (`map_descent` of the numerics), and is then fitted
to the codes of its weights (`map_fit`).

`map-search` has another map: each block takes the best of many by the rounding error
that they make (`map_search` of the numerics), in place of the interaction and the
balance. It is what a program that a language model found has in its maps, with the
codes of `hires-descent`. See `docs/results/discovery.md`.

`map-descent` turns that map further, by some hundred steps down the slope of its own
rounding error (`map_descent` of the numerics).

With `map_fits`, the map of a block, whichever it is, is then fitted to the codes of its
weights (`map_fit` of the numerics). It gains most where a linear has few rows.

One class has the options of all of them, and its defaults are those of `hires-descent`.
"""

import dataclasses
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from typing_extensions import override

from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.methods.gptq import conjugated, reconstruct
from mxjax.methods.hires import searched_map, stage1, stage2
from mxjax.methods.hires.stage3 import ATTENTION, MLP
from mxjax.methods.options import Count, Factor, Share
from mxjax.methods.program import Program, Realization, Shaping, fold
from mxjax.methods.recovery import RecoveryFit
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics.realization import few_codes, gptq, map_refit, one_code
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  FewCodes,
  OneCode,
)
from mxjax.numerics.shaping import input_maps, map_fit, reference_chart
from mxjax.numerics.shaping.input_maps import InputMap

CHARTS = {
  "reference": reference_chart.reference_chart,
  "geometric": reference_chart.geometric_chart,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HiResDescent(Program):
  """HiRes with searched exponents and descent, and with what else these options add.

  Attributes:
    use_interaction: Fit K; off means G = I.
    use_balance: Try D; off means D = I.
    chart: The paper's `reference` chart, or the `geometric` mean of both moments; see
      `reference_chart` of the numerics.
    max_condition: The chart's largest condition number, 8 in the paper.
    candidates: Maps that are measured for each block, in the chart's principal axes,
      of which it takes the one with the smallest rounding error; see `map_search` of
      the numerics. With 0, the map of Stage I. Needs the interaction and the balance
      off, which correct that map.
    map_steps: Steps by which the best candidate is turned further, down the slope of
      its rounding error; see `map_descent` of the numerics. Needs `candidates`.
    map_fits: Turns in which the map and the nearest codes of the folded weights are
      fitted to each other, before the codes are chosen; see `map_fit` of the numerics.
    rounding: The A4 rule, as in `HiRes`, where `changes` is 0.
    scales: Where GPTQ takes the exponents of weight blocks from.
    damping: Relative damping of GPTQ.
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
  """

  name: str = "hires-descent"
  recover: tuple[RecoveryFit, ...] = (ATTENTION, MLP)
  use_interaction: bool = True
  use_balance: bool = True
  chart: Literal["reference", "geometric"] = "reference"
  max_condition: Factor = reference_chart.MAX_CONDITION
  candidates: Count = 0
  map_steps: Count = 0
  map_fits: Count = 0
  rounding: stage2.ActivationRule = "full"
  scales: gptq.ScaleSource = "searched"
  damping: Share = gptq.DAMPING
  descent: Count = 3
  two_sided: bool = False
  refit_maps: bool = False
  changes: Count = 0
  rounds_up: bool = False
  a4_options = ("rounding", "changes", "rounds_up")
  compiles_together: ClassVar[bool] = True

  def __post_init__(self) -> None:
    if self.two_sided and self.weighting != "fisher":
      raise ValueRefusal(
        self.name,
        expected="weighting=fisher for two_sided=true, which needs its gradients",
        got=f"weighting={self.weighting}",
        mend="give both",
      )
    if self.changes and self.rounding != "full":
      raise ValueRefusal(
        self.name,
        expected=f"no rounding for changes={self.changes}, which has a rule of its own",
        got=f"rounding={self.rounding}",
        mend="leave one of them out",
      )
    if self.candidates and (self.use_interaction or self.use_balance):
      raise ValueRefusal(
        self.name,
        expected="use_interaction=false and use_balance=false for candidates="
        f"{self.candidates}, which takes the place of both",
        got=f"use_interaction={self.use_interaction} and "
        f"use_balance={self.use_balance}",
        mend="give both, or candidates=0",
      )
    if self.map_steps and not self.candidates:
      raise ValueRefusal(
        self.name,
        expected=f"candidates=1 or more for map_steps={self.map_steps}, which begin at "
        "the best of them",
        got="candidates=0",
        mend="give both, or map_steps=0",
      )
    if self.rounds_up and not self.changes:
      raise ValueRefusal(
        self.name,
        expected="changes=1 or more for rounds_up=true",
        got="changes=0, which has no rule of a few codes",
        mend="give it, or leave rounds_up out",
      )

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    """Stage I with the chart of the options, or the best of some candidates."""
    if self.candidates:
      shaping = self._searched(weight, inputs)
    else:
      shaping = stage1.shape(
        weight,
        inputs,
        use_interaction=self.use_interaction,
        use_balance=self.use_balance,
        chart=CHARTS[self.chart],
        max_condition=self.max_condition,
      )
    return fitted(shaping, weight, inputs, self.map_fits) if self.map_fits else shaping

  def _searched(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    # The one-code rule counts as one change by G_Q alone: its K_Q needs the codes of
    # the weights, which are chosen after the map.
    changes: int | None = self.changes or int(self.rounding != "nearest")
    if self.activations == "float":
      # Inputs that are not rounded have no error that a map could lower.
      changes = None
    return searched_map.shape(
      weight,
      inputs,
      chart=CHARTS[self.chart],
      max_condition=self.max_condition,
      candidates=self.candidates,
      steps=self.map_steps,
      changes=changes,
      rules=few_codes.scale_rules(inputs.rules, self.rounds_up),
    )

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realization:
    """Stage II with searched exponents and descent, and the maps refitted after it."""
    codes, record = reconstruct(
      weight,
      inputs,
      input_map,
      self.damping,
      self.scales,
      descent=self.descent,
      output_moment=fisher.gradient_moment(inputs) if self.two_sided else None,
    )
    if self.changes:
      rounding = few_codes_rule(codes.decoded, self.changes, self.rounds_up)
    else:
      rounding = stage2.activation_rule(weight, codes.decoded, self.rounding)
    if not self.refit_maps:
      return Realization(codes, rounding, record=record)
    refit, errors = refitted(weight, codes.decoded, inputs, input_map)
    # The refitted map has moved what the one-code rule's K_Q was computed for.
    if isinstance(rounding, OneCode) and self.rounding == "full":
      rounding = dataclasses.replace(rounding, cross=refit.cross)
    record |= {"refit_errors": errors}
    return Realization(codes, rounding, refit.correction, record)

  @override
  def stored_map(self, blocks: int) -> InputMap:
    return input_maps.dense_like(blocks)

  @override
  def stored_rounding(self, blocks: int) -> ActivationQuantizer:
    if not self.changes:
      return stage2.stored_rule(blocks, self.rounding)
    gram: Any = jax.ShapeDtypeStruct((blocks, one_code.PACKED), jnp.float32)
    return FewCodes(gram, self.changes, self.rounds_up)


def fitted(
  shaping: Shaping, weight: jax.Array, inputs: LinearInputs, turns: int
) -> Shaping:
  """Fits a linear's dense block maps and the codes of its weights to each other.

  `weight` is raw, float32 `[blocks, 32, rows]`. The record gets the losses before and
  after, by block.
  """
  dense = cast(input_maps.BlockDense, shaping.input_map)
  moment = _mapped_moment(dense.matrix, inputs.moment())
  folded = fold(weight, dense)
  found = execution.block_on_cpu(map_fit.fit(folded, moment, inputs.rules, turns=turns))
  losses = [found.before.tolist(), found.after.tolist()]
  map_ = input_maps.followed(dense, found.correction)
  return Shaping(map_, {**shaping.record, "fit_losses": losses})


@execution.jit()
def _mapped_moment(matrix: jax.Array, moment: jax.Array) -> jax.Array:
  """Computes the second moments of mapped inputs, float32, from float64 ones."""
  wide = matrix.astype(moment.dtype)
  return (wide @ moment @ wide.mT).astype(matrix.dtype)


@execution.jit(static_argnames=("changes", "rounds_up"))
def few_codes_rule(decoded: jax.Array, changes: int, rounds_up: bool) -> FewCodes:
  """Returns the rule of a few codes for decoded W4 weights, `[blocks, 32, rows]`."""
  # K_Q is left out because refitted maps leave hardly any of it.
  # Against themselves the weights have no errors, so that only G_Q is left.
  gram, _ = one_code.tables(decoded, decoded)
  return FewCodes(one_code.pack_symmetric(gram), changes, rounds_up)


def refitted(
  weight: jax.Array,
  decoded: jax.Array,
  inputs: LinearInputs,
  input_map: InputMap | None,
) -> tuple[map_refit.MapCorrection, list[float]]:
  """Refits the map of a linear whose weights are rounded.

  `weight` is folded and `decoded` its W4 values, float32 `[blocks, 32, rows]`. Also
  returns the error of the outputs that the rounded weights make of exact inputs, over
  the outputs, before and after.
  """
  # Moments of mapped inputs, which A multiplies.
  hessian = conjugated(inputs.hessian(), input_map)
  moments = _gram(decoded), execution.block_on_cpu(map_refit.own_moments(hessian))
  # Apart from the products of `refit`, by rule 2 of `mxjax.devices.execution`.
  inverses = [
    execution.call_in_batches(map_refit.damped_inverses, one) for one in moments
  ]
  found = execution.block_on_cpu(map_refit.refit(weight, decoded, hessian, *inverses))
  errors: Any = _losses(weight, decoded, found.correction, hessian)
  return found, errors.tolist()


@execution.jit()
def _gram(decoded: jax.Array) -> jax.Array:
  return reference_chart.block_moment(decoded).astype(decoded.dtype)


@execution.jit()
def _losses(
  weight: jax.Array, decoded: jax.Array, correction: jax.Array, hessian: jax.Array
) -> jax.Array:
  """Computes the relative errors of the outputs without and with the correction."""
  after = map_refit.effective(decoded, correction)
  loss = lambda weights: gptq.reconstruction_loss(weight, weights, hessian)
  # The loss of weights of zero is the energy of the outputs.
  signal = loss(jnp.zeros_like(weight))
  found = jnp.stack([loss(decoded), loss(after)])
  return jnp.where(signal > 0, found / signal, 0)


HIRES_DESCENT = HiResDescent()
HIRES_NEXT = HiResDescent(
  name="hires-next",
  weighting="fisher",
  chart="geometric",
  max_condition=32.0,
  damping=0.1,
  refit_maps=True,
  changes=2,
  two_sided=True,
  recover=(),
  tune=ScaleDistillation(),
)
# The first candidate needs no search. On the small models a descent from the best of 84
# ends 1.5 to 5 % lower in KL, which the fit makes up for in part.
HIRES_ROTATED = dataclasses.replace(
  HIRES_NEXT,
  name="hires-rotated",
  use_interaction=False,
  use_balance=False,
  candidates=1,
  map_steps=300,
  map_fits=16,
)
# As many candidates as the program has that was found (`docs/results/discovery.md`).
MAP_SEARCH = HiResDescent(
  name="map-search",
  chart="geometric",
  max_condition=1024.0,
  candidates=84,
  use_interaction=False,
  use_balance=False,
)
MAP_DESCENT = dataclasses.replace(MAP_SEARCH, name="map-descent", map_steps=300)
