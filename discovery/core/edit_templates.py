"""Edit templates: an edit, the question it answers, and the experiment to ask it.

A template is data. Applied, it gives ordinary source that any other proposer could
revise; its predictions, controls and follow-ups are registered with it. The templates
of a task hold as many decoys as real edits, and nothing in one says which it is.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.candidate_source import with_functions, with_plan
from mxjax.discovery.core.residual import Control, Explanation


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditTemplate:
  """One typed edit.

  Attributes:
    id: Short identifier.
    hooks: Hooks and plan keys it changes; a response is looked for there.
    template: Functions to put in, with `{name}` for parameters; may be empty.
    plan: Plan values to set; `$name` stands for a parameter.
    params: Grid of parameter settings, the first tried first.
    residual: Observable of the question it addresses.
    explanations: The focal account first.
    controls: Allowed controls.
    follow_ups: Edits that extend it when it is supported; itself is always one.
    needs: Plan values that must hold for the edit to be applicable.
    family: For evidence pooled over edits: geometry, discrete or structure.
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
    """Whether the edit makes sense on a program with this plan."""
    return all(plan.get(key) == value for key, value in self.needs.items())

  def label(self, params: Mapping[str, Any]) -> str:
    """Name of the edit with its parameters."""
    shown = ",".join(f"{k}={v}" for k, v in sorted(params.items()))
    return f"{self.id}({shown})"

  def edit(self, source: str, params: Mapping[str, Any]) -> str:
    """The revised source."""
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
  """Identifier of the template that a label names; see `EditTemplate.label`."""
  return label.split("(")[0]


def fingerprint(templates: Sequence[EditTemplate]) -> str:
  """Hash of all templates: it is frozen before a comparison and printed with it."""
  return identity.digest([dataclasses.asdict(template) for template in templates])
