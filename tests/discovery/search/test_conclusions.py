"""What a verdict concludes: about the edit, about its parts, and beside rivals of ours.

The first two are experiments that a language model ran on a small model, with the
numbers that were measured then.
"""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from mxjax.discovery.core import residual, store, verdict
from mxjax.discovery.core.interventions import Intervention
from mxjax.discovery.core.packet import Condition, Packet
from mxjax.discovery.core.proposal import Proposal, ProposerError, Record
from mxjax.discovery.core.residual import Control, Explanation
from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.search import registration, resolution, rivals
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.discovery.tasks.ptq.structure import interventions
from tests.discovery import searching
from tests.discovery.proposers import replies

MARGINS = {"kl": 0.0074, "operator_error": 0.00025, "weight_error": 0.00013}
PTQ = types.SimpleNamespace(target="kl", margins=MARGINS)


def ran(parent, candidate, **controls):
  """An attempt whose conditions gave these values."""
  outcome = lambda values: Outcome(Status.OK, values, {"encode_act": str(values)})
  names = ["primary", *controls]
  conditions = tuple(
    Condition(
      name, "control" if name in controls else "candidate", Call({}, {}, {}), 1, name
    )
    for name in names
  )
  record = Record("p", "", "", 1, {}, {}, "parent", parent, {})
  packet = Packet(
    program="c", parent="p", conditions=conditions, margins=MARGINS, evaluator=""
  )
  outcomes = {"primary": outcome(candidate)} | {
    k: outcome(v) for k, v in controls.items()
  }
  proposal = Proposal(source="", label="edit")
  return registration.Attempt(proposal, None, record, (), packet, outcomes)


def concluded(accounts, attempt):
  seen = resolution.observed(PTQ, attempt)
  told = {"is_safe": True, "is_equivalent": False}
  return seen, verdict.resolve(accounts, seen, "kl", **told)


def accounts(*given):
  return tuple(Explanation(**each) for each in given)


# What is left of the edit's own change.

NEIGHBOURS_TABLES = ran(
  {"operator_error": 0.02290, "kl": 0.1252},
  {"operator_error": 0.01904, "kl": 0.1065},
  neighbour={"operator_error": 0.02248, "kl": 0.1331},
)


def test_tables_of_a_neighbour_that_lose_most_of_the_effect_bear_the_true_account_out():
  """They lose 89 % of it, and are below the parent all the same."""
  seen, finding = concluded(
    accounts(replies.OWN_METRIC, replies.SMOOTHING), NEIGHBOURS_TABLES
  )
  assert seen["neighbour"]["operator_error"] == "down"
  assert seen["neighbour"]["operator_error of the edit"] == "lost"
  assert seen["neighbour"]["kl of the edit"] == "reversed"
  assert finding.survivors == ("own metric",)
  assert finding.excluded == {"smoothing": "neighbour"}
  assert (finding.verdict, finding.explicit) == ("supported", "control")


def test_a_direction_from_the_parent_would_exclude_it():
  """Which is what the symbols of before could say."""
  up = replies.account("own metric", neighbour={"operator_error": "up"})
  down = replies.account("smoothing", neighbour={"operator_error": "down"})
  _, finding = concluded(accounts(up, down), NEIGHBOURS_TABLES)
  assert finding.survivors == ("smoothing",)


@pytest.mark.parametrize(
  ("edit", "controlled", "expected"),
  [
    (-1.0, -0.9, "kept"),
    (-1.0, -0.89, "lost"),
    (-1.0, -0.11, "lost"),
    (-1.0, -0.1, "gone"),
    (-1.0, 0.0, "gone"),
    (-1.0, 0.1, "gone"),
    (-1.0, 0.11, "reversed"),
    (-1.0, -1.5, "kept"),
    (1.0, 0.95, "kept"),
    (1.0, 0.6, "lost"),
    (1.0, 0.05, "gone"),
    (1.0, -0.2, "reversed"),
    (-0.15, -0.06, "kept"),
    (0.1, 5.0, None),
  ],
)
def test_fates_have_borders(edit, controlled, expected):
  assert residual.fate(edit, controlled, 0.1) == expected


