r"""Descent of a block's map along rotations, on the rounding errors that it makes.

A map M of a block, with N = M^-T, may be followed by any rotation R. This module turns
R so that rounding costs least, on inputs x_t and weight rows w_r of the block:

.. math::
  L(R) = \frac1n \sum_t e_t^\top R N B N^\top R^\top e_t
    + \frac{\kappa}{m} \sum_r \lVert f_r \rVert^2 , \qquad
  \kappa = \det(M A M^\top)^{1/32} ,

with the moments A of inputs and B of weights, e_t the error of rounding R M x_t by the
activations' rule, and f_r that of rounding R N w_r to nearest at the better of two
exponents. The weights' errors have no metric but a factor: GPTQ moves the error of a
code into the codes after it, so that a code costs its squared pivot in the Hessian
alone. The product of the pivots is det(M A M'), whatever R is, and kappa is their mean.

Rounding has no slope. The codes of a step are held, as if they were constants, and what
is differentiated is the output of the block, in which R turns the codes back
(*straight-through estimation*). With S skew-symmetric and R moving along S R,

.. math::
  \frac{\partial L}{\partial S} = -\frac2n \sum_t G e_t \, q_t^\top
    - \frac{2\kappa}{m} \sum_r f_r (R N w_r)^\top , \qquad G = R N B N^\top R^\top ,

minus its transpose, where q_t is the rounded input. Adam takes the steps, at a rate
that falls along half a cosine, each on a part of the tokens and rows.

Not in the paper. A language model wrote such a descent as a program of the `ptq` task;
see `docs/results/discovery.md`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.precision import HIGHEST, block_products
from mxjax.numerics.realization import few_codes, gptq
from mxjax.numerics.shaping import reference_chart

PARTS = 4
"""Parts of the tokens and rows; a step sees one of them, in turn."""
RATE = 0.04
"""Of the first step, in radians for each plane of two coordinates."""
MEAN_DECAY, SQUARE_DECAY = 0.9, 0.98
"""Of Adam's means of slopes and of their squares."""
# Adam's: a slope minus its transpose has zeros on the diagonal, which would be 0 / 0.
EPSILON = 1e-20


class Descent(NamedTuple):
  """Where a descent ended.

  Attributes:
    rotation: R, float32 `[blocks, 32, 32]`; I where no lower loss was found.
    before: L of R = I, float32 `[blocks]`, over all tokens and rows.
    after: L of the rotation.
  """

  rotation: jax.Array
  before: jax.Array
  after: jax.Array


@compilation.jit()
def compensated_moment(matrix: jax.Array, activation_moment: jax.Array) -> jax.Array:
  """Computes kappa, the geometric mean of the eigenvalues of M A M'.

  Operands are float64 (else TypeError) `[blocks, 32, 32]`, and A gets the ridge of the
  charts; the result is float64 `[blocks]`.
  """
  precision.require_float64("compensated_moment", matrix, activation_moment)
  moment = matrix @ reference_chart.ridge(activation_moment) @ matrix.mT
  return jnp.exp(jnp.linalg.slogdet(moment)[1] / moment.shape[-1])


@compilation.jit(static_argnames=("rules", "changes"))
def loss_and_slope(
  rotation: jax.Array,
  gram: jax.Array,
  kappa: jax.Array,
  inputs: jax.Array,
  weight: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  changes: int | None = 1,
) -> tuple[jax.Array, jax.Array]:
  """Computes L of rotations, and its slope where codes are held.

  Operands are float32. Returns L, `[blocks]`, and the slope by S before its transpose
  is taken away, `[blocks, 32, 32]`.

  Args:
    rotation: R, `[blocks, 32, 32]`.
    gram: N B N', `[blocks, 32, 32]`.
    kappa: `[blocks]`.
    inputs: M x_t, `[blocks, 32, n]`.
    weight: N w_r, `[blocks, 32, rows]`.
    rules: Codec rules of the inputs; weights share that of ties.
    changes: Codes that the activations' rule changes, see `few_codes`; 0 is nearest,
      and None leaves inputs as they are, so that L has the error of weights alone.
  """
  # The weights' term of L.
  folded = block_products(rotation, weight)
  error = rounded_weight(folded, rules) - folded
  share = kappa / folded.shape[-1]
  loss = share * jnp.square(error).sum((-1, -2))
  slope = -2 * share[:, None, None] * _outer(error, folded)
  if changes is None:
    return loss, slope
  # The inputs' term, in the metric G of the turned weights.
  mapped = block_products(rotation, inputs)
  turned = block_products(block_products(rotation, gram), rotation.mT)
  if changes:
    rounded = few_codes.refined_blocks(mapped, turned, rules, changes=changes)
  else:
    rounded = mxfp4.round_blocks(mapped, rules)
  error = rounded - mapped
  pulled = block_products(turned, error)
  count = mapped.shape[-1]
  loss += (error * pulled).sum((-1, -2)) / count
  return loss, slope - 2 * _outer(pulled, rounded) / count


