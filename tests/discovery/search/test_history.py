"""Marks of a run: at every so many calls, and of the program that it ends with."""

import shutil

import pytest

from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import Proposal
from mxjax.discovery.proposers import embedded
from mxjax.discovery.tasks import world
from tests.cases import slow
from tests.discovery import searching

TASK = world.World(seed=6)
BUDGET = 20
"""At whose last call this search finds its best program."""


def run(folder, proposer=None, **config):
  proposer = proposer or embedded.EmbeddedProposer(TASK.edit_templates, "loss")
  options = {"seed": 6, "budget": BUDGET, **config}
  return searching.run(folder, TASK, proposer, **options)


def events(folder, kind):
  return [e for e in store.read_events(folder) if e["event"] == kind]


def marks(folder):
  return [(e["call"], e["champion"]) for e in events(folder, "mark")]


def without_last_mark(folder, out):
  """Writes the log as it was when only multiples of `mark_every` had a mark."""
  kept = store.Store(out)
  for event in store.read_events(folder):
    if event["event"] != "mark" or event["call"] != BUDGET:
      chain = ("n", "event", "previous", "hash", "format")
      kept.emit(event["event"], **{k: v for k, v in event.items() if k not in chain})
  kept.close()


@pytest.mark.slow
@pytest.mark.parametrize("every", [BUDGET - 1, *slow(BUDGET, BUDGET + 1)])
def test_the_program_that_a_run_ends_with_is_marked(tmp_path, every):
  """Also if it came after the last multiple, or there was none."""
  best = run(tmp_path, mark_every=every).programs.best
  assert best.call == BUDGET
  at = [call for call, _ in marks(tmp_path)]
  assert at == ([every, BUDGET] if every < BUDGET else [BUDGET])
  assert marks(tmp_path)[-1] == (BUDGET, best.id)
  assert events(tmp_path, "mark")[-1]["value"] == best.values["loss"]


@pytest.mark.slow
def test_what_the_last_mark_names_is_not_marked_again(tmp_path):
  best = run(tmp_path, budget=15, mark_every=14).programs.best
  assert best.call < 14
  assert marks(tmp_path) == [(14, best.id)]


def test_a_run_that_its_proposer_finishes_has_a_mark(tmp_path):
  told = Proposal(source="", label="", note="no edit is left", finished=True)
  running = run(
    tmp_path, proposer=searching.Scripted(lambda context: told), mark_every=BUDGET + 1
  )
  assert running.ledger.spent == 1
  assert marks(tmp_path) == [(BUDGET, running.programs.best.id)]


@pytest.mark.slow
def test_a_run_that_ended_without_such_a_mark_still_replays(tmp_path):
  run(tmp_path / "new", mark_every=BUDGET + 1)
  shutil.copytree(tmp_path / "new", tmp_path / "old")
  (tmp_path / "old" / "log.jsonl").unlink()
  without_last_mark(tmp_path / "new", tmp_path / "old")
  before = searching.log(tmp_path / "old")
  run(tmp_path / "old", mark_every=BUDGET + 1)
  assert searching.log(tmp_path / "old") == before
  # One that has the mark repeats it, also where its end is lost.
  run(tmp_path / "new", mark_every=BUDGET + 1)
  whole = searching.log(tmp_path / "new")
  lines = whole.splitlines(keepends=True)
  (tmp_path / "new" / "log.jsonl").write_bytes(b"".join(lines[:-1]))
  run(tmp_path / "new", mark_every=BUDGET + 1)
  assert searching.log(tmp_path / "new") == whole
  # One that was killed before its end ends as any does now.
  lines = before.splitlines(keepends=True)
  (tmp_path / "old" / "log.jsonl").write_bytes(b"".join(lines[:-1]))
  run(tmp_path / "old", mark_every=BUDGET + 1)
  assert searching.log(tmp_path / "old") == searching.log(tmp_path / "new")
