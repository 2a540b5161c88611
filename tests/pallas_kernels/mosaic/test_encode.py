import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels.mosaic import device, encode
from tests.pallas_kernels.test_mxfp4_encode import hard_blocks


@pytest.mark.skipif(device.obstacle() is not None, reason=str(device.obstacle()))
def test_the_kernel_equals_the_reference_bit_for_bit():
  x = hard_blocks(jnp.bfloat16)
  assert x.shape[0] % encode.BLOCKS  # the last program overlaps the one before
  got = encode.encode(x, interpret=True)
  jax.tree.map(np.testing.assert_array_equal, got, mxfp4.encode(x))
