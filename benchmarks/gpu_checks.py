"""Are the kernels right? Every one against its reference, with fresh random inputs.

Inputs are drawn anew at every run (the seed is in the result), with what breaks
kernels planted in them: ties, zero blocks, outliers, cut tiles. Codes are compared bit
for bit where the arithmetic is the same, by the objective reached where it is not.

  python benchmarks/gpu_checks.py             # at most 2.5 minutes on an H100
  python benchmarks/gpu_checks.py --tiny      # interprets the kernels on a CPU
"""

import concurrent.futures
import functools
import secrets
import sys
import traceback

import common
import gpu_attention
import gpu_models
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.layers.linear import linear_many
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping.input_maps import BlockDense
from mxjax.pallas_kernels import choice, mxfp4_decode, mxfp4_encode, recovery
from mxjax.pallas_kernels import gptq as gptq_kernel
from mxjax.pallas_kernels.products import float8_matmul, int8, matmul
from mxjax.pallas_kernels.refinement import fused_inputs
from mxjax.pallas_kernels.refinement import one_code as refinement_kernel


def activations(rng, rows, width, dtype):
  """Heavy tails, one feature of outliers, ties at every exponent, zero blocks."""
  x = rng.standard_t(3, (rows, width)).astype(np.float32)
  x[:, rng.integers(width)] *= 50
  ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0] * 4, np.float32)
  exponents = (-10, 10) if dtype == jnp.float16 else (-30, 30)
  for row in range(0, rows, 5):
    block = rng.integers(width // 32) * 32
    x[row, block : block + 32] = ties * 2.0 ** rng.integers(*exponents)
  for row in range(1, rows, 7):
    block = rng.integers(width // 32) * 32
    x[row, block : block + 32] = 0
  return jnp.asarray(x).astype(dtype)


def tiny_blocks(rng, width, dtype):
  """Rows whose blocks are subnormal or just above it, by bits: floats might flush."""
  bits = {2: np.uint16, 4: np.uint32}[jnp.dtype(dtype).itemsize]
  smallest_normal = 1 << jnp.finfo(dtype).nmant
  rows = [
    rng.integers(0, smallest_normal << shift, width) >> rng.integers(0, 6, width)
    for shift in range(5)
  ]
  signs = rng.integers(0, 2, (len(rows), width)) << (8 * bits().itemsize - 1)
  return jnp.asarray((np.stack(rows) | signs).astype(bits)).view(dtype)


def tables(rng, blocks):
  """A well-conditioned map and the tables of a random weight."""
  rotation = np.linalg.qr(rng.standard_normal((blocks, 32, 32)))[0]
  matrix = rotation * rng.uniform(0.5, 2, (blocks, 32, 1))
  weight = jnp.asarray(rng.standard_normal((blocks, 32, 96)), jnp.float32)
  gram, cross = one_code.tables(weight, mxfp4.round_blocks(weight))
  packed = one_code.pack_symmetric(gram)
  return jnp.asarray(matrix, jnp.float32), packed, cross


def objective(tensor, x, matrix, gram, cross):
  """||W^ q - W y||^2 up to a constant, and ||W^ y||^2, float64 `[n, blocks]`."""
  gram = one_code.unpack_symmetric(gram)
  wide = [np.asarray(a, np.float64) for a in (matrix, gram, cross)]
  rows = np.asarray(x.astype(jnp.float32), np.float64).reshape(x.shape[0], -1, 32)
  y = np.einsum("nbj,bij->nbi", rows, wide[0])
  q = np.asarray(mxfp4.decode(tensor, jnp.float32), np.float64).reshape(y.shape)
  d = q - y
  value = np.einsum("nbi,bij,nbj->nb", d, wide[1], d)
  value -= 2 * np.einsum("nbi,bij,nbj->nb", d, wide[2], y)
  return value, np.einsum("nbi,bij,nbj->nb", y, wide[1], y)


def differing(got, want):
  """Share of codes and number of scales that differ."""
  codes = mxfp4.unpack(got.codes) != mxfp4.unpack(want.codes)
  return float(codes.mean()), int((got.scales != want.scales).sum())


def check_encode(rng, how, size):
  worst = {}
  for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    x = activations(rng, size + 3, 96 if size < 64 else 1056, dtype)
    x = jnp.where(jnp.isfinite(x), x, 0).astype(dtype)
    x = jnp.concatenate([x, tiny_blocks(rng, x.shape[1], dtype)])
    encode = jax.jit(mxfp4_encode.encode, static_argnames="implementation")
    # The reference on CPU: no compiler under test on both sides.
    with jax.default_device(jax.devices("cpu")[0]):
      want = mxfp4.encode(jax.device_get(x))
    got = jax.device_get(encode(x, implementation=how))
    worst[jnp.dtype(dtype).name] = differing(got, jax.device_get(want))
  return {"differing": worst, "passed": all(v == (0.0, 0) for v in worst.values())}


def check_refinement(rng, how, size):
  shares, gaps = {}, {}
  for dtype in (jnp.float32, jnp.bfloat16):
    for rows in (5, size + 3):
      x = activations(rng, rows, 96, dtype)
      parts = tables(rng, 3)
      refine = jax.jit(refinement_kernel.refine, static_argnames="implementation")
      got = refine(x, *parts, implementation=how)
      want = refine(x, *parts, implementation="xla")
      reached, scale = objective(got, x, *parts)
      reference, _ = objective(want, x, *parts)
      name = f"{jnp.dtype(dtype).name}, {rows} rows"
      shares[name] = differing(got, want)[0]
      relative = np.abs(reached - reference) / np.maximum(scale, 1e-30)
      gaps[name] = float(relative.max())
  broken = x.at[1, 3].set(jnp.nan).at[2, 40].set(jnp.inf)
  is_marked = True
  # A map makes all of a block NaN; without one the others of it are numbers.
  for matrix in (parts[0], None):
    scales = refine(broken, matrix, *parts[1:], implementation=how).scales
    marked = np.asarray(scales == 255)
    is_marked &= marked[1, 0] and marked[2, 1] and marked.sum() == 2
  passed = max(shares.values()) < 2e-3 and max(gaps.values()) < 1e-4
  return {
    "codes_differing": shares,
    "objective_gap": gaps,
    "not_finite_is_marked": bool(is_marked),
    "passed": bool(passed and is_marked),
  }


def check_few_codes(rng, how, size):
  """Several changes without K_Q; of equal ones the order of sums decides."""
  shares, gaps = {}, {}
  for dtype in (jnp.float32, jnp.bfloat16):
    for rows, changes in ((1, 3), (5, 2), (size + 3, 2), (size + 3, 4)):
      x = activations(rng, rows, 96, dtype)
      matrix, gram, cross = tables(rng, 3)
      options = {"changes": changes, "rounds_up": True}
      refine = jax.jit(
        refinement_kernel.refine, static_argnames=("implementation", *options)
      )
      got = refine(x, matrix, gram, implementation=how, **options)
      want = refine(x, matrix, gram, implementation="xla", **options)
      (reached, scale), (reference, _) = (
        objective(tensor, x, matrix, gram, 0 * cross) for tensor in (got, want)
      )
      name = f"{jnp.dtype(dtype).name}, {rows} rows, {changes} changes"
      shares[name], wrong_scales = differing(got, want)
      gaps[name] = float((reached - reference).sum() / reference.sum())
      assert not wrong_scales, f"{name}: {wrong_scales} scales differ"
  passed = max(shares.values()) < 6e-3 and max(map(abs, gaps.values())) < 1e-3
  return {"codes_differing": shares, "objective_gap": gaps, "passed": bool(passed)}


def check_matmul(rng, how, size):
  errors = {}
  for rows in (1, 4, 16, size + 3):
    x = mxfp4.encode(activations(rng, rows, 256, jnp.float32))
    weight = mxfp4.encode(activations(rng, 130, 256, jnp.float32))
    exact = [np.asarray(mxfp4.decode(t, jnp.float32), np.float64) for t in (x, weight)]
    bound = 256 * 2.0**-24 * (np.abs(exact[0]) @ np.abs(exact[1]).T)
    operands = {"packed": x, "bfloat16": mxfp4.decode(x, jnp.bfloat16)}
    if rows <= fused_inputs.SINGLE_ROWS:
      operands["int8"] = int8.of_tensor(x)
    for name, operand in operands.items():
      run = jax.jit(matmul.matmul, static_argnames="implementation")
      got = np.asarray(run(operand, weight, implementation=how), np.float64)
      error = np.abs(got - exact[0] @ exact[1].T)
      errors[f"{name}, {rows} rows"] = float((error / np.maximum(bound, 1e-30)).max())
  return {"error_in_bounds": errors, "passed": max(errors.values()) <= 1}


def check_linears(rng, how, size):
  """Two linears of one input in shared launches, with what stands before them."""
  scalars = MlpRecovery(*(jnp.float32(v) for v in (0.05, -0.03, 0.02, 1.7)))
  errors = {}
  for rows, kind in ((1, "norm"), (16, "product"), (size + 3, "product")):
    draw = lambda rows=rows: activations(rng, rows, 1152, jnp.bfloat16)
    weights = []
    for outputs in (130, 64):
      dense = jnp.asarray(rng.standard_normal((outputs, 1152)), jnp.float32)
      matrix, gram, cross = tables(rng, 36)
      leaf = mxfp4.encode(dense), BlockDense(matrix), OneCode(gram, cross)
      weights.append(QuantizedLinear(*leaf))
    scale = jnp.asarray(rng.uniform(0.5, 2, 1152), jnp.float32)
    if kind == "norm":
      before = fused_inputs.Normalized(draw(), scale, 1e-6)
    else:
      before = fused_inputs.GatedProduct(draw() / 9, draw() / 9, scalars)
    run = jax.jit(linear_many, static_argnames="implementation")
    # Made by itself: inside one program XLA may leave out the rounding to bfloat16.
    made = jax.jit(fused_inputs.as_array)(before)
    pairs = zip(
      run(before, weights, implementation=how),
      run(made, weights, implementation="xla"),
      strict=True,
    )
    errors[f"{kind}, {rows} rows"] = max(
      float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
      for got, want in jax.tree.map(lambda a: a.astype(jnp.float32), list(pairs))
    )
  # An input may round the other way and change codes: W4A4 itself is off by 0.1.
  return {"relative_error": errors, "passed": max(errors.values()) < 0.03}


def without_float8(how):
  """Why this device has no float8, or None; interpreted, every device has."""
  if how == "interpret":
    return None
  return implementations.target().obstacle(implementations.FLOAT8)


def check_decode(rng, how, size):
  """Codes at every scale byte, and at those that float8 holds."""
  rows = 508 if size < 64 else 508 * 8
  codes = jnp.asarray(rng.integers(0, 256, (rows, 32)), jnp.uint8)
  scales = jnp.asarray(np.arange(2 * rows).reshape(rows, 2) % 256, jnp.uint8)
  results = {}
  # Interpreted on a CPU, subnormals are flushed.
  lowest = 3 if how == "interpret" else 0
  forms = [("bfloat16", lowest), ("float8", 107)]
  for name, low in forms[:1] if without_float8(how) else forms:
    inside = jnp.clip(scales, low, 121 if name == "float8" else 255)
    tensor = mxfp4.MXTensor(codes, inside)
    # The reference on CPU: no compiler under test on both sides.
    want = mxfp4.decode(jax.device_put(tensor, jax.devices("cpu")[0]), jnp.bfloat16)
    if name == "bfloat16":
      got = mxfp4_decode.decode(tensor, implementation=how)
    else:
      unit, _ = mxfp4_decode.float8_range(tensor)
      narrow = mxfp4_decode.decode_float8(tensor, unit, implementation=how)
      got = (narrow.astype(jnp.float32) * unit).astype(jnp.bfloat16)
    wide = (np.asarray(a).astype(np.float32) for a in (got, want))
    results[name] = bool(np.array_equal(*wide, equal_nan=True))
  return {"equal": results, "passed": all(results.values())}


def check_float8_product(rng, how, size):
  """Against exact products: how far float8 sums are from float32's bound.

  Two rows have a block outside of float8's range and are shifted into it.
  On Hopper, Mosaic multiplies by the 256 outputs and the library by the 130.
  """
  if why_not := without_float8(how):
    return {"skipped": why_not, "passed": True}
  width, results = 64 if size < 64 else 4096, {}
  for rows, outputs in (
    ((40, 256),) if size < 64 else ((512, 256), (70, 256), (512, 130))
  ):
    x, weight = (
      mxfp4.encode(jnp.asarray(rng.standard_t(5, (n, width)), jnp.float32))
      for n in (rows, outputs)
    )
    outside = np.array([1, rows - 2])
    x = mxfp4.MXTensor(x.codes, x.scales.at[outside, np.array([0, 1])].set(142))
    values = mxfp4.decode(x, jnp.bfloat16)
    inputs = refinement_kernel.refine(values, form="float8", implementation=how)
    unit, fits = mxfp4_decode.float8_range(weight)
    product = jax.jit(float8_matmul.float8_matmul, static_argnames="implementation")
    got = product(inputs, weight, unit, implementation=how)
    exact = [np.asarray(mxfp4.decode(t, jnp.float32), np.float64) for t in (x, weight)]
    want, sums = exact[0] @ exact[1].T, np.abs(exact[0]) @ np.abs(exact[1]).T
    error = np.abs(np.asarray(got, np.float64) - want)
    relative = np.linalg.norm(error, axis=1) / np.linalg.norm(want, axis=1)
    # 14 bits kept in every sum would show 1e-4; a wrong scale or operand shows 1.
    bounds = error / (width * 2.0**-24 * sums)
    results[f"{rows} rows, {outputs} outputs"] = {
      "by": choice.product(rows, outputs, width, has_float8=True).name,
      "weight_fits": bool(fits),
      "relative": float(relative.max()),
      "relative_of_shifted_rows": float(relative[outside].max()),
      "in_bounds": float(bounds.max()),
      "passed": bool(fits and relative.max() < 1e-3),
    }
  return {**results, "passed": all(each["passed"] for each in results.values())}


def check_gptq(rng, how, size):
  width = 96
  x = rng.standard_normal((4 * width, width)) @ (
    np.eye(width) + 0.3 * rng.standard_normal((width, width))
  )
  hessian = jnp.asarray(x.T @ x / len(x), jnp.float32)
  weight = jnp.asarray(rng.standard_t(4, (3, 32, size + 3)), jnp.float32)
  upper = gptq.factor(hessian).upper
  got = gptq_kernel.reconstruct(weight, upper, implementation=how)
  want = gptq_kernel.reconstruct(weight, upper, implementation="xla")
  loss = lambda r: float(gptq.reconstruction_loss(weight, r.decoded, hessian))
  gap = abs(loss(got) / loss(want) - 1)
  share = float((got.codes != want.codes).mean())
  return {"codes_differing": share, "loss_gap": gap, "passed": gap < 5e-3}


def check_recovery(rng, how, size):
  scalars = MlpRecovery(*(jnp.float32(v) for v in (0.05, -0.03, 0.02, 1.7)))
  heads = ValueRecovery(jnp.float32([1.1, 0.9]), jnp.float32([0.1, -0.2]))
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) * 4, jnp.bfloat16)
  gate, up, values = draw(size + 3, 96), draw(size + 3, 96), draw(size + 3, 2, 64)
  worst = 0.0
  for function, operands in (
    (recovery.gated_product, (gate, up, scalars)),
    (recovery.recover_values, (values, heads)),
  ):
    got, want = (
      np.asarray(function(*operands, implementation=i), np.float64)
      for i in (how, "xla")
    )
    worst = max(worst, float((np.abs(got - want) / (np.abs(want) + 0.05)).max()))
  return {"relative_error": worst, "passed": worst <= 2.0**-6}


