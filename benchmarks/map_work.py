"""What searches, descents and fits of maps take, in products of the same time.

  python benchmarks/map_work.py

`mxjax.evaluation.estimates` tells how long a build takes from the products that it
makes. Rounding takes far longer than its operations would suggest. So each part is
timed here on random inputs and weights of one linear, beside products of matrices, and
the result has its time as FLOP of such products for each element that it sees:

  rounding    an input of a candidate of a search
  revisiting  a weight of a candidate of a search
  descending  an input, or a weight, in a step of a descent
  fitting     a weight in a turn of a fit

Inputs and weights are told apart by timing each beside few of the other. The least of
five times counts, because what else the machine does only adds to it.
"""

import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.evaluation.estimates import products_a_second
from mxjax.methods.hires import searched_map
from mxjax.numerics.precision import float64_scope
from mxjax.numerics.shaping import map_descent, map_fit, map_search, reference_chart

BLOCKS, ROWS, FEW = 18, 1536, 16
"""Blocks of the linear and its rows, and how many there are of what is not timed."""
CANDIDATES, STEPS, TURNS, CHANGES = 4, 40, 16, 2


def flop_for(elements, run):
  """The least time of a call, as FLOP of products, for each element."""
  jax.block_until_ready(run())
  seconds, rates = [], []
  for _ in range(5):
    rates.append(products_a_second("float32"))
    start = time.perf_counter()
    jax.block_until_ready(run())
    seconds.append(time.perf_counter() - start)
  return min(seconds) * max(rates) / elements


def operands(tokens, rows):
  """Random inputs and weights of a linear, with their moments and principal axes."""
  rng = np.random.default_rng(0)
  normal = lambda count: jnp.asarray(
    rng.standard_normal((BLOCKS, 32, count)), jnp.float32
  )
  inputs, weight = normal(tokens), 0.02 * normal(rows)
  moments = [
    reference_chart.block_moment(one).astype(jnp.float64) / one.shape[-1]
    for one in (inputs, weight)
  ]
  chart = reference_chart.geometric_chart(*moments, max_condition=32.0)
  axes = map_search.principal_axes(chart, *moments)
  return axes, inputs, weight, moments


def searched(tokens, rows):
  axes, inputs, weight, moments = operands(tokens, rows)
  turns = map_search.turns(CANDIDATES)
  arrays = *turns, *axes, inputs, weight, *moments
  return lambda: map_search.losses(*arrays, changes=CHANGES)


def descended(tokens, rows):
  axes, inputs, weight, moments = operands(tokens, rows)
  kappa = map_descent.compensated_moment(axes[0], moments[0])
  arrays = *axes, kappa, inputs, weight, moments[1]
  return lambda: map_descent.descend(*arrays, changes=CHANGES, steps=STEPS)


def fitted(rows):
  _, _, weight, _ = operands(FEW, rows)
  moment = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32), (BLOCKS, 32, 32))
  return lambda: map_fit.fit(weight, moment, turns=TURNS)


def main():
  options = common.parser(__doc__).parse_args()
  made = common.stamp()
  width = 32 * BLOCKS
  candidates, steps = CANDIDATES * width, STEPS * width / map_descent.PARTS
  tokens, most = searched_map.TOKENS, searched_map.DESCENT_TOKENS
  found = {
    "rounding": flop_for(candidates * tokens, searched(tokens, FEW)),
    "revisiting": flop_for(
      candidates * searched_map.ROWS, searched(FEW, searched_map.ROWS)
    ),
    "descending, inputs": flop_for(steps * most, descended(most, FEW)),
    "descending, weights": flop_for(steps * ROWS, descended(FEW, ROWS)),
    "fitting": flop_for(TURNS * width * ROWS, fitted(ROWS)),
  }
  rate = max(products_a_second("float32") for _ in range(5))
  result = {**made, "products_a_second": rate, "flop_for_an_element": found}
  common.write(options.out, result)
  print({name: round(value) for name, value in found.items()}, f"{rate / 1e9:.0f}")


if __name__ == "__main__":
  # Moments and maps are float64.
  with float64_scope():
    main()
