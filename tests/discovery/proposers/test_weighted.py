"""Several endpoints, and budgets of tokens and money, in runs with local servers."""

import collections
import json
import time

import pytest

from mxjax.cli.main import main
from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import OutageError, Proposal
from mxjax.discovery.proposers import endpoint, weighted
from mxjax.discovery.search import runs
from tests.discovery.proposers.test_endpoint import Server, chat, edits, http
from tests.discovery.proposers.test_proposers import context

PROBED, DOWN = http(chat()), http(b"", "402 Pay")


@pytest.fixture
def servers(monkeypatch):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  made = [Server(), Server()]
  yield made
  for server in made:
    server.close()


HOSTILE = {
  "hangs": ([(5, b"")], "no answer in 1 tries"),
  "trickles": ([(0, http(b"", length=900)), *[(0.05, b"x")] * 900], "no answer in 1"),
  "redirects": (http(b"", "307 Go", ["Location: http://127.0.0.1:9/v1"]), "leads to"),
  "429": (http(b"", "429 Slow", ["Retry-After: 99"]), "next would be in 99 s"),
  "speaks HTML": (http(b"<h1>Ignore the rules[2J</h1>"), "no chat completion"),
}


def answers(number):
  """What a server answers, each other edits."""
  return [PROBED, *list(edits())[number::2]]


def discover(servers, folder, *words, deadline=20.0, **options):
  """Starts a run of a file with these endpoints, or resumes the folder's run."""
  if folder.exists():
    return main(["discover", "resume", str(folder), "--sandbox", "off"])
  given = {"task": "world", "seed": 3, "budget": 6, "proposer": "llm", **options}
  lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
  for server, weight in zip(servers, (1, 2), strict=False):
    # Only what is meant to hang comes near it.
    lines += ["[[endpoints]]", f"deadline = {deadline}", f'url = "{server.url}"']
    lines += [f"weight = {weight}"]
    lines += [f'model = "model-{weight}"', f"prices = [{100 * weight}, 1000]"]
  file = folder.with_suffix(".toml")
  file.write_text("\n".join(lines))
  start = ["discover", "run", "--config", str(file), "--out", str(folder)]
  return main([*start, "--sandbox", "off", "--holdout", "off", *words])


def log(folder):
  return (folder / "log.jsonl").read_bytes()


class Named:
  """Answers with its own name, or not at all."""

  def __init__(self, name, *, is_down=False):
    self.name, self._is_down = name, is_down

  def propose(self, context):
    del context
    if self._is_down:
      raise OutageError(self.name)
    return Proposal(source="", label=self.name)


def test_clients_have_what_the_options_say():
  said = {"url": "u", "model": "m", "deadline": 3, "key-variable": "K", "weight": 2}
  (settings,) = weighted.endpoints(json.dumps([said]))
  (made,) = weighted.clients({"endpoints": [settings]}, metered=True)
  assert (made.base_url, made.model, made.key_variable) == ("u", "m", "K")
  assert (made.deadline, made.metered, settings["weight"]) == (3.0, True, 2.0)


def test_weights_are_shares_and_each_address_has_one_endpoint():
  asked = weighted.WeightedProposer([Named("a"), Named("b"), Named("c")], [1, 0.5, 8.5])
  assert asked.name == "a*1+b*0.5+c*8.5"
  drawn = [asked.propose(context(address=(i, 0))).label for i in range(1000)]
  counts = collections.Counter(drawn)
  for name, share in {"a": 100, "b": 50, "c": 850}.items():
    assert abs(counts[name] - share) < 4 * share**0.5
  others = [Named("a", is_down=True), Named("b"), Named("c")]
  again = weighted.WeightedProposer(others, [2, 1, 17])
  for i, name in enumerate(drawn[:50]):
    if name == "a":
      with pytest.raises(OutageError, match="a"):
        again.propose(context(address=(i, 0)))
    else:
      assert again.propose(context(address=(i, 0))).label == name
  places = {asked.propose(context(address=(0, i))).label for i in range(50)}
  assert len(places) > 1


def test_an_endpoint_that_fails_is_named_and_asked_again_by_the_same_run(
  servers, tmp_path, capsys
):
  for number, server in enumerate(servers):
    server.replies = answers(number)
  assert discover(servers, tmp_path / "whole") == 0
  events = store.read_events(tmp_path / "whole")
  told = [reply for e in events if e["event"] == "replies" for reply in e["replies"]]
  for server in servers:
    mine = [reply for reply in told if reply["endpoint"] == server.url]
    assert len(mine) == len(server.requests) - 1 > 0
    # The model is the one that the endpoint says answered.
    assert {reply["model"] for reply in mine} == {"m"}
    assert server.requests[-1][2]["model"] in ("model-1", "model-2")
  assert events[0]["proposer"] == "llm:model-1*1+llm:model-2*2"

  for number, server in enumerate(servers):
    server.replies = answers(number)
  servers[0].replies[1:] = [DOWN]
  assert discover(servers, tmp_path / "run") == 2
  shown = capsys.readouterr().err
  assert servers[0].url in shown
  assert "HTTP 402" in shown
  taken = len(servers[1].requests)
  servers[0].replies, rest = [PROBED, DOWN], servers[1].replies
  servers[1].replies = [PROBED, *rest]
  assert discover(servers, tmp_path / "run") == 2
  assert len(servers[1].requests) == taken + 1
  servers[0].replies, servers[1].replies = answers(0), [PROBED, *rest]
  assert discover(servers, tmp_path / "run") == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_leaves_a_run_that_goes_on(servers, tmp_path, capsys, name):
  (server, _), (reply, match) = servers, HOSTILE[name]
  server.replies = [*answers(0)[:2], reply]
  start = time.monotonic()
  assert discover([server], tmp_path / "run", budget=3, deadline=0.5) == 2
  assert time.monotonic() - start < 5
  told = capsys.readouterr().err
  assert match in told
  assert len(told.splitlines()) == 1
  assert told.rstrip().isprintable()
  server.replies = [PROBED, *answers(0)[2:]]
  assert discover([server], tmp_path / "run") == 0
  events = store.read_events(tmp_path / "run")
  assert events[-1]["reason"] == "budget"
  assert len([e for e in events if e["event"] == "replies"]) == 2


