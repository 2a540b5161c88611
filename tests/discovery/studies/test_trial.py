"""A trial of a language model: four ways to go on, frozen and counted rightly."""

import concurrent.futures
import dataclasses
import difflib
import io
import itertools
import json
import re
import shutil
import statistics
import tarfile
import threading
import types

import numpy as np
import pytest

from mxjax.cli.main import main
from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import OutageError
from mxjax.discovery.core.verdict import Response, Verdict
from mxjax.discovery.proposers import prompt
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.studies import trial, trial_replay, trial_tables
from mxjax.discovery.studies.trial_replay import CONDITIONS
from mxjax.discovery.tasks import world
from mxjax.evaluation.measures.statistics import compare_seeds
from tests.discovery.studies.answering import SEVERAL, Endpoint, of_templates

PLAN = """
question = "Do verdicts that bind code help?"
expects = "They do."
stop = "At the budget."
validity = 0.9
sandbox = "off"
[endpoint]
base_url = "{url}"
run_model = "run-{{name}}"
replay_model = "replay-{{letter}}"
deadline = 20.0
[replay]
runs = ["one", "two"]
samples = 2
per_run = 2
[tasks.first]
task = "world"
seed = 2
[tasks.second]
task = "world"
seed = 11
[runs.one]
task = "first"
arm = "quantforge"
seed = 1
budget = 20
[runs.two]
task = "second"
arm = "quantforge"
seed = 1
budget = 20
[runs.rival]
task = "second"
arm = "reflect"
seed = 1
budget = 5
"""
VERDICT_WORDS = (
  *("verdict", "supported", "refuted", "exclud", "survivor", "left standing"),
  *("predict", "target_only", "mediator_only", "no_effect", "unresolved"),
  *("required", "demand", "response", "forbidden", "residual"),
)


def silent(line):
  del line


@pytest.fixture(scope="module")
def endpoint():
  answer = of_templates(world.World(seed=4).edit_templates)

  def slow(request):
    if request["model"].startswith("replay"):
      # Nobody is answered before several wait, but for a minute.
      made.several.wait(60)
    return answer(request)

  made = Endpoint(slow)
  yield made
  made.close()


def begun(folder, url, text=PLAN):
  file = folder.with_suffix(".toml")
  file.write_text(text.format(url=url))
  return trial.freeze(folder, file, tell=silent)


@pytest.fixture(scope="module")
def finished(endpoint, tmp_path_factory):
  """A trial whose runs have ended and are replayed."""
  made = begun(tmp_path_factory.mktemp("trial") / "whole", endpoint.url)
  for name in made.plan["runs"]:
    made.run(name)
  assert made.replay() == 0
  return made


@pytest.fixture
def copied(finished, tmp_path):
  """A copy of the finished trial, for tests that change it."""
  shutil.copytree(finished.path, tmp_path / "copy")
  return trial.Trial(tmp_path / "copy", tell=silent)


@pytest.fixture(scope="module")
def found(finished, tmp_path_factory):
  """The transitions of a run."""
  options = finished.options("two")
  state = tmp_path_factory.mktemp("state") / "two"
  shutil.copytree(finished.folder("two"), state)
  task = finished.task("second")
  return trial_replay.transitions(state, options, task, [LocalExecutor(task)], None, 3)


def conditions(found):
  """What each condition of each transition is told, with its prompt."""
  for each in found:
    others = [other.demand for other in found if other is not each]
    made = trial_replay.contexts(each, others, 2)
    task = world.World(seed=3)
    yield each, made, {k: prompt.messages(c, task) for k, (c, _) in made.items()}


def added(before, after):
  """The lines that one prompt has and another has not, both ways."""
  texts = ["\n".join(m["content"] for m in each) for each in (before, after)]
  lines = [*difflib.ndiff(*(text.splitlines() for text in texts))]
  return [[line[2:] for line in lines if line[0] == sign] for sign in "-+"]


