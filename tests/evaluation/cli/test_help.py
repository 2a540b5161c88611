"""Help, versions and misspelled words: before anything heavy is loaded."""

import os
import pathlib
import subprocess
import sys

import pytest

from mxjax import methods
from mxjax.discovery.cli import parser
from mxjax.discovery.studies import study
from mxjax.evaluation.cli.commands import export
from mxjax.storage.export import features

ROOT = pathlib.Path(__file__).parents[3]
COMMANDS = (
  "plan quantize verify evaluate compare reproduce generate chat demo export "
  "import discover"
).split()


def test_help_of_every_command_loads_no_array_library():
  program = f"""
import sys
from mxjax.discovery.cli import parser

heavy = ("jax", "flax", "numpy", "scipy", "rich", "transformers", "safetensors")
helps = [[name, "--help"] for name in {COMMANDS}]
for words in (["--help"], ["--version"], *helps, ["discover", "study", "--help"]):
  try:
    parser.main(words)
  except SystemExit as stop:
    assert stop.code == 0, words
  assert not set(heavy) & set(sys.modules), (words, set(heavy) & set(sys.modules))
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert "mxjax 0." in done.stdout


def test_names_in_help_are_those_of_the_registries():
  assert export.FEATURES == (*features.FEATURES, *features.GROUPS)
  assert tuple(parser.STUDIES) == tuple(sorted(study.STUDIES))


def printed(words, capsys):
  with pytest.raises(SystemExit) as stop:
    parser.main(words)
  return stop.value.code, capsys.readouterr()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_each_command(command, capsys):
  code, told = printed([command, "--help"], capsys)
  assert code == 0
  assert len(told.out) > 200
  if command in ("quantize", "compare"):
    words = [word.strip(",;") for word in told.out.split()]
    assert set(methods.METHODS) <= set(words)


@pytest.mark.parametrize(
  ("command", "defaults"),
  [
    ("quantize", {"--sequences N": 128, "--length T": 2048, "--method M": "hires"}),
    ("quantize", {"--seed S": 0, "--replicates R": 1}),
    ("chat", {"--temperature X": 0.7, "--max-new-tokens N": 512}),
    ("generate", {"--temperature X": 0.0, "--max-new-tokens N": 32}),
    ("compare", {"--methods NAMES": "rtn,gptq,brq,hires"}),
  ],
)
def test_help_shows_every_default_once(command, defaults, capsys):
  _, told = printed([command, "--help"], capsys)
  text = " ".join(told.out.partition("positional arguments")[2].split())
  for option, value in defaults.items():
    explained = text.split(f" {option} ", 1)[1].split(" --", 1)[0]
    assert explained.count("default: ") == 1
    assert f"; default: {value}" in explained


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["quantise"], "did you mean quantize?"),
    (["quantize", "--out", "x", "--metod", "rtn"], "--metod; did you mean --method?"),
    (["discover", "run", "--seeed", "1"], "--seeed; did you mean --seed?"),
    (["quantize", "--out", "x", "--sampling", "window"], "did you mean windows?"),
  ],
)
def test_a_misspelled_word_is_answered_with_the_near_one(words, message, capsys):
  code, told = printed(words, capsys)
  assert code == 2
  assert message in told.err


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["quantize", "--method", "gtpq:scales=static"], "did you mean gptq?"),
    (["quantize", "--method", "gptq:scale=static"], "did you mean scales?"),
    (["compare", "--methods", "rtn,hire"], "did you mean hires?"),
    (["reproduce", "stage"], "did you mean stages?"),
  ],
)
def test_a_misspelled_name_is_answered_with_the_near_one(
  words, message, tmp_path, refused
):
  assert message in refused(*words, "--out", tmp_path / "out")
