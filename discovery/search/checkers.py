"""Checks whether a demanded response reached what is executed, and matters there.

There are four checkers. Source diff, execution probe and layer output are the paper's;
comparing the lowered program is our addition and costs no evaluator call. The probe
takes the declared parts of an edit back and asks whether the observable that the demand
is about moves by more than its margin: an edit without effect answers nothing. Where
the declared parts are the whole edit, the parent is that probe, and costs nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from mxjax.discovery.core.candidate_source import CandidateSource
from mxjax.discovery.core.packet import Packet
from mxjax.discovery.core.proposal import Demand
from mxjax.discovery.core.residual import PRIMARY, Explanation, disagree
from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.search import scopes

Checker = Literal["none", "source", "lowered", "probe", "layer_output"]
# The paper calls its comparison of layer outputs strict, and names no tolerance.
LAYER_TOLERANCE = 0.05
"""Smallest relative change of every layer's output that `layer_output` accepts."""


@dataclasses.dataclass(frozen=True)
class Check:
  """Whether a checker accepts a response as implemented, and what it looked at.

  `implemented` is None where what would tell could not be run: that is no answer, and
  no failure either.
  """

  checker: Checker
  implemented: bool | None
  detail: str


def needs_probe(checker: Checker) -> bool:
  """Returns whether a checker runs the candidate with its response reverted."""
  return checker in ("probe", "layer_output")


def reverted(candidate: Call, parent: Call, computation: Iterable[str]) -> Call:
  """Returns the candidate with only these hooks and plan keys as in the parent.

  The result has the execution identity of the program that it amounts to. If the
  response is the only change, that is the parent, which costs nothing to run again.
  """
  return candidate.replaced(parent.part(computation))


def by_source(
  candidate: CandidateSource, parent: CandidateSource, computation: Iterable[str]
) -> Check:
  """Accepts if the text of one of these hooks or one of these plan values differs."""
  return _compared("source", computation, candidate, parent, ("plan", "hooks"))


def by_lowering(candidate: Call, parent: Call, computation: Iterable[str]) -> Check:
  """Accepts if the lowered program of a hook or a plan value differs."""
  return _compared("lowered", computation, candidate, parent, ("plan", "computation"))


def _compared(
  checker: Checker,
  computation: Iterable[str],
  mine: object,
  before: object,
  fields: tuple[str, ...],
) -> Check:
  value: Callable[[object, str, str], object] = lambda program, field, name: getattr(
    program, field
  ).get(name)
  changed = [
    name
    for name in computation
    if any(value(mine, f, name) != value(before, f, name) for f in fields)
  ]
  return Check(checker, bool(changed), f"{checker} differs in {changed}")


def by_probe(
  candidate: Outcome,
  without: Mapping[str, float],
  about: Sequence[str],
  margins: Mapping[str, float],
) -> Check:
  """Accepts if an observable that the demand is about moves beyond its margin.

  `without` holds the values of the `reverted` call.
  """
  found = scopes.moved(margins, candidate.values, without)
  shown = [
    f"{name} {without[name]:.6g} to {candidate.values[name]:.6g}, margin "
    f"{margins[name]:.3g}"
    for name in about
    if name in margins and name in without and name in candidate.values
  ]
  told = "; ".join(shown) or f"nothing of {', '.join(about)} is measured"
  return Check("probe", bool({*found} & {*about}), told)


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


def retests(demand: Demand) -> bool:
  """Returns whether a demand asks for a new control of the same intervention."""
  return demand.response == Response.ADD_DISCRIMINATOR and bool(demand.survivors)


def failed(packet: Packet, outcomes: Mapping[str, Outcome]) -> list[str]:
  """Returns the controls that were to run and ended without values."""
  return [
    c.name
    for c in packet.conditions
    if c.kind == "control"
    and c.name in outcomes
    and outcomes[c.name].status != Status.OK
  ]


def missing(
  demand: Demand, packet: Packet, outcomes: Mapping[str, Outcome], target: str
) -> str:
  """Returns what the response lacks in its registration, or an empty string.

  The changed computation is checked separately. A repair needs a focal account that the
  verdict did not exclude, or one that predicts a gain of the target; a discriminator
  needs a control that ran, is new and separates two of the surviving accounts, or, if
  none survived, a new account.
  """
  accounts = tuple(account for account in packet.explanations if not account.rival)
  match demand.response:
    case Response.ADD_DISCRIMINATOR if demand.survivors:
      left = [e for e in packet.explanations if e.name in demand.survivors]
      new = [
        c.name
        for c in packet.conditions
        if c.kind == "control"
        and c.name in outcomes
        and outcomes[c.name].status == Status.OK
        # A control of kind `program` has no intervention; its computation tells it.
        and (c.call.intervention or c.call.computation) not in demand.ran
      ]
      pairs = itertools.product(new, itertools.combinations(left, 2))
      if not any(disagree(a.predicts(n), b.predicts(n)) for n, (a, b) in pairs):
        return (
          f"no new control separates two of {', '.join(demand.survivors)}, which must "
          "be registered by these names"
        )
    case Response.ADD_DISCRIMINATOR:
      if {account.name for account in accounts} <= {e.name for e in demand.accounts}:
        return "no new account is registered"
    case Response.REPAIR_EXPLANATION:
      refuted = {e.name for e in demand.accounts if e.name not in demand.survivors}
      if not accounts:
        return "no account is registered"
      if accounts[0].name in refuted and _same(accounts[0], demand):
        return f"the focal account {accounts[0].name} is one that the verdict excluded"
    case Response.REPAIR_TRANSFER:
      if not accounts or accounts[0].predicts(PRIMARY).get(target) != "down":
        return f"the focal account predicts no gain of {target}"
  return ""


def _same(account: Explanation, demand: Demand) -> bool:
  """Returns whether a demand's verdict was about this account, by name and words."""
  return any(
    account.name == e.name and account.statement == e.statement for e in demand.accounts
  )