@pytest.mark.slow
def test_only_verdicts_made_by_a_control_are_replayed(found, finished):
  events = store.read_events(finished.folder("two"))
  verdicts = {e["packet"]: e for e in events if e["event"] == "verdict"}
  assert len(found) >= 2
  for each in found:
    verdict = verdicts[each.packet]
    assert set(verdict["excluded"].values()) - {"primary"}
    assert verdict["verdict"] not in (Verdict.UNRESOLVED, Verdict.UNSAFE)
    focal = each.context.history[-1].explanations[0].name
    assert (each.focal == "refuted") == (focal in verdict["excluded"])
  assert [t.call for t in found] == sorted(t.call for t in found)


@pytest.mark.parametrize(
  ("verdict", "excluded", "status", "focal"),
  [
    ("supported", {"other": "control"}, "owed", "supported"),
    ("target_only", {"mine": "control"}, "owed", "refuted"),
    ("no_effect", {"mine": "primary", "other": "control"}, "owed", "refuted"),
    ("mediator_only", {"other": "control"}, "owed", ""),
    ("target_only", {"mine": "primary"}, "owed", ""),
    ("unresolved", {"mine": "control", "other": "control"}, "owed", ""),
    ("unsafe", {"mine": "control"}, "owed", ""),
    ("supported", {"other": "control"}, "at_floor", ""),
  ],
)
def test_what_is_eligible(verdict, excluded, status, focal):
  packet = {"explanations": [{"name": "mine"}, {"name": "other"}]}
  told = {"packet": "p", "verdict": verdict, "excluded": excluded}
  events = [{"event": "demand", "packet": "p", "status": status}]
  assert trial_replay.eligible(told, packet, events) == focal


@pytest.mark.slow
def test_bound_is_free_with_the_demand_and_its_rules(found):
  for each, made, prompts in conditions(found):
    assert made["free"][1] == made["bound"][1] == each.demand
    gone, more = added(prompts["free"], prompts["bound"])
    assert not gone
    rules = prompt.BINDING.strip().splitlines()
    assert [line for line in more if line in rules] == rules
    (demanded,) = [line for line in more if line and line not in rules]
    assert demanded == prompt._demand_text(each.demand, made["bound"][0])


@pytest.mark.slow
def test_the_open_question_has_the_value_of_the_program_that_is_revised(found):
  """Its verdict may be about a question that was asked of a program long before."""
  each = found[0]
  before = dataclasses.replace(each.demand.residual, value=99.0)
  demand = dataclasses.replace(each.demand, residual=before)
  anything = types.SimpleNamespace
  search = anything(
    history=anything(experiments=[]),
    residuals=anything(holder=lambda *_: ""),
    record=lambda _: None,
    select=lambda *_: anything(demands=(demand,), residuals=(before,)),
    context=lambda *_: each.context,
    ledger=anything(spent=each.call),
    paused=lambda _: each.paused,
  )
  verdict = {"packet": each.packet, "verdict": each.verdict}
  made = trial_replay._transition(search, {"parent": ""}, verdict, each.focal, {})
  (asked,) = made.context.residuals
  assert asked.key == before.key
  assert asked.value == each.context.parent.values[asked.observable] != 99.0


@pytest.mark.slow
def test_every_condition_is_told_the_one_call_of_a_successor(found):
  assert found
  for _, _, prompts in conditions(found):
    for name, (_, user) in prompts.items():
      told = "1 evaluator call is left, for your program as it is."
      assert told in user["content"]
      assert ("no control of it will run" in user["content"]) == (name != "text")


@pytest.mark.slow
def test_shuffled_is_bound_but_for_what_the_demand_says(found):
  for each, made, prompts in conditions(found):
    gone, more = added(prompts["bound"], prompts["shuffled"])
    assert len(gone) == len(more) == 1
    wrong = made["shuffled"][1]
    assert wrong.response != each.demand.response
    kept = {f.name for f in dataclasses.fields(wrong)}
    kept -= {"verdict", "response", "survivors", "residual", "about"}
    for name in kept:
      assert getattr(wrong, name) == getattr(each.demand, name)
    named = {account.name for account in wrong.accounts}
    assert {*wrong.survivors} <= named


