"""One file for a run: what it may hold, what wins, and what the folder keeps of it."""

import json
import pathlib
import textwrap

import pytest

from mxjax.discovery.cli import config, options, parser, study
from mxjax.discovery.search import runs
from mxjax.discovery.tasks.ptq import programs
from mxjax.evaluation.cli import parser as cli

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
  built = cli.build_parser(parser.register)
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
  made = options.run_options(parsed(tmp_path, "run", "--out", "x", text=text))
  assert (made.task["seed"], made.config["max_cost"]) == (3, 5.0)
  assert [one["weight"] for one in made.proposer["endpoints"]] == [3.0, 1.0]


@pytest.mark.parametrize("start", ["gptq", "hires"])
def test_a_committed_search_can_be_run(tmp_path, start):
  text = (BENCHMARKS / f"search_{start}.toml").read_text()
  made = options.run_options(parsed(tmp_path, "run", "--out", "x", text=text))
  assert made.config["start"] == programs.source(start)
  assert made.config["budget"] * made.config["proposals_per_call"] >= 2000
  task = runs.task_.load(made.task)
  assert task.target == "kl"
  assert task.holdout().options.model != task.options.model
  runs.make_proposer(made, task)
  with pytest.raises(ValueError, match="expected a file, gptq"):
    options.run_options(parsed(tmp_path, "run", "--out=x", "--start=none", text=text))


def test_what_a_folder_keeps_is_a_file_of_the_same_options(tmp_path):
  read = parsed(tmp_path, "run", "--model=a\x7f\"'\\\U0001f600\t", "--width=2")
  again = parsed(tmp_path, "run", text=config.text(read.resolved))
  assert again.resolved == read.resolved
  assert again.model == read.model
  assert {"out", "width", "compiled"} <= set(again.resolved)


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("budgets = 3", "unknown option 'budgets'; did you mean budget?"),
    ("task_options = 3", "did you mean task-options?"),
    ("config = 'x'", "unknown option 'config'"),
    ("no-ray = true", "unknown option 'no-ray'"),
    ("ray = 1", "ray: expected true or false, got 1"),
    ("seed = true", "seed: expected a number or text, got True"),
    ("seed = [1]", "seed: expected a number or text"),
    ("seed = 1.5", "argument --seed: invalid int value: '1.5'"),
    ("prices = 3", "prices: expected an array"),
    ("prices = [3]", "argument --prices: expected 2 arguments"),
    ("task-options = 3", "task-options: expected a table"),
    ("model = {a = 1}", "model: expected a number or text"),
    ("sandbox = 'strikt'", "did you mean strict?"),
    ("seed = ", "run.toml: expected TOML in UTF-8"),
  ],
)
def test_what_is_no_option_is_refused_in_one_sentence(tmp_path, capsys, text, match):
  with pytest.raises(SystemExit) as left:
    parsed(tmp_path, "run", "--out", "x", text=text)
  assert left.value.code == 2
  told = capsys.readouterr().err.splitlines()
  assert match in told[0]
  assert "--help" in told[-1]
  assert len(told) == 2


@pytest.mark.parametrize("text", ["{objective: kl}", "[1]", "3", ""])
def test_task_options_that_are_no_object_are_refused(tmp_path, text):
  given = parsed(tmp_path, "run", "--task-options", text)
  with pytest.raises(ValueError, match=r"expected a JSON object in --task-options"):
    options.run_options(given)


def test_a_file_that_is_not_there_is_one_sentence(capsys):
  assert_ = lambda *words: pytest.raises(SystemExit, parser.main, ["discover", *words])
  assert_("run", "--out", "x", "--config", "/no/such.toml")
  assert "/no/such.toml" in capsys.readouterr().err
  assert_("run", "--out", "x", "--config")
  assert "expected one argument" in capsys.readouterr().err


def test_a_run_from_its_own_file_is_the_same_run(tmp_path):
  (tmp_path / "run.toml").write_text(
    'task = "world"\nbudget = 3\nsandbox = "off"\nholdout = "off"\n'
  )
  one, two = tmp_path / "one", tmp_path / "two"
  start = ["discover", "run", "--config"]
  words = [str(tmp_path / "run.toml"), "--seed", "5", "--out", str(one)]
  assert parser.main([*start, *words]) == 0
  assert runs.read_options(one).config["seed"] == 5
  assert parser.main([*start, str(one / "config.toml"), "--out", str(two)]) == 0
  for name in ("run.json", "log.jsonl"):
    assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_search_says_in_which_dtype_it_computes(tmp_path):
  text = 'task = "ptq"\nmodel = "random:0"\n'
  made = lambda *words: options.run_options(
    parsed(tmp_path, "run", "--out", "x", *words, text=text)
  )
  assert made("--dtype", "bfloat16").task["dtype"] == "bfloat16"
  assert runs.task_.load(made().task).spec["dtype"] == "float32"


