"""The protocol of the studies: explicit verdicts, replay, freezing, gates, budgets."""

import dataclasses
import json
import math
import shutil

import pytest

from mxjax.discovery.core import store, verdict
from mxjax.discovery.core.ledger import KINDS, Ledger
from mxjax.discovery.core.packet import Condition
from mxjax.discovery.core.residual import PRIMARY, Explanation, disagree
from mxjax.discovery.core.task import Call
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.search import controls, heldout, runs
from mxjax.discovery.studies import regimes, study, verdict_replay
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.results import Results
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import edit_templates as ptq_templates

TASK = world.World(seed=3)
FOCAL = Explanation("focal", "", {"primary": {"x": "down"}, "c": {"x": "same"}})
RIVAL = Explanation("rival", "", {"primary": {"x": "down"}, "c": {"x": "down"}})
NOTHING = Explanation("nothing", "", {"primary": {"x": "same"}})
HARM = Explanation("harm", "", {"primary": {"x": "up"}})


def resolve(accounts, **observed):
  observed = {name: {"x": symbol} for name, symbol in observed.items()}
  return verdict.resolve(accounts, observed, "x", is_safe=True, is_equivalent=False)


@pytest.mark.parametrize(
  ("accounts", "observed", "excluded", "explicit"),
  [
    ((FOCAL, NOTHING, HARM), {"primary": "down"}, {"nothing", "harm"}, ""),
    ((FOCAL, RIVAL, HARM), {"primary": "down"}, {"harm"}, ""),
    (
      (FOCAL, RIVAL, HARM),
      {"primary": "down", "c": "same"},
      {"rival", "harm"},
      "control",
    ),
    (
      (FOCAL, RIVAL, HARM),
      {"primary": "down", "c": "down"},
      {"focal", "harm"},
      "control",
    ),
    ((FOCAL, RIVAL, HARM), {"primary": "up"}, {"focal", "rival"}, "primary"),
    ((FOCAL, RIVAL), {"primary": "up", "c": "up"}, {"focal", "rival"}, "primary"),
  ],
)
def test_a_verdict_is_explicit_only_if_it_excludes_a_rival(
  accounts, observed, excluded, explicit
):
  finding = resolve(accounts, **observed)
  assert set(finding.excluded) == excluded
  assert finding.explicit == explicit


def test_an_exclusion_names_the_first_condition_that_contradicts():
  finding = resolve((FOCAL, RIVAL, HARM), primary="down", c="same")
  assert finding.excluded == {"rival": "c", "harm": PRIMARY}


@pytest.mark.parametrize("library", [TASK.edit_templates, ptq_templates.EDIT_TEMPLATES])
def test_contested_accounts_are_told_apart_by_controls_only(library):
  for card in library:
    contested = card.contested()
    assert contested.explanations[0] == card.explanations[0]
    assert len(contested.explanations) >= 2
    first = [e.predicts(PRIMARY) for e in contested.explanations]
    assert not any(disagree(a, b) for a in first for b in first)
    assert controls.minimal(contested.explanations, contested.controls)


def test_the_library_of_contested_accounts_can_be_asked_for():
  settings = {"kind": "embedded", "contested": True}
  options = runs.RunOptions(task={}, config={}, proposer=settings)
  expected = EmbeddedProposer([c.contested() for c in TASK.edit_templates], "loss")
  assert runs.make_proposer(options, TASK).name == expected.name
  plain = runs.RunOptions(task={}, config={})
  assert runs.make_proposer(plain, TASK).name != expected.name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("protocol") / "world"
  options = study.StudyOptions(
    task={"task": "world"}, seeds=(5,), budget=40, gate_at=2.9
  )
  held = study.Folder(path, options)
  yield held
  held.close()


@pytest.fixture(scope="module")
def summary(folder):
  return folder.run("quantforge", 5)


@pytest.mark.slow
def test_explicit_verdicts_are_counted_with_those_of_the_primary_alone(folder, summary):
  events = store.read_events(folder.run_folder("quantforge", 5))
  found = [e["explicit"] for e in events if e["event"] == "verdict"]
  assert "" in found or "control" in found
  assert summary["explicit"] == len(found) - found.count("")
  assert summary["explicit_primary"] == found.count("primary")


