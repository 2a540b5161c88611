import contextlib
import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from mxjax import models
from mxjax.models import functional, generation
from mxjax.models.generation import generate, generate_each, sample
from mxjax.numerics import e4m3
from tests import refusals
from tests.cases import slow
from tests.models.conftest import ONE_A_FAMILY

UNCACHED = {"use_cache": False}
IN_PROGRAMS = {"tokens_at_once": 3}
COMPILED = []
"""What JAX compiled or took from its cache of programs, one entry each."""
jax.monitoring.register_event_duration_secs_listener(
  lambda name, *_, **__: (
    name.endswith("backend_compile_duration") and COMPILED.append(1)
  )
)


def in_each_family(*ways):
  """Every family generates in the first way, and the first family in each of them.

  The others of all pairs, which are one mechanism in two orders, are slow tests.
  """
  first = ONE_A_FAMILY[0]
  return [
    pytest.param(
      family, *way, marks=[pytest.mark.slow] * (family != first and index > 0)
    )
    for family in ONE_A_FAMILY
    for index, way in enumerate(ways)
  ]


@contextlib.contextmanager
def compiling(count):
  """Checks how many programs are compiled in the block."""
  before = len(COMPILED)
  yield
  assert len(COMPILED) - before == count


def greedy_by_hand(model, params, tokens, count):
  """Appends the argmax of a plain forward pass over exactly the prefix."""
  run = jax.jit(lambda x: model.apply({"params": params}, x)[:, -1].argmax(-1))
  for _ in range(count):
    best = run(tokens)
    tokens = np.concatenate([tokens, np.asarray(best, np.int32)[:, None]], axis=1)
  return tokens


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, *slow(UNCACHED), IN_PROGRAMS])
def test_greedy_equals_recomputing_the_bare_prefix(tiny, how):
  model, params, tokens = tiny
  prompts = tokens[:, :5]
  got = generate(model, params, prompts, max_new_tokens=4, **how)
  assert got.dtype == jnp.int32
  np.testing.assert_array_equal(got, greedy_by_hand(model, params, prompts, 4))
  none = generate(model, params, prompts, max_new_tokens=0, **how)
  np.testing.assert_array_equal(none, prompts)


@pytest.mark.slow
def test_the_padding_behind_a_position_does_not_leak(tiny):
  model, params, tokens = tiny
  run = functools.partial(generate, model, params, tokens[:, :5], **UNCACHED)
  np.testing.assert_array_equal(run(max_new_tokens=20)[:, :8], run(max_new_tokens=3))


def test_a_step_without_a_cache_compiles_once(tiny):
  model, params, tokens = tiny
  before = generation._run_layer._cache_size()
  generate(model, params, tokens[:, :17], max_new_tokens=4, **UNCACHED)
  assert generation._run_layer._cache_size() - before == 1


@pytest.mark.parametrize("how", [{}, UNCACHED, IN_PROGRAMS])
def test_after_the_end_token_a_row_holds_only_it(tiny, how):
  model, params, tokens = tiny
  run = functools.partial(generate, model, params, tokens[:, :5], **how)
  free = np.asarray(run(max_new_tokens=8))
  eos = int(free[0, 6])
  got = np.asarray(run(max_new_tokens=8, eos_id=eos))
  for row, plain in zip(got, free, strict=True):
    ends = np.flatnonzero(plain[5:] == eos)
    stop = 5 + int(ends[0]) if ends.size else plain.size
    np.testing.assert_array_equal(row[:stop], plain[:stop])
    assert np.all(row[stop:] == eos)


@pytest.mark.parametrize("how", [{}, UNCACHED, IN_PROGRAMS])
def test_each_of_several_end_tokens_ends_a_row(tiny, how):
  model, params, tokens = tiny
  run = lambda **ends: np.asarray(
    generate(model, params, tokens[:, :5], max_new_tokens=8, **how, **ends)
  )
  free = run()
  ends = [int(free[1, 8]), int(free[0, 6])]
  for row, plain in zip(run(eos_id=ends), free, strict=True):
    found = np.flatnonzero(np.isin(plain[5:], ends))
    stop = 6 + int(found[0]) if found.size else plain.size
    np.testing.assert_array_equal(row[:stop], plain[:stop])
    assert np.all(row[stop:] == ends[0])


