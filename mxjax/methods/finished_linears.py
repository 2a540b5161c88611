"""Linears of a finished build, reused by programs that differ only in recovery."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from typing_extensions import override

from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import RTN, LinearResult, Prepared, Program
from mxjax.methods.recovery import is_quantized
from mxjax.numerics.contract import Contract


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedLinears(Program):
  """Finished linears of another build, with the recovery of this program.

  `leaves` are the linears by path, such as `layers_0/self_attn/q_proj`.
  """

  program: Program = RTN
  leaves: Mapping[str, QuantizedLinear] = dataclasses.field(default_factory=dict)

  @override
  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    del calib, contract
    # The pipeline hands each linear what was learned for its path: here its leaf.
    return Prepared(params, learned=self.leaves)

  @override
  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    """Returns the finished linear."""
    del weight
    return LinearResult(inputs.learned)

  @override
  def describe(self) -> Mapping[str, Any]:
    """Describes the program that made the linears."""
    return self.program.describe()


def build_key(program: Program) -> str | None:
  """Returns a key that determines a program's linears: equal keys, equal linears.

  Returns None if no build can be reused: the program rewrites the float model, or tunes
  the linears with its recovery installed.
  """
  if type(program).prepare is not Program.prepare or program.tune is not None:
    return None
  # The text of a dataclass has all of its options.
  plain = dataclasses.replace(program, name="", recover=())
  return f"{type(program).__name__} {plain}"


def reuse(program: Program, params: Params) -> FinishedLinears:
  """Makes the program take its linears from an earlier build of the same key."""
  nodes, _ = jax.tree_util.tree_flatten_with_path(dict(params), is_leaf=is_quantized)
  # A path ends with the linear's key "weight".
  name_of = lambda path: jax.tree_util.keystr(path[:-1], simple=True, separator="/")
  leaves = {name_of(path): node for path, node in nodes if is_quantized(node)}
  return FinishedLinears(
    name=program.name,
    recover=program.recover,
    activations=program.activations,
    program=program,
    leaves=leaves,
  )
