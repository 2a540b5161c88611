"""Whole runs in the synthetic world: ledger, replay, kill and resume, arms."""

import itertools
import shutil
from collections import Counter

import pytest

from mxjax.discovery.core import candidate_source, identity, store
from mxjax.discovery.core.ledger import Ledger
from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.proposal import Proposal
from mxjax.discovery.core.residual import FATES, SYMBOLS, Explanation
from mxjax.discovery.core.task import Call
from mxjax.discovery.proposers import embedded
from mxjax.discovery.search import registration
from mxjax.discovery.tasks import world
from tests.cases import slow
from tests.discovery import searching

BUDGET = 30


@pytest.fixture(scope="module")
def executor():
  """One executor: artifacts traced for one run serve the others."""
  return searching.Counting(world.World(seed=5))


def run(folder, executor, proposer=None, **config):
  task = world.World(seed=5)
  proposer = proposer or embedded.EmbeddedProposer(task.edit_templates, "loss")
  options = {"seed": 5, "budget": BUDGET, "mark_every": 10, **config}
  return searching.run(folder, task, proposer, executor, **options)


@pytest.mark.slow
def test_stagnation_counts_the_experiments_since_the_best_one(tmp_path, executor):
  told, task = [], world.World(seed=5)
  first = candidate_source.admit(task.interface.default_source(), task.interface).id

  class Listening(embedded.EmbeddedProposer):
    def propose(self, context):
      programs = [experiment.program for experiment in context.history]
      champion = context.champion.id
      if champion in programs or champion == first:
        best = programs.index(champion) + 1 if champion in programs else 0
        told.append((context.stagnation, len(programs) - best))
      return super().propose(context)

  run(tmp_path, executor, Listening(world.World(seed=5).edit_templates, "loss"))
  assert told[0] == (0, 0)
  assert [s for s, _ in told] == [since for _, since in told]
  assert max(told)[0] > 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory, executor):
  folder = tmp_path_factory.mktemp("finished")
  return run(folder, executor), folder


@pytest.fixture
def copied(finished, tmp_path):
  """The finished run's log and outcomes, for a test that harms them."""
  return shutil.copytree(finished[1], tmp_path / "copied")


@pytest.mark.slow
def test_the_ledger_adds_up_to_the_budget(finished):
  running, folder = finished
  totals = running.ledger.totals()
  assert totals["candidate"] + totals["control"] + totals["probe"] == BUDGET
  events = store.read_events(folder)
  charged = [e["charged"] for e in events if e["event"] == "outcome"]
  assert sum(charged) == BUDGET
  assert [e["call"] for e in events if e["event"] == "mark"] == [10, 20, 30]


def test_a_run_that_ends_early_keeps_its_champion_to_the_last_mark(executor, tmp_path):
  running = run(tmp_path, executor, searching.Scripted())
  events = store.read_events(tmp_path)
  assert running.ledger.spent == 1
  marks = [(e["call"], e["champion"]) for e in events if e["event"] == "mark"]
  assert marks == [(at, running.programs.best.id) for at in (10, 20, 30)]
  assert events[-1]["event"] == "closed"
  assert events[-1]["reason"].startswith("proposer: ")


def test_a_proposer_that_is_finished_ends_the_run(executor, tmp_path):
  told = Proposal(source="", label="finished", note="no edit is left", finished=True)
  running = run(tmp_path, executor, searching.Scripted(lambda context: told))
  assert running.ledger.spent == 1, "it is charged nothing"
  events = store.read_events(tmp_path)
  assert events[-1]["reason"] == "proposer: finished: no edit is left"
  assert not [e for e in events if e["event"] == "refused"]


def test_every_packet_is_registered_before_its_first_call(finished):
  _, folder = finished
  registered = {}
  for event in store.read_events(folder):
    if event["event"] == "packet":
      registered[event["n"]] = event
    if event["event"] == "outcome":
      packets = [p["packet"] for p in registered.values()]
      names = {c["exec_id"] for p in packets for c in p["conditions"]}
      assert event["exec_id"] in names


def test_the_same_configuration_writes_the_same_bytes(finished, executor, tmp_path):
  _, folder = finished
  run(tmp_path, executor)
  assert searching.log(tmp_path) == searching.log(folder)


@pytest.fixture(scope="module")
def whole(executor, tmp_path_factory):
  """How many calls an undisturbed run executes."""
  executor.executed, executor.stop_after = 0, None
  run(tmp_path_factory.mktemp("whole"), executor)
  return executor.executed