def test_sampling_is_a_function_of_the_key(tiny):
  model, params, tokens = tiny

  draw = lambda seed: generate(
    *(model, params, tokens[:, :5]),
    **dict(max_new_tokens=8, temperature=2.0, key=jax.random.key(seed)),
  )
  np.testing.assert_array_equal(draw(0), draw(0))
  assert not np.array_equal(draw(0), draw(1))


@pytest.fixture(scope="module")
def draws():
  """Samples 4,000 tokens from logits 0..9 with given limits."""
  logits = jnp.tile(jnp.arange(10.0)[None], (4000, 1))

  def draw(**limits):
    return np.asarray(sample(jax.random.key(0), logits, 4.0, **limits))

  return draw


def test_top_k_keeps_the_k_most_likely(draws):
  assert set(draws(top_k=3)) == {7, 8, 9}
  assert set(draws(top_k=100)) == set(range(10))


def test_top_p_keeps_the_fewest_that_reach_it(draws):
  probabilities = np.asarray(jax.nn.softmax(jnp.arange(10.0) / 4.0))
  two = float(probabilities[-2:].sum())
  assert set(draws(top_p=two - 1e-3)) == {8, 9}
  assert set(draws(top_p=two + 1e-3)) == {7, 8, 9}
  assert set(draws(top_p=1e-6)) == {9}
  assert set(draws(top_p=1.0)) == set(range(10))


@pytest.mark.parametrize("temperature", [4.0, 1.5])
@pytest.mark.parametrize("kept", [10, 4])
def test_frequencies_follow_temperature_and_nucleus(kept, temperature):
  """Chi-squared of 4,000 draws against the softmax of what top-p leaves."""
  logits = np.arange(10.0)
  weights = np.exp(logits / temperature)
  share = weights / weights.sum()
  top_p = min(1.0, share[-kept:].sum() - share[-kept] / 2)
  want = np.where(logits >= 10 - kept, weights, 0.0)
  want *= 4000 / want.sum()
  rows = jnp.tile(jnp.asarray(logits, jnp.float32)[None], (4000, 1))
  drawn = sample(jax.random.key(1), rows, temperature, top_p=float(top_p))
  counts = np.bincount(np.asarray(drawn), minlength=10)
  assert counts[: 10 - kept].sum() == 0
  chosen = want > 0
  chi_squared = ((counts - want)[chosen] ** 2 / want[chosen]).sum()
  # Passes with probability 0.999.
  assert chi_squared < stats.chi2.ppf(0.999, kept - 1)


def test_arguments_without_meaning_are_refused(tiny):
  model, params, tokens = tiny
  usual = {"tokens": tokens[:, :5], "max_new_tokens": 1}
  call = lambda **changes: functools.partial(
    generate, model, params, **(usual | changes)
  )
  refusals.check(
    [
      (call(max_new_tokens=1000), "at most 256 positions", "1005"),
      (call(max_new_tokens=-1), "max_new_tokens", "-1"),
      (call(temperature=1.0), "random key"),
      (call(temperature=-1.0), "temperature >= 0"),
      (call(top_k=0), "top_k >= 1", "0"),
      (call(top_p=0.0), "0 < top_p <= 1"),
      (call(tokens=np.zeros((1, 0), np.int32)), "tokens of shape"),
    ]
  )


def test_a_model_without_a_cache_is_refused_by_name(tiny):
  model, params, tokens = tiny
  bare = types.SimpleNamespace(config=model.config)
  with pytest.raises(ValueError, match="layer_with_cache.*SimpleNamespace.*use_cache="):
    generate(bare, params, tokens, max_new_tokens=1)


