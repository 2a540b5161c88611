"""Verdicts bind: what each of the six demands, and which later programs meet it.

Scripted proposals in the synthetic world: a first edit that earns a verdict, then a
successor that answers its demand or only seems to.
"""

import dataclasses
import re

import pytest

from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import Proposal, ProposerError
from mxjax.discovery.core.residual import Control, Explanation, Residual
from mxjax.discovery.proposers import prompt
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import registration
from mxjax.discovery.tasks import world
from tests.cases import slow
from tests.discovery import searching

TASK = world.World(seed=3)
CARDS = {card.id: card for card in TASK.edit_templates}
A, B = "attention", "geometry"
"""The site that the demand is about, and another one."""


def body(site, act):
  return f"\ndef {site}(x):\n  return {act}\n"


def apply(source, edits):
  """The source with whole sites replaced by expressions of `x`."""
  for site, act in edits.items():
    source = re.sub(
      rf"def {site}\(x\):\n +return .*\n", body(site, act).lstrip(), source
    )
  return source


def operation(name, amplitude=0.5):
  return f"x + {amplitude} * {world.OPERATIONS[name][0]}"


def card(site, name):
  """The registered experiment of a card, without its edit."""
  made = CARDS[f"{site}-{name}"]
  return {
    "label": made.id,
    "residual": made.residual,
    "explanations": made.explanations,
    "controls": made.controls,
    "declared": (site,),
  }


def proposal(edits, **told):
  return lambda context: Proposal(
    source=apply(context.parent.source, edits), **{"label": "edit", **told}
  )


@pytest.fixture(scope="module")
def executor():
  return LocalExecutor(TASK)


@pytest.fixture
def conduct(executor, tmp_path):
  """Runs a script in the world; returns the search, its events and the contexts."""

  def run(*script, task=TASK, **config):
    folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    proposer = searching.Scripted(*script, at_end=ProposerError)
    options = {"seed": 3, "budget": 60, "frontier": 1, **config}
    at = executor.sibling(task)
    running = searching.run(folder, task, proposer, at, **options)
    return running, store.read_events(folder), proposer.contexts

  return run


def of(events, name):
  return [event for event in events if event["event"] == name]


def checks(events, response):
  return [e["implemented"] for e in of(events, "check") if e["response"] == response]


# What supports, and the extension that it demands.


def first_site(kind, site=None):
  """A world in which this kind of operation is at the first site, or at a given one."""
  for seed in range(3, 60):
    task = world.World(seed=seed)
    first = next(s for s in world.SITES if s not in task.prerequisite)
    if kind in task.truth[first].values() and site in (None, first):
      name = next(op for op, k in task.truth[first].items() if k == kind)
      return task, first, name
  raise AssertionError(kind)


def supported(site, task=TASK):
  """The edit of a site that is its mechanism by half, and the whole of it."""
  name = next(op for op, kind in task.truth[site].items() if kind == "mechanism")
  told = card(site, name)
  return proposal({site: operation(name, 0.3)}, **told), operation(name), told


SITES = [(A, B), (B, A), ("weights", "mlp")]
"""The site of a demand and another one, and the other way round."""
SUCCESSORS = {
  "the other computation, declared": lambda a, b, more: ({b: "-x"}, (b,), False),
  "the other computation, this one declared": lambda a, b, more: (
    {b: "-x"},
    (a,),
    False,
  ),
  "the other computation, both declared": lambda a, b, more: ({b: "-x"}, (a, b), False),
  "this one only in its text": lambda a, b, more: ({a: "{kept} * 1"}, (a,), False),
  "the other, and this one in its text": lambda a, b, more: (
    {a: "{kept} * 1", b: "-x"},
    (a, b),
    False,
  ),
  "this one, the other declared": lambda a, b, more: ({a: more}, (b,), False),
  "nothing declared": lambda a, b, more: ({a: more}, (), False),
  "back to before": lambda a, b, more: ({a: "x", b: "-x"}, (a,), False),
  "this one": lambda a, b, more: ({a: more}, (a,), True),
  "both": lambda a, b, more: ({a: more, b: "-x"}, (a, b), True),
}


