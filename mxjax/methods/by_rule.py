"""Several methods in one run, each for the linears that a rule gave it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from typing_extensions import override

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods import hook_results
from mxjax.methods.program import LinearResult, Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRule(Program):
  """Quantizes each linear by a program of its own.

  Attributes:
    programs: The programs.
    choice: The index of its program for each linear's name.
  """

  programs: Sequence[Program] = ()
  choice: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @override
  def shape_group(self, weights: Mapping[str, jax.Array], inputs: LinearInputs) -> Any:
    """Forms a group of the linears of each program."""
    groups: dict[int, dict[str, jax.Array]] = {}
    for name, weight in weights.items():
      groups.setdefault(self.choice[name], {})[name] = weight
    return {i: self.programs[i].shape_group(part, inputs) for i, part in groups.items()}

  @override
  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    index = self.choice[inputs.name]
    program, view = self.programs[index], inputs.in_group(inputs.group[index])
    made = program.quantize_linear(weight, view)
    # The pipeline checks what `ByRule` returns, whose hook is of this library, and
    # would not look at the values of a program from outside.
    hook_results.check_linear(program, made, weight, inputs.rules)
    return made

  @override
  def describe(self) -> Mapping[str, Any]:
    programs = [dict(program.describe()) for program in self.programs]
    options = {"programs": programs, "choice": dict(self.choice)}
    return {"name": self.name, "recover": [], "options": options}
