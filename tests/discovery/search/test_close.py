"""A run that is ended by hand: it keeps what it has, and gets its held-out score."""

import pytest

from mxjax.discovery.core import store
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.tasks import world
from tests.discovery import searching

TASK = world.World(seed=3)
TRUSTED = runs.Trusted(sandbox="off")


@pytest.fixture
def killed(tmp_path):
  """The folder of a run whose process was killed in its fifth call."""
  place = tmp_path / "run"
  config = {"seed": 3, "budget": 20, "mark_every": 10}
  options = runs.RunOptions(task=dict(TASK.spec), config=config, sandbox="off")
  runs.write_options(place, options)
  executor = searching.Counting(TASK)
  executor.stop_after = 5
  proposer = EmbeddedProposer(TASK.edit_templates, "loss")
  with pytest.raises(KeyboardInterrupt):
    searching.run(place, TASK, proposer, executor, **config)
  return place


@pytest.mark.slow
def test_a_closed_run_has_a_held_out_score_and_proposes_nothing_more(killed):
  before = len(list((killed / "proposals").iterdir()))
  assert not runs.is_closed(killed)
  champion = runs.close(killed, trusted=TRUSTED)
  events = store.read_events(killed)
  assert events[-1]["reason"] == "proposer: the run was closed by hand"
  assert len(list((killed / "proposals").iterdir())) == before
  scores = heldout.unsealed(killed)
  assert [score["call"] for score in scores] == [10, 20]
  assert {score["champion"] for score in scores} == {champion.id}
  assert all(score["status"] == "ok" for score in scores)
  spent = events[-1]["ledger"]["total"]
  assert 5 <= spent < 10, "what was registered is run to its end"


@pytest.mark.slow
def test_closing_twice_changes_nothing(killed):
  runs.close(killed, trusted=TRUSTED)
  log = (killed / "log.jsonl").read_bytes()
  runs.close(killed, trusted=TRUSTED)
  assert (killed / "log.jsonl").read_bytes() == log


def test_what_has_not_begun_cannot_be_closed(tmp_path):
  with pytest.raises(ValueError, match="got no event"):
    runs.close(tmp_path)
