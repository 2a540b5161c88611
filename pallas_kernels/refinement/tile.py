"""Refinement of one tile inside the kernel: tables, rounding, and the changed code.

With `x` the raw inputs of a block of 32 features, U the map, G and K the tables:

  y = U x,  q = nearest(y),  slope = G (q - y) - K y,  one code changed where it helps.

Rules that change several codes take the best one and add G times what it moved to the
slope, which is exact in bfloat16 as well, before they look for the next.

No product is rounded to TF32. There are two arithmetics:

- `float32`: the products above on FP32 units.
- `split`: x is bfloat16 and q / scale has two bits, so both are exact in bfloat16; each
  float32 table is the sum of three bfloat16 tables, smallest first. With M = (G + K) U
  the slope is scale * G (q / scale) - M x: every product on the tensor cores is exact
  and only float32 sums round. Triton waits for each product, so the terms of a table
  lie side by side along K, and U above M: two waits a tile.

The best of a coordinate's fifteen candidates is the legal value nearest to the optimum.
Its score, in units of the squared scale and in Horner's form, with d the change, is

  score = d (slope + d curvature / 2),  half of `one_code.code_score`.

The number of instructions per value limits the kernel; docs/concepts/kernels.md counts
them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.pallas_kernels import codec, lowering, pairs

_BLOCK = mxfp4.BLOCK_SIZE
_TERMS = 4
"""Terms that lie side by side: three, and zeros, as sizes are powers of two."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Tables:
  """The stored tables of a linear, float32 or bfloat16, and how its rule uses them.

  Attributes:
    matrix: The map U, `[blocks or 1, 32, 32]`, or None for no map.
    gram: G, packed upper triangle `[blocks, 528]`, or None for nearest rounding.
    cross: K, `[blocks, 32, 32]`, or None for zero.
    changes: The most codes of a block that change (static).
    rounds_up: Whether exponents are those of the scale rule `even` (static).
  """

  matrix: Any
  gram: Any
  cross: Any
  changes: int = dataclasses.field(default=1, metadata={"static": True})
  rounds_up: bool = dataclasses.field(default=False, metadata={"static": True})


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Loaded:
  """A block's tables in registers, each `joined_terms` of it if products are split.

  Attributes:
    matrix: U; in split form above M, if both are there.
    gram: G.
    mismatch: K or None; in split form M = (G + K) U, if there is no U.
    curvature: The diagonal of G, float32 `[1, 32]`.
    changes, rounds_up: Those of `Tables` (static).
  """

  matrix: Any
  gram: Any
  mismatch: Any
  curvature: Any
  changes: int = dataclasses.field(metadata={"static": True})
  rounds_up: bool = dataclasses.field(metadata={"static": True})


