"""MXFP4 encode in one pass over memory; the reference is `mxjax.mxfp4.encode`.

A row-major array `[..., d]` is a list of 32-value blocks, whatever d is, so a program
takes a tile of blocks from it. A block costs 128 (float32) or 64 (bfloat16) bytes
read and 17 written, and about 20 integer operations a value.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import mxfp4
from mxjax.pallas_kernels import codec, lowering
from mxjax.pallas_kernels.lowering import Implementation


@dataclasses.dataclass(frozen=True)
class Tile:
  """How the work is cut: blocks a program, warps that share them."""

  blocks: int = 256
  warps: int = 4


def _encode_kernel(
  x_ref: Any, codes_ref: Any, scales_ref: Any, *, rows: int, tile: int, interpret: bool
) -> None:
  mask = lowering.tail_mask(rows, tile, axis=0)
  x = lowering.load(x_ref, mask).astype(jnp.float32)
  index, exponent = codec.encode(x, has_subnormals=not interpret)
  lowering.store(codes_ref, codec.pack(codec.with_sign(index, x)), mask)
  byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(tile)
  lowering.store(scales_ref, byte, mask)


def launch(
  x: jax.Array, *, tile: Tile = Tile(), interpret: bool = False
) -> mxfp4.MXTensor:
  """Runs the kernel on `[..., d]`, float32, bfloat16 or float16."""
  rows, size = math.prod(x.shape) // mxfp4.BLOCK_SIZE, tile.blocks
  codes, scales = lowering.launch(
    functools.partial(_encode_kernel, rows=rows, tile=size, interpret=interpret),
    x.reshape(rows, mxfp4.BLOCK_SIZE),
    name="mxfp4_encode",
    grid=(-(-rows // size),),
    in_specs=[lowering.BlockSpec((size, mxfp4.BLOCK_SIZE), lambda i: (i, 0))],
    out_specs=[
      lowering.BlockSpec((size, mxfp4.BLOCK_SIZE // 2), lambda i: (i, 0)),
      lowering.BlockSpec((size,), lambda i: (i,)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((rows, mxfp4.BLOCK_SIZE // 2), jnp.uint8),
      jax.ShapeDtypeStruct((rows,), jnp.uint8),
    ],
    warps=tile.warps,
    interpret=interpret,
  )
  leading = x.shape[:-1]
  return mxfp4.MXTensor(codes.reshape(*leading, -1), scales.reshape(*leading, -1))


def encode(
  x: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  implementation: Implementation | None = None,
) -> mxfp4.MXTensor:
  """Encodes the last axis in blocks of 32, equal to `mxfp4.encode` bit for bit.

  Args:
    x: `[..., d]`, float32, bfloat16 or float16, d a multiple of 32.
    rules: Scale and tie rules; the kernel knows the paper's.
    implementation: See `lowering.choose`.

  Returns:
    The packed tensor. Blocks with inf or NaN get the scale byte 255, unlike the
    reference outside a trace, which refuses them.

  Raises:
    NotImplementedError: A kernel was asked for that cannot take these arguments.
    ValueError: The width is not a multiple of 32.
  """
  mxfp4.check_width("pallas_kernels.encode", x.shape[-1])
  obstacle = None
  if rules != mxfp4.PAPER_RULES:
    obstacle = f"it knows the paper's rules only, got {rules}"
  elif x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    obstacle = f"it takes float32, bfloat16 or float16, got {x.dtype}"
  elif x.size == 0:
    obstacle = f"there is nothing to encode in shape {x.shape}"
  chosen = lowering.choose(implementation, "pallas_kernels.encode", obstacle)
  if chosen == "xla":
    return mxfp4.encode(x, rules)
  return launch(x, interpret=chosen == "interpret")
