"""What else could run: other tiles of the kernels, and their Mosaic forms.

Each candidate is timed beside the tile that the library takes; one that fails says why
and the others go on. The names are those of `Tile`'s fields and of module constants.
"""

import contextlib
import dataclasses
import functools

import gpu_models
import jax
import jax.numpy as jnp

from mxjax.numerics import mxfp4
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.pallas_kernels import lowering, mxfp4_decode, mxfp4_encode
from mxjax.pallas_kernels.mosaic import device, encode, products, refinement
from mxjax.pallas_kernels.products import float8, int8, int8_matmul, matmul, planes
from mxjax.pallas_kernels.refinement import fused_inputs, one_code

MEMORY = (128, 4), (256, 8), (512, 4), (512, 8), (1024, 8)
"""Blocks and warps of a program that walks over memory."""
REFINEMENT = (
  *({"stages": 1}, {"stages": 2}, {"stages": 4}, {"repeats": 4}, {"repeats": 16}),
  *({"rows": 128, "warps": 8}, {"repeats": 32, "rows": 16}),
)
FEW_ROWS = (
  *({"stages": 2}, {"stages": 4}, {"stages": 5}, {"warps": 8}, {"warps": 2}),
  *({"columns": 128}, {"columns": 512}, {"outputs": 32}, {"outputs": 128}),
)
SPLITS = 1, 2, 4, 8, 16
INTEGERS = (
  *({}, {"ahead": True}, {"outputs": 16}, {"outputs": 64}, {"blocks": 8}),
  *({"splits": n} for n in (1, 2, 4, 8, 3)),
  *({"outputs": 16, "warps": 2}, {"outputs": 64, "warps": 8}),
)


def short(error):
  return f"{type(error).__name__}: {str(error)[:300]}"


@contextlib.contextmanager
def changed(module, **constants):
  """Sets constants of a module for what is traced inside."""
  before = {name: getattr(module, name) for name in constants}
  for name, value in constants.items():
    setattr(module, name, value)
  try:
    yield
  finally:
    for name, value in before.items():
      setattr(module, name, value)


def named(case, change):
  values = ", ".join(f"{name} {value}" for name, value in change.items())
  return f"{case}, {values or 'as it is'}"


def timed(bench, candidates):
  """Times `name: (function, arguments, context)`; contexts hold while it is traced."""
  lowered, failed, copies = {}, {}, {}
  for name, (function, arguments, context) in candidates.items():
    key = tuple(map(id, jax.tree.leaves(arguments)))
    with bench.alone():  # Candidates of the same arguments share their copies.
      if key not in copies:
        copies[key] = bench.rotating(function, arguments)[1:]
        jax.block_until_ready(copies[key][0])
    sets, count = copies[key]
    try:
      with context:
        one = jax.jit(function)  # Traced and lowered once for all sets.
        run = lambda sets, one=one: [one(*each) for each in sets]
        lowered[name] = jax.jit(run).lower(*sets), sets, count
    except Exception as error:  # A compiler fails in its own ways.
      failed[name] = short(error)
  compiling = {n: bench.pool.submit(e[0].compile) for n, e in lowered.items()}
  programs = {}
  for name, future in compiling.items():
    _, sets, count = lowered[name]
    try:
      program = future.result()
      with bench.alone():
        jax.block_until_ready(program(*sets))
      programs[name] = program, sets, count
    except Exception as error:
      failed[name] = short(error)
    print(name, failed.get(name, "ran"), flush=True)
  times = bench.measure(programs)
  for name, result in times.items():
    if "as it is" in name or "Mosaic" in name:
      with bench.alone():
        result["device"] = bench.device_times(*programs[name][:1], *programs[name][1])
  return {"times": times, "failed": failed}


def memory_candidates(bench):
  """Encode and decode by blocks and warps of a program."""
  rows, width = bench.size((8192, 8192), (32, 64))
  wide = jax.random.normal(jax.random.key(0), (rows, width), jnp.float32)
  narrow, found = wide.astype(jnp.bfloat16), {}
  how = {"interpret": bench.smoke}
  encoder = functools.partial(mxfp4_encode.launch, **how)
  decoder = functools.partial(mxfp4_decode.launch_bfloat16, **how)
  for case, module, function, x in (
    ("encode float32", mxfp4_encode, encoder, wide),
    ("encode bfloat16", mxfp4_encode, encoder, narrow),
    ("decode bfloat16", mxfp4_decode, decoder, mxfp4.encode(narrow)),
  ):
    for blocks, warps in MEMORY[: bench.size(len(MEMORY), 1)]:
      change = {"BLOCKS": blocks, "WARPS": warps}
      found[named(case, change)] = function, (x,), changed(module, **change)
    found[named(case, {})] = function, (x,), contextlib.nullcontext()
  return found


def tables_of(width, count):
  keys = jax.random.split(jax.random.key(1), count)
  made = [gpu_models.random_linear(key, 64, width, True) for key in keys]
  return [
    one_code.Tables(leaf.input_map.matrix, leaf.rounding.gram, leaf.rounding.cross)
    for leaf in made
  ]


