"""What models hold that a format may not: named, refused, dropped, folded."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Clipped, Unrounded
from mxjax.numerics.shaping import input_maps
from mxjax.storage import export
from mxjax.storage.export import features
from tests import refusals
from tests.mxjax.quantized import assert_same, at, replaced
from tests.mxjax.storage.export.conftest import DOWN

SHARES = jnp.full((3,), 0.9, jnp.float32)


def test_clipping_is_refused_by_name_and_can_be_dropped(rtn, compressed):
  leaf = at(rtn, DOWN)
  clipped = dataclasses.replace(leaf, rounding=Clipped(SHARES, SHARES))
  params = replaced(rtn, DOWN, clipped)
  with pytest.raises(ValueError, match="got clipping .*--drop clipping"):
    compressed(params)
  dropped = export.drop(params, ["clipping"])
  assert export.features_of(dropped) == {}
  np.testing.assert_array_equal(at(dropped, DOWN).weight.codes, leaf.weight.codes)
  assert_same(export.read_compressed_tensors(compressed(dropped)[0]).params, dropped)


def test_everything_hires_has_is_named_and_dropped(hires, compressed):
  names = ["maps", "refinement", "value-recovery", "mlp-recovery"]
  assert set(export.features_of(hires)) == set(names)
  refusals.check(
    [
      (lambda: compressed(hires), *names),
      (lambda: export.drop(hires, ["maps"]), "maps", "alone"),
      (lambda: features.parse("maps,colour"), "colour"),
    ]
  )
  dropped = export.drop(hires, features.parse("maps,refinement,recovery"))
  assert export.features_of(dropped) == {}
  path = "layers_1/self_attn/q_proj/weight"
  native = np.asarray(features.effective_weight(at(hires, path))).astype(np.float32)
  assert_same(at(dropped, path).weight, mxfp4.encode(native))


def random(*shape):
  values = np.random.default_rng(sum(shape)).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


MAPS = {
  "none": lambda: None,
  "dense": lambda: input_maps.BlockDense(jnp.eye(32)[None] + 0.1 * random(2, 32, 32)),
  "hadamard": lambda: input_maps.Hadamard(64, jnp.sign(random(64)).astype(jnp.int8)),
  "kronecker": lambda: input_maps.Kronecker(random(8, 8), random(2, 4, 4)),
  "two-level": lambda: input_maps.TwoLevel(random(2, 2), random(32, 32)),
}


@pytest.mark.parametrize("name", MAPS)
def test_effective_weight_is_map_and_codes_together(name):
  weight, x = mxfp4.encode(random(48, 64)), random(7, 64)
  leaf = QuantizedLinear(weight, MAPS[name](), Unrounded())
  effective = np.asarray(features.effective_weight(leaf))
  assert effective.dtype == np.float64
  expected = np.asarray(linear(x, leaf), np.float64)
  ours = np.asarray(x, np.float64) @ effective.T
  assert np.abs(ours - expected).max() <= 2e-6 * np.abs(expected).max()
