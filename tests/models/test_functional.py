import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.models import RopeScaling, functional
from tests.cases import slow

LENGTH = 9
SCALING = RopeScaling(
  factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)


def dense_attention(queries, keys, values, window=LENGTH):
  """Float64 numpy: every score at once."""
  q, k, v = (np.asarray(a, np.float64) for a in (queries, keys, values))
  group = q.shape[2] // k.shape[2]
  k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
  scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
  distance = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None]
  scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  return np.einsum("bhts,bshd->bthd", weights, v).reshape(*q.shape[:2], -1)


def attend(query_chunk, window=None):
  """Attention with a fixed chunk, compiled as a whole."""
  options = {"query_chunk": query_chunk, "window": window}
  return jax.jit(functools.partial(functional.causal_attention, **options))


@pytest.fixture
def qkv():
  random = np.random.default_rng(0)
  return [
    jnp.asarray(random.standard_normal((2, LENGTH, heads, 8)), jnp.float32)
    for heads in (6, 2, 2)
  ]


@pytest.mark.parametrize(
  ("query_chunk", "window"),
  [(chunk, None) for chunk in (1, 4, 8, 9, 10, 512)]
  + [(chunk, window) for chunk in (4, 512) for window in (1, 3, 20)],
)
def test_attention_equals_the_dense_form_at_every_boundary(qkv, query_chunk, window):
  """A window counts the query itself."""
  got = attend(query_chunk, window)(*qkv)
  expected = dense_attention(*qkv, window or LENGTH)
  np.testing.assert_allclose(got, expected, atol=2e-6)


def test_attention_does_not_look_ahead(qkv):
  queries, keys, values = qkv
  before = attend(4)(queries, keys, values)
  changed = attend(4)(queries, keys.at[:, 6:].set(1e3), values.at[:, 6:].set(-1e3))
  np.testing.assert_array_equal(before[:, :6], changed[:, :6])
  assert not np.allclose(before[:, 6:], changed[:, 6:])


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("query_chunk", [*slow(4), 5, *slow(512)])
def test_the_gradient_of_attention_is_that_of_softmax(qkv, query_chunk, window):
  """It searches no row for the maximum that every score of the row is reduced by."""

  def dense(queries, keys, values):
    keys, values = (jnp.repeat(a, 3, axis=2) for a in (keys, values))
    scores = jnp.einsum("bthd,bshd->bhts", queries, keys) / 8**0.5
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    seen = (distance >= 0) & (distance < (window or LENGTH))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights, values).reshape(2, LENGTH, -1)

  back = lambda attention: lambda *qkv: jax.vjp(attention, *qkv)[1](attention(*qkv))
  how = {"query_chunk": query_chunk, "window": window}
  chunked = functools.partial(functional.causal_attention, **how)
  found, expected = back(chunked)(*qkv), back(dense)(*qkv)
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
  assert " = eq " not in str(jax.make_jaxpr(back(chunked))(*qkv))


def test_the_gradient_of_attention_in_bfloat16_is_near_that_in_float32(qkv):
  back = lambda *qkv: jax.vjp(functional.causal_attention, *qkv)[1](
    functional.causal_attention(*qkv)
  )
  narrow = [a.astype(jnp.bfloat16) for a in qkv]
  wide = [a.astype(jnp.float32) for a in narrow]
  for ours, theirs in zip(back(*narrow), back(*wide), strict=True):
    assert ours.dtype == jnp.bfloat16
    gap = jnp.abs(ours.astype(jnp.float32) - theirs).max()
    assert gap < 0.02 * jnp.abs(theirs).max()


def test_branching_attention_has_a_gradient(qkv):
  """A row that does not branch is a tree, too."""
  line = np.arange(LENGTH, dtype=np.int32)
  positions = np.broadcast_to(line, (2, LENGTH))
  tree = functional.Tree(positions, np.full((2, LENGTH), LENGTH, np.int32))
  run = lambda tree: lambda *qkv: functional.causal_attention(*qkv, tree=tree)
  loss = lambda tree: lambda *qkv: jnp.square(run(tree)(*qkv)).sum()
  traced = jax.jit(lambda tree, *qkv: jax.grad(loss(tree), (0, 1, 2))(*qkv))
  for ours, theirs in zip(
    traced(tree, *qkv), jax.grad(loss(None), (0, 1, 2))(*qkv), strict=True
  ):
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_bfloat16_attention_has_float32_softmax(qkv):
  narrow = [a.astype(jnp.bfloat16) for a in qkv]
  got = attend(512)(*narrow)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    got.astype(jnp.float32), dense_attention(*narrow), atol=0.02, rtol=0.02
  )


def test_frequencies_form_the_geometric_series():
  frequencies = functional.inverse_frequencies(8, 10000.0)
  assert frequencies.dtype == np.float32
  np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths():
  plain = functional.inverse_frequencies(16, 10000.0)
  scaled = functional.inverse_frequencies(16, 10000.0, SCALING)
  assert scaled.dtype == np.float32
  ratio, wavelengths = scaled / plain, 2 * np.pi / plain
  np.testing.assert_array_equal(ratio[wavelengths < 16], 1.0)
  np.testing.assert_allclose(ratio[wavelengths > 64], 1 / 8)
  between = ratio[(wavelengths >= 16) & (wavelengths <= 64)]
  assert between.size
  assert np.all((between > 1 / 8) & (between < 1))


def test_rotary_scores_depend_on_the_distance_only():
  frequencies = functional.inverse_frequencies(8, 100.0)
  one = jax.random.normal(jax.random.key(3), (1, 1, 1, 8))
  turned = functional.rotary(jnp.tile(one, (1, 6, 1, 1)), frequencies)[0, :, 0]
  np.testing.assert_array_equal(turned[0], one[0, 0, 0])
  np.testing.assert_allclose(turned[1] @ turned[3], turned[2] @ turned[4], rtol=1e-5)
  np.testing.assert_allclose(
    jnp.linalg.norm(turned, axis=-1), jnp.full(6, jnp.linalg.norm(one)), rtol=1e-6
  )
