"""What a step of scale distillation holds in memory."""

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration
from mxjax.methods import scale_distillation
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics import mxfp4


def test_logits_of_few_positions_are_in_memory_at_once(tiny_model, tiny_params):
  objective = scale_distillation.PredictionDivergence(tiny_model, mxfp4.PAPER_RULES)
  outer = streams.outer_params(tiny_model, tiny_params)
  hidden, ids = jnp.ones((1, 150, 64)), jnp.zeros((1, 150), jnp.int32)
  example = gradients.Example(ids, hidden, jnp.float32(0.1))
  run = lambda hidden: gradients._loss_gradient(objective, None, hidden, outer, example)
  program, words = str(jax.make_jaxpr(run)(hidden)), tiny_model.config.vocab_size
  assert f"[64,{words}]" in program
  assert f"150,{words}]" not in program


@pytest.mark.slow
def test_a_step_keeps_one_hidden_state_of_each_layer(
  tiny_model, tiny_params, tiny_tokens, monkeypatch
):
  """And nothing of what layers compute: at the loss, the memory of a build peaks."""
  calib = Calibration(tiny_model, tiny_tokens[:4])
  quantized = mxjax.quantize(tiny_params, calib, "brq", check=False, probe=False)
  objective = scale_distillation.PredictionDivergence(tiny_model, mxfp4.PAPER_RULES)
  layers = [quantized[tiny_model.layer_name(i)] for i in range(tiny_model.num_layers)]
  own = ScaleDistillation().initial(layers, tiny_model)
  ids, hidden = jnp.asarray(calib.tokens[:1]), jnp.ones((1, calib.tokens.shape[1], 64))
  example = gradients.Example(ids, hidden, jnp.float32(0.1))
  differentiate, new = gradients._loss_gradient, []
  before = jax.live_arrays()
  known = {id(array) for array in before}

  def counting(*args):
    new.extend(array for array in jax.live_arrays() if id(array) not in known)
    return differentiate(*args)

  monkeypatch.setattr(gradients, "_loss_gradient", counting)
  gradients.gradients(objective, quantized, None, own, [example])
  assert [array.shape for array in new] == [hidden.shape] * (len(layers) + 1)