@pytest.mark.parametrize("value", ["2020-01-01", "nan", "{deep = [inf]}"])
def test_values_that_json_lacks_are_told_by_their_option(tmp_path, value, capsys):
  with pytest.raises(SystemExit):
    parsed(tmp_path, "plan", text=f"[task-options]\nseed = {value}\n")
  assert "run.toml: task-options: " in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
  "words",
  [
    ["run", "--out", "x", "--width", "0"],
    ["run", "--out", "x", "--budget", "0"],
    ["run", "--out", "x", "--proposals-per-call", "-1"],
    ["run", "--out", "x", "--max-tokens", "-1"],
    ["run", "--out", "x", "--screen", "nan"],
    ["study", "matched", "--out=x", "--gate", "nan"],
    ["resume", "x", "--workers", "0"],
    ["verify", "x", "--calls", "-1"],
    ["status", "x", "--follow=-1"],
  ],
)
def test_numbers_that_make_no_sense_are_refused(words, capsys):
  # Without a proposal in any round, a run would never end.
  with pytest.raises(SystemExit):
    cli.build_parser(parser.register).parse_args(["discover", *words])
  assert f"argument {words[-2] if len(words) > 3 else '--follow'}" in (
    capsys.readouterr().err
  )


@pytest.mark.parametrize("log", [None, b"", b'{"n":0'])
@pytest.mark.parametrize("verb", ["report", "verify", "explain"])
def test_a_run_without_an_event_is_told(tmp_path, capsys, verb, log):
  if log is not None:
    (tmp_path / "log.jsonl").write_bytes(log)
  more = ["ab"] if verb == "explain" else []
  assert parser.main(["discover", verb, str(tmp_path), *more]) == 2
  assert "got no event" in " ".join(capsys.readouterr().err.split())


def test_a_study_refuses_what_it_would_ignore(tmp_path, capsys):
  words = ["discover", "study", "matched", "--task", "world", "--plan"]
  words += ["--out", str(tmp_path / "s"), "--arm", "score", "--width", "2"]
  assert parser.main(words) == 2
  assert "leave out --arm score and --width 2" in " ".join(
    capsys.readouterr().err.split()
  )
  for given in (["--seed", "5"], ["--holdout", "off"], ["--as-in-paper"]):
    assert parser.main([*words[:-4], *given]) == 2
    assert f"leave out {' '.join(given)}" in " ".join(capsys.readouterr().err.split())
  allocated = [*words[:-4], "--paper-allocation", "--budget", "60"]
  assert parser.main(allocated) == 2
  assert "divides 240 calls, got 60" in " ".join(capsys.readouterr().err.split())
  built = cli.build_parser(parser.register)
  asked = [*words[:-4], "--no-revise-retired"]
  for given, expected in ((asked, {"revise_retired": False}), (words[:-4], {})):
    read = built.parse_args(given)
    run = options.run_options(read)
    assert dict(study.options(read, run.task, run).config) == expected


@pytest.mark.parametrize(
  ("words", "told"),
  [
    (["--model", "x"], "no model or dtype for --task world, got x"),
    (["--transfer-model", "x"], "no model or dtype"),
    (["--paper-allocation", "--budget", "100"], "allocation of 100 calls"),
    (["--screen", "1"], "has no proxy; leave out --screen"),
    (["--start", "hires"], "--start: program: PLAN"),
    (["--proposer", "expressions"], "has no grammar"),
    (["--proposer", "magic"], "unknown proposer 'magic'"),
    (["--proposer", "cassette"], "cassette needs --cassette"),
    (["--endpoint", "http://x"], "--endpoint is for --proposer llm or cassette"),
    (["--max-tokens", "5"], "--max-tokens is for --proposer llm or cassette"),
    (["--answers", "a"], "--answers is for --proposer human"),
    (
      ["--contested-accounts", "--proposer", "human"],
      "--contested-accounts is for --proposer embedded or expressions",
    ),
  ],
)
@pytest.mark.parametrize("verb", ["run", "plan"])
def test_what_does_not_go_together_is_told_before_anything(
  tmp_path, capsys, monkeypatch, words, told, verb
):
  monkeypatch.chdir(tmp_path)
  more = ["--out", "run"] if verb == "run" else []
  given = ["discover", verb, "--task", "world", "--sandbox", "off", *more, *words]
  assert parser.main(given) == 2
  assert told in " ".join(capsys.readouterr().err.split())
  assert not [*tmp_path.iterdir()]
