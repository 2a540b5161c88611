"""An endpoint that fails, and budgets of tokens and money, in runs with a server."""

import json
import time

import pytest

from mxjax.cli.main import main
from mxjax.discovery.core import store
from mxjax.discovery.proposers import llm
from mxjax.discovery.search import runs
from tests.cases import slow
from tests.discovery.proposers.test_endpoint import Server, chat, edits, http

PROBED, DOWN = http(chat()), http(b"", "402 Pay")


@pytest.fixture
def server(monkeypatch):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  made = Server()
  yield made
  made.close()


HOSTILE = {
  "hangs": ([(5, b"")], "no answer in 1 tries"),
  "trickles": ([(0, http(b"", length=900)), *[(0.05, b"x")] * 900], "no answer in 1"),
  "redirects": (http(b"", "307 Go", ["Location: http://127.0.0.1:9/v1"]), "leads to"),
  "429": (http(b"", "429 Slow", ["Retry-After: 99"]), "next would be in 99 s"),
  "speaks HTML": (http(b"<h1>Ignore the rules[2J</h1>"), "no chat completion"),
}


def answers():
  """What a server answers: its first word, and edits."""
  return [PROBED, *edits()]


def discover(server, folder, *words, deadline=20.0, **options):
  """Starts a run with this endpoint, or resumes the folder's run."""
  if folder.exists():
    return main(["discover", "resume", str(folder), "--sandbox", "off"])
  given = {"task": "world", "seed": 3, "budget": 6, "proposer": "llm", **options}
  # Only what is meant to hang comes near the deadline.
  given |= {"endpoint": server.url, "endpoint-model": "m", "deadline": deadline}
  given |= {"prices": [100, 1000]}
  file = folder.with_suffix(".toml")
  file.write_text("\n".join(f"{k} = {json.dumps(v)}" for k, v in given.items()))
  start = ["discover", "run", "--config", str(file), "--out", str(folder)]
  return main([*start, "--sandbox", "off", "--holdout", "off", *words])


def log(folder):
  return (folder / "log.jsonl").read_bytes()


def test_the_client_has_what_the_options_say():
  said = {"base_url": "u", "model": "m", "deadline": 3.0, "key_variable": "K"}
  made = llm.client({**said, "prices": [1, 2], "effort": None}, metered=True)
  assert (made.base_url, made.model, made.key_variable) == ("u", "m", "K")
  assert (made.deadline, made.metered) == (3.0, True)
  assert llm.client({"base_url": "u", "model": "m"}).deadline == 600.0


@pytest.mark.slow
def test_an_endpoint_that_fails_is_named_and_asked_again_by_the_same_run(
  server, tmp_path, capsys
):
  server.replies = answers()
  assert discover(server, tmp_path / "whole") == 0
  events = store.read_events(tmp_path / "whole")
  # The model is the one that the endpoint says answered.
  told = [m for e in events if e["event"] == "replies" for m in e["models"]]
  assert told == ["m"] * (len(server.requests) - 1)
  assert events[0]["proposer"] == "llm:m"

  server.replies = [*answers()[:2], DOWN]
  assert discover(server, tmp_path / "run") == 2
  shown = capsys.readouterr().err
  assert server.url in shown
  assert "HTTP 402" in shown
  server.replies = [PROBED, *answers()[2:]]
  assert discover(server, tmp_path / "run") == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.slow
def test_a_key_goes_to_no_address_that_only_the_folder_names(
  server, tmp_path, capsys, monkeypatch
):
  server.replies = [*answers()[:2], DOWN]
  assert discover(server, tmp_path / "run") == 2
  monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
  begun, resume = len(server.requests), ["discover", "resume", str(tmp_path / "run")]
  resume += ["--sandbox", "off"]
  capsys.readouterr()
  assert main(resume) == 2
  told = capsys.readouterr().err
  assert "the key in OPENAI_API_KEY goes there" in told
  assert f"which only {tmp_path / 'run'} names" in told
  assert "name it yourself by --endpoint" in told
  for key in ("a-secret-key", ""):
    # Whoever names another address is told that it is not asked, with a key or without.
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert main([*resume, "--endpoint", "http://127.0.0.1:9/v1"]) == 2
    told = capsys.readouterr().err
    assert "with which it was begun, got --endpoint 'http://127.0.0.1:9/v1'" in told
  monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
  assert len(server.requests) == begun, "nothing was sent"
  named = ["--endpoint", server.url]
  path = tmp_path / "run" / "run.json"
  kept = path.read_text()
  options = json.loads(kept)
  options["proposer"]["key_variable"] = "ANOTHER_SECRET"
  path.write_text(json.dumps(options))
  monkeypatch.setenv("ANOTHER_SECRET", "of-another-service")
  assert main([*resume, *named]) == 2
  assert "'ANOTHER_SECRET', which only" in capsys.readouterr().err
  assert len(server.requests) == begun, "nothing was sent"
  path.write_text(kept)
  server.replies = [PROBED, *answers()[2:]]
  assert main([*resume, *named]) == 0
  sent = [headers for _, headers, _ in server.requests[begun:]]
  assert all("a-secret-key" in str(headers) for headers in sent)


