"""Runs that end where nobody meant them to: what stays, and who may go on."""

import json
import os

import pytest

from mxjax.discovery.core import store
from mxjax.discovery.core.candidate_source import with_functions
from mxjax.discovery.core.proposal import OutageError, Proposal, ProposerError
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.tasks import world
from tests.discovery import searching

TASK = world.World(seed=5)


def run(folder, proposer, **config):
  # As a process of its own, which traces anew with functions at other addresses.
  options = {"seed": 5, "budget": 30, **config}
  return searching.run(folder, TASK, proposer, LocalExecutor(TASK), **options)


@pytest.mark.slow
def test_a_resumed_run_sends_a_model_the_same_prompts(tmp_path):
  """Predictions are told in an order, which a stored proposal must not change."""

  def edit(context):
    asked = {r.observable for r in context.residuals}
    cards = [card for card in TASK.edit_templates if card.residual in asked]
    told = EmbeddedProposer(cards, TASK.target).propose(context)
    # As a model wrote it: the primary run first.
    assert list(told.explanations[0].predictions)[0] == "primary"
    return told

  def prompts(proposer):
    return [prompt.messages(context, TASK) for context in proposer.contexts]

  whole = searching.Scripted(*[edit] * 4, at_end=ProposerError)
  run(tmp_path / "whole", whole)
  begun = searching.Scripted(edit, edit, at_end=OutageError)
  with pytest.raises(OutageError):
    run(tmp_path / "run", begun)
  resumed = searching.Scripted(edit, edit, at_end=ProposerError)
  run(tmp_path / "run", resumed)
  assert " predicts primary: " in prompts(resumed)[0][1]["content"]
  assert prompts(resumed) == prompts(whole)[2:]
  assert searching.log(tmp_path / "run") == searching.log(tmp_path / "whole")


NAMES_AN_ADDRESS = """
def geometry(x):
  return {}[lambda y: y]
"""


def test_a_failed_trace_stays_as_it_was_when_the_run_is_resumed(tmp_path):
  source = with_functions(TASK.interface.default_source(), NAMES_AN_ADDRESS)
  broken = Proposal(source=source, label="broken")
  for script in ([broken, broken], []):
    proposer = searching.Scripted(*script, at_end=ProposerError)
    run(tmp_path / "run", proposer)
  (detail,) = {
    e["detail"]
    for e in store.read_events(tmp_path / "run")
    if e["event"] == "refused" and e["status"] == "trace_failed"
  }
  assert " at 0x" in detail


def test_what_is_registered_runs_though_the_proposer_ends_in_the_same_round(tmp_path):
  first = lambda context: Proposal(source=context.parent.source + "x = 1\n", label="")
  edited = lambda context: Proposal(
    source=with_functions(
      context.parent.source, "def geometry(x):\n  return x + 0.25\n"
    ),
    label="edit",
  )
  proposer = searching.Scripted(first, edited, at_end=ProposerError)
  run(tmp_path / "run", proposer, width=4)
  events = store.read_events(tmp_path / "run")
  packets = {e["id"] for e in events if e["event"] == "packet"}
  assert len(packets) == 2
  assert packets == {e["packet"] for e in events if e["event"] == "outcome"}
  assert events[-1]["reason"] == "proposer: the script has ended"


def test_one_process_writes_a_log(tmp_path):
  kept = store.Store(tmp_path)
  kept.emit("open")
  with (tmp_path / "log.jsonl").open("ab") as file:
    file.write(b"{torn")
  # A second one would cut the event that the first is about to end.
  with pytest.raises(BlockingIOError, match="another process at work"):
    store.Store(tmp_path)
  kept.close()
  again = store.Store(tmp_path)
  again.emit("open")
  again.emit("more")
  again.close()
  assert [e["event"] for e in store.read_events(tmp_path)] == ["open", "more"]
  late, other = store.Store(tmp_path / "new"), store.Store(tmp_path / "new")
  other.emit("open")
  other.close()
  with pytest.raises(store.ReplayError, match="that of another process"):
    late.emit("open")
  late.close()


def test_a_run_that_fails_takes_its_scorer_along(tmp_path, monkeypatch):
  started = []
  begin = runs.start_holdout
  monkeypatch.setattr(
    runs, "start_holdout", lambda *told: started.append(begin(*told)) or started[-1]
  )
  options = runs.RunOptions(
    task={"task": "world", "seed": 3},
    config={"start": "def geometry(x):\n  return x.no_such_method()\n"},
    sandbox="off",
    holdout="during",
  )
  runs.write_options(tmp_path / "run", options)
  with pytest.raises(ValueError, match="an initial program that runs"):
    runs.run(tmp_path / "run", trusted=runs.Trusted.own(options))
  (scorer,) = started
  assert scorer.poll() is not None


def test_a_scorer_ends_with_its_run_and_lets_another_one_follow(tmp_path, monkeypatch):
  folder = tmp_path / "run"
  options = runs.RunOptions(task={"task": "world", "seed": 3}, config={}, sandbox="off")
  runs.write_options(folder, options)
  begun = store.Store(folder)
  begun.emit("open")
  begun.close()
  # The process named as the run is not the one that started this one.
  trusted = json.dumps({"sandbox": "off"})
  heldout.follow(folder, os.getpid(), trusted)
  waits = []
  held = store.Store(heldout.sealed_folder(folder))
  held.emit("heldout")
  monkeypatch.setattr(heldout.time, "sleep", lambda s: waits.append(s) or held.close())
  heldout.follow(folder, os.getpid(), trusted)
  assert waits == [heldout.POLL_SECONDS]