@pytest.mark.parametrize(
  ("edit", "again", "expected"),
  [
    (-1.0, -0.51, "kept"),
    (-1.0, -0.5, "lost"),
    (-1.0, 0.05, "gone"),
    (1.0, -0.2, "reversed"),
    (-0.15, -0.07, "gone"),
    (0.1, 5.0, None),
  ],
)
def test_elsewhere_more_than_half_of_a_change_is_kept(edit, again, expected):
  """A gain that was chosen for its size has some luck in it, and is not all luck."""
  assert residual.fate(edit, again, 0.1, elsewhere=True) == expected


def test_a_control_that_measures_an_edit_again_asks_for_half_of_its_gain():
  """.0115 of .0200 is .0085 less, which is more than the margin of .0074."""
  attempt = ran({"kl": 0.1252}, {"kl": 0.1052}, again={"kl": 0.1137})
  kinds = {
    "again": Intervention(doc="", example={}, elsewhere=True),
    "less": Intervention(doc="", example={}),
  }
  task = types.SimpleNamespace(**vars(PTQ), interventions=kinds)
  first, control = attempt.packet.conditions
  for kind, fate in ("again", "kept"), ("less", "lost"):
    call = control.call._replace(intervention={"kind": kind})
    conditions = (first, dataclasses.replace(control, call=call))
    attempt.packet = dataclasses.replace(attempt.packet, conditions=conditions)
    assert resolution.observed(task, attempt)["again"]["kl of the edit"] == fate


def test_the_interventions_that_measure_an_edit_again_say_so():
  again = lambda known: {kind for kind, each in known.items() if each.elsewhere}
  assert again(world.INTERVENTIONS) == {"redraw"}
  assert again(interventions.INTERVENTIONS) == {"other_text"}


@pytest.mark.parametrize(
  ("wider", "narrower"), [*itertools.combinations(residual.FATES[1:], 2)]
)
def test_a_fate_contains_the_worse_ones_and_not_the_other_way_round(wider, narrower):
  assert residual.consistent({"x": wider}, {"x": narrower})
  assert not residual.consistent({"x": narrower}, {"x": wider})
  assert not residual.disagree({"x": wider}, {"x": narrower})
  assert residual.disagree({"x": "kept"}, {"x": narrower})


def test_an_account_may_predict_direction_and_fate_of_one_observable():
  both = Explanation("a", "", {"c": {"loss": "down", "loss of the edit": "lost"}})
  assert both.predicts("c") == {"loss": "down", "loss of the edit": "lost"}
  assert Explanation("a", "", {"c": {"loss": "lost"}}).predicts("c") == {
    "loss of the edit": "lost"
  }
  assert not residual.disagree({"loss": "down"}, {"loss of the edit": "kept"})


# Which part of an edit carries the target.

WEIGHTS = ["solve_linear"]
CHOICE = replies.account(
  "exponent choice",
  primary={"weight_error": "down", "kl": "down"},
  neighbour={"weight_error": "up"},
)
RANGE = replies.account(
  "range",
  primary={"weight_error": "down", "kl": "down"},
  neighbour={"weight_error": "down"},
)


def mixed(plan="solved"):
  """The calls of an edit of map, weights and activations, and of its parent."""
  hooks = {hook.name: hook.name for hook in ptq.INTERFACE.hooks}
  parent = Call(hooks, ptq.INTERFACE.default_plan | {"transform": "measured"}, {})
  changed = dict.fromkeys(("transform", "solve_linear", "encode_act"), "another")
  plan = dict(parent.plan) | {"curvature": plan}
  return Call({**hooks, **changed}, plan, {}), parent


