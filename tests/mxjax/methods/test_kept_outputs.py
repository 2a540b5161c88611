"""What a step of scale distillation keeps between its two passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration
from mxjax.methods import scale_distillation
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics import mxfp4


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:4])


def step_of(model, params, calib):
  """A step on the quantized model, as the tuning takes it."""
  quantized = mxjax.quantize(params, calib, "brq", check=False, probe=False)
  objective = scale_distillation.PredictionDivergence(model, mxfp4.PAPER_RULES)
  layers = [quantized[model.layer_name(index)] for index in range(model.num_layers)]
  own = ScaleDistillation().initial(layers, model)
  ids = jnp.asarray(calib.tokens[:1])
  teacher = streams.final_hiddens(model, params, [ids])[0]
  example = gradients.Example(ids, teacher, jnp.float32(0.1))
  take = lambda: gradients.gradients(objective, quantized, None, own, [example])
  return objective, layers[0], own[0], take


def test_what_the_forward_pass_keeps_changes_no_gradient(
  tiny_model, tiny_params, calib, monkeypatch
):
  """Layers keep their outputs as long as there is room, and others run again."""
  objective, layer, _, take = step_of(tiny_model, tiny_params, calib)
  kept, ran = gradients._forward_keeping, []

  def counting(*args):
    ran.append(args)
    return kept(*args)

  monkeypatch.setattr(gradients, "_forward_keeping", counting)
  size = 4 * calib.tokens.shape[1] * objective.kept_features(layer)
  found = {}
  for room, layers in ((size - 1, 0), (2 * size - 1, 1), (2 * size, 2)):
    monkeypatch.setattr(gradients, "KEPT_BYTES", room)
    ran.clear()
    found[layers] = take()
    assert len(ran) == layers
  for layers in (1, 2):
    assert found[layers].shown == found[0].shown
    for ours, expected in zip(
      jax.tree.leaves(found[layers].own), jax.tree.leaves(found[0].own), strict=True
    ):
      size = float(jnp.abs(expected).max())
      np.testing.assert_allclose(ours, expected, atol=1e-5 * size)


def test_the_backward_pass_computes_no_kept_output_again(
  tiny_model, tiny_params, calib
):
  objective, layer, own, _ = step_of(tiny_model, tiny_params, calib)
  hidden = jnp.ones((1, 8, 64))
  args = None, own, hidden, layer
  _, back = gradients._forward_keeping(objective, *args)
  again = lambda cotangent: gradients._backward(objective, "layer", 3, cotangent, *args)
  whole, kept = (
    str(jax.make_jaxpr(run)(hidden)).count("dot_general")
    for run in (again, lambda cotangent: gradients._pull(back, cotangent))
  )
  # A product of each of the seven linears; their maps are other operations.
  assert whole - kept >= 7


def test_logits_of_few_positions_are_in_memory_at_once(tiny_model, tiny_params):
  objective = scale_distillation.PredictionDivergence(tiny_model, mxfp4.PAPER_RULES)
  outer = streams.outer_params(tiny_model, tiny_params)
  hidden, ids = jnp.ones((1, 150, 64)), jnp.zeros((1, 150), jnp.int32)
  example = gradients.Example(ids, hidden, jnp.float32(0.1))
  run = lambda hidden: gradients._loss_gradient(objective, None, hidden, outer, example)
  program, words = str(jax.make_jaxpr(run)(hidden)), tiny_model.config.vocab_size
  assert f"[64,{words}]" in program
  assert f"150,{words}]" not in program
