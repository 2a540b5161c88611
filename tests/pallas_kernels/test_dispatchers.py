"""Every dispatcher where program hooks run, in a 64-bit scope, and without a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization import one_code as reference
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.pallas_kernels import gptq, mxfp4_decode, mxfp4_encode, recovery
from mxjax.pallas_kernels.products import float8, float8_matmul, matmul
from mxjax.pallas_kernels.refinement import one_code


def operations():
  """Dispatchers with small operands."""
  key = jax.random.key(0)
  x = jax.random.normal(key, (5, 64), jnp.float32)
  square = jax.random.normal(key, (2, 32, 32), jnp.float32)
  tables = square, reference.pack_symmetric(square), square
  upper = jnp.eye(64) + jnp.triu(jnp.full((64, 64), 0.01))
  scalars = MlpRecovery(*(jnp.float32(0.1) for _ in range(4)))
  heads = ValueRecovery(jnp.ones(2), jnp.zeros(2))
  narrow = float8.of_tensor(mxfp4.encode(x))
  return [
    (mxfp4_encode.encode, x),
    (mxfp4_decode.decode, mxfp4.encode(x)),
    (mxfp4_decode.decode_float8, mxfp4.encode(x), jnp.float32(1)),
    (float8_matmul.float8_matmul, narrow, mxfp4.encode(x), jnp.float32(1)),
    (matmul.matmul, mxfp4.encode(x), mxfp4.encode(x)),
    (one_code.refine, x, *tables),
    (one_code.refine, jnp.tile(x, (7, 1)).astype(jnp.bfloat16), *tables),
    (gptq.reconstruct, jax.random.normal(key, (2, 32, 33), jnp.float32), upper),
    (recovery.gated_product, x, x, scalars),
    (recovery.recover_values, x.reshape(5, 2, 32), heads, x[0]),
  ]


def test_kernels_trace_to_the_same_types_in_a_64_bit_scope():
  for function, *arguments in operations():
    kernel = functools.partial(function, implementation="interpret")
    # A function of its own each time, else the first trace would be taken again.
    outside = jax.eval_shape(lambda *a, kernel=kernel: kernel(*a), *arguments)
    with precision.float64_scope():
      inside = jax.eval_shape(lambda *a, kernel=kernel: kernel(*a), *arguments)
    assert inside == outside


def test_compiled_kernels_are_refused_without_a_gpu():
  for function, *arguments in operations():
    with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
      function(*arguments, implementation="pallas")