def of_weights(told):
  """The fourth answer: an edit of three hooks, whose control is about weights."""
  return Proposal(
    source="",
    label="champion with chosen weight exponents and a more damped map",
    residual="weight_error",
    explanations=accounts(CHOICE, RANGE),
    controls=(Control("neighbour", {"kind": "shuffle_stats", "hooks": WEIGHTS}),),
    declared=("transform", "encode_act", "solve_linear"),
  )


def test_the_part_that_the_controls_take_away_is_the_claimed_one():
  task = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
  claimed = rivals.claimed(task, of_weights(task), *mixed())
  assert claimed == ("solve_linear", "curvature"), "with the key that switches it on"
  told, controls = rivals.of(task, of_weights(task), *mixed())
  another = next(e for e in told if e.name == rivals.ANOTHER_PART)
  name = rivals.PREFIX + rivals.ANOTHER_PART
  assert another.rival
  assert another.predicts(name) == {"log_ppl of the edit": "kept"}
  assert told[0].predicts(name) == {"log_ppl of the edit": "lost"}
  change = next(c.intervention for c in controls if c.name == name)
  assert change == {"kind": "program", "without": [*claimed]}


def test_a_gain_that_stays_without_the_claimed_part_supports_nothing():
  """The weights' error fell as predicted, and the divergence by another part."""
  name = rivals.PREFIX + rivals.ANOTHER_PART
  rival = Explanation(
    rivals.ANOTHER_PART,
    "",
    {"primary": {"kl": "down"}, name: {"kl": "kept"}},
    rival=True,
  )
  focal, other = accounts(CHOICE, RANGE)
  told = {**focal.predictions, name: {"kl": "lost"}}
  focal = Explanation(focal.name, focal.statement, told)
  before = {"weight_error": 0.0123, "kl": 0.1252}
  candidate = {"weight_error": 0.0116, "kl": 0.1107}
  wrong = {"weight_error": 0.0130, "kl": 0.0964}
  without = {"weight_error": 0.0123, "kl": 0.1065}
  attempt = ran(before, candidate, neighbour=wrong, **{name: without})
  _, finding = concluded((focal, other, rival), attempt)
  assert finding.survivors == (rivals.ANOTHER_PART,)
  assert (finding.verdict, finding.excluded[focal.name]) == ("target_only", name)
  # Without our rival the same observations bore the focal account out.
  _, finding = concluded(accounts(CHOICE, RANGE), attempt)
  assert finding.verdict == "supported"
  lost = ran(before, candidate, neighbour=wrong, **{name: before})
  _, finding = concluded((focal, other, rival), lost)
  assert (finding.verdict, finding.survivors) == ("supported", (focal.name,))


ABOUT_LESS = replies.account(
  "exponent choice",
  primary={"weight_error": "down"},
  neighbour={"weight_error": "up"},
)


def by_parts(claims, without, **wrong):
  """The verdict on an edit of two parts, by what is measured without the claimed one.

  `claims` is the focal account. The edit takes kl from .1252 to .0952 and the error of
  the weights from .0123 to .0116.
  """
  name = rivals.WITHOUT_PART
  predictions = {"primary": {"kl": "down"}, name: {"kl": "kept"}}
  rival = Explanation(rivals.ANOTHER_PART, "", predictions, rival=True)
  told = {**claims["predictions"], name: {"kl": "lost"}}
  focal = Explanation(claims["name"], "", told)
  attempt = ran(
    {"weight_error": 0.0123, "kl": 0.1252},
    {"weight_error": 0.0116, "kl": 0.0952},
    neighbour={"weight_error": 0.0130, "kl": 0.0952} | wrong,
    **{name: {"weight_error": 0.0123, "kl": without}},
  )
  attempt.packet = dataclasses.replace(
    attempt.packet, explanations=(focal, *accounts(RANGE), rival)
  )
  found = resolution.resolve(PTQ, attempt, resolution.observed(PTQ, attempt))
  return found.verdict, found.survivors


