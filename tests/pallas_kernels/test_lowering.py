"""What kernels of Triton can address (nothing this large is allocated), and what jax
says of them."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas import core
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from mxjax.numerics import mxfp4
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.pallas_kernels import lowering, mxfp4_decode, mxfp4_encode, recovery
from tests import targets


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


def lowered_for_a_gpu(function, *operands):
  """The program for a GPU, and what JAX warned of."""
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    text = targets.lowered_for_a_gpu(function, *operands)
  return text, [str(warning.message) for warning in told]


def double(x_ref, out_ref):
  out_ref[...] = 2 * x_ref[...]


def test_jax_warns_of_triton_for_kernels_of_others_only():
  x = array("bfloat16", 256, 32)
  before = list(warnings.filters)
  text, told = lowered_for_a_gpu(mxfp4_encode.launch, x)
  assert "mxjax_mxfp4_encode" in text and not told
  theirs = functools.partial(
    pl.pallas_call,
    double,
    out_shape=array("float32", 16),
    compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
  )
  _, told = lowered_for_a_gpu(lambda x: theirs()(x), array("float32", 16))
  # jax 0.10 does not warn at all.
  assert len(told) == (jax.version.__version_info__ >= (0, 11))
  assert all("Pallas Triton backend is deprecated" in message for message in told)
  assert warnings.filters == before


def test_no_other_warning_is_silenced(monkeypatch):
  def lower(*messages):
    for message in messages:
      warnings.warn(message, DeprecationWarning, stacklevel=1)

  monkeypatch.setattr(core, "_backend_lowering_rules", {})
  core.register_lowering_rule(triton.CompilerParams, lower, "gpu")
  ours = core.get_lowering_rule(lowering._without_warning(), "gpu")
  with pytest.warns(DeprecationWarning) as told:
    ours("The Pallas Triton backend is deprecated and will be removed", "another")
  assert [str(warning.message) for warning in told] == ["another"]


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
