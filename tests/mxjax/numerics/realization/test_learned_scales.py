"""FOCUS's relaxation: its start, its export and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq, learned_scales
from mxjax.numerics.realization.learned_scales import LearnedScales

RCEIL = mxfp4.Rules(scale_rule="rceil")


def weights(seed=0, rows=24):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.standard_t(4, (2, 32, rows)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("tie_rule", ["away", "even"])
def test_without_learning_it_is_rtn_under_rceil(tie_rule):
  """m = 1 and infinite logits, codes and exponents alike, ties included."""
  weight = weights().at[0, :4, 0].set(jnp.asarray([6.0, 0.25, 0.75, 5.0]))
  rules = mxfp4.Rules(tie_rule=tie_rule)
  got = learned_scales.quantize_weight(
    weight, learned_scales.initial(2, 24, np.inf), rules
  )
  expected = gptq.round_to_nearest(
    weight, mxfp4.Rules(scale_rule="rceil", tie_rule=tie_rule)
  )
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tie_rule", ["away", "even"])
def test_what_was_trained_is_what_is_exported(tie_rule):
  rng = np.random.default_rng(1)
  weight, rules = weights(), mxfp4.Rules(tie_rule=tie_rule)
  learned = LearnedScales(
    jnp.asarray(rng.uniform(0.6, 1.5, (2, 24)), jnp.float32),
    jnp.asarray(rng.uniform(0.5, 6, (2, 4, 24)), jnp.float32),
  )
  relaxed = learned_scales.relaxed(weight, learned, rules)
  exported = learned_scales.quantize_weight(weight, learned, rules)
  np.testing.assert_array_equal(relaxed, exported.decoded)
  mxfp4.check_legal(exported.tensor())
  plain = learned_scales.quantize_weight(weight, learned_scales.initial(2, 24), rules)
  assert (np.asarray(exported.exponent) != np.asarray(plain.exponent)).any()


def test_gradients_are_those_of_the_relaxation():
  """d W^ / d m = (u_q - u) S / m inside, u_q S / m where clipped; c by the chain."""
  rng = np.random.default_rng(2)
  weight = weights(2, rows=8)
  learned = LearnedScales(
    jnp.asarray(rng.uniform(0.4, 1.2, (2, 8)), jnp.float32),
    jnp.asarray(rng.uniform(1, 3, (2, 4, 8)), jnp.float32),
  )
  probe = jnp.asarray(rng.standard_normal(weight.shape), jnp.float32)
  loss = lambda learned: (learned_scales.relaxed(weight, learned) * probe).sum()
  got = jax.grad(loss)(learned)
  made = learned_scales.quantize_weight(weight, learned)
  scale = 2.0 ** np.asarray(made.exponent, np.float64)[:, None]
  share = 1 / (1 + np.exp(-np.asarray(learned.logits, np.float64)))
  divisor = np.repeat(share, 8, axis=1)
  scaled = np.asarray(weight, np.float64) / scale / divisor
  inside = np.abs(scaled) < 6
  rounded = np.asarray(made.decoded, np.float64) / scale
  slope_m = (rounded - inside * scaled) * scale / np.asarray(learned.factor)[:, None]
  expected = (slope_m * probe).sum(1)
  np.testing.assert_allclose(got.factor, expected, rtol=1e-4, atol=1e-4)
  slope_c = -(inside * scaled) * scale / divisor * probe
  by_group = slope_c.reshape(2, 4, 8, 8).sum(2) * share * (1 - share)
  np.testing.assert_allclose(got.logits, by_group, rtol=1e-4, atol=1e-4)
  assert not inside.all()


def test_zero_blocks_and_zero_factors_stay_finite():
  weight = weights().at[0, :, 3].set(0.0)
  learned = learned_scales.initial(2, 24)
  learned = LearnedScales(learned.factor.at[1, 1].set(-1.0), learned.logits)
  loss = lambda learned: learned_scales.relaxed(weight, learned).sum()
  for leaf in jax.tree.leaves(jax.grad(loss)(learned)):
    assert bool(jnp.isfinite(leaf).all())
  made = learned_scales.quantize_weight(weight, learned)
  assert (np.asarray(made.decoded)[0, :, 3] == 0).all()
  mxfp4.check_legal(made.tensor())