@pytest.mark.slow
def test_the_shuffled_verdict_is_that_of_another_transition_if_one_differs(found):
  mine = found[0].demand
  other = dataclasses.replace(
    mine,
    packet="other",
    verdict="no_effect",
    response=Response.RETIRE,
    residual=dataclasses.replace(mine.residual, observable="excess_mlp"),
  )
  wrong = trial_replay.shuffled(mine, [mine, other], 0, "loss")
  assert (wrong.verdict, wrong.response) == ("no_effect", Response.RETIRE)
  assert wrong.residual.observable == "excess_mlp"
  assert wrong.residual.program == mine.residual.program
  supported = dataclasses.replace(mine, verdict="supported", response=Response.EXTEND)
  alone = trial_replay.shuffled(supported, [], 0, "loss")
  assert (alone.verdict, alone.response) == ("target_only", "repair_explanation")
  back = trial_replay.shuffled(alone, [], 0, "loss")
  assert (back.verdict, back.about) == ("supported", (mine.residual.observable,))


@pytest.mark.slow
def test_plain_text_has_the_measurements_and_no_word_of_a_verdict(found):
  for each, made, prompts in conditions(found):
    system, user = (message["content"].lower() for message in prompts["text"])
    user = user.replace("which predictions are relative to", "")
    for word in VERDICT_WORDS:
      assert not re.search(word, user), word
    assert "register" not in system
    for experiment in made["free"][0].history:
      for ran in experiment.ran:
        for name, value in ran.values.items():
          if name == "loss":
            assert f"{value:.4g}" in user
    assert each.told


@pytest.mark.slow
def test_all_requests_wait_at_the_same_time_and_hide_their_condition(
  finished, endpoint
):
  assert endpoint.most_at_once >= SEVERAL
  models = {r["model"] for r in endpoint.requests}
  runs = {f"run-{name}" for name in finished.plan["runs"]}
  assert models == runs | {f"replay-{letter}" for letter in "abcd"}
  assert sorted(map(finished.letter, CONDITIONS)) == [*"abcd"]


def test_verdicts_of_a_condition_are_asked_one_after_another(monkeypatch):
  # Whoever answers for a condition must not read later states of the run.
  begun, together = [], threading.Barrier(len(CONDITIONS), timeout=60)

  def answer(self, transition, condition, *_):
    begun.append((condition, transition.packet))
    if transition.packet == "1":
      # Conditions do not wait for each other.
      together.wait()
    if (condition, transition.packet) == ("text", "2"):
      raise OutageError("no answer")

  monkeypatch.setattr(trial_replay.Replay, "_answer", answer)
  replay = object.__new__(trial_replay.Replay)
  replay._store = types.SimpleNamespace(get=lambda *_: None)
  replay._asked = [
    (types.SimpleNamespace(packet=packet), condition, 0, None, None)
    for packet in "123"
    for condition in CONDITIONS
  ]
  with concurrent.futures.ThreadPoolExecutor(len(CONDITIONS)) as pool:
    futures = list(replay.start(pool))
  assert len(futures) == 12
  for condition in CONDITIONS:
    asked = [packet for name, packet in begun if name == condition]
    # What would have followed an answer that is not there is not asked either.
    assert asked == [*"12"] + [*"3"] * (condition != "text")
  lost = [future for future in futures if future.exception() is not None]
  assert len(lost) == 2
  with pytest.raises(OutageError):
    lost[1].result()


@pytest.mark.slow
def test_a_replay_that_lost_its_endpoint_goes_on_where_it_stood(
  finished, copied, endpoint
):
  answer, done = endpoint.answer, []

  def failing(request):
    done.append(request)
    return answer(request) if len(done) <= 5 else None

  shutil.rmtree(copied.path / "replay")
  endpoint.answer = failing
  try:
    lost = copied.replay(at_once=2)
  finally:
    endpoint.answer = answer
  total = len(trial_tables.Recorded(finished.path).successors)
  assert 0 < lost < total
  kept = {p: p.read_bytes() for p in copied.path.glob("replay/*/successors/*")}
  before = len(endpoint.requests)
  assert copied.replay() == 0
  assert len(endpoint.requests) - before <= 3 * lost
  assert all(p.read_bytes() == data for p, data in kept.items())
  mine, whole = (
    trial_tables.Recorded(p).successors for p in (copied.path, finished.path)
  )
  assert mine == whole