@pytest.mark.parametrize(("site", "other"), [*SITES[:2], *slow(SITES[2])])
@pytest.mark.parametrize("kind", SUCCESSORS)
def test_a_demand_is_met_in_the_computation_that_its_residual_names(
  conduct, site, other, kind
):
  task, _, _ = first_site("mechanism", site)
  first, more, told = supported(site, task)
  edits, declared, is_met = SUCCESSORS[kind](site, other, more)
  kept = first_body(first, site)
  edits = {name: act.replace("{kept}", f"({kept})") for name, act in edits.items()}
  answer = proposal(edits, label=kind, declared=declared)
  running, events, _ = conduct(first, answer, task=task)
  assert [e["verdict"] for e in of(events, "verdict")][0] == "supported"
  assert checks(events, "extend") == [is_met]
  closed = [e["key"] for e in of(events, "residual") if e["status"] == "closed"]
  assert [key.split(":")[1] for key in closed] == [f"excess_{site}"] * is_met
  statuses = [e["status"] for e in of(events, "demand") if e["response"] == "extend"]
  assert ("met" in statuses, "failed" in statuses) == (is_met, not is_met)


def test_nothing_is_asked_of_an_observable_at_its_floor(conduct):
  first, whole, told = supported(A)
  _, events, contexts = conduct(proposal({A: whole}, **told), proposal({}))
  assert [e["verdict"] for e in of(events, "verdict")] == ["supported"]
  (event,) = of(events, "demand")
  assert (event["status"], event["response"]) == ("at_floor", "extend")
  assert event["detail"] == f"excess_{A} is 0.18, and its floor is 0.18"
  closed = [e["key"] for e in of(events, "residual") if e["status"] == "closed"]
  assert [key.split(":")[1] for key in closed] == [f"excess_{A}"]
  assert contexts[1].demands == ()
  assert contexts[1].history[-1].asks == f"nothing: {event['detail']}"


def test_an_edit_that_moves_nothing_has_no_effect_whatever_was_predicted(conduct):
  """Its outputs differ, and no observable moves beyond its margin."""
  inert = next(op for op, kind in TASK.truth[A].items() if kind == "inert")
  said = lambda name, symbol: Explanation(
    name, "", {"primary": {"loss": "down"}, "dose": {"loss": symbol}}
  )
  null = proposal(
    {A: operation(inert, 0.1)},
    residual=f"excess_{A}",
    explanations=(said("one", "down"), said("two", "up")),
    controls=(WORKING,),
  )
  running, events, contexts = conduct(null, proposal({}))
  (found,) = of(events, "verdict")
  assert (found["verdict"], found["reason"]) == ("no_effect", "within_margins")
  assert running.ledger.spent == 2, "no control is worth a call"
  # It is shown neither to act nor to do nothing: nothing is owed, and nothing banned.
  (told,) = of(events, "demand")
  assert (told["status"], told["program"]) == ("within_margin", contexts[0].parent.id)
  change = contexts[1].history[-1].changes["loss"]
  assert change > 0
  shown = f"loss moved by {change:+.3g}, which is within its margin 0.004"
  assert told["detail"] == shown
  assert contexts[1].demands == ()
  assert contexts[1].history[-1].asks == f"nothing: {told['detail']}"


def first_body(made, site):
  """The expression that an edit leaves at a site."""
  context = dataclasses.make_dataclass("C", ["parent"])
  parent = dataclasses.make_dataclass("P", ["source"])
  source = made(context(parent(TASK.interface.default_source()))).source
  return re.search(rf"def {site}\(x\):\n +return (.*)\n", source)[1]


@pytest.mark.parametrize("checker", ["source", "lowered", "probe", "layer_output"])
def test_every_checker_looks_at_what_is_declared(conduct, checker):
  first, _, told = supported(A)
  other = proposal({B: "-x"}, declared=(A,))
  _, events, _ = conduct(first, other, checker=checker)
  assert checks(events, "extend") == [False]


@pytest.mark.parametrize("checker", ["probe", "layer_output"])
def test_a_probe_takes_back_what_is_declared_alone(conduct, checker):
  """The other edit moves every layer, and stays in the probe."""
  first, _, told = supported(A)
  apparent = {A: f"({first_body(first, A)}) * 1", B: "-x"}
  answer = proposal(apparent, declared=(A,))
  _, events, _ = conduct(first, answer, checker=checker)
  assert checks(events, "extend") == [False]
  ran = [e["kind"] for e in of(events, "outcome")]
  assert ran.count("probe") == 1