def refinements(bench):
  """One code of 2,048 tokens, as q, k, v and o have it and as `down_proj` does."""
  tokens, width = bench.size((2048, 4096), (64, 64))
  keys, wide = jax.random.split(jax.random.key(2), 3), 3 * width
  draw = lambda key, n: jax.random.normal(key, (tokens, n), jnp.bfloat16)
  x, gate, up = (draw(key, n) for key, n in zip(keys, (width, wide, wide), strict=True))
  scalars = MlpRecovery(*[jnp.float32(0.01)] * 3, jnp.float32(1))
  product, tables = fused_inputs.GatedProduct(gate, up, scalars), tables_of(width, 3)
  return (
    ("1 linear, values", x, tables[:1], "values"),
    ("3 linears, values", x, tables, "values"),
    ("3 linears, float8", x, tables, "float8"),
    ("gated product, values", product, tables_of(wide, 1), "values"),
  )


def refinement_candidates(bench):
  """Refinement by tiles."""
  found = {}
  for case, inputs, some, form in refinements(bench):
    usual = one_code.Tile.of(inputs.shape[0], jnp.bfloat16, len(some))
    for change in ({}, *REFINEMENT)[: bench.size(len(REFINEMENT) + 1, 2)]:
      tile = dataclasses.replace(usual, **change)
      how = {"tile": tile, "form": form, "interpret": bench.smoke}
      launch = functools.partial(one_code.launch, **how)
      found[named(case, change)] = launch, (inputs, some), contextlib.nullcontext()
  return found


def product_candidates(bench):
  """Products of one row with packed weights of a layer, by tiles."""
  found = {}
  shapes = bench.size(((12288, 4096), (4096, 12288), (4096, 4096)), ((64, 64),))
  for m, d in shapes:
    weight = gpu_models.random_linear(jax.random.key(3), m, d, True).weight
    x = planes.split(jax.random.normal(jax.random.key(4), (1, d), jnp.bfloat16))
    usual = matmul.Tile.of(1, m, d)
    changes = [{}, *FEW_ROWS]
    changes += [{"splits": n} for n in SPLITS if n != usual.splits]
    for change in changes[: bench.size(len(changes), 1)]:
      tile = dataclasses.replace(usual, **change)
      how = {"dtype": jnp.bfloat16, "tile": tile, "interpret": bench.smoke}
      launch = functools.partial(matmul.launch, **how)
      run = lambda x, w, launch=launch: launch([x], [w])
      case = f"1 row, [{m}, {d}]"
      found[named(case, change)] = run, (x, weight), contextlib.nullcontext()
  return found


def integer_candidates(bench):
  """Products of one row of integers with packed weights of a layer, by tiles."""
  found = {}
  shapes = bench.size(((12288, 4096), (4096, 12288), (4096, 4096)), ((64, 64),))
  for m, d in shapes:
    weight = gpu_models.random_linear(jax.random.key(3), m, d, True).weight
    x = mxfp4.encode(jax.random.normal(jax.random.key(4), (1, d)))
    for change in INTEGERS[: bench.size(len(INTEGERS), 1)]:
      usual = int8_matmul.Tile.of([m], d)
      if "outputs" in change or "blocks" in change:
        tiles = m // change.get("outputs", usual.outputs)
        steps = d // (32 * change.get("blocks", usual.blocks))
        change = {**change, "splits": lowering.shares(tiles, steps, at_once=8)}
      if d // 512 % change.get("splits", 1):
        continue
      tile = dataclasses.replace(usual, **change)
      how = {"dtype": jnp.bfloat16, "tile": tile, "interpret": bench.smoke}
      launch = functools.partial(int8_matmul.launch, **how)
      run = lambda x, w, launch=launch: launch([x], [w])
      case = named(f"1 row, [{m}, {d}]", change)
      found[case] = run, (int8.of_tensor(x), weight), contextlib.nullcontext()
  return found


def mosaic_candidates(bench):
  """What the Mosaic forms do with the same operands."""
  found = {}
  if device.obstacle() or bench.smoke:
    return found

  def add(name, function, *arguments):
    found[f"{name}, Mosaic"] = function, arguments, contextlib.nullcontext()

  def refine(x, tables, form):
    return refinement.launch(fused_inputs.as_array(x), tables, form=form)

  add("encode", encode.encode, jnp.ones((8192, 8192), jnp.bfloat16))
  for case, inputs, some, form in refinements(bench):
    add(case, functools.partial(refine, form=form), inputs, some)
  m, d = 12288, 4096
  weight = gpu_models.random_linear(jax.random.key(3), m, d, True).weight
  unit, _ = mxfp4_decode.float8_range(weight)
  packed, narrow = (
    functools.partial(product, dtype=jnp.bfloat16)
    for product in (products.packed_product, products.float8_product)
  )
  for rows in (64, 256, 2048):
    x = jax.random.normal(jax.random.key(5), (rows, d), jnp.bfloat16)
    values = float8.of_tensor(mxfp4.encode(x)).values
    add(f"{rows} rows, packed product", packed, x, weight)
    add(f"{rows} rows, float8 product", narrow, values, weight, unit)
  return found


SECTIONS = {
  "tiles of encode and decode": memory_candidates,
  "tiles of refinement": refinement_candidates,
  "tiles of products": product_candidates,
  "tiles of integer products": integer_candidates,
  "Mosaic forms": mosaic_candidates,
}


def section(bench, name):
  """Times of a section's candidates, and why others did not run."""
  return timed(bench, SECTIONS[name](bench))
