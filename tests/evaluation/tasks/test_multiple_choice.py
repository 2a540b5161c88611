import jax
import numpy as np
import pytest

from mxjax.evaluation.tasks import multiple_choice as mc
from mxjax.evaluation.tasks import tasks


class Letters:
  """One id a letter, but a space and the letter after it are one token."""

  prefix_ids = ()
  eos_id = 0

  def encode(self, text):
    ids, index = [], 0
    while index < len(text):
      wide = text[index] == " " and index + 1 < len(text)
      ids.append(1 + (ord(text[index + wide]) + 30 * wide) % 60)
      index += 1 + wide
    return np.asarray(ids, np.int32)


@pytest.fixture(scope="module")
def score(tiny_model, tiny_params):
  return lambda requests, longest=128: mc.score(
    tiny_model, tiny_params, requests, max_length=longest
  )


@pytest.fixture(scope="module")
def logits(tiny_model, tiny_params):
  """The logits of ids by the whole model, float64; padded, so that it compiles once."""
  run = jax.jit(tiny_model.apply)

  def of(ids):
    padded = np.pad(ids, (0, 64 - len(ids)))[None]
    return np.asarray(run({"params": tiny_params}, padded)[0, : len(ids)], np.float64)

  return of


@pytest.fixture(scope="module")
def requests():
  """Of many lengths, so that they fall into several batches."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(1, 61, n).astype(np.int32)
  sizes = [(1, 1), (5, 3), (31, 2), (32, 1), (33, 9), (60, 4), (2, 30)] * 7
  return [mc.Request(draw(a), draw(b)) for a, b in sizes]


def test_scores_are_those_of_the_whole_model_one_by_one(score, logits, requests):
  for request, found in list(zip(requests, score(requests), strict=True))[:7]:
    ids = np.concatenate(request)
    exact = logits(ids)
    logp = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    rows = logp[len(request.context) - 1 : len(ids) - 1]
    want = rows[np.arange(len(rows)), request.continuation].sum()
    assert found.log_likelihood == pytest.approx(want, abs=1e-4)
    greedy = (rows.argmax(-1) == request.continuation).all()
    assert found.is_greedy == greedy


def test_greedy_continuations_are_recognized(score, logits):
  ids = context = np.arange(1, 9, dtype=np.int32)
  for _ in range(3):
    ids = np.append(ids, np.int32(logits(ids)[-1].argmax()))
  good, bad = ids[8:], ids[8:].copy()
  bad[1] = (bad[1] + 1) % 61
  scores = score([mc.Request(context, good), mc.Request(context, bad)])
  assert [s.is_greedy for s in scores] == [True, False]


def test_the_order_of_requests_does_not_matter(score, requests):
  forward, backward = score(requests), score(requests[::-1])[::-1]
  np.testing.assert_allclose(
    *([s.log_likelihood for s in scores] for scores in (forward, backward)), atol=1e-4
  )


def test_long_requests_lose_their_oldest_tokens(score):
  rng = np.random.default_rng(3)
  context, end = (rng.integers(1, 61, n).astype(np.int32) for n in (100, 4))
  (long,) = score([mc.Request(context, end)], 32)
  (short,) = score([mc.Request(context[-29:], end)])
  assert long.log_likelihood == pytest.approx(short.log_likelihood, abs=1e-5)
  with pytest.raises(ValueError, match="that fit into .* got one of 4 tokens"):
    score([mc.Request(context, end)], 3)


def test_pairs_are_split_where_the_context_ends():
  encode = Letters().encode
  pair = mc.encode_pair(Letters(), "ab", " cd")
  np.testing.assert_array_equal(pair.context, encode("ab"))
  np.testing.assert_array_equal(pair.continuation, encode(" cd"))
  # The space that ends the context joins the next word.
  moved = mc.encode_pair(Letters(), "ab ", "cd")
  np.testing.assert_array_equal(moved.continuation, pair.continuation)
  empty = mc.encode_pair(Letters(), "", "cd")
  np.testing.assert_array_equal(empty.context, [0])
  with pytest.raises(ValueError, match="at least one token"):
    mc.encode_pair(Letters(), "ab", "")


def test_a_model_with_bos_gets_it_first():
  class WithBos(Letters):
    prefix_ids = (7,)

  pair = mc.encode_pair(WithBos(), "ab", " c")
  assert pair.context[0] == 7
  np.testing.assert_array_equal(pair.context[1:], Letters().encode("ab"))
  np.testing.assert_array_equal(mc.encode_pair(WithBos(), "", "c").context, [7])


def test_decisions_and_summary(tiny_model, tiny_params):
  item = tasks.Item("q", ("ab",) * 2, (" c", " cdefgh"), ("c", "cdefgh"), 1)
  measure = lambda task, items: mc.evaluate(
    tiny_model, tiny_params, Letters(), tasks.TASKS[task], items, max_length=64
  )
  summary, rows = measure("piqa", [item] * 3)
  row = rows[0]
  likelihoods = np.asarray(row["log_likelihoods"])
  assert row["prediction"] == likelihoods.argmax() == 0
  assert row["prediction_norm"] == (likelihoods / [1, 6]).argmax() == 1
  assert (summary["acc"], summary["acc_norm"]) == (0.0, 1.0)
  assert summary["accuracy"] == 1.0
  assert (summary["items"], summary["official_items"]) == (3, 1838)
  other, _ = measure("winogrande", [item])
  assert other["accuracy"] == 0.0
  assert other["token_sha256"] != summary["token_sha256"]
