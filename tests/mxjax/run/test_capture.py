"""The calibration set on its way: what enters a layer, and what its linears see."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.calibration.store import CalibrationStore, params_digest
from mxjax.methods.hires import stage3
from mxjax.models import CausalLM
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run.capture import Captured, Trajectories
from mxjax.run.progress import Report
from mxjax.run.record import StageClock
from mxjax.run.setup import Setup

WITH_VALUES = dataclasses.replace(methods.RTN, recover=(stage3.ATTENTION,))


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:3])


def begun(params, calib, program=WITH_VALUES, **options):
  """The setup of a run, and its trajectories before the first layer."""
  setup = Setup.of(params, calib, program, PAPER_CONTRACT, **options)
  report = Report(setup.program, setup.model.num_layers, StageClock())
  return setup, Trajectories.begin(setup, None, report)


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_layer_sees_and_passes_on_what_the_model_computes(
  tiny_model, tiny_params, calib, chunk
):
  setup, trajectories = begun(tiny_params, calib, chunk=chunk)
  entering = tiny_model.embed(tiny_params, jnp.asarray(calib.tokens))
  layer = tiny_params["layers_0"]
  output, taps = tiny_model.layer_with_taps(layer, entering)
  captured = Captured(setup, trajectories, layer)
  tap = tiny_model.projection_taps["mlp", "down_proj"]
  view = captured.views[tap]
  close = lambda got, expected: np.testing.assert_allclose(got, expected, 1e-4, 1e-4)
  close(view.sequence(2), mxfp4.to_blocks(taps[tap][2]))
  close(jnp.concatenate([c["value"] for c in captured.taps]), taps["value"])
  captured.release_inputs()
  assert {name for chunk in captured.taps for name in chunk} == {"value"}
  trajectories.leave(captured)
  assert trajectories.index == 1
  close(jnp.concatenate(trajectories.entering()), output)
  close(jnp.concatenate(trajectories.fits[0]), entering)


def test_sums_over_sequences_do_not_depend_on_the_chunk_size(tiny_params, calib):
  hessians = []
  for chunk in (1, 2, 3):
    setup, trajectories = begun(tiny_params, calib, chunk=chunk)
    views = Captured(setup, trajectories, tiny_params["layers_0"]).views.values()
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
    setup, trajectories = begun(
      tiny_params, calib, methods.RTN, chunk=3, store=tmp_path
    )
    for index in range(2):
      captured = Captured(setup, trajectories, tiny_params[f"layers_{index}"])
      counts.append(len(calls))
      views = captured.views
      moments.append({tap: np.asarray(view.hessian()) for tap, view in views.items()})
      trajectories.leave(captured)
  assert counts == [0, 1, 2, 2] and len(calls) == 2
  jax.tree.map(np.testing.assert_array_equal, moments[:2], moments[2:])


def test_a_bfloat16_model_computes_and_captures_in_bfloat16(
  tiny_model, tiny_params, calib
):
  model = CausalLM(dataclasses.replace(tiny_model.config, dtype="bfloat16"))
  narrow = dataclasses.replace(calib, model=model)
  setup, trajectories = begun(tiny_params, narrow)
  arrays = [*trajectories.fits[0]]
  captured = Captured(setup, trajectories, tiny_params["layers_0"])
  for tap, view in captured.views.items():
    seen = view.sequence(0)
    assert seen.dtype == jnp.float32, tap
    np.testing.assert_array_equal(seen, seen.astype(jnp.bfloat16).astype(jnp.float32))
  arrays += [array for chunk in captured.taps for array in chunk.values()]
  trajectories.leave(captured)
  # Perplexities read the hidden states that leave the last layer.
  arrays += [*trajectories.entering()]
  windows = [jnp.asarray(calib.tokens[:1])]
  arrays += streams.final_hiddens(model, tiny_params, windows)
  assert {array.dtype for array in arrays} == {jnp.dtype("bfloat16")}


def test_an_overflow_of_the_float_model_names_the_layer(tiny_params, calib):
  layer = jax.tree.map(lambda a: a, tiny_params["layers_0"])
  layer["mlp"]["down_proj"]["weight"] = layer["mlp"]["down_proj"]["weight"] * jnp.inf
  setup, trajectories = begun(tiny_params, calib)
  with pytest.raises(
    FloatingPointError, match="layers_0: expected finite hidden values"
  ):
    Captured(setup, trajectories, layer)


def test_a_linear_sees_the_gradient_at_its_own_output(tiny_params, calib):
  """down_proj ends the layer, so its gradient is that of the layer's output."""
  layer, weighted = tiny_params["layers_0"], methods.get("rtn:weighting=fisher")
  setup, trajectories = begun(tiny_params, calib, weighted)
  leaving = trajectories.gradients.leaving(0)
  captured = Captured(setup, trajectories, layer)
  seen = {
    name: captured.inputs(block, name, None).gradients for block, name in setup.targets
  }
  for got, expected in zip(seen["down_proj"], leaving, strict=True):
    assert got.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, expected)
  for keys in seen["k_proj"]:
    assert keys.shape == (1, 16, 32)
    assert float(jnp.abs(keys).max()) > 0
  # What is captured does not depend on whether the layer is differentiated.
  plain_setup, plain_trajectories = begun(tiny_params, calib, methods.RTN)
  plain = Captured(plain_setup, plain_trajectories, layer)
  for tap, view in captured.views.items():
    np.testing.assert_array_equal(view.sequence(1), plain.views[tap].sequence(1))
  trajectories.leave(captured)
  plain_trajectories.leave(plain)
  jax.tree.map(
    np.testing.assert_array_equal,
    trajectories.entering(),
    plain_trajectories.entering(),
  )