@pytest.mark.slow
def test_workers_of_a_held_out_score_end_where_one_is_lost(
  finished, tmp_path, monkeypatch
):
  shutil.copytree(finished.path, tmp_path / "copy")
  shutil.rmtree(tmp_path / "copy" / "heldout")
  ended = []

  def lost(self, source):
    raise OutageError("a worker was killed")

  monkeypatch.setattr(trial.CachedEvaluator, "prepare", lost)
  monkeypatch.setattr(LocalExecutor, "close", lambda self: ended.append(self))
  with pytest.raises(OutageError, match="a worker was killed"):
    trial.Trial(tmp_path / "copy", tell=silent)._score("one")
  assert len(ended) == 1


@pytest.mark.slow
def test_tables_come_again_from_the_archive_without_a_model(
  finished, tmp_path, capsys, monkeypatch
):
  file = tmp_path / "trial.tar.xz"
  place = str(finished.path)
  trial.pack(finished, file, {place: "trial"})
  assert file.stat().st_size < 300_000
  folder = trial.unpack(file, tmp_path / "again")
  assert not any(place.encode() in p.read_bytes() for p in folder.rglob("*.json*"))
  shown = []
  for path in (finished.path, file, folder):
    assert main(["discover", "trial", "tables", str(path)]) == 0
    shown.append(capsys.readouterr().out)
  assert shown[0] == shown[1] == shown[2]
  assert "0.31" not in shown[0].split("Paired")[0]
  # And from the replies: every successor is measured again.
  shutil.rmtree(folder / "replay" / "one" / "successors")
  monkeypatch.setattr(trial.llm, "client", None)
  assert trial.Trial(folder, tell=silent).replay(asks=False) == 0
  assert main(["discover", "trial", "tables", str(folder)]) == 0
  assert capsys.readouterr().out == shown[0]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["lost", "added", "changed", "no manifest"])
def test_an_archive_in_which_a_file_is_not_as_it_was_packed_is_refused(
  finished, tmp_path, capsys, change
):
  file, damaged = tmp_path / "trial.tar.xz", tmp_path / "damaged.tar.xz"
  trial.pack(finished, file, {})
  with pytest.raises(FileExistsError, match="name another --out"):
    trial.pack(finished, file, {})
  # A cassette, of which no table reads anything.
  name = "replay/one/cassettes/bound.jsonl"
  with tarfile.open(file) as whole, tarfile.open(damaged, "w:xz") as made:
    for member in whole:
      data = whole.extractfile(member).read()
      if member.name == name and change == "lost":
        continue
      if member.name == trial.MANIFEST and change == "no manifest":
        continue
      if member.name == name and change == "changed":
        data = data.replace(b"a", b"b", 1)
      made.addfile(member, io.BytesIO(data))
    if change == "added":
      name = member.name = "replay/one/successors/more.json"
      made.addfile(member, io.BytesIO(data))
  assert main(["discover", "trial", "tables", str(damaged)]) == 2
  told = capsys.readouterr().err
  assert "with the files of its manifest, got others: " in told
  assert f"others: {name} lost, added or changed" in told or change == "no manifest"


