"""One file for a run: what it may hold, what wins, and what the folder keeps of it."""

import json
import pathlib
import textwrap

import pytest

from mxjax.cli.discover import config, inputs
from mxjax.cli.main import build_parser, main
from mxjax.discovery.search import runs
from mxjax.discovery.tasks.ptq import programs

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"
FILE = """
task = "world"
task-options = {frontier_note = "é\\u0001", nested = [1, 2.5]}
seed = 3
budget = 4
sandbox = "off"
holdout = "off"
proposer = "llm"
prices = [1, 2.5]
as-in-paper = true
ray = true
out = "from-file"
"""


def parsed(tmp_path, verb, *words, text=FILE):
  (tmp_path / "run.toml").write_text(text, encoding="utf-8")
  built = build_parser()
  path = str(tmp_path / "run.toml")
  return built.parse_args(["discover", verb, *words, "--config", path])


def test_the_file_is_read_like_the_command_line_and_the_command_line_wins(tmp_path):
  read = parsed(tmp_path, "run", "--budget", "9", "--no-ray", "--out=here")
  assert (read.task, read.seed, read.prices) == ("world", 3, [1.0, 2.5])
  assert json.loads(read.task_options)["nested"] == [1, 2.5]
  assert read.as_in_paper is True
  assert (read.budget, read.ray, read.out) == (9, False, "here")
  # `plan` has no folder and no workers: it takes what it knows.
  assert parsed(tmp_path, "plan").budget == 4


def test_the_example_is_a_file_of_options(tmp_path):
  text = textwrap.dedent((config.__doc__ or "").partition("::\n")[2])
  made = inputs.run_options(parsed(tmp_path, "run", "--out", "x", text=text))
  assert (made.task["seed"], made.config["max_cost"]) == (3, 5.0)
  assert made.proposer["base_url"] == "https://example.org/v1"
  seconds = {name: made.proposer[name] for name in ("deadline", "probe_seconds")}
  assert seconds == {"deadline": 120.0, "probe_seconds": 60.0}
  assert made.proposer["key_variable"] == "KEY"


def test_single_lines_of_a_file_are_set_on_the_command_line(tmp_path):
  words = ["--set", "seed=7", "--set", "model=a=b", "--set", "prices=[1, 2]"]
  words += ["--set=task-options.deep.x=1.5", "--set", "task-options.y=kl", "--out=x"]
  read = parsed(tmp_path, "run", *words)
  assert (read.seed, read.model, read.prices) == (7, "a=b", [1.0, 2.0])
  assert json.loads(read.task_options) == {"deep": {"x": 1.5}, "y": "kl"}
  assert read.budget == 4, "the rest is the file's"
  assert parsed(tmp_path, "run", *words, "--seed=8").seed == 8
  assert "set" not in read.resolved
  again = parsed(tmp_path, "run", text=config.text(read.resolved))
  assert again.resolved == read.resolved


@pytest.mark.parametrize("start", ["gptq", "hires"])
def test_a_committed_search_can_be_run(tmp_path, start):
  text = (BENCHMARKS / f"search_{start}.toml").read_text()
  made = inputs.run_options(parsed(tmp_path, "run", "--out", "x", text=text))
  assert made.config["start"] == programs.source(start)
  assert made.config["budget"] * made.config["proposals_per_call"] >= 2000
  task = runs.task_.load(made.task)
  assert task.target == "kl"
  assert task.holdout().options.model != task.options.model
  runs.make_proposer(made, task)
  with pytest.raises(ValueError, match="expected a file, gptq"):
    inputs.run_options(parsed(tmp_path, "run", "--out=x", "--start=none", text=text))


def test_what_a_folder_keeps_is_a_file_of_the_same_options(tmp_path):
  read = parsed(tmp_path, "run", "--model=a\x7f\"'\\\U0001f600\t", "--width=2")
  again = parsed(tmp_path, "run", text=config.text(read.resolved))
  assert again.resolved == read.resolved
  assert again.model == read.model
  assert {"out", "width", "compiled"} <= set(again.resolved)


