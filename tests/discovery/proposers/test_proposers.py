"""Memory rules, a local OpenAI-compatible server, cassettes, the human queue."""

import dataclasses
import json

import pytest

from mxjax.discovery.core.proposal import (
  Context,
  Experiment,
  OutageError,
  ProposerError,
  Record,
)
from mxjax.discovery.proposers import endpoint, human, llm, prompt
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.tasks import world
from tests.discovery import searching
from tests.discovery.proposers.test_endpoint import Server, chat, client, http

TASK = world.World(seed=3)
SOURCE = TASK.interface.default_source()


def experiment(number, *, gain=False, label=None, parent="p", note="note"):
  change = -0.1 if gain else 0.1
  return Experiment(
    program=f"program{number}",
    parent=parent,
    label=label or f"edit{number}",
    note=note,
    status="ok",
    changes={"loss": change},
    gain=gain,
  )


def context(history=(), evidence="verdict", address=(0, 0)):
  record = Record("p", SOURCE, "", 1, {}, {"remeasure": False}, "x", {"loss": 3.0}, {})
  return Context(
    seed=0,
    address=address,
    target="loss",
    parent=record,
    residuals=(),
    demands=(),
    history=tuple(history),
    champion=record,
    donors=(),
    evidence=evidence,
    stagnation=0,
  )


def test_memory_keeps_the_best_the_latest_and_sixteen_of_each_kind():
  history = [experiment(i, gain=i % 3 == 0) for i in range(100)]
  told = context(history)
  best = dataclasses.replace(told.champion, id="program0")
  kept = prompt.select(dataclasses.replace(told, champion=best))
  names = [e.program for e in kept]
  assert names == sorted(names, key=lambda n: int(n.removeprefix("program")))
  assert history[0] in kept
  assert all(e in kept for e in history[-prompt.LATEST :])
  older_failures = [e for e in kept if not e.gain and e not in history[-20:]]
  assert len(older_failures) <= prompt.FAILURES