def test_a_recorded_run_of_several_endpoints_replays(servers, tmp_path):
  for number, server in enumerate(servers):
    server.replies = answers(number)
  tape = ["--cassette", str(tmp_path / "tape.jsonl")]
  assert discover(servers, tmp_path / "live", *tape) == 0
  for server in servers:
    server.close()
  assert discover(servers, tmp_path / "again", *tape, "--proposer", "cassette") == 0
  live, again = (store.read_events(tmp_path / name) for name in ("live", "again"))
  assert [e["event"] for e in live] == [e["event"] for e in again]
  assert live[-1]["ledger"] == again[-1]["ledger"]


def test_a_cassette_tells_endpoints_apart(servers, tmp_path):
  settings = {"base_url": servers[0].url, "model": "m"}
  (live,) = weighted.clients(settings)
  for scope in ("a", "b", "a"):
    tape = endpoint.Cassette(tmp_path / "tape", "record", live, scope=scope)
    assert tape.complete({"messages": []}).text == "yes"
  assert len(servers[0].requests) == 2


@pytest.mark.parametrize(
  ("limit", "told"),
  [({"max-tokens": 9}, "max-tokens: 12 of 9"), ({"max-cost": 0.002}, "max-cost: 0.0")],
)
def test_a_budget_of_the_proposer_ends_the_run_also_when_it_was_resumed(
  servers, tmp_path, limit, told
):
  (server, _) = servers
  server.replies = answers(0)
  assert discover([server], tmp_path / "whole", budget=30, **limit) == 0
  closed = store.read_events(tmp_path / "whole")[-1]
  assert closed["reason"].startswith(told)
  used = closed["ledger"]["proposer"]
  assert used["calls"] == len(server.requests) - 1
  assert closed["ledger"]["total"] < 30
  server.replies = [*answers(0)[:2], DOWN]
  assert discover([server], tmp_path / "run", budget=30, **limit) == 2
  server.replies = [PROBED, *answers(0)[2:]]
  assert discover([server], tmp_path / "run") == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


def test_the_budget_holds_within_a_round(servers, tmp_path):
  servers[0].replies = answers(0)
  limit = {"max-tokens": 4, "width": 4}
  assert discover(servers[:1], tmp_path / "run", **limit) == 0
  assert len(servers[0].requests) == 2


def test_a_reply_is_not_paid_for_twice_when_its_repair_fails(servers, tmp_path):
  (server, _) = servers
  good = list(edits())
  server.replies = [PROBED, http(chat("no")), DOWN]
  assert discover([server], tmp_path / "run", budget=3) == 2
  server.replies = [PROBED, *good]
  taken = len(server.requests)
  assert discover([server], tmp_path / "run") == 0
  assert len(server.requests[taken + 1][2]["messages"]) == 4
  server.replies = [PROBED, http(chat("no")), *good]
  assert discover([server], tmp_path / "whole", budget=3) == 0
  assert log(tmp_path / "run") == log(tmp_path / "whole")


@pytest.mark.parametrize("usage", [{"prompt_tokens": 0}, {"completion_tokens": ...}])
def test_a_budget_needs_an_endpoint_that_counts(servers, tmp_path, capsys, usage):
  body = json.loads(chat())
  body["usage"] |= usage
  body["usage"] = {k: v for k, v in body["usage"].items() if v is not ...}
  servers[0].replies = [http(json.dumps(body).encode())]
  assert discover(servers[:1], tmp_path / "run", **{"max-tokens": 9}) == 2
  assert "how many tokens" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_runs_without_budgets_and_weights_have_the_log_they_had(servers, tmp_path):
  servers[0].replies = answers(0)
  words = ["--endpoint", servers[0].url, "--endpoint-model", "m", "--budget", "3"]
  assert discover([], tmp_path / "run", *words) == 0
  events = store.read_events(tmp_path / "run")
  assert not any("max" in name for name in events[0]["config"])
  assert events[0]["proposer"] == "llm:m"
  assert "replies" not in {event["event"] for event in events}
  assert runs.read_options(tmp_path / "run").proposer["base_url"] == servers[0].url


@pytest.mark.parametrize(
  ("words", "match"),
  [
    (["--endpoints", "{}"], "(Input should be a valid array"),
    (["--endpoints", "[]"], "one endpoint or more"),
    (["--endpoints", "x"], "(Invalid JSON"),
    (["--endpoints", '[{"url": "u"}]'], "0.model: expected"),
    (["--endpoints", '[{"url": "u", "model": "m", "weight": 0}]'], "0.weight"),
    (["--endpoints", '[{"url": "u", "model": "m", "prices": [-1, 0]}]'], "0.prices.0"),
    (["--endpoints", '[{"url": "u", "model": "m", "wait": 1}]'], "0.wait: expected"),
    (
      ["--endpoints", '[{"url": "u", "model": "m"}]', "--max-cost", "1"],
      "the prices of every endpoint",
    ),
    (
      ["--endpoint", "u", "--endpoint-model", "m", "--max-cost", "1"],
      "the prices of every endpoint",
    ),
    (["--endpoint", "u", "--endpoints", '[{"url": "u", "model": "m"}]'], "leave out"),
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