NO_OPTIONS = [
  ("budgets = 3", "got 'budgets'; write budget if"),
  ("task_options = 3", "write task-options if"),
  ("config = 'x'", "got 'config'"),
  ("no-ray = true", "got 'no-ray'"),
  ("ray = 1", "ray: expected true or false, got 1"),
  ("seed = true", "seed: expected a number or text, got True"),
  ("seed = [1]", "seed: expected a number or text"),
  ("seed = 1.5", "argument --seed: invalid int value: '1.5'"),
  ("prices = 3", "prices: expected an array"),
  ("prices = [3]", "argument --prices: expected 2 arguments"),
  ("task-options = 3", "task-options: expected a table"),
  ("model = {a = 1}", "model: expected a number or text"),
  ("sandbox = 'strikt'", "write strict if"),
  ("seed = ", "run.toml: expected TOML in UTF-8"),
  # JSON has no dates and no infinities.
  ("[task-options]\nseed = 2020-01-01\n", "run.toml: task-options: "),
  ("[task-options]\nseed = nan\n", "run.toml: task-options: "),
  ("[task-options]\nseed = {deep = [inf]}\n", "run.toml: task-options: "),
]


def test_what_is_no_option_is_refused(tmp_path, refuses):
  cases = []
  for number, (text, told) in enumerate(NO_OPTIONS):
    folder = tmp_path / str(number)
    folder.mkdir()
    (folder / "run.toml").write_text(text)
    words = ["discover", "run", "--out", "x", "--config", folder / "run.toml"]
    cases.append((words, told))
  refuses(cases)


def test_a_run_from_its_own_file_is_the_same_run(tmp_path):
  (tmp_path / "run.toml").write_text(
    'task = "world"\nbudget = 3\nsandbox = "off"\nholdout = "off"\n'
  )
  one, two = tmp_path / "one", tmp_path / "two"
  start = ["discover", "run", "--config"]
  words = [str(tmp_path / "run.toml"), "--seed", "5", "--out", str(one)]
  assert main([*start, *words]) == 0
  assert runs.read_options(one).config["seed"] == 5
  assert main([*start, str(one / "config.toml"), "--out", str(two)]) == 0
  for name in ("run.json", "log.jsonl"):
    assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_study_takes_one_file_and_single_lines_of_one(tmp_path):
  text = """
task = "world"
budget = 7
sandbox = "off"
seeds = [104, 105]
tuned-on = []
gate = 0.5
our-accounting = true
out = "from-file"
[task-options]
luck = 0.25
"""
  words = ["matched", "--set", "gate=0.6", "--set", "task-options.transfer=2"]
  read = parsed(tmp_path, "study", *words, "--budget", "29", text=text)
  assert (read.name, read.out, read.seeds, read.tuned_on) == (
    "matched",
    "from-file",
    [104, 105],
    [],
  )
  assert (read.gate, read.budget, read.our_accounting, read.plan) == (
    0.6,
    29,
    True,
    False,
  )
  run = inputs.run_options(read)
  made = inputs.study_options(read, run.task, run)
  assert (made.seeds, made.budget) == ((104, 105), 29)
  assert read.resolved["seeds"] == [104, 105]


def test_an_array_that_ends_a_file_does_not_go_on_into_a_name(tmp_path):
  read = parsed(tmp_path, "study", "matched", text="out = 'x'\nseeds = [104, 105]\n")
  assert (read.name, read.seeds) == ("matched", [104, 105])


def test_a_file_of_a_study_holds_options_of_a_study(refuses, tmp_path):
  (tmp_path / "study.toml").write_text('task = "world"\nmax-tokens = 3\n')
  words = ["discover", "study", "matched", "--out", tmp_path / "s", "--config"]
  told = "expected options of this command, got 'max-tokens'"
  refuses([([*words, tmp_path / "study.toml"], told)])


def test_a_search_says_in_which_dtype_it_computes(tmp_path):
  text = 'task = "ptq"\nmodel = "random:0"\n'
  made = lambda *words: inputs.run_options(
    parsed(tmp_path, "run", "--out", "x", *words, text=text)
  )
  assert made("--dtype", "bfloat16").task["dtype"] == "bfloat16"
  assert runs.task_.load(made().task).spec["dtype"] == "float32"