@pytest.mark.slow
def test_samples_of_one_request_are_kept_apart(finished):
  by_packet = trial_tables.Recorded(finished.path).successors
  assert {key[2] for key in by_packet} == {0, 1}
  entries = [
    json.loads(line)
    for file in finished.path.glob("replay/two/cassettes/*.jsonl")
    for line in file.read_text().splitlines()
  ]
  samples = {}
  for entry in (e for e in entries if "reply" in e):
    samples.setdefault(entry["request"], set()).add(entry.get("sample", 0))
  assert {0, 1} in samples.values()
  # Beside each reply lies the prompt that it answers.
  prompts = {p.stem for p in finished.path.glob("replay/two/prompts/*.json")}
  assert prompts == {*samples}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("crashed", "is_valid"), [(0, True), (1, True), (2, False), (20, False)]
)
def test_a_trial_stands_only_if_its_controls_do(finished, crashed, is_valid):
  recorded = trial_tables.Recorded(finished.path)
  ended = ["ok"] * (20 - crashed) + ["crashed"] * crashed
  events = [{"event": "outcome", "kind": "control", "status": s} for s in ended]
  recorded.events = {"one": events}
  assert trial_tables.validity(recorded) == ((20 - crashed, 20), is_valid)
  table = trial_tables._validity(recorded)
  assert ("VOID" in table.note) != is_valid


@pytest.mark.slow
def test_a_trial_without_controls_does_not_stand(finished):
  recorded = trial_tables.Recorded(finished.path)
  recorded.events = {}
  assert trial_tables.validity(recorded) == ((0, 0), False)


def made_up(finished, outcomes):
  """A record in which each run's transitions have these successors.

  An outcome is the improvement of each condition, by name.
  """
  recorded = trial_tables.Recorded(finished.path)
  recorded.transitions, recorded.successors = {}, {}
  recorded.plan["replay"]["samples"] = 1
  for run, rows in outcomes.items():
    recorded.transitions[run] = []
    for number, row in enumerate(rows):
      packet = f"{run}{number}"
      recorded.transitions[run].append({"packet": packet, "focal": "refuted"})
      for condition in CONDITIONS:
        improves = row.get(condition, False)
        recorded.successors[packet, condition, 0] = {
          **{"improves": improves, "refused": ""}
        }
  return recorded


@pytest.mark.slow
def test_a_positive_difference_of_shares_favors_the_first(finished):
  only_bound, only_free = {"bound": True}, {"free": True}
  outcomes = {"one": [only_bound, only_bound], "two": [only_bound, only_free]}
  first = trial_tables._compared(made_up(finished, outcomes)).rows[0]
  assert first[0] == "bound - free"
  assert first[2:4] == ["+1.00 +0.00", "+0.500"]
  assert first[5:7] == ["3", "1"]


def test_a_refused_answer_improves_nothing():
  gained = {"improves": True, "refused": ""}
  assert trial_tables.improves(gained)
  assert not trial_tables.improves({**gained, "refused": "question: no account"})
  assert not trial_tables.improves({"status": "unusable", "refused": "no object"})


@pytest.mark.slow
def test_sign_flips_are_those_of_an_enumeration(finished):
  generator = np.random.default_rng(1)
  outcomes = {
    f"run{n}": [
      {name: bool(generator.random() < 0.5) for name in CONDITIONS} for _ in range(3)
    ]
    for n in range(6)
  }
  rows = trial_tables._compared(made_up(finished, outcomes)).rows
  share = lambda rows, name: statistics.fmean(row[name] for row in rows)
  for (first, second), row in zip(trial_tables.COMPARED, rows[::2], strict=True):
    gains = [share(r, first) - share(r, second) for r in outcomes.values()]
    flips = [
      abs(sum(s * g for s, g in zip(signs, gains, strict=True)))
      for signs in itertools.product((-1, 1), repeat=len(gains))
    ]
    p = np.mean([flip >= abs(sum(gains)) - 1e-12 for flip in flips])
    assert row[4] == f"{p:.3f}"
    assert compare_seeds(gains, [0.0] * 6).sign_flip_p == pytest.approx(p)


