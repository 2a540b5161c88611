"""An algorithmic residual: a measured design question with competing explanations.

Paper: Section "From Program Gain to Algorithmic Residual". Explanations fit the same
observation but imply different program changes; each predicts, before anything runs,
how named observables move under each condition.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Symbol = Literal["down", "same", "up"]
SYMBOLS: tuple[Symbol, ...] = ("down", "same", "up")
PRIMARY = "primary"
"""Name of the condition in which the candidate runs as it is."""

Predicted = Mapping[str, Symbol]
"""Observable to symbol, relative to the parent; one left out is not predicted."""


@dataclasses.dataclass(frozen=True)
class Explanation:
  """One account of why the intervention should help.

  Attributes:
    name: Short identifier.
    statement: One sentence for people.
    predictions: What it predicts under each condition it speaks of.
  """

  name: str
  statement: str
  predictions: Mapping[str, Predicted]

  def predicts(self, condition: str) -> Predicted:
    """The prediction under a condition; empty where the account is silent."""
    return self.predictions.get(condition, {})


@dataclasses.dataclass(frozen=True)
class Control:
  """An allowed counterfactual condition.

  Attributes:
    name: Short identifier, unique in its proposal.
    intervention: What the evaluator changes, JSON; the task gives it meaning.
    cost: Evaluator calls it is charged, an integer of at least 1.
    statement: One sentence for people.
  """

  name: str
  intervention: Mapping[str, Any]
  cost: int = 1
  statement: str = ""

  def __post_init__(self) -> None:
    """Refuses a cost no ledger could charge."""
    if self.name == PRIMARY or not isinstance(self.cost, int) or self.cost < 1:
      raise ValueError(
        f"Control {self.name!r}: expected a name other than {PRIMARY!r} and an integer "
        f"cost of at least 1, got cost {self.cost!r}; mend the proposal."
      )


@dataclasses.dataclass(frozen=True)
class Residual:
  """A question measured on one program.

  Attributes:
    program: Identity of the program it was measured on.
    observable: The measured quantity that is in excess.
    value: What was measured.
    threshold: Above this the question is open.
    computation: The hook whose computation the question is about; implementation
      checks look there and nowhere else.
  """

  program: str
  observable: str
  value: float
  threshold: float
  computation: str

  @property
  def key(self) -> str:
    """Stable name of the question on its program."""
    return f"{self.program[:12]}:{self.observable}"

  @property
  def excess(self) -> float:
    """How far over the threshold, relative to it."""
    scale = abs(self.threshold) or 1.0
    return (self.value - self.threshold) / scale


def disagree(a: Predicted, b: Predicted) -> bool:
  """Whether two predictions name a different symbol for some observable.

  An observable that one of them leaves out can never tell them apart.
  """
  return any(a[name] != b[name] for name in a.keys() & b.keys())


def symbol(change: float, margin: float) -> Symbol:
  """What a measured change counts as under its registered margin.

  Args:
    change: Value under the condition minus value of the parent.
    margin: Registered before the run; at most this much is `same`.
  """
  if abs(change) <= margin:
    return "same"
  return "down" if change < 0 else "up"


def consistent(predicted: Predicted, observed: Mapping[str, Symbol]) -> bool:
  """Whether everything predicted, and observed, came out as predicted."""
  return all(observed.get(name, s) == s for name, s in predicted.items())
