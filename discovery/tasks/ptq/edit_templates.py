"""Edit templates of the PTQ task: as many decoys as edits known to help, told alike.

A search that finds the good ones has re-assembled a library that we wrote; it has
discovered nothing. What the templates show is whether evidence tells them apart. They
are data, in `edit_templates.toml`; this file gives each its registered experiment.
"""

import importlib.resources
import tomllib
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
  observable: str, control: str, told: str, *, own: Symbol = "up"
) -> tuple[Explanation, ...]:
  """The competing stories that every template tells of its edit.

  Args:
    observable: The signature.
    control: The condition that separates the first two.
    told: What the focal account says.
    own: What the focal account predicts of the signature under the control.
  """
  better = _both("down", observable)
  return (
    Explanation("measured", told, {**better, control: {observable: own}}),
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
  intervention = {"kind": "scope", "part": part, "parent": True}
  return Control(part, intervention, 1, f"the edit in {part} linears only")


ROTATION = Control("rotation", {"kind": "random_map"}, 1, "a random rotation instead")
OPPOSITE = Control("dose", {"kind": "dose", "factor": -1.0}, 2, "the opposite balance")
HALVES = (_scoped("attention"), _scoped("mlp"))
HOOKS = {
  "transform": ("transform", "operator_error", "geometry"),
  "balance": ("balance", "operator_error", "geometry"),
  "encode_weight": ("curvature", "weight_error", "discrete"),
  "encode_act": ("tables", "activation_error", "discrete"),
  "recover_value": ("attention", "value_error", "structure"),
  "recover_mlp": ("mlp", "mlp_error", "structure"),
}
"""By hook: the plan key that its edits set, the question they address, their family."""


def _experiment(
  hook: str, setting: Any, code: str, observable: str, statement: str
) -> tuple[tuple[Explanation, ...], tuple[Control, ...]]:
  """The accounts of an edit, and the controls that tell them apart."""
  neighbour = Control(
    "neighbour",
    {"kind": "shuffle_stats", "hooks": [hook]},
    1,
    "each block is told its neighbour's numbers",
  )
  accounts = _accounts(observable, "neighbour", statement)
  match hook:
    case "transform" if "stats[" not in code:
      return _accounts(observable, "rotation", statement), (ROTATION, *HALVES)
    case "encode_weight" if setting == "none":
      # Without curvature nothing is told that a neighbour's numbers could replace.
      accounts = _accounts(observable, "attention", statement, own="same")
      return accounts, (neighbour, *HALVES)
    case "transform" | "encode_weight":
      return accounts, (neighbour, *HALVES)
    case "balance":
      return accounts, (neighbour, OPPOSITE)
    case "encode_act":
      return accounts, (neighbour,)
    case _:
      return _recovery_accounts(statement), (neighbour,)


def _recovery_accounts(told: str) -> tuple[Explanation, ...]:
  gains: Predicted = {"log_ppl": "down"}
  same: Predicted = {"log_ppl": "same"}
  return (
    Explanation("path", told, {"primary": gains, "neighbour": same}),
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
  id: str,  # noqa: A002
) -> EditTemplate:
  """One entry of the file; its comment says what the fields mean."""
  key, hooks_own, family = HOOKS[hook]
  source = "".join([*(SNIPPETS[name] for name in uses), code])
  residual = residual or hooks_own
  explanations, controls = _experiment(hook, setting, source, residual, statement)
  return EditTemplate(
    id=id,
    hooks=(hook,),
    template=source,
    plan={key: setting},
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