def split3(table: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns three bfloat16 terms that add up to a float32 table, smallest first."""
  # Of the 24 bits of a float32 each term takes 8. The rests are exact.
  first = table.astype(jnp.bfloat16)
  rest = table - first.astype(jnp.float32)
  second = rest.astype(jnp.bfloat16)
  return (rest - second.astype(jnp.float32)).astype(jnp.bfloat16), second, first


def joined_terms(table: jax.Array) -> jax.Array:
  """Returns the terms of a float32 table `[n, 32]`, smallest first, `[n, 4 * 32]`."""
  # Triton joins two arrays at a time, along a new last axis. The order along K is then
  # zeros, small, middle, large.
  small, middle, large = split3(table)
  zeros = jnp.zeros_like(small)
  halves = [jnp.stack(pair, axis=-1) for pair in ((zeros, middle), (small, large))]
  terms = jnp.stack(halves, axis=-1).transpose(0, 2, 3, 1)
  return terms.reshape(-1, _TERMS * _BLOCK)


def load_tables(refs: Tables, split: bool) -> Loaded:
  """Reads and prepares a program's tables once, without a separate launch.

  G's entries are gathered from the packed triangle of `one_code.pack_symmetric`, most
  of them twice.
  """
  load = lambda ref: None if ref is None else ref[...].astype(jnp.float32)
  matrix, cross = load(refs.matrix), load(refs.cross)
  rule = refs.changes, refs.rounds_up
  if refs.gram is None:
    mapping = joined_terms(matrix) if split and matrix is not None else matrix
    return Loaded(mapping, None, None, None, *rule)
  # The rows of the packed triangle have 32, 31, ... entries.
  place = lambda low, high: (low * (2 * _BLOCK - 1 - low) >> 1) + high
  row, column = (lax.broadcasted_iota(jnp.int32, (_BLOCK, _BLOCK), i) for i in (0, 1))
  diagonal = lax.broadcasted_iota(jnp.int32, (1, _BLOCK), 1)
  gram, curvature = (
    refs.gram[place(jnp.minimum(i, j), jnp.maximum(i, j))].astype(jnp.float32)
    for i, j in ((row, column), (diagonal, diagonal))
  )
  if not split:
    return Loaded(matrix, gram, cross, curvature, *rule)
  mismatch = gram if cross is None else gram + cross
  if matrix is None:
    return Loaded(None, joined_terms(gram), joined_terms(mismatch), curvature, *rule)
  mismatch = lowering.dot_float32(mismatch, matrix)
  both = jnp.stack([matrix, mismatch], axis=-1).transpose(2, 0, 1)
  both = joined_terms(both.reshape(2 * _BLOCK, _BLOCK))
  return Loaded(both, joined_terms(gram), None, curvature, *rule)


def parabolas(curvature: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns float32 curvatures, half of them, and one over them, finite.

  A slope of 0 times infinity would be NaN.
  """
  reciprocal = jnp.minimum(1.0 / curvature, jnp.finfo(jnp.float32).max)
  return curvature, 0.5 * curvature, reciprocal


def best_change(
  nearest: jax.Array,
  slope: jax.Array,
  curvature: jax.Array,
  half: jax.Array,
  reciprocal: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Finds the legal value nearest to the optimum of a coordinate's parabola.

  `nearest` (element values) and `slope` (in units of the scale) are float32
  `[rows, 32]`, and the rest is what `parabolas` returns, of shapes that broadcast.
  Returns scores and values, `[rows, 32]` each, zeros positive.
  """
  optimum = nearest - slope * reciprocal
  sign = codec.bits(optimum) & codec.SIGN
  # From 1 up a legal value has one bit of mantissa, and so has one plus a legal value
  # below 1. Above 6 the values around the optimum are 4 and 6.
  size = jnp.minimum(jnp.abs(optimum), 5.0)
  # float32 by name: in a 64-bit scope two plain numbers would make it float64.
  offset = jnp.where(size < 1.0, jnp.float32(1.0), jnp.float32(0.0))
  # Cut to one bit of mantissa: the value next to the optimum on the side of zero. Half
  # a step of 2^22 on lies the middle, and a step on the outer value.
  inner = (codec.bits(size + offset) & -(1 << 22)) | sign
  offset = codec.from_bits(codec.bits(offset) | sign)
  middle = codec.from_bits(inner | (1 << 21)) - offset
  # The quotient only says between which values the optimum lies; which is nearer, the
  # slope at their middle does, in one rounding. At a tie it is 0, and the value toward
  # zero has the lower code.
  rises = slope + (middle - nearest) * curvature
  # Outer, where the objective still falls away from zero: by a negative slope, or for a
  # negative optimum by a positive one.
  is_outer = codec.from_bits(codec.bits(rises) ^ sign) < 0
  value = codec.from_bits(jnp.where(is_outer, inner + (1 << 22), inner)) - offset
  delta = value - nearest
  return delta * (slope + delta * half), value


def _is_changed(score: jax.Array) -> jax.Array:
  """Returns where a row changes: at its lowest score, the first of equal ones."""
  lowest = jnp.min(score, axis=1)[:, None]
  place = lax.broadcasted_iota(jnp.int32, score.shape, 1)
  ties = jnp.where(score == lowest, place, _BLOCK)
  # Paper: Eq. hires-code-score, whose best change is accepted only if it is negative.
  # 32 is no place: such a row keeps its codes.
  first = jnp.where(lowest < 0, jnp.min(ties, axis=1)[:, None], _BLOCK)
  return place == first


def _changed(nearest: jax.Array, slope: jax.Array, curves: Any) -> jax.Array:
  """Returns a tile after the best change of each row; see `best_change`."""
  score, value = best_change(nearest, slope, *curves)
  return jnp.where(_is_changed(score), value, nearest)


def _nearest(
  mapped: jax.Array, *, rounds_up: bool = False, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """Encodes a float32 tile `[rows, 32]`: bfloat16 values in units of the scale.

  Returns the exponents `[rows, 1]` too. No boundary between two codes has more than
  three significant bits, so the upper halves are sufficient, two to a register.
  """
  # Maximum on bits: a GPU's float maximum drops NaN, and the block would go unmarked.
  largest = jnp.max(codec.bits(mapped) & codec.UPPER_HALF, axis=1)
  exponent = codec.block_exponent(largest, rounds_up=rounds_up)[:, None]
  factor = jnp.broadcast_to(pairs.upper(codec.inverse_scale_of(exponent)), mapped.shape)
  half, keywords = pairs.upper(mapped), {"interpret": interpret}
  nearest = lowering.by_ptx(
    pairs.nearest_ptx(), pairs.nearest, half, factor, **keywords
  )
  return nearest, exponent


def _split_dot(x: jax.Array, terms: jax.Array) -> jax.Array:
  """Computes X table^T with the `joined_terms` of the table, in one product."""
  # x beside itself along K, once for each term: one product, and one wait, for all.
  copies = jnp.broadcast_to(x[:, None, :], (x.shape[0], _TERMS, _BLOCK))
  copies = copies.reshape(x.shape[0], _TERMS * _BLOCK)
  return lowering.dot_bfloat16(copies, terms, transpose_b=True)


def _map_and_pull(x: jax.Array, t: Loaded) -> tuple[jax.Array, Any]:
  """Returns U x, and M x or None without G; float32 `[rows, 32]`."""
  if t.matrix is None:
    pull = None if t.gram is None else _split_dot(x, t.mismatch)
    return x.astype(jnp.float32), pull
  both = _split_dot(x, t.matrix)
  if t.gram is None:
    return both, None
  mapped, pull = lax.split(both, (_BLOCK, _BLOCK), axis=1)
  return mapped, pull


def _sum_of_products(*pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Returns the sum of x table^T, float32 x `[rows, 32]`, on FP32 units.

  A matrix product needs at least 16 rows, so a single row uses elementwise products.
  """
  add = functools.partial(functools.reduce, jnp.add)
  if pairs[0][0].shape[0] == 1:
    return jnp.sum(add([x * table for x, table in pairs]), axis=1)[None, :]
  return add([lowering.dot_float32(x, t, transpose_b=True) for x, t in pairs])


def realize(
  x: jax.Array, t: Loaded, *, split: bool, interpret: bool
) -> tuple[jax.Array, jax.Array]:
  """Maps, encodes and refines a tile `[rows, 32]` with loaded tables `t`.

  Returns values in units of the scale, float32, and the exponents. A zero that was
  rounded keeps its sign, and one that was chosen is positive.
  """
  if split:
    mapped, pull = _map_and_pull(x, t)
  else:
    x = x.astype(jnp.float32)
    mapped = x if t.matrix is None else _sum_of_products((x, t.matrix))
  narrow, exponent = _nearest(mapped, rounds_up=t.rounds_up, interpret=interpret)
  nearest = narrow.astype(jnp.float32)
  if t.gram is None:
    return nearest, exponent
  inverse = codec.inverse_scale_of(exponent)
  if split:
    # Slopes are in units of the scale: q is so already, and M x is multiplied by 1 /
    # scale.
    slope = _split_dot(narrow, t.gram) - pull * inverse
  else:
    scaled = mapped * inverse
    parts = [(nearest - scaled, t.gram)]
    parts += [] if t.mismatch is None else [(-scaled, t.mismatch)]
    slope = _sum_of_products(*parts)
  curves = parabolas(t.curvature)
  changed = _changed(nearest, slope, curves)
  for _ in range(t.changes - 1):
    moved = changed - nearest
    if split:
      # Exact: the difference of two legal values has at most five significant bits.
      slope += _split_dot(moved.astype(jnp.bfloat16), t.gram)
    else:
      slope += _sum_of_products((moved, t.gram))
    nearest, changed = changed, _changed(changed, slope, curves)
  return changed, exponent
