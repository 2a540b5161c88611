"""The order of LAPACK calls inside a jitted function.

XLA:CPU cuts a batch of LAPACK calls into tasks for its pool of threads and keeps one
thread of the pool waiting for them. Two batches that do not depend on each other may
take both threads of two cores, and none is left to run the tasks: the program hangs.
Seen with jaxlib 0.10.2 in HiRes' chart, whose determinant of one moment and inverse of
the other were such batches.

The first jaxlib whose batches keep no thread of the pool while they wait ends the need
for `after`. No issue of jax that we found reports the hang; jax-ml/jax#36927 and #39292
tell of the same batches, slower since jaxlib 0.10.0 and crashing on many cores.
"""

import jax
import jax.numpy as jnp

_NEVER = 2.0**126
"""A sum that does not occur."""


def after(array: jax.Array, *earlier: jax.Array) -> jax.Array:
  """Returns `array` unchanged, but not before the `earlier` arrays are computed.

  A barrier of the compiler does not remain in the program, so this is a dependency of
  data: if their sum were one certain number, the result would be NaN.
  """
  return jnp.where(sum(map(jnp.sum, earlier)) == _NEVER, jnp.nan, array)