def test_replayed_arms_read_the_same_evidence(folder, summary, monkeypatch):
  seen = []
  original = verdict_replay._successor

  def spy(proposer, evaluator, context, demand):
    seen.append((context, demand))
    return original(proposer, evaluator, context, demand)

  monkeypatch.setattr(verdict_replay, "_successor", spy)
  transitions = folder.replay(5)
  assert transitions
  assert len(seen) == 2 * len(transitions)
  for (free, _), (bound, demand), transition in zip(
    seen[::2], seen[1::2], transitions, strict=True
  ):
    assert bound.demands == (demand,)
    assert demand.packet == transition["packet"]
    assert (free.demands, free.compiles) == ((), False)
    assert free == dataclasses.replace(bound, demands=(), checked=None, compiles=False)
    last = free.history[-1]
    assert last.verdict == transition["verdict"]
    assert last.excluded
    assert last.explanations
    assert set(last.observed) > {PRIMARY}


def test_replay_takes_packets_whose_control_excluded_something_new(folder, summary):
  events = store.read_events(folder.run_folder("quantforge", 5))
  verdicts = [e for e in events if e["event"] == "verdict"]
  new = [e for e in verdicts if set(e["excluded"].values()) - {PRIMARY}]
  # Controls ran in others too, and excluded only what the primary run had.
  assert len(new) < sum(
    len(e["observed"]) > 1 and bool(e["excluded"]) for e in verdicts
  )
  # Nothing is owed where the observable is at its floor.
  owed = {e["packet"] for e in events if e["event"] == "demand"}
  owed -= {e["packet"] for e in events if e.get("status") == "at_floor"}
  new = [e for e in new if e["packet"] in owed]
  replayed = [t["packet"] for t in folder.replay(5)]
  assert replayed == [e["packet"] for e in new][: verdict_replay.PER_TRAJECTORY]


def test_the_absolute_gate_stands_beside_the_relative_one(folder, summary):
  found = folder.landmarks(5)
  assert found["absolute"] == 2.9
  assert found["absolute"] != found["gate"]
  results = Results(
    {
      "runs": {"quantforge": {"5": summary}},
      "seeds": [5],
      "landmarks": {"5": found},
      "gate_at": 2.9,
      "target": "loss",
    }
  )
  last = summary["marks"][-1][2]
  shown = f"{int(last <= found['gate'])}/1, {int(last <= 2.9)}/1 at 2.9"
  assert results.gate("quantforge") == shown


@pytest.mark.parametrize(
  ("target", "at"), [("loss", 8.0), ("log_ppl", pytest.approx(math.log(8)))]
)
def test_the_papers_gate_is_a_perplexity(target, at):
  options = study.StudyOptions(task={}, seeds=(1,), gate_at=8.0)
  assert options.absolute_gate(target) == at


@pytest.mark.parametrize(
  "what", ["sources", "cards", "margins", "arms", "contract", "task", "tokenizer"]
)
def test_a_folder_is_frozen_by_all_that_could_tune_a_comparison(tmp_path, what, folder):
  before = json.loads((folder.path / "frozen.json").read_text())
  assert what in before
  (tmp_path / "frozen.json").write_text(json.dumps({**before, what: "other"}))
  with pytest.raises(ValueError, match=f"frozen with, got other {what}"):
    study.Folder(tmp_path, folder.options)


def test_the_frozen_hash_moves_with_task_tokenizer_and_sources(tmp_path, monkeypatch):
  tokenizer = tmp_path / "tokenizer.json"
  tokenizer.write_text("{}")
  options = study.StudyOptions(
    task={"task": "world"},
    seeds=(5,),
    proposer={"kind": "embedded", "tokenizer": str(tokenizer)},
  )
  hashes = [study.frozen(options)["hash"]]
  assert study.frozen(options)["hash"] == hashes[0]
  tokenizer.write_text("{ }")
  hashes.append(study.frozen(options)["hash"])
  module = tmp_path / "mine.py"
  module.write_text("")
  monkeypatch.setattr(study.task_.inspect, "getfile", lambda kind: str(module))
  hashes.append(study.frozen(options)["hash"])
  original = study.identity._python_files

  def one_changed(folder, prefix):
    for name, digest in original(folder, prefix):
      yield name, digest + "x" * (name == "proposers/prompt.py")

  monkeypatch.setattr(study.identity, "_python_files", one_changed)
  hashes.append(study.frozen(options)["hash"])
  monkeypatch.setattr(world.World, "contract", {"world": "other"})
  hashes.append(study.frozen(options)["hash"])
  assert len(set(hashes)) == 5


