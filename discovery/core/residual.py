"""An algorithmic residual: a measured design question with competing explanations.

Paper: Section "From Program Gain to Algorithmic Residual". The explanations fit the
same observation but imply different program changes. Before anything runs, each one
predicts how named observables move under each condition.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mxjax.errors import ValueRefusal

Symbol = Literal["down", "same", "up", "kept", "lost", "gone", "reversed"]
"""How an observable moved: three of the parent's value, four of the edit's change."""
SYMBOLS: tuple[Symbol, ...] = ("down", "same", "up")
"""Directions from the parent."""
FATES: tuple[Symbol, ...] = ("kept", "lost", "gone", "reversed")
"""What becomes of the candidate's own change where a control takes something away.

From `lost` on, each contains the next.
"""
OF_EDIT = " of the edit"
"""Ends the name under which the fate of an observable is kept beside its direction."""
KEPT_SHARE = 0.5
"""Share of the edit's change above which it shows where it is measured again."""
PRIMARY = "primary"
"""Name of the condition in which the candidate runs unchanged."""
OTHER_TEXT = "other_text"
"""Kind of the control that scores the candidate on text that no primary run sees.

Its observable has the same name. The parent runs under it as well, and is what the
candidate is compared with.
"""

OF_PARENT = " of the parent"
"""Ends the name of the condition in which the parent runs under a control."""

Predicted = Mapping[str, Symbol]
"""Predicted movement of observables; omitted ones are unpredicted.

A direction is kept under the observable's own name and a fate under `of_edit` of it, so
that an account may predict both, and neither is compared with the other.
"""


def of_edit(observable: str) -> str:
  """Returns the name under which the fate of an observable is kept."""
  return observable + OF_EDIT


def bare(observable: str) -> str:
  """Returns the observable that a direction or a fate is about."""
  return observable.removesuffix(OF_EDIT)


@dataclasses.dataclass(frozen=True)
class Explanation:
  """One account of why the intervention should help; `predictions` are by condition.

  `rival` says that it is ours and not the proposer's: it stands beside those of a
  proposal until its own control has told it from the focal account.
  """

  name: str
  statement: str
  predictions: Mapping[str, Predicted]
  rival: bool = False

  def __post_init__(self) -> None:
    """Keeps every fate under its own name."""
    sorted_ = {
      condition: {
        of_edit(bare(name)) if symbol in FATES else name: symbol
        for name, symbol in row.items()
      }
      for condition, row in self.predictions.items()
    }
    object.__setattr__(self, "predictions", sorted_)

  def predicts(self, condition: str) -> Predicted:
    """Returns the prediction for a condition, or an empty one if there is none."""
    return self.predictions.get(condition, {})


@dataclasses.dataclass(frozen=True)
class Rival:
  """An account of a gain that the trusted side sets beside a proposer's own.

  It says that the target keeps its change under the intervention, which takes away what
  the focal account credits; the focal account is held to the opposite. Where the
  intervention takes away what the rival credits, such as luck, `keeps` is False.
  """

  name: str
  statement: str
  intervention: Mapping[str, Any]
  keeps: bool = True


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
    if is_taken or self.name.endswith(OF_PARENT):
      raise ValueRefusal(
        "control",
        expected=f"a name other than {PRIMARY!r}, 'probe...' and '...{OF_PARENT}'",
        got=repr(self.name),
        mend="rename it",
      )
    if not isinstance(self.cost, int) or self.cost < 1:
      raise ValueRefusal(
        f"control {self.name!r}",
        expected="an integer cost of at least 1",
        got=repr(self.cost),
        mend="mend the proposal",
      )


@dataclasses.dataclass(frozen=True)
class Residual:
  """A question measured on one program; it is open above the threshold.

  Attributes:
    observable: The measured quantity that is too large.
    computation: Hooks and plan keys that have been seen to move it, never a single
      string. The search fills them in from what it has executed; a task leaves them
      out.
  """

  program: str
  observable: str
  value: float
  threshold: float
  computation: tuple[str, ...] = ()

  def __post_init__(self) -> None:
    """Rejects a string, each letter of which would pass for a hook."""
    if isinstance(self.computation, str):
      raise ValueRefusal(
        f"Residual {self.observable!r}",
        expected="a tuple of hooks and plan keys as its computation",
        got=repr(self.computation),
        mend="name every one it is about",
      )

  @property
  def key(self) -> str:
    """Stable name of the question on its program."""
    return f"{self.program[:12]}:{self.observable}"

  @property
  def excess(self) -> float:
    """Relative amount by which the value exceeds the threshold."""
    # A threshold of 0, such as that of a loss whose ideal is 0, has no relative excess.
    scale = abs(self.threshold) or 1.0
    return (self.value - self.threshold) / scale


def disagree(a: Predicted, b: Predicted) -> bool:
  """Returns whether two predictions exclude each other for some observable.

  An observable that either prediction omits cannot tell them apart, nor can two of
  `lost`, `gone` and `reversed`, of which each contains the next.
  """
  return any(
    not _met(a[name], b[name]) and not _met(b[name], a[name])
    for name in a.keys() & b.keys()
  )


def symbol(change: float, margin: float) -> Symbol:
  """Returns the symbol of a change from the parent; up to `margin` it is `same`."""
  if abs(change) <= margin:
    return "same"
  return "down" if change < 0 else "up"


def fate(
  edit: float, controlled: float, margin: float, *, elsewhere: bool = False
) -> Symbol | None:
  """Returns what a control leaves of an edit's change; None if the edit made none.

  Both changes are from the parent. What the control takes away has a share of the
  change, which is `lost`, if the change is smaller without it by more than the margin;
  the share of another part, however large, does not speak against that. The change is
  `gone` if no more than the margin is left of it, and `reversed` if the control goes
  the other way by more than the margin. Otherwise it is `kept`.

  `elsewhere` says that the control takes nothing away and measures the whole edit a
  second time, on another text or another draw. An edit is chosen for a large change, so
  a smaller one is expected there; `kept` is more than `KEPT_SHARE` of it.
  """
  if abs(edit) <= margin:
    return None
  # In the direction of the edit, so that a rise and a fall are judged alike.
  change, left = abs(edit), controlled if edit > 0 else -controlled
  if left > KEPT_SHARE * change if elsewhere else change - left <= margin:
    return "kept"
  if left > margin:
    return "lost"
  return "gone" if left >= -margin else "reversed"


def consistent(predicted: Predicted, observed: Mapping[str, Symbol]) -> bool:
  """Returns whether every observable that was both predicted and observed matches."""
  return all(_met(s, observed.get(name, s)) for name, s in predicted.items())


def _met(predicted: Symbol, observed: Symbol) -> bool:
  contains = FATES[1:]
  if predicted in contains and observed in contains:
    # A later fate is a case of an earlier one: what is gone is lost as well.
    return contains.index(observed) >= contains.index(predicted)
  return predicted == observed
