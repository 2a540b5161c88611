"""The paper's ablations of HiRes as programs, by study.

A row is a label and a program; the last row of a study is its reference. Rows that
differ only in recovery can share one build: `Reused` takes finished linears and fits
recovery to them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.baselines.rtn import RTN
from mxjax.methods.baselines.rtn_gain import RTN_GAIN
from mxjax.methods.baselines.wush import WUSH, WUSH_R
from mxjax.methods.hires.hires import HIRES
from mxjax.methods.hires.hires_descent import HIRES_DESCENT
from mxjax.methods.program import Prepared, Program
from mxjax.methods.recovery_fits import (
  ATTENTION,
  MLP,
  AttentionFit,
  MlpFit,
  RecoveryFit,
)
from mxjax.numerics.contract import Contract
from mxjax.numerics.realization.activation_quantizers import Unrounded

Rows = tuple[tuple[str, Program], ...]


class StaleMlp(MlpFit):
  """The MLP fit on statistics from before the attention correction."""

  def state(self, layer: Params, parent: Params) -> Params:
    """See `RecoveryFit.state`; returns the layer without any correction."""
    del layer
    return parent


def _is_quantized(node: Any) -> bool:
  return isinstance(node, QuantizedLinear)


def unrounded(layer: Params) -> Params:
  """Returns a quantized layer whose inputs are no longer rounded to A4."""
  change = lambda node: (
    dataclasses.replace(node, rounding=Unrounded()) if _is_quantized(node) else node
  )
  return jax.tree.map(change, layer, is_leaf=_is_quantized)


class _BeforeEncoding(RecoveryFit):
  """Mixin that measures a fit on inputs not rounded to A4."""

  def state(self, layer: Params, parent: Params) -> Params:
    """See `RecoveryFit.state`."""
    del parent
    return unrounded(layer)


class AttentionBeforeEncoding(_BeforeEncoding, AttentionFit):
  """The attention fit on values computed from inputs not rounded to A4."""


class MlpBeforeEncoding(_BeforeEncoding, MlpFit):
  """The MLP fit on gates and ups computed from inputs not rounded to A4."""


STALE_MLP = StaleMlp()
BEFORE_ENCODING = (AttentionBeforeEncoding(), MlpBeforeEncoding())


def _hires(name: str, **options: Any) -> Program:
  return dataclasses.replace(HIRES, name=name, **options)


def _recovered(name: str, *fits: RecoveryFit) -> tuple[str, Program]:
  return name, _hires(f"hires, {name}", recover=fits)


_FULL = ("full HiRes", HIRES)
_NO_RECOVERY = _hires("hires I + II", recover=())

STUDIES: dict[str, Rows] = {
  "stages": (
    ("strict RTN", RTN),
    (
      "+ geometric shaping",
      _hires("hires I", weights="rtn", rounding="nearest", recover=()),
    ),
    ("+ discrete realization", _NO_RECOVERY),
    ("+ structural recovery", HIRES),
  ),
  "components": (
    ("remove interaction K", _hires("hires, K = 0", use_interaction=False)),
    ("D = I", _hires("hires, D = I", use_balance=False)),
    (
      "K = 0, D = I",
      _hires("hires, K = 0, D = I", use_interaction=False, use_balance=False),
    ),
    _FULL,
  ),
  "rules": (
    (
      "RTN weights, nearest",
      _hires("hires, RTN weights", weights="rtn", rounding="nearest"),
    ),
    ("nearest", _hires("hires, nearest", rounding="nearest")),
    ("sensitivity", _hires("hires, sensitivity", rounding="sensitivity")),
    _FULL,
  ),
  "recovery": (
    ("none", _NO_RECOVERY),
    _recovered("attention only", ATTENTION),
    _recovered("MLP only", MLP),
    _recovered("stale MLP statistics", ATTENTION, STALE_MLP),
    _FULL,
  ),
  "encoding": (
    ("none", _NO_RECOVERY),
    _recovered("fitted before encoding", *BEFORE_ENCODING),
    _FULL,
  ),
  "geometry": (("WUSH", WUSH), ("WUSH+R", WUSH_R), _FULL),
  "readings": (
    ("layer-level J_b (A11)", _hires("hires, layer J", balance_by="layer")),
    ("static scales (A12)", _hires("hires, static scales", scales="static")),
    ("layer-by-layer recovery (A16)", _hires("hires, by layer", recovery_by="layer")),
    ("quantized upstream (A22)", _hires("hires, upstream", upstream="quantized")),
    _FULL,
  ),
  "next": (
    ("searched weight exponents", _hires("hires, searched", scales="searched")),
    (
      "descent",
      dataclasses.replace(HIRES_DESCENT, name="hires-descent, fresh", scales="fresh"),
    ),
    ("hires-descent", HIRES_DESCENT),
    _FULL,
  ),
  "controls": (
    ("RTN + one gain", RTN_GAIN),
    (
      "RTN + recovery",
      dataclasses.replace(RTN, name="rtn, recovery", recover=(ATTENTION, MLP)),
    ),
    ("HiRes without recovery", _NO_RECOVERY),
    ("HiRes", HIRES),
    ("strict RTN", RTN),
  ),
}
"""Programs by study; the last row is the reference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reused(Program):
  """Finished linears of another build, with the recovery of this program.

  `leaves` are the linears by path, such as `layers_0/self_attn/q_proj`; `describe`
  reports the `program` of that build.
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
    """See `Program.describe`; describes the program that made the linears."""
    return self.program.describe()


def build_key(program: Program) -> str | None:
  """Returns a key that determines a program's linears: equal keys, equal linears.

  Returns None if a build cannot be reused because the program rewrites the float model
  or its hooks see the results of recovery.
  """
  if type(program).prepare is not Program.prepare:
    return None
  plain = dataclasses.replace(program, name="", recover=(), recovery_by="model")
  return f"{type(program).__name__} {plain}"


def reuse(program: Program, params: Params) -> Reused:
  """Makes the program take its linears from an earlier build of the same key."""
  layers = {name: params[name] for name in params if name.startswith("layers_")}
  nodes, _ = jax.tree_util.tree_flatten_with_path(layers, is_leaf=_is_quantized)
  # A path ends with the linear's key "weight".
  name_of = lambda path: jax.tree_util.keystr(path[:-1], simple=True, separator="/")
  leaves = {name_of(path): node for path, node in nodes if _is_quantized(node)}
  return Reused(
    name=program.name,
    recover=program.recover,
    recovery_by=program.recovery_by,
    program=program,
    leaves=leaves,
  )
