import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import mxfp4_encode

encode = jax.jit(mxfp4_encode.encode, static_argnames=("rules", "implementation"))


def hard_blocks(dtype):
  """Ties, neighbours of ties, zeros of both signs, saturation, every exponent."""
  info = jnp.finfo(dtype)
  rng = np.random.default_rng(0)
  middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.96875] * 4)
  middles = np.asarray(jnp.asarray(middles, dtype))
  up, down = (np.nextafter(middles, np.asarray(v, middles.dtype)) for v in (99, 0))
  rows = [np.zeros(32), -np.zeros(32), middles, -middles, up, -up, down, -down]
  rows += [rng.standard_normal(32) * 2.0**e for e in range(-20, 20)]
  rows = [np.asarray(row, np.float64) for row in rows]
  lowest = int(np.log2(float(info.tiny))) - info.nmant
  for exponent in range(max(lowest, -140), int(info.maxexp) - 4, 3):
    rows += [np.asarray(row, np.float64) * 2.0**exponent for row in rows[2:8]]
  rows.append(np.where(np.arange(32) == 5, float(info.max), 1.0))
  rows.append(np.where(np.arange(32) == 5, float(info.tiny), 0.0))
  rows.append(np.arange(32) * float(info.smallest_subnormal))
  table = np.clip(np.stack(rows), -float(info.max), float(info.max))
  # numpy converts: XLA:CPU would flush subnormals on the way.
  return jnp.asarray(table.astype(middles.dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_kernel_equals_the_reference_bit_for_bit(dtype):
  x = hard_blocks(dtype)
  assert x.shape[0] % mxfp4_encode.BLOCKS  # the last tile is cut
  got = encode(x, implementation="interpret")
  want = encode(x, implementation="xla")
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_it_takes_any_leading_axes_and_widths():
  x = jax.random.normal(jax.random.key(0), (3, 5, 96)) * 7
  got = encode(x, implementation="interpret")
  want = mxfp4.encode(x)
  assert got.shape == x.shape
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("implementation", [None, "xla", "native", "interpret"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_empty_array_has_an_empty_payload(implementation, dtype):
  for leading in ((0,), (3, 0), (0, 5, 2)):
    x = jnp.ones((*leading, 64), dtype)
    for tensor in (
      mxfp4_encode.encode(x, implementation=implementation),
      jax.jit(mxfp4.encode)(x),
    ):
      assert tensor.shape == x.shape and tensor.codes.dtype == jnp.uint8
      assert tensor.scales.shape == (*leading, 2) and tensor.scales.dtype == jnp.uint8
      mxfp4.check_legal(tensor)


def test_an_explicit_choice_never_falls_back():
  x = jnp.ones((2, 32))
  other = mxfp4.Rules(scale_rule="even")
  for implementation in ("pallas", "interpret"):
    with pytest.raises(NotImplementedError, match="paper's rules only"):
      mxfp4_encode.encode(x, other, implementation=implementation)
  np.testing.assert_array_equal(
    mxfp4_encode.encode(x, other).codes, mxfp4.encode(x, other).codes
  )