@pytest.mark.parametrize("claims", [CHOICE, ABOUT_LESS], ids=["both", "its own"])
def test_of_two_parts_that_gain_the_smaller_one_is_not_refuted_by_the_other(claims):
  """Its share is .0100 of .0300; one within the margin, .0074, is none."""
  assert residual.fate(-0.03, -0.02, MARGINS["kl"]) == "lost", "not all of it is left"
  assert by_parts(claims, 0.1052) == ("supported", ("exponent choice",))
  assert by_parts(claims, 0.1025)[0] != "supported"


def test_an_account_of_an_observable_alone_keeps_it_where_another_part_gains():
  """Its part moves the observable and not the target; nothing that it says is wrong."""
  assert by_parts(ABOUT_LESS, 0.0960) == ("mediator_only", (rivals.ANOTHER_PART,))
  assert by_parts(CHOICE, 0.0960)[0] == "target_only", "it does claim the gain"
  refuted = by_parts(ABOUT_LESS, 0.0960, weight_error=0.0116)
  assert refuted[0] == "unresolved", "its own control spoke against it"


def test_a_rival_that_was_never_tested_is_no_other_explanation():
  rival = Explanation(
    "size", "", {"primary": {"kl": "down"}, "r": {"kl": "kept"}}, rival=True
  )
  up = accounts(
    replies.account("a", primary={"kl": "up"}),
    replies.account("b", primary={"kl": "same"}),
  )
  _, finding = concluded((*up, rival), NEIGHBOURS_TABLES)
  assert (finding.reason, finding.survivors) == ("none_left", ())


# The same in a run.

TASK = world.World(seed=3)
A, B = "attention", "geometry"


def operation(kind, site=A, amplitude=0.5, task=TASK):
  name = next(op for op, each in task.truth[site].items() if each == kind)
  return f"def {site}(x):\n  return x + {amplitude} * {world.OPERATIONS[name][0]}\n"


def run(folder, *script, task=TASK, **config):
  proposer = searching.Scripted(*script, at_end=ProposerError)
  options = {"seed": 3, "budget": 30, "mark_every": 30, **config}
  running = searching.run(folder, task, proposer, **options)
  events = store.read_events(folder)
  of = lambda name: [e for e in events if e["event"] == name]
  return running, of, proposer.contexts


STRAW = (
  Explanation("true", "", {"primary": {"loss": "down"}}),
  Explanation("straw", "", {"primary": {"loss": "up"}}),
)


def proposed(code, **told):
  given = {"label": "edit", "residual": f"excess_{A}", "explanations": STRAW, **told}
  return lambda context: Proposal(
    source=registration.with_functions(context.parent.source, code), **given
  )


def with_capacity():
  """A world in which any edit of a size gains at the first site."""
  for seed in range(3, 60):
    task = world.World(seed=seed)
    first = next(s for s in world.SITES if s not in task.prerequisite)
    if "capacity" in task.truth[first].values():
      return task, first
  raise AssertionError


def test_a_straw_man_supports_nothing(tmp_path):
  task, site = with_capacity()
  told = {"residual": f"excess_{site}", "declared": (site,)}
  edit = proposed(operation("capacity", site, task=task), **told)
  _, of, _ = run(tmp_path / "size", edit, task=task)
  (found,) = of("verdict")
  assert (found["verdict"], found["survivors"]) == (
    "target_only",
    ["any edit of this size"],
  )
  _, of, _ = run(tmp_path / "act", proposed(operation("mechanism"), declared=(A,)))
  (found,) = of("verdict")
  assert (found["verdict"], found["excluded"]["any edit of this size"]) == (
    "supported",
    "rival: any edit of this size",
  )