def test_scores_stay_sealed_until_the_run_is_closed(folder, summary, tmp_path):
  whole = folder.run_folder("quantforge", 5)
  opened = tmp_path / "run"
  for name in (whole, heldout.sealed_folder(whole)):
    shutil.copytree(name, opened.with_name(opened.name + name.name[len(whole.name) :]))
  assert [m["call"] for m in heldout.unsealed(opened)] == [20, 40]
  log = opened / "log.jsonl"
  log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
  assert heldout.unsealed(opened) == []
  with pytest.raises(ValueError, match="has been closed"):
    heldout.score_closed(opened, TASK, folder.executor(TASK), None)


def mechanisms(task, sites):
  """The initial program with the right operation at some sites."""
  source = task.interface.default_source()
  for site in sites:
    names = [
      n for n, kind in task.truth[site].items() if kind in ("mechanism", "capacity")
    ]
    card = next(c for c in task.edit_templates if c.id == f"{site}-{names[0]}")
    source = card.edit(source, {"amplitude": 0.5})
  return source


@pytest.mark.parametrize(
  ("regimes_in", "is_ordered"), [(1, False), (3, True)], ids=["one", "all"]
)
def test_the_regime_audit_sees_what_a_program_executes(folder, regimes_in, is_ordered):
  task = world.World(seed=5)
  names = list(task.regimes)
  sites = [s for name in names[:regimes_in] for s in task.regimes[name]]
  found = regimes.audit(folder.evaluator(task, "audit"), mechanisms(task, sites))
  expected = {name: index < regimes_in for index, name in enumerate(names)}
  assert found["executed"] == expected
  assert found["pays"] == expected
  assert found["hierarchy"] == (regimes_in == 3)
  assert found["ordered"] == is_ordered


def test_an_inert_regime_is_executed_and_does_not_pay(folder):
  task = world.World(seed=4)
  name = next(n for n, kind in task.truth["mlp"].items() if "inert" in kind)
  card = next(c for c in task.edit_templates if c.id == f"mlp-{name}")
  source = card.edit(task.interface.default_source(), {"amplitude": 0.25})
  found = regimes.audit(folder.evaluator(task, "audit"), source)
  assert found["executed"]["Structural recovery"]
  assert not any(found["pays"].values())


PAPER_CALLS = {
  "score": (240, 0, 0),
  "text": (240, 0, 0),
  "reflect": (240, 0, 0),
  "quantforge": (141, 69, 30),
  "no-compile": (171, 69, 0),
  "source": (171, 69, 0),
  "layer-output": (97, 69, 74),
  "random-controls": (141, 69, 30),
  "all-controls": (92, 118, 30),
}


def test_every_arm_has_the_papers_allocation():
  for name, calls in PAPER_CALLS.items():
    assert tuple(ARMS[name].allocation[kind] for kind in KINDS) == calls
  assert all(sum(arm.calls) == 240 for arm in ARMS.values())
  options = study.StudyOptions(task={"task": "world"}, seeds=(5,), is_allocated=True)
  config = options.run("quantforge", 5).config
  assert config["allocation"] == dict(zip(KINDS, (141, 69, 30), strict=True))


def test_no_kind_of_call_exceeds_its_allocation(folder, tmp_path):
  options = folder.options.run("quantforge", 5)
  allocation = {"candidate": 14, "control": 7, "probe": 3}
  config = {**options.config, "budget": 24, "allocation": allocation}
  options = dataclasses.replace(options, config=config)
  task = world.World(seed=5)
  kept = store.Store(tmp_path)
  running = runs.make_search(options, task, [folder.executor(task)], kept)
  running.run()
  totals = running.ledger.totals()
  assert all(totals[kind] <= allocation[kind] for kind in KINDS)
  assert totals["candidate"] == 14
  assert totals["control"] >= 5


@pytest.mark.parametrize("allocation", [{"candidate": 5}, dict.fromkeys(KINDS, 1)])
def test_an_allocation_that_does_not_add_up_is_refused(allocation):
  with pytest.raises(ValueError, match="add up"):
    Ledger(5, allocation=allocation)


def test_a_ledger_keeps_kinds_apart():
  ledger = Ledger(4, allocation={"candidate": 2, "control": 1, "probe": 1})
  condition = lambda kind, name: Condition(name, kind, Call({}, {}, {}), 1, name)
  first = [condition("candidate", "a"), condition("control", "b")]
  ledger.reserve(ledger.price(first))
  assert (ledger.left_for("control"), ledger.left) == (0, 2)
  for each in first:
    ledger.settle("p", each, "ok")
  assert not ledger.fits(ledger.price([condition("control", "c")]))
  assert ledger.fits(ledger.price([condition("probe", "c")]))