def check_layer(rng, how, size):
  """A whole HiRes layer by all kernels: many tokens, and one beside a cache of them."""
  shape = gpu_models.Shape("small", 128, 160, 1, 4, 2, 32, 61)
  layer = gpu_models.random_layer(jax.random.key(rng.integers(99)), shape)
  draw = lambda *sides: jnp.asarray(rng.standard_normal(sides), jnp.bfloat16)
  past = {name: draw(1, size, shape.kv_heads, shape.head_dim) for name in ("k", "v")}
  cases = {
    "many": (draw(1, size + 3, 128),),
    "one beside a cache": (draw(1, 1, 128), past, jnp.int32(size - 5)),
  }
  errors = {}
  for name, arguments in cases.items():
    got, want = (
      jax.jit(functools.partial(gpu_models.forward_layer, shape, i, layer))(*arguments)
      for i in (how, "xla")
    )
    wide = [jax.tree.map(lambda a: a.astype(jnp.float32), each) for each in (got, want)]
    error = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    errors[name] = max(jax.tree.leaves(jax.tree.map(error, *wide)))
  # As in `check_linears`.
  return {"relative_error": errors, "passed": max(errors.values()) < 0.03}


def check_mosaic(rng, how, size):
  import gpu_mosaic  # It takes what is above.

  return gpu_mosaic.check(rng, how, size)


