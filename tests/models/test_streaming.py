"""One sequence token by token: the cache that is kept, and the text that is shown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.models import generation
from mxjax.models.streaming import CHUNK, STEPS, PrefixCache, stream, text_pieces
from mxjax.numerics import implementations


@pytest.fixture
def cache(tiny):
  model, params, _ = tiny
  return PrefixCache(model, params, 96)


@pytest.fixture
def ran(monkeypatch):
  """Counts the tokens of every step; `None` is a prompt from its beginning."""
  steps, run, whole = [], generation.next_logits, generation.prefill

  def counted(model, params, past, tokens, position=None):
    steps.append(tokens.shape[1] if position is None else position + 1)
    return run(model, params, past, tokens, position)

  monkeypatch.setattr(generation, "next_logits", counted)
  started = lambda *args, **how: steps.append(None) or whole(*args, **how)
  monkeypatch.setattr(generation, "prefill", started)
  return steps


@pytest.mark.slow
def test_logits_are_those_of_the_whole_sequence_however_the_cache_was_filled(
  tiny, cache, ran
):
  model, params, _ = tiny
  rng = np.random.default_rng(0)
  ids = rng.integers(0, model.config.vocab_size, CHUNK + 9).astype(np.int32)
  other = np.concatenate([ids[:6], ids[::-1][:4]])
  run = jax.jit(lambda tokens: model.apply({"params": params}, tokens)[0])
  for asked, steps in (
    (ids, [None]),  # a prompt
    (np.append(ids, ids[:1]), [1]),  # the next token
    (other, [4]),  # another conversation after a shared beginning
    (other[:5], [1]),  # a shorter one: its last token runs again
    (np.append(other[:5], ids[4:]), [CHUNK, 5]),  # chunks, the last one padded
    (other[1:], [None]),  # nothing shared
  ):
    ran.clear()
    want = run(np.pad(asked, (0, CHUNK + 10 - len(asked)))[None])[len(asked) - 1]
    np.testing.assert_allclose(cache.logits(asked), want, atol=5e-5)
    assert ran == steps


@pytest.mark.slow
def test_a_chunk_fits_into_a_full_cache(tiny, ran):
  model, params, _ = tiny
  rng = np.random.default_rng(1)
  ids = rng.integers(0, model.config.vocab_size, 62).astype(np.int32)
  cache = PrefixCache(model, params, 64)
  cache.logits(ids[:50])
  want = model.apply({"params": params}, ids[None])[0, -1]
  np.testing.assert_allclose(cache.logits(ids), want, atol=5e-5)
  # Not in a larger cache: the last 32 positions, of which two are padding.
  assert ran == [None, 30] and cache._cache.capacity == 64


@pytest.mark.slow
def test_after_an_interruption_the_cache_starts_again(tiny, cache, monkeypatch):
  model, params, tokens = tiny
  ids = np.asarray(tokens[0, :7])
  cache.logits(ids[:5])

  def interrupted(*_, **__):
    raise KeyboardInterrupt

  want = model.apply({"params": params}, ids[None])[0, -1]
  for name in ("next_logits", "decode"):
    with monkeypatch.context() as patch:
      patch.setattr(generation, name, interrupted)
      with pytest.raises(KeyboardInterrupt):
        list(cache.tokens(ids, 2, generation.GREEDY))
    np.testing.assert_allclose(cache.logits(ids), want, atol=5e-5)


@pytest.mark.parametrize(
  "sampling", [{}, {"temperature": 2.0, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}]
)
def test_a_stream_has_the_tokens_of_generate(tiny, cache, sampling):
  model, params, tokens = tiny
  ids = np.asarray(tokens[0, :5])
  options = dict(max_new_tokens=8, key=jax.random.key(3), **sampling)
  want = generation.generate(model, params, jnp.asarray(ids[None]), **options)[0, 5:]
  got = list(stream(cache, ids, **options))
  assert got == want.tolist()
  end = got[4]
  first = got.index(end)
  assert list(stream(cache, ids, **options, eos_ids={end})) == got[:first]


@pytest.mark.slow
def test_a_gpu_makes_several_tokens_before_it_shows_them(tiny, cache, ran, monkeypatch):
  model, params, tokens = tiny
  ids = np.asarray(tokens[0, :5])
  want = list(stream(cache, ids, max_new_tokens=STEPS + 4))
  monkeypatch.setattr(implementations, "target_platform", lambda: "gpu")
  monkeypatch.setattr(generation, "_is_one_program", lambda *_: True)
  calls, run = [], generation.decode
  counted = lambda *args, **how: calls.append(how["steps"]) or run(*args, **how)
  monkeypatch.setattr(generation, "decode", counted)
  other = PrefixCache(model, params, 96)
  assert list(stream(other, ids, max_new_tokens=STEPS + 4)) == want
  assert calls == [STEPS, STEPS]
  # The cache keeps what ran, also where the text ended earlier.
  ran.clear()
  said = np.concatenate([ids, want[:2], [3]]).astype(np.int32)
  whole = model.apply({"params": params}, said[None])[0, -1]
  np.testing.assert_allclose(other.logits(said), whole, atol=5e-5)
  assert ran == [1]


def test_a_stream_ends_where_the_context_does(cache, tiny):
  ids = np.zeros(cache.limit - 3, np.int32)
  assert len(list(stream(cache, ids, max_new_tokens=10))) == 3
  with pytest.raises(ValueError, match="less than 96 tokens.*got 96"):
    next(stream(cache, np.zeros(96, np.int32), max_new_tokens=1))
  with pytest.raises(ValueError, match="0 < top_p <= 1, got 2"):
    next(stream(cache, ids, max_new_tokens=1, top_p=2.0))


def decode(ids):
  return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
  ("text", "stops", "want"),
  [
    ("héllo 😀.", (), "héllo 😀."),
    ("one\nUser: two", ("\nUser:",), "one"),
    ("one\nUseful", ("\nUser:",), "one\nUseful"),
    ("abcab", ("cab", "bc"), "a"),
    ("ends in the sto", ("stop",), "ends in the sto"),
    ("aab", ("ab",), "a"),
  ],
)
def test_pieces_stop_before_a_stop_string_and_hold_its_beginning_back(
  text, stops, want
):
  shown = ""
  for piece in text_pieces(text.encode(), decode, stops):
    assert piece.isprintable() or "\n" in piece
    shown += piece
    # Nothing that was shown is taken back.
    assert want.startswith(shown)
  assert shown == want


def test_pieces_are_shown_as_soon_as_they_are_known():
  tokens = iter("a😀bc".encode())
  pieces = text_pieces(tokens, decode, ("cd",))
  assert [next(pieces) for _ in range(3)] == ["a", "😀", "b"]
  assert list(pieces) == ["c"]


@pytest.mark.slow
def test_an_e4m3_cache_streams_the_tokens_of_generate(tiny):
  model, params, tokens = tiny
  ids = np.asarray(tokens[0, :9])
  want = generation.generate(
    model, params, ids[None], max_new_tokens=40, cache_format="e4m3"
  )
  cache = PrefixCache(model, params, 96, "e4m3")
  made = list(stream(cache, ids, max_new_tokens=40))
  np.testing.assert_array_equal(made, want[0, 9:])
  assert {a.dtype.name for a in jax.tree.leaves(cache._cache.layers)} == {"uint8"}
  # The next text shares a beginning, and its chunk is rounded alike.
  longer = np.append(ids, ids[::-1])
  fresh = PrefixCache(model, params, 96, "e4m3").logits(longer)
  np.testing.assert_allclose(cache.logits(longer), fresh, atol=5e-5)
