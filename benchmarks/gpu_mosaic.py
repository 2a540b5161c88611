"""Correctness of the Mosaic GPU forms, called by themselves: see `gpu_checks.py`."""

import functools

import gpu_checks
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels import choice, mxfp4_decode
from mxjax.pallas_kernels.mosaic import device, encode, fused, products, refinement
from mxjax.pallas_kernels.products import float8, float8_matmul, int8, int8_matmul
from mxjax.pallas_kernels.refinement import one_code


def check(rng, how, size):
  """Errors of every form, if the installed jax can make it for this GPU."""
  if why_not := device.hopper_obstacle():
    return {"skipped": why_not, "passed": True}
  if how != "pallas":
    return {"skipped": "tests/pallas_kernels/mosaic interprets them", "passed": True}
  rows = size + 64 + 3
  x = gpu_checks.activations(rng, rows, 256, jnp.bfloat16)
  got = jax.jit(encode.encode)(x)
  results = {"encode": float(gpu_checks.differing(got, mxfp4.encode(x)) != (0.0, 0))}
  results["one code"] = refinement_gap(rng, x)
  x, weight = packed(rng, rows, 256), packed(rng, 256, 256)
  results["packed product"] = error(products.packed_product, x, weight)
  unit, _ = mxfp4_decode.float8_range(weight)
  narrow = lambda x, weight, dtype: products.float8_product(
    float8.of_tensor(x).values, weight, unit, dtype=dtype
  )
  # Sums of float8 keep fewer bits: 14 would show 1e-4.
  results["float8 product"] = error(narrow, x, weight, relative=1e-3)
  for candidate in (check_stream_k, check_fused):
    results |= candidate(rng, how)["error_in_bounds"]
  return {"error_in_bounds": results, "passed": max(results.values()) <= 1}


def check_stream_k(rng, how):
  """Errors of the stream-K product, of several linears, rows and ranges of units.

  Linears have inputs of their own, one row of which float8 cannot hold. On a GPU the
  same call must give the same bits, time after time.
  """
  interpreted = how != "pallas"
  if why_not := device.obstacle() if interpreted else device.hopper_obstacle():
    return {"skipped": why_not, "error_in_bounds": {}, "passed": True}
  results = {}
  cases = (
    [(5, (128,), 512)]
    if interpreted
    else [
      (5, (256,), 1024),
      (8, (4096,), 12288),
      (17, (4096, 1024, 1024), 4096),
      (32, (12288,), 4096),
      (64, (128, 384), 1536),
      (200, (4096,), 4096),
      (511, (1024, 1024), 4096),
    ]
  )
  for rows, outputs, width in cases:
    xs = [packed(rng, rows, width) for _ in outputs]
    xs = [mxfp4.MXTensor(x.codes, x.scales.at[rows - 1, 0].set(142)) for x in xs]
    tensors = [packed(rng, m, width) for m in outputs]
    units = [mxfp4_decode.float8_range(tensor)[0] for tensor in tensors]

    def product(xs, tensors, units):
      with choice.trying(choice.FLOAT8_STREAM):
        return float8_matmul.float8_matmul_each(xs, tensors, units, implementation=how)

    run = jax.jit(product)
    inputs = [float8.of_tensor(x) for x in xs]
    traced = str(run.trace(inputs, tensors, units).jaxpr)
    assert "mxjax_float8_stream_k" in traced or interpreted
    got = run(inputs, tensors, units)
    again = [run(inputs, tensors, units) for _ in range(1 if interpreted else 5)]
    same = all(
      np.array_equal(a, b) for each in again for a, b in zip(got, each, strict=True)
    )
    errors = [
      error(lambda x, weight, dtype, made=made: made, x, weight, relative=1e-3)
      for made, x, weight in zip(got, xs, tensors, strict=True)
    ]
    name = f"stream-K, {rows} rows, {list(outputs)} outputs of {width}"
    results[name] = max(errors) if same else float("inf")
  return {"error_in_bounds": results, "passed": max(results.values()) <= 1}


