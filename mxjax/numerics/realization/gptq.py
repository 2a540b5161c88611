r"""GPTQ reconstruction of weights as legal Block32 MXFP4 codes.

Columns are rounded in order. The rounding error of each column is compensated in the
later ones through U, the upper Cholesky factor of the damped inverse Hessian. A block's
exponent stays frozen while its 32 columns are rounded.

Paper: Eq. recon and Discrete Realization; reading A12 and A13 of the specification.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST

DAMPING = 0.01
"""Damping, in units of the mean diagonal of the Hessian."""
DAMPING_GROWTH = 10.0
DAMPING_TRIES = 4
"""A Hessian of fewer tokens than columns is singular, and in float32 its damped form
may not factor. The paper does not say what to do then; a record states what was used.
"""
PANEL = 128
"""Columns after which the original GPTQ code writes its compensation back."""

ScaleSource = Literal["fresh", "lagged", "static", "searched"]
SEARCHED = (0, 1)
"""Exponent offsets above the floor rule's that `searched` tries. The first clips values
between 6 and 8 times its scale to 6; the second has half as many codes."""


class Factor(NamedTuple):
  """The factor of a damped inverse Hessian.

  Attributes:
    upper: U with (H + damping mean(diag H) I)^{-1} = U^T U, `[..., d, d]`.
    damping: Relative damping that was used, `[...]`; NaN where no try made the Hessian
      positive definite.
  """

  upper: jax.Array
  damping: jax.Array


class Reconstruction(NamedTuple):
  """Legal codes, feature-major.

  Attributes:
    codes: uint8 in 0..15, `[blocks, 32, rows]`.
    exponent: int32 `[blocks, rows]`.
    decoded: The decoded weights in the working dtype, `[blocks, 32, rows]`.
  """

  codes: jax.Array
  exponent: jax.Array
  decoded: jax.Array

  def tensor(self) -> mxfp4.MXTensor:
    """Packs to an `MXTensor` of logical shape `[rows, 32 * blocks]`."""
    return mxfp4.pack_tensor(mxfp4.from_blocks(self.codes), self.exponent.T)


def _upper_factor(hessian: jax.Array, damping: jax.Array) -> jax.Array:
  """Computes U for one damping without an inverse: reverse, factor, solve."""
  size = hessian.shape[-1]
  mean = jnp.trace(hessian, axis1=-2, axis2=-1) / size
  identity = jnp.broadcast_to(jnp.eye(size, dtype=hessian.dtype), hessian.shape)
  # An all-zero Hessian has no curvature, so every choice is equally good.
  shift = jnp.where(mean > 0, damping * mean, 1)[..., None, None]
  damped = hessian + shift * identity
  # With rows and columns reversed, the lower factor L is an upper R with R R' = H, and
  # U = R^-1. Inverting H first and factoring that costs more, and its inverse may have
  # lost its definiteness to rounding.
  lower = jnp.linalg.cholesky(damped[..., ::-1, ::-1])
  upper = lower[..., ::-1, ::-1]
  return jax.lax.linalg.triangular_solve(upper, identity, left_side=True, lower=False)


@compilation.jit(static_argnames="damping")
def factor(hessian: jax.Array, damping: float = DAMPING) -> Factor:
  """Factors the damped inverse of X^T X / n, raising the damping tenfold if needed.

  `hessian` is float32 or float64 `[..., d, d]`, and `damping` the relative damping of
  the first try. The result states the damping that was used; the caller reports it.
  """
  first = jnp.full(hessian.shape[:-2], damping, hessian.dtype)
  is_good = lambda upper: jnp.isfinite(upper).all((-2, -1))

  # One loop body for every try, so that XLA compiles the factorization once.
  def attempt(state: Any) -> Any:
    tries, upper, used = state
    good = is_good(upper)
    growth = jnp.asarray(DAMPING_GROWTH, first.dtype) ** tries.astype(first.dtype)
    used = jnp.where(good, used, first * growth)
    # JAX's Cholesky does not raise on a matrix that is not definite: it returns NaN.
    again = _upper_factor(hessian, used)
    return tries + 1, jnp.where(good[..., None, None], upper, again), used

  is_wanted = lambda state: (state[0] < DAMPING_TRIES) & ~is_good(state[1]).all()
  # NaN is not good, so the loop tries the first damping like all others.
  start = jnp.int32(0), jnp.full_like(hessian, jnp.nan), first
  _, upper, used = jax.lax.while_loop(is_wanted, attempt, start)
  return Factor(upper, jnp.where(is_good(upper), used, jnp.nan))


def round_value(
  target: jax.Array, exponent: jax.Array, scale: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array]:
  """Rounds float32 or float64 values at a frozen exponent, saturating.

  `exponent`, int32, and `scale`, its decoding factor in the dtype of `target`,
  broadcast to it. Returns uint8 codes in 0..15 and decoded values.
  """
  code = mxfp4.nearest_codes(target, exponent, rules)
  size = mxfp4.magnitude(code & 7).astype(target.dtype)
  return code.astype(jnp.uint8), jnp.copysign(size, target) * scale


def _round_group(
  weight: jax.Array, upper: jax.Array, exponent: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rounds the 32 columns of one group, all rows at once.

  `weight`, `[..., 32, rows]`, is compensated for all earlier groups; `upper` is the
  group's diagonal block of U; `exponent` is int32 `[..., rows]`, or by column. Returns
  codes, decoded values and scaled errors (w - q) / U_jj, in the shape of `weight`.
  """
  by_column = exponent.ndim == weight.ndim

  def column(j: jax.Array, state: Any) -> Any:
    codes, decoded, errors = state
    coupling = jax.lax.dynamic_index_in_dim(upper, j, axis=-1, keepdims=False)
    pivot = jax.lax.dynamic_index_in_dim(coupling, j, axis=-1, keepdims=True)
    target = jax.lax.dynamic_index_in_dim(weight, j, axis=-2, keepdims=False)
    # Columns not reached yet have zero error, so no mask is needed.
    target -= jnp.einsum("...i,...im->...m", coupling, errors, precision=HIGHEST)
    frozen = exponent
    if by_column:
      frozen = jax.lax.dynamic_index_in_dim(exponent, j, axis=-2, keepdims=False)
    scale = mxfp4.scale_of(frozen).astype(weight.dtype)
    code, value = round_value(target, frozen, scale, rules)
    # By U's diagonal, so that a row of U times it is what later columns make up for.
    error = (target - value) / pivot
    put = lambda array, new: jax.lax.dynamic_update_index_in_dim(array, new, j, -2)
    return put(codes, code), put(decoded, value), put(errors, error)

  zeros = jnp.zeros_like(weight)
  start = jnp.zeros(weight.shape, jnp.uint8), zeros, zeros
  return jax.lax.fori_loop(0, mxfp4.BLOCK_SIZE, column, start)


