import dataclasses

import jax
import numpy as np
import pytest

from mxjax.evaluation import device_calls
from mxjax.evaluation.measures.agreement import KeptStates, agreement
from mxjax.models import CausalLM
from tests import refusals

# More than one chunk of the output head.
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 300)).astype(np.int32)


@pytest.fixture(scope="module")
def long_model(tiny_config):
  return CausalLM(dataclasses.replace(tiny_config, max_positions=512))


def test_kl_and_flips_equal_the_dense_float64_form(long_model, tiny_params):
  params = tiny_params
  louder = jax.tree.map(lambda leaf: 2 * leaf, params["layers_1"]["mlp"])
  other = params | {"layers_1": params["layers_1"] | {"mlp": louder}}
  got = agreement(long_model, params, other, TOKENS)
  run = jax.jit(long_model.apply)
  log_softmax = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))
  exact, ours = (
    log_softmax(np.asarray(run({"params": p}, TOKENS[:, :-1]), np.float64))
    for p in (params, other)
  )
  want = (np.exp(exact) * (exact - ours)).sum(-1)
  np.testing.assert_allclose(got.divergence, want, atol=1e-5)
  np.testing.assert_array_equal(got.is_flipped, exact.argmax(-1) != ours.argmax(-1))
  assert 0 < got.is_flipped.mean() < 1
  summary = got.to_dict()
  assert summary["predictions"] == 2 * 299
  assert summary["kl_mean"] == pytest.approx(want.mean(), rel=1e-3)
  assert summary["kl_median"] <= summary["kl_p99"] <= summary["kl_max"]


def test_windows_that_share_a_call_agree_as_much(long_model, tiny_params):
  params, other = tiny_params, jax.tree.map(lambda leaf: 2 * leaf, tiny_params)
  several = np.concatenate([TOKENS, TOKENS[:1, ::-1]])
  together = dataclasses.replace(device_calls.GPU, tokens=600)
  got = agreement(long_model, params, other, several, shapes=together)
  want = agreement(long_model, params, other, several)
  assert got.divergence.shape == (3, 299)
  np.testing.assert_allclose(got.divergence, want.divergence, atol=1e-5)
  np.testing.assert_array_equal(got.is_flipped, want.is_flipped)


def test_a_model_agrees_with_itself(long_model, tiny_params):
  got = agreement(long_model, tiny_params, tiny_params, TOKENS)
  np.testing.assert_allclose(got.divergence, 0, atol=1e-6)
  assert not got.is_flipped.any()


def test_kept_states_of_the_exact_model_give_the_same_bits(long_model, tiny_params):
  other = jax.tree.map(lambda leaf: 2 * leaf, tiny_params)
  width = tiny_params["embed_tokens"]["weight"].shape[1]
  want, kept = agreement(long_model, tiny_params, other, TOKENS), KeptStates()
  for _ in range(2):
    got = agreement(long_model, tiny_params, other, TOKENS, kept=kept)
    assert [states.shape for states in kept.states] == [(1, 299, width)] * 2
    np.testing.assert_array_equal(got.divergence, want.divergence, strict=True)
  # The same arrays in a dict of another caller are the same params.
  again = agreement(long_model, dict(tiny_params), other, TOKENS.copy(), kept=kept)
  np.testing.assert_array_equal(again.divergence, want.divergence, strict=True)
  # What is kept is used, here for the wrong windows.
  kept.states.reverse()
  got = agreement(long_model, tiny_params, other, TOKENS, kept=kept)
  assert (got.divergence != want.divergence).any()


def test_states_kept_of_something_else_are_refused_by_name(long_model, tiny_params):
  other, kept = jax.tree.map(lambda leaf: 2 * leaf, tiny_params), KeptStates()
  agreement(long_model, tiny_params, other, TOKENS, kept=kept)
  before = list(kept.states)
  longer = CausalLM(dataclasses.replace(long_model.config, max_positions=513))
  together = dataclasses.replace(device_calls.GPU, tokens=600)
  with_kept = lambda *inputs, **options: (
    lambda: agreement(*inputs, kept=kept, **options)
  )
  same = long_model, tiny_params, other
  place, mend = "agreement: kept", "pass a new KeptStates()"
  refusals.check(
    [
      (with_kept(longer, *same[1:], TOKENS), place, "other model;", mend),
      (with_kept(long_model, other, other, TOKENS), place, "other params;", mend),
      (with_kept(*same, TOKENS[:1]), place, "other tokens;", mend),
      (with_kept(*same, TOKENS[::-1]), place, "other tokens;", mend),
      (with_kept(*same, TOKENS, shapes=together), place, "windows of a call;", mend),
    ]
  )
  assert all(a is b for a, b in zip(kept.states, before, strict=True))


def test_a_comparison_that_fails_keeps_nothing(long_model, tiny_params):
  kept, other = KeptStates(), jax.tree.map(lambda leaf: 2 * leaf, tiny_params)
  short = {name: part for name, part in tiny_params.items() if name != "layers_1"}
  with pytest.raises(KeyError, match="layers_1"):
    agreement(long_model, tiny_params, short, TOKENS, kept=kept)
  assert not kept.states
  # So another model may use it.
  got = agreement(long_model, other, tiny_params, TOKENS, kept=kept)
  want = agreement(long_model, other, tiny_params, TOKENS)
  np.testing.assert_array_equal(got.divergence, want.divergence, strict=True)
