"""`mxjax.encode`: MXFP4 encode with the platform's fastest encoder.

`mxjax.numerics.mxfp4.encode` is the definition and `mxjax.numerics.native.encode` the
CPU encoder; this module has the GPU encoder, which makes one pass over memory. A
program takes a tile of 32-value blocks, each 128 (float32) or 64 (bfloat16) bytes read
and 17 written. Two bfloat16 values share a register and its instructions.
"""

import functools
import math
from typing import Any

import jax
import jax.core
import jax.dlpack
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.native import encode as native_encode
from mxjax.pallas_kernels import codec, lowering, pairs

BLOCKS, WARPS = 256, 4
"""Blocks per program, and the warps that share them."""


def _encode_kernel(
  x_ref: Any, codes_ref: Any, scales_ref: Any, *, rows: int, interpret: bool
) -> None:
  mask = lowering.tail_mask(rows, BLOCKS, lowering.program_id(0))
  x = lowering.load(x_ref, mask)
  if x.dtype == jnp.int32:
    # Pairs of bfloat16.
    exponent = codec.block_exponent(pairs.largest(x))[:, None]
    factor = jnp.broadcast_to(pairs.factor_words(exponent), x.shape)
    encoding = pairs.codes_ptx(), pairs.nearest_codes
    packed = lowering.by_ptx(*encoding, x, factor, interpret=interpret)
    packed = packed.astype(jnp.uint8)
  else:
    x = x.astype(jnp.float32)
    index, exponent = codec.encode(x, has_subnormals=not interpret)
    packed = codec.pack(codec.with_sign(index, x))
  lowering.store(codes_ref, packed, mask)
  byte = (exponent + mxfp4.SCALE_BIAS).astype(jnp.uint8).reshape(BLOCKS)
  lowering.store(scales_ref, byte, mask)


def launch(x: jax.Array, *, interpret: bool = False) -> mxfp4.MXTensor:
  """Runs the kernel on `[..., d]`, float32, bfloat16 or float16."""
  rows = math.prod(x.shape) // mxfp4.BLOCK_SIZE
  spec, array = lowering.BlockSpec, jax.ShapeDtypeStruct
  blocks = x.reshape(rows, mxfp4.BLOCK_SIZE)
  if x.dtype == jnp.bfloat16:
    # Views two values as one word; no data moves.
    blocks = lax.bitcast_convert_type(blocks.reshape(rows, -1, 2), jnp.int32)
  codes, scales = lowering.launch(
    functools.partial(_encode_kernel, rows=rows, interpret=interpret),
    blocks,
    name="mxfp4_encode",
    grid=(-(-rows // BLOCKS),),
    in_specs=[spec((BLOCKS, blocks.shape[1]), lambda i: (i, 0))],
    out_specs=[
      spec((BLOCKS, mxfp4.BLOCK_SIZE // 2), lambda i: (i, 0)),
      spec((BLOCKS,), lambda i: (i,)),
    ],
    out_shape=[
      array((rows, mxfp4.BLOCK_SIZE // 2), jnp.uint8),
      array((rows,), jnp.uint8),
    ],
    warps=WARPS,
    interpret=interpret,
  )
  leading = x.shape[:-1]
  return mxfp4.MXTensor(codes.reshape(*leading, -1), scales.reshape(*leading, -1))


def _obstacle(x: jax.Array, rules: mxfp4.Rules) -> str | None:
  """Returns why the kernel cannot take these arguments, or None."""
  if rules != mxfp4.PAPER_RULES:
    return f"it knows the paper's rules only, got {rules}"
  if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f"it takes float32, bfloat16 or float16, got {x.dtype}"
  if not isinstance(x, jax.core.Tracer) and len(x.devices()) > 1:
    return f"it runs on one device, and the array lies on {x.devices()}"
  blocks = x.size // mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE // 2
  codes = jax.ShapeDtypeStruct(blocks, jnp.uint8)
  return lowering.unaddressed(codes)


def encode(
  x: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  implementation: Implementation | None = None,
) -> mxfp4.MXTensor:
  """Encodes the last axis in blocks of 32, exactly for every finite value.

  Every implementation gives the bits of `mxfp4.encode`, the definition. With None, a
  GPU runs the Pallas kernel, and a CPU the native one for arrays of at least
  `native.encode.WORTH_IT` values outside a trace. While tracing, a block with inf or
  NaN gets the illegal scale byte 255, which `mxfp4.check_legal` reports.

  Args:
    x: `[..., d]` float32, bfloat16, float16 or (inside a 64-bit scope) float64.
    rules: Scale and tie rules.
    implementation: See `implementations.choose`.

  Raises:
    TypeError: The array is not floating point, or the call is differentiated.
    ValueError: The width is not a multiple of 32, or (outside a trace) inf or NaN.
  """
  x = mxfp4.without_gradient(jnp.asarray(x))
  mxfp4.check_encodable(x)
  names = rules.scale_rule, rules.tie_rule
  implementation = implementations.choose(
    "mxfp4.encode",
    implementation,
    native=native_encode.obstacle(x, *names),
    pallas=_obstacle(x, rules),
    slower=("native",) if x.size < native_encode.WORTH_IT else (),
    on=implementations.target_for(x),
  )
  if not x.size:
    return mxfp4.encode(x, rules)
  if implementation == "native":
    payload = native_encode.encode(np.asarray(x.astype(jnp.float32)), rules.scale_rule)
    if payload is not None:
      return mxfp4.MXTensor(*map(jax.dlpack.from_dlpack, payload))
  if implementation in ("xla", "native"):  # The definition names what is not finite.
    return mxfp4.encode(x, rules)
  tensor = launch(x, interpret=implementation == "interpret")
  mxfp4.check_finite(x, tensor)
  return tensor
