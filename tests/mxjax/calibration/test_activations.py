"""One trajectory of the calibration set: what enters a layer, and what it sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import streams
from mxjax.calibration.activations import Activations
from mxjax.calibration.calibration import Calibration
from mxjax.calibration.store import CalibrationStore
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:3])


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_layer_sees_and_passes_on_what_the_model_computes(
  tiny_model, tiny_params, calib, chunk
):
  activations = Activations.embed(tiny_params, calib, chunk=chunk)
  entering = tiny_model.embed(tiny_params, jnp.asarray(calib.tokens))
  layer = tiny_params["layers_0"]
  output, taps = tiny_model.layer_with_taps(layer, entering)
  copied = activations.copy()
  activations.observe(layer, PAPER_CONTRACT, ("value",))
  tap = tiny_model.projection_taps["mlp", "down_proj"]
  view = activations.inputs(PAPER_CONTRACT)[tap]
  close = lambda got, expected: np.testing.assert_allclose(got, expected, 1e-4, 1e-4)
  close(view.sequence(2), mxfp4.to_blocks(taps[tap][2]))
  close(jnp.concatenate([c["value"] for c in activations.taps]), taps["value"])
  activations.release_inputs()
  assert {name for chunk in activations.taps for name in chunk} == {"value"}
  activations.leave()
  assert activations.index == 1
  close(jnp.concatenate(activations.hidden), output)
  copied.advance(layer)
  close(jnp.concatenate(copied.hidden), output)


def test_sums_over_sequences_do_not_depend_on_the_chunk_size(tiny_params, calib):
  hessians = []
  for chunk in (1, 2, 3):
    activations = Activations.embed(tiny_params, calib, chunk=chunk)
    activations.observe(tiny_params["layers_0"], PAPER_CONTRACT)
    views = activations.inputs(PAPER_CONTRACT).values()
    hessians.append([np.asarray(view.hessian()) for view in views])
  jax.tree.map(np.testing.assert_array_equal, hessians[0], hessians[1])
  jax.tree.map(np.testing.assert_array_equal, hessians[0], hessians[2])


def test_with_a_store_a_layer_runs_only_where_nothing_stored_answers(
  tiny_params, calib, tmp_path, monkeypatch
):
  calls, original = [], streams.capture

  def capture(*args):
    calls.append(args)
    return original(*args)

  monkeypatch.setattr(streams, "capture", capture)
  counts, moments = [], []
  for _ in range(2):
    store = CalibrationStore(tmp_path, tiny_params, calib)
    activations = Activations.embed(tiny_params, calib, chunk=3, store=store)
    for index in range(2):
      activations.observe(tiny_params[f"layers_{index}"], PAPER_CONTRACT)
      counts.append(len(calls))
      views = activations.inputs(PAPER_CONTRACT)
      moments.append({tap: np.asarray(view.hessian()) for tap, view in views.items()})
      activations.leave()
  assert counts == [0, 1, 2, 2] and len(calls) == 2
  jax.tree.map(np.testing.assert_array_equal, moments[:2], moments[2:])


def test_an_overflow_of_the_float_model_names_the_layer(tiny_params, calib):
  layer = jax.tree.map(lambda a: a, tiny_params["layers_0"])
  layer["mlp"]["down_proj"]["weight"] = layer["mlp"]["down_proj"]["weight"] * jnp.inf
  activations = Activations.embed(tiny_params, calib, chunk=1)
  with pytest.raises(FloatingPointError, match="hidden values leaving layers_0 are"):
    activations.observe(layer, PAPER_CONTRACT)