def check_undivided(rng, how, size):
  import gpu_mosaic  # It takes what is above.

  return gpu_mosaic.check_undivided(rng, how, size)


CHECKS = {
  "encode": check_encode,
  "one code": check_refinement,
  "few codes": check_few_codes,
  "matmul": check_matmul,
  "linears of one input": check_linears,
  "undivided product": check_undivided,
  "decode": check_decode,
  "float8 product": check_float8_product,
  "GPTQ": check_gptq,
  "recovery": check_recovery,
  "attention": gpu_attention.check_cached,
  "prefill attention": gpu_attention.check_prefill,
  "layer": check_layer,
  "Mosaic forms": check_mosaic,
}


def run(how, seed, size, pool):
  """Every check by name, side by side; `how` is `pallas` or `interpret`."""
  start = lambda check: pool.submit(check, np.random.default_rng(seed), how, size)
  running = {name: start(check) for name, check in CHECKS.items()}
  results = {}
  for name, future in running.items():
    results[name] = future.result()
    verdict = "ok  " if results[name]["passed"] else "FAIL"
    print(f"{verdict} {name}: {results[name]}", flush=True)
  return results


def attempt(name, how, seed, size):
  """A check by name; one that raises has failed, and the others go on."""
  try:
    return CHECKS[name](np.random.default_rng(seed), how, size)
  except Exception as error:
    traceback.print_exc()
    return {"passed": False, "raised": f"{type(error).__name__}: {str(error)[:300]}"}


