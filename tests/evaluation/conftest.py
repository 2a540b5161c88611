"""Commands run in this process, and what they print."""

import json

import pytest

from mxjax.evaluation.cli import parser
from tests import tiny


@pytest.fixture(scope="session")
def write_square_model():
  """Writes a model folder whose linears have one shape, so that little is compiled."""

  def write(path):
    path.mkdir(exist_ok=True)
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "max_positions": 64}
    return tiny.save_folder(path, num_layers=3, **heads, **sizes)

  return write


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
