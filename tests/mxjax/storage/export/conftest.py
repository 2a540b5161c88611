"""Models with what each method leaves, and golden files of the libraries."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from tests.conftest import GOLDEN
from tests.mxjax.storage.export.models import replaced


@pytest.fixture(scope="session")
def golden():
  return np.load(GOLDEN / "exports.npz")


@pytest.fixture(scope="session")
def rtn(tiny_params):
  make = lambda block, name, weight: QuantizedLinear(
    mxfp4.encode(weight), None, Nearest()
  )
  return replaced(tiny_params, make)


@pytest.fixture(scope="session")
def hires(tiny_params):
  """Maps, tables and both recoveries, all of them far from the identity."""
  rng = np.random.default_rng(0)
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)

  def make(block, name, weight):
    blocks = weight.shape[1] // 32
    matrix = jnp.eye(32, dtype=jnp.float32)[None] + 0.1 * random(blocks, 32, 32)
    gram = random(blocks, 32, 32)
    rounding = OneCode(one_code.pack_symmetric(gram @ gram.mT), random(blocks, 32, 32))
    return QuantizedLinear(
      mxfp4.encode(weight), input_maps.BlockDense(matrix), rounding
    )

  params = replaced(tiny_params, make)
  for index in range(2):
    layer = params[f"layers_{index}"]
    layer["self_attn"]["value_recovery"] = ValueRecovery(
      jnp.float32([1.3, 0.8]), jnp.float32([0.05, -0.2])
    )
    scalars = [jnp.float32(value) for value in (0.1, -0.2, 0.15, 1.5)]
    layer["mlp"]["mlp_recovery"] = MlpRecovery(*scalars)
  return params


@pytest.fixture
def hadamard(tiny_params):
  make = lambda block, name, weight: QuantizedLinear(
    mxfp4.encode(weight),
    input_maps.Hadamard(64 if weight.shape[1] == 64 else 32),
    Nearest(),
  )
  return replaced(tiny_params, make)
