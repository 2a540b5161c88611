import functools

import jax
import jax.numpy as jnp
import pytest

from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import functional
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping.input_maps import Hadamard
from mxjax.pallas_kernels import gptq, mxfp4_decode, mxfp4_encode, recovery
from mxjax.pallas_kernels.mosaic import device
from tests import refusals


def attend(**how):
  new, past = jnp.ones((1, 1, 2, 16)), (jnp.ones((1, 8, 2, 16)),) * 2
  return functional.cached_attention(new, new, new, past, jnp.int32(3), **how)


def recover(**how):
  heads = ValueRecovery(jnp.ones(2), jnp.ones(2))
  return recovery.recover_values(jnp.ones((4, 2, 16)), heads, **how)


def tensor():
  return mxfp4.encode(jnp.ones((64, 64)))


TRITON_ONLY = [
  attend,
  recover,
  lambda **how: mxfp4_decode.decode(tensor(), **how),
  lambda **how: gptq.reconstruct(jnp.ones((1, 32, 4)), jnp.eye(32), **how),
]


def test_a_kernel_without_a_mosaic_form_says_so(monkeypatch):
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")
  refusals.check(
    [
      (functools.partial(call, implementation="interpret"), "it has no Mosaic form")
      for call in TRITON_ONLY
    ],
    NotImplementedError,
  )
  # None takes the reference instead.
  for call in TRITON_ONLY:
    jax.block_until_ready(call())


def test_a_linear_says_what_its_kernel_cannot_take(monkeypatch):
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")
  weight = QuantizedLinear(tensor(), None, Nearest())
  run = functools.partial(linear, implementation="interpret")
  for rows, why in ((2, "64 rows or more"), (64, "does not write planes")):
    with pytest.raises(NotImplementedError, match=why):
      run(jnp.ones((rows, 64), jnp.bfloat16), weight)
  # XLA applies this map before the kernel, in float32.
  weight = QuantizedLinear(tensor(), Hadamard(64), Nearest())
  with pytest.raises(NotImplementedError, match=r"^linear: .*got float32\[256, 64\]"):
    run(jnp.ones((256, 64), jnp.bfloat16), weight)


def test_a_choice_that_cannot_run_is_refused_in_one_sentence(monkeypatch):
  encode = lambda x: mxfp4_encode.encode(x, implementation="interpret")
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")
  for x in (jnp.ones((63, 32), jnp.bfloat16), jnp.ones((64, 32))):
    with pytest.raises(NotImplementedError, match="bfloat16 of 256 blocks or more"):
      encode(x)
  monkeypatch.setattr(device.mosaic_gpu, "kernel", lambda body: None)
  with pytest.raises(NotImplementedError, match=r"need jax 0\.11 or newer"):
    encode(jnp.ones((256, 32), jnp.bfloat16))
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "cuda")
  with pytest.raises(ValueError, match="triton or mosaic, got 'cuda'"):
    encode(jnp.ones((256, 32), jnp.bfloat16))


def test_rows_are_filled_up_to_the_tiles_of_the_copy_engine():
  for rows, filled in ((8, 8), (577, 584), (580, 584)):
    got = device.in_eights(jnp.ones((3, rows, 32)))
    assert got.shape == (3, filled, 32)
    assert got.sum() == 3 * rows * 32 and not got[:, rows:].any()