REFUSED = [
  # Without a proposal in any round, a run would never end.
  ("run --out x --width 0", "argument --width"),
  ("run --out x --budget 0", "argument --budget"),
  ("run --out x --proposals-per-call -1", "argument --proposals-per-call"),
  ("run --out x --max-tokens -1", "argument --max-tokens"),
  ("run --out x --config /no/such.toml", "/no/such.toml"),
  ("run --out x --config", "expected one argument"),
  ("run --out x --deadline soon", "argument --deadline: invalid amount"),
  ("run --out x --endpoints []", "unrecognized option --endpoints"),
  ("run --out x --set seed", "--set: expected KEY=VALUE"),
  ("run --out x --set =3", "--set: expected KEY=VALUE"),
  ("run --out x --set sede=3", "--set: expected options of this command"),
  ("run --out x --set seed=three", "argument --seed: invalid int value"),
  ("run --out x --set model=a --set model.b=c", "a value, or for a table"),
  ("run --out x --task-options {objective:kl}", "expected a JSON object in --task-"),
  ("run --out x --task-options [1]", "expected a JSON object in --task-options"),
  ("run --out x --task-options=", "expected a JSON object in --task-options"),
  ("study matched --out=x --gate nan", "argument --gate"),
  ("resume x --workers 0", "argument --workers"),
  ("verify x --calls -1", "argument --calls"),
  ("status x --follow=-1", "argument --follow"),
  ("report absent", "got no event"),
  ("report empty", "got no event"),
  ("report torn", "got no event"),
  ("verify empty", "got no event"),
  ("explain torn ab", "got no event"),
]
TOGETHER = [
  ("--model x", "no model or dtype for --task world, got x"),
  ("--transfer-model x", "no model or dtype"),
  ("--paper-allocation --budget 100", "allocation of 100 calls"),
  ("--start hires", "--start: program: PLAN"),
  ("--proposer expressions", "human, got 'expressions'"),
  ("--proposer magic", "human, got 'magic'"),
  ("--proposer cassette", "expected --cassette with the file"),
  (
    "--endpoint http://x",
    "cassette beside --endpoint http://x, got embedded, which does not read it; add "
    "--proposer llm, or leave --endpoint out",
  ),
  ("--prices 1 2", "--proposer llm or cassette beside --prices 1.0 2.0, got embedded"),
  ("--max-tokens 5", "--proposer llm or cassette beside --max-tokens"),
  ("--answers a", "--proposer human beside --answers"),
  (
    "--contested-accounts --proposer human",
    "--proposer embedded beside --contested-accounts",
  ),
]
"""Options that do not go together, of `run` and of `plan`."""
OF_STUDIES = [
  ("--arm score --width 2", "got --arm score and --width 2; leave"),
  ("--seed 5", "got --seed 5; leave"),
  ("--holdout off", "got --holdout off; leave"),
  ("--as-in-paper", "got --as-in-paper; leave"),
  ("--paper-allocation --budget 60", "240 calls that the paper divides, got 60"),
]


def test_what_cannot_be_meant_is_told_before_anything(tmp_path, refuses, monkeypatch):
  for name, log in (("empty", b""), ("torn", b'{"n":0')):
    (tmp_path / name).mkdir()
    (tmp_path / name / "log.jsonl").write_bytes(log)
  monkeypatch.chdir(tmp_path)
  world = "--task world --sandbox off"
  refuses(
    [
      *((f"discover {words}", told) for words, told in REFUSED),
      *((f"discover run --out new {world} {w}", told) for w, told in TOGETHER),
      *((f"discover plan {world} {w}", told) for w, told in TOGETHER),
      *(
        (f"discover study matched --task world --plan --out s {w}", told)
        for w, told in OF_STUDIES
      ),
    ]
  )
  assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "torn"]


@pytest.mark.parametrize(
  ("words", "expected"),
  [(["--no-revise-retired"], {"revise_retired": False}), ([], {})],
)
def test_a_study_keeps_what_all_its_arms_change(words, expected):
  study = ["discover", "study", "matched", "--task", "world", "--out", "s", *words]
  read = build_parser().parse_args(study)
  run = inputs.run_options(read)
  assert dict(inputs.study_options(read, run.task, run).config) == expected
