"""Help, versions and misspelled words: before anything heavy is loaded."""

import os
import pathlib
import subprocess
import sys

import pytest

from mxjax import methods
from mxjax.cli.main import main

ROOT = pathlib.Path(__file__).parents[3]
COMMANDS = (
  "plan quantize verify evaluate compare reproduce generate chat demo export "
  "import discover"
).split()


def test_help_of_every_command_loads_no_array_library():
  program = f"""
import sys
from mxjax.cli.main import main

heavy = ("jax", "flax", "numpy", "scipy", "rich", "transformers", "safetensors")
helps = [[name, "--help"] for name in {COMMANDS}]
for words in (["--help"], ["--version"], *helps, ["discover", "study", "--help"]):
  try:
    main(words)
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


def printed(words, capsys):
  with pytest.raises(SystemExit) as stop:
    main(words)
  return stop.value.code, capsys.readouterr()


def helped(command, capsys):
  with pytest.raises(SystemExit) as stop:
    main([command, "--help"])
  assert stop.value.code == 0
  return capsys.readouterr().out


def test_help_explains_each_command(capsys):
  for command in COMMANDS:
    assert len(helped(command, capsys)) > 200, command
  for command in ("quantize", "compare"):
    words = [word.strip(",;") for word in helped(command, capsys).split()]
    assert set(methods.METHODS) <= set(words)


DEFAULTS = {
  "quantize": {
    "--sequences N": 128,
    "--length T": 2048,
    "--method M": "hires",
    "--seed S": 0,
    "--replicates R": 1,
  },
  "chat": {"--temperature X": 0.7, "--max-new-tokens N": 512},
  "generate": {"--temperature X": 0.0, "--max-new-tokens N": 32},
  "compare": {"--methods NAMES": "rtn,gptq,brq,hires"},
}


def test_help_shows_every_default_once(capsys):
  for command, defaults in DEFAULTS.items():
    text = helped(command, capsys).partition("positional arguments")[2]
    for option, value in defaults.items():
      explained = " ".join(text.split()).split(f" {option} ", 1)[1].split(" --", 1)[0]
      assert explained.count("default: ") == 1, (command, option)
      assert f"; default: {value}" in explained
