"""Packed operands of the kernels' tests, and what they are in float64."""

import jax.numpy as jnp
import numpy as np

from mxjax.numerics import mxfp4


def packed(rows, width, low, high, seed=0):
  """Random codes whose exponents lie in a range and reach both ends of it."""
  rng = np.random.default_rng(seed)
  scales = rng.integers(low, high + 1, (rows, width // 32)) + mxfp4.SCALE_BIAS
  scales[0, :2] = low + mxfp4.SCALE_BIAS, high + mxfp4.SCALE_BIAS
  codes = rng.integers(0, 256, (rows, width // 2))
  return mxfp4.MXTensor(jnp.asarray(codes, jnp.uint8), jnp.asarray(scales, jnp.uint8))


def elements(codes):
  """Values of codes 0..15, in units of the scale."""
  magnitude = np.array(mxfp4.MAGNITUDES)[codes & 7]
  return np.where(codes >= 8, -magnitude, magnitude)


def every_code_and_scale():
  """A tensor `[256, 32]` of all codes, twice, at each scale byte; and it in float64.

  The byte 255 is NaN, whatever the code.
  """
  byte = np.arange(256)
  code = np.tile(np.arange(16), (256, 2))
  codes = (code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8)
  tensor = mxfp4.MXTensor(jnp.asarray(codes), jnp.asarray(byte[:, None], jnp.uint8))
  scale = np.where(byte == mxfp4.NOT_FINITE, np.nan, np.ldexp(1.0, byte - 127))
  return tensor, elements(code) * scale[:, None]


def rounded(values, dtype):
  """Values in float64 in a dtype: inf beyond its range, with the sign of each."""
  with np.errstate(over="ignore"):
    return np.asarray(values).astype(dtype)


def decoded(tensor):
  """Its values in float64."""
  codes = np.asarray(tensor.codes)
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
  exponents = np.asarray(tensor.scales).astype(int) - mxfp4.SCALE_BIAS
  return elements(nibbles) * np.ldexp(1.0, exponents).repeat(32, -1)


def exact(x, weight):
  """The product in float64, and what float32 sums of its terms may be off by."""
  x, w = decoded(x), decoded(weight)
  return x @ w.T, x.shape[1] * 2.0**-24 * (np.abs(x) @ np.abs(w).T)