@pytest.mark.parametrize("length", [1, 5])
def test_a_cache_changes_nothing_but_the_work(tiny, length):
  model, params, tokens = tiny
  run = functools.partial(generate, model, params, tokens[:, :length])
  plain = run(max_new_tokens=6, **UNCACHED)
  np.testing.assert_array_equal(run(max_new_tokens=6), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family_golden", "one_program"),
  in_each_family((False,), (True,)),
  indirect=["family_golden"],
)
def test_padding_a_prompt_changes_its_logits_by_the_order_of_sums_alone(
  family_golden, tmp_path, one_program
):
  model, params = models.from_pretrained(family_golden.save(tmp_path / "model"))
  rng = np.random.default_rng(0)
  rows = rng.integers(0, model.config.vocab_size, (2, 63)).astype(np.int32)
  for length in (1, 7, 32, 33, 63):
    want = np.asarray(model.apply({"params": params}, rows[:, :length])[:, -1])
    prompt = rows[:, :length]
    state, got = generation.prefill(model, params, prompt, one_program=one_program)
    assert state.cache.capacity == (32 if length <= 32 else 64)
    assert state.longest == length
    np.testing.assert_array_equal(state.cache.lengths, [length] * 2)
    np.testing.assert_array_equal(state.newest, want.argmax(-1))
    # A few units in the last place of the largest logit.
    assert np.abs(got - want).max() <= 16 * np.spacing(np.abs(want).max())
    # What the padding holds has no influence at all.
    lengths = np.full(2, length, np.int32)
    others = {"lengths": lengths, "choice": generation.GREEDY}
    padded = np.pad(prompt, ((0, 0), (0, generation.bucket_of(length) - length)))
    padded[:, length:] = model.config.vocab_size - 1
    again = (
      generation._prefill_in_one_program
      if one_program
      else (generation._prefill_by_layers)
    )
    np.testing.assert_array_equal(again(model, params, padded, **others)[1], got)


def test_buckets_and_capacities():
  lengths = (1, 32, 33, 48, 49, 64, 65, 1536, 1537, 2048, 2049)
  buckets = [32, 32, 48, 48, 64, 64, 96, 1536, 2048, 2048, 3072]
  assert list(map(generation.bucket_of, lengths)) == buckets
  assert len({generation.bucket_of(length) for length in range(1, 2049)}) == 13
  capacities = [32, 32, 64, 64, 64, 64, 128, 2048, 2048, 2048, 4096]
  assert list(map(generation.capacity_of, lengths)) == capacities


@pytest.mark.slow
@pytest.mark.parametrize("one_program", [False, True])
def test_decoding_goes_on_in_a_larger_cache(tiny, one_program):
  model, params, tokens = tiny
  want = np.asarray(generate(model, params, tokens[:, :5], max_new_tokens=46))
  how = {"one_program": one_program}
  state, _ = generation.prefill(model, params, tokens[:, :5], **how)
  made = [np.asarray(state.newest)[:, None]]
  for _ in range(3):
    state, some = generation.decode(model, params, state, steps=15, **how)
    made.append(np.asarray(some))
  assert state.cache.capacity == 64 and state.longest == 50
  np.testing.assert_array_equal(state.cache.lengths, [50] * 2)
  np.testing.assert_array_equal(np.concatenate(made, axis=1), want[:, 5:])
  refusals.check(
    [
      (
        lambda: generation.decode(model, params, state, steps=206),
        "at most 256 positions",
        "257",
      ),
      (lambda: generation.decode(model, params, state, steps=0), "steps >= 1", "0"),
    ]
  )


@pytest.mark.parametrize(
  "options",
  [
    {},
    *slow(
      {"temperature": 1.5, "key": jax.random.key(3), "top_k": 20, "top_p": 0.9},
      {"temperature": 0.7, "key": jax.random.key(4)},
    ),
  ],
)
def test_many_tokens_in_a_program_are_those_of_one_at_a_time(tiny, options):
  model, params, tokens = tiny
  run = lambda **more: np.asarray(
    generate(model, params, tokens[:, :4], max_new_tokens=8, **options, **more)
  )
  want = run()
  np.testing.assert_array_equal(want, run(**UNCACHED))
  # The token that a row generates third ends it; the other rows go on.
  eos = int(want[0, 6])
  for at_once in (3, 16):
    np.testing.assert_array_equal(run(tokens_at_once=at_once), want)
    ended = run(eos_id=eos, tokens_at_once=at_once)
    np.testing.assert_array_equal(ended, run(eos_id=eos))
    assert (ended[0, 6:] == eos).all()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 2])
