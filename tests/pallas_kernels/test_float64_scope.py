"""Program hooks run inside a 64-bit scope: no kernel may notice."""

import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization import one_code as reference
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.pallas_kernels import gptq, mxfp4_encode, recovery
from mxjax.pallas_kernels.products import matmul
from mxjax.pallas_kernels.refinement import one_code


def same_in_scope(function, *arguments):
  """Traces in and out of the scope: strict promotion would refuse a 64-bit mix."""
  outside = jax.eval_shape(lambda *a: function(*a), *arguments)
  with precision.float64_scope():
    assert jax.eval_shape(lambda *a: function(*a), *arguments) == outside


def test_kernels_trace_to_the_same_types_in_a_64_bit_scope():
  key = jax.random.key(0)
  x = jax.random.normal(key, (5, 64), jnp.float32)
  how = {"implementation": "interpret"}
  same_in_scope(lambda x: mxfp4_encode.encode(x, **how), x)
  same_in_scope(
    lambda x, w: matmul.matmul(x, w, **how), mxfp4.encode(x), mxfp4.encode(x)
  )
  square = jax.random.normal(key, (2, 32, 32), jnp.float32)
  tables = square, reference.pack_symmetric(square), square
  for rows in (x, jnp.tile(x, (7, 1)).astype(jnp.bfloat16)):
    same_in_scope(lambda x, t: one_code.refine(x, *t, **how), rows, tables)
  upper = jnp.eye(64) + jnp.triu(jnp.full((64, 64), 0.01))
  weight = jax.random.normal(key, (2, 32, 33), jnp.float32)
  same_in_scope(lambda w, u: gptq.reconstruct(w, u, **how), weight, upper)
  scalars = MlpRecovery(*(jnp.float32(0.1) for _ in range(4)))
  same_in_scope(lambda x: recovery.gated_product(x, x, scalars, **how), x)
