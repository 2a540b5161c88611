"""The examples run, on small models, and show what they claim."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import QuantizedLinear
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.numerics.shaping.input_maps import Hadamard
from tests import tiny

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model whose programs other tests compile, too."""
  return str(tiny.save_folder(tmp_path_factory.mktemp("tiny")))


def example(name, monkeypatch):
  """The module of an example, importable by its name as a user's module would be."""
  monkeypatch.syspath_prepend(EXAMPLES)
  return importlib.import_module(name)


@pytest.mark.parametrize(
  "path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem
)
def test_every_example_has_under_sixty_lines_and_a_test(path):
  assert len(path.read_text().splitlines()) < 60
  assert f'"{path.stem}"' in pathlib.Path(__file__).read_text()


def test_quickstart(monkeypatch, capsys):
  main = example("quickstart", monkeypatch).main
  results = main(str(EXAMPLES.parent / "models/trained/llama"), "rtn", 2, 32)
  assert results["logits"] == (2, 32, 2048)
  assert results["bits a weight"] == 4.25
  assert 0 < results["operator error"] < 0.05
  assert results["quantized perplexity"] < 1.5 * results["float perplexity"]
  assert "operator error" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("name", "linears"),
  [("own_linen_model", 4), ("own_nnx_model", 6), ("own_vision_transformer", 12)],
)
def test_a_model_of_your_own(monkeypatch, name, linears):
  qparams, before, after = example(name, monkeypatch).main("rtn")
  is_quantized = lambda leaf: isinstance(leaf, QuantizedLinear)
  leaves = jax.tree.leaves(qparams, is_leaf=is_quantized)
  assert sum(map(is_quantized, leaves)) == linears
  assert 0 < jnp.std(after - before) < 0.3 * jnp.std(before)


def test_a_method_of_your_own(monkeypatch, folder):
  errors = example("own_method", monkeypatch).main(folder, 5, 32)
  assert set(errors) == {"gptq", "brq", "best-signs"}
  # Which of the three is closest on so few tokens depends on the last bits of sums.
  assert all(0 < error < 0.1 for error in errors.values())


def test_a_method_of_your_own_keeps_the_best_signs(monkeypatch):
  weight = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32, 48)), "float32")
  program = example("own_method", monkeypatch).BestSigns(tries=3)
  inputs = LinearInputs([jnp.ones((1, 2, 32, 4), jnp.float32)])
  error = lambda tried: program.error(tried.fold(weight), inputs.rules)
  best, record = program.shape(weight, inputs)
  draw = lambda seed: jax.random.rademacher(jax.random.key(seed), (64,), jnp.int8)
  errors = [error(Hadamard(32, draw(seed))) for seed in range(3)]
  assert error(best) == min(errors) == errors[record["best_seed"]]


def test_inside_a_jitted_pipeline(monkeypatch, folder):
  outputs = example("jitted_pipeline", monkeypatch).main(folder, "rtn", 2, 16)
  assert set(outputs) == {"jit", "vmap", "scan", "shard_map", "orbax"}
  for name in ("vmap", "scan", "shard_map"):
    assert jnp.abs(outputs[name] - outputs["jit"]).max() < 0.05, name
  np.testing.assert_array_equal(outputs["orbax"], outputs["jit"])


def test_a_discovery_task_of_your_own(monkeypatch, tmp_path):
  champion = example("own_discovery_task", monkeypatch).main(tmp_path, budget=6)
  assert "jnp.roll" in champion.source
  assert champion.values["loss"] < 0.2


def test_the_notebook_runs_from_top_to_bottom(capsys):
  """Its cells in order, as plain Python: no Jupyter is needed."""
  notebook = json.loads((EXAMPLES / "own_model.ipynb").read_text())
  assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
  identifiers = [cell["id"] for cell in notebook["cells"]]
  assert len(set(identifiers)) == len(identifiers)
  names = {"__name__": "__main__"}
  for cell in notebook["cells"]:
    assert cell["cell_type"] in ("code", "markdown")
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
      exec("".join(cell["source"]), names)
  errors = names["errors"]
  assert set(errors) == {"rtn", "gptq", "wush"}
  assert all(0 < error < 0.5 for error in errors.values())
  assert names["value"] < 0.05
  drawn = names["chart"]._repr_html_()
  assert "<svg" in drawn and all(f">{name}<" in drawn for name in errors)
  assert "rtn" in capsys.readouterr().out
