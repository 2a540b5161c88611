"""One device computation at a time where that is needed to be safe.

Two rules keep XLA:CPU (jaxlib 0.10.2) from hanging with every pool thread idle:

1. On CPU only one computation is in flight: `finish` after each.
2. No LAPACK call (eigh, Cholesky, LU, triangular solve) shares a jitted function with
   a matrix product large enough to run in parallel before it. A function of both, 18
   blocks of 32 by 576, hung within 50 calls in each of three tries on two
   busy cores; split, 250 whole linears of that size ran through.
"""

from typing import TypeVar

import jax

T = TypeVar("T")


def finish(tree: T) -> T:
  """Waits for a pytree's arrays on CPU; elsewhere lets dispatch run ahead.

  XLA:CPU runs computations and their parallel parts on one pool of as many threads
  as cores. Independent computations in flight together can each hold a thread while
  waiting for parts that no thread is left to run: seen as a deadlock on two cores.
  """
  if jax.default_backend() == "cpu":
    return jax.block_until_ready(tree)
  return tree
