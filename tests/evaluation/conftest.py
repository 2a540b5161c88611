"""Commands run in this process, and what they print."""

import json

import pytest

from mxjax.evaluation.cli import parser


@pytest.fixture
def mxjax(capsys):
  """Runs a command; returns the JSON of its last printed line, or all that it said."""

  def run(*words, as_json=True, code=0):
    capsys.readouterr()
    assert parser.main([*map(str, words), *["--json"] * as_json]) == code
    printed = capsys.readouterr().out
    return json.loads(printed.strip().splitlines()[-1]) if as_json else printed

  return run


@pytest.fixture
def refused(capsys):
  """Runs a command that must fail; returns its one line."""

  def run(*words):
    capsys.readouterr()
    assert parser.main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]

  return run
