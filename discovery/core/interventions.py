"""What a control may change: the exact form of each kind, checked before any call.

A task has a table of kinds. A prompt prints every example of it, and a packet registers
nothing that `checked` refuses, so a control cannot fail for its form.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mxjax.discovery.core.candidate_source import MAX_BYTES
from mxjax.discovery.core.interface import Interface
from mxjax.errors import ValueRefusal

PROGRAM = "program"
"""Kind of the control that runs another program: the candidate without one part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
  """One value of an intervention: a name, several names, a number or a span of layers.

  Attributes:
    doc: What it says, for people and prompts.
    one_of: The names that it may be; empty for a number or a span.
    several: Whether it is a list of one or more of these names.
    bounds: Least and largest number.
    span: Whether it is `[first, end]`, without the end.
    optional: Whether it may be left out.
  """

  doc: str
  one_of: tuple[str, ...] = ()
  several: bool = False
  bounds: tuple[float, float] = (0.0, 0.0)
  span: bool = False
  optional: bool = False

  @property
  def form(self) -> str:
    """What is allowed, in words."""
    if self.span:
      return "[first, end], two integers with 0 <= first < end"
    if not self.one_of:
      return f"a number from {self.bounds[0]:g} to {self.bounds[1]:g}"
    names = ", ".join(json.dumps(name) for name in self.one_of)
    return f"a list of one or more of {names}" if self.several else f"one of {names}"

  def allows(self, value: Any) -> bool:
    """Returns whether a value read from JSON has this form."""
    if self.several:
      # Types before sets: JSON has lists of lists, which no set can hold.
      known = isinstance(value, list) and value and set(map(type, value)) == {str}
      is_once = bool(known) and len({*value}) == len(value)
      return is_once and {*value} <= {*self.one_of}
    if self.one_of:
      return isinstance(value, str) and value in self.one_of
    if self.span:
      # By `type`, because `true` is an integer to `isinstance`.
      is_pair = isinstance(value, list) and [*map(type, value)] == [int, int]
      return is_pair and 0 <= value[0] < value[1]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and self.bounds[0] <= value <= self.bounds[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervention:
  """One kind of control.

  Attributes:
    doc: What it changes.
    tells: Which accounts it tells apart, for prompts.
    example: A whole intervention of this kind, which the task can execute.
    values: Its values beside `kind`, by name.
    of_parent: Whether the evaluator is told the parent's program as well; the proposer
      writes nothing for it.
    elsewhere: Whether it takes nothing from the edit and measures it a second time, on
      another text or another draw; see `residual.fate`.
  """

  doc: str
  example: Mapping[str, Any]
  values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
  of_parent: bool = False
  elsewhere: bool = False
  tells: str = ""


Interventions = Mapping[str, Intervention]


def program(interface: Interface) -> Intervention:
  """Returns the kind `program` for a task with these hooks and plan keys."""
  # A plan key may have the name of a hook, as `transform` and `balance` of the ptq
  # task.
  names = tuple(dict.fromkeys((*interface.names, *interface.plan)))
  hook = interface.hooks[0]
  return Intervention(
    doc="another program: the candidate without one part. `without` lists hooks and "
    "PLAN keys that are the parent's again; or `code` holds whole functions that "
    "replace those of the same name, and `plan` values of PLAN. It is charged like any "
    "control, and kept as a program of its own if it does better",
    tells="which of two parts carries the gain (an ablation, by `without`), or whether "
    "a choice, constant or rule has to be this one (`code` or `plan` with another)",
    example={"kind": PROGRAM, "without": [hook.name]},
    values={
      "without": Value(
        doc="as in the parent", one_of=names, several=True, optional=True
      ),
    },
  )


def of_task(interface: Interface, own: Interventions) -> dict[str, Intervention]:
  """Returns every kind of control of a task: its own and `program`."""
  return {**own, PROGRAM: program(interface)}


def checked(known: Interventions, given: Mapping[str, Any]) -> dict[str, Any]:
  """Returns an intervention in its registered form.

  `parent`, which only the evaluator fills in, is left out.

  Raises:
    ValueError: It has no such form; the message holds one that would do.
  """
  kind = given.get("kind")
  if not isinstance(kind, str) or kind not in known:
    examples = "; ".join(json.dumps(each.example) for each in known.values())
    raise ValueError(
      f"expected an intervention with `kind` among {', '.join(known)}, got "
      f"{_shown(given)}; write one such as {examples}."
    )
  form = known[kind]
  values = {k: v for k, v in given.items() if k not in ("kind", "parent")}
  if kind == PROGRAM:
    _check_program(values, form)
  else:
    _check_names(kind, values, form)
  for name, value in values.items():
    if name in form.values and not form.values[name].allows(value):
      raise ValueRefusal(
        kind,
        expected=f"`{name}` to be {form.values[name].form}",
        got=_shown(value),
        mend=f"write it like {json.dumps(form.example)}",
      )
  return {"kind": kind, **values}


def _check_names(kind: str, values: Mapping[str, Any], form: Intervention) -> None:
  needed = {name for name, value in form.values.items() if not value.optional}
  extra, absent = sorted({*values} - {*form.values}), sorted(needed - {*values})
  if extra or absent:
    raise ValueRefusal(
      kind,
      expected=f"the values {_listed(form.values)} beside `kind`",
      got=_listed(values),
      mend=f"write it like {json.dumps(form.example)}",
    )


def _check_program(values: Mapping[str, Any], form: Intervention) -> None:
  code, plan = values.get("code", ""), values.get("plan", {})
  forms = {"without": list, "code": str, "plan": dict}
  good = values and all(
    name in forms and isinstance(value, forms[name]) for name, value in values.items()
  )
  if not good or ("without" in values) == bool({"code", "plan"} & {*values}):
    raise ValueRefusal(
      "program",
      expected="either `without`, or `code` (text of whole functions), `plan` "
      "(values by key) or both",
      got=_shown(values),
      mend=f"write it like {json.dumps(form.example)} or "
      '{"kind": "program", "code": "def ..."}',
    )
  if len(code) > MAX_BYTES or len(plan) > len(form.values["without"].one_of):
    raise ValueRefusal(
      "program",
      expected=f"at most {MAX_BYTES} characters of code and the plan's keys",
      got=f"{len(code)} and {len(plan)}",
      mend="send only what changes",
    )


def _listed(names: Iterable[str]) -> str:
  return ", ".join(names) or "none"


def _shown(value: Any) -> str:
  return f"{value!r:.200}"