def test_an_unanswered_demand_follows_the_program_that_ignored_it(conduct):
  first, _, told = supported(A)
  # The second edit gains elsewhere, so it is the next champion and parent.
  second, _, _ = supported("mlp")
  _, events, contexts = conduct(first, second, second)
  assert [len(context.demands) for context in contexts[:3]] == [0, 1, 1]
  ignoring = contexts[2]
  assert ignoring.parent.id != contexts[1].parent.id
  assert [d.attempts for d in ignoring.demands if d.label == told["label"]] == [1]
  said = [(e["status"], e["program"][:6]) for e in of(events, "demand")]
  assert ("failed", ignoring.parent.id[:6]) in said


def test_a_response_that_fails_twice_is_abandoned_in_the_log_and_closes_nothing(
  conduct,
):
  first, _, told = supported(A)
  worse = [proposal({B: act}, declared=(B,)) for act in ("-x", "-2 * x")]
  running, events, _ = conduct(first, *worse)
  statuses = [e["status"] for e in of(events, "demand") if e["response"] == "extend"]
  assert statuses == ["owed", "failed", "abandoned"]
  questions = running.residuals.questions.values()
  assert "closed" not in {question.status for question in questions}


def test_a_program_carries_several_demands_and_the_relevant_one_is_answered(conduct):
  first, more, told = supported(A)
  # A mediator of the site that the first edit opened; it does not gain.
  (site,) = (s for s, before in TASK.prerequisite.items() if before == A)
  mediator = next(op for op, kind in TASK.truth[site].items() if kind == "mediator")
  second = proposal({site: operation(mediator)}, **card(site, mediator))
  answer = proposal({A: more}, **told)
  _, events, contexts = conduct(first, second, answer)
  owing = {d.response: d for d in contexts[2].demands}
  assert set(owing) == {"extend", "repair_transfer"}
  about = {e["response_to"] for e in of(events, "check") if e["implemented"]}
  assert owing["extend"].packet in about
  met = [e["response"] for e in of(events, "demand") if e["status"] == "met"]
  assert met == ["extend"]


def test_what_does_not_fit_runs_with_less_and_the_log_says_so(conduct):
  first, more, told = supported(A)
  answer = proposal({A: more, B: "-x"}, **{**told, "declared": (A, B)})
  # Four calls before it; two are left, and the whole packet takes four.
  _, events, _ = conduct(first, answer, budget=6)
  (reduced,) = of(events, "reduced")
  assert reduced["left_out"] == ["question"]
  assert checks(events, "extend") == [True]


# Repair.


def refocused(told, **changes):
  focal = dataclasses.replace(told["explanations"][0], **changes)
  return {**told, "explanations": (focal, *told["explanations"][1:])}


@pytest.mark.parametrize("is_new", [True, False])
def test_target_only_demands_another_focal_account(conduct, is_new):
  task, site, name = first_site("capacity")
  told = card(site, name)
  repaired = refocused(told, statement="size is what gains") if is_new else told
  _, events, _ = conduct(
    proposal({site: operation(name, 0.25)}, **told),
    proposal({site: operation(name)}, **repaired),
    task=task,
  )
  assert of(events, "verdict")[0]["verdict"] == "target_only"
  assert checks(events, "repair_explanation") == [is_new]


@pytest.mark.parametrize("predicted", ["down", "same"])
def test_mediator_only_demands_that_the_target_is_predicted_to_gain(conduct, predicted):
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mediator")
  better = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = card(A, name)
  primary = {**told["explanations"][0].predictions["primary"], "loss": predicted}
  focal = told["explanations"][0].predictions | {"primary": primary}
  others = [e for e in told["explanations"][1:] if e.name != "nothing"]
  changed = refocused(told, predictions=focal)["explanations"][0]
  second = {**told, "explanations": (changed, *others[:2])}
  _, events, _ = conduct(
    proposal({A: operation(name)}, **told),
    proposal({A: operation(better)}, **second),
  )
  assert of(events, "verdict")[0]["verdict"] == "mediator_only"
  assert checks(events, "repair_transfer") == [predicted == "down"]


# Add a discriminator.


class Breaking(world.World):
  """A world whose control `elsewhere` fails when it runs."""

  def run(self, call, artifacts, before):
    """See `World.run`."""
    if call.intervention.get("kind") == "elsewhere":
      raise RuntimeError("this control cannot be run")
    return super().run(call, artifacts, before)