def main():
  """Runs the checks side by side, since compilation takes most of their time."""
  parser = common.parser(__doc__, tiny=True)
  parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
  options = parser.parse_args()
  how, size = ("interpret", 40) if options.tiny else ("pallas", 512)
  if not options.tiny and jax.default_backend() != "gpu":
    sys.exit("gpu_checks: there is no GPU; --tiny interprets the kernels on a CPU.")
  seed = secrets.randbits(32)
  device = jax.devices()[0].device_kind
  result = common.stamp() | {"device": device, "seed": seed}
  result |= {"all checks": options.only, "checks": {}}
  with concurrent.futures.ThreadPoolExecutor(2 if options.tiny else 7) as pool:
    running = {
      pool.submit(attempt, name, how, seed, size): name for name in options.only
    }
    for done in concurrent.futures.as_completed(running):
      result["checks"][running[done]] = entry = done.result()
      verdict = "ok" if entry["passed"] else "FAILED"
      print(f"{running[done]}: {verdict}", flush=True)
      rows = [
        [name, "ok" if made["passed"] else "FAILED", made.get("skipped", "")]
        for name, made in result["checks"].items()
      ]
      text = common.markdown(["kernel", "against its reference", "left out"], rows)
      common.finish(options, result, text)
  sys.exit(any(not entry["passed"] for entry in result["checks"].values()))


if __name__ == "__main__":
  main()