def test_a_question_whose_other_accounts_only_deny_the_change_is_sent_back(tmp_path):
  """Of an edit of several sites, to which no account of ours applies."""
  both = operation("mechanism") + operation("mechanism", B)
  null = (STRAW[0], Explanation("null", "", {"primary": {"loss": "same"}}))
  _, of, _ = run(tmp_path, proposed(both, explanations=null, declared=(A, B)))
  (refused,) = of("refused")
  assert refused["status"] == "question"
  assert "every other account denies under `primary`" in refused["detail"]
  assert not of("verdict")


def test_rivals_cost_a_call_only_where_the_focal_account_may_claim_a_gain(tmp_path):
  _, of, _ = run(tmp_path, proposed(operation("inert"), declared=(A,)))
  assert [e["condition"] for e in of("outcome")] == ["primary", "primary"]
  assert of("skipped")[0]["controls"] == ["rival: any edit of this size"]


def test_another_part_of_an_edit_is_measured_and_not_believed(tmp_path):
  """A mechanism beside an inert edit, which the question is about."""
  both = operation("mechanism") + operation("inert", B)
  asked = Control("other", {"kind": "permute", "site": B})
  told = (
    Explanation("b", "", {"primary": {"loss": "down"}, "other": {"loss": "lost"}}),
    Explanation("c", "", {"primary": {"loss": "down"}, "other": {"loss": "kept"}}),
  )
  edit = proposed(both, explanations=told, controls=(asked,), declared=(A, B))
  _, of, _ = run(tmp_path, edit, sequential=False)
  (found,) = of("verdict")
  name = f"rival: {rivals.ANOTHER_PART}"
  assert found["observed"][name]["loss of the edit"] == "kept"
  assert "b" in found["excluded"]
  assert found["verdict"] != "supported"


def lucky_world():
  """A world whose first site has a lucky operation, with this site and the next."""
  for seed in range(3, 90):
    task = world.World(seed=seed, luck=0.9)
    first = next(s for s in world.SITES if s not in task.prerequisite)
    second = next(s for s in task.prerequisite if task.prerequisite[s] == first)
    if all("lucky" in task.truth[site].values() for site in (first, second)):
      return task, first, second
  raise AssertionError


def test_luck_of_the_draw_is_a_rival_where_it_can_be_tested(tmp_path):
  task, first, _ = lucky_world()
  told = {"residual": f"excess_{first}", "declared": (first,)}
  edit = proposed(operation("lucky", first, task=task), **told)
  _, of, _ = run(tmp_path, edit, task=task)
  (found,) = of("verdict")
  assert found["observed"]["primary"]["loss"] == "down"
  assert (found["verdict"], found["survivors"]) == ("target_only", ["luck of the draw"])


@pytest.mark.parametrize("kind", ["lucky", "mechanism"])
def test_luck_is_a_rival_of_an_edit_of_several_sites(tmp_path, kind):
  """One call draws the noise of all of them again."""
  task, *sites = lucky_world()
  code = "".join(operation(kind, site, task=task) for site in sites)
  told = {"residual": f"excess_{sites[0]}", "declared": (*sites,)}
  _, of, _ = run(tmp_path, proposed(code, **told), task=task)
  (found,), packet = of("verdict"), of("packet")[-1]["packet"]
  (asked,) = (c for c in packet["conditions"] if "luck of the draw" in c["name"])
  shown = {"kind": "redraw", "sites": [s for s in world.SITES if s in sites]}
  assert {k: asked["call"]["intervention"][k] for k in shown} == shown
  assert asked["cost"] == 1
  observed = found["observed"]["rival: luck of the draw"]["loss of the edit"]
  assert observed == ("kept" if kind == "mechanism" else "gone")
  assert ("luck of the draw" in found["survivors"]) == (kind == "lucky")


def scored(task, folder, *edits):
  """What programs of these edits of the initial one measured, in order."""
  told = {"residual": None, "declared": (), "explanations": ()}
  bare = {"budget": len(edits) + 1, "policy": "none", "checker": "none"}
  _, of, _ = run(folder, *(proposed(code, **told) for code in edits), task=task, **bare)
  return [e["values"] for e in of("outcome")]