TWO = (
  Explanation("one", "", {"primary": {"loss": "down"}, "broken": {"loss": "up"}}),
  Explanation("two", "", {"primary": {"loss": "down"}, "broken": {"loss": "down"}}),
)
BROKEN = Control("broken", {"kind": "elsewhere", "site": A})
WORKING = Control("dose", {"kind": "dose", "site": A, "factor": 0.5})
APART = tuple(
  dataclasses.replace(e, predictions={**e.predictions, "dose": {"loss": symbol}})
  for e, symbol in zip(TWO, ("same", "down"), strict=True)
)


@pytest.mark.parametrize(
  ("accounts", "allowed", "edits", "is_met"),
  [
    (APART, (BROKEN, WORKING), {}, True),
    (TWO, (BROKEN,), {}, None),
    (APART, (BROKEN, WORKING), {B: "-x"}, True),
    (APART, (BROKEN, WORKING), {A: "x + 0.25 * jnp.tanh(3 * x)"}, False),
    (TWO, (BROKEN,), {B: "-x"}, None),
  ],
  ids=["new control", "the same", "with more", "another edit", "broken again"],
)
def test_unresolved_demands_a_control_that_separates_what_is_left(
  conduct, accounts, allowed, edits, is_met
):
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = {"residual": f"excess_{A}", "declared": (A,)}
  edit = {A: operation(name)}
  _, events, _ = conduct(
    proposal(edit, explanations=TWO, controls=(BROKEN,), **told),
    # The question is about the step from the parent, so the parent owes it.
    lambda context: Proposal(
      source=apply(TASK.interface.default_source(), edit | edits),
      label="again",
      explanations=accounts,
      controls=allowed,
      **told,
    ),
    parents="initial",
    task=Breaking(seed=3),
  )
  first = of(events, "verdict")[0]
  assert (first["verdict"], first["reason"]) == ("unresolved", "several_left")
  # Without anything new in it, the packet is a duplicate and never runs.
  expected = [is_met] if edits or is_met else []
  assert checks(events, "add_discriminator") == expected
  if expected == [None]:
    # A control that fails is no evidence, and uses up no attempt.
    statuses = {e["status"] for e in of(events, "demand")}
    assert not statuses & {"met", "failed", "abandoned"}


def test_a_control_that_ran_before_is_no_new_discriminator(conduct):
  said = lambda name, **under: Explanation(
    name, "", {"primary": {"loss": "down"}} | {k: {"loss": v} for k, v in under.items()}
  )
  first = (
    said("one", broken="up", dose="down"),
    said("two", broken="down", dose="down"),
    said("three", dose="same"),
  )
  # The same controls, told to separate what they had not.
  again = (said("one", dose="same"), said("two", dose="down"))
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = {"residual": f"excess_{A}", "declared": (A,), "controls": (BROKEN, WORKING)}
  edit = {A: operation(name)}
  _, events, _ = conduct(
    proposal(edit, explanations=first, **told),
    proposal(edit | {B: "-x"}, explanations=again, **told),
    parents="initial",
    task=Breaking(seed=3),
  )
  assert of(events, "verdict")[0]["survivors"] == ["one", "two"]
  assert checks(events, "add_discriminator") in ([False], [None])
  (check,) = of(events, "check")
  assert check["detail"].startswith("no new control separates two of one, two")


@pytest.mark.parametrize("is_sequential", [True, False])
def test_controls_wait_for_the_primary_run_and_go_if_it_left_nothing(
  conduct, is_sequential
):
  it, told = inert()
  _, events, _ = conduct(proposal({A: it}, **told), sequential=is_sequential)
  ran = [e["condition"] for e in of(events, "outcome")[1:]]
  assert ran == ["primary", *([] if is_sequential else ["elsewhere", "permute"])]
  registered = {c["name"] for c in of(events, "packet")[1]["packet"]["conditions"]}
  assert registered == {"primary", "elsewhere", "permute"}


@pytest.mark.parametrize("is_new", [True, False])
def test_where_no_account_is_left_a_new_one_is_demanded(conduct, is_new):
  wrong = Explanation("wrong", "", {"primary": {"loss": "up"}})
  worse = Explanation("worse", "", {"primary": {"loss": "same"}})
  told = {"residual": f"excess_{A}", "declared": (A,), "explanations": (wrong, worse)}
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  other = dataclasses.replace(wrong, name="right") if is_new else wrong
  _, events, _ = conduct(
    proposal({A: operation(name, 0.2)}, **told),
    proposal({A: operation(name)}, **{**told, "explanations": (other, worse)}),
    frontier=2,
  )
  assert of(events, "verdict")[0]["reason"] == "none_left"
  assert checks(events, "add_discriminator") == [is_new]
  edited = of(events, "packet")[1]["packet"]["program"]
  asked = next(e for e in of(events, "demand") if e["status"] == "owed")
  assert asked["program"] == edited, "the search goes on from what gained"


