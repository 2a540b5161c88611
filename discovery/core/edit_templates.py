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
from mxjax.discovery.core.residual import PRIMARY, Control, Explanation, disagree


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

  def label(self, params: Mapping[str, Any]) -> str:
    """Returns the name of the edit with its parameters."""
    shown = ",".join(f"{k}={v}" for k, v in sorted(params.items()))
    return f"{self.id}({shown})"

  def edit(self, source: str, params: Mapping[str, Any]) -> str:
    """Returns the source with the edit applied."""
    if self.template:
      code = self.template
      # Not `str.format`, which would take every other brace of the code for a field.
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
