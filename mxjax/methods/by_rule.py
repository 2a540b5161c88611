"""Several methods in one run, each for the linears that a rule gave it."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import Program


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByRule(Program):
  """Quantizes each linear by a program of its own.

  Attributes:
    programs: The programs.
    choice: The index of its program for each linear's name.
  """

  programs: Sequence[Program] = ()
  choice: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def shape_group(self, weights: Mapping[str, jax.Array], inputs: LinearInputs) -> Any:
    """See `Program.shape_group`; the linears of each program form a group."""
    groups: dict[int, dict[str, jax.Array]] = {}
    for name, weight in weights.items():
      groups.setdefault(self.choice[name], {})[name] = weight
    return {i: self.programs[i].shape_group(part, inputs) for i, part in groups.items()}

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """See `Program.quantize_linear`."""
    index, view = self.choice[inputs.name], copy.copy(inputs)
    view.group = inputs.group[index]
    return self.programs[index].quantize_linear(weight, view)

  def describe(self) -> Mapping[str, Any]:
    """See `Program.describe`."""
    programs = [dict(program.describe()) for program in self.programs]
    options = {"programs": programs, "choice": dict(self.choice)}
    return {"name": self.name, "recover": [], "options": options}
