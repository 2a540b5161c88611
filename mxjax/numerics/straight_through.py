"""Straight-through rounding: rounds in the forward pass, identity in the backward pass.

Values equal those of the strict encoder bit for bit. The backward pass treats exponents
as constants, and saturated values pass their gradient like all others.
"""

import functools

import jax

from mxjax.numerics import mxfp4


# A rule of its own, because the encoder works on bits, through which no gradient
# passes.
@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def round_blocks(
  blocks: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> jax.Array:
  """Rounds float32 blocks `[..., 32, columns]` like `mxfp4.round_blocks`."""
  return mxfp4.round_blocks(blocks, rules)


round_blocks.defvjp(
  lambda blocks, rules: (mxfp4.round_blocks(blocks, rules), None),
  lambda rules, residual, gradient: (gradient,),
)


def round_rows(x: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES) -> jax.Array:
  """Rounds `[..., d]` with blocks along the last axis, in the dtype of `x`."""
  rows = x.reshape(-1, x.shape[-1]).astype("float32")
  rounded = mxfp4.from_blocks(round_blocks(mxfp4.to_blocks(rows), rules))
  return rounded.reshape(x.shape).astype(x.dtype)
