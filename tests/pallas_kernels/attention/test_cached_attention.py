import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mxjax.models import functional
from mxjax.numerics import e4m3
from mxjax.pallas_kernels.attention import cached_attention, prefill
from mxjax.pallas_kernels.attention.cached_attention import Tile
from mxjax.pallas_kernels.refinement import fused_inputs, one_code
from tests import refusals
from tests.cases import slow
from tests.pallas_kernels import ptx_machine
from tests.pallas_kernels.attention.problems import error, exact, problem


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def cached(queries, keys, values, start, *, window=None, implementation=None):
  """Outputs over `keys` and `values` of all positions, and the cache after it.

  The new tokens are taken from where they belong; the cache holds other values there.
  """
  new = queries.shape[1]
  newest = [jax.lax.dynamic_slice_in_dim(a, start, new, axis=1) for a in (keys, values)]
  past = [
    jax.lax.dynamic_update_slice_in_dim(a, jnp.full_like(part, 7), start, axis=1)
    for a, part in zip((keys, values), newest, strict=True)
  ]
  how = {"window": window, "implementation": implementation}
  made = functional.cached_attention(queries, *newest, tuple(past), start, **how)
  return fused_inputs.as_array(made[0]), made[1]


@functools.partial(jax.jit, static_argnames="tile")
def launch(queries, keys, values, start, tile):
  """Outputs of the kernel cut so, with what `cached` gives it."""
  new = tuple(
    jax.lax.dynamic_slice_in_dim(a, start, queries.shape[1], axis=1)
    for a in (keys, values)
  )
  arguments = queries, new, (keys, values), start
  return cached_attention.launch(*arguments, tile=tile, interpret=True)[0].array()


def fill_unseen(arrays, start, window, value):
  """Keys and values with `value` where no query sees them."""
  queries, *past = arrays
  position = np.arange(past[0].shape[1])
  is_unseen = position >= start + queries.shape[1]
  if window is not None:
    is_unseen |= position <= start - window
  where = is_unseen[None, :, None, None]
  return [queries, *(jnp.where(where, jnp.asarray(value, a.dtype), a) for a in past)]


