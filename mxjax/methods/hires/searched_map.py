"""Chooses the map of every block among many, by the rounding error that each makes.

It takes the place of the interaction K and the balance D of Stage I, which correct one
map, where a chart alone is given. The chosen map may then descend on its errors. The
mathematics is that of `map_search` and `map_descent`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.errors import FloatingPointRefusal
from mxjax.methods.hires import stage1
from mxjax.methods.program import Shaping
from mxjax.numerics import mxfp4
from mxjax.numerics.shaping import input_maps, map_descent, map_search

TOKENS, ROWS = 1024, 512
"""The most tokens and output rows by which candidates are compared, evenly spaced."""
DESCENT_TOKENS = 2048
"""The most tokens of a descent, evenly spaced. It sees all output rows.

The rows that it sees are the ones to be rounded, so that what it gains on them stays,
where tokens stand for others.
"""


def shape(
  weight: jax.Array,
  inputs: LinearInputs,
  *,
  chart: stage1.Chart,
  max_condition: float,
  candidates: int,
  steps: int,
  changes: int | None,
  rules: mxfp4.Rules,
) -> Shaping:
  """Finds the map of a linear: for each block the candidate with the smallest J_k.

  Then it turns that map by steps of descent, if there are any.

  Args:
    weight: Raw weights, feature-major, float32 `[blocks, 32, out_features]`.
    inputs: The linear's calibration inputs.
    chart: The chart whose principal axes the candidates spread.
    max_condition: The chart's largest condition number.
    candidates: Number of maps that are measured, at least 1.
    steps: Steps of the descent.
    changes: Codes of a block that the activations' rule changes; 0 is nearest, and
      None leaves inputs as they are.
    rules: Codec rules of that rule.

  Returns:
    The map, float32 `[blocks, 32, 32]`, and its record: by block the number of the
    chosen candidate, J_k of the first and of the chosen one, and with steps L of the
    descent's start and of its end.

  Raises:
    FloatingPointError: No candidate of a block has a finite J_k.
  """
  # The charts, and the axes that the candidates spread.
  moment = inputs.moment()
  output = stage1.output_moment(weight, inputs, stage1.weight_moments(weight))
  make = functools.partial(chart, max_condition=float(max_condition))
  charts = execution.call_in_batches(make, moment, output)
  axes, inverse = execution.call_in_batches(
    map_search.principal_axes, charts, moment, output
  )
  # J_k of every candidate. The stride is rounded up, so that at most `ROWS` are left.
  turned, phases = map_search.turns(candidates)
  stride = -(-weight.shape[-1] // ROWS)
  losses = execution.block_on_cpu(
    map_search.losses(
      *(turned, phases, axes, inverse),
      *(inputs.sample(TOKENS), weight[..., ::stride], moment, output),
      rules,
      changes=changes,
    )
  )
  measured = np.asarray(losses)
  # One finite candidate is enough for a block.
  is_finite = np.isfinite(measured)
  if (lost := np.flatnonzero(~is_finite.any(0))).size:
    raise FloatingPointRefusal(
      f"map search: block {lost[0]}",
      expected=f"a finite rounding error of one of {len(measured)} maps at least",
      got=f"none, in {lost.size} of {measured.shape[1]} blocks",
      mend="look for inputs or weights that overflow float32 when squared, or name the "
      "method without candidates",
    )
  # A candidate that overflows is never chosen; argmin would take NaN for the least.
  chosen = np.where(is_finite, measured, np.inf).argmin(0)
  matrix, fold = _installed(turned[chosen], phases[chosen], axes, inverse)
  record = {
    "map_candidate": chosen.tolist(),
    "map_losses": [
      measured[0].tolist(),
      measured[chosen, np.arange(len(chosen))].tolist(),
    ],
  }
  if steps:
    # The chosen maps are where the descent starts.
    kappa = execution.call_in_batches(map_descent.compensated_moment, matrix, moment)
    descent = execution.block_on_cpu(
      map_descent.descend(
        *(matrix, fold, kappa),
        *(inputs.sample(DESCENT_TOKENS), weight, output),
        rules,
        changes=changes,
        steps=steps,
      )
    )
    matrix = _followed(matrix, descent.rotation)
    record["descent_losses"] = [descent.before.tolist(), descent.after.tolist()]
  return Shaping(input_maps.BlockDense(matrix.astype(jnp.float32)), record)


@execution.jit()
def _installed(
  turned: jax.Array, phases: jax.Array, axes: jax.Array, inverse: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Computes the chosen maps and their transposed inverses, float64."""
  factor = phases[:, None, None]
  return factor * (turned @ axes), turned @ inverse / factor


@execution.jit()
def _followed(matrix: jax.Array, rotation: jax.Array) -> jax.Array:
  return rotation.astype(matrix.dtype) @ matrix