def test_nothing_runs_once_every_row_has_ended(tiny, monkeypatch, at_once):
  model, params, tokens = tiny
  options = {"max_new_tokens": 9, "tokens_at_once": at_once}
  run = lambda **more: generate(model, params, tokens[:1, :4], **options, **more)
  calls, original = [], generation.decode
  count = lambda *args, **how: calls.append(1) or original(*args, **how)
  monkeypatch.setattr(generation, "decode", count)
  eos = int(run()[0, 6])
  assert len(calls) == 8 // at_once
  calls.clear()
  assert (run(eos_id=eos)[0, 6:] == eos).all() and len(calls) == 2 // at_once
  with pytest.raises(ValueError, match="tokens_at_once >= 1, got 0"):
    generate(model, params, tokens, max_new_tokens=1, tokens_at_once=0)


def test_cached_logits_equal_those_of_the_whole_prefix(tiny):
  model, params, tokens = tiny
  want = model.apply({"params": params}, tokens)
  cache = generation.empty_cache(model, *tokens.shape)
  for first, last in ((0, 7), (7, 8), (8, 13)):
    got, cache = generation.next_logits(model, params, cache, tokens[:, first:last])
    np.testing.assert_allclose(got, want[:, last - 1], atol=2e-5)
  np.testing.assert_array_equal(cache.lengths, [13] * len(tokens))


@pytest.mark.slow
def test_next_tokens_in_one_program_equal_layer_by_layer(tiny):
  model, params, tokens = tiny
  fill = lambda: generation.next_logits(
    model, params, generation.empty_cache(model, *tokens.shape), tokens[:, :6]
  )[1]
  some, last = jnp.asarray(tokens[:, 6:8]), np.ones(len(tokens), np.int32)
  one, _ = generation._next_in_one_program(model, params, fill(), some, last)
  many, _ = generation.next_logits(model, params, fill(), some)
  np.testing.assert_allclose(one, many, atol=2e-5)


@pytest.mark.slow
def test_cached_attention_does_not_depend_on_the_chunk():
  keys = jax.random.split(jax.random.key(0), 3)
  queries = jax.random.normal(keys[0], (2, 7, 4, 8))
  past = [jax.random.normal(key, (2, 20, 2, 8)) for key in keys[1:]]
  new = [p[:, 9:16] for p in past]
  start = jnp.asarray(9, jnp.int32)
  attend = functools.partial(functional.cached_attention, queries, *new)
  whole, filled = attend(past, start)
  parts, _ = attend(past, start, query_chunk=3)
  np.testing.assert_allclose(whole, parts, atol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, filled, tuple(past))
  changed = [p.at[:, 9:].set(1e3) for p in past]
  np.testing.assert_array_equal(attend(changed, start)[0], whole)
  # A plain 0 says that nothing is cached; another plain number says nothing.
  empty, filled = attend([jnp.zeros_like(p) for p in past], 0)
  causal = functools.partial(functional.causal_attention, queries, *new)
  np.testing.assert_array_equal(empty, causal())
  for one, own in zip(filled, new, strict=True):
    np.testing.assert_array_equal(one, jnp.pad(own, ((0, 0), (0, 13), (0, 0), (0, 0))))
  with pytest.raises(ValueError, match="int 0 of an empty cache.*got 9"):
    attend(past, 9)


def test_a_cached_window_equals_the_uncached_one():
  keys = jax.random.split(jax.random.key(1), 3)
  queries = jax.random.normal(keys[0], (1, 12, 4, 8))
  past = [jax.random.normal(key, (1, 12, 2, 8)) for key in keys[1:]]
  want = functional.causal_attention(queries, *past, window=5)
  for first, last in ((0, 7), (7, 8), (8, 12)):
    start = jnp.asarray(first, jnp.int32)
    new = [a[:, first:last] for a in (queries, *past)]
    got, _ = functional.cached_attention(*new, past, start, window=5)
    np.testing.assert_allclose(got, want[:, first:last], atol=1e-6)


