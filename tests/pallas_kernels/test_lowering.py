"""What kernels of Triton can address; nothing this large is allocated."""

import functools

import jax
import jax.numpy as jnp
import pytest

from mxjax.numerics import mxfp4
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.pallas_kernels import lowering, mxfp4_decode, mxfp4_encode, recovery


def array(dtype, *shape):
  return jax.ShapeDtypeStruct(shape, dtype)


def product(gate, up, **how):
  scalars = MlpRecovery(*(jnp.float32(0),) * 4)
  return recovery.gated_product(gate, up, scalars, **how)


def packed(rows, width):
  codes, scales = array("uint8", rows, width // 2), array("uint8", rows, width // 32)
  return mxfp4.MXTensor(codes, scales)


# The codes of the first two have 3 GiB.
TOO_LARGE = [
  (mxfp4_encode.encode, array("bfloat16", 3 * 2**19, 4096)),
  (mxfp4_decode.decode, packed(3 * 2**19, 4096)),
  (product, *[array("bfloat16", 2**18, 12289)] * 2),
]


def test_what_a_kernel_cannot_address_is_left_to_xla():
  for run, *operands in TOO_LARGE:
    with pytest.raises(NotImplementedError, match="do not fit its 32 bits"):
      jax.eval_shape(functools.partial(run, implementation="interpret"), *operands)
    jax.eval_shape(run, *operands)


def test_no_launch_reads_before_an_array():
  copy = lambda x: lowering.launch(
    lambda source, target: None,
    x,
    name="copy",
    grid=(1,),
    in_specs=[lowering.BlockSpec((16, 16), lambda i: (0, 0))],
    out_specs=lowering.BlockSpec((16, 16), lambda i: (0, 0)),
    out_shape=array(x.dtype, 16, 16),
    warps=1,
    interpret=True,
  )
  large = r"pallas_kernels\.copy: .*uint8\[3145728, 1024\].*fewer rows"
  with pytest.raises(NotImplementedError, match=large):
    jax.eval_shape(copy, array("uint8", 3 * 2**20, 1024))
  for fits in (array("uint8", 2**21, 1024), array("uint8", 5 * 2**20, 1024)):
    jax.eval_shape(copy, fits)
  jax.eval_shape(copy, array("bfloat16", 3 * 2**20, 1024))