def test_memory_over_its_allowance_merges_duplicates_before_it_drops_any():
  twins = [experiment(i, label="same") for i in range(10)]
  history = [*twins, *(experiment(i, gain=True) for i in range(10, 20))]
  whole = sum(prompt.estimated_tokens(prompt.entry_text(e) + "\n") for e in history)
  kept = prompt.select(context(history), allowance=whole * 2 // 3)
  assert [e.label for e in kept].count("same") == 1
  assert "seen 10 times" in next(e.note for e in kept if e.label == "same")
  assert sum(e.gain for e in kept) == 10


@pytest.mark.parametrize("allowance", [50, 200, 1000])
def test_memory_stays_within_its_allowance(allowance):
  history = [experiment(i, gain=i % 2 == 0, note="word " * 20) for i in range(60)]
  kept = prompt.select(context(history), allowance=allowance)
  size = sum(prompt.estimated_tokens(prompt.entry_text(e) + "\n") for e in kept)
  assert size <= allowance


def test_failures_are_not_dropped_before_others_of_the_same_relevance():
  history = [experiment(i, gain=i % 2 == 0, note="word " * 30) for i in range(40)]
  kept = prompt.select(context(history), allowance=1500)
  gains, failures = sum(e.gain for e in kept), sum(not e.gain for e in kept)
  assert abs(gains - failures) <= 2


def test_a_prompt_fits_the_input_allowance():
  history = [experiment(i, note="long " * 200) for i in range(200)]
  request = prompt.messages(context(history), TASK)
  text = request[0]["content"] + request[1]["content"]
  assert prompt.estimated_tokens(text) <= prompt.INPUT_TOKENS


def test_a_program_too_long_for_the_input_is_an_error():
  long = context()
  source = SOURCE + "# " + "x" * 4 * prompt.INPUT_TOKENS
  long = dataclasses.replace(
    long, parent=dataclasses.replace(long.parent, source=source)
  )
  with pytest.raises(ValueError, match="tokens"):
    prompt.messages(long, TASK)


def answer(template, source=None):
  """A reply with the whole experiment of an edit, or with another program."""
  told = {
    "source": source or template.edit(SOURCE, {"amplitude": 0.5}),
    "label": f"{template.id} by a model",
    "residual": template.residual,
    "explanations": [
      {"name": e.name, "statement": e.statement, "predictions": e.predictions}
      for e in template.explanations
    ],
    "controls": [dataclasses.asdict(c) for c in template.controls],
    "declared": list(template.hooks),
  }
  return http(chat(f"Here it is:\n```json\n{json.dumps(told)}\n```"))


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setenv("OPENAI_API_KEY", "the-key")
  made = Server()
  made.replies = [answer(template) for template in TASK.edit_templates]
  yield made
  made.close()


def test_a_proposal_comes_back_with_its_usage(server):
  proposal = llm.LlmProposer(client(server, deadline=20.0), TASK).propose(context())
  assert (proposal.usage["calls"], proposal.usage["input_tokens"]) == (1, 3)
  assert proposal.explanations[0].name == "mechanism"
  head, headers, body = server.requests[0]
  assert head.startswith(b"POST /v1/chat/completions ")
  assert headers["authorization"] == "Bearer the-key"
  assert body["response_format"]["type"] == "json_schema"
  assert "the-key" not in json.dumps(body)


def test_a_reply_is_bounded_in_size(server, monkeypatch):
  monkeypatch.setattr(endpoint, "MAX_REPLY_BYTES", 100)
  with pytest.raises(ProposerError, match="more than 100 bytes"):
    client(server, deadline=20.0).complete({"messages": [{"content": "x"}]})


def test_an_answer_that_is_not_admitted_gets_one_repair_turn(server):
  server.replies.insert(0, answer(TASK.edit_templates[0], "import os\n"))
  proposal = llm.LlmProposer(client(server, deadline=20.0), TASK).propose(context())
  assert proposal.usage["calls"] == 2
  assert "import os" not in proposal.source
  assert "not accepted" in server.requests[1][2]["messages"][-1]["content"]


def run(folder, proposer):
  running = searching.run(folder, TASK, proposer, seed=3, budget=6)
  return running, searching.log(folder).decode()


def test_a_recorded_run_replays_without_the_server(server, tmp_path):
  tape = tmp_path / "tape.jsonl"
  recorder = endpoint.Cassette(tape, "record", client(server, deadline=20.0))
  running, recorded = run(tmp_path / "live", llm.LlmProposer(recorder, TASK))
  assert running.ledger.proposer["calls"] >= 3
  asked = len(server.requests)
  replayer = endpoint.Cassette(tape, "replay")
  assert replayer.name.startswith("cassette:")
  _, replayed = run(tmp_path / "replayed", llm.LlmProposer(replayer, TASK))
  assert len(server.requests) == asked
  strip = lambda text: [
    {k: v for k, v in json.loads(line).items() if k not in ("hash", "previous")}
    for line in text.splitlines()[1:]
  ]
  assert strip(replayed) == strip(recorded)


def test_a_cassette_fails_closed(server, tmp_path):
  tape = tmp_path / "tape.jsonl"
  endpoint.Cassette(tape, "record", client(server, deadline=20.0)).complete(
    {"messages": [{"content": "a"}]}
  )
  with pytest.raises(ProposerError, match="no reply"):
    endpoint.Cassette(tape, "replay").complete({"messages": [{"content": "b"}]})
  with pytest.raises(FileNotFoundError):
    endpoint.Cassette(tmp_path / "none.jsonl", "replay")
  assert "key" not in tape.read_text().lower().replace("keyword", "")


def test_a_person_answers_through_files(tmp_path):
  queue = human.HumanProposer(tmp_path, TASK, seconds=20, poll=0.01)
  edited = TASK.edit_templates[0].edit(SOURCE, {"amplitude": 0.5})
  (tmp_path / "mine.py").write_text(edited)
  (tmp_path / "answer-2-0.json").write_text(
    json.dumps({"source": "mine.py", "label": "by hand"})
  )
  proposal = queue.propose(context(address=(2, 0)))
  assert proposal.source == edited
  assert "Program, without the functions" in (tmp_path / "question-2-0.md").read_text()
  with pytest.raises(ProposerError, match="no .*answer-3-0"):
    human.HumanProposer(tmp_path, TASK, seconds=0.05, poll=0.01).propose(
      context(address=(3, 0))
    )


def test_an_answer_that_is_being_written_is_waited_for(tmp_path, monkeypatch):
  edited = TASK.edit_templates[0].edit(SOURCE, {"amplitude": 0.5})
  whole = json.dumps({"source": edited, "label": "by hand"})
  parts = [whole[:9], whole[:30], whole]

  def writes(seconds):
    del seconds
    if parts:
      (tmp_path / "answer-2-0.json").write_text(parts.pop(0))

  monkeypatch.setattr(human.time, "sleep", writes)
  queue = human.HumanProposer(tmp_path, TASK, seconds=20)
  assert queue.propose(context(address=(2, 0))).source == edited
  assert not parts


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("", "Expecting value"),
    ("[]", "answer: "),
    ('{"label": "by hand"}', "expected `code`"),
    ('{"source": 5, "label": ""}', "source: "),
    ('{"code": "", "label": "", "controls": [{"name": "primary"}]}', "controls.0."),
  ],
)
def test_an_answer_that_is_none_stops_the_run_in_a_sentence(tmp_path, text, told):
  (tmp_path / "answer-0-0.json").write_text(text)
  queue = human.HumanProposer(tmp_path, TASK, seconds=1, poll=0.01)
  with pytest.raises(OutageError, match=r"answer-0-0\.json: expected") as caught:
    queue.propose(context())
  assert told in str(caught.value)
  assert "\n" not in str(caught.value)


def test_the_embedded_proposer_repeats_itself_exactly():
  proposer = EmbeddedProposer(TASK.edit_templates, "loss")
  history = [
    experiment(i, label=TASK.edit_templates[i].label({"amplitude": 0.5}))
    for i in range(5)
  ]
  told = context(history)
  assert proposer.propose(told) == proposer.propose(told)