def test_the_sign_test_and_its_power_are_those_of_an_enumeration():
  assert trial_tables.sign_test(19, 6) == pytest.approx(0.0146, abs=1e-4)
  assert trial_tables.sign_test(0, 0) == 1.0
  for pairs, first, second in ((6, 0.9, 0.05), (7, 0.6, 0.1)):
    chance = 0.0
    for drawn in itertools.product((1, -1, 0), repeat=pairs):
      p = np.prod([{1: first, -1: second, 0: 1 - first - second}[d] for d in drawn])
      wins, losses = drawn.count(1), drawn.count(-1)
      chance += p * (trial_tables.sign_test(wins, losses) <= trial_tables.ALPHA)
    assert trial_tables.power(pairs, first, second) == pytest.approx(chance)


@pytest.mark.slow
def test_a_plan_is_frozen(finished, copied, monkeypatch, tmp_path):
  file = copied.path / "plan.json"
  file.write_text(file.read_text().replace("They do.", "They do not."))
  with pytest.raises(ValueError, match="one that was changed"):
    trial.Trial(copied.path)
  monkeypatch.setattr(trial.identity, "source_digest", lambda *names: "other")
  with pytest.raises(ValueError, match="frozen with, got other sources"):
    finished.replay()
  bad = tmp_path / "bad.toml"
  bad.write_text('question = ""\n')
  with pytest.raises(ValueError, match="expects: expected this key"):
    trial.freeze(tmp_path / "bad", bad, tell=silent)


@pytest.mark.slow
def test_arms_are_compared_by_what_they_reach_held_out(finished):
  recorded = trial_tables.Recorded(finished.path)
  place = lambda *values: {
    "initial": 3.0,
    "marks": [*zip((10, 20), values, strict=True)],
  }
  recorded.scores = {"two": place(2.5, 1.0), "rival": place(2.25, 1.5)}
  (table,) = trial_tables._arms(recorded)
  assert table.rows == [
    ["ReflectMem", "10", "1", "+0.2500", "+0.2500", "0 of 1", "---"],
    ["ReflectMem", "20", "1", "-0.5000", "-0.5000", "1 of 1", "---"],
  ]
  # A champion that could not be scored, or a mark of one arm alone, is no pair.
  recorded.scores = {"two": place(2.5, None), "rival": place(2.25, 1.5)}
  (table,) = trial_tables._arms(recorded)
  assert [row[:3] for row in table.rows] == [["ReflectMem", "10", "1"]]


@pytest.mark.slow
def test_a_closed_run_is_scored_held_out(finished):
  scores = finished.run("one")
  assert scores["marks"][-1][1] < scores["initial"]
  marks = [e for e in store.read_events(finished.folder("one")) if e["event"] == "mark"]
  assert [call for call, _ in scores["marks"]] == [e["call"] for e in marks]


def rewritten(made, **changes):
  """Writes another plan into the folder of a trial, frozen as whoever packed it may."""
  body = {k: v for k, v in {**made.plan, **changes}.items() if k != "hash"}
  plan = {**body, "hash": trial.identity.digest(body)}
  (made.path / "plan.json").write_text(json.dumps(plan))
  return made.path


