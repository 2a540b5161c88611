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
from tests.mxjax.storage.export.models import same, source, with_leaf


def odd_leaf(kind, leaf):
  """A leaf with one thing that compressed-tensors has no place for."""
  blocks = leaf.shape[1] // 32
  shares = jnp.full((blocks,), 0.9, jnp.float32)
  return dataclasses.replace(
    leaf,
    **{
      "gains": lambda: {"gain": jnp.float32(1.1)},
      "clipping": lambda: {"rounding": Clipped(shares, shares)},
      "rules": lambda: {"rules": mxfp4.Rules(scale_rule="mx43")},
    }[kind](),
  )


@pytest.mark.parametrize("kind", ["gains", "clipping", "rules"])
def test_each_feature_is_refused_by_name_and_can_be_dropped(
  rtn, tiny_config, tmp_path, kind
):
  leaf = rtn["layers_0"]["mlp"]["down_proj"]["weight"]
  params = with_leaf(rtn, odd_leaf(kind, leaf))
  with pytest.raises(ValueError, match=rf"cannot hold {kind} .*--drop {kind}"):
    export.write_compressed_tensors(tmp_path / "out", source(params, tiny_config))
  dropped = export.drop(params, [kind])
  assert export.features_of(dropped) == {}
  new = dropped["layers_0"]["mlp"]["down_proj"]["weight"]
  kept = (
    np.asarray(new.weight.codes).tobytes() == np.asarray(leaf.weight.codes).tobytes()
  )
  assert kept == (kind != "rules")
  out = export.write_compressed_tensors(tmp_path / "out", source(dropped, tiny_config))
  same(export.read_compressed_tensors(out).params, dropped)


def test_everything_hires_has_is_named_and_dropped(hires, tiny_config, tmp_path):
  names = ["maps", "refinement", "value-recovery", "mlp-recovery"]
  assert set(export.features_of(hires)) == set(names)
  with pytest.raises(ValueError) as caught:
    export.write_compressed_tensors(tmp_path / "out", source(hires, tiny_config))
  assert all(name in str(caught.value) for name in names)
  with pytest.raises(ValueError, match="maps cannot be dropped alone"):
    export.drop(hires, ["maps"])
  dropped = export.drop(hires, features.parse("maps,refinement,recovery"))
  assert export.features_of(dropped) == {}
  leaf = hires["layers_1"]["self_attn"]["q_proj"]["weight"]
  native = np.asarray(features.effective_weight(leaf)).astype(np.float32)
  same(
    dropped["layers_1"]["self_attn"]["q_proj"]["weight"].weight, mxfp4.encode(native)
  )


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="got colour; use these names"):
    features.parse("maps,colour")


MAPS = {
  "none": lambda rng: None,
  "dense": lambda rng: input_maps.BlockDense(
    jnp.asarray(np.eye(32) + 0.1 * rng.normal(size=(2, 32, 32)), jnp.float32)
  ),
  "hadamard": lambda rng: input_maps.Hadamard(
    64, jnp.asarray(rng.choice([-1, 1], 64), jnp.int8)
  ),
  "kronecker": lambda rng: input_maps.Kronecker(
    jnp.asarray(rng.normal(size=(8, 8)), jnp.float32),
    jnp.asarray(rng.normal(size=(2, 4, 4)), jnp.float32),
  ),
  "two-level": lambda rng: input_maps.TwoLevel(
    jnp.asarray(rng.normal(size=(2, 2)), jnp.float32),
    jnp.asarray(rng.normal(size=(32, 32)), jnp.float32),
  ),
}


@pytest.mark.parametrize("name", MAPS)
def test_effective_weight_is_map_codes_and_gain_together(name):
  rng = np.random.default_rng(1)
  weight = mxfp4.encode(jnp.asarray(rng.normal(size=(48, 64)), jnp.float32))
  leaf = QuantizedLinear(weight, MAPS[name](rng), Unrounded(), jnp.float32(1.25))
  x = jnp.asarray(rng.normal(size=(7, 64)), jnp.float32)
  effective = np.asarray(features.effective_weight(leaf))
  assert effective.dtype == np.float64
  expected = np.asarray(linear(x, leaf), np.float64)
  ours = np.asarray(x, np.float64) @ effective.T
  assert np.abs(ours - expected).max() <= 2e-6 * np.abs(expected).max()