def some_prompts(model, lengths=(5, 1, 31, 12), seed=2):
  rng = np.random.default_rng(seed)
  draw = lambda n: rng.integers(0, model.config.vocab_size, n).astype(np.int32)
  return [draw(length) for length in lengths]


E4M3 = {"cache_format": "e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize(
  "how", [*slow({}, UNCACHED, IN_PROGRAMS, E4M3), IN_PROGRAMS | E4M3]
)
def test_prompts_of_different_lengths_continue_as_each_does_alone(tiny, how):
  model, params, _ = tiny
  prompts = some_prompts(model)
  run = functools.partial(generate_each, model, params, prompts, **how)
  alone = lambda prompt, **more: np.asarray(
    generate(model, params, prompt[None], max_new_tokens=12, **how, **more)
  )[0]
  free = run(max_new_tokens=12)
  for got, prompt in zip(free, prompts, strict=True):
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, alone(prompt))
  # A token that ends one row early lets the others go on.
  eos = int(free[2][33])
  for got, prompt in zip(run(max_new_tokens=12, eos_id=eos), prompts, strict=True):
    np.testing.assert_array_equal(got, alone(prompt, eos_id=eos))
  none = run(max_new_tokens=0)
  for got, prompt in zip(none, prompts, strict=True):
    np.testing.assert_array_equal(got, prompt)


@pytest.mark.parametrize(
  ("family_golden", "one_program", "cache_format"),
  in_each_family(*itertools.product((False, True), ("compute", "e4m3"))),
  indirect=["family_golden"],
)
def test_nothing_of_other_prompts_reaches_a_prompt(
  family_golden, tmp_path, one_program, cache_format
):
  model, params = models.from_pretrained(family_golden.save(tmp_path / "model"))
  how = {"one_program": one_program}

  def logits(prompts):
    """Those of the first token, and of one after it."""
    state, first = generation.prefill(
      model, params, prompts, cache_format=cache_format, **how
    )
    # The next token is given, because other prompts choose others.
    newest = jnp.full(len(prompts), 3, jnp.int32)
    state = dataclasses.replace(state, newest=newest)
    state, tokens = generation.decode(model, params, state, steps=2, **how)
    np.testing.assert_array_equal(tokens[:, -1], state.newest)
    again = jnp.full((len(prompts), 1), 3, jnp.int32)
    return first, generation.next_logits(model, params, state.cache, again)[0]

  own = some_prompts(model, (7,))[0]
  others = [some_prompts(model, lengths, seed=3) for lengths in ((20, 31), (31, 1))]
  first, second = (logits([one[0], own, one[1]]) for one in others)
  for one, another in zip(first, second, strict=True):
    np.testing.assert_array_equal(one[1], another[1])
  # Alone, sums have another order: a few units in the last place of the largest.
  for got, want in zip(first, logits([own]), strict=True):
    assert np.abs(got[1] - want[0]).max() <= 16 * np.spacing(np.abs(want).max())


@pytest.mark.slow
def test_samples_of_the_longest_prompts_position_repeat(tiny):
  model, params, _ = tiny
  prompts = some_prompts(model)
  draw = lambda seed, **how: generate_each(
    *(model, params, prompts),
    **dict(max_new_tokens=8, temperature=2.0, key=jax.random.key(seed)),
    **how,
  )
  want = draw(0)
  for how in (IN_PROGRAMS, UNCACHED, {}):
    jax.tree.map(np.testing.assert_array_equal, draw(0, **how), want)
  assert any((a != b).any() for a, b in zip(draw(1), want, strict=True))


@pytest.mark.slow
def test_an_e4m3_cache_is_the_model_whose_attention_reads_rounded_vectors(
  tiny, monkeypatch
):
  model, params, _ = tiny
  rows = np.stack(some_prompts(model, (40, 40)))
  plain = model.apply({"params": params}, rows)
  attend = functional.causal_attention
  kept = lambda a: e4m3.encode(a).decode(a.dtype)
  monkeypatch.setattr(
    functional,
    "causal_attention",
    lambda queries, keys, values, **how: attend(
      queries, kept(keys), kept(values), **how
    ),
  )
  want = np.asarray(model.apply({"params": params}, rows))
  monkeypatch.undo()
  assert np.abs(want - plain).max() > 1e-3
  state, got = generation.prefill(model, params, rows[:, :20], **E4M3)
  np.testing.assert_allclose(got, want[:, 19], atol=2e-5)
  cache = generation.with_room(state, 20).cache
  # However the tokens come, and in a cache that has grown.
  for first, last in ((20, 21), (21, 33), (33, 40)):
    got, cache = generation.next_logits(model, params, cache, rows[:, first:last])
    np.testing.assert_allclose(got, want[:, last - 1], atol=2e-5)