@pytest.mark.slow
@pytest.mark.parametrize(
  ("step", "extra"), [("run", []), ("close", ["one"]), ("replay", ["--recorded"])]
)
def test_no_folder_decides_at_which_level_its_programs_run(copied, capsys, step, extra):
  command = ["discover", "trial", step, str(copied.path), *extra]
  assert main(command) == 2
  assert "expected a run at sandbox level strict" in capsys.readouterr().err
  assert main([*command, "--sandbox", "off"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["task", "heldout"])
def test_no_folder_brings_code_of_a_task(copied, capsys, where):
  own = {"task": "own", "path": str(copied.path)}
  spec = own if where == "task" else {"task": "world", "heldout": own}
  tasks = {**copied.plan["tasks"], "first": spec}
  path = rewritten(copied, tasks=tasks, sandbox="strict")
  assert main(["discover", "trial", "replay", str(path), "--recorded"]) == 2
  assert "code of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_no_folder_decides_who_gets_a_key(copied, capsys, monkeypatch):
  monkeypatch.setenv("A_SECRET", "word")
  endpoint = {**copied.plan["endpoint"], "key_variable": "A_SECRET"}
  path = rewritten(copied, endpoint=endpoint, sandbox="strict")
  assert main(["discover", "trial", "run", str(path)]) == 2
  assert "the key in A_SECRET goes there" in capsys.readouterr().err
  # Nobody is asked here.
  assert main(["discover", "trial", "replay", str(path), "none", "--recorded"]) == 2
  assert "runs of the plan" in capsys.readouterr().err


@pytest.mark.slow
def test_no_plan_chooses_the_file_of_its_cassettes(copied, tmp_path):
  endpoint = {**copied.plan["endpoint"], "cassette": str(tmp_path / "mine")}
  with pytest.raises(ValueError, match="endpoint.cassette: expected no such key"):
    trial.Trial(rewritten(copied, endpoint=endpoint), tell=silent)


@pytest.mark.parametrize(
  "content",
  [b"[]", b"[" * 100_000, b"\xff", json.dumps({"hash": trial.identity.digest({})})],
)
def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path, capsys, content):
  data = content if isinstance(content, bytes) else content.encode()
  (tmp_path / "plan.json").write_bytes(data)
  assert main(["discover", "trial", "tables", str(tmp_path)]) == 2
  told = capsys.readouterr().err
  assert f"{tmp_path / 'plan.json'}: " in told and "expected" in told


@pytest.mark.slow
def test_no_run_lies_outside_of_its_trial(copied):
  names = {**copied.plan["runs"], "../../one": copied.plan["runs"]["one"]}
  with pytest.raises(ValueError, match="runs: expected names of letters"):
    trial.read_plan(rewritten(copied, runs=names))


def archived(file, name, kind=tarfile.REGTYPE, target="", data=b"x"):
  with tarfile.open(file, "w:xz", preset=0) as archive:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, 0 if target else len(data)
    archive.addfile(info, None if target else io.BytesIO(data))
  return file


@pytest.mark.parametrize(
  "member",
  [
    {"name": "../outside"},
    {"name": "plan.json", "kind": tarfile.SYMTYPE, "target": "other.json"},
    {"name": "plan.json", "kind": tarfile.LNKTYPE, "target": "/etc/hostname"},
    {"name": "plan.json", "kind": tarfile.FIFOTYPE, "data": b""},
    {"name": "runs/a", "data": bytes(3000)},
  ],
)
def test_an_archive_holds_files_of_limited_size_and_nothing_else(
  tmp_path, capsys, monkeypatch, member
):
  monkeypatch.setattr(trial, "UNPACKED", 3000)
  file = archived(tmp_path / "a.tar.xz", **member)
  assert main(["discover", "trial", "tables", str(file)]) == 2
  assert f"{file}: expected the archive of a trial" in capsys.readouterr().err
  with pytest.raises(ValueError):
    trial.unpack(file, tmp_path / "inner" / "folder")
  assert not [p for p in (tmp_path / "inner").rglob("*") if not p.is_dir()]


def test_a_torn_archive_is_refused_in_a_sentence(tmp_path, capsys):
  file = archived(tmp_path / "a.tar.xz", "plan.json", data=bytes(range(256)) * 40)
  for data in (file.read_bytes()[:80], b"no archive"):
    file.write_bytes(data)
    assert main(["discover", "trial", "tables", str(file)]) == 2
    assert f"{file}: expected the archive of a trial" in capsys.readouterr().err


RETURNING = """
question = "Does a demand that must be met help?"
expects = "It does."
stop = "After two returns."
validity = 0.9
sandbox = "off"
runs_of = "earlier.tar.xz"
[endpoint]
base_url = "{url}"
run_model = "run-{{name}}"
replay_model = "replay-{{letter}}"
deadline = 20.0
[replay]
runs = ["one", "two"]
samples = 1
per_run = 2
conditions = ["free", "bound", "shuffled"]
returns = 2
"""


