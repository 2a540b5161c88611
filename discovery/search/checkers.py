"""Checks whether a declared response reached the computation that a residual names.

There are four checkers. Source diff, execution probe and layer output are the paper's;
comparing the lowered program is our addition and costs no evaluator call. All look only
at the declared hooks and plan keys, so unrelated code need not change.
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
  """Whether a checker accepts a response as implemented, and what it looked at."""

  checker: Checker
  implemented: bool
  detail: str


def needs_probe(checker: Checker) -> bool:
  """Returns whether a checker runs the candidate with its response reverted."""
  return checker in ("probe", "layer_output")


def reverted(candidate: Call, parent: Call, declared: Iterable[str]) -> Call:
  """Returns the candidate with only the declared hooks and plan keys as in the parent.

  The result has the execution identity of the program that it amounts to. If the
  response is the only change, that is the parent, which costs nothing to run again.
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
  """Accepts if the text of a declared hook or a declared plan value differs."""
  changed = [
    name
    for name in declared
    if candidate.plan.get(name) != parent.plan.get(name)
    or candidate.hooks.get(name) != parent.hooks.get(name)
  ]
  return Check("source", bool(changed), f"source differs in {changed}")


def by_lowering(candidate: Call, parent: Call, declared: Iterable[str]) -> Check:
  """Accepts if a declared hook's lowered program or a declared plan value differs."""
  changed = [
    name
    for name in declared
    if candidate.computation.get(name) != parent.computation.get(name)
    or candidate.plan.get(name) != parent.plan.get(name)
  ]
  return Check("lowered", bool(changed), f"lowered program differs in {changed}")


def by_probe(candidate: Outcome, without: Outcome, declared: Iterable[str]) -> Check:
  """Accepts if reverting the response changes an output of the declared computation.

  `without` is the outcome of the `reverted` call.
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
  """Accepts if the output of every layer moves by more than `LAYER_TOLERANCE`.

  The test is strict on purpose: it accepts no edit without effect, but rejects real
  edits that are small or confined to a few layers.
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
  """Returns the declared computation's outputs; for a plan key, all outputs."""
  names = [name for name in declared if name in outputs]
  return names or sorted(outputs)
