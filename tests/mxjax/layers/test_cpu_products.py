"""How XLA:CPU multiplies, compiled as users compile it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest, Unrounded


def draw(shape):
  return jax.random.t(jax.random.key(1), 4.0, shape, jnp.float32)


def operands(call, *args):
  """The lowered program's part with its one product."""
  parts = jax.jit(call).lower(*args).compile().as_text().split("\n\n")
  [product] = [part for part in parts if " dot(" in part]
  return product


@pytest.mark.slow
@pytest.mark.parametrize("has_instructions", [False, True])
def test_products_are_in_bfloat16_where_cpus_have_instructions(
  has_instructions, monkeypatch
):
  """XLA:CPU multiplies transposed matrices in float32 unless they are moved."""
  has = lambda: has_instructions
  monkeypatch.setattr(implementations, "has_bfloat16_products", has)
  weight = QuantizedLinear(mxfp4.encode(draw((48, 64))), None, Nearest())
  # Functions of their own, so that neither case uses what the other compiled.
  forward = lambda x, weight: linear(x, weight)
  back = lambda x, weight, y: jax.vjp(lambda x: linear(x, weight), x)[1](y)
  product = operands(forward, draw((40, 64)), weight)
  assert ("bf16[48,64]" in product) == has_instructions
  assert ("bf16[64,40]" in product) == has_instructions
  product = operands(back, draw((40, 64)), weight, draw((40, 48)))
  assert ("bf16[64,48]" in product) == has_instructions
  assert ("bf16[48,40]" in product) == has_instructions


@pytest.mark.parametrize(
  ("flags", "has"),
  [("avx2 avx512_bf16", 1), ("amx_bf16", 1), ("avx512f", 0), (None, 0)],
)
def test_the_processors_instructions_decide(flags, has, tmp_path):
  file = tmp_path / "cpuinfo"
  if flags is not None:
    file.write_text(f"processor : 0\nflags : fpu {flags} sse\n")
  assert implementations.has_bfloat16_products(file) == has


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 48])
def test_the_reference_sums_exact_products_in_float32(outputs):
  rng = np.random.default_rng(2)
  dense = jnp.asarray(rng.standard_normal((outputs, 96)), jnp.float32)
  x = draw((40, 96))
  decode = lambda packed: np.asarray(mxfp4.decode(packed, jnp.float32), float)
  weight = mxfp4.encode(dense)
  for rounding, operand in (
    (Nearest(), decode(mxfp4.encode(x))),
    (Unrounded(), np.asarray(x, float)),
  ):
    leaf = QuantizedLinear(weight, None, rounding)
    used = functools.partial(linear, weight=leaf)
    want = operand @ decode(weight).T
    scale = np.abs(operand) @ np.abs(decode(weight)).T
    for ways in (
      lambda x, used=used: used(x),
      lambda x, used=used: jax.vmap(lambda row: used(row[None])[0])(x),
      # XLA:CPU must not merge the transpose into the product: see `float32_sums`.
      lambda x, used=used: used(x).T,
      lambda x, used=used: jax.lax.map(used, x[None])[0],
    ):
      got = np.asarray(jax.jit(ways)(x))
      got = got if got.shape == want.shape else got.T
      assert np.abs(got - want).max() <= 1e-6 * scale.max()
