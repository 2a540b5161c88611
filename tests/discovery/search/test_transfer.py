"""Runs on two models: what improves only the visible one is not built upon."""

import itertools
import pathlib

import pytest

from mxjax.discovery.audit import status, verify
from mxjax.discovery.core import store
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import (
  ExhaustedError,
  Experiment,
  Proposal,
  ProposerError,
  strip,
)
from mxjax.discovery.proposers import prompt
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.frontier import Transfer
from mxjax.discovery.search.search import Search, SearchConfig
from mxjax.discovery.tasks import world

BUDGET = 60
WRONG = world.SITES[:3]


class Contrary(world.World):
  """A world in which what is gained at three sites is lost."""

  name = "contrary"

  def _gain(self, site):
    return super()._gain(site) * (-1 if site in WRONG else 1)


class Visible(world.World):
  """A world whose second model is the contrary one."""

  def transfer(self):
    return Contrary(self._seed)


SPEC = {
  "task": f"{pathlib.Path(__file__).stem}:Visible",
  "path": str(pathlib.Path(__file__).parent),
  "seed": 5,
}


TRUSTED = runs.Trusted(task=SPEC, sandbox="off")


@pytest.fixture(scope="module")
def tasks():
  return task_.with_transfer(task_.load(SPEC))


@pytest.fixture(scope="module")
def executors(tasks):
  return [LocalExecutor(task) for task in tasks]


def run(folder, executors, **config):
  options = runs.RunOptions(
    task=SPEC,
    config={"seed": 5, "budget": BUDGET, "mark_every": 10, **config},
    sandbox="off",
    holdout="off",
  )
  if not folder.exists():
    runs.write_options(folder, options)
  kept = store.Store(folder)
  running = runs.make_search(options, task_.load(SPEC), executors, kept)
  try:
    running.run()
  finally:
    kept.close()
  return running


@pytest.fixture(scope="module")
def finished(tmp_path_factory, executors):
  folder = tmp_path_factory.mktemp("transfer") / "run"
  return run(folder, executors), folder


def target(task, executor, source):
  """The loss of a program on a task, measured outside any run."""
  found = []
  call = executor.trace(source).computation
  full = task_.Call(call, task.interface.default_plan, {})
  executor.run([full], lambda index, outcome, seconds: found.append(outcome))
  return found[0].values["loss"]


def events(folder, name):
  return [e for e in store.read_events(folder) if e["event"] == name]


@pytest.mark.slow
def test_every_step_to_the_champion_improved_both_models(finished, tasks, executors):
  running, _ = finished
  line = [running.programs.best]
  while line[-1].parent:
    line.append(running.record(line[-1].parent))
  assert len(line) > 2
  for task, executor in zip(tasks, executors, strict=True):
    losses = [target(task, executor, record.source) for record in line]
    margin = task.margins["loss"]
    assert all(a < b - margin for a, b in itertools.pairwise(losses))


@pytest.mark.slow
def test_a_gain_on_the_visible_model_alone_is_not_built_upon(finished):
  running, folder = finished
  judged = {e["program"]: e["accepted"] for e in events(folder, "transfer")}
  assert set(judged.values()) == {True, False}
  first = events(folder, "program")[0]["program"]
  parents = {e["packet"]["parent"] for e in events(folder, "packet")} - {""}
  assert parents <= {first} | {p for p, accepted in judged.items() if accepted}
  # Also once nothing is left to propose from the retained ones.
  assert all(record.is_accepted for record, _ in running._parents((BUDGET, 0)))
  kept = {record.id for record in running.programs.records}
  assert kept <= {first} | {p for p, accepted in judged.items() if accepted}
  champions = {e["champion"] for e in events(folder, "mark")}
  assert champions <= {first} | {p for p, accepted in judged.items() if accepted}
  assert running.programs.best.id in champions
  best = min(events(folder, "program"), key=lambda e: e["value"])
  refused = [e for e in running.history.experiments if e.transfers is False]
  assert refused
  assert not any(e.gain for e in refused)
  told, _ = status.read(folder)
  assert f"best: {running.programs.best.values['loss']:.6g}" in told
  assert best["value"] <= running.programs.best.values["loss"]


