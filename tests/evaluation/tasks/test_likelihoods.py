"""Requests packed into rows of trees have the scores of each request alone."""

import dataclasses

import jax
import numpy as np
import pytest

from mxjax.evaluation import device_calls
from mxjax.evaluation.device_calls import CallShapes
from mxjax.evaluation.tasks import likelihoods
from mxjax.evaluation.tasks.likelihoods import Request
from mxjax.models import CausalLM
from tests import tiny
from tests.cases import slow
from tests.compiled import compiled_programs

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


SMALL = CallShapes(tokens=64, row=32, is_fixed=False, head=8, head_step=4)
"""Several rows a batch and several batches, of rows that few requests fill."""
FIXED = dataclasses.replace(SMALL, is_fixed=True)
SHAPES = {"cut": SMALL, "fixed": FIXED}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
  monkeypatch.setattr(likelihoods, "GROUP", 2)


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


def check(model, params, shapes):
  given, run = requests(), jax.jit(lambda ids: model.apply({"params": params}, ids))
  # A greedy continuation as well, in a row with others.
  prompt = given[0].context
  greedy = run(np.pad(prompt, (0, 64 - len(prompt)))[None])[0, len(prompt) - 1].argmax()
  given.append(Request(prompt, np.asarray([greedy], np.int32)))
  progress = []
  found = likelihoods.score(
    model,
    params,
    given,
    max_length=64,
    on_progress=lambda *at: progress.append(at),
    shapes=shapes,
  )
  want = [alone(run, request) for request in given]
  got = [score.log_likelihood for score in found]
  np.testing.assert_allclose(got, [total for total, _ in want], rtol=1e-5, atol=1e-5)
  assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in want]
  assert found[-1].is_greedy
  assert progress[-1] == (len(given), len(given))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("family", ["llama", "window", *slow("qwen3", "olmo2")])
def test_scores_are_those_of_each_request_alone(family, shapes):
  check(*made(**FAMILIES[family]), SHAPES[shapes])


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


@pytest.mark.parametrize("shapes", SHAPES)
def test_models_of_the_protocol_alone_are_scored_one_request_a_row(shapes):
  model, params = made()
  check(OfYourOwn(model), params, SHAPES[shapes])


def test_a_shared_prefix_is_run_once():
  prompt = draw(100)
  ends = [np.asarray([first, 5, 6], np.int32) for first in range(1, 9)]
  given = [Request(prompt, np.append(end, draw(1))) for end in ends]
  count = lambda batches: sum((batch.tokens != 0).sum() for batch in batches)
  for shapes in (device_calls.CPU, device_calls.GPU):
    assert count(likelihoods._batches(given, 512, True, shapes)) == 100 + 8 * 3
    assert count(likelihoods._batches(given, 512, False, shapes)) == 8 * 103


def different(*sizes):
  """Requests of these sizes that share nothing."""
  filled = [np.full(size, first, np.int32) for first, size in enumerate(sizes, 1)]
  return [Request(ids, draw(1)) for ids in filled]


def batches(given, shapes, is_shared=True):
  return list(likelihoods._batches(given, 2048, is_shared, shapes))


def test_a_family_fills_up_a_row_before_the_last():
  assert [b.tokens.shape for b in batches(different(18, 30, 10), SMALL)] == [(2, 32)]


def test_a_row_of_little_is_not_padded_to_full_ones():
  made = batches(different(250, 249, 40), device_calls.CPU)
  assert [b.tokens.shape for b in made] == [(2, 256), (1, 64)]


def test_fixed_calls_have_two_widths_chosen_from_the_requests():
  widths = lambda *args: {b.tokens.shape for b in batches(*args)}
  gpu = device_calls.GPU
  assert widths(different(*range(20, 60)), gpu) == {(8, 512)}
  # Few tokens need rows of 1024: they join those of 2048.
  some = different(*[100] * 50, 600, 1500, 1501)
  assert widths(some, gpu) == {(8, 512), (2, 2048)}
  # Here most do.
  assert widths(different(100, *[600] * 20, 1500), gpu) == {(4, 1024), (2, 2048)}
  # Without trees padding counts, not keys.
  assert widths(different(*[100] * 50, 600), gpu, False) == {(32, 128), (4, 1024)}


def test_rows_of_one_sequence_each_have_no_tree():
  has_tree = lambda *args: [b.tree is not None for b in batches(*args)]
  assert has_tree(different(32, 30), FIXED) == [False]
  assert has_tree(different(32, 9, 10), FIXED) == [True]
  assert has_tree(different(32, 30), SMALL) == [True]
  prompt = draw(8)
  assert has_tree([Request(prompt, draw(2)), Request(prompt, draw(3))], FIXED) == [True]


def test_requests_of_other_lengths_compile_nothing():
  """The first need an embedding, a layer and a gather for both widths, and a head."""
  model, params = made(max_positions=1024)
  shapes = CallShapes(tokens=256, row=64, is_fixed=True, head=32, head_step=32)
  prompts = lambda *sizes: [
    Request(draw(size), draw(int(end))) for size in sizes for end in (2, 5, 3)
  ]
  score = lambda given: likelihoods.score(
    model, params, given, max_length=512, shapes=shapes
  )
  first = prompts(30, 12, 41, 25, 100, 8, 3)
  with compiled_programs() as names:
    score(first)
  assert sorted(names) == [*["_embed"] * 2, *["_layer"] * 2, "_predict", *["_take"] * 2]
  with compiled_programs() as names:
    score(prompts(*range(5, 50, 3), 120, 70))
    score(prompts(11, 90)[::-1])
  assert names == []


def test_what_choices_predict_alike_is_predicted_once(monkeypatch):
  model, params = made()
  predict, counts = likelihoods._predict, []
  counting = lambda *given: counts.append(len(given[-1])) or predict(*given)
  monkeypatch.setattr(likelihoods, "_predict", counting)
  prompt, alike = draw(9), draw(5)
  given = [Request(prompt, np.append(alike, np.int32(end))) for end in (3, 4)]
  for shapes in SHAPES.values():
    exact = dataclasses.replace(shapes, head_step=1)
    likelihoods.score(model, params, given, max_length=64, shapes=exact)
  assert counts == [5 + 2] * 2


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


@pytest.mark.parametrize("shapes", SHAPES)
def test_nothing_is_asked_of_no_requests(tiny_model, tiny_params, shapes):
  made = likelihoods.score(
    tiny_model, tiny_params, [], max_length=8, shapes=SHAPES[shapes]
  )
  assert made == []
