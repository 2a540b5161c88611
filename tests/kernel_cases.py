"""Kernel launches that `compile_kernels.py` compiles, by name: functions and shapes."""

import functools

import jax
import jax.numpy as jnp

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.e4m3 import ScaledE4M3
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.pallas_kernels import gptq, mxfp4_decode, mxfp4_encode, recovery
from mxjax.pallas_kernels.attention import cached_attention, prefill
from mxjax.pallas_kernels.mosaic import (
  device,
  encode,
  fused,
  products,
  refinement,
  stream_k,
)
from mxjax.pallas_kernels.products import (
  float8,
  float8_matmul,
  int8,
  int8_matmul,
  matmul,
  planes,
)
from mxjax.pallas_kernels.refinement import fused_inputs, one_code

f32, b16, u8 = jnp.float32, jnp.bfloat16, jnp.uint8
array = jax.ShapeDtypeStruct
scalar = array((), f32)
recovered = MlpRecovery(*[scalar] * 4)
shares = array((32, 1, 8, 4), f32)
attended = fused_inputs.Attended(
  array((*shares.shape, 128), f32), shares, shares, 128**-0.5, (1,), b16, False
)


def packed(n, d):
  return mxfp4.MXTensor(array((n, d // 2), u8), array((n, d // 32), u8))


def refinement_cases():
  def refine(x, *tables, form, linears=1):
    tile = one_code.Tile.of(x.shape[0], x.dtype, linears)
    launch = functools.partial(one_code.launch, tile=tile, form=form)
    return launch, x, [one_code.Tables(*tables)] * linears

  square = array((128, 32, 32), f32)
  tables = square, array((128, 528), f32), square
  codes, values, by_plane, integers = (
    functools.partial(refine, form=form)
    for form in ("codes", "values", "planes", "int8")
  )
  gated = lambda n: fused_inputs.GatedProduct(*[array((n, 4096), b16)] * 2, recovered)
  normalized = fused_inputs.Normalized(array((1, 4096), b16), array((4096,), b16), 1e-6)
  wide, narrow = array((2048, 4096), f32), array((2048, 4096), b16)
  rows = lambda n: array((n, 4096), b16)
  three = functools.partial(by_plane, linears=3)
  few = square, array((128, 528), b16), None, 2, True
  return {
    "one code, split, codes": codes(narrow, *tables),
    "one code, split, values": values(narrow, *tables),
    "one code, float32, codes": codes(wide, *tables),
    "one code, float32, int8, 1 row": integers(rows(1), *tables),
    "one code, split, planes, 48 rows": by_plane(rows(48), *tables),
    "one code, split, planes, 48 rows, 3 linears": three(rows(48), *tables),
    "one code, split, values, of a gated product": values(gated(2048), *tables),
    "one code, split, values, of a gated product without a map": values(
      gated(2048), None, *tables[1:]
    ),
    "one code, int8, 1 row, normalized, 3 linears": integers(
      normalized, *tables, linears=3
    ),
    "one code, int8, 1 row, of a gated product": integers(gated(1), *tables),
    "one code, int8, 1 row, of attention": integers(attended, *tables),
    "one code, float32, planes, 16 rows, 3 linears": three(rows(16), *tables),
    "one code, split, values, 3 linears": values(narrow, *tables, linears=3),
    "one code, split, float8, 2 linears": refine(
      narrow, *tables, form="float8", linears=2
    ),
    "two codes, split, values": values(narrow, *few),
    "two codes, float32, int8, 1 row": integers(rows(1), *few),
    "two codes, float32, planes, 16 rows, 3 linears": three(rows(16), *few),
    "nearest, split, values": values(narrow, tables[0], None, None),
    "one code, split, float8": refine(narrow, *tables, form="float8"),
    "one code, split, float8 by blocks, 64 rows, 3 linears": refine(
      rows(64), *tables, form="float8 by blocks", linears=3
    ),
    "one code, float32, float8 by blocks, 8 rows": refine(
      rows(8), *tables, form="float8 by blocks"
    ),
  }


def attention_cases():
  def attend(new, dtype, positions=2048, *, is_e4m3=False, **options):
    tokens = lambda n, heads: array((4, n, heads, 128), dtype)
    launch = functools.partial(cached_attention.launch, **options)
    newest, past = (tokens(new, 8),) * 2, tokens(positions, 8)
    if is_e4m3:
      past = ScaledE4M3(array(past.shape, u8), array(past.shape[:3], u8))
    return launch, tokens(new, 32), newest, (past, past), array((4,), jnp.int32)

  def whole(head_dim, **options):
    tokens = lambda heads: array((1, 2048, heads, head_dim), b16)
    launch = functools.partial(prefill.launch, **options)
    return launch, tokens(32), tokens(8), tokens(8)

  return {
    "attention, 2048 tokens": whole(128),
    "attention, 2048 tokens, window": whole(128, window=1000),
    "attention, 2048 tokens, 256 coordinates": whole(256, window=1000),
    "attention, 2048 tokens, 64 coordinates": whole(64),
    "attention, 1 token, bfloat16": attend(1, b16),
    "attention, 16 tokens, bfloat16, window": attend(16, b16, window=1000),
    "attention, 1 token, float32": attend(1, f32, positions=2000),
    "attention, 8 tokens, float32": attend(8, f32),
    "attention, 1 token, E4M3": attend(1, b16, is_e4m3=True),
    "attention, 16 tokens, E4M3, window": attend(16, b16, is_e4m3=True, window=1000),
    "attention, 1 token, float32, E4M3": attend(1, f32, positions=2000, is_e4m3=True),
    "attention's shares brought together": (lambda shares: shares.array(), attended),
  }


def product_cases():
  dense = lambda n, d: planes.Planes(array((4, n, d // 4), b16))
  whole = lambda n, d: int8.Int8Inputs(array((n, d), jnp.int8), array((n, d // 32), u8))

  def integers(x, *weights):
    launch = functools.partial(int8_matmul.launch, dtype=b16)
    return launch, [x] * len(weights), list(weights)

  def onto(rows, weight):
    """The product without partial sums, and an array to which it is added."""
    outputs, width = weight.shape
    tile = int8_matmul.Tile.undivided([outputs], width)

    def launch(x, weight, added):
      return int8_matmul.launch([x], [weight], dtype=b16, tile=tile, onto=[added])

    return launch, whole(rows, width), weight, array((rows, outputs), b16)

  def shifts(rows, count):
    x = array((rows, 4096), float8.FORM), array((rows, 128), u8)
    return float8_matmul.shifted_each, [float8.Float8Inputs(*x, True)] * count

  def product(x, *weights):
    launch = functools.partial(matmul.launch, dtype=b16)
    return launch, [x] * len(weights), list(weights)

  narrow = float8.Float8Inputs(array((2048, 4096), float8.FORM), array((2048, 128), u8))
  to_float8 = functools.partial(float8_matmul.float8_matmul, dtype=b16)
  wide, square, flat = packed(12288, 4096), packed(4096, 4096), packed(1024, 4096)
  one_row = dense(1, 4096)
  return {
    # Mosaic does not take so many outputs.
    "float8 product of the library, 2048 rows": (
      *(to_float8, narrow, packed(12256, 4096), scalar),
    ),
    "matmul bfloat16 x packed, 2048 rows": product(dense(2048, 4096), wide),
    "matmul packed x packed, 2048 rows": product(packed(2048, 4096), square),
    "matmul bfloat16 x packed, 1 row": product(one_row, square),
    "matmul packed x packed, 16 rows": product(packed(16, 4096), wide),
    "int8 x packed, 1 row": integers(whole(1, 4096), wide),
    "int8 x packed, 1 row, 3 linears": integers(whole(1, 4096), square, flat, flat),
    "int8 x packed, undivided, 1 row": onto(1, packed(4096, 12288)),
    "int8 x packed, undivided, 4 rows": onto(4, packed(1530, 576)),
    "float8 shift by blocks, 8 rows, 3 linears": shifts(8, 3),
    "int8 x packed, 4 rows": integers(whole(4, 576), packed(1536, 576)),
    "matmul bfloat16 x packed, 1 row, 3 linears": product(one_row, square, flat, flat),
    "matmul bfloat16 x packed, 48 rows": product(dense(48, 576), packed(1536, 576)),
  }


def other_cases():
  hidden, group = [array((2048, 12288), b16)] * 2, array((32, 12288), f32)
  heads = ValueRecovery(*[array((8,), f32)] * 2)
  return {
    "encode float32": (mxfp4_encode.launch, array((2048, 4096), f32)),
    "encode bfloat16": (mxfp4_encode.launch, array((2048, 4096), b16)),
    "GPTQ group of 32 columns": (gptq.launch, group, array((32, 32), f32)),
    "MLP recovery": (recovery.launch_product, *hidden, recovered),
    "value recovery": (recovery.launch_values, array((2048, 8, 128), b16), heads),
    "decode to bfloat16": (mxfp4_decode.launch_bfloat16, packed(12288, 4096)),
  }


def mosaic_cases():
  if device.obstacle():
    return {}
  narrow, square = array((2048, 4096), b16), array((128, 32, 32), f32)
  tables = square, array((128, 528), f32), square

  def refine(*tables, form, linears=1):
    launch = functools.partial(refinement.launch, form=form)
    return launch, narrow, [one_code.Tables(*tables)] * linears

  to_float8, to_packed = (
    functools.partial(product, dtype=b16)
    for product in (products.float8_product, products.packed_product)
  )
  eight, wide = array((2048, 4096), float8.FORM), packed(12288, 4096)
  one_code_cases = {
    f"Mosaic one code, {form}": refine(*tables, form=form)
    for form in ("codes", "values", "float8")
  }
  return one_code_cases | {
    "Mosaic one code without a map, values": refine(None, *tables[1:], form="values"),
    "Mosaic one code, values, 3 linears": refine(*tables, form="values", linears=3),
    "Mosaic two codes, values": refine(
      square, array((128, 528), b16), None, 2, True, form="values"
    ),
    "Mosaic nearest, values": refine(square, None, None, form="values"),
    "Mosaic one code, codes, 579 rows": (
      functools.partial(refinement.launch, form="codes"),
      array((579, 4096), b16),
      [one_code.Tables(*tables)],
    ),
    "Mosaic bfloat16 x packed, 579 rows": (to_packed, array((579, 4096), b16), wide),
    "Mosaic float8 product, 2048 rows": (to_float8, eight, wide, scalar),
    "Mosaic float8 product, mended, 70 rows": (
      functools.partial(float8_matmul.float8_matmul, dtype=b16),
      float8.Float8Inputs(array((70, 4096), float8.FORM), array((70, 128), u8)),
      wide,
      scalar,
    ),
    "Mosaic bfloat16 x packed, 2048 rows": (to_packed, narrow, wide),
    "Mosaic encode bfloat16": (encode.encode, narrow),
  }


def stream_k_cases():
  if device.compile_obstacle():
    return {}
  launch = functools.partial(stream_k.float8_products, dtype=b16)

  def product(rows, *weights, inputs=1):
    x = [array((rows, weights[0].shape[1]), float8.FORM)] * inputs
    scales = [scalar] * len(weights)
    return launch, x, list(weights), scales, [array((rows,), f32)] * inputs

  wide, square, flat = packed(12288, 4096), packed(4096, 4096), packed(1024, 4096)
  return {
    "Mosaic stream-K float8 product, 8 rows": product(8, wide),
    "Mosaic stream-K float8 product, 64 rows": product(64, wide),
    "Mosaic stream-K float8 product, 511 rows": product(511, wide),
    "Mosaic stream-K float8 product, 17 rows, 3 linears": product(
      17, square, flat, flat, inputs=3
    ),
  }


def fused_cases():
  if device.obstacle():
    return {}
  launch = functools.partial(fused.products, dtype=b16)

  def product(rows, *weights):
    width = weights[0].shape[1]
    blocks = width // 32
    square = array((blocks, 32, 32), f32)
    tables = one_code.Tables(square, array((blocks, 528), f32), square)
    count = len(weights)
    x = array((rows, width), b16)
    return launch, x, [tables] * count, list(weights), [scalar] * count

  wide, square, flat = packed(12288, 4096), packed(4096, 4096), packed(1024, 4096)
  return {
    "Mosaic fused float8 product, 1 row, 3 linears": product(1, square, flat, flat),
    "Mosaic fused float8 product, 8 rows, 2 linears": product(8, wide, wide),
    "Mosaic fused float8 product, 64 rows": product(64, packed(4096, 12288)),
  }


def not_taken(name, capability):
  """Why a device of this compute capability does not take a kernel, or None."""
  if name.startswith("Mosaic") and capability != device.HOPPER:
    return "wgmma and its copies are Hopper's: choice.py has another form"
  if "float8" in name and capability < implementations.FLOAT8:
    return "no float8 before 8.9: products are in bfloat16"
  return None


def cases():
  triton = refinement_cases() | attention_cases() | product_cases() | other_cases()
  return triton | mosaic_cases() | stream_k_cases() | fused_cases()