def small(*symbols):
  """An edit whose gain is less than its margin, and two accounts of it."""
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mediator")
  accounts = tuple(
    Explanation(n, "", {"primary": {"loss": symbol}, "dose": {"loss": fate}})
    for n, symbol, fate in zip(("one", "two"), symbols, ("lost", "kept"), strict=True)
  )
  told = {"residual": f"excess_{A}", "explanations": accounts, "controls": (WORKING,)}
  return proposal({A: operation(name, 0.02)}, declared=(A,), **told)


@pytest.mark.parametrize("symbols", [("down", "down"), ("down", "up")])
def test_a_gain_smaller_than_its_margin_owes_nothing_and_says_by_how_much(
  conduct, symbols
):
  """Its accounts failed for the size of it alone, and so does none explain it."""
  _, events, contexts = conduct(small(*symbols), proposal({}))
  (found,) = of(events, "verdict")
  assert (found["verdict"], found["reason"]) == ("unresolved", "within_margin")
  (told,) = of(events, "demand")
  outcomes = [e["values"]["loss"] for e in of(events, "outcome")]
  change, margin = outcomes[1] - outcomes[0], world.MARGIN
  assert -margin < change < 0
  assert told["status"] == "within_margin"
  assert told["detail"] == (
    f"loss is better by {-change:.3g}, which is {margin + change:.3g} short of its "
    f"margin {margin:.3g}"
  )
  assert contexts[1].demands == ()
  assert contexts[1].history[-1].short == told["detail"]
  shown = prompt.entry_text(contexts[1].history[-1])
  assert f"status ok; {told['detail']}" in shown
  assert f"asks nothing: {told['detail']}" in shown


def test_a_demand_that_two_answers_left_for_something_else_is_dropped(conduct):
  first, _, told = supported(A)
  other = next(op for op, kind in TASK.truth[B].items() if kind == "harmful")
  elsewhere = [
    proposal({B: operation(other, amplitude)}, declared=(B,))
    for amplitude in (0.1, 0.2, 0.3)
  ]
  running, events, contexts = conduct(first, *elsewhere, frontier=8)
  demands = of(events, "demand")
  # The first answer owes it too; what is given up on one of the two is on both.
  assert [e["status"] for e in demands] == [
    "owed",
    *["failed"] * 2,
    "abandoned",
    "left",
  ]
  assert {demands[3]["program"], demands[4]["program"]} == {
    e["program"] for e in demands[1:3]
  }
  assert demands[4]["detail"] == (
    f"2 answers were not about excess_{A} as asked; the last asked about None"
  )
  assert [bool(c.demands) for c in contexts] == [False, True, True, False, False]
  assert not running.residuals.holders


def test_a_discriminator_is_left_by_another_edit_and_not_by_the_same(conduct):
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = {"residual": f"excess_{A}", "declared": (A,)}
  asked = proposal({A: operation(name)}, explanations=TWO, controls=(BROKEN,), **told)
  # Nothing can be said of a control that does not run, so no check ever fails.
  other = [
    proposal({A: operation(name, n)}, explanations=TWO, controls=(BROKEN,), **told)
    for n in (0.4, 0.3, 0.2)
  ]
  _, events, _ = conduct(
    asked, *other[:2], parents="initial", task=Breaking(seed=3), frontier=8
  )
  first = of(events, "packet")[1]["id"]
  mine = [e["status"] for e in of(events, "demand") if e["packet"] == first]
  assert checks(events, "add_discriminator") == [None, None]
  assert mine == ["owed", "left"]


# Retire and reject.


def inert():
  """An edit without effect on the loss, and its registered experiment."""
  name = next(op for op, kind in TASK.truth[A].items() if kind == "inert")
  return operation(name), card(A, name)


def refuted():
  """An edit without the gain that is predicted, and the experiment that shows it."""
  name = next(op for op, kind in TASK.truth[A].items() if kind == "harmful")
  accounts = tuple(
    Explanation(symbol, "", {"primary": {"loss": symbol}}) for symbol in ("down", "up")
  )
  told = {"residual": f"excess_{A}", "declared": (A,), "explanations": accounts}
  return operation(name), told


