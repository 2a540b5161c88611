"""Edit templates of the PTQ task: as many decoys as useful edits, described alike.

A search that finds the good ones has reassembled a library that we wrote; it has
discovered nothing. The templates show whether evidence tells them apart. They are data
in `edit_templates.toml`; this file gives each its registered experiment.
"""

import importlib.resources
import tomllib
import types
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.residual import Control, Explanation, Predicted, Symbol


def _both(symbol: Symbol, observable: str) -> Mapping[str, Predicted]:
  return {"primary": {"log_ppl": symbol, observable: symbol}}


HARM = Explanation(
  "harm", "the edit destroys something", {"primary": {"log_ppl": "up"}}
)


def _accounts(
  observable: str, control: str, statement: str, *, own: Symbol = "up"
) -> tuple[Explanation, ...]:
  """Builds the competing explanations that every template gives for its edit.

  `observable` is the signature, and `control` the condition that separates the first
  two explanations. `statement` is what the focal explanation says; `own` is its
  prediction of the signature under the control.
  """
  better = _both("down", observable)
  return (
    Explanation("measured", statement, {**better, control: {observable: own}}),
    Explanation(
      "generic",
      "any edit of this kind does the same, whatever it was told",
      {**better, control: {observable: "down"}},
    ),
    Explanation(
      "elsewhere",
      "the target gains and the signature has nothing to do with it",
      {"primary": {"log_ppl": "down", observable: "same"}},
    ),
    Explanation(
      "local",
      "the signature falls and nothing follows from it",
      {"primary": {"log_ppl": "same", observable: "down"}},
    ),
    Explanation("nothing", "the edit does nothing", _both("same", observable)),
    HARM,
  )


def _scoped(part: str) -> Control:
  intervention = {"kind": "scope", "part": part}
  return Control(part, intervention, 1, f"the edit in {part} linears only")


ROTATION = Control("rotation", {"kind": "random_map"}, 1, "a random rotation instead")
OPPOSITE = Control("dose", {"kind": "dose", "factor": -1.0}, 1, "the opposite balance")
HALVES = (_scoped("attention"), _scoped("mlp"))
HOOKS = {
  "transform": ("transform", "operator_error", "geometry"),
  "balance": ("balance", "operator_error", "geometry"),
  "encode_weight": ("curvature", "weight_error", "discrete"),
  "encode_linear": ("curvature", "weight_error", "discrete"),
  "encode_act": ("tables", "activation_error", "discrete"),
  "recover_value": ("attention", "value_error", "structure"),
  "recover_mlp": ("mlp", "mlp_error", "structure"),
}
"""For each hook: the plan key that its edits set, their question, and their family."""

TOLD_BY = {"encode_linear": "solve_linear"}
"""The hook whose sums a neighbour has, where an edit's hook is told what it solved."""


def _experiment(
  hook: str, code: str, observable: str, statement: str
) -> tuple[tuple[Explanation, ...], tuple[Control, ...]]:
  """Returns the explanations of an edit and the controls that tell them apart."""
  neighbour = Control(
    "neighbour",
    {"kind": "shuffle_stats", "hooks": [TOLD_BY.get(hook, hook)]},
    1,
    "each block is told its neighbour's numbers",
  )
  accounts = _accounts(observable, "neighbour", statement)
  match hook:
    # Told nothing of a block, it is compared with another map instead of other
    # statistics.
    case "transform" if "stats[" not in code:
      return _accounts(observable, "rotation", statement), (ROTATION, *HALVES)
    case "encode_weight":
      # It receives nothing that a neighbour's numbers could replace.
      return _accounts(observable, "attention", statement, own="same"), HALVES
    case "transform" | "encode_linear":
      return accounts, (neighbour, *HALVES)
    case "balance":
      return accounts, (neighbour, OPPOSITE)
    case "encode_act":
      return accounts, (neighbour,)
    case _:
      return _recovery_accounts(statement), (neighbour,)


def _recovery_accounts(statement: str) -> tuple[Explanation, ...]:
  gains: Predicted = {"log_ppl": "down"}
  same: Predicted = {"log_ppl": "same"}
  return (
    Explanation("path", statement, {"primary": gains, "neighbour": same}),
    Explanation(
      "generic",
      "any correction of this size does the same",
      {"primary": gains, "neighbour": gains},
    ),
    Explanation("nothing", "nothing moves", {"primary": same}),
    HARM,
  )


def _edit(
  *,
  hook: str,
  setting: Any,
  statement: str,
  code: str = "",
  uses: Sequence[str] = (),
  residual: str = "",
  params: Sequence[Mapping[str, Any]] = ({},),
  follow_ups: Sequence[str] = (),
  also: Mapping[str, Any] = types.MappingProxyType({}),
  id: str,  # noqa: A002
) -> EditTemplate:
  """Builds a template from one entry of the file, whose comment explains the fields."""
  key, hooks_own, family = HOOKS[hook]
  source = "".join([*(SNIPPETS[name] for name in uses), code])
  residual = residual or hooks_own
  explanations, controls = _experiment(hook, source, residual, statement)
  return EditTemplate(
    id=id,
    hooks=(hook,),
    template=source,
    plan={key: setting, **also},
    params=tuple(params),
    residual=residual,
    explanations=explanations,
    controls=controls,
    follow_ups=tuple(follow_ups),
    family=family,
    statement=statement,
  )


_FILE = importlib.resources.files(__package__) / "edit_templates.toml"
_DATA = tomllib.loads(_FILE.read_text())
SNIPPETS: Mapping[str, str] = _DATA["snippets"]
USEFUL, DECOYS = (
  tuple(_edit(**entry) for entry in _DATA[kind]) for kind in ("useful", "decoys")
)
EDIT_TEMPLATES = (*USEFUL, *DECOYS)
assert len(USEFUL) == len(DECOYS)