@pytest.mark.parametrize(
  ("new", "heads", "kv_heads", "positions", "head_dim", "window", "dtype"),
  [
    (1, 8, 2, 150, 32, None, "float32"),
    (3, 6, 2, 37, 16, 7, "float32"),
    *slow((3, 2, 2, 33, 64, None, "float32"), (1, 8, 2, 150, 32, None, "bfloat16")),
    (3, 2, 2, 128, 128, 20, "bfloat16"),
  ],
)
def test_the_kernel_equals_the_reference_wherever_the_tokens_are(
  new, heads, kv_heads, positions, head_dim, window, dtype
):
  arrays = problem(2, new, heads, kv_heads, positions, head_dim, dtype)
  for start in (0, positions // 2, positions - new):
    zeros = fill_unseen(arrays, start, window, 0.0)
    garbage = fill_unseen(arrays, start, window, np.nan)
    start = jnp.asarray(start, jnp.int32)
    options = {"window": window, "implementation": "interpret"}
    got, filled = cached(*garbage, start, **options)
    want, _ = cached(*zeros, start, window=window, implementation="xla")
    assert got.shape == (2, new, heads * head_dim) and got.dtype == dtype
    # The reference's weights are rounded at another maximum.
    assert error(got, want) <= (1e-6 if dtype == "float32" else 2.0**-7)
    # The new tokens are where they belong, and nothing else has moved.
    for after, whole in zip(filled, garbage[1:], strict=True):
      np.testing.assert_array_equal(*(a.astype(jnp.float32) for a in (after, whole)))


@pytest.mark.parametrize("window", [None, 17])
def test_the_kernel_equals_the_definition(window):
  arrays = problem(1, 2, 4, 1, 90, 16, jnp.float32, seed=1)
  start = jnp.asarray(83, jnp.int32)
  got, _ = cached(*arrays, start, window=window, implementation="interpret")
  assert error(got, exact(*arrays, 83, window)) <= 2e-6


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_shares_of_many_steps_and_of_none_combine(dtype):
  arrays = problem(1, 2, 4, 2, 200, 16, dtype, seed=2)
  # Of 64 shares only some hold one of the thirteen chunks; of two each holds six. The
  # second chunk is the newer token's alone if the older one is at 15.
  for splits in (2, 64):
    tile = Tile(16, 16, 16, splits)
    for start in (198, 15):
      got = launch(*arrays, jnp.asarray(start, jnp.int32), tile)
      want = exact(*arrays, start)
      assert error(got, want) <= (2e-6 if dtype == "float32" else 2.0**-7)


def test_scores_far_apart_in_different_shares_do_not_overflow():
  queries, keys, values = problem(1, 1, 2, 1, 64, 16, jnp.float32, seed=3)
  keys = keys.at[:, 20].set(400 * queries[:, 0, :1]).at[:, 50].set(-400)
  got = launch(queries, keys, values, jnp.int32(63), Tile(16, 16, 16, 4))
  assert error(got, exact(queries, keys, values, 63)) <= 2e-6
  np.testing.assert_array_equal(got[0, 0, :16], values[0, 20, 0])


def test_one_key_is_returned_as_it_is():
  arrays = problem(2, 1, 4, 2, 70, 16, jnp.bfloat16)
  got, _ = cached(*arrays, jnp.asarray(0, jnp.int32), implementation="interpret")
  want = jnp.repeat(arrays[2][:, 0], 2, axis=1).reshape(2, 1, -1)
  np.testing.assert_array_equal(got, want)


def test_a_seen_value_that_is_not_finite_reaches_only_its_heads():
  queries, keys, values = problem(1, 1, 4, 2, 70, 16, jnp.float32)
  values = values.at[0, 30, 1].set(jnp.nan)
  got, _ = cached(queries, keys, values, jnp.int32(60), implementation="interpret")
  by_head = np.isnan(got).reshape(4, 16)
  np.testing.assert_array_equal(by_head.all(1), [False, False, True, True])
  np.testing.assert_array_equal(by_head.any(1), by_head.all(1))


def test_the_start_is_no_constant_of_the_program():
  arrays = problem(1, 1, 2, 1, 48, 16, jnp.float32, seed=4)
  program = jax.jit(lambda start: cached(*arrays, start, implementation="interpret")[0])
  for start in (0, 15, 16, 47):
    assert error(program(jnp.int32(start)), exact(*arrays, start)) <= 2e-6
  assert program._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  ("new", "head_dim", "dtype"),
  [
    (1, 32, "bfloat16"),
    *slow((2, 64, "float32"), (1, 16, "float32"), (3, 32, "float32")),
  ],
)
def test_the_refinement_ends_attention_itself(new, head_dim, dtype):
  arrays = problem(2, new, 8, 2, 150, head_dim, dtype, seed=5)
  queries, keys, values = arrays
  past = keys[:, new:], values[:, new:]
  newest = keys[:, :new], values[:, :new]
  made = queries, newest, past, jnp.int32(77)
  outputs, _ = cached_attention.launch(*made, interpret=True)
  assert outputs.shape == (2, new, 8 * head_dim)
  assert outputs.flat().shape == (2 * new, 8 * head_dim)
  encode = functools.partial(one_code.refine, form="values", implementation="interpret")
  later = fused_inputs.for_kernel(outputs.flat())
  # More than four rows, and heads that a block spans two of, are made before.
  is_there = 2 * new <= fused_inputs.SINGLE_ROWS and head_dim >= 32
  assert isinstance(later, fused_inputs.Attended) == is_there
  want = encode(outputs.flat().array())
  np.testing.assert_array_equal(encode(outputs.flat()), want)


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("positions", [1, 100, 2048, 40000])
def test_programs_fill_the_gpu_and_each_may_have_a_chunk(batch, positions):
  array = jax.ShapeDtypeStruct
  past = array((batch, positions, 8, 128), jnp.bfloat16)
  tile = Tile.of(array((batch, 1, 32, 128), jnp.bfloat16), past)
  chunks, programs = -(-positions // tile.chunk), batch * 8 * tile.splits
  assert tile.splits <= chunks and tile.splits & (tile.splits - 1) == 0
  assert programs > 132 or tile.splits > chunks // 2
  assert tile.splits == 1 or programs <= 264


def test_what_does_not_fit_is_refused_and_none_takes_the_reference(monkeypatch):
  # Else many tokens in bfloat16 have a kernel of their own.
  monkeypatch.setattr(prefill, "obstacle", lambda *_: "it may not")
  start = jnp.asarray(0, jnp.int32)
  cases = [
    ((1, 1, 4), 8, 24, "float32", "power of two from 16 to 256", "24"),
    ((1, 1, 4), 8, 8, "float32", "power of two from 16 to 256", "8"),
    ((1, 1, 4), 8, 16, "float16", "all bfloat16", "float16"),
    ((1, 17, 4), 40, 16, "float32", "at most 32", "34"),
    ((1, 33, 4), 40, 16, "bfloat16", "at most 64", "66"),
    ((0, 1, 4), 8, 16, "float32", "nothing to do"),
    ((1, 0, 4), 8, 16, "float32", "nothing to do"),
  ]
  refused = []
  for (batch, new, heads), positions, head_dim, dtype, *words in cases:
    arrays = problem(batch, new, heads, 2, positions, head_dim, dtype)
    call = functools.partial(cached, *arrays, start)
    refused.append((functools.partial(call, implementation="interpret"), *words))
    if batch and new:
      pair = call(), call(implementation="xla")
      jax.tree.map(np.testing.assert_array_equal, *pair)
  refusals.check(refused, NotImplementedError)


def test_operands_of_two_dtypes_are_refused_and_without_a_gpu_the_compiled_kernel():
  queries, keys, values = problem(1, 1, 2, 1, 8, 16, jnp.float32)
  narrow = queries.astype(jnp.bfloat16)
  why_not = cached_attention.obstacle(narrow, keys, values, (keys, values))
  assert "got bfloat16, float32, float32, float32, float32" in why_not
  # Sizes that Triton cannot address: bytes between 2 and 4 GiB.
  array = jax.ShapeDtypeStruct
  codes, scales = (
    array((96, 2**17, 2, 128), jnp.uint8),
    array((96, 2**17, 2), jnp.uint8),
  )
  past = (e4m3.ScaledE4M3(codes, scales),) * 2
  assert "32 bits" in cached_attention.obstacle(queries, keys, values, past)
  with pytest.raises(NotImplementedError, match="NVIDIA GPU"):
    cached(queries, keys, values, jnp.int32(0), implementation="pallas")


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def beside(queries, newest, past, start, *, window=None, implementation):
  """Outputs of new tokens beside a cache, and the cache."""
  how = {"window": window, "implementation": implementation}
  made = functional.cached_attention(queries, *newest, past, start, **how)
  return fused_inputs.as_array(made[0]), made[1]


def ragged(arrays, starts, behind):
  """New tokens of sequences of such lengths, and caches with `behind` after them."""
  queries, *every = arrays
  new = queries.shape[1]
  newest = [
    jnp.stack([row[start : start + new] for row, start in zip(a, starts, strict=True)])
    for a in every
  ]
  is_past = np.arange(every[0].shape[1])[None] < np.asarray(starts)[:, None]
  where = is_past[:, :, None, None]
  past = tuple(jnp.where(where, a, jnp.asarray(behind, a.dtype)) for a in every)
  return newest, past


@pytest.mark.slow
@pytest.mark.parametrize(
  ("new", "dtype", "window"),
  [
    *slow((1, "float32", None), (1, "float32", 20)),
    *slow((3, "bfloat16", 20), (40, "bfloat16", None)),
    (40, "bfloat16", 20),
  ],
)
def test_every_sequence_has_a_length_of_its_own(new, dtype, window):
  arrays = problem(3, new, 4, 2, 120, 32, dtype, seed=4)
  starts = [0, 77, 120 - new]
  newest, past = ragged(arrays, starts, np.nan)
  start = jnp.asarray(starts, jnp.int32)
  options = {"window": window, "implementation": "interpret"}
  got, filled = beside(arrays[0], newest, past, start, **options)
  _, zeros = ragged(arrays, starts, 0.0)
  options["implementation"] = "xla"
  plain, _ = beside(arrays[0], newest, zeros, start, **options)
  for row, first in enumerate(starts):
    one = [a[row : row + 1] for a in arrays]
    want = exact(*one, first, window)
    for outputs in (got, plain):
      bound = 2e-6 if dtype == "float32" else 2.0**-7
      assert error(outputs[row : row + 1], want) <= bound
    for after, whole in zip(filled, arrays[1:], strict=True):
      stop = first + new
      np.testing.assert_array_equal(after[row, :stop], whole[row, :stop])
      assert np.isnan(np.asarray(after[row, stop:], np.float32)).all()


def rounded(arrays):
  """Queries, and keys and values as an E4M3 cache gives them back."""
  queries, *every = arrays
  return [queries, *(e4m3.encode(a).decode(a.dtype) for a in every)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("new", "head_dim", "dtype", "window"),
  [
    *slow((1, 32, "float32", None)),
    (1, 64, "bfloat16", 20),
    *slow((3, 128, "bfloat16", None), (40, 32, "bfloat16", 20)),
    *slow((40, 32, "bfloat16", None)),
  ],
)
def test_an_e4m3_cache_is_attention_over_rounded_keys_and_values(
  new, head_dim, dtype, window
):
  arrays = problem(2, new, 4, 2, 90, head_dim, dtype, seed=6)
  # Vectors of any size: scores and weights take the scales.
  arrays[1] = arrays[1] * 2.0 ** jnp.arange(-2, 0, dtype=dtype)[None, None, :, None]
  arrays[2] = arrays[2] * 2.0 ** jnp.arange(-30, -28, dtype=dtype)[None, None, :, None]
  starts = [31, 90 - new]
  start = jnp.asarray(starts, jnp.int32)
  newest, past = ragged(arrays, starts, np.nan)
  _, zeros = ragged(arrays, starts, 0.0)
  options = {"window": window, "implementation": "interpret"}
  got, filled = beside(
    arrays[0], newest, tuple(map(e4m3.encode, past)), start, **options
  )
  options["implementation"] = "xla"
  encoded = tuple(map(e4m3.encode, zeros))
  plain, also_filled = beside(arrays[0], newest, encoded, start, **options)
  for row, first in enumerate(starts):
    want = exact(*(a[row : row + 1] for a in rounded(arrays)), first, window)
    # By head, because values differ in size.
    heads = lambda a: a.reshape(1, new, 2, -1).transpose(2, 0, 1, 3)
    for outputs in (got, plain):
      bound = 2e-6 if dtype == "float32" else 2.0**-7
      for one, exactly in zip(heads(outputs[row : row + 1]), heads(want), strict=True):
        assert error(one, exactly) <= bound
    for written in (filled, also_filled):
      for kept, whole in zip(written, arrays[1:], strict=True):
        stop, made = first + new, e4m3.encode(whole)
        np.testing.assert_array_equal(kept.codes[row, :stop], made.codes[row, :stop])
        np.testing.assert_array_equal(kept.scales[row, :stop], made.scales[row, :stop])
  # Nothing behind the new tokens is written.
  assert (np.asarray(filled[0].scales[0, starts[0] + new :]) == 255).all()


def test_ptx_decodes_every_pair_of_codes():
  first, second = np.divmod(np.arange(1 << 16, dtype=np.uint32), 256)
  word = first | second << 16
  got = ptx_machine.run(cached_attention.E4M3_PTX, word)
  codes = np.stack([first, second], axis=1).astype(np.uint8)
  want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
  want = np.where(np.isnan(want), np.where(codes < 128, 480, -480), want)
  values = got.view(np.uint32)[:, None] >> np.array([0, 16], np.uint32) << 16
  np.testing.assert_array_equal(values.astype(np.uint32).view(np.float32), want)
  plain = np.asarray(cached_attention.e4m3_values(jnp.asarray(codes)))
  np.testing.assert_array_equal(plain, want)
  np.testing.assert_array_equal(np.signbit(plain), np.signbit(want))