@pytest.mark.slow
def test_transfer_is_paid_for_and_its_numbers_stay_with_the_evaluator(finished):
  running, folder = finished
  paid = [e for e in events(folder, "outcome") if e["condition"] == "transfer"]
  accepted = {e["packet"] for e in events(folder, "transfer") if e["accepted"]}
  assert accepted < {e["packet"] for e in paid}
  assert all((e["charged"], e["values"]) == (1, {}) for e in paid)
  assert running.ledger.totals()["total"] <= BUDGET
  assert not verify.verify(folder, calls=2, trusted=TRUSTED).complaints


def test_a_resumed_run_judges_alike(finished, tasks, executors, tmp_path):
  _, folder = finished

  class Killed(LocalExecutor):
    def run(self, calls, on_done):
      super().run(calls, on_done)
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "run", [executors[0], Killed(tasks[1])])
  run(tmp_path / "run", executors)
  read = lambda place: (place / "log.jsonl").read_bytes()
  assert read(tmp_path / "run") == read(folder)


def test_without_a_call_left_nothing_is_accepted(finished, executors, tmp_path):
  _, folder = finished
  accepted = [e for e in events(folder, "transfer") if e["accepted"]]
  call = next(
    e["call"]
    for e in events(folder, "outcome")
    if (e["packet"], e["condition"]) == (accepted[0]["packet"], "transfer")
  )
  running = run(tmp_path / "run", executors, budget=call - 1)
  (last,) = events(tmp_path / "run", "transfer")[-1:]
  assert (last["program"], last["accepted"]) == (accepted[0]["program"], False)
  assert running.programs.best.parent == ""


def test_proposers_are_told_whether_a_gain_transfers_and_no_more():
  entry = Experiment("p", "q", "edit", "", "ok", {}, gain=False, transfers=False)
  assert "transfer not accepted" in prompt.entry_text(entry)
  for evidence, expected in {"none": None, "score": False, "verdict": False}.items():
    assert strip(entry, evidence).transfers is expected


def test_a_step_refused_from_one_parent_may_be_taken_from_another(
  tasks, executors, tmp_path
):
  cards = {card.id: card for card in tasks[0].edit_templates}

  def gaining(site):
    kinds = tasks[0].truth[site].items()
    name = next(op for op, kind in kinds if kind in ("mechanism", "capacity"))
    return cards[f"{site}-{name}"]

  right, wrong = gaining("attention"), gaining("weights")
  first = tasks[0].interface.default_source()
  one = right.edit(first, {"amplitude": 0.2})
  both = wrong.edit(one, {"amplitude": 0.5})
  asked = {"explanations": right.explanations, "controls": right.controls}
  steps = [
    (first, Proposal(source=one, label="one")),
    (one, Proposal(source=both, label="both")),
    (first, Proposal(source=both, label="b", residual=right.residual, **asked)),
  ]

  class Stepping:
    name = "stepping"

    def propose(self, context):
      if not steps:
        raise ProposerError("no step is left")
      if context.parent.source != steps[0][0]:
        raise ExhaustedError("this step is of another parent")
      return steps.pop(0)[1]

  kept = store.Store(tmp_path)
  evaluators = [
    CachedEvaluator(task, executor, kept)
    for task, executor in zip(tasks, executors, strict=True)
  ]
  config = SearchConfig(seed=5, budget=BUDGET, mark_every=BUDGET)
  transfer = Transfer(evaluators[1])
  running = Search(config, evaluators[0], Stepping(), kept, transfer)
  running.run()
  judged = [e["accepted"] for e in events(tmp_path, "transfer")]
  assert judged == [True, False, True]
  (mark,) = events(tmp_path, "mark")
  assert mark["champion"] == running.programs.best.id
  assert running.record(running.programs.best.id).is_accepted
