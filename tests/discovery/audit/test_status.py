"""What a second terminal sees of a run: before, while, after, and after a kill."""

import itertools
import re
import threading
import time

import pytest

from mxjax.cli.main import main
from mxjax.discovery.audit import status
from mxjax.discovery.core import store
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.verdict import FORBIDDING
from mxjax.discovery.search import runs
from tests.discovery.proposers.test_endpoint import Server, chat, edits, http
from tests.discovery.proposers.test_language_models import discover

BUDGET = 16


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
  """A finished run and its search."""
  folder = tmp_path_factory.mktemp("status") / "run"
  config = {"seed": 5, "budget": BUDGET}
  spec = {"task": "world", "seed": 5}
  runs.write_options(
    folder, runs.RunOptions(task=spec, config=config, sandbox="off", holdout="off")
  )
  kept, task = store.Store(folder), task_.load(spec)
  executor = runs.make_executor(task, kept, "off")
  search = runs.make_search(runs.read_options(folder), task, [executor], kept)
  search.run()
  return folder, search


def shown(capsys, folder, *words):
  assert main(["discover", "status", str(folder), *words]) == 0
  return " ".join(capsys.readouterr().out.split())


def state(folder):
  return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}


def test_it_tells_what_the_search_holds_and_only_reads(searched, capsys):
  folder, search = searched
  before = state(folder)
  told = shown(capsys, folder)
  assert state(folder) == before
  assert "closed: budget" in told
  total = search.ledger.totals()
  kinds = ", ".join(f"{total[k]} {k}" for k in ("candidate", "control", "probe"))
  assert f"calls: {BUDGET} of {BUDGET}: {kinds};" in told
  best = search.programs.best
  assert (
    f"best: {best.values['loss']:.6g} by {best.id[:12]} at call {best.call}" in told
  )
  asked = [q for q in search.residuals.questions.values() if q.status == "open"]
  assert len(asked) < len(search.residuals.questions)
  assert f"open questions: {len(asked)}" in told
  kept = [record.id for record in search.programs.records]
  owed = [(p, d) for p in kept for d in search.residuals.demands(p) if not d.forbids]
  assert f"owed to verdicts: {len(owed)}" in told
  for program, demand in owed:
    where = ", ".join(demand.computation)
    assert f"{demand.response} in {where}, by revisions of {program[:12]}: " in told
  events = store.read_events(folder)
  labels = {
    e["id"]: e["label"] for e in events if e["event"] == "packet" and "label" in e
  }
  verdicts = [
    f"{labels[e['packet']]}: {e['verdict']} ({e['reason']})"
    for e in events
    if e["event"] == "verdict"
  ]
  assert len(verdicts) > status.LATEST
  assert " ".join(verdicts[-status.LATEST :]) in told
  assert verdicts[0] not in told or verdicts[0] in verdicts[-status.LATEST :]
  assert "tokens" not in told


def test_it_works_at_every_event_and_with_a_torn_one(searched, tmp_path):
  folder, _ = searched
  (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
  assert status.read(tmp_path) == (f"{tmp_path}: begun, no event yet", False)
  lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
  for count, torn in itertools.product(range(len(lines)), (b"", b'{"charged":1,"e')):
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines[:count]) + torn)
    told, is_closed = status.read(tmp_path)
    assert not is_closed
    assert bool(re.search(r"open, last event \d+ s ago", told)) == (count > 0)
  (tmp_path / "log.jsonl").write_bytes(b"".join([*lines[:3], lines[4]]))
  with pytest.raises(ValueError, match="hash chain"):
    status.read(tmp_path)


def test_it_follows_a_run_to_its_end(searched, tmp_path, capsys):
  folder, _ = searched
  lines = (folder / "log.jsonl").read_bytes().splitlines(keepends=True)
  (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
  (tmp_path / "log.jsonl").write_bytes(lines[0])

  def go_on():
    for line in lines[1:]:
      time.sleep(0.005)
      with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(line[:50])
        file.flush()
        file.write(line[50:])

  writer = threading.Thread(target=go_on)
  writer.start()
  told = shown(capsys, tmp_path, "--follow", "0.01")
  writer.join()
  assert "closed: budget" in told
  assert f"calls: {BUDGET} of {BUDGET}" in told


def test_it_tells_tokens_money_and_who_answered(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  server = Server()
  body = chat("no", prompt_tokens=3000).replace(b'"m"', b'"m\\u001b[2J"')
  server.replies = [http(chat()), http(body), *list(edits())[:1], http(b"", "402 Pay")]
  limits = {"max-tokens": 9000, "max-cost": 1.5, "arm": "reflect"}
  try:
    assert discover(server, tmp_path / "run", **limits) == 2
  finally:
    server.close()
  capsys.readouterr()
  told = shown(capsys, tmp_path / "run")
  assert "open, last event" in told
  assert "tokens: 3,003 in and 2 out of 9,000; dollars: 0.3023 of 1.5" in told
  assert re.search(r"1 replies of m(\s|$)", told)
  assert "1 replies of m\\x1b[2J" in told


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path, capsys):
  assert main(["discover", "status", str(tmp_path)]) == 2
  assert "expected the folder of a run" in capsys.readouterr().err


def test_what_is_owed_is_told_where_no_question_is_open(searched):
  """In the words of the log: a demand stands until it is met, and its program stays."""
  folder, _ = searched
  events = store.read_events(folder)
  demand = next(
    e
    for e in events
    if (e["event"], e.get("status")) == ("demand", "owed")
    and e["response"] not in FORBIDDING
  )
  verdict = next(
    e for e in events if (e["event"], e.get("packet")) == ("verdict", demand["packet"])
  )
  before = [e for e in events[: demand["n"]] if e["event"] != "demand"]
  told = status.owed([*before, demand])
  assert told[0] == "owed to verdicts: 1, whether or not their questions are still open"
  (line,) = told[1:]
  assert line.startswith(
    f"  {demand['response']} in {', '.join(demand['computation'])}"
  )
  assert line.endswith(f" was {verdict['verdict']}")
  fields = {k: demand[k] for k in ("event", "program", "packet", "response")}
  fields["computation"] = demand["computation"]
  for ending in ("met", "abandoned", "superseded", "resolved"):
    ended = {**fields, "status": ending}
    assert status.owed([*before, demand, ended]) == ["owed to verdicts: 0"]
  again = {**fields, "status": "failed"}
  assert status.owed([*before, demand, again]) == told
  forbids = {**fields, "status": "owed", "response": "retire"}
  assert status.owed([*before, forbids]) == [
    "owed to verdicts: 0",
    "forbidden by verdicts: 1 changes",
  ]
  gone = {**fields, "status": "owed", "program": "no longer retained"}
  assert status.owed([*before, gone]) == [
    "owed to verdicts: 0",
    "owed by programs that are no longer retained: 1",
  ]