@pytest.mark.parametrize("stop_after", [1, 2, 7, 13])
def test_a_killed_run_resumes_to_the_same_bytes_and_pays_nothing_twice(
  finished, whole, executor, tmp_path, stop_after
):
  _, folder = finished
  executor.executed, executor.stop_after = 0, stop_after
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "killed", executor)
  executor.stop_after = None
  run(tmp_path / "killed", executor)
  assert executor.executed == whole
  assert searching.log(tmp_path / "killed") == searching.log(folder)


def test_a_torn_last_line_is_redone(finished, copied, executor):
  path = copied / "log.jsonl"
  data = path.read_bytes()
  path.write_bytes(data[: len(data) * 2 // 3])
  run(copied, executor)
  assert searching.log(copied) == searching.log(finished[1])


def test_a_changed_log_is_noticed(copied, executor):
  path = copied / "log.jsonl"
  path.write_bytes(path.read_bytes().replace(b'"kept":true', b'"kept":fals', 1))
  with pytest.raises(ValueError):
    run(copied, executor)
  with pytest.raises(ValueError):
    store.read_events(copied)


def test_a_log_of_another_format_is_refused_in_a_sentence(finished, tmp_path):
  first = {**store.read_events(finished[1])[0], "format": None}
  event = {key: value for key, value in first.items() if key != "hash"}
  line = identity.canonical({**event, "hash": identity.digest(event)})
  (tmp_path / "log.jsonl").write_text(line + "\n")
  with pytest.raises(ValueError, match=f"format {store.FORMAT}, got None; read it"):
    store.read_events(tmp_path)


def test_another_configuration_does_not_resume_this_log(executor, tmp_path):
  run(tmp_path, executor, budget=3)
  with pytest.raises(store.ReplayError, match="event 0"):
    run(tmp_path, executor, budget=4)


@pytest.mark.slow
def test_width_changes_the_trajectory_but_not_the_accounts(executor, tmp_path):
  running = run(tmp_path, executor, width=4)
  assert running.ledger.totals()["total"] == BUDGET


@pytest.mark.slow
@pytest.mark.parametrize(
  "arm",
  [
    *slow(
      {"evidence": "score", "policy": "none", "checker": "none"},
      {"policy": "random"},
      {"checker": "source"},
      {"shuffled_verdicts": True},
    ),
    {"evidence": "reflect", "policy": "none", "checker": "none"},
    {"policy": "all", "sequential": False},
    {"checker": "lowered", "reuse": False},
    {"corruption": 0.5, "proposals_per_call": 40},
    {"compile_verdicts": False, "checker": "none"},
  ],
  ids=lambda arm: "-".join(f"{k}={v}" for k, v in arm.items()),
)
def test_every_arm_spends_exactly_its_budget(executor, tmp_path, arm):
  running = run(tmp_path, executor, budget=14, **arm)
  totals = running.ledger.totals()
  assert totals["total"] == 14
  if arm.get("policy") == "none":
    assert totals["candidate"] == 14


def test_a_placebo_predicts_a_direction_for_a_direction_and_a_fate_for_a_fate():
  """One in the place of the other could never be observed, so it would always fail."""
  rows = {"primary": {"a": "down"}, "less": {"a": "same", "b of the edit": "kept"}}
  account = Explanation("x", "of which", rows)
  drawn = [registration.corrupted(account, 1.0, seed, (0, 0)) for seed in range(40)]
  found = lambda condition, name: {a.predictions[condition][name] for a in drawn}
  assert found("primary", "a") == found("less", "a") == {*SYMBOLS}
  assert found("less", "b of the edit") == {*FATES}


def test_arms_without_verdicts_never_see_one(executor, tmp_path):
  seen = []

  class Spy(embedded.EmbeddedProposer):
    def propose(self, context):
      seen.append(context)
      return super().propose(context)

  spy = Spy(world.World(seed=5).edit_templates, "loss")
  run(tmp_path, executor, spy, budget=8, evidence="text")
  entries = list(itertools.chain.from_iterable(c.history for c in seen))
  assert entries
  assert not any(e.verdict or e.excluded or e.reason for e in entries)


def test_verdicts_agree_with_the_truth_of_the_world(finished):
  running, _ = finished
  task = world.World(seed=5)
  expected = {"supported": {"mechanism"}, "mediator_only": {"mediator", "mechanism"}}
  judged = 0
  for entry in running.history.experiments:
    if entry.verdict not in expected:
      continue
    site, operation = entry.label.split("(")[0].split("-")
    assert task.truth[site][operation] in expected[entry.verdict], entry.label
    judged += 1
  assert judged


def test_the_held_out_world_has_the_same_truth_and_other_numbers():
  task = world.World(seed=5)
  held_out = task.holdout()
  assert held_out.truth == task.truth
  assert held_out.contract != task.contract


def test_a_ledger_reserves_settles_and_reuses():
  ledger = Ledger(5)
  ledger.reserve(Counter(candidate=1, control=2))
  assert ledger.left == 2
  with pytest.raises(ValueError, match="calls that are left"):
    ledger.reserve(Counter(candidate=3))
  condition = lambda name, kind, cost, exec_id: Condition(
    name, kind, Call({}, {}, {}), cost, exec_id
  )
  first = ledger.settle("p", condition("primary", "candidate", 1, "a"), "crashed")
  again = ledger.settle("p", condition("c", "control", 1, "a"), "ok")
  costly = ledger.settle("p", condition("d", "control", 2, "b"), "ok")
  ledger.release()
  assert (first.charged, again.charged, costly.charged) == (1, 0, 2)
  assert (ledger.spent, ledger.left) == (3, 2)
  totals = ledger.totals()
  assert (totals["failed"], totals["reused"], totals["total"]) == (1, 1, 3)
  known, new = (
    condition("primary", "candidate", 1, "a"),
    condition("c", "probe", 2, "c"),
  )
  assert ledger.price([known, new, new]) == {"probe": 2}
  assert Ledger(5, reuse=False).price([new, new]) == {"probe": 4}


def run_of_few(folder, executor):
  """A run whose proposer has too few templates for its budget."""
  few = embedded.EmbeddedProposer(world.World(seed=5).edit_templates[:7], "loss")
  return run(folder, executor, proposer=few, budget=60)


@pytest.fixture(scope="module")
def exhausted_run(tmp_path_factory, executor):
  folder = tmp_path_factory.mktemp("exhausted")
  executor.stop_after = None
  return run_of_few(folder, executor), folder


def test_an_exhausted_parent_gives_way_to_another(exhausted_run):
  running, folder = exhausted_run
  events = store.read_events(folder)
  exhausted = [e["program"] for e in events if e["event"] == "exhausted"]
  assert exhausted
  assert len(exhausted) == len(set(exhausted))
  first = next(e["n"] for e in events if e["event"] == "exhausted")
  assert any(e["event"] == "packet" and e["n"] > first for e in events)
  assert running.ledger.spent == 60


@pytest.mark.slow
def test_a_run_resumes_past_an_exhausted_parent(exhausted_run, executor, tmp_path):
  _, folder = exhausted_run
  events = store.read_events(folder)
  first = next(e["n"] for e in events if e["event"] == "exhausted")
  paid = sum(e["charged"] for e in events[:first] if e["event"] == "outcome")
  executor.executed, executor.stop_after = 0, paid + 3
  with pytest.raises(KeyboardInterrupt):
    run_of_few(tmp_path, executor)
  executor.stop_after = None
  run_of_few(tmp_path, executor)
  assert searching.log(tmp_path) == searching.log(folder)


def test_parents_are_the_retained_programs_then_the_rest(finished):
  running, folder = finished
  programs = [
    e["program"] for e in store.read_events(folder) if e["event"] == "program"
  ]
  executed = [running.record(p) for p in dict.fromkeys(programs)]
  kept = running.programs.records
  parents = [r for r, _ in running.programs.parents(executed, seed=3, address=(1, 0))]
  assert parents[0] in kept
  assert {r.id for r in parents} == {r.id for r in executed}
  values = [r.values["loss"] for r in parents[len(kept) :]]
  assert values == sorted(values)
  firsts = {running.programs.parents(executed, 3, (n, 0))[0][0].id for n in range(40)}
  assert firsts == {record.id for record in kept[: (len(kept) + 1) // 2]}


def test_a_reused_call_releases_nothing():
  ledger = Ledger(10, reuse=True)
  condition = Condition("primary", "candidate", Call({}, {}, {}), 2, "again")
  ledger.reserve(ledger.price([condition]))
  ledger.settle("first", condition, "ok")
  assert ledger.left == 8
  assert ledger.price([condition]).total() == 0
  ledger.settle("second", condition, "ok")
  assert ledger.left == 8


def test_a_mark_has_the_best_of_all_that_had_run_by_then(tmp_path, executor):
  run(tmp_path, executor, width=8, mark_every=1, policy="none", checker="none")
  events = store.read_events(tmp_path)
  programs = [event for event in events if event["event"] == "program"]
  marks = [event for event in events if event["event"] == "mark"]
  assert [mark["call"] for mark in marks] == [*range(1, BUDGET + 1)]
  for mark in marks:
    known = [p["value"] for p in programs if p["call"] <= mark["call"]]
    assert mark["value"] == min(known), mark
