"""Models with what each method leaves, golden files, and what the tests read."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors import safe_open

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.storage import export
from tests.conftest import GOLDEN
from tests.mxjax import quantized

DOWN = "layers_0/mlp/down_proj/weight"


@pytest.fixture(scope="session")
def golden():
  return np.load(GOLDEN / "exports.npz")


@pytest.fixture(scope="session")
def rtn(tiny_params):
  return quantized.model(tiny_params, "rtn")


@pytest.fixture(scope="session")
def hires(tiny_params):
  """Maps, tables and both recoveries, all of them far from the identity."""
  return quantized.model(tiny_params, "hires", recovery=True)


@pytest.fixture(scope="session")
def hadamard(tiny_params):
  return quantized.model(tiny_params, "hadamard")


@pytest.fixture(scope="session")
def unrounded():
  """Removes the rounding of inputs from params."""
  is_leaf = lambda node: isinstance(node, QuantizedLinear)
  strip = lambda node: (
    dataclasses.replace(node, rounding=Unrounded()) if is_leaf(node) else node
  )
  return lambda params: jax.tree.map(strip, params, is_leaf=is_leaf)


@pytest.fixture
def source(tiny_config):
  """Makes a source of params."""
  return lambda params: export.Source(params, tiny_config, facts={"digest": "ab"})


@pytest.fixture
def compressed(source, tmp_path):
  """Writes a compressed-tensors folder; returns it and its quantization config."""

  def write(params, **options):
    out = tmp_path / "out"
    export.write_compressed_tensors(out, source(params), **options)
    values = json.loads((out / "config.json").read_text())
    return out, values["quantization_config"]

  return write


@pytest.fixture(scope="session")
def tensors_in():
  """Reads all tensors of a folder."""

  def read(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
      with safe_open(path, framework="flax") as file:
        found |= {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found

  return read