def test_a_store_keeps_models_of_equal_weights_apart(
  tiny_params, tiny_config, tiny_tokens, tmp_path
):
  places = set()
  for changes in ({}, {"rope_theta": 5e5}, {"norm_eps": 1e-3}, {"dtype": "bfloat16"}):
    model = CausalLM(dataclasses.replace(tiny_config, **changes))
    places.add(
      CalibrationStore(tmp_path, tiny_params, Calibration(model, tiny_tokens)).path
    )
  assert len(places) == 4


def test_a_store_of_another_environment_is_not_used_and_said(
  tiny_params, calib, tmp_path, monkeypatch, caplog
):
  folders, moments = [], []
  for flags in ("--xla_a=1", "--xla_a=1", "--xla_a=2"):
    monkeypatch.setenv("XLA_FLAGS", flags)
    caplog.clear()
    setup, trajectories = begun(tiny_params, calib, methods.RTN, store=tmp_path)
    captured = Captured(setup, trajectories, tiny_params["layers_0"])
    moments.append([np.asarray(view.hessian()) for view in captured.views.values()])
    folders.append(trajectories.store.path)
    is_new = flags == "--xla_a=2"
    assert ("was computed in another environment" in caplog.text) == is_new
  assert "XLA_FLAGS {'--xla_a': '1'} there, {'--xla_a': '2'} here" in caplog.text
  assert folders[0] == folders[1] != folders[2]
  jax.tree.map(np.testing.assert_array_equal, moments[0], moments[2])
  for folder in folders:
    assert (folder / "about.json").is_file()


def test_a_digest_of_weights_is_of_every_value_name_shape_and_dtype(tiny_params):
  same = jax.tree.map(jnp.array, tiny_params)
  assert params_digest(same) == params_digest(tiny_params)
  weight = tiny_params["norm"]["weight"]
  renamed = {key: value for key, value in tiny_params.items() if key != "norm"}
  for other in (
    {**tiny_params, "norm": {"weight": weight.at[3].set(7)}},
    {**tiny_params, "norm": {"weight": weight[None]}},
    {**tiny_params, "norm": {"scale": weight}},
    {**tiny_params, "norm": {"weight": jax.lax.bitcast_convert_type(weight, "int16")}},
    {**renamed, "last": tiny_params["norm"]},
  ):
    assert params_digest(other) != params_digest(tiny_params)
