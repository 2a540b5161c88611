"""Runs whose proposals a language model wrote at an endpoint, replayed from replies.

`tests/golden/world_by_a_model` and `ptq_again_by_a_model` hold the replies, addressed
by the hash of the prompt that each one answers, and the log of the run that they made.
The model knew the prompts alone. A prompt that changes by a letter has no recorded
reply: where prompts must change, record the run again, with the words of `RUNS`,
`--proposer llm` and the jail, and keep it by `tests/golden/make_recorded_run.py`;
nothing here is about one recording.

`ptq_by_a_model` is a whole run by earlier prompts, which is kept for its programs: the
documents measure them.
"""

import json
import pathlib
import re

import pytest

from mxjax.cli.main import main
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.task import Outcome
from mxjax.discovery.proposers.llm import LlmProposer
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq.interface import INTERFACE
from tests.golden.make_recorded_run import champions, compared, events_of

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"
MODELS = GOLDEN.parents[1] / "models" / "trained"
RUNS = {
  "world": (15, ["--task", "world"]),
  "ptq_again": (40, ["--task", "ptq", "--model", str(MODELS / "olmo2")]),
}
"""Budget of each run, and what it searched."""
PROBE = re.compile(r"probe [0-9a-f]{12}")


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(
  scope="module", params=["world", pytest.param("ptq_again", marks=pytest.mark.slow)]
)
def name(request):
  return request.param


@pytest.fixture(scope="module")
def recorded(name):
  return lines(GOLDEN / f"{name}_by_a_model" / "log.jsonl")


@pytest.fixture(scope="module")
def replayed(name, recorded, tmp_path_factory):
  """The folder of the search, told the outcomes that the recording machine computed.

  Programs are admitted and traced, and prompts are built here.
  """
  folder = GOLDEN / f"{name}_by_a_model"
  # What ran before is told again without a charge, and nothing runs.
  paid = [e for e in recorded if e["event"] == "outcome" and e["charged"]]
  told = [Outcome.from_dict(each) for each in paid]
  proxy = folder / "proxy.jsonl"
  asked = [Outcome.from_dict(e) for e in lines(proxy)] if proxy.exists() else []
  out = tmp_path_factory.mktemp("replay") / "run"
  budget, words = RUNS[name]
  words = ["discover", "run", *words, "--budget", str(budget), "--seed", "1"]
  words += ["--task-options", json.dumps(recorded[0]["task"])]
  words += ["--proposer", "cassette", "--cassette", str(folder / "cassette.jsonl")]
  words += ["--sandbox", "off", "--holdout", "off"]

  def outcome(executor, call):
    del call
    is_proxy = executor._task.phases == ("proxy",)
    # Some seconds, for which the cassette tells those of the recording machine.
    return (asked if is_proxy else told).pop(0), {"the rest": 1.0}

  names, request = {}, LlmProposer._request
  theirs = [e["condition"] for e in recorded if e.get("kind") == "probe"]

  def asking(proposer, messages):
    # A probe is named by the digest of a packet, and so by the evaluator's sources.
    text = json.dumps(messages)
    for mine in dict.fromkeys(PROBE.findall(text)):
      # A reply that is part of the messages has the recorded name.
      if mine not in theirs and mine not in names:
        names[mine] = theirs[len(names)]
    return request(
      proposer, json.loads(PROBE.sub(lambda m: names.get(m[0], m[0]), text))
    )

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(LocalExecutor, "_outcome", outcome)
    patch.setattr(LlmProposer, "_request", asking)
    ended = main([*words, "--out", str(out)])
  assert ended == 0
  assert not told
  assert not asked
  return out


@pytest.mark.slow
def test_the_replies_make_the_same_log(name, replayed, recorded):
  events = events_of(replayed)
  assert [e["call"] for e in events if e["event"] == "mark"][-1] == RUNS[name][0]
  assert len(events) == len(recorded)
  for ours, theirs in zip(events, recorded, strict=True):
    mine, other = compared(ours), compared(theirs)
    is_probe = mine.get("kind") == "probe"
    assert mine == other | ({"condition": mine["condition"]} if is_probe else {})


def test_the_kept_sources_of_best_programs_are_what_the_replies_make(name, replayed):
  file = GOLDEN / f"{name}_by_a_model" / "champions.json"
  kept = json.loads(file.read_text()) if file.exists() else {}
  assert champions(replayed) == kept
  values = {
    e["program"]: (e["value"], e["call"])
    for e in events_of(replayed)
    if e["event"] == "program"
  }
  for mark, source in kept.items():
    calls = int(mark.removeprefix("call "))
    by_then = {k: value for k, (value, call) in values.items() if call <= calls}
    best = min(by_then, key=by_then.get)
    assert source == (replayed / "programs" / f"{best}.py").read_text()


def test_no_call_was_lost_to_the_form_of_an_answer(name, recorded):
  outcomes = [e for e in recorded if e["event"] == "outcome"]
  assert sum(e["charged"] for e in outcomes) <= RUNS[name][0]
  assert {e["kind"] for e in outcomes} >= {"candidate", "control"}
  assert {e["status"] for e in outcomes if e["kind"] == "control"} == {"ok"}


def test_a_verdict_changed_what_came_next(recorded):
  """A demand that a verdict made was met by a later program."""
  kinds = [e["event"] for e in recorded]
  met = [i for i, e in enumerate(recorded) if e.get("status") == "met"]
  assert "verdict" in kinds[: met[0]]
  assert "packet" in kinds[kinds.index("verdict") : met[0]]


def test_the_programs_that_the_documents_measure_are_legal():
  """They are those of the run by earlier prompts."""
  kept = json.loads((GOLDEN / "ptq_by_a_model" / "champions.json").read_text())
  assert list(kept) == ["call 15", "call 20", "call 30"]
  for source in kept.values():
    assert admit(source, INTERFACE).hooks