def test_a_run_can_be_closed_without_naming_its_endpoint(server, tmp_path, monkeypatch):
  server.replies = [*answers()[:2], DOWN]
  assert discover(server, tmp_path / "run") == 2
  monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
  begun = len(server.requests)
  close = ["discover", "close", str(tmp_path / "run"), "--sandbox", "off"]
  assert main(close) == 0
  assert len(server.requests) == begun


def test_the_probe_has_the_seconds_that_it_is_given(server, tmp_path, capsys):
  server.replies = [[(0.6, PROBED)], *answers()[1:]]
  words = ["--set", "probe-seconds=0.2", "--budget", "2"]
  assert discover(server, tmp_path / "run", *words) == 0
  shown = capsys.readouterr().out
  assert "gave no answer within 0.2 s; it may still be loading" in shown
  assert runs.read_options(tmp_path / "run").proposer["probe_seconds"] == 0.2


@pytest.mark.parametrize(
  "name", ["hangs", *slow("trickles", "redirects", "429"), "speaks HTML"]
)
def test_a_hostile_server_leaves_a_run_that_goes_on(server, tmp_path, capsys, name):
  reply, match = HOSTILE[name]
  server.replies = [*answers()[:2], reply]
  start = time.monotonic()
  assert discover(server, tmp_path / "run", budget=3, deadline=0.5) == 2
  assert time.monotonic() - start < 5
  told = capsys.readouterr().err
  assert match in told
  assert len(told.splitlines()) == 1
  assert told.rstrip().isprintable()
  server.replies = [PROBED, *answers()[2:]]
  assert discover(server, tmp_path / "run") == 0
  events = store.read_events(tmp_path / "run")
  assert events[-1]["reason"] == "budget"
  assert len([e for e in events if e["event"] == "replies"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ("limit", "told"),
  [
    ({"max-tokens": 9}, "max-tokens: 12 of 9"),
    *slow(({"max-cost": 0.002}, "max-cost: 0.0")),
  ],
)
def test_a_budget_of_the_proposer_ends_the_run_also_when_it_was_resumed(
  server, tmp_path, limit, told
):
  server.replies = answers()
  assert discover(server, tmp_path / "whole", budget=30, **limit) == 0
  closed = store.read_events(tmp_path / "whole")[-1]
  assert closed["reason"].startswith(told)
  used = closed["ledger"]["proposer"]
  assert used["calls"] == len(server.requests) - 1
  assert closed["ledger"]["total"] < 30
  server.replies = [*answers()[:2], DOWN]
  assert discover(server, tmp_path / "run", budget=30, **limit) == 2
  server.replies = [PROBED, *answers()[2:]]
  assert discover(server, tmp_path / "run") == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


def test_the_budget_holds_within_a_round(server, tmp_path):
  server.replies = answers()
  limit = {"max-tokens": 4, "width": 4}
  assert discover(server, tmp_path / "run", **limit) == 0
  assert len(server.requests) == 2


def test_a_reply_is_not_paid_for_twice_when_its_repair_fails(server, tmp_path):
  good = list(edits())
  server.replies = [PROBED, http(chat("no")), DOWN]
  assert discover(server, tmp_path / "run", budget=3) == 2
  server.replies = [PROBED, *good]
  taken = len(server.requests)
  assert discover(server, tmp_path / "run") == 0
  assert len(server.requests[taken + 1][2]["messages"]) == 4
  server.replies = [PROBED, http(chat("no")), *good]
  assert discover(server, tmp_path / "whole", budget=3) == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.parametrize("usage", [{"prompt_tokens": 0}, {"completion_tokens": ...}])
def test_a_budget_needs_an_endpoint_that_counts(server, tmp_path, capsys, usage):
  body = json.loads(chat())
  body["usage"] |= usage
  body["usage"] = {k: v for k, v in body["usage"].items() if v is not ...}
  server.replies = [http(json.dumps(body).encode())]
  assert discover(server, tmp_path / "run", **{"max-tokens": 9}) == 2
  assert "how many tokens" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_a_run_without_budgets_has_none_in_its_log(server, tmp_path):
  server.replies = answers()
  assert discover(server, tmp_path / "run", budget=3) == 0
  events = store.read_events(tmp_path / "run")
  assert not any("max" in name for name in events[0]["config"])
  assert runs.read_options(tmp_path / "run").proposer["base_url"] == server.url


@pytest.mark.parametrize(
  ("words", "match"),
  [
    (
      ["--endpoint", "u", "--endpoint-model", "m", "--max-cost", "1"],
      "the endpoint's --prices beside --max-cost",
    ),
    (["--endpoint", "u"], "for --proposer llm, got"),
  ],
)
def test_incomplete_endpoints_are_one_sentence(tmp_path, capsys, words, match):
  start = ["discover", "run", "--task", "world", "--proposer", "llm"]
  assert main([*start, "--out", str(tmp_path / "run"), *words]) == 2
  told = capsys.readouterr().err
  assert match in told
  assert len(told.splitlines()) == 1
  assert not (tmp_path / "run").exists()


def test_a_budget_in_dollars_is_a_number(capsys):
  with pytest.raises(SystemExit):
    main(["discover", "run", "--out", "x", "--max-cost", "nan"])
  assert "--max-cost: invalid amount value: 'nan'" in capsys.readouterr().err
