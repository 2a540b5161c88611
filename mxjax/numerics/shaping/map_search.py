r"""Search of a block's map: the best of many, by the rounding error that each makes.

A chart C that balances a block's inputs and weights leaves a rotation free. Candidates
turn it into its *principal axes*, where both mapped moments are as diagonal as one
rotation can make them, and spread every axis evenly over the 32 coordinates by R_H. The
order P of the axes decides which of them meet with which signs, and a factor decides
where the maxima of blocks lie between two powers of two:

.. math::
  M_k = 2^{\varphi_k} R_H P_k Q^\top C , \qquad N_k = M_k^{-\top} , \qquad
  \varphi_k \in \{0, \tfrac18, \dots, \tfrac78\}

Each is measured on inputs x_t and weight rows w_r of the block,

.. math::
  J_k = \frac1n \sum_t e_t^\top (N_k B N_k^\top) e_t
    + \frac1m \sum_r f_r^\top (M_k A M_k^\top) f_r ,

with the moments A of inputs and B of weights, e_t the error of rounding M_k x_t by the
activations' rule, and f_r that of rounding N_k w_r with a searched exponent and
coordinate descent: what the errors of either operand alone add to the outputs.

Not in the paper. A language model found this search as a program of the `ptq` task; see
`docs/results/discovery.md`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.precision import block_products
from mxjax.numerics.realization import code_descent, few_codes, gptq
from mxjax.numerics.shaping import input_maps, reference_chart

PHASES = 8
"""Factors of the candidates, evenly spaced in an octave."""
SWEEPS = 2
"""Passes of coordinate descent over the weights of a candidate."""


def orders(count: int) -> np.ndarray:
  """Returns orders of the 32 axes, int64 `[count, 32]`; the first is the natural one.

  They are hashes of integers, so that no library's random numbers decide a map.
  """
  candidate = np.arange(count, dtype=np.int64)[:, None]
  axis = np.arange(mxfp4.BLOCK_SIZE, dtype=np.int64)[None]
  # The hash of the recorded program; its products stay below 2^63.
  mixed = (axis * 7919 + candidate * 104729 + 12345) * 1103515245 + 12345
  mixed = mixed % 2**31
  mixed = ((mixed ^ (mixed >> 7)) * 69069 + 1) % 2**31
  # The axis is added so that no two keys of a candidate are equal.
  keys = (mixed ^ (mixed >> 11)) * 64 + axis
  keys[:1] = axis
  return np.argsort(keys, axis=1)


def turns(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns R_H P_k, float64 `[count, 32, 32]`, and 2^phi_k, float64 `[count]`.

  Steps of five eighths go through all eight phases before one comes again.
  """
  rotation = np.asarray(input_maps.hadamard(mxfp4.BLOCK_SIZE, jnp.float64))
  # Columns in another order; the candidates come first.
  turned = np.moveaxis(rotation[:, orders(count)], 1, 0)
  return turned, np.exp2(5 * np.arange(count) % PHASES / PHASES)


