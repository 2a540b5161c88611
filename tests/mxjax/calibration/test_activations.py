"""One trajectory of the calibration set: what enters a layer, and what it sees."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import streams
from mxjax.calibration.activations import Activations
from mxjax.calibration.calibration import Calibration
from mxjax.calibration.store import CalibrationStore
from mxjax.models import CausalLM
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


def test_staged_activations_are_those_of_the_computation_in_float16(
  tiny_params, calib, tmp_path
):
  layer, sides, places = tiny_params["layers_0"], [], set()
  for staged in ("compute", "float16"):
    activations = Activations.embed(tiny_params, calib, chunk=2, staged=staged)
    activations.observe(layer, PAPER_CONTRACT, ("value",))
    sides.append(activations.taps)
    places.add(CalibrationStore(tmp_path, tiny_params, calib, staged).path)
  assert len(places) == 2
  for wide, narrow in zip(*sides, strict=True):
    assert {array.dtype for array in wide.values()} == {jnp.dtype("float32")}
    rounded = {t: np.asarray(a).astype(np.float16) for t, a in wide.items()}
    assert {array.dtype for array in narrow.values()} == {jnp.dtype("float16")}
    jax.tree.map(np.testing.assert_array_equal, rounded, narrow)
  # Hidden states flow on as they are; what hooks read is float32 of the rounded.
  tap = calib.model.projection_taps["mlp", "down_proj"]
  view = activations.inputs(PAPER_CONTRACT)[tap].sequence(0)
  assert view.dtype == jnp.float32
  np.testing.assert_array_equal(view, sides[1][0][tap][0].astype(jnp.float32))
  activations.leave()
  assert activations.hidden[0].dtype == jnp.float32


def test_a_bfloat16_model_computes_and_captures_in_bfloat16(
  tiny_model, tiny_params, calib
):
  model = CausalLM(dataclasses.replace(tiny_model.config, dtype="bfloat16"))
  narrow = dataclasses.replace(calib, model=model)
  activations = Activations.embed(tiny_params, narrow, chunk=1)
  arrays = [*activations.copy().hidden]
  activations.observe(tiny_params["layers_0"], PAPER_CONTRACT, ("value",))
  for tap, view in activations.inputs(PAPER_CONTRACT).items():
    seen = view.sequence(0)
    assert seen.dtype == jnp.float32, tap
    np.testing.assert_array_equal(seen, seen.astype(jnp.bfloat16).astype(jnp.float32))
  arrays += [array for chunk in activations.taps for array in chunk.values()]
  activations.leave()
  # Perplexities read the hidden states that leave the last layer.
  arrays += [*activations.hidden]
  windows = [jnp.asarray(calib.tokens[:1])]
  arrays += streams.final_hiddens(model, tiny_params, windows)
  assert {array.dtype for array in arrays} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("peak", [65504.0, 65520.0])
def test_an_overflow_of_float16_is_one_sentence(tiny_params, calib, peak, monkeypatch):
  """The largest value stays; the next that rounds beyond it is refused."""
  original = type(calib.model).layer_with_taps

  def planted(self, layer, hidden):
    output, taps = original(self, layer, hidden)
    return output, taps | {"value": taps["value"].at[0, 3, 0, 0].set(peak)}

  monkeypatch.setattr(type(calib.model), "layer_with_taps", planted)
  streams.capture.clear_cache()
  activations = Activations.embed(tiny_params, calib, chunk=1, staged="float16")
  observe = lambda: activations.observe(
    tiny_params["layers_0"], PAPER_CONTRACT, ("value",)
  )
  if peak > 65504:
    told = r"3 of \d+ captured values of layers_0/value are beyond float16, whose larg"
    with pytest.raises(FloatingPointError, match=told):
      observe()
  else:
    observe()
    assert float(activations.taps[0]["value"][0, 3, 0, 0]) == peak
  streams.capture.clear_cache()


def test_an_overflow_of_the_float_model_names_the_layer(tiny_params, calib):
  layer = jax.tree.map(lambda a: a, tiny_params["layers_0"])
  layer["mlp"]["down_proj"]["weight"] = layer["mlp"]["down_proj"]["weight"] * jnp.inf
  activations = Activations.embed(tiny_params, calib, chunk=1)
  with pytest.raises(FloatingPointError, match="hidden values leaving layers_0 are"):
    activations.observe(layer, PAPER_CONTRACT)


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