def _round_searched(
  weight: jax.Array, upper: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Like `_round_group` at the best candidate exponent; also returns that exponent."""
  floor = mxfp4.block_exponent(weight, dataclasses.replace(rules, scale_rule="floor"))
  # The byte after 127 + 127 would be E8M0's NaN.
  exponents = [jnp.minimum(floor + step, mxfp4.SCALE_BIAS) for step in SEARCHED]
  tries = [_round_group(weight, upper, exponent, rules) for exponent in exponents]
  # An error over its pivot, squared, is what the code adds to GPTQ's loss.
  best = jnp.stack([jnp.square(error).sum(-2) for _, _, error in tries]).argmin(0)

  def chosen(*tries: jax.Array) -> jax.Array:
    place = best if tries[0].ndim == best.ndim else best[..., None, :]
    return jnp.take_along_axis(jnp.stack(tries), place[None], axis=0)[0]

  codes, decoded, error = (chosen(*tries) for tries in zip(*tries, strict=True))
  return codes, decoded, error, chosen(*exponents)


@compilation.jit(static_argnames="rules")
def reconstruct_local(
  weight: jax.Array, upper: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> Reconstruction:
  """Rounds every block independently, by GPTQ with the block's Hessian (reading A11).

  `weight` is `[blocks, 32, rows]`, float32 or float64; `upper` is U from `factor` of
  each block's Hessian, `[blocks, 32, 32]`, same dtype. No error is carried from block
  to block.
  """
  exponent = mxfp4.block_exponent(weight, rules)
  codes, decoded, _ = _round_group(weight, upper, exponent, rules)
  return Reconstruction(codes, exponent, decoded)


def _lagged(
  weight: jax.Array, columns: jax.Array, errors: jax.Array, start: jax.Array
) -> jax.Array:
  """Compensates a group as the original code has when it is reached, by panels."""
  panel = start // PANEL * PANEL
  earlier = jnp.arange(errors.shape[0], dtype=jnp.int32) < panel
  known = jnp.where(earlier[:, None], errors, jnp.zeros_like(errors))
  return weight - jnp.einsum("di,dm->im", columns, known, precision=HIGHEST)


@compilation.jit(static_argnames=("rules", "scales"))
def reconstruct(
  weight: jax.Array,
  upper: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  scales: ScaleSource = "fresh",
  exponent: jax.Array | None = None,
) -> Reconstruction:
  """Rounds a whole linear by GPTQ, columns in the order given.

  Args:
    weight: `[blocks, 32, rows]`, feature-major, float32 or float64.
    upper: U from `factor`, `[d, d]` with d = 32 * blocks, same dtype.
    rules: Codec rules.
    scales: Source of a block's exponent: `fresh`, the compensated weights when the
      block is reached; `lagged`, the weights compensated only by earlier panels of 128
      columns, as in the original code; `static`, the original weights; `searched`, the
      first of the `SEARCHED` exponents with the smallest sum of squared compensated
      errors in the block, whatever the scale rule.
    exponent: Exponents by column, int32 `[blocks, 32, rows]`, which replace `scales`
      and which the result then has: columns of a group need not share a block.
  """
  blocks, size, rows = weight.shape

  def group(errors: jax.Array, item: Any) -> tuple[jax.Array, Reconstruction]:
    index, original, chosen = item
    start = index * size
    columns = jax.lax.dynamic_slice_in_dim(upper, start, size, axis=1)
    # Rows of errors are zero from this group on, so all of U's rows can be multiplied.
    target = original - jnp.einsum("di,dm->im", columns, errors, precision=HIGHEST)
    diagonal = jax.lax.dynamic_slice_in_dim(columns, start, size, axis=0)
    if chosen is None and scales == "searched":
      codes, decoded, error, chosen = _round_searched(target, diagonal, rules)
    else:
      if chosen is None:
        source = target if scales == "fresh" else original
        if scales == "lagged":
          source = _lagged(original, columns, errors, start)
        chosen = mxfp4.block_exponent(source, rules)
      codes, decoded, error = _round_group(target, diagonal, chosen, rules)
    errors = jax.lax.dynamic_update_slice_in_dim(errors, error, start, axis=0)
    return errors, Reconstruction(codes, chosen, decoded)

  errors = jnp.zeros((blocks * size, rows), weight.dtype)
  indices = jnp.arange(blocks, dtype=jnp.int32)
  _, result = jax.lax.scan(group, errors, (indices, weight, exponent))
  return result


def descending_curvature(hessian: jax.Array) -> jax.Array:
  """Orders columns by falling Hessian diagonal, int32 `[d]`; ties keep their order."""
  return jnp.argsort(-jnp.diagonal(hessian), stable=True).astype(jnp.int32)


@compilation.jit(static_argnames="rules")
def reconstruct_ordered(
  weight: jax.Array,
  upper: jax.Array,
  order: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
) -> Reconstruction:
  """Rounds by GPTQ in another column order; blocks and exponents stay in place.

  Exponents come from the original weights. `order`, int32 `[d]`, lists the column
  rounded at each step; `upper` is U from `factor` of the Hessian in that order. Returns
  legal codes in the original order.
  """
  blocks, size, rows = weight.shape
  exponent = mxfp4.block_exponent(weight, rules)
  # From here on groups are 32 columns in the new order, of any blocks.
  flat = weight.reshape(-1, rows)[order].reshape(weight.shape)
  by_column = jnp.repeat(exponent, size, axis=0)[order].reshape(weight.shape)
  result = reconstruct(flat, upper, rules, exponent=by_column)
  back = jnp.argsort(order)
  restore = lambda array: array.reshape(-1, rows)[back].reshape(blocks, size, rows)
  return Reconstruction(restore(result.codes), exponent, restore(result.decoded))


@compilation.jit(static_argnames="rules")
def round_to_nearest(
  weight: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> Reconstruction:
  """Rounds weights `[blocks, 32, rows]` to nearest, as a `Reconstruction`."""
  exponent = mxfp4.block_exponent(weight, rules)
  scale = mxfp4.scale_of(exponent)[..., None, :].astype(weight.dtype)
  codes, decoded = round_value(weight, exponent[..., None, :], scale, rules)
  return Reconstruction(codes, exponent, decoded)


@compilation.jit()
def reconstruction_loss(
  weight: jax.Array, decoded: jax.Array, hessian: jax.Array
) -> jax.Array:
  """Computes tr((W - Q) H (W - Q)^T), the objective of Eq. recon, as a scalar.

  `weight` and `decoded` are `[blocks, 32, rows]`, `hessian` is `[d, d]`.
  """
  error = (weight - decoded).reshape(-1, weight.shape[-1])
  return jnp.einsum("dm,de,em->", error, hessian, error, precision=HIGHEST)
