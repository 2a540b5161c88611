"""How a candidate behaves in each linear: its hooks and plan, changed by a control."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from mxjax.discovery.core.interventions import Intervention, Interventions, Value
from mxjax.discovery.core.residual import Rival
from mxjax.discovery.core.task import Call, ContractError
from mxjax.discovery.tasks.ptq.interface import INTERFACE
from mxjax.discovery.tasks.ptq.options import PtqOptions


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
TOLD = (
  "solve",
  "transform",
  "balance",
  "solve_linear",
  "encode_act",
  "recover_value",
  "recover_mlp",
)
"""Hooks whose units are told statistics that a neighbour also has."""
INTERVENTIONS: Interventions = {
  "shuffle_stats": Intervention(
    doc="each block or head is told its neighbour's statistics, solve_linear sums in "
    "which every block has its neighbour's place, an MLP those of the layer before",
    tells="whether a hook makes use of what it is told of its own unit, or would do as "
    "well with any such statistics",
    example={"kind": "shuffle_stats", "hooks": ["transform"]},
    values={
      "hooks": Value(doc="hooks that are told so", one_of=TOLD, several=True),
    },
  ),
  "random_map": Intervention(
    doc="a fixed random rotation in the place of the map T",
    tells="whether the map has to be this one, or any that mixes coordinates would do",
    example={"kind": "random_map"},
  ),
  "scope": Intervention(
    doc="the edit in some linears only, the parent in the others; not for edits of "
    "encode_act or of a recovery, which are not divided over linears",
    tells="where in the network the gain is made",
    example={"kind": "scope", "part": "attention"},
    values={
      "part": Value(doc="the linears with the edit", one_of=tuple(PARTS)),
    },
    of_parent=True,
  ),
  "dose": Intervention(
    doc="the log2 scales of the hook balance times a factor",
    tells="whether the size of the scales matters, or their direction",
    example={"kind": "dose", "factor": -1.0},
    values={"factor": Value(doc="the factor", bounds=(-4.0, 4.0))},
  ),
  "other_text": Intervention(
    doc="the candidate and its parent are scored on windows that no primary run sees; "
    "the only observable is `other_text`, and it costs by its tokens",
    tells="a gain from luck with the text that is scored",
    example={"kind": "other_text"},
    elsewhere=True,
  ),
  "permute": Intervention(
    doc="these channels in a fixed random order",
    tells="whether it matters which channels share a scale",
    example={"kind": "permute", "part": "mlp"},
    values={
      "part": Value(doc="which channels", one_of=("mlp", "values")),
      "layers": Value(doc="in these layers only", span=True, optional=True),
    },
  ),
}
"""Changes that a control may make; see `behaviours`."""


def without(frozen: Collection[str]) -> Interventions:
  """Returns the changes that a control may make where a task freezes some hooks."""
  shuffled = INTERVENTIONS["shuffle_stats"]
  names = tuple(name for name in TOLD if name not in frozen)
  hooks = dataclasses.replace(shuffled.values["hooks"], one_of=names)
  shuffled = dataclasses.replace(shuffled, values={**shuffled.values, "hooks": hooks})
  return {**INTERVENTIONS, "shuffle_stats": shuffled}


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
    # It changes what is scored, and nothing of the program.
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
        f"use one of {[*INTERVENTIONS]}."
      )
  return lambda layer, block: behaviour


def _same_recovery(key: str, one: Behaviour, other: Behaviour) -> bool:
  """Tells whether two behaviours install the same recovery, or none."""
  if not one.plan[key]:
    return not other.plan[key]
  alike = all(one.hooks.get(name) == other.hooks.get(name) for name in RECOVERY[key])
  return bool(other.plan[key]) and alike


def refusal(
  intervention: Mapping[str, Any], own: Call, parent: Call, options: PtqOptions
) -> str:
  """Returns why a control would change nothing, or could not be made; or nothing.

  Everything that can be known without a call is known here, before it is charged.
  """
  kind, plan = intervention["kind"], own.plan
  changed = {
    name
    for name in own.computation
    if own.computation[name] != parent.computation.get(name)
  }
  match dict(intervention):
    case {"kind": "shuffle_stats", "hooks": hooks}:
      if idle := [h for h in hooks if not INTERFACE.hook(h).is_active(plan)]:
        return f"{kind}: this plan never calls {', '.join(idle)}"
      if "recover_mlp" in hooks and options.layer_count < 2:
        return f"{kind}: recover_mlp needs two layers, got {options.layer_count}"
      if plan["transform"] == "reached" and {*hooks} - {"encode_act"}:
        return f"{kind}: transform reached maps blocks one by one; use scope"
    case {"kind": "random_map"} if plan["transform"] in ("off", "reached"):
      return f"{kind}: there is no map to replace with transform {plan['transform']}"
    case {"kind": "scope"}:
      whole = {"encode_act", *(name for names in RECOVERY.values() for name in names)}
      keys = [k for k in (*RECOVERY, "tables") if plan[k] != parent.plan[k]]
      if both := sorted(changed & whole) + keys:
        return f"{kind}: it cannot divide an edit of {', '.join(both)} over linears"
    case {"kind": "dose"} if plan["balance"] == "off":
      return f"{kind}: this plan has balance off"
    case {"kind": "other_text"}:
      if options.other_windows is None or options.objective == "fit3":
        return f"{kind}: this task has no other windows, or an objective on two texts"
    case {"kind": "permute", "layers": [_, end]} if end > options.layer_count:
      return f"{kind}: there are {options.layer_count} layers, got an end of {end}"
  return ""


def rivals(own: Call, parent: Call, options: PtqOptions) -> list[Rival]:
  """Returns what else could explain a gain: any map, or luck of the text."""
  found = []
  shaping = ("transform", "solve", "measure_inputs", "measure_weights")
  # As they execute: a hook that its plan does not call makes no map.
  active = [own.active(INTERFACE), parent.active(INTERFACE)]
  if own.plan["transform"] in ("measured", "solved") and (
    active[0].part(shaping) != active[1].part(shaping)
  ):
    statement = "any rotation of the block does the same, whatever it was made of"
    found.append(Rival("any map would do", statement, {"kind": "random_map"}))
  if options.other_windows is not None and options.objective != "fit3":
    statement = "the score's text happens to suit the edit"
    found.append(
      Rival("luck of this text", statement, {"kind": "other_text"}, keeps=False)
    )
  return found
