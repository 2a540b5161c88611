import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.evaluation import device_calls
from mxjax.evaluation.device_calls import CallShapes
from mxjax.evaluation.measures.operator_error import operator_error, operator_errors
from mxjax.evaluation.measures.perplexity import perplexity, perturbed, window_losses
from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM
from mxjax.numerics.realization.activation_quantizers import Nearest
from tests.compiled import compiled_programs


@pytest.fixture(scope="module")
def setting(tiny_config):
  model = CausalLM(dataclasses.replace(tiny_config, tie_embeddings=False))
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  tokens = np.random.default_rng(0).integers(0, 61, (3, 40)).astype(np.int32)
  calib = mxjax.Calibration(model, tokens)
  return (
    model,
    params,
    tokens,
    mxjax.quantize(params, calib, "rtn", check=False, probe=False),
  )


def test_perplexity_equals_the_definition(setting):
  model, params, tokens, _ = setting
  logits = model.apply({"params": params}, jnp.asarray(tokens))
  logp = np.asarray(jax.nn.log_softmax(logits, -1), np.float64)[:, :-1]
  losses = -np.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0].mean(-1)
  np.testing.assert_allclose(window_losses(model, params, tokens), losses, rtol=1e-5)
  got = perplexity(model, params, tokens)
  assert got.mean == pytest.approx(float(np.exp(losses.mean())), rel=1e-5)
  assert got.spread == 0
  assert got.windows == 3


def test_replicates_perturb_the_embedding_only_slightly(setting):
  model, params, tokens, quantized = setting
  float_runs = perplexity(model, params, tokens, replicates=3)
  assert float_runs.spread < 1e-3 * float_runs.mean
  runs = perplexity(model, quantized, tokens, replicates=3)
  assert len(runs.values) == 3
  assert runs.mean == pytest.approx(np.mean(runs.values))
  changed = np.asarray(perturbed(params, 1)["embed_tokens"]["weight"])
  original = np.asarray(params["embed_tokens"]["weight"]).astype(np.float32)
  relative = np.abs(changed - original).max() / np.abs(original).max()
  assert 0 < relative < 1e-5


@pytest.mark.slow
def test_replicates_of_a_bfloat16_model_differ_too(setting):
  model, params, tokens, quantized = setting
  narrow = CausalLM(dataclasses.replace(model.config, dtype="bfloat16"))
  values = perplexity(narrow, quantized, tokens, replicates=3).values
  assert len(set(values)) == 3
  original = np.asarray(params["embed_tokens"]["weight"], np.float32)
  changed = perturbed(params, 1, jnp.bfloat16)["embed_tokens"]["weight"]
  assert changed.dtype == jnp.bfloat16
  moved = np.asarray(changed, np.float32) - original
  assert ((moved != 0).sum(1) == 1).all()
  ratio = np.abs(np.asarray(changed, np.float32) / original)[moved != 0]
  assert (ratio > 1).all() and (ratio <= 1 + 2**-7).all()


def test_operator_error_equals_the_definition(setting):
  model, params, tokens, quantized = setting
  errors = operator_errors(model, params, quantized, tokens[:1])
  assert len(errors) == 14
  hidden = model.embed(params, jnp.asarray(tokens[:1]))
  _, taps = model.layer_with_taps(params["layers_0"], hidden)
  x = np.asarray(taps["gate_up_input"], np.float64)[0]
  weight = np.asarray(params["layers_0"]["mlp"]["up_proj"]["weight"], np.float64)
  leaf = quantized["layers_0"]["mlp"]["up_proj"]["weight"]
  got = np.asarray(linear(taps["gate_up_input"], leaf), np.float64)[0]
  exact = x @ weight.T
  expected = ((got - exact) ** 2).sum() / (exact**2).sum()
  assert errors["layers_0/mlp/up_proj"] == pytest.approx(expected, rel=1e-4)
  mean = operator_error(model, params, quantized, tokens[:1])
  assert mean == pytest.approx(np.mean(list(errors.values())))


SEEN = []


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alone(Nearest):
  runs_alone = True

  def round_mapped(self, blocks, rules):
    SEEN.append(isinstance(blocks, jax.core.Tracer))
    return super().round_mapped(blocks, rules)


@pytest.mark.slow
def test_a_rule_that_runs_alone_is_a_part_of_no_layers_program(setting):
  model, _, tokens, quantized = setting
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  alone = jax.tree.map(
    lambda n: dataclasses.replace(n, rounding=Alone()) if is_linear(n) else n,
    quantized,
    is_leaf=is_linear,
  )
  SEEN.clear()
  losses = window_losses(model, alone, tokens)
  assert SEEN == [False] * (2 * 7 * len(tokens))
  # Whatever compiles them, codes near an edge may fall to the other side.
  expected = window_losses(model, quantized, tokens)
  np.testing.assert_allclose(losses, expected, rtol=2e-3)


def test_windows_too_short_are_refused(setting):
  model, params, _, _ = setting
  with pytest.raises(ValueError, match="length >= 2"):
    perplexity(model, params, np.zeros((2, 1), np.int32))


FIXED = CallShapes(tokens=160, row=64, is_fixed=True, head=32, head_step=32)
"""Four windows of 40 tokens a call."""


def test_a_gpus_call_has_as_many_windows_as_fit():
  assert [device_calls.GPU.windows(n) for n in (2048, 512, 300, 9000)] == [2, 8, 13, 1]
  assert device_calls.CPU.windows(512) == 1
  calls = device_calls.filled_calls(np.arange(5)[:, None], 2)
  assert [call.ravel().tolist() for call in calls] == [[0, 1], [2, 3], [4, 4]]


def test_windows_that_share_a_call_have_the_same_losses(setting):
  model, params, tokens, quantized = setting
  several = np.concatenate([tokens, tokens[::-1]])[:5]
  for tree, bound in ((params, 1e-5), (quantized, 2e-3)):
    # Only sums have another order; under 4 bits that can move an input.
    together = window_losses(model, tree, several, shapes=FIXED)
    np.testing.assert_allclose(
      together, window_losses(model, tree, several), rtol=bound
    )


def test_another_text_compiles_nothing_and_layers_share_a_program(setting):
  model, params, tokens, _ = setting
  with compiled_programs() as names:
    window_losses(model, params, tokens, shapes=FIXED)
  assert model.num_layers == 2 and names.count("_layer") <= 1
  with compiled_programs() as names:
    window_losses(model, params, np.concatenate([tokens] * 3), shapes=FIXED)
  assert names == []
