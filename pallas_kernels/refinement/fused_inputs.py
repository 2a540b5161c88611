"""Deferred inputs: materialized by XLA or computed inside the refinement kernel.

An RMS norm, a gated product or the end of attention would cost a pass over memory and a
launch of its own; the refinement kernel reads each input once anyway. `array`
materializes a deferred input with XLA and defines it; `specs`, `operands` and `tiles`
compute it inside a kernel. Plain arrays are supported too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import elementwise, mxfp4, pytree_nodes
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.pallas_kernels import lowering, recovery
from mxjax.pallas_kernels.attention import shares
from mxjax.pallas_kernels.attention.shares import Attended

SINGLE_ROWS = 4
"""Largest number of rows for which each row has its own programs. Only such programs
read a row whole, so only they can normalize it or combine its attention."""
# A row has any width, but arrays in registers have powers of two for sizes.
_CHUNK = 1024
_BLOCK = mxfp4.BLOCK_SIZE


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Normalized:
  """Rows with a deferred RMS norm; see `elementwise.rms_norm`.

  Attributes:
    rows: `[..., d]`, float32 or bfloat16.
    weight: `[d]`, any float dtype.
    eps: Added to the mean square (static).
  """

  rows: Any
  weight: Any
  eps: float = dataclasses.field(metadata={"static": True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape after normalization."""
    return self.rows.shape

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype after normalization."""
    return self.rows.dtype

  def flat(self) -> Self:
    """Merges the leading axes into one."""
    return dataclasses.replace(self, rows=_flat(self.rows))

  def array(self) -> jax.Array:
    """Computes the normalized rows."""
    return elementwise.rms_norm(self.rows, self.weight, self.eps)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class GatedProduct:
  """Gate and up outputs with a deferred SwiGLU product, optionally corrected.

  Attributes:
    gate: `[..., hidden]`, float32 or bfloat16.
    up: Same shape and dtype.
    recovery: The correction, or None; see `recovery.gated_product`.
  """

  gate: Any
  up: Any
  recovery: MlpRecovery | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the product."""
    return self.gate.shape

  @property
  def dtype(self) -> jnp.dtype:
    """Dtype of the product."""
    return self.gate.dtype

  def flat(self) -> Self:
    """Merges the leading axes into one."""
    return dataclasses.replace(self, gate=_flat(self.gate), up=_flat(self.up))

  def array(self) -> jax.Array:
    """Computes the product."""
    if self.recovery is None:
      return elementwise.gated_product(self.gate, self.up)
    return recovery.gated_product(self.gate, self.up, self.recovery)


Input = jax.Array | Normalized | GatedProduct | Attended
"""Inputs of a linear: an array, or deferred inputs."""


def _flat(a: jax.Array) -> jax.Array:
  return a.reshape(-1, a.shape[-1])


def flat(x: Input) -> Input:
  """Returns inputs with one leading axis, `[n, d]`."""
  return _flat(x) if isinstance(x, jax.Array) else x.flat()


def as_array(x: Input) -> jax.Array:
  """Returns inputs as an array, computing deferred inputs with XLA."""
  return x if isinstance(x, jax.Array) else x.array()


def for_kernel(x: Input) -> Input:
  """Materializes inputs `[n, d]` with XLA if the kernel cannot compute them."""
  if not isinstance(x, Normalized | Attended):
    return x
  # A block of features must lie in one head.
  is_cut = isinstance(x, Attended) and x.sums.shape[-1] % _BLOCK
  return x.array() if is_cut or x.shape[0] > SINGLE_ROWS else x


def operands(x: Input) -> Input:
  """Reshapes scalars to arrays of one element, which kernels can read."""
  if isinstance(x, GatedProduct):
    scalars = jax.tree.map(lambda a: a.reshape(1), x.recovery)
    return dataclasses.replace(x, recovery=scalars)
  return x


def specs(x: Input, rows: int) -> Any:
  """Returns block specs of `operands(x)` for a grid of blocks, then row tiles."""
  tile = lowering.BlockSpec((rows, _BLOCK), lambda b, i, *_: (i, b))
  match x:
    case Normalized():
      covered = -(-x.shape[1] // _CHUNK) * _CHUNK
      whole = lowering.BlockSpec((None, covered), lambda b, i, *_: (i, 0))
      weight = lowering.BlockSpec((_BLOCK,), lambda b, i, *_: (b,))
      return Normalized(whole, weight, x.eps)
    case Attended():
      return x.specs(_BLOCK)
    case GatedProduct():
      scalar = lowering.BlockSpec((1,), lambda *_: (0,))
      scalars = jax.tree.map(lambda _: scalar, x.recovery)
      return GatedProduct(tile, tile, scalars)
    case _:
      return tile


def tiles(
  refs: Any, width: int, *, is_used_once: bool, interpret: bool
) -> Callable[[Any, jax.Array | None], jax.Array]:
  """Returns a function that computes tiles `[rows, 32]` of this program's block.

  `refs` are the kernel's references for `operands(x)` and `specs`, and `width` is the
  width d of x; `is_used_once` says that a tile is an operand of one product only, and
  `interpret` is that of `lowering.by_ptx`. The function takes a slice of the program's
  rows and their mask.
  """
  match refs:
    case Normalized():
      inverse = _inverse_norm(refs, width)
      block = lowering.columns(lowering.program_id(0) * _BLOCK, _BLOCK)
      # As `elementwise.rms_norm` does: the weight in the dtype of the rows, and the
      # normalized row rounded to it before their product.
      weight = refs.weight[...].astype(refs.rows.dtype)
      normal = refs.rows[block].astype(jnp.float32) * inverse
      return lambda here, mask: (normal.astype(weight.dtype) * weight)[None, :]
    case Attended():
      outputs = shares.combine(refs)
      return lambda here, mask: outputs[None, :]
    case GatedProduct():
      make = functools.partial(_product_tile, refs, interpret)
      once = lowering.computed_once
      return make if is_used_once else lambda here, mask: once(make(here, mask))
    case _:
      return lambda here, mask: lowering.load(refs.at[here, :], mask)


def _inverse_norm(refs: Normalized, width: int) -> jax.Array:
  """Computes 1 / root mean square of a program's one row, a float32 scalar."""
  total = jnp.zeros((_CHUNK,), jnp.float32)
  for first in range(0, width, _CHUNK):
    is_cut = first + _CHUNK > width
    mask = first + lax.iota(jnp.int32, _CHUNK) < width if is_cut else None
    here = lowering.columns(first, _CHUNK)
    x = lowering.load(refs.rows.at[here], mask).astype(jnp.float32)
    total += x * x
  return lax.rsqrt(jnp.sum(total) / width + refs.eps)


def _product_tile(
  refs: GatedProduct, interpret: bool, here: Any, mask: jax.Array | None
) -> jax.Array:
  """Returns a tile of the product, in the arithmetic of its reference."""
  gate, up = (lowering.load(ref.at[here, :], mask) for ref in (refs.gate, refs.up))
  if refs.recovery is not None:
    return recovery.corrected_product(gate, up, refs.recovery, interpret)
  # As `elementwise.gated_product` does: SiLU in float32, rounded before the product.
  # With a recovery the product is rounded once.
  passed = recovery.silu(gate.astype(jnp.float32), interpret)
  return passed.astype(gate.dtype) * up
