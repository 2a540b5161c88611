"""An algorithmic residual: a measured design question with competing explanations.

Paper: Section "From Program Gain to Algorithmic Residual". The explanations fit the
same observation but imply different program changes. Before anything runs, each one
predicts how named observables move under each condition.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Symbol = Literal["down", "same", "up"]
SYMBOLS: tuple[Symbol, ...] = ("down", "same", "up")
PRIMARY = "primary"
"""Name of the condition in which the candidate runs unchanged."""
OTHER_TEXT = "other_text"
"""Kind of the control that scores the candidate on text that no primary run sees.

Its observable has the same name. The parent runs under it as well, and is what the
candidate is compared with.
"""

OF_PARENT = " of the parent"
"""Ends the name of the condition in which the parent runs under a control."""

LUCK = "luck"
"""Name of the account by which a gain is luck of the score's text."""

Predicted = Mapping[str, Symbol]
"""Predicted direction of observables from the parent; omitted ones are unpredicted."""


@dataclasses.dataclass(frozen=True)
class Explanation:
  """One account of why the intervention should help; `predictions` are by condition."""

  name: str
  statement: str
  predictions: Mapping[str, Predicted]

  def predicts(self, condition: str) -> Predicted:
    """Returns the prediction for a condition, or an empty one if there is none."""
    return self.predictions.get(condition, {})


@dataclasses.dataclass(frozen=True)
class Control:
  """An allowed counterfactual condition.

  Attributes:
    name: Identifier, unique within its proposal.
    intervention: Change made by the evaluator, as JSON; the task defines its meaning.
    cost: Evaluator calls charged, an integer of at least 1.
  """

  name: str
  intervention: Mapping[str, Any]
  cost: int = 1
  statement: str = ""

  def __post_init__(self) -> None:
    """Rejects a reserved name or a cost that the ledger cannot charge."""
    # Probes are named after the demand that they check, and the run of a parent under
    # a control after that control.
    is_taken = self.name == PRIMARY or self.name.startswith("probe")
    is_taken = is_taken or self.name.endswith(OF_PARENT)
    if is_taken or not isinstance(self.cost, int) or self.cost < 1:
      raise ValueError(
        f"Control {self.name!r}: expected a name other than {PRIMARY!r}, 'probe...' "
        f"and '...{OF_PARENT}', and an integer cost of at least 1, got cost "
        f"{self.cost!r}; mend the proposal."
      )


@dataclasses.dataclass(frozen=True)
class Residual:
  """A question measured on one program; it is open above the threshold.

  Attributes:
    observable: The measured quantity that is too large.
    computation: Hooks and plan keys that the question is about, never a single string;
      implementation checks look only there.
  """

  program: str
  observable: str
  value: float
  threshold: float
  computation: tuple[str, ...]

  def __post_init__(self) -> None:
    """Rejects a computation that no check could look at."""
    if isinstance(self.computation, str) or not self.computation:
      raise ValueError(
        f"Residual {self.observable!r}: expected a tuple of hooks and plan keys as its "
        f"computation, got {self.computation!r}; name every one it is about."
      )

  @property
  def key(self) -> str:
    """Stable name of the question on its program."""
    return f"{self.program[:12]}:{self.observable}"

  @property
  def excess(self) -> float:
    """Relative amount by which the value exceeds the threshold."""
    scale = abs(self.threshold) or 1.0
    return (self.value - self.threshold) / scale


def disagree(a: Predicted, b: Predicted) -> bool:
  """Returns whether two predictions name different symbols for some observable.

  An observable that either prediction omits cannot tell them apart.
  """
  return any(a[name] != b[name] for name in a.keys() & b.keys())


def symbol(change: float, margin: float) -> Symbol:
  """Returns the symbol of a change from the parent; up to `margin` it is `same`."""
  if abs(change) <= margin:
    return "same"
  return "down" if change < 0 else "up"


def consistent(predicted: Predicted, observed: Mapping[str, Symbol]) -> bool:
  """Returns whether every observable that was both predicted and observed matches."""
  return all(observed.get(name, s) == s for name, s in predicted.items())
