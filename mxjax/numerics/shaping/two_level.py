r"""The two rotations of TORQ: across blocks, then inside every block.

The first rotation gives all blocks the same energy, so that no single block dominates;
the second makes every coordinate of a block use the eight E2M1 magnitudes evenly. Both
are products of plane rotations found greedily.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.precision import HIGHEST

ENERGY_TOLERANCE = 1e-4
"""Largest deviation of a block's energy from the mean, in units of the mean."""
# This and the next four are those of the public port that the method follows; see
# `torq` of the baselines.
ENERGY_STEPS = 2000
RIDGE = 1e-8
OCCUPANCY_ROUNDS = 10
OCCUPANCY_TOLERANCE = 1e-5
PAIRS = 8
"""Disjoint column pairs rotated per round, among the 2 * PAIRS least even columns."""
ANGLES = 4096
"""Angles in a quarter turn at which the loss of a pair is computed exactly."""

_EDGES = tuple(
  (low + high) / 2
  for low, high in zip(mxfp4.MAGNITUDES[:-1], mxfp4.MAGNITUDES[1:], strict=True)
)


@compilation.jit()
def block_covariance(hessian: jax.Array) -> jax.Array:
  """Averages second moments between blocks over positions, float64 `[B, B]`.

  `hessian` is X'X / n, `[d, d]`.
  """
  blocks = hessian.shape[0] // mxfp4.BLOCK_SIZE
  shape = (blocks, mxfp4.BLOCK_SIZE, blocks, mxfp4.BLOCK_SIZE)
  wide = hessian.astype(jnp.float64).reshape(shape)
  return jnp.einsum("akbk->ab", wide) / mxfp4.BLOCK_SIZE + RIDGE * jnp.eye(blocks)


def equalizing_angle(
  first: jax.Array, second: jax.Array, cross: jax.Array
) -> jax.Array:
  """Returns the angle that makes both diagonal entries equal to their mean.

  The one printed in the paper, with the arguments exchanged, diagonalizes the pair.
  """
  return 0.5 * jnp.arctan2(second - first, 2.0 * cross)


