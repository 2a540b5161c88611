r"""Fits a block's map and the codes of its weights to each other.

A map M of a block, with N = M^-T, folds the weight rows w_r into N w_r, which are then
rounded to values q_r of the E2M1 grid. Any matrix A behind the map changes both what
the inputs see and what is rounded, A^-T N w_r, and together they compute as before. So
A can be chosen such that the folded rows lie close to the grid:

.. math::
  \min_A \ \sum_r \bigl\lVert A^\top q_r - N w_r \bigr\rVert_S^2
    + h \lVert A - I \rVert_S^2 , \qquad
  q_r = Q(A^{-\top} N w_r) , \qquad h = \frac{0.05}{32} \sum_r \lVert q_r \rVert^2 ,

in the metric S = M A_x M' of the mapped inputs, A_x being their second moment in native
coordinates. The second term keeps A close to I, where the map is good for the inputs.
With codes held, the minimum is that of a linear system, whatever S is,

.. math::
  A = \Bigl( \sum_r q_r q_r^\top + h I \Bigr)^{-1}
    \Bigl( \sum_r q_r (N w_r)^\top + h I \Bigr) ,

and with A held, Q rounds to nearest at the better of two exponents. The two alternate,
as in Lloyd's algorithm for a codebook, of which A is the linear part.

A block has 1,024 numbers in A and 32 values for each output row. So what a fit takes
off the error of the weights falls with the number of rows: about 40 % of it at 200
rows, 20 % at 600 and 5 % at 4,000, of normal weights.

Not in the paper. A language model wrote such a fit as a program of the `ptq` task; see
`docs/results/discovery.md`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.numerics import mxfp4
from mxjax.numerics.precision import HIGHEST, block_products
from mxjax.numerics.shaping import map_descent

HOLD = 0.05
"""What moving A by one costs, in units of the codes' mean square."""
INVERSE_STEPS = 32
"""Of Newton's iteration: enough for a condition of 1e4. Here it is below 1e3."""


class MapFit(NamedTuple):
  """What the turns ended with.

  Attributes:
    correction: A, float32 `[blocks, 32, 32]`; I where no turn lowered the loss.
    before: The loss of A = I, float32 `[blocks]`.
    after: The loss of A.
  """

  correction: jax.Array
  before: jax.Array
  after: jax.Array


@compilation.jit(static_argnames=("turns", "rules"))
def fit(
  weight: jax.Array,
  moment: jax.Array,
  rules: mxfp4.Rules = mxfp4.PAPER_RULES,
  *,
  turns: int,
) -> MapFit:
  """Alternates between codes and A, and keeps the A of the smallest loss.

  Args:
    weight: N w_r, float32 `[blocks, 32, rows]`: all of them, for A adapts to its rows.
    moment: S, float32 `[blocks, 32, 32]`.
    rules: Codec rules, of which the weights share that of ties.
    turns: Number of times that A is computed, at least 1.
  """
  identity = jnp.broadcast_to(
    jnp.eye(weight.shape[-2], dtype=weight.dtype), moment.shape
  )

  def turn(
    _: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    latest, kept, least = state
    codes, loss = measured(latest, weight, moment, rules)
    is_lower = loss < least
    kept = jnp.where(is_lower[:, None, None], latest, kept)
    return solved(codes, weight), kept, jnp.where(is_lower, loss, least)

  codes, before = measured(identity, weight, moment, rules)
  start = solved(codes, weight), identity, before
  latest, kept, least = jax.lax.fori_loop(0, turns - 1, turn, start)
  # The last A has not been measured yet.
  _, kept, least = turn(jnp.array(turns), (latest, kept, least))
  return MapFit(kept, before, least)


def measured(
  matrix: jax.Array, weight: jax.Array, moment: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array]:
  """Rounds the weights behind A; returns the decoded codes and the loss of a block."""
  codes = map_descent.rounded_weight(block_products(inverse(matrix).mT, weight), rules)
  size = lambda columns: (columns * block_products(moment, columns)).sum((-1, -2))
  drift = (matrix - jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None]).mT
  error = block_products(matrix.mT, codes) - weight
  return codes, size(error) + hold(codes) * size(drift)


def solved(codes: jax.Array, weight: jax.Array) -> jax.Array:
  """Computes the A of the smallest loss for decoded codes `[blocks, 32, rows]`."""
  outer = lambda one: jnp.einsum("bin,bjn->bij", codes, one, precision=HIGHEST)
  identity = jnp.eye(codes.shape[-2], dtype=codes.dtype)[None]
  ridge = hold(codes)[:, None, None] * identity
  return block_products(inverse(outer(codes) + ridge), outer(weight) + ridge)


def hold(codes: jax.Array) -> jax.Array:
  """Computes h of every block; 1 where all codes are zero, so that A stays I."""
  held = HOLD * jnp.square(codes).sum((-1, -2)) / codes.shape[-2]
  return jnp.where(held > 0, held, 1)


def inverse(matrix: jax.Array) -> jax.Array:
  """Inverts matrices `[blocks, 32, 32]` by Newton's iteration, which is products alone.

  A batch of small solves is slow on a CPU and on a GPU alike, and the matrices here are
  well conditioned: A is close to a rotation, and the other one has a ridge.
  """
  rows = jnp.abs(matrix).sum(-1).max(-1)
  columns = jnp.abs(matrix).sum(-2).max(-1)
  start = matrix.mT / (rows * columns)[:, None, None]
  step = lambda _, found: (
    2 * found - block_products(found, block_products(matrix, found))
  )
  return jax.lax.fori_loop(0, INVERSE_STEPS, step, start)
