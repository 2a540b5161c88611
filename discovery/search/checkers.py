"""Whether a declared response really reached the computation that a residual names.

Four checkers: the paper's three (source diff, execution probe, layer output), and the
lowered program, ours, which costs no evaluator call. All look only at the declared
hooks and plan keys, so unrelated code need not change.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

from mxjax.discovery.core.candidate_source import CandidateSource
from mxjax.discovery.core.task import Call, Outcome, Status

Checker = Literal["none", "source", "lowered", "probe", "layer_output"]
LAYER_TOLERANCE = 0.05
"""Smallest relative change of every layer's output that `layer_output` accepts."""


@dataclasses.dataclass(frozen=True)
class Check:
  """Whether a checker takes a response for implemented, and what it looked at."""

  checker: Checker
  implemented: bool
  detail: str


def needs_probe(checker: Checker) -> bool:
  """Whether a checker runs the candidate with its response taken back."""
  return checker in ("probe", "layer_output")


def reverted(candidate: Call, parent: Call, declared: Iterable[str]) -> Call:
  """The candidate with only the declared hooks and plan keys as in the parent.

  Its execution identity is that of the program it amounts to: where the response is
  all that changed, this is the parent itself and costs nothing to run again.
  """
  hooks, plan = dict(candidate.computation), dict(candidate.plan)
  for name in declared:
    if name in plan:
      plan[name] = parent.plan[name]
    elif name in parent.computation:
      hooks[name] = parent.computation[name]
    else:
      hooks.pop(name, None)
  return Call(hooks, plan, {})


def by_source(
  candidate: CandidateSource, parent: CandidateSource, declared: Iterable[str]
) -> Check:
  """Accepts when the text of a declared hook, or a declared plan value, differs."""
  changed = [
    name
    for name in declared
    if candidate.plan.get(name) != parent.plan.get(name)
    or candidate.hooks.get(name) != parent.hooks.get(name)
  ]
  return Check("source", bool(changed), f"source differs in {changed}")


def by_lowering(candidate: Call, parent: Call, declared: Iterable[str]) -> Check:
  """Accepts when the lowered program of a declared, executed hook differs."""
  changed = [
    name
    for name in declared
    if candidate.computation.get(name) != parent.computation.get(name)
    or candidate.plan.get(name) != parent.plan.get(name)
  ]
  return Check("lowered", bool(changed), f"lowered program differs in {changed}")


def by_probe(candidate: Outcome, without: Outcome, declared: Iterable[str]) -> Check:
  """Accepts when taking the response back changes an output of what is declared.

  Args:
    candidate: Outcome of the candidate as it is.
    without: Outcome of the `reverted` call.
    declared: Hooks and plan keys of the response.
  """
  if candidate.status != Status.OK or without.status != Status.OK:
    return Check("probe", False, f"probe ended {without.status}")
  changed = [
    name
    for name in output_names(declared, candidate.outputs)
    if candidate.outputs.get(name) != without.outputs.get(name)
  ]
  return Check("probe", bool(changed), f"outputs changed by the rollback: {changed}")


def by_layer_output(candidate: Outcome, without: Outcome) -> Check:
  """Accepts when the output of every layer moves by more than `LAYER_TOLERANCE`.

  Strict on purpose: it accepts no edit without effect, and turns down real ones that
  are small or confined to a few layers.
  """
  layers = sorted(name for name in candidate.values if name.startswith("layer_"))
  if candidate.status != Status.OK or without.status != Status.OK or not layers:
    return Check("layer_output", False, f"probe ended {without.status}")
  still = [
    name
    for name in layers
    if abs(candidate.values[name] - without.values[name])
    <= LAYER_TOLERANCE * abs(without.values[name])
  ]
  return Check("layer_output", not still, f"layers that did not move: {still}")


def output_names(declared: Iterable[str], outputs: Mapping[str, str]) -> list[str]:
  """Named outputs of the declared computation; all of them for a plan key."""
  names = [name for name in declared if name in outputs]
  return names or sorted(outputs)
