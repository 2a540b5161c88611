"""The bfloat16 encoder in Mosaic GPU; see `mxfp4_encode.py`."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import codec
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu

BLOCKS = 64
"""Blocks of a program, one warp group: the rows of the smallest `WGMMA` layout, in
which four threads hold a block and each has eight of its values."""


def obstacle(x: jax.Array) -> str | None:
  """Returns why the encoder cannot take an array, or None."""
  if x.dtype != jnp.bfloat16 or x.size < BLOCKS * mxfp4.BLOCK_SIZE:
    wanted = f"bfloat16 of {BLOCKS} blocks or more"
    return f"its Mosaic form takes {wanted}, got {x.dtype}{list(x.shape)}"
  return device.obstacle()


def encode_halves(
  even: jax.Array, odd: jax.Array, *, has_subnormals: bool
) -> tuple[jax.Array, jax.Array]:
  """Encodes blocks by their even and odd columns, float32 `[n, 16]` each.

  Returns int32 bytes of two codes, `[n, 16]`, and int32 exponents, `[n]`.
  """
  halves = even, odd
  sizes = [codec.bits(half) & codec.UPPER_HALF for half in halves]
  exponent = codec.block_exponent(jnp.max(jnp.maximum(*sizes), axis=1))
  wide = lax.broadcast_in_dim(exponent, even.shape, (0,))
  index = functools.partial(codec.magnitude_index, has_subnormals=has_subnormals)
  low, high = (
    codec.with_sign(index(size, wide), half)
    for size, half in zip(sizes, halves, strict=True)
  )
  return low | (high << 4), exponent


def encode(x: jax.Array, *, interpret: bool = False) -> mxfp4.MXTensor:
  """Runs the encoder on bfloat16 `[..., d]` of 64 blocks or more."""
  rows = math.prod(x.shape) // mxfp4.BLOCK_SIZE
  # Views two values as one word; no data moves.
  pairs = x.reshape(rows, mxfp4.BLOCK_SIZE // 2, 2)
  words = lax.bitcast_convert_type(pairs, jnp.int32)

  def mxjax_mxfp4_encode(x_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    # The last program overlaps the one before, and both write the same bytes.
    first = jnp.minimum(lax.axis_index("tile") * BLOCKS, rows - BLOCKS)
    here = pl.ds(first, BLOCKS)
    word = gpu.load(x_ref.at[here], layout=gpu.Layout.WGMMA, optimized=False)
    even, odd = codec.from_bits(word << 16), codec.from_bits(word & codec.UPPER)
    packed, exponent = encode_halves(even, odd, has_subnormals=not interpret)
    codes_ref[here] = packed.astype(jnp.uint8)
    scales_ref[here] = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8)

  shapes = (rows, mxfp4.BLOCK_SIZE // 2), (rows,)
  codes, scales = gpu.kernel(
    mxjax_mxfp4_encode,
    out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes),
    grid=(-(-rows // BLOCKS),),
    grid_names=("tile",),
    interpret=device.mode(interpret),
  )(words)
  leading = x.shape[:-1]
  return mxfp4.MXTensor(codes.reshape(*leading, -1), scales.reshape(*leading, -1))
