"""A new A4 rule and a new input map: one class and one registration each, no more."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.audit import verify
from mxjax.methods.program import Program, Realization, Shaping
from mxjax.models import CausalLM
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import activation_quantizers, gptq
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.storage import export
from mxjax.storage.export import features
from tests import tiny
from tests.mxjax.quantized import assert_same


@dataclasses.dataclass(frozen=True)
class Damped(ActivationQuantizer):
  """The nearest code of a share of each value."""

  share: jax.Array

  feature = "damping", "a share of the activations"

  def round_mapped(self, blocks, rules):
    return mxfp4.round_blocks(self.share[:, None, None] * blocks, rules)


@dataclasses.dataclass(frozen=True)
class Reversed(InputMap):
  """Every block back to front."""

  def apply(self, blocks):
    return blocks[:, ::-1]

  def fold(self, blocks):
    return self.apply(blocks)

  def conjugate(self, hessian):
    tiles = hessian.reshape(len(hessian) // 32, 32, len(hessian) // 32, 32)
    return tiles[:, ::-1, :, ::-1].reshape(hessian.shape)


@pytest.fixture(scope="module", autouse=True)
def registered():
  """Registers both for this file alone: tests elsewhere list what the library has."""
  activation_quantizers.register(Damped)
  input_maps.register(Reversed)
  yield
  del activation_quantizers.RULES["Damped"], input_maps.MAPS["Reversed"]
  del activation_quantizers.FEATURES["damping"]


class Toy(Program):
  def shape(self, weight, inputs):
    return Shaping(Reversed())

  def quantize_weight(self, weight, inputs, input_map):
    codes = gptq.round_to_nearest(weight, inputs.rules)
    return Realization(codes, Damped(jnp.full(len(weight), 0.75, jnp.float32)))


@pytest.mark.slow
def test_they_are_quantized_restored_run_and_audited(
  tiny_params, tiny_tokens, tmp_path
):
  model = CausalLM(tiny.config(num_layers=1))
  float_params = {key: tiny_params[key] for key in tiny_params if key != "layers_1"}
  calib = mxjax.Calibration(model, tiny_tokens)
  made = mxjax.quantize(float_params, calib, Toy(name="toy"), check=False, probe=False)
  leaf = made["layers_0"]["mlp"]["up_proj"]["weight"]
  assert (type(leaf.rounding), type(leaf.input_map)) == (Damped, Reversed)

  mxjax.save_checkpoint(tmp_path / "out", made, model.config)
  params = mxjax.restore_checkpoint(tmp_path / "out")[0]
  assert_same(params, made)
  logits = jax.jit(model.apply)({"params": params}, tiny_tokens)
  assert bool(jnp.isfinite(logits).all())

  audit = verify.verify(tmp_path / "out")
  assert audit.faults == [] and audit.counts["quantized linears"] == 7
  assert set(export.features_of(params)) == {"maps", "damping"}
  with pytest.raises(ValueError, match=r"damping \(a share of the activations\) in 7"):
    features.refuse("a format", export.features_of(params))
  assert export.features_of(export.drop(params, {"maps", "damping"})) == {}


@pytest.mark.parametrize(
  ("module", "base", "name"),
  [
    (activation_quantizers, ActivationQuantizer, "Nearest"),
    (input_maps, InputMap, "Hadamard"),
  ],
)
def test_a_name_is_given_once(module, base, name):
  with pytest.raises(ValueError, match=f"got {name}, which names"):
    module.register(dataclasses.dataclass(frozen=True)(type(name, (base,), {})))
