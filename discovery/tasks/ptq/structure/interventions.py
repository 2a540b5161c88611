"""How a candidate behaves in each linear: its hooks and plan, changed by a control."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mxjax.discovery.core.task import Call, ContractError


@dataclasses.dataclass(frozen=True)
class Behaviour:
  """Hooks and plan for a linear, with the changes of the control.

  Attributes:
    hooks: Lowered identity of each hook.
    shuffled: Hooks that receive another block's statistics.
    random_map: Whether a random rotation replaces the map.
    dose: Factor applied to the balance.
    permuted: Part whose channels are in a random order.
  """

  hooks: Mapping[str, str]
  plan: Mapping[str, Any]
  shuffled: frozenset[str] = frozenset()
  random_map: bool = False
  dose: float = 1.0
  permuted: str = ""


PARTS: Mapping[str, Callable[[int, str], bool]] = {
  "even": lambda layer, block: layer % 2 == 0,
  "odd": lambda layer, block: layer % 2 == 1,
  "attention": lambda layer, block: block == "self_attn",
  "mlp": lambda layer, block: block == "mlp",
}
"""Linears selected by each `scope`, as a predicate of layer and block."""
INTERVENTIONS: Mapping[str, str] = {
  "shuffle_stats": "{hooks}: each block or head is told its neighbour's statistics, an "
  "MLP those of the layer before",
  "random_map": "the map is replaced by a fixed random rotation",
  "scope": "{part: even|odd|attention|mlp}: the edit in some linears only",
  "dose": "{factor}: the balance scaled",
  "other_text": "the candidate is scored on windows that no primary run sees, its "
  "parent as well, if the task has other_windows",
  "permute": "{part: mlp|values}: these channels in a fixed random order, in all "
  "layers or those of {layers: [first, end]}, without the end",
}
"""Changes that a control may make; see `behaviours`."""
TOLD = (
  "solve",
  "transform",
  "balance",
  "encode_weight",
  "encode_act",
  "recover_value",
  "recover_mlp",
)
"""Hooks whose units are told statistics that a neighbour also has."""
RECOVERY: Mapping[str, tuple[str, ...]] = {
  "attention": ("measure_value", "recover_value"),
  "mlp": ("measure_mlp", "recover_mlp"),
}
"""Hooks of each recovery, by the plan key that installs it."""


def behaviours(call: Call) -> Callable[[int, str], Behaviour]:
  """Returns the behaviour of each layer and block under a call's intervention.

  Raises:
    ContractError: The intervention is unknown or lacks its values.
  """
  behaviour = Behaviour(call.computation, call.plan)
  match dict(call.intervention):
    case {"kind": "scope", "part": part, "parent": before}:
      parent, is_inside = Behaviour(before["computation"], before["plan"]), PARTS[part]
      if edited := [
        key for key in RECOVERY if not _same_recovery(key, behaviour, parent)
      ]:
        raise ContractError(
          f"ptq: `scope` cannot divide an edit of the {' and '.join(edited)} recovery; "
          "use another control."
        )
      return lambda layer, block: behaviour if is_inside(layer, block) else parent
    case {"kind": "shuffle_stats", "hooks": hooks}:
      if untold := sorted({*hooks} - {*TOLD}):
        raise ContractError(
          f"ptq: shuffle_stats cannot change {untold}, which have no neighbour; use "
          f"some of {list(TOLD)}, or the control scope."
        )
      behaviour = dataclasses.replace(behaviour, shuffled=frozenset(hooks))
    case {"kind": "random_map"}:
      behaviour = dataclasses.replace(behaviour, random_map=True)
    case {"kind": "dose", "factor": factor}:
      behaviour = dataclasses.replace(behaviour, dose=float(factor))
    case {"kind": "other_text"}:
      pass
    case {"kind": "permute", "part": "mlp" | "values" as part, **rest}:
      permuted = dataclasses.replace(behaviour, permuted=part)
      first, end = rest.get("layers", (0, np.inf))
      return lambda layer, block: permuted if first <= layer < end else behaviour
    case change if change:
      # Whatever it lacks: unchanged, the candidate would pass for its own control.
      raise ContractError(
        f"ptq: unknown intervention {change.get('kind')!r}, or one without its values; "
        f"use one of {dict(INTERVENTIONS)}."
      )
  return lambda layer, block: behaviour


def _same_recovery(key: str, one: Behaviour, other: Behaviour) -> bool:
  """Tells whether two behaviours install the same recovery, or none."""
  if not one.plan[key]:
    return not other.plan[key]
  alike = all(one.hooks.get(name) == other.hooks.get(name) for name in RECOVERY[key])
  return bool(other.plan[key]) and alike
