"""A faulty plan is refused before anything is measured, and the place is named."""

import pathlib
import re
import tomllib

import pytest

from mxjax.discovery.studies import trial, trial_plan

PLANS = sorted(
  (pathlib.Path(__file__).parents[3] / "benchmarks").glob("discovery_trial*.toml")
)
PLAN = """
question = "Do verdicts help?"
expects = "They do."
stop = "At the budget."
validity = 0.9
sandbox = "off"
[endpoint]
base_url = "http://127.0.0.1:9/v1"
run_model = "run-{name}"
replay_model = "replay-{letter}"
deadline = 20.0
[replay]
runs = ["one"]
samples = 1
per_run = 2
[tasks.first]
task = "world"
seed = 2
[runs.one]
task = "first"
arm = "quantforge"
seed = 1
budget = 4
config = { asks = false }
"""


def frozen(folder, text):
  file = folder / "plan.toml"
  file.write_text(text)
  return trial.freeze(folder / "trial", file, tell=lambda line: None)


def test_the_plan_of_these_tests_is_one(tmp_path):
  assert frozen(tmp_path, PLAN).options("one").config["asks"] is False


@pytest.mark.parametrize("file", PLANS, ids=lambda path: path.stem)
def test_every_plan_of_a_trial_that_was_made_is_one(file):
  plan = tomllib.loads(file.read_text())
  taken = {"tasks": {}, "runs": {}} if "runs_of" in plan else {}
  if taken:
    plan["replay"]["runs"] = []
  trial_plan.check({**plan, **taken}, file)


@pytest.mark.parametrize(
  ("part", "other", "told"),
  [
    ("budget = 4", "budgt = 4", ("runs.one.budget", "every plan has")),
    ("budget = 4", "budget = 0", ("runs.one.budget", "greater than 0, got 0")),
    ("deadline", "timeout", ("endpoint.timeout", "no such key")),
    ("run-{name}", "run-{run}", ("endpoint.run_model", "{name}, {arm}", "{run}")),
    ("replay-{letter}", "replay-{arm}", ("endpoint.replay_model", "{condition}")),
    ("samples = 1", 'samples = "a"', ("replay.samples", "valid integer, got 'a'")),
    ("per_run = 2", "per_run = 2\nreturn = 1", ("replay.return", "no such key")),
    (
      "per_run = 2",
      'per_run = 2\nconditions = ["bond"]',
      ("replay.conditions.0", "'bound'", "got 'bond'"),
    ),
    ('"off"', '"jail"', ("sandbox", "'strict', 'standard' or 'off'", "'jail'")),
    ("validity = 0.9", "", ("validity", "every plan has")),
    ("asks = false", "ask = false", ("runs.one.config", "call_seconds", "['ask']")),
    ('"quantforge"', '"quant"', ("runs.one", "arm of score", "'quant'")),
    ('runs = ["one"]', 'runs = ["two"]', ("replay.runs", "some of one", "['two']")),
    ('task = "world"', 'task = "nope"', ("tasks.first", "ptq", "'nope'")),
    ("seed = 2", "luc = 0.8", ("tasks.first", "luc")),
    ("[endpoint]", 'runs_of = "a.tar.xz"\n[endpoint]', ("runs_of", "runs, tasks")),
    ("[tasks.first]", "[tasks.first", ("plan.toml", "the plan of a trial in TOML")),
  ],
)
def test_a_fault_of_a_plan_is_named_before_anything_is_measured(
  tmp_path, part, other, told
):
  assert PLAN.count(part) == 1
  with pytest.raises(ValueError) as refused:
    frozen(tmp_path, PLAN.replace(part, other))
  assert str(refused.value).startswith(f"{tmp_path / 'plan.toml'}")
  for words in told:
    assert words in str(refused.value)
  assert not (tmp_path / "trial").exists()


def test_the_guide_has_every_key_of_a_plan():
  guide = (PLANS[0].parents[1] / "docs" / "guides" / "trial.md").read_text()
  table = guide.partition("## All keys of a plan")[2]
  told = {
    key for row in re.findall(r"^\| (`.*?) \|", table, re.M) for key in row.split(", ")
  }
  tables = {
    "endpoint": trial_plan.Endpoint,
    "replay": trial_plan.Replay,
    "runs.NAME": trial_plan.Run,
  }
  keys = {*trial_plan.Plan.model_fields} - {"endpoint", "replay", "tasks", "runs"}
  for prefix, model in tables.items():
    keys |= {f"{prefix}.{key}" for key in model.model_fields}
  assert {key.strip("`") for key in told} == keys | {"tasks.NAME"}


def test_the_plan_of_the_guide_is_one(tmp_path):
  guide = (PLANS[0].parents[1] / "docs" / "guides" / "trial.md").read_text()
  text = re.search(r"```toml\n(.*?)```", guide, re.S)[1]
  assert frozen(tmp_path, text).options("first").config["budget"] == 12


def test_freezing_a_plan_executes_no_code_that_it_names(tmp_path, monkeypatch):
  (tmp_path / "owned.py").write_text("raise SystemExit('executed')")
  monkeypatch.syspath_prepend(tmp_path)
  made = frozen(tmp_path, PLAN.replace('"world"', '"owned:make"', 1))
  assert made.plan["tasks"]["first"]["task"] == "owned:make"
