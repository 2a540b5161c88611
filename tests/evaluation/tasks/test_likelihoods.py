"""Requests packed into rows of trees have the scores of each request alone."""

import dataclasses

import jax
import numpy as np
import pytest

from mxjax.evaluation.tasks import likelihoods
from mxjax.evaluation.tasks.likelihoods import Request
from mxjax.models import CausalLM
from tests import tiny

FAMILIES = {
  "llama": {},
  "window": {"sliding_window": 5},
  "qwen3": {"qk_norm": "head"},
  "olmo2": {"qk_norm": "projection", "is_post_norm": True},
}
RNG = np.random.default_rng(0)


def draw(size):
  return RNG.integers(1, 61, size).astype(np.int32)


def requests():
  """Prompts shared in full, in part, or not; some longer than a row of 32."""
  prompt = draw(9)
  part = np.concatenate([prompt[:4], draw(3)])
  shared = [Request(prompt, draw(size)) for size in (1, 6, 2, 11)]
  alone = [Request(draw(size), draw(3)) for size in (1, 8, 20, 30, 60)]
  moved = Request(prompt[:6], np.concatenate([prompt[6:], draw(2)]))
  # More than the 64 positions of the model: the oldest tokens are cut.
  return [*shared, Request(part, draw(4)), *alone, moved, Request(draw(70), draw(5))]


@pytest.fixture
def small_rows(monkeypatch):
  """Several rows a batch and several batches, of rows that few requests fill."""
  monkeypatch.setattr(likelihoods, "ROW", 32)
  monkeypatch.setattr(likelihoods, "BATCH_TOKENS", 64)
  monkeypatch.setattr(likelihoods, "GROUP", 2)
  monkeypatch.setattr(likelihoods, "HEAD_CHUNK", 8)
  monkeypatch.setattr(likelihoods, "HEAD_STEP", 4)


def alone(run, request):
  """Float64 score by the whole model, of one request; padded: it compiles once."""
  ids = np.concatenate(request)[-65:-1]
  logits = run(np.pad(ids, (0, 64 - len(ids)))[None])[0, : len(ids)]
  logits = np.asarray(logits, np.float64)[-len(request.continuation) :]
  chosen = np.take_along_axis(logits, request.continuation[:, None], 1)[:, 0]
  total = (chosen - np.log(np.exp(logits).sum(-1))).sum()
  return total, bool((chosen == logits.max(-1)).all())


def made(**changes):
  model = CausalLM(tiny.config(vocab_size=64, **changes))
  params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  # Larger weights than an init's: attention must not be nearly uniform.
  return model, jax.tree.map(lambda leaf: leaf * (5 if leaf.ndim > 1 else 1), params)


def check(model, params):
  given, run = requests(), jax.jit(lambda ids: model.apply({"params": params}, ids))
  # A greedy continuation as well, in a row with others.
  prompt = given[0].context
  greedy = run(np.pad(prompt, (0, 64 - len(prompt)))[None])[0, len(prompt) - 1].argmax()
  given.append(Request(prompt, np.asarray([greedy], np.int32)))
  progress = []
  found = likelihoods.score(
    model, params, given, max_length=64, on_progress=lambda *at: progress.append(at)
  )
  want = [alone(run, request) for request in given]
  got = [score.log_likelihood for score in found]
  np.testing.assert_allclose(got, [total for total, _ in want], rtol=1e-5, atol=1e-5)
  assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in want]
  assert found[-1].is_greedy
  assert progress[-1] == (len(given), len(given))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_each_request_alone(small_rows, family):
  check(*made(**FAMILIES[family]))


@dataclasses.dataclass(frozen=True)
class OfYourOwn:
  """The protocol of a model and no more: `layer` takes no tree."""

  inner: CausalLM
  num_layers = 2
  projection_taps = CausalLM.projection_taps

  def layer_name(self, index):
    return self.inner.layer_name(index)

  def embed(self, params, tokens):
    return self.inner.embed(params, tokens)

  def layer(self, layer_params, hidden):
    return self.inner.layer(layer_params, hidden)

  def logits(self, params, hidden):
    return self.inner.logits(params, hidden)

  def apply(self, variables, tokens):
    return self.inner.apply(variables, tokens)


def test_models_of_the_protocol_alone_are_scored_one_request_a_row(small_rows):
  model, params = made()
  check(OfYourOwn(model), params)


def test_a_shared_prefix_is_run_once():
  prompt = draw(100)
  ends = [np.asarray([first, 5, 6], np.int32) for first in range(1, 9)]
  given = [Request(prompt, np.append(end, draw(1))) for end in ends]
  count = lambda batches: sum((batch.tokens != 0).sum() for batch in batches)
  assert count(likelihoods._batches(given, 512, is_shared=True)) == 100 + 8 * 3
  assert count(likelihoods._batches(given, 512, is_shared=False)) == 8 * 103


def shapes(given):
  return [b.tokens.shape for b in likelihoods._batches(given, 512, is_shared=True)]


def test_a_family_fills_up_a_row_before_the_last(small_rows):
  sizes = {1: 18, 2: 30, 3: 10}
  given = [Request(np.full(n, first, np.int32), draw(1)) for first, n in sizes.items()]
  assert shapes(given) == [(2, 32)]


def test_a_row_of_little_is_not_padded_to_full_ones():
  sizes = {1: 250, 2: 249, 3: 40}
  given = [Request(np.full(n, first, np.int32), draw(1)) for first, n in sizes.items()]
  assert shapes(given) == [(2, 256), (1, 64)]


def test_what_choices_predict_alike_is_predicted_once(monkeypatch):
  model, params = made()
  predict, counts = likelihoods._predict, []
  counting = lambda *given: counts.append(len(given[-1])) or predict(*given)
  monkeypatch.setattr(likelihoods, "_predict", counting)
  monkeypatch.setattr(likelihoods, "HEAD_STEP", 1)
  prompt, alike = draw(9), draw(5)
  given = [Request(prompt, np.append(alike, np.int32(end))) for end in (3, 4)]
  likelihoods.score(model, params, given, max_length=64)
  assert counts == [5 + 2]


@dataclasses.dataclass(frozen=True)
class Ties:
  """A head whose logits are its params."""

  def logits(self, params, hidden):
    return params[None]


def test_of_equal_logits_the_first_is_the_likeliest():
  logits = jax.numpy.asarray([[0.0, 2.0, 1.0, 2.0]] * 3)
  targets = np.asarray([1, 2, 3], np.int32)
  found, is_likeliest = likelihoods._predict(Ties(), logits, logits, targets)
  assert is_likeliest.tolist() == [True, False, False]
  total = np.log(np.exp([0.0, 2.0, 1.0, 2.0]).sum())
  np.testing.assert_allclose(found, np.asarray([2.0, 1.0, 2.0]) - total, rtol=1e-6)


def test_nothing_is_asked_of_no_requests(tiny_model, tiny_params):
  assert likelihoods.score(tiny_model, tiny_params, [], max_length=8) == []
