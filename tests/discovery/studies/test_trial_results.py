"""Every table of a trial that the documents show comes again from its archive."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest

from mxjax.cli.main import main
from mxjax.discovery.core import identity, store, task
from mxjax.discovery.search import runs
from mxjax.discovery.studies import trial, trial_tables
from mxjax.discovery.tasks.world import CHAOS

RESULTS = pathlib.Path(__file__).parents[3] / "benchmarks" / "results"
OPEN = RESULTS / "discovery_trial_models_pilot.tar.xz"
"""A trial whose runs have not ended."""
THIRD = RESULTS / "discovery_trial_models.tar.xz"
"""A trial on models whose runs have all ended, with replayed verdicts."""
MET = RESULTS / "discovery_trial_met.tar.xz"
"""The trial whose bound answers must meet their demand."""
ARCHIVES = sorted(RESULTS.glob("discovery_trial_*.tar.xz"))


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_the_tables_are_those_of_the_archive(archive, capsys):
  assert main(["discover", "trial", "tables", str(archive)]) == 0
  stored = archive.with_name(archive.name.replace(".tar.xz", ".md"))
  assert capsys.readouterr().out.strip() == stored.read_text().strip()


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_an_archive_says_nothing_of_the_machine_and_everything_of_the_trial(
  archive, tmp_path
):
  folder = trial.unpack(archive, tmp_path)
  plan = trial.read_plan(folder)
  told = {
    "cassettes": {path.stem for path in folder.glob("cassettes/*.jsonl")},
    "runs": {path.parent.name for path in folder.glob("runs/*/log.jsonl")},
    "replayed": {path.name for path in folder.glob("replay/*")},
  }
  # A pilot was stopped before some of its runs had begun.
  assert told["runs"] <= {*plan["runs"]}
  is_part = archive.name.endswith("_pilot.tar.xz")
  assert told["runs"] == {*plan["runs"]} or is_part
  # A run without an answer has no cassette.
  answered = {path.parents[1].name for path in folder.glob("runs/*/proposals/*.json")}
  assert answered <= told["cassettes"] <= told["runs"]
  # All runs of the plan are replayed, or none is yet.
  assert told["replayed"] in (set(), {*plan["replay"]["runs"]})
  # A chain of hashes that holds, and no answer that was left out.
  for log in folder.glob("runs/*/log.jsonl"):
    last = ""
    for line in log.read_text().splitlines():
      event = json.loads(line)
      assert event["previous"] == last
      last = event.pop("hash")
      assert last == identity.digest(event)
  words = (b"/tmp/", b"/work/", b"/home/", b"/root/")
  for path in folder.rglob("*"):
    if path.is_file():
      assert not [word for word in words if word in path.read_bytes()], path
  found = [path for path in folder.glob("replay/*/successors/*.json")]
  transitions = [path for path in folder.glob("replay/*/transitions/*.json")]
  conditions = plan["replay"].get("conditions", trial.CONDITIONS)
  assert len(found) == len(conditions) * plan["replay"]["samples"] * len(transitions)


def test_what_the_page_tells_of_ten_calls_is_in_the_archive(tmp_path):
  folder = trial.unpack(RESULTS / "discovery_trial_luck.tar.xz", tmp_path)
  page = (RESULTS.parents[1] / "docs" / "results" / "discovery.md").read_text()
  rows = re.findall(r"^\| (lucky-\d) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
  assert len(rows) == 4
  for world, *told in rows:
    for arm, shown in zip(("quantforge", "reflect", "text"), told, strict=True):
      score = (folder / "heldout" / "scores" / f"{world}-{arm}.json").read_text()
      calls, value = json.loads(score)["value"]["marks"][0]
      assert (calls, f"{value:.3f}") == (10, shown)


def test_what_the_page_tells_of_the_stopped_trial_is_in_its_archive(tmp_path):
  folder = trial.unpack(RESULTS / "discovery_trial_replay_pilot.tar.xz", tmp_path)
  page = (RESULTS.parents[1] / "docs" / "results" / "discovery.md").read_text()
  plan = trial.read_plan(folder)
  ends = {}
  for file in folder.glob("heldout/scores/*.json"):
    name, arm = file.stem.rsplit("-", 1)
    value = json.loads(file.read_text())["value"]["marks"][-1][1]
    ends[name, arm] = value, task.load(plan["tasks"][name]).holdout().ideal()
  told = re.search(
    r"give (\S+) on\s+the other draw\. .* at (\S+) and the arm with text at (\S+),",
    page,
  )
  one, ideal = ends.pop(("world-3", "quantforge"))
  two, _ = ends.pop(("world-3", "text"))
  assert told and told.groups() == tuple(f"{v:.3f}" for v in (ideal, one, two))
  assert len(ends) == 5
  # The others ended there but for the chaos of a reading.
  assert all(abs(value - ideal) <= CHAOS for value, ideal in ends.values())


def test_every_run_with_controls_met_luck_by_a_redraw(tmp_path):
  """By 3 to 5 redraws a run, as the page says."""
  folder = trial.unpack(RESULTS / "discovery_trial_luck.tar.xz", tmp_path)
  logs = {path.parent.name: path for path in folder.glob("runs/lucky-*/log.jsonl")}
  logs = {name: path for name, path in logs.items() if not name.endswith("reflect")}
  assert len(logs) == 8
  for name, path in logs.items():
    events = [json.loads(line) for line in path.read_text().splitlines()]
    redraws = {
      (event["id"], condition["name"])
      for event in events
      if event["event"] == "packet"
      for condition in event["packet"]["conditions"]
      if condition["call"]["intervention"].get("kind") == "redraw"
    }
    ran = [e for e in events if e["event"] == "outcome"]
    ran = [e for e in ran if (e["packet"], e["condition"]) in redraws]
    assert 3 <= len(ran) <= 5, name
    fates = {
      seen["loss of the edit"]
      for event in events
      if event["event"] == "verdict"
      for condition, seen in event["observed"].items()
      if (event["packet"], condition) in redraws and "loss of the edit" in seen
    }
    assert fates & {"lost", "gone", "reversed"}, name


def test_what_the_page_tells_of_the_third_trial_is_in_its_archive(tmp_path):
  folder = trial.unpack(THIRD, tmp_path)
  page = (RESULTS.parents[1] / "docs" / "results" / "discovery.md").read_text()
  section = page.partition("## A third trial on small models")[2].partition("\n## ")[0]
  arms = ("quantforge", "reflect", "text", "free", "score")
  cell = r" ([\d.]+) \|"
  found = re.findall(rf"^\| (\w+) \|{6 * cell}$", section, re.M)
  assert [row[0] for row in found] == ["llama", "qwen3", "olmo2"]
  timeouts, ahead = dict.fromkeys(arms, 0), []
  for name, start, *told in found:
    ours = float(told[0])
    ahead.append([float(each) - ours for each in told[1:]])
    for arm, shown in zip(arms, told, strict=True):
      file = folder / f"heldout/scores/{name}-{arm}.json"
      score = json.loads(file.read_text())["value"]
      calls, value = score["marks"][-1]
      assert calls == 40
      assert [f"{each:.4f}" for each in (score["initial"], value)] == [start, shown]
      events = store.begun_events(folder / "runs" / f"{name}-{arm}")
      ended = [e["status"] for e in events if e["event"] == "outcome"]
      timeouts[arm] += ended.count("timeout")
  # ReflectMem, controls as text, without demands, scores alone: by what the page says.
  signs = [[(d > 0) - (d < 0) for d in each] for each in zip(*ahead, strict=True)]
  assert [*map(sorted, signs)] == [[-1, 0, 1], [-1, 1, 1], [1, 1, 1], [-1, 1, 1]]
  words = " ".join(section.split())
  told = re.search(
    r"QuantForge (\d+) ended so, and of 120 of ReflectMem (\d+)\.", words
  )
  assert [int(n) for n in told.groups()] == [
    timeouts["quantforge"],
    timeouts["reflect"],
  ]
  most = re.search(r"Of those of each other arm it was (\d) at most", words)[1]
  assert int(most) == max(timeouts[arm] for arm in ("text", "free", "score"))
  recorded = trial_tables.Recorded(folder)
  improved = {
    condition: sum(
      trial_tables.improves(each)
      for (_, name, _), each in recorded.successors.items()
      if name == condition
    )
    for condition in ("bound", "free", "shuffled", "text")
  }
  told = re.search(
    r"in (\d+) of 18 cases if it is bound .* in (\d+) if it is free, in (\d+) if it is "
    r"bound to another verdict, and in (\d+) if it reads",
    words,
  )
  assert [int(n) for n in told.groups()] == [*improved.values()]
  for other in ("free", "shuffled", "text"):
    for pairs in recorded.pairs("bound", other).values():
      assert sum(first - second for first, second in pairs) >= 0
  # What the page says of chance stands in the tables beside the archive.
  tables = THIRD.with_name("discovery_trial_models.md").read_text()
  falls = re.search(r"Held out: the target falls \|(.*)\|", tables)[1]
  free, bound, shuffled, text = re.findall(r"(\d+)/18", falls)
  assert (
    f"in {bound} of 18 cases if it is bound, {free} if it is free, {shuffled} if it is "
    f"bound to another verdict, and {text} if it reads text"
  ) in words
  ends = {
    other: re.search(
      rf"\| bound - {other} \| 18 .* (\d) \| (\d) \| ([\d.]+) \|", tables
    )
    for other in ("free", "text")
  }
  assert (
    ends["free"].groups()[:2] == ("4", "1")
    and "four times and free alone once" in words
  )
  assert ends["text"].groups()[:2] == ("5", "0") and "five times and never" in words
  told = re.findall(r"\(\$p\$ = (\.\d+)\)", words)
  assert told == [f"{float(each[3]):.2f}"[1:] for each in ends.values()]
  power = re.search(r"in (\d+)% of trials at 0\.05; on its 48", tables)[1]
  assert f"shown it at .05 in {power} % of trials" in words
  late = []
  for name in ("llama", "qwen3", "olmo2"):
    call = 0
    for event in recorded.events[f"{name}-quantforge"]:
      if event["event"] == "outcome":
        call = event["call"] or call
      elif event["event"] == "verdict" and call > 20:
        late.append(event["verdict"])
  told = f"Of {len(late)} verdicts after call 20, {late.count('unresolved')} are"
  assert told in words


def test_what_the_page_tells_of_replayed_verdicts_is_in_the_archives(monkeypatch):
  """The pooled result file is what its command makes, and the page tells its counts."""
  monkeypatch.syspath_prepend(RESULTS.parent)
  pooled = importlib.import_module("discovery_verdicts_pooled")
  found = pooled.result()
  file = json.loads((RESULTS / "discovery_verdicts_pooled.json").read_text())
  assert {key: file[key] for key in found} == json.loads(json.dumps(found))
  page = (RESULTS.parents[1] / "docs" / "results" / "discovery.md").read_text()
  words = " ".join(page.split())
  seen, hidden = found["measures"].values()
  order = ("bound", "free", "shuffled", "text")
  bound, free, shuffled, text = (seen["improve"][c] for c in order)
  assert (
    f"in {bound} of {seen['pairs']} cases if it is bound to its verdict, in {free} if "
    f"it is free, in {shuffled} if it is bound to another verdict, and in {text} if it"
  ) in words
  assert (
    f"a successor improves in {bound} cases where it is told its demand, in {free} "
    f"where it is told none, and in {shuffled} where it is told another one"
  ) in words
  told = re.search(r"it improves in (\d+), (\d+), (\d+) and (\d+) cases", words)
  assert [*map(int, told.groups())] == [hidden["improve"][c] for c in order]
  # "No difference between bound and another condition is beyond chance."
  for measure in found["measures"].values():
    for each in measure["differences"].values():
      assert min(each["sign_flip_p"], each["sign_test_p"]) > 0.05
  shown = []
  for measure in (seen, hidden):
    each = measure["differences"]["bound - free"]
    shown += [np.mean(each["by_run"]), *each["interval"]]
  assert (
    "Ours is {:.2f} on the text of the search, with a 95 % interval of Student from "
    "{:.2f} to {:.2f}, and {:.2f} held out, from {:.2f} to {:.2f}."
  ).format(*shown).replace("0.", ".") in words
  later = found["afterwards"]
  probed = later["response_found"]
  assert probed["free"] == probed["bound"] == probed["text"]
  assert f"finds it in {probed['bound']} of 38 bound successors" in words
  gains, rest = later["improve_if_found"]["bound"], later["improve_if_not"]["bound"]
  assert (
    f"{gains[0]} of {gains[1]} of the bound ones, "
    f"against {rest[0]} of the other {rest[1]}"
  ) in words
  late = later["late_successors"]
  assert (
    f"Of {sum(late.values())} late successors {late['within the margin']} stay within"
  ) in words
  assert f"After {later['transitions_alike']} of 38 verdicts" in words
  assert round(later["alike_if_independent_within_periods"]) == 10
  wrong = later["others"]["held out"]["shuffled - free"]
  assert [wrong["only_first"], wrong["only_second"]] == [7, 0]
  ps = [f"{wrong[key]:.3f}"[1:] for key in ("sign_test_p", "sign_flip_p")]
  assert "($p$ = {} by a sign test, {} by sign flips".format(*ps) in words
  tables = (RESULTS / "discovery_trial_verdicts.md").read_text()
  rows = dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", tables, re.M))
  new = [int(n) for n in re.findall(r"(\d+)/20", rows["Successors that improve"])]
  assert "alone it is {1}, {0}, {2} and {3} of 20".format(*new) in words
  failed = [int(n) for n in re.findall(r"(\d+)/20", rows["Program failed"])]
  assert failed == [0, 1, 0, 4]


def test_what_the_page_tells_of_demands_that_must_be_met_is_in_the_archive(tmp_path):
  recorded = trial_tables.Recorded(trial.unpack(MET, tmp_path / "fifth"))
  assert recorded.returns == 2
  page = (RESULTS.parents[1] / "docs" / "results" / "discovery.md").read_text()
  words = " ".join(page.partition("## A fifth trial")[2].partition("\n## ")[0].split())
  by = {name: [] for name in ("free", "bound", "shuffled")}
  for (_, name, _), each in recorded.successors.items():
    by[name].append(each)
  assert {len(found) for found in by.values()} == {20}
  first = {
    name: [{**s, **s["tries"][0]} if "tries" in s else s for s in found]
    for name, found in by.items()
  }
  met = lambda found: sum(map(trial_tables.met, found))
  improve = {name: sum(map(trial_tables.improves, s)) for name, s in by.items()}
  falls = {
    name: sum((s.get("heldout") or 0.0) < 0 for s in found)
    for name, found in by.items()
  }
  assert (
    f"in {met(by['bound'])} of 20 last answers if they are bound, where it was found "
    f"in {met(first['bound'])} of the first"
  ) in words
  assert f"from {met(first['free'])} to {met(by['free'])}" in words
  assert (
    f"improves in {improve['bound']} of 20 cases, the free one in {improve['free']}, "
    f"and one that is bound to another verdict in {improve['shuffled']}"
  ) in words
  order = ("bound", "free", "shuffled")
  told = [falls[name] for name in order]
  earlier = trial_tables.Recorded(
    trial.unpack(RESULTS / "discovery_trial_verdicts.tar.xz", tmp_path / "fourth")
  ).successors
  told += [
    sum(n == name and (s.get("heldout") or 0.0) < 0 for (_, n, _), s in earlier.items())
    for name in order
  ]
  assert (
    "Held out it is {}, {} and {}, and of the first answers {}, {} and {}.".format(
      *told
    )
  ) in words
  before = [sum(map(trial_tables.improves, first[name])) for name in order]
  assert "of the first answers {}, {} and {} had improved".format(*before) in words
  returned = [sum(len(s.get("tries", [0])) - 1 for s in by[name]) for name in order]
  assert "{}, {} and {} answers went back".format(*returned) in words
  pairs = recorded.pairs("bound", "free")
  assert all(sum(one - two for one, two in each) == 0 for each in pairs.values())
  every = [pair for each in pairs.values() for pair in each]
  assert [sum(a > b for a, b in every), sum(a < b for a, b in every)] == [3, 3]
  assert "ahead of free after three verdicts and behind after three" in words
  bound = by["bound"]
  at_once = [s for s in bound if trial_tables.met(s["tries"][0])]
  late = [s for s in bound if trial_tables.met(s) and s not in at_once]
  told = [
    sum(map(trial_tables.improves, at_once)),
    sum(map(trial_tables.improves, late)),
  ]
  assert (
    f"Of the {len(at_once)} first bound answers that had the response {told[0]} "
    f"improve, of the {len(late)} that had it only after they went back {told[1]}"
  ) in words
  assert sum(s["tries"][0]["improves"] and s["improves"] for s in late) == 2


def test_the_runs_of_an_open_trial_go_on_from_its_archive(tmp_path):
  """A resumed run repeats its first event to the letter, the paths of here with it."""
  trial.restore(OPEN, tmp_path / "trial")
  opened = trial.Trial(tmp_path / "trial")
  names = [path.parent.name for path in opened.path.glob("runs/*/run.json")]
  assert names
  for name in names:
    folder = opened.folder(name)
    options = runs.read_options(folder)
    assert options == opened.options(name)
    assert pathlib.Path(options.task["model"]).is_dir()
    assert pathlib.Path(options.proposer["cassette"]).is_file()
    last = ""
    for event in store.read_events(folder):
      assert event["previous"] == last
      last = event["hash"]
    begun = store.begun_events(folder)[0]
    assert begun["task"]["model"] == options.task["model"]
