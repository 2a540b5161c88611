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
