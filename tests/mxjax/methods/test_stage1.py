"""HiRes' interaction K as a step of the method."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import methods
from mxjax.audit import verify_linears
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods import program
from mxjax.methods.hires import stage1
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization import one_code
from mxjax.numerics.shaping import local_interaction
from mxjax.run import record


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
  monkeypatch.setattr(stage1, "fit_interaction", None)
  inputs = LinearInputs([jnp.ones((1, 2, 32, 8))])
  weight = mxfp4.to_blocks(jnp.ones((5, 64)))
  program = dataclasses.replace(methods.HIRES, use_balance=False, use_interaction=False)
  with precision.float64_scope():
    input_map, record = program.shape(weight, inputs)
  assert jnp.isfinite(input_map.matrix).all()
  assert not np.any(record["interaction_spectral_norm"])


@pytest.mark.slow
def test_narrow_maps_and_tables_fold_and_refine_as_they_are_stored():
  """The map is rounded before the fold, so that the function stays; tables after."""
  rng = np.random.default_rng(0)
  draw = lambda n: jnp.asarray(rng.standard_normal((n, 64)), jnp.float32)
  x, weight = jnp.stack([mxfp4.to_blocks(draw(96)) for _ in range(2)]), draw(40)
  wide, narrow = (
    methods.get(f"hires:use_balance=false:storage={name}")
    for name in ("float32", "bfloat16")
  )
  with precision.float64_scope():
    exact, rounded = (
      program.quantize_linear(weight, LinearInputs([x])).leaf
      for program in (wide, narrow)
    )
    folded = rounded.input_map.fold(mxfp4.to_blocks(weight).astype(jnp.float64))
  dtypes = lambda leaf: {str(a.dtype) for a in jax.tree.leaves(leaf)}
  for leaf, dtype in ((exact, "float32"), (rounded, "bfloat16")):
    assert dtypes((leaf.input_map, leaf.rounding)) == {dtype}
    assert list(verify_linears.faults(leaf, np.random.default_rng(1))) == []
  np.testing.assert_array_equal(
    rounded.input_map.matrix, exact.input_map.matrix.astype(jnp.bfloat16)
  )
  decoded = mxfp4.to_blocks(mxfp4.decode(rounded.weight, jnp.float32))
  gram, cross = one_code.tables(folded.astype(jnp.float32), decoded)
  ours = rounded.rounding.tables()
  for table, expected in zip(ours, (gram, cross), strict=True):
    tolerance = 2**-8 * np.abs(expected).max()
    np.testing.assert_allclose(table, expected, rtol=2**-8, atol=tolerance)


def test_every_inverse_of_a_small_matrix_runs_on_one_thread(monkeypatch):
  # With threads of OpenBLAS the inverses of a layer took a second beside other work.
  blas, inside = execution._blas(), []
  threads = lambda: {one["num_threads"] for one in blas.info()}
  for module, name in ((stage1, "_weight_side"), (program, "_fold")):
    actual = getattr(module, name)

    def counted(*args, actual=actual, name=name):
      inside.append((name, threads()))
      return actual(*args)

    monkeypatch.setattr(module, name, counted)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))
  inputs, weight = LinearInputs([draw(2, 2, 32, 64)]), draw(64, 64)
  with blas.limit(limits=2), precision.float64_scope():
    before = threads()
    leaf, _ = methods.get("hires").quantize_linear(weight, inputs)
    record.linear_record(weight, leaf, inputs)
    assert threads() == before
  assert [name for name, _ in inside] == ["_weight_side", "_fold", "_fold"]
  assert all(found == {1} for _, found in inside)
