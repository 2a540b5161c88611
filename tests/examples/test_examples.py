"""The examples run, on small models, and show what they claim."""

import importlib.util
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import QuantizedLinear

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SHORT = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "train_small.py"})


def example(name, monkeypatch):
  """The module of an example, importable by its name as a user's module would be."""
  monkeypatch.syspath_prepend(EXAMPLES)
  return importlib.import_module(name)


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_every_example_has_under_sixty_lines_of_code_and_a_test(path):
  code = [line for line in path.read_text().splitlines() if line.strip()]
  assert len(code) < 60
  assert f'example("{path.stem}"' in pathlib.Path(__file__).read_text()


def test_quickstart(monkeypatch, capsys):
  main = example("quickstart", monkeypatch).main
  results = main(str(EXAMPLES.parent / "models/trained/llama"), "rtn", 2, 32)
  assert results["logits"] == (2, 32, 2048)
  assert results["bits a weight"] == 4.25
  assert 0 < results["operator error"] < 0.05
  assert results["quantized perplexity"] < 1.5 * results["float perplexity"]
  assert "operator error" in capsys.readouterr().out


def test_a_linen_model_of_your_own(monkeypatch):
  qparams, before, after = example("own_linen_model", monkeypatch).main("rtn")
  for layer in ("layers_0", "layers_1"):
    for name in ("up_proj", "down_proj"):
      assert isinstance(qparams[layer]["mlp"][name]["weight"], QuantizedLinear)
  assert 0 < jnp.std(after - before) < 0.3 * jnp.std(before)


def test_an_nnx_model_of_your_own(monkeypatch):
  quantized, exact = example("own_nnx_model", monkeypatch).main("rtn")
  assert isinstance(quantized.mlp.up_proj.weight.get_value(), QuantizedLinear)
  x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 64)), jnp.float32)
  before, after = exact(x)[0], quantized(x)[0]
  assert 0 < jnp.std(after - before) < 0.3 * jnp.std(before)


def test_a_method_of_your_own(monkeypatch):
  source = str(EXAMPLES.parent / "models/trained/llama")
  errors = example("own_method", monkeypatch).main(source, 2, 64)
  assert errors["best-signs"] < errors["gptq"]


def test_inside_a_jitted_pipeline(monkeypatch):
  source = str(EXAMPLES.parent / "models/trained/llama")
  outputs = example("jitted_pipeline", monkeypatch).main(source, "rtn", 2, 16)
  assert set(outputs) == {"jit", "vmap", "scan", "shard_map", "orbax"}
  for name in ("vmap", "scan", "shard_map"):
    assert jnp.abs(outputs[name] - outputs["jit"]).max() < 0.05, name
  np.testing.assert_array_equal(outputs["orbax"], outputs["jit"])


def test_a_discovery_task_of_your_own(monkeypatch, tmp_path):
  champion = example("own_discovery_task", monkeypatch).main(tmp_path, budget=6)
  assert "jnp.roll" in champion.source
  assert champion.values["loss"] < 0.2