@compilation.jit()
def equalize(covariance: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Finds a rotation of blocks that gives all of them nearly the same energy.

  Each step takes the block furthest from the mean and the furthest one on the other
  side, and rotates the two so that both get their mean. `covariance` is symmetric,
  float64 `[B, B]`. Returns R, orthogonal, float64 `[B, B]`, and the largest remaining
  relative deviation of the diagonal of R' C R.
  """
  precision.require_float64("two_level.equalize", covariance)
  goal = jnp.trace(covariance) / covariance.shape[0]
  scale = jnp.where(goal > 0, goal, 1.0)
  deviation = lambda matrix: jnp.diagonal(matrix) - goal

  def turn(
    matrix: jax.Array, i: jax.Array, j: jax.Array, angle: jax.Array
  ) -> jax.Array:
    """Rotates columns i and j."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = matrix[:, i], matrix[:, j]
    return matrix.at[:, i].set(cos * a + sin * b).at[:, j].set(cos * b - sin * a)

  def step(state: Any) -> Any:
    count, matrix, rotation = state
    off = deviation(matrix)
    i = jnp.argmax(jnp.abs(off))
    # Only a block on the other side of the mean can bring both to it; -1 is never the
    # largest.
    opposite = jnp.where(off * off[i] < 0, jnp.abs(off), -1.0)
    j = jnp.argmax(opposite)
    angle = equalizing_angle(matrix[i, i], matrix[j, j], matrix[i, j])
    # The columns, and by the transpose the rows, of R' C R.
    matrix = turn(turn(matrix, i, j, angle).T, i, j, angle).T
    return count + 1, matrix, turn(rotation, i, j, angle)

  def unfinished(state: Any) -> jax.Array:
    worst = jnp.abs(deviation(state[1])).max() / scale
    return (worst > ENERGY_TOLERANCE) & (state[0] < ENERGY_STEPS)

  identity = jnp.eye(covariance.shape[0])
  state = (jnp.int32(0), covariance, identity)
  _, matrix, rotation = jax.lax.while_loop(unfinished, step, state)
  return rotation, jnp.abs(deviation(matrix)).max() / scale


@compilation.jit()
def occupancy(rows: jax.Array) -> jax.Array:
  """Returns the shares of the eight magnitudes in every column, float32 `[32, 8]`.

  `rows` is float32 `[32, n]` in units of its block scales.
  """
  edges = jnp.asarray(_EDGES, jnp.float32)
  # What reaches one edge and not the next has the magnitude between them.
  is_reached = jnp.abs(rows)[:, None, :] >= edges[None, :, None]
  reached = is_reached.mean(-1, dtype=jnp.float32)
  ends = jnp.ones((rows.shape[0], 1), jnp.float32)
  reached = jnp.concatenate([ends, reached, jnp.zeros_like(ends)], axis=1)
  return reached[:, :-1] - reached[:, 1:]


def unevenness(shares: jax.Array) -> jax.Array:
  """Sums squared deviations from equal shares over the last axis."""
  return jnp.square(shares - 1 / len(mxfp4.MAGNITUDES)).sum(-1)


def choose_pairs(shares: np.ndarray) -> list[tuple[int, int]]:
  """Picks `PAIRS` disjoint pairs of the least even columns of `[32, 8]`, greedily.

  The score of a pair is the unevenness of both columns minus the inner product of their
  deviations.
  """
  deviations = shares - 1 / shares.shape[1]
  uneven = np.square(deviations).sum(1)
  worst = np.argsort(-uneven, kind="stable")[: 2 * PAIRS]
  inner = deviations[worst] @ deviations[worst].T
  scores = uneven[worst][:, None] + uneven[worst][None, :] - inner
  # Each pair once, and no column with itself.
  scores[np.tril_indices(len(worst))] = -np.inf
  pairs = []
  for _ in range(PAIRS):
    pair = list(np.unravel_index(np.argmax(scores), scores.shape))
    pairs.append((int(worst[pair[0]]), int(worst[pair[1]])))
    scores[pair, :] = scores[:, pair] = -np.inf
  return pairs


@compilation.jit()
def best_angle(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Finds the angle in [0, pi/2) at which two columns use magnitudes most evenly.

  Every angle at which a value crosses a boundary has a closed form and is counted into
  one of `ANGLES` cells, so the running sums are the exact occupancies at all these
  angles. A quarter turn is a full period: it swaps the columns and flips a sign.

  The columns are float32 `[n]` in units of the block scales. Returns the angle and its
  loss; angle zero is among the candidates.
  """
  edges = jnp.asarray(_EDGES, jnp.float32)
  radius = jnp.sqrt(first * first + second * second)[:, None]
  phase = jnp.arctan2(second, first)[:, None]
  crosses = radius > edges[None, :]
  # A radius below an edge never crosses it: its quotient is outside arccos's domain.
  at = jnp.arccos(jnp.where(crosses, edges[None, :] / jnp.maximum(radius, 1e-30), 0.0))
  quarter = jnp.float32(math.pi / 2)
  # |cos| falls through the edge at +at and rises at -at; |sin| a quarter turn later.
  places = at, -at, quarter - at, at - quarter
  changes = jnp.zeros((ANGLES, 2, len(_EDGES)), jnp.float32)
  edge = jnp.broadcast_to(jnp.arange(len(_EDGES))[None, :], at.shape)
  for column, place, sign in zip((0, 0, 1, 1), places, (-1, 1, 1, -1), strict=True):
    angle = jnp.mod(place - phase, 2 * quarter)
    cell = jnp.ceil(angle / quarter * ANGLES).astype(jnp.int32)
    # |cos| and |sin| repeat after half a turn; only its first half is searched.
    inside = crosses & (cell < ANGLES)
    weight = jnp.where(inside, jnp.float32(sign), jnp.float32(0))
    cell = jnp.where(inside, cell, 0)
    changes = changes.at[cell, column, edge].add(weight)
  start = jnp.stack([jnp.abs(first), jnp.abs(second)])
  reached = (start[:, None, :] >= edges[None, :, None]).sum(-1, dtype=jnp.float32)
  reached = (reached[None] + jnp.cumsum(changes, axis=0)) / first.shape[0]
  ends = jnp.ones((ANGLES, 2, 1), jnp.float32)
  reached = jnp.concatenate([ends, reached, jnp.zeros_like(ends)], axis=-1)
  losses = unevenness(reached[..., :-1] - reached[..., 1:]).sum(-1)
  best = jnp.argmin(losses)
  return best.astype(jnp.float32) * (quarter / ANGLES), losses[best]


@compilation.jit(static_argnames="rules")
def _scaled(rows: jax.Array, rotation: jax.Array, rules: mxfp4.Rules) -> jax.Array:
  """Returns rotated rows in units of their own block scale, float32 `[32, n]`."""
  turned = jnp.einsum("kj,kn->jn", rotation, rows, precision=HIGHEST)
  exponent = mxfp4.block_exponent(turned, rules)
  return turned / mxfp4.scale_of(exponent)[None, :]


_best_angles = compilation.jit()(jax.vmap(best_angle))


def even_out(
  rows: jax.Array, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> tuple[np.ndarray, list[float]]:
  """Finds a rotation of a block's coordinates that uses the magnitudes evenly.

  `rows` is blocks pooled over tokens and positions, float32 `[32, n]`. Returns R,
  orthogonal, float64 `[32, 32]`, for `x R`, and the loss before each round.
  """
  size = mxfp4.BLOCK_SIZE
  rotation, losses = np.eye(size), []
  for _ in range(OCCUPANCY_ROUNDS):
    scaled = _scaled(rows, jnp.asarray(rotation, jnp.float32), rules)
    shares = np.asarray(occupancy(scaled))
    losses.append(float(unevenness(jnp.asarray(shares)).sum()))
    if len(losses) > 1 and abs(losses[-1] - losses[-2]) < OCCUPANCY_TOLERANCE:
      break
    pairs = np.asarray(choose_pairs(shares))
    angles, _ = _best_angles(scaled[pairs[:, 0]], scaled[pairs[:, 1]])
    for pair, angle in zip(pairs, np.asarray(angles, np.float64), strict=True):
      cos, sin = np.cos(angle), np.sin(angle)
      # Adds the angle to the phase of (first, second), as `best_angle` counts it.
      rotation[:, pair] = rotation[:, pair] @ np.array([[cos, sin], [-sin, cos]])
  return rotation, losses
