"""One device computation at a time where that is needed to be safe."""

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
