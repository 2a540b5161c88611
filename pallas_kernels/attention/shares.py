"""Partial results of cached attention, combined by their consumer.

The refinement kernel combines them for the block of 32 features that it is about to
encode, and `array` for every other consumer.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import pytree_nodes
from mxjax.pallas_kernels import lowering

_STEP = 32
"""Shares that are read at once."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Attended:
  """Deferred attention outputs: the partial results of several programs.

  Attributes:
    sums: Weighted sums of values, float32
      `[splits, batch, kv_heads, new * group, head_dim]`, with `group` query heads per
      key-value head; `splits` is a power of two.
    tops: Largest score of each share, float32, without the last axis; -infinity where
      it saw no key.
    totals: Sums of weights relative to the largest score, likewise.
    scale: Factor on scores before the exponential (static).
    leading: `(batch, new)`, or their product alone (static).
    dtype: Dtype of the outputs (static).
    interpret: Whether a kernel runs without a GPU (static).
  """

  sums: Any
  tops: Any
  totals: Any
  scale: float = dataclasses.field(metadata={"static": True})
  leading: tuple[int, ...] = dataclasses.field(metadata={"static": True})
  dtype: jnp.dtype = dataclasses.field(metadata={"static": True})
  interpret: bool = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the outputs: `[batch, new, heads * head_dim]`."""
    _, batch, kv_heads, rows, head_dim = self.sums.shape
    heads = kv_heads * rows * batch // math.prod(self.leading)
    return *self.leading, heads * head_dim

  def flat(self) -> Self:
    """Merges the leading axes into one."""
    return dataclasses.replace(self, leading=(math.prod(self.leading),))

  def array(self) -> jax.Array:
    """Combines the outputs in a separate kernel."""
    _, batch, kv_heads, rows, head_dim = self.sums.shape
    new = math.prod(self.leading) // batch
    group = rows // new
    shape = batch * new, kv_heads * group * head_dim

    def kernel(refs: Attended, out_ref: Any) -> None:
      out_ref[...] = combine(refs)

    out = lowering.launch(
      kernel,
      self,
      name="combine_attention",
      grid=(kv_heads * group, batch * new),
      in_specs=[self.specs(head_dim)],
      out_specs=lowering.BlockSpec((None, head_dim), lambda head, row: (row, head)),
      out_shape=jax.ShapeDtypeStruct(shape, self.dtype),
      warps=4,
      interpret=self.interpret,
    )
    return out.reshape(self.shape)

  def specs(self, width: int) -> Self:
    """Returns block specs for a grid of feature groups, then rows.

    `width` is the number of features of a program, all of one head.
    """
    splits, batch, _, rows, head_dim = self.sums.shape
    new, each = math.prod(self.leading) // batch, head_dim // width
    group = rows // new

    def share(index: jax.Array, row: jax.Array) -> tuple[Any, ...]:
      head = index // each
      return 0, row // new, head // group, row % new * group + head % group

    some = (splits, None, None, None)
    one = lowering.BlockSpec(some, lambda index, row, *_: share(index, row))
    sums = lowering.BlockSpec(
      (*some, width), lambda index, row, *_: (*share(index, row), index % each)
    )
    return dataclasses.replace(self, sums=sums, tops=one, totals=one)


def combine(refs: Attended) -> jax.Array:
  """Combines a program's features `[width]` from the references given by `specs`."""
  splits, width = refs.sums.shape
  size = min(splits, _STEP)
  # Finite, because the first share holds each query's own key.
  top = jnp.max(refs.tops[...], axis=0)

  def add(step: jax.Array, carry: Any) -> Any:
    sums, total = carry
    here = lowering.columns(step * size, size)
    # A share that saw no key has top -infinity, and so weight zero.
    weights = jnp.exp((refs.tops[here] - top) * refs.scale)
    sums += jnp.sum(weights[:, None] * refs.sums[here, :], axis=0)
    return sums, total + jnp.sum(weights * refs.totals[here], axis=0)

  empty = jnp.zeros((width,), jnp.float32), jnp.zeros((), jnp.float32)
  # Both are powers of two, so the steps are whole.
  sums, total = lax.fori_loop(0, splits // size, add, empty)
  return (sums / total).astype(refs.dtype)
