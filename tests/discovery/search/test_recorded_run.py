"""A run whose proposals a language model wrote at an endpoint, replayed from replies.

`tests/golden/world_by_a_model` holds the replies, addressed by the hash of the prompt
that each one answers, and the log of the run that they made. The model knew the prompts
alone. A prompt that changes by a letter has no recorded reply: where prompts must
change, record the run again, with `words` below, `--proposer llm` and the jail, and
copy its two files; nothing here is about one recording.
"""

import json
import pathlib

import pytest

from mxjax.cli.main import main
from mxjax.discovery.core.task import Outcome
from mxjax.discovery.sandbox.local_executor import LocalExecutor

FOLDER = pathlib.Path(__file__).parents[2] / "golden" / "world_by_a_model"
BUDGET = 15
KEPT = (
  *("event", "kind", "condition", "status", "call", "charged", "values", "detail"),
  *("verdict", "reason", "response", "observed"),
)
"""What is compared: the rest are digests of sources and of traced programs."""


def events(path):
  lines = map(json.loads, path.read_text().splitlines())
  return [{key: e[key] for key in KEPT if key in e} for e in lines]


@pytest.fixture(scope="module")
def recorded():
  return events(FOLDER / "log.jsonl")


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
  """The log of the search, told the outcomes that the recording machine computed.

  The noise of the world is drawn by the last bits of outputs, which machines round
  differently; everything else, the prompts above all, is computed here.
  """
  lines = map(json.loads, (FOLDER / "log.jsonl").read_text().splitlines())
  told = [Outcome.from_dict(e) for e in lines if e["event"] == "outcome"]
  out = tmp_path_factory.mktemp("replay") / "run"
  words = ["discover", "run", "--task", "world", "--budget", str(BUDGET), "--seed", "1"]
  words += ["--proposer", "cassette", "--cassette", str(FOLDER / "cassette.jsonl")]
  words += ["--sandbox", "off", "--holdout", "off"]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(LocalExecutor, "_outcome", lambda self, call: told.pop(0))
    assert main([*words, "--out", str(out)]) == 0
  assert not told
  return events(out / "log.jsonl")


def test_the_replies_make_the_same_log(replayed, recorded):
  assert len(replayed) == len(recorded)
  for ours, theirs in zip(replayed, recorded, strict=True):
    assert ours == theirs


def test_no_call_was_lost_to_the_form_of_an_answer(recorded):
  outcomes = [e for e in recorded if e["event"] == "outcome"]
  assert sum(e["charged"] for e in outcomes) <= BUDGET
  assert {e["kind"] for e in outcomes} >= {"candidate", "control"}
  assert {e["status"] for e in outcomes} == {"ok"}


def test_a_verdict_changed_what_came_next(recorded):
  """A demand that a verdict made was met by a later program."""
  kinds = [e["event"] for e in recorded]
  met = [i for i, e in enumerate(recorded) if e.get("status") == "met"]
  assert "verdict" in kinds[: met[0]]
  assert "packet" in kinds[kinds.index("verdict") : met[0]]
