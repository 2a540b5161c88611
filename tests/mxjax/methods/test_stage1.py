"""HiRes' interaction K as a step of the method."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from mxjax import methods
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods.hires import stage1
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.shaping import local_interaction


def test_the_recorded_norm_of_k_is_its_spectral_norm(monkeypatch):
  """The paper bounds the spectral norm; the Frobenius norm is larger."""
  interactions = []
  original = local_interaction.shaping_transform

  def spy(chart, interaction):
    interactions.append(np.asarray(interaction))
    return original(chart, interaction)

  monkeypatch.setattr(local_interaction, "shaping_transform", spy)
  rng = np.random.default_rng(0)
  draw = lambda n: jnp.asarray(rng.standard_normal((n, 64)), jnp.float32)
  # Both folds are the same, so that the threshold leaves something of K.
  inputs = LinearInputs([jnp.stack([mxfp4.to_blocks(draw(96))] * 2)])
  weight = mxfp4.to_blocks(jnp.repeat(draw(40), 2, axis=0))
  program = dataclasses.replace(methods.HIRES, use_balance=False)
  with precision.float64_scope():
    record = program.shape(weight, inputs).record
  (interaction,) = interactions
  recorded = np.asarray(record["interaction_spectral_norm"])
  np.testing.assert_allclose(recorded, np.linalg.norm(interaction, 2, (1, 2)))
  assert (recorded < np.linalg.norm(interaction, axis=(1, 2))).all()
  assert (recorded <= local_interaction.RADIUS).all()
  assert (recorded > 0).any()


def test_without_k_the_pass_that_it_needs_does_not_run(monkeypatch):
  monkeypatch.setattr(stage1, "interaction", None)
  inputs = LinearInputs([jnp.ones((1, 2, 32, 8))])
  weight = mxfp4.to_blocks(jnp.ones((5, 64)))
  program = dataclasses.replace(methods.HIRES, use_balance=False, use_interaction=False)
  with precision.float64_scope():
    input_map, record = program.shape(weight, inputs)
  assert jnp.isfinite(input_map.matrix).all()
  assert not np.any(record["interaction_spectral_norm"])
