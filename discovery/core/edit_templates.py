"""Edit templates: each holds an edit, the question it answers, and an experiment.

A template is data. Applying it gives ordinary source that any other proposer could
revise, and registers its predictions, controls and follow-ups. The templates of a task
include as many decoys as real edits, and nothing in a template tells which it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import with_functions, with_plan
from mxjax.discovery.core.residual import (
  LUCK,
  OTHER_TEXT,
  PRIMARY,
  Control,
  Explanation,
  Predicted,
  Symbol,
  disagree,
)

MISLED: tuple[tuple[str, str, Symbol, Symbol | None, Symbol], ...] = (
  (LUCK, "the score's text happens to suit the edit", "down", None, "same"),
  ("overfit", "the score's text gains and others lose", "down", "down", "up"),
  ("overfit aside", "the same, beside the residual", "down", "same", "up"),
  ("unlucky", "the score's text happens not to suit it", "same", "down", "down"),
  ("unlucky aside", "the same, beside the residual", "same", "same", "down"),
  ("veiled", "the score's text hides a loss", "same", "down", "up"),
  ("unfit", "the score's text loses and others gain", "up", "down", "down"),
  ("unfit aside", "the same, beside the residual", "up", "same", "down"),
  ("spared", "the score's text loses and others do not", "up", "down", "same"),
  ("spared aside", "the same, beside the residual", "up", "same", "same"),
)
"""Accounts by which the score's text is not like others.

Each has a name, a statement, how the score moves, how the residual does if that is
said, and how the score moves on other text. Where a score gains and its residual rises,
no account is left but luck, so nothing is asked.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditTemplate:
  """One typed edit.

  Attributes:
    hooks: Hooks and plan keys that the edit changes; checkers look only there.
    template: Functions to insert, with `{name}` for parameters; may be empty.
    plan: Plan values to set; `$name` stands for a parameter.
    params: Grid of parameter settings; the first is tried first.
    residual: Observable of the question that the edit addresses.
    explanations: Competing explanations, the focal one first.
    follow_ups: Edits that extend this one when it is supported, besides itself.
    needs: Plan values that must hold for the edit to be applicable.
    family: Group for pooling evidence: geometry, discrete or structure.
    statement: One sentence for people.
  """

  id: str
  hooks: tuple[str, ...]
  template: str = ""
  plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  params: tuple[Mapping[str, Any], ...] = ({},)
  residual: str
  explanations: tuple[Explanation, ...]
  controls: tuple[Control, ...]
  follow_ups: tuple[str, ...] = ()
  needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  family: str = ""
  statement: str = ""

  def applies(self, plan: Mapping[str, Any]) -> bool:
    """Returns whether the edit makes sense on a program with this plan."""
    return all(plan.get(key) == value for key, value in self.needs.items())

  def contested(self) -> "EditTemplate":
    """Returns the edit with only those accounts that a control must tell apart.

    They agree with one another on the primary run; the focal one is among them.
    """
    kept: list[Explanation] = []
    for account in self.explanations:
      first = account.predicts(PRIMARY)
      if not any(disagree(first, other.predicts(PRIMARY)) for other in kept):
        kept.append(account)
    return dataclasses.replace(self, explanations=tuple(kept))

  def with_luck(self, target: str) -> "EditTemplate":
    """Returns the edit with more accounts, which say that the score's text misleads.

    A gain may be luck, and a loss may hide a gain unless the residual rose. Luck says
    nothing of the residual. Every other account predicts on another text what it
    predicts of the score.
    """

    def everywhere(account: Explanation) -> Explanation:
      moves = account.predicts(PRIMARY).get(target)
      shown: dict[str, Predicted] = {OTHER_TEXT: {OTHER_TEXT: moves}} if moves else {}
      return dataclasses.replace(account, predictions={**account.predictions, **shown})

    accounts = [everywhere(account) for account in self.explanations]
    for name, told, scored, moves, shown in MISLED:
      said: Predicted = {self.residual: moves} if moves else {}
      predictions: dict[str, Predicted] = {
        PRIMARY: {target: scored, **said},
        OTHER_TEXT: {OTHER_TEXT: shown},
      }
      accounts.append(Explanation(name, told, predictions))
    told = "the candidate and its parent are scored on text that no primary run sees"
    control = Control(OTHER_TEXT, {"kind": OTHER_TEXT}, 1, told)
    return dataclasses.replace(
      self, explanations=tuple(accounts), controls=(*self.controls, control)
    )

  def label(self, params: Mapping[str, Any]) -> str:
    """Returns the name of the edit with its parameters."""
    shown = ",".join(f"{k}={v}" for k, v in sorted(params.items()))
    return f"{self.id}({shown})"

  def edit(self, source: str, params: Mapping[str, Any]) -> str:
    """Returns the source with the edit applied."""
    if self.template:
      code = self.template
      for name, value in params.items():
        code = code.replace("{" + name + "}", repr(value))
      source = with_functions(source, code)
    plan = {
      k: params[v[1:]] if isinstance(v, str) and v.startswith("$") else v
      for k, v in self.plan.items()
    }
    return with_plan(source, plan) if plan else source


def id_of(label: str) -> str:
  """Returns the template identifier in a label made by `EditTemplate.label`."""
  return label.split("(")[0]


def fingerprint(templates: Sequence[EditTemplate]) -> str:
  """Hashes all templates; a comparison freezes this hash and prints it."""
  return identity.digest([dataclasses.asdict(template) for template in templates])