def test_luck_gains_less_than_a_mechanism_and_looks_the_same_in_the_excess(tmp_path):
  task, first, _ = lucky_world()
  kinds = "lucky", "mechanism"
  edits = [operation(kind, first, task=task) for kind in kinds]
  start, lucky, true = scored(task, tmp_path / "visible", *edits)
  share = (start["loss"] - lucky["loss"]) / (start["loss"] - true["loss"])
  assert world.LUCKY_SHARE[0] - 0.05 < share < world.LUCKY_SHARE[1] + 0.05
  excess = f"excess_{first}"
  assert abs(lucky[excess] - true[excess]) < task.margins[excess]
  assert start[excess] - lucky[excess] > task.margins[excess]
  start, lucky, true = scored(task.holdout(), tmp_path / "held out", *edits)
  assert abs(start["loss"] - lucky["loss"]) < world.MARGIN
  assert start["loss"] - true["loss"] > world.MARGIN


def test_who_holds_on_to_luck_beside_the_mechanism_pays_for_it(tmp_path):
  task, first, _ = lucky_world()
  names = {kind: op for op, kind in task.truth[first].items()}
  gains = [world.OPERATIONS[names[kind]][0] for kind in ("lucky", "mechanism")]
  both = "".join(f" + 0.5 * {gain}" for gain in gains)
  mixed = f"def {first}(x):\n  return x{both}\n"
  _, alone, hedged = scored(
    task, tmp_path, operation("mechanism", first, task=task), mixed
  )
  assert hedged["loss"] - alone["loss"] > world.MARGIN


def test_an_excess_is_noisy_where_there_is_luck_and_exact_where_there_is_none(tmp_path):
  for luck in (0.9, 0.0):
    task = world.World(seed=3, luck=luck)
    first = next(s for s in world.SITES if s not in task.prerequisite)
    code = operation("inert", first, amplitude=0.1, task=task)
    start, same = scored(task, tmp_path / str(luck), code)
    moved = [abs(start[name] - same[name]) for name in task.margins if name != "loss"]
    assert max(moved) <= 2 * world.EXCESS_CHAOS
    assert (max(moved) > world.EXACT_MARGIN) == (luck > 0)
    assert bool(task.floors) == (luck == 0)


def test_where_luck_closes_every_site_the_loss_is_still_open_to_a_question():
  task, *_ = lucky_world()
  closed = dict.fromkeys(task.margins, 0.1)
  (left,) = task.residuals("p", closed)
  assert left.observable == "loss"
  assert world.World(seed=3).residuals("p", closed) == []


def test_nothing_tells_how_far_a_program_with_luck_is_from_one_without():
  task, *_ = lucky_world()
  assert not task.references
  assert world.World(seed=3).references


def test_a_redraw_takes_sites_that_the_edit_left_if_it_changed_one():
  task, first, second = lucky_world()
  start = Call({site: "default" for site in world.SITES}, {"remeasure": False}, {})
  own = start._replace(computation={**start.computation, first: "edit"})
  redraw = lambda *sites: {"kind": "redraw", "sites": [*sites]}
  assert task.refuses(redraw(first, second), own, start) == ""
  assert "changes nothing" in task.refuses(redraw(second), own, start)


def test_a_redraw_is_one_reading_however_its_sites_are_listed():
  task, first, second = lucky_world()
  start = Call({site: "same" for site in world.SITES}, {"remeasure": False}, {})
  task._behaviour = lambda computation, artifacts: (np.zeros(6), "shown")
  read = lambda *sites: task.run(
    start._replace(intervention={"kind": "redraw", "sites": [*sites]}), None, b""
  )[0]["values"]
  assert read(first, second) == read(second, first)
  assert read(first, second) != read(first)