def check_fused(rng, how):
  """Errors of the product that refines its inputs, and whether its bits repeat.

  Against exact products of what the refinement of the table makes of the same inputs:
  their arithmetic is one, so their codes are alike. One row has a block that float8
  cannot hold.
  """
  interpreted = how != "pallas"
  if why_not := device.obstacle() if interpreted else device.hopper_obstacle():
    return {"skipped": why_not, "error_in_bounds": {}, "passed": True}
  if interpreted:
    tests = "tests/pallas_kernels/mosaic interprets it"
    return {"skipped": tests, "error_in_bounds": {}, "passed": True}
  results = {}
  for rows, outputs, width in (
    (1, (4096, 1024, 1024), 4096),
    (4, (4096,), 12288),
    (8, (12288, 12288), 4096),
    (33, (256,), 1024),
    (64, (4096,), 4096),
  ):
    for far in (0, 20):
      wide = rng.standard_t(3, (rows, width))
      wide[rows - 1, 64:96] *= 2.0**far
      x = jnp.asarray(wide, jnp.bfloat16)
      tables = [one_code.Tables(*gpu_checks.tables(rng, width // 32)) for _ in outputs]
      tensors = [packed(rng, m, width) for m in outputs]
      units = [mxfp4_decode.float8_range(tensor)[0] for tensor in tensors]
      run = jax.jit(functools.partial(fused.products, dtype=jnp.float32))
      got = run(x, tables, tensors, units)
      again = [run(x, tables, tensors, units) for _ in range(5)]
      same = all(
        np.array_equal(a, b) for each in again for a, b in zip(got, each, strict=True)
      )
      padded = jnp.pad(x, ((0, 64 - rows), (0, 0)))
      refined = jax.jit(refinement.launch, static_argnames="form")
      made = refined(padded, tables, form="codes")
      errors = [
        error(
          lambda x, weight, dtype, y=y: y,
          mxfp4.MXTensor(*(part[:rows] for part in parts)),
          weight,
          relative=1e-3,
        )
        for y, parts, weight in zip(got, made, tensors, strict=True)
      ]
      name = f"fused, {rows} rows, {list(outputs)} outputs of {width}, 2^{far}"
      results[name] = max(errors) if same else float("inf")
  return {"error_in_bounds": results, "passed": max(results.values()) <= 1}


def check_undivided(rng, how, size=4096):
  """Errors of the integer product that adds to a residual, which it rounds once."""
  results = {}
  for rows, outputs, width in ((1, size, 1024), (4, size, 4096), (3, size + 3, 1120)):
    x, weight = packed(rng, rows, width), packed(rng, outputs, width)
    tile = int8_matmul.Tile.undivided([outputs], width)
    onto = jnp.asarray(rng.standard_normal((rows, outputs)), jnp.float32)

    def product(x, weight, dtype, onto=onto, tile=tile):
      options = {"dtype": dtype, "tile": tile, "interpret": how != "pallas"}
      given = [int8.of_tensor(x)], [weight]
      [added] = int8_matmul.launch(*given, onto=[onto.astype(dtype)], **options)
      [alone] = int8_matmul.launch(*given, **options)
      # The sum is that of two arrays; what is checked further is the product.
      return jnp.where(added == alone + onto.astype(dtype), alone, jnp.nan)

    name = f"undivided, {rows} rows, {outputs} outputs of {width}"
    results[name] = error(product, x, weight)
  is_right = all(value <= 1 for value in results.values())
  return {"error_in_bounds": results, "passed": is_right}


CANDIDATES = {
  "float8 stream-K": check_stream_k,
  "float8 fused": check_fused,
  "int8 undivided": check_undivided,
}
"""The check of each candidate of `choice.py`, by its name."""


def packed(rng, rows, width):
  return mxfp4.encode(jnp.asarray(rng.standard_t(5, (rows, width)), jnp.float32))


def refinement_gap(rng, x):
  """The objective's distance from the reference, in units of what is allowed."""
  tables = [gpu_checks.tables(rng, x.shape[1] // 32) for _ in range(2)]
  run = jax.jit(refinement.launch, static_argnames="form")
  gaps = []
  results = run(x, [one_code.Tables(*each) for each in tables], form="codes")
  for each, parts in zip(tables, results, strict=True):
    want = one_code.refine(x, *each, implementation="xla")
    reached, scale = gpu_checks.objective(mxfp4.MXTensor(*parts), x, *each)
    reference, _ = gpu_checks.objective(want, x, *each)
    gaps.append((np.abs(reached - reference) / np.maximum(scale, 1e-30)).max())
  return float(max(gaps) / 1e-4)


def error(product, x, weight, relative=None):
  """The largest error against float64 in units of what is allowed."""
  got = jax.jit(product, static_argnames="dtype")(x, weight, dtype=jnp.float32)
  wide = [np.asarray(mxfp4.decode(t, jnp.float32), np.float64) for t in (x, weight)]
  want, sizes = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
  off = np.abs(np.asarray(got, np.float64) - want)
  if relative is not None:
    return float(np.linalg.norm(off) / np.linalg.norm(want) / relative)
  return float((off / (x.shape[1] * 2.0**-24 * sizes)).max())