@pytest.mark.parametrize(
  ("act", "ended"),
  [
    ("{it}", "refused"),
    ("({it}) * 1", False),
    ("jnp.roll(jnp.roll({it}, 1), -1)", False),
    ("({it}) * 1.0000001", False),
    ("{it} + 1e-7", False),
    ("{it} + 0 * jnp.sum(x)", False),
    ("x + 0.5 * jnp.tanh(3 * x) - 0.5 * x[::-1]", True),
    ("x", True),
  ],
  ids=[
    *(
      "itself",
      "times one",
      "rolled",
      "the last bit",
      "nearly nothing",
      "plus nothing",
    ),
    *("another edit", "as before"),
  ],
)
def test_a_retired_intervention_comes_back_under_no_name(conduct, act, ended):
  it, told = refuted()
  again = proposal({A: act.replace("{it}", it), B: "-x"}, label="again", declared=(B,))
  running, events, _ = conduct(
    proposal({A: it}, **told), again, parents="initial", frontier=8
  )
  assert of(events, "verdict")[0]["response"] == "retire"
  if ended == "refused":
    assert [e["status"] for e in of(events, "refused")] == ["retire"]
    assert running.ledger.spent == 2
  else:
    assert checks(events, "retire") == [ended]
  if ended is False:
    # The program that brought it back owes its removal, and cannot wait that out.
    program = of(events, "packet")[-1]["packet"]["program"]
    holders = [e["program"] for e in of(events, "demand") if e["status"] == "failed"]
    assert holders == [program]


def test_a_retained_program_must_lose_its_retired_intervention(conduct):
  it, told = refuted()
  first = proposal({A: it}, **told)
  elsewhere = [
    proposal({B: f"-{n} * x"}, label=f"{n}", declared=(B,)) for n in range(9)
  ]
  running, events, _ = conduct(first, *elsewhere, frontier=8)
  program = of(events, "packet")[1]["packet"]["program"]
  selection = running.select((9, 9), running.record(program))
  evaluator = running._evaluator
  for edits, status in (({B: "-x"}, "retire"), ({A: "x", B: "-x"}, None)):
    source = apply(selection.parent.source, edits)
    why = registration.unfit(
      selection, evaluator.prepare(source), evaluator, [], "probe"
    )
    assert (why and why[0]) == status
  # A search may also leave such a program alone, and lose no proposal on it.
  running, events, _ = conduct(first, *elsewhere, frontier=8, revise_retired=False)
  assert running.programs.holds(program)
  assert not of(events, "refused")
  assert len(of(events, "packet")) == 2 + len(elsewhere)
  assert program not in {e["packet"]["parent"] for e in of(events, "packet")}


def test_an_unsafe_candidate_is_rejected_and_its_parent_restored(conduct):
  _, told = inert()
  bad = proposal({A: "x / 0"}, **told)
  again = proposal({A: "x / 0", B: "-x"}, label="again", declared=(A, B))
  running, events, contexts = conduct(bad, again, again)
  first = of(events, "verdict")[0]
  assert (first["verdict"], first["response"]) == ("unsafe", "reject")
  assert contexts[1].parent.id == contexts[0].parent.id
  assert [d.computation for d in contexts[1].demands] == [(A,)]
  assert [e["status"] for e in of(events, "refused")] == ["reject", "reject"]
  assert running.ledger.spent == 2


class Fragile(world.World):
  """A world in which one site's edit fails with too little at another."""

  def run(self, call, artifacts, before):
    """See `World.run`."""
    size = lambda site: abs(self._behaviour(call.computation[site], artifacts)[0]).sum()
    if size(B) > 1e-3 and size(A) < 0.4:
      raise FloatingPointError("the rollback is not possible")
    return super().run(call, artifacts, before)


