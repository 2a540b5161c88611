"""The bfloat16 encoder in Mosaic GPU; see `mxfp4_encode.py`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import pairs
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu

BLOCKS = 256
"""Blocks of a program, one warp group, in the layout `WGMMA`: four threads hold a block
and each has eight of its values."""


def encode(x: jax.Array, *, interpret: bool = False) -> mxfp4.MXTensor:
  """Runs the encoder on bfloat16 `[..., d]` of `BLOCKS` blocks or more."""
  rows = math.prod(x.shape) // mxfp4.BLOCK_SIZE

  def mxjax_mxfp4_encode(x_ref: Any, codes_ref: Any, scales_ref: Any) -> None:
    # The last program overlaps the one before, and both write the same bytes.
    first = jnp.minimum(lax.axis_index("tile") * BLOCKS, rows - BLOCKS)
    here = pl.ds(first, BLOCKS)
    x = gpu.load(x_ref.at[here], layout=gpu.Layout.WGMMA, optimized=False)
    exponent = device.block_exponents(x, interpret=interpret)
    word = device.words(x, interpret=interpret)
    factor = lax.broadcast_in_dim(pairs.factor_words(exponent), word.shape, (0,))
    keywords = {"layout": device.words_layout(), "interpret": interpret}
    code = device.on_pairs(
      pairs.codes_ptx(), pairs.nearest_codes, word, factor, **keywords
    )
    codes_ref[here] = code.astype(jnp.uint8)
    scales_ref[here] = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8)

  shapes = (rows, mxfp4.BLOCK_SIZE // 2), (rows,)
  codes, scales = gpu.kernel(
    mxjax_mxfp4_encode,
    out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes),
    grid=(-(-rows // BLOCKS),),
    grid_names=("tile",),
    interpret=device.mode(interpret),
  )(x.reshape(rows, mxfp4.BLOCK_SIZE))
  leading = x.shape[:-1]
  return mxfp4.MXTensor(codes.reshape(*leading, -1), scales.reshape(*leading, -1))