@pytest.fixture(scope="module")
def returned(finished, tmp_path_factory):
  """The runs of the finished trial, replayed with answers that go back.

  The endpoint answers what goes back with the very program that it says it was, but
  with nonsense where the condition is shuffled.
  """
  folder = tmp_path_factory.mktemp("returning")
  trial.pack(finished, folder / "earlier.tar.xz", {str(finished.path): "trial"})

  def again(request):
    assert len(request["messages"]) > 2, "a first answer is in the archive"
    if request["model"] == f"replay-{letters['shuffled']}":
      return "no answer"
    return request["messages"][-2]["content"]

  served = Endpoint(again)
  made = begun(folder / "trial", served.url, RETURNING)
  letters = {made.letter(name): name for name in CONDITIONS}
  letters |= {name: letter for letter, name in letters.items()}
  assert made.replay() == 0
  yield made, served.requests, letters
  served.close()


@pytest.mark.slow
def test_runs_of_an_earlier_trial_are_replayed_as_they_were(finished, returned):
  made, *_ = returned
  assert made.plan["runs_of"] == {
    "archive": "earlier.tar.xz",
    "plan": finished.plan["hash"],
  }
  assert {*made.plan["runs"]} == {"one", "two"}
  before, now = (trial_tables.Recorded(t.path) for t in (finished, made))
  assert now.transitions == before.transitions
  for (packet, condition, sample), each in now.successors.items():
    earlier = before.successors[packet, condition, sample]
    first = each["tries"][0] if "tries" in each else each
    assert all(first[key] == earlier[key] for key in ("change", "implemented", "label"))


@pytest.mark.slow
def test_an_answer_without_its_response_goes_back_with_what_was_measured(returned):
  made, requests, letters = returned
  successors = trial_tables.Recorded(made.path).successors
  asked = [
    (letters[r["model"].removeprefix("replay-")], r["messages"][-1]["content"])
    for r in requests
  ]
  assert {condition for condition, _ in asked} == {"free", "bound", "shuffled"}
  for (packet, condition, _), each in successors.items():
    tries = each["tries"]
    # The very program again is as far from the demand, so it goes back to the end.
    met = [trial_tables.met(t) for t in tries]
    lasting = condition != "shuffled"
    assert met in ([True], [False] * 3 if lasting else [False])
    assert each["source"] == tries[-1]["source"] and not each["refused"], packet
  for condition, told in asked:
    if condition == "shuffled" and not told.startswith("That was run"):
      assert told.startswith("That was not accepted")
      continue
    assert told.startswith("That was run, and is not counted as a call yet: it ")
    assert "Without and with the parts that it declares: " in told
    is_bound = condition != "free"
    assert ("The demand stands" in told) is is_bound
    assert ("You may keep this program" in told) is not is_bound


@pytest.mark.slow
def test_what_was_returned_is_counted_and_comes_again_from_the_replies(
  returned, tmp_path, capsys, monkeypatch
):
  made, *_ = returned
  assert main(["discover", "trial", "tables", str(made.path)]) == 0
  shown = capsys.readouterr().out
  rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", shown, re.M))
  assert rows["Metric"] == "free | bound | shuffled"
  successors = trial_tables.Recorded(made.path).successors
  counts = [
    str(sum(len(e["tries"]) - 1 for (_, c, _), e in successors.items() if c == name))
    for name in ("free", "bound", "shuffled")
  ]
  assert rows["Answers returned with what was measured"] == " | ".join(counts)
  assert {*counts} != {"0"}
  assert "bound - text" not in shown and "Not recorded yet" not in shown
  shutil.copytree(made.path, tmp_path / "again")
  shutil.rmtree(tmp_path / "again" / "replay" / "one" / "successors")
  assert main(["discover", "trial", "tables", str(tmp_path / "again")]) == 0
  assert "Not recorded yet: 6 successors." in capsys.readouterr().out
  monkeypatch.setattr(trial.llm, "client", None)
  assert trial.Trial(tmp_path / "again", tell=silent).replay(asks=False) == 0
  assert main(["discover", "trial", "tables", str(tmp_path / "again")]) == 0
  assert capsys.readouterr().out == shown
