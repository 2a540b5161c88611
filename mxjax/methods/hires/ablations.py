"""The paper's ablations of HiRes as programs, by study.

A row is a label and a program; the last row of a study is its reference. Rows that
differ only in recovery can share one build; see `Reused`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mxjax import methods
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.baselines.rtn_gain import RTN_GAIN
from mxjax.methods.baselines.wush import WUSH, WUSH_R
from mxjax.methods.hires.hires import HIRES, HIRES_DESCENT
from mxjax.methods.program import RTN, Prepared, Program
from mxjax.methods.recovery_fits import is_quantized
from mxjax.numerics.contract import Contract

Rows = tuple[tuple[str, Program], ...]


def _row(label: str, name: str, **options: Any) -> tuple[str, Program]:
  return label, dataclasses.replace(HIRES, name=name, **options)


def _recovered(label: str, fits: str) -> tuple[str, Program]:
  return label, methods.get(f"hires:recover={fits}")


_RTN = {"weights": "rtn", "rounding": "nearest"}
_FULL = ("full HiRes", HIRES)
_NO_RECOVERY = dataclasses.replace(HIRES, name="hires I + II", recover=())

STUDIES: dict[str, Rows] = {
  "stages": (
    ("strict RTN", RTN),
    _row("+ geometric shaping", "hires I", **_RTN, recover=()),
    ("+ discrete realization", _NO_RECOVERY),
    ("+ structural recovery", HIRES),
  ),
  "components": (
    _row("remove interaction K", "hires, K = 0", use_interaction=False),
    _row("D = I", "hires, D = I", use_balance=False),
    _row(
      "K = 0, D = I", "hires, K = 0, D = I", use_interaction=False, use_balance=False
    ),
    _FULL,
  ),
  "rules": (
    _row("RTN weights, nearest", "hires, RTN weights", **_RTN),
    _row("nearest", "hires, nearest", rounding="nearest"),
    _row("sensitivity", "hires, sensitivity", rounding="sensitivity"),
    _FULL,
  ),
  "recovery": (
    ("none", _NO_RECOVERY),
    _recovered("attention only", "attention"),
    _recovered("MLP only", "mlp"),
    # On statistics from before the attention correction.
    _recovered("stale MLP statistics", "attention+mlp-parent"),
    _FULL,
  ),
  "encoding": (
    ("none", _NO_RECOVERY),
    # On values, gates and ups computed from inputs not rounded to A4.
    _recovered("fitted before encoding", "attention-unrounded+mlp-unrounded"),
    _FULL,
  ),
  "geometry": (("WUSH", WUSH), ("WUSH+R", WUSH_R), _FULL),
  "readings": (
    _row("layer-level J_b (A11)", "hires, layer J", balance_by="layer"),
    _row("static scales (A12)", "hires, static scales", scales="static"),
    _row("layer-by-layer recovery (A16)", "hires, by layer", recovery_by="layer"),
    _row("quantized upstream (A22)", "hires, upstream", upstream="quantized"),
    _FULL,
  ),
  "next": (
    _row("searched weight exponents", "hires, searched", scales="searched"),
    (
      "descent",
      dataclasses.replace(HIRES_DESCENT, name="hires-descent, fresh", scales="fresh"),
    ),
    ("hires-descent", HIRES_DESCENT),
    _FULL,
  ),
  "controls": (
    ("RTN + one gain", RTN_GAIN),
    ("RTN + recovery", methods.get("rtn+r")),
    ("HiRes without recovery", _NO_RECOVERY),
    ("HiRes", HIRES),
    ("strict RTN", RTN),
  ),
}
"""Programs by study; the last row is the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reused(Program):
  """Finished linears of another build, with the recovery of this program.

  `leaves` are the linears by path, such as `layers_0/self_attn/q_proj`.
  """

  program: Program = RTN
  leaves: Mapping[str, QuantizedLinear] = dataclasses.field(default_factory=dict)

  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    """See `Program.prepare`."""
    del calib, contract
    return Prepared(params, learned=self.leaves)

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """See `Program.quantize_linear`; returns the finished linear."""
    del weight
    return inputs.learned

  def describe(self) -> Mapping[str, Any]:
    """Describes the program that made the linears."""
    return self.program.describe()


def build_key(program: Program) -> str | None:
  """Returns a key that determines a program's linears: equal keys, equal linears.

  Returns None if the program rewrites the float model, so that no build can be reused.
  """
  if type(program).prepare is not Program.prepare:
    return None
  plain = dataclasses.replace(program, name="", recover=(), recovery_by="model")
  return f"{type(program).__name__} {plain}"


def reuse(program: Program, params: Params) -> Reused:
  """Makes the program take its linears from an earlier build of the same key."""
  nodes, _ = jax.tree_util.tree_flatten_with_path(dict(params), is_leaf=is_quantized)
  # A path ends with the linear's key "weight".
  name_of = lambda path: jax.tree_util.keystr(path[:-1], simple=True, separator="/")
  leaves = {name_of(path): node for path, node in nodes if is_quantized(node)}
  return Reused(
    name=program.name,
    recover=program.recover,
    recovery_by=program.recovery_by,
    program=program,
    leaves=leaves,
  )