@pytest.mark.parametrize("cache_format", ["compute", "e4m3"])
def test_the_bytes_of_a_cache_are_those_that_are_told(tiny, cache_format):
  model, config = tiny[0], tiny[0].config
  cache = generation.empty_cache(model, 3, 64, cache_format)
  assert cache.capacity == 64
  held = sum(a.nbytes for a in jax.tree.leaves(cache.layers))
  assert held == 3 * 64 * generation.cache_bytes(config, cache_format)
  vectors = 2 * config.num_layers * config.num_kv_heads
  each = {"compute": 4 * config.head_dim, "e4m3": config.head_dim + 1}
  assert held == 3 * 64 * vectors * each[cache_format]


def test_the_device_is_asked_for_lengths_that_the_host_does_not_know(tiny):
  model, params, _ = tiny
  state, _ = generation.prefill(model, params, some_prompts(model, (30, 9)))
  through = jax.jit(lambda state: state)(state)
  assert state.longest == 30 and through.longest is None
  assert generation.with_room(through, 2).cache.capacity == 32
  grown = generation.with_room(through, 3)
  assert grown.cache.capacity == 64 and grown.longest == 30


def test_ragged_prompts_and_formats_without_meaning_are_refused(tiny):
  model, params, tokens = tiny
  each = functools.partial(generate_each, model, params, max_new_tokens=1)
  one = functools.partial(generate, model, params, tokens, max_new_tokens=1)
  refusals.check(
    [
      (lambda: each([]), "batch >= 1", "got"),
      (lambda: each([[1, 2], []]), "length >= 1", "(0,)"),
      (lambda: each([[1], [model.config.vocab_size]]), "token ids from 0"),
      (lambda: each([[1] * 256, [1]]), "at most 256 positions", "257"),
      (lambda: generate(model, params, [[1, 2], [3]], max_new_tokens=1), "[2, 1]"),
      (lambda: one(cache_format="int4"), "compute, e4m3", "int4"),
      (lambda: one(**E4M3, **UNCACHED), "use_cache=True", "'e4m3' and no cache"),
    ],
    (ValueError, TypeError),
  )


# They drop all programs of the process, which the tests above share.


@pytest.mark.slow
def test_from_ids_to_the_first_token_is_one_program_that_makes_the_cache(tiny):
  model, params, tokens = tiny
  # Whatever runs beside it, an operation on an array too, would be compiled.
  jax.clear_caches()
  with compiling(1):
    state, _ = generation.prefill(model, params, tokens[:, :5], one_program=True)
  assert len(state.cache.layers) == model.num_layers
  jax.clear_caches()
  with compiling(1):
    generate(model, params, tokens[:, :5], max_new_tokens=1, tokens_at_once=16)


@pytest.mark.slow
def test_no_program_depends_on_the_length_of_a_prompt_or_of_its_continuation(tiny):
  model, params, tokens = tiny
  rows = np.tile(np.asarray(tokens), (1, 8))
  run = lambda length, new: generate(
    model, params, rows[:, :length], max_new_tokens=new, tokens_at_once=4
  )
  jax.clear_caches()
  with compiling(2):
    run(20, 9)  # prefill and decoding
  with compiling(0):
    for length, new in ((20, 2), (20, 6), (19, 9), (9, 12), (24, 5), (1, 1)):
      run(length, new)
  with compiling(2):
    run(20, 25)  # a larger cache: its copy and its decoding
  with compiling(1):
    run(40, 9)  # another bucket in the same capacity
  with compiling(0):
    run(48, 16)
    run(33, 1)
