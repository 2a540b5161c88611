import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mosaic, mxfp4_encode
from tests.pallas_kernels.test_mxfp4_encode import hard_blocks


def test_its_arithmetic_encodes_as_the_reference():
  x = hard_blocks(jnp.bfloat16)
  pairs = np.asarray(x).astype(np.float32).reshape(len(x), 16, 2)
  encode = jax.jit(mosaic.encode_halves, static_argnames="has_subnormals")
  packed, exponent = encode(pairs[..., 0], pairs[..., 1], has_subnormals=False)
  want = mxfp4.encode(x)
  np.testing.assert_array_equal(packed, want.codes)
  np.testing.assert_array_equal(exponent + 127, want.scales[:, 0])


@pytest.mark.skipif(mosaic.obstacle() is not None, reason=str(mosaic.obstacle()))
def test_the_kernel_equals_the_reference_bit_for_bit(monkeypatch):
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")
  x = hard_blocks(jnp.bfloat16)
  assert x.shape[0] % mosaic.BLOCKS  # the last program overlaps the one before
  got = mxfp4_encode.encode(x, implementation="interpret")
  jax.tree.map(np.testing.assert_array_equal, got, mxfp4.encode(x))


def test_a_choice_that_cannot_run_is_refused_in_one_sentence(monkeypatch):
  encode = lambda x: mxfp4_encode.encode(x, implementation="interpret")
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "mosaic")
  for x in (jnp.ones((63, 32), jnp.bfloat16), jnp.ones((64, 32))):
    with pytest.raises(NotImplementedError, match="bfloat16 of 64 blocks or more"):
      encode(x)
  monkeypatch.setattr(mosaic.mosaic_gpu, "kernel", lambda body: None)
  with pytest.raises(NotImplementedError, match=r"need jax 0\.11 or newer"):
    encode(jnp.ones((64, 32), jnp.bfloat16))
  monkeypatch.setenv("MXJAX_PALLAS_BACKEND", "cuda")
  with pytest.raises(ValueError, match="triton or mosaic, got 'cuda'"):
    encode(jnp.ones((64, 32), jnp.bfloat16))