def test_a_candidate_whose_rollback_fails_never_enters_the_frontier(conduct):
  first, more, told = supported(A)
  good = next(op for op, kind in TASK.truth[B].items() if kind == "mechanism")
  second = proposal({A: more, B: operation(good)}, **{**told, "declared": (A,)})
  last = proposal({A: more}, **told)
  running, events, contexts = conduct(
    first,
    second,
    last,
    task=Fragile(seed=3),
    frontier=8,
  )
  packets = of(events, "packet")
  unsafe = packets[2]["packet"]["program"]
  assert of(events, "verdict")[1]["verdict"] == "unsafe"
  assert [e["program"] for e in of(events, "rejected")] == [unsafe]
  assert not running.programs.holds(unsafe)
  assert unsafe not in {e["program"] for e in of(events, "program")}
  outcome = next(
    e
    for e in of(events, "outcome")
    if e["packet"] == packets[2]["id"] and e["condition"] == "primary"
  )
  best = running.programs.best.values["loss"]
  # It would have been the champion.
  assert (
    outcome["values"]["loss"] < running.record(contexts[1].parent.id).values["loss"]
  )
  assert best >= outcome["values"]["loss"] - world.MARGIN


def test_a_residual_names_a_computation_and_not_a_string():
  with pytest.raises(ValueError, match="tuple of hooks"):
    Residual("p", "loss", 1.0, 0.5, "attention")


# What is no question.


VACUOUS = Explanation("vacuous", "", {})
ELSEWHERE = tuple(
  Explanation(name, "", {"primary": {"phase of the moon": symbol}})
  for name, symbol in (("new", "down"), ("full", "up"))
)


@pytest.mark.parametrize(
  ("accounts", "why"),
  [
    ((VACUOUS,), "'vacuous' alone"),
    (ELSEWHERE, "new predicts phase of the moon"),
  ],
)
def test_a_question_that_no_run_answers_is_refused(conduct, accounts, why):
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = {"residual": f"excess_{A}", "declared": (A,), "explanations": accounts}
  running, events, _ = conduct(proposal({A: operation(name)}, **told))
  (refused,) = of(events, "refused")
  assert (refused["status"], why in refused["detail"]) == ("question", True)
  assert not of(events, "verdict")
  assert running.ledger.spent == 1


def test_an_edit_that_changes_nothing_pays_for_no_control(conduct):
  said = lambda name, symbol: Explanation(
    name, "", {"primary": {"loss": "same"}, "dose": {"loss": symbol}}
  )
  running, events, _ = conduct(
    lambda context: Proposal(
      source=apply(context.parent.source, {A: "x * 1"}),
      label="nothing",
      residual=f"excess_{A}",
      explanations=(said("one", "down"), said("two", "up")),
      controls=(WORKING,),
    )
  )
  assert of(events, "verdict")[0]["reason"] == "parent_equivalent"
  assert "dose" in of(events, "skipped")[0]["controls"]
  assert running.ledger.spent == 2


@pytest.mark.parametrize(
  "intervention",
  [
    {"kind": "program"},
    {"kind": "program", "code": 5},
    {"kind": "program", "code": "def attention(x:"},
    {"kind": "program", "code": "def attention(x):\n  return " + "-" * 3000 + "x\n"},
    {"kind": "program", "code": "\0"},
    {},
    {"name": "permute", "site": A},
    {"kind": "permute"},
    {"kind": "permute", "site": "nowhere"},
    {"kind": "permute", "site": B},
    {"kind": "program", "without": [B]},
  ],
  ids=[
    *("without code", "a number", "torn", "deep", "null", "nothing", "name for kind"),
    *("no site", "an unknown site", "a site that is as before", "no other program"),
  ],
)
def test_a_control_that_is_none_is_refused_before_any_call(conduct, intervention):
  """What a model writes must neither end a run nor pass for an experiment."""
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")
  told = {"residual": f"excess_{A}", "declared": (A,), "explanations": TWO}
  control = Control("broken", intervention)
  running, events, _ = conduct(
    proposal({A: operation(name)}, controls=(control,), **told)
  )
  (refused,) = of(events, "refused")
  assert (refused["status"], "control broken" in refused["detail"]) == (
    "question",
    True,
  )
  assert running.ledger.spent == 1


def test_an_experiment_that_ran_is_not_registered_again(conduct):
  """Also if a control of it was not needed, and so never ran."""
  name = next(op for op, kind in TASK.truth[A].items() if kind == "mediator")
  again = proposal({A: operation(name)}, **card(A, name))
  running, events, _ = conduct(again, again, parents="initial", frontier=8)
  assert of(events, "skipped")
  hashes = [event["id"] for event in of(events, "packet")]
  assert len(hashes) == len(set(hashes)) == 2
  assert [e["status"] for e in of(events, "refused")] == ["duplicate"]
  assert running.ledger.spent == 2
