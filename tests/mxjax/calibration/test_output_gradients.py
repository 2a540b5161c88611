"""Output gradients and Fisher weights against whole-model differentiation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import fisher, output_gradients
from mxjax.calibration.calibration import Calibration
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.calibration.output_gradients import OutputGradients
from mxjax.devices.placement import ONE_DEVICE
from mxjax.numerics import mxfp4
from tests.cases import slow


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:3])


def sampled(model, params, tokens, place):
  """The labels that the library draws for a sequence."""
  likely = jax.nn.softmax(model.apply({"params": params}, tokens[None])[0])
  key = jax.random.fold_in(jax.random.key(output_gradients.LABEL_SEED), place)
  keys = [jax.random.fold_in(key, position) for position in range(len(tokens))]
  return output_gradients.draw_labels(jnp.stack(keys), likely)


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, *slow(61, 256), 700])
def test_labels_are_drawn_by_their_probabilities(words):
  """Where a uniform number falls among the sums of all words before each."""
  keys = jax.random.split(jax.random.key(1), 4000)
  scores = 2 * jax.random.normal(jax.random.key(2), (words,))
  likely = jax.nn.softmax(scores).at[words // 2 + 1 :: 3].set(0)
  labels = output_gradients.draw_labels(keys, jnp.tile(likely, (4000, 1)))
  assert labels.dtype == jnp.int32
  ends = np.cumsum(np.asarray(likely, np.float64))
  uniform = np.asarray([jax.random.uniform(key) for key in keys], np.float64)
  expected = np.searchsorted(ends, uniform * ends[-1], side="right")
  assert (np.asarray(labels) != expected).mean() < 1e-3
  assert (np.asarray(likely)[labels] > 0).all()
  share = np.bincount(labels, minlength=words) / len(keys)
  wanted = np.asarray(likely / likely.sum())
  assert (np.abs(share - wanted) <= 5 * np.sqrt(wanted / len(keys)) + 1e-3).all()


@pytest.mark.slow
def test_gradients_are_those_of_the_whole_model(tiny_model, tiny_params, calib):
  """A bias on a linear's output, as one would differentiate by hand.

  Of the first half of a sequence, whose tokens see nothing of the second.
  """
  index, place = 0, 1
  tokens = jnp.asarray(calib.tokens[place, :16])
  labels = sampled(tiny_model, tiny_params, tokens, place)

  def loss(step):
    hidden = tiny_model.embed(tiny_params, tokens[None])
    for layer in range(tiny_model.num_layers):
      hidden = tiny_model.layer(tiny_params[f"layers_{layer}"], hidden)
      hidden = hidden + step if layer == index else hidden
    scores = jax.nn.log_softmax(tiny_model.logits(tiny_params, hidden)[0])
    return -jnp.take_along_axis(scores, labels[:, None], -1).sum()

  expected = jax.grad(loss)(jnp.zeros((1, len(tokens), 64), jnp.float32))
  found = OutputGradients().compute(tiny_params, calib).leaving(index)[place]
  size = jnp.abs(expected).max()
  assert size > 0
  # They are kept in bfloat16.
  excess = jnp.abs(found.astype(jnp.float32) - expected) - 2**-8 * jnp.abs(expected)
  assert excess.max() < 1e-4 * size


def test_the_head_draws_labels_and_goes_back_at_once(tiny_model, tiny_params):
  """Differentiating the loss would compute the scores and draw the labels again."""
  hidden, places = jnp.ones((1, 8, 64)), jnp.arange(1)
  run = lambda hidden: output_gradients._of_final_hidden(
    tiny_model, tiny_params, hidden, places, ONE_DEVICE
  )
  program = str(jax.make_jaxpr(run)(hidden))
  assert program.count("random_bits") == 1
  # Of more positions, it holds the probabilities of a few at once.
  program = str(jax.make_jaxpr(run)(jnp.ones((1, 150, 64))))
  words = tiny_model.config.vocab_size
  assert f"[64,{words}]" in program
  assert f"150,{words}]" not in program


def test_files_chunks_and_memory_give_the_same_bits(tiny_params, calib, tmp_path):
  alone = OutputGradients().compute(tiny_params, calib)
  together = OutputGradients().compute(tiny_params, calib, chunk=2)
  on_disk = OutputGradients(tmp_path / "gradients").compute(tiny_params, calib)
  again = OutputGradients(tmp_path / "gradients")
  for index in range(2):
    expected = jnp.concatenate(alone.leaving(index))
    for other in (together, on_disk, again):
      np.testing.assert_array_equal(jnp.concatenate(other.leaving(index)), expected)
  on_disk.release(0)
  assert [file.name for file in (tmp_path / "gradients").iterdir()] == [
    "leaving-1.safetensors"
  ]


@pytest.mark.slow
def test_stored_gradients_serve_no_chunks_of_other_sizes(tiny_params, calib, tmp_path):
  tokens = np.tile(calib.tokens, (2, 1))[:5]
  for chunk, length, sizes in ((3, 32, [3, 2]), (4, 32, [4, 1]), (4, 24, [4, 1])):
    cut = dataclasses.replace(calib, tokens=tokens[:, :length])
    made = OutputGradients(tmp_path).compute(tiny_params, cut, chunk=chunk)
    shapes = [part.shape[:2] for part in made.leaving(0)]
    assert shapes == [(size, length // 2) for size in sizes]


def test_stored_gradients_of_another_dtype_are_computed_anew(
  tiny_params, calib, tmp_path, monkeypatch
):
  """A shared store may have been filled by a release that kept float32."""
  with monkeypatch.context() as patch:
    patch.setattr(output_gradients, "STORED", jnp.float32)
    older = OutputGradients(tmp_path).compute(tiny_params, calib).leaving(1)
  assert older[0].dtype == jnp.float32
  found = OutputGradients(tmp_path).compute(tiny_params, calib).leaving(1)
  assert found[0].dtype == jnp.bfloat16


def inputs_of(rng, sequences=3, blocks=2, length=8, rows=5):
  chunks = [
    jnp.asarray(rng.standard_normal((1, blocks, 32, length)), jnp.float32)
    for _ in range(sequences)
  ]
  gradients = [
    jnp.asarray(rng.standard_normal((1, length, rows)), jnp.float32)
    for _ in range(sequences)
  ]
  gradients[1] = gradients[1].at[0, 3].mul(100.0)
  return LinearInputs(chunks).for_linear("one", gradients=gradients), chunks, gradients


def test_token_weights_and_moments_follow_their_definition(float64):
  rng = np.random.default_rng(0)
  inputs, chunks, gradients = inputs_of(rng)
  view = fisher.weighted(inputs)
  squares = np.square(np.concatenate(gradients).astype(np.float64)).sum(-1)
  relative = np.minimum(squares / squares.mean(), 20)
  omega = 0.3 + 0.7 * relative / relative.mean()
  np.testing.assert_allclose(view.token_weights, omega, rtol=1e-5)
  assert omega[1, 3] == omega.max() > 5
  x = np.concatenate(chunks).astype(np.float64).transpose(0, 3, 1, 2).reshape(3, 8, 64)
  hessian = np.einsum("st,sti,stj->ij", omega, x, x) / 24
  np.testing.assert_allclose(view.hessian(), hessian, rtol=1e-4, atol=1e-6)
  blocks = np.stack([hessian[:32, :32], hessian[32:, 32:]])
  np.testing.assert_allclose(view.moment(), blocks, rtol=1e-4, atol=1e-6)
  # The view that it came from still counts tokens equally.
  plain = np.einsum("sti,stj->ij", x, x) / 24
  np.testing.assert_allclose(inputs.hessian(), plain, rtol=1e-4, atol=1e-6)


def test_a_token_without_a_gradient_weighs_one():
  inputs, _, gradients = inputs_of(np.random.default_rng(0))
  halves = [part[:, :4] for part in gradients]
  of_whole, of_halves = (
    fisher.weighted(inputs.for_linear("one", gradients=parts)).token_weights
    for parts in (gradients, halves)
  )
  assert of_whole.shape == of_halves.shape == (3, 8)
  assert (of_halves[:, 4:] == 1).all()
  np.testing.assert_allclose(of_halves[:, :4].mean(), 1, rtol=1e-6)
  assert (of_halves[:, :4] != 1).all()


def test_the_output_moment_follows_its_definition(float64):
  rng = np.random.default_rng(1)
  inputs, _, gradients = inputs_of(rng)
  weight = rng.standard_normal((5, 64))
  rows = np.concatenate(gradients).astype(np.float64).reshape(-1, 5)
  used = rows @ weight
  found = fisher.output_moment(
    mxfp4.to_blocks(jnp.asarray(weight, jnp.float32)), inputs
  )
  for b, part in enumerate((slice(0, 32), slice(32, 64))):
    of_gradients = used[:, part].T @ used[:, part] / np.square(rows).sum()
    uniform = weight[:, part].T @ weight[:, part] / 5
    expected = 0.3 * uniform + 0.7 * of_gradients
    np.testing.assert_allclose(found[b], expected, rtol=1e-4, atol=1e-6)


def test_the_gradient_moment_follows_its_definition():
  """Wider than a tile of the sums."""
  inputs, _, gradients = inputs_of(np.random.default_rng(3), rows=200)
  rows = np.concatenate(gradients).astype(np.float64).reshape(-1, 200)
  expected = 0.3 * np.eye(200) + 0.7 * 200 * rows.T @ rows / np.square(rows).sum()
  found = fisher.gradient_moment(inputs)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_linears_on_one_tensor_have_gradient_moments_of_their_own():
  """Their views share a cache until tokens are weighted."""
  inputs, _, gradients = inputs_of(np.random.default_rng(4))
  other = inputs.for_linear("other", gradients=[part[..., ::-1] for part in gradients])
  for view in (lambda one: one, fisher.weighted):
    first, second = (fisher.gradient_moment(view(one)) for one in (inputs, other))
    np.testing.assert_allclose(second, first[::-1, ::-1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(first, second)


def test_a_linear_without_influence_is_refused():
  inputs, _, gradients = inputs_of(np.random.default_rng(2))
  dead = inputs.for_linear("dead", gradients=[jnp.zeros_like(g) for g in gradients])
  with pytest.raises(ValueError, match="no influence on the predictions"):
    fisher.weighted(dead)