@compilation.jit()
def principal_axes(
  chart: jax.Array, activation_moment: jax.Array, weight_moment: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Turns charts into their principal axes: Q'C and its inverse transposed.

  The columns of Q are the eigenvectors of C A C' + C^-T B C^-1, ordered by eigenvalue,
  where A and B have the ridge of the charts and both products trace one. Operands and
  results are float64 (else TypeError) `[blocks, 32, 32]`.
  """
  precision.require_float64("principal_axes", chart, activation_moment, weight_moment)
  inverse = jnp.linalg.inv(chart).mT

  def mapped(matrix: jax.Array, moment: jax.Array) -> jax.Array:
    # The ridge of the charts, without which a block of zeros has no trace.
    found = matrix @ reference_chart.ridge(moment) @ matrix.mT
    return found / jnp.trace(found, axis1=-2, axis2=-1)[..., None, None]

  total = mapped(chart, activation_moment) + mapped(inverse, weight_moment)
  axes = jnp.linalg.eigh(0.5 * (total + total.mT))[1]
  return axes.mT @ chart, axes.mT @ inverse


@compilation.jit(static_argnames=("rules", "changes"))
def losses(
  turned: jax.Array,
  phases: jax.Array,
  axes: jax.Array,
  inverse: jax.Array,
  inputs: jax.Array,
  weight: jax.Array,
  activation_moment: jax.Array,
  weight_moment: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  changes: int | None = 1,
) -> jax.Array:
  """Computes J_k of every candidate and block, float64 `[count, blocks]`.

  Args:
    turned: R_H P_k of `turns`, float64 `[count, 32, 32]`.
    phases: Their factors, float64 `[count]`.
    axes: Q'C of `principal_axes`, float64 `[blocks, 32, 32]`.
    inverse: The transposed inverse of `axes`.
    inputs: Inputs in native coordinates, float32 `[blocks, 32, n]`.
    weight: Weights in native coordinates, float32 `[blocks, 32, rows]`.
    activation_moment: A, float64 `[blocks, 32, 32]`, in native coordinates.
    weight_moment: B, in the same form.
    rules: Codec rules of the inputs; weights share that of ties.
    changes: Codes that the activations' rule changes, see `few_codes`; 0 is nearest,
      and None leaves inputs as they are, so that J_k has the error of weights alone.
  """

  def one(item: tuple[jax.Array, jax.Array]) -> jax.Array:
    turn, phase = item
    # A turn is orthogonal, so the inverse transposed takes the same one and the inverse
    # factor.
    matrix, fold = phase * (turn @ axes), turn @ inverse / phase
    gram, moment = (
      (m @ of @ m.mT).astype(jnp.float32)
      for m, of in ((fold, weight_moment), (matrix, activation_moment))
    )
    mapped = block_products(matrix.astype(jnp.float32), inputs)
    folded = block_products(fold.astype(jnp.float32), weight)
    of_weight = weight_loss(folded, moment, rules)
    if changes is None:
      return of_weight
    of_inputs = _input_loss(mapped, gram, rules, changes)
    # Two errors that are not correlated: their squares add up in the outputs.
    return of_inputs + of_weight

  # One after the other: each candidate has mapped inputs and weights of its own.
  return jax.lax.map(one, (turned, phases))


def _squares(error: jax.Array, moment: jax.Array) -> jax.Array:
  """Computes e'Me of each column, `[blocks, 32, n]` to `[blocks, n]`."""
  return (error * block_products(moment, error)).sum(-2)


def _mean(squares: jax.Array) -> jax.Array:
  return squares.astype(jnp.float64).mean(-1)


def _input_loss(
  x: jax.Array, gram: jax.Array, rules: mxfp4.Rules, changes: int
) -> jax.Array:
  if changes:
    rounded = few_codes.refined_blocks(x, gram, rules, changes=changes)
  else:
    rounded = mxfp4.round_blocks(x, rules)
  return _mean(_squares(rounded - x, gram))


def weight_loss(
  weight: jax.Array, moment: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> jax.Array:
  """Computes the mean of f'Mf over rows, the better of two exponents for each.

  `weight` is float32 `[blocks, 32, rows]` and `moment` M, float32 `[blocks, 32, 32]`,
  in the same coordinates; of `rules` only that of ties counts. Rows are rounded to
  nearest, and then by passes of coordinate descent in M. The result is float64
  `[blocks]`.
  """
  # `gptq.SEARCHED` counts from the floor rule's exponent.
  rules = dataclasses.replace(rules, scale_rule="floor")
  floor = mxfp4.block_exponent(weight, rules)

  def descend(*block: jax.Array) -> tuple[jax.Array, jax.Array]:
    codes, decoded, slope, tile, exponent = block
    return code_descent.descend_group(codes, decoded, slope, tile, exponent, rules)

  def tried(step: int) -> jax.Array:
    exponent = jnp.minimum(floor + step, mxfp4.SCALE_BIAS)
    shown = exponent[..., None, :]
    start = gptq.round_value(weight, shown, mxfp4.scale_of(shown), rules)

    def sweep(_: jax.Array, state: Any) -> Any:
      # From the current codes, so that rounding errors do not add up over sweeps.
      slope = block_products(moment, weight - state[1])
      return jax.vmap(descend)(*state, slope, moment, exponent)

    decoded = jax.lax.fori_loop(0, SWEEPS, sweep, start)[1]
    return _squares(weight - decoded, moment)

  return _mean(jnp.minimum(*(tried(step) for step in gptq.SEARCHED)))