@compilation.jit(static_argnames=("rules", "changes", "steps"))
def descend(
  matrix: jax.Array,
  inverse: jax.Array,
  kappa: jax.Array,
  inputs: jax.Array,
  weight: jax.Array,
  weight_moment: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  changes: int | None = 1,
  steps: int,
) -> Descent:
  """Turns maps so that rounding costs less.

  Args:
    matrix: M, float64 `[blocks, 32, 32]`.
    inverse: Its transposed inverse N.
    kappa: `compensated_moment` of M, float64 `[blocks]`.
    inputs: Inputs in native coordinates, float32 `[blocks, 32, n]`. A step sees every
      `PARTS`-th of them; what is left of the last round is left out.
    weight: Weights in native coordinates, float32 `[blocks, 32, rows]`, in the same
      way.
    weight_moment: B, float64 `[blocks, 32, 32]`, in native coordinates.
    rules: As of `loss_and_slope`.
    changes: As of `loss_and_slope`.
    steps: Number of steps.
  """
  single = lambda array: array.astype(jnp.float32)
  gram, cost = single(inverse @ weight_moment @ inverse.mT), single(kappa)
  # No more parts than columns, or one would be empty.
  parts = min(PARTS, inputs.shape[-1], weight.shape[-1])
  of_inputs = _dealt(block_products(single(matrix), inputs), parts)
  of_weight = _dealt(block_products(single(inverse), weight), parts)

  def measured(rotation: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    seen = of_inputs[part], of_weight[part]
    return loss_and_slope(rotation, gram, cost, *seen, rules, changes=changes)

  def step(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    rotation, mean, square = state
    slope = measured(rotation, number % parts)[1]
    skew = slope - slope.mT
    mean = MEAN_DECAY * mean + (1 - MEAN_DECAY) * skew
    square = SQUARE_DECAY * square + (1 - SQUARE_DECAY) * jnp.square(skew)
    done = number.astype(jnp.float32)
    # Adam's means begin at zero; the division takes that off.
    unbiased = lambda sums, decay: sums / (1 - decay ** (done + 1))
    size = jnp.sqrt(unbiased(square, SQUARE_DECAY)) + EPSILON
    rate = RATE / 2 * (1 + jnp.cos(jnp.pi * done / steps))
    way = unbiased(mean, MEAN_DECAY) / size
    return _turned(rotation, -rate * way), mean, square

  start = jnp.broadcast_to(jnp.eye(mxfp4.BLOCK_SIZE, dtype=jnp.float32), gram.shape)
  zeros = jnp.zeros_like(start)
  rotation = jax.lax.fori_loop(0, steps, step, (start, zeros, zeros))[0]
  whole = lambda rotation: jax.lax.map(
    lambda part: measured(rotation, part)[0], jnp.arange(parts)
  ).mean(0)
  before, after = whole(start), whole(rotation)
  # What is not finite is not lower either.
  is_lower = after < before
  kept = jnp.where(is_lower[:, None, None], rotation, start)
  return Descent(kept, before, jnp.where(is_lower, after, before))


def _dealt(columns: jax.Array, parts: int) -> jax.Array:
  """Deals columns `[blocks, 32, n]` out in turn: `[parts, blocks, 32, n // parts]`."""
  # In turn, so that every part spans all that was sampled.
  count = columns.shape[-1] // parts
  dealt = columns[..., : count * parts].reshape(*columns.shape[:-1], count, parts)
  return jnp.moveaxis(dealt, -1, 0)


def _outer(left: jax.Array, right: jax.Array) -> jax.Array:
  return jnp.einsum("bin,bjn->bij", left, right, precision=HIGHEST)


def rounded_weight(weight: jax.Array, rules: mxfp4.Rules) -> jax.Array:
  """Rounds each row of a block to nearest, at the better of two exponents."""
  floor = mxfp4.block_exponent(weight, dataclasses.replace(rules, scale_rule="floor"))

  def tried(step: int) -> tuple[jax.Array, jax.Array]:
    exponent = jnp.minimum(floor + step, mxfp4.SCALE_BIAS)[..., None, :]
    scale = mxfp4.scale_of(exponent)
    decoded = gptq.round_value(weight, exponent, scale, rules)[1]
    return decoded, jnp.square(decoded - weight).sum(-2, keepdims=True)

  (near, of_near), (far, of_far) = (tried(step) for step in gptq.SEARCHED)
  # At a tie the floor rule's exponent, as in `gptq.reconstruct`.
  return jnp.where(of_far < of_near, far, near)


def _turned(rotation: jax.Array, skew: jax.Array) -> jax.Array:
  """Computes exp(S) R to the third order, and takes half of what is not orthogonal.

  A step of Newton and Schulz for the polar factor; unlike Cayley's map it needs no
  solver, of which a batch is slow on a CPU.
  """
  square = block_products(skew, skew)
  identity = jnp.eye(skew.shape[-1], dtype=skew.dtype)[None]
  step = identity + skew + square / 2 + block_products(square, skew) / 6
  rotation = block_products(step, rotation)
  excess = block_products(rotation.mT, rotation)
  return 1.5 * rotation - 0.5 * block_products(rotation, excess)
