"""What a worker executes is rebuilt from the artifact of one unit, and nothing else."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox import artifact, frames, jail, supervisor, tracing
from mxjax.discovery.sandbox.rebuilding import lapack
from tests import refusals
from tests.cases import slow

SPEC = {
  "name": "hook",
  "arguments": [["x", ["float32", [8]]], ["y", ["float32", [8]]]],
  "outputs": [["float32", [8]]],
  "batched": ["x"],
  "sizes": [{}],
}
HEADER = "import functools\nimport jax\nimport jax.numpy as jnp\n"
BODIES = [
  "jnp.sort(x) + jnp.argsort(x)",
  "jnp.sort(jnp.stack([x, y]), axis=0)[0] + jax.lax.sort((x, y), num_keys=2)[1]",
  "jnp.cumsum(x) + jax.lax.cummax(x) + jnp.cumprod(x)",
  "jnp.linalg.solve(jnp.outer(x, y) + 9 * jnp.eye(8), x)",
  "jnp.linalg.qr(jnp.outer(x, y) + jnp.eye(8))[1][0]",
  "jnp.linalg.svd(jnp.outer(x, y)[:5])[2][0] * 0 + jnp.linalg.norm(jnp.outer(x, y), 2)",
  "jnp.linalg.eigh(jnp.outer(x, x) + jnp.eye(8) * y[:2, None, None])[0][1]",
  "jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(8))[3]",
  "x + jax.random.normal(jax.random.key(3), (8,)) * y",
  "jax.lax.top_k(x, 8)[0] + jax.lax.top_k(x, 8)[1]",
  "jax.lax.while_loop(lambda z: jnp.abs(z).sum() > 1, lambda z: z / 2 + y / 99, x)",
  "jax.lax.fori_loop(0, 5, lambda i, z: z.at[i].add(z[i - 1]), x)",
  "jax.lax.scan(lambda c, a: (c + a, c * a), x[0], y)[1] + x",
  "jax.lax.cond(x[0] > 0, lambda: x, lambda: jnp.sin(y))",
  "jax.lax.switch((3 * x[0]).astype(int), [lambda: x, lambda: 2 * x, lambda: y])",
  "jnp.fft.irfft(jnp.fft.rfft(x) * (y[0] + 1)).astype(x.dtype)",
  "jax.scipy.special.erf(x) + jax.scipy.special.erfinv(x / 9) + jax.nn.gelu(y)",
  "jnp.tan(x) + jnp.arctan2(x, y) + jnp.sinh(x) + jnp.round(y) + jnp.arccos(x / 9)",
  "x + jnp.max(x) + jnp.prod(y) + jnp.argmax(x) + jnp.median(x) + jnp.any(y > 1)",
  "jnp.searchsorted(jnp.sort(y), x) + jnp.digitize(x, jnp.arange(4.))",
  "x.at[jnp.argsort(x)].set(y) + y.at[::2].max(x[:4]) + x.at[2:4].multiply(3)",
  "x[jnp.argsort(y)][::-1] + jnp.take(x, jnp.array([0, 9, -1, 3, 4, 5, 6, 7]))",
  "jax.lax.dynamic_update_slice(x, y[:2], ((5 * x[0]).astype(int),))",
  "jax.lax.dynamic_slice(x, ((5 * y[0]).astype(int),), (1,)) + x",
  "jax.lax.reduce_precision(x, 5, 3) + x.astype(jnp.bfloat16).astype(x.dtype)",
  "jax.lax.reduce_window(x, 0., jax.lax.add, (3,), (1,), 'SAME') + jnp.pad(y, 2)[:8]",
  "jnp.einsum('i,ij->j', x, jnp.outer(y, x)) + jnp.dot(x, y, precision='highest')",
  "jax.lax.bitcast_convert_type(x.view(jnp.int32) & ~7, x.dtype)",
  "x + jax.lax.population_count(jnp.uint8(7)) + (jnp.arange(8) << 2 >> 1) ** 2 % 5",
  "x.astype(jnp.float64).sum().astype(x.dtype) + jnp.float32(jnp.int64(2) ** 40) * y",
]
LONG = (
  "jnp.linalg.svd(x + y * jnp.arange(16.).reshape(2, 8, 1), False)[1][0]",
  "jnp.linalg.qr(x + y * jnp.arange(16.).reshape(2, 8, 1))[0][1, 3]",
  "jnp.linalg.inv(x + y * jnp.arange(16.).reshape(2, 8, 1) + 9 * jnp.eye(8))[1, 3]",
  "jnp.linalg.eigvalsh(jnp.outer(x, x) + jnp.diag(y))",
  "jax.scipy.linalg.expm(jnp.outer(x, y) / 9)[0]",
  "jax.vmap(lambda a: jnp.linalg.inv(a * jnp.eye(3) + 1).sum())(x + 9)",
)
"""Further decompositions, which take longer to compile than all others."""


def traced(code, spec=SPEC):
  (hook,) = tracing.trace(HEADER + code, [spec])
  return frames.pack(hook.units)


def both_forms(data):
  """Both forms of an artifact, under the identity that they would have."""
  table, computation = artifact.ArtifactTable({"hook": SPEC}), artifact.gate(SPEC, data)
  table.add(computation, "hook", data)
  return jax.jit(table.unit(computation)), jax.jit(table.batched(computation))


def rows(seed, count=5):
  drawn = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
  return drawn, np.linspace(-1, 2, 8, dtype=np.float32)


@pytest.mark.parametrize("body", [*BODIES[::2], *slow(*BODIES[1::2], *LONG)])
def test_the_rebuilt_forms_are_the_hook(body):
  code = f"def hook(x, y):\n  return ({body}).astype(x.dtype)\n"
  namespace = {}
  exec(HEADER + code, namespace)  # noqa: S102
  unit, batched = both_forms(traced(code))
  x, y = rows(0)
  with tracing.tracing_scope():
    wanted = np.stack([jax.jit(namespace["hook"])(row, y) for row in x])
  np.testing.assert_array_equal(np.stack([unit(row, y)[0] for row in x]), wanted)
  np.testing.assert_allclose(batched(x, y)[0], wanted, rtol=2e-4, atol=2e-4)


BY_ZERO = {
  "a quotient": "jax.lax.div(jnp.int32(7), jnp.int32(0))",
  "a remainder": "jax.lax.rem(jnp.int32(7), jnp.int32(0))",
  "what folds to zero": "jax.lax.div(jnp.int32(3), jnp.int32(2) - jnp.int32(2))",
  "no sign": "jax.lax.div(jnp.uint8(3), jnp.uint8(0))",
  "in a loop": "jax.lax.fori_loop(0, 3, lambda i, z: z + jax.lax.div(i, 0 * i), 1)",
  "an array": "jax.lax.div(jnp.arange(8) - 3, jnp.arange(8) * 0)",
  "floor": "jnp.int32(5) // jnp.int32(0)",
}


@pytest.mark.slow
def test_a_division_of_integers_by_zero_ends_no_process():
  """In a process of its own: a signal would end this one."""
  script = f"""
import numpy as np
from tests.discovery.sandbox import test_rebuilding as t
for name, body in {BY_ZERO!r}.items():
  code = f"def hook(x, y):\\n  return x + ({{body}}).astype(x.dtype)\\n"
  unit, batched = t.both_forms(t.traced(code))
  x, y = t.rows(0)
  one = np.stack([unit(row, y)[0] for row in x])
  np.testing.assert_array_equal(batched(x, y)[0], one)
  print(name, np.round(one[0] - x[0]))
"""
  ended = subprocess.run(
    [sys.executable, "-c", script], capture_output=True, text=True, check=False
  )
  assert ended.returncode == 0, ended.stderr[-2000:]
  shown = dict(line.split(" [") for line in ended.stdout.splitlines())
  assert [*shown] == [*BY_ZERO]
  assert float(shown["a quotient"].split()[0]) == -1.0
  assert float(shown["a remainder"].split()[0]) == 7.0
  assert float(shown["no sign"].split()[0].rstrip(".")) == 255.0


def test_a_refusal_that_jax_does_not_explain_says_what_to_do():
  def halved(x, y):
    summed = lambda z: jnp.abs(z).sum() > 1
    loop = lambda: jax.lax.while_loop(summed, lambda z: z / 2 + y / 99, y)
    return jax.lax.cond(x[0] > 0, loop, lambda: x)

  row = jax.ShapeDtypeStruct((8,), jnp.float32)
  data = jax.export.export(jax.jit(halved), platforms=("cpu",))(row, row).serialize()
  with pytest.raises(RefusedError, match="cannot be batched: JAX has .* jnp.where"):
    artifact._gated(data, SPEC, {})
  # The same, with the choice after both branches.
  both = jax.jit(lambda x, y: jnp.where(x[0] > 0, halved(abs(y), y), x))
  data = jax.export.export(both, platforms=("cpu",))(row, row).serialize()
  assert artifact._gated(data, SPEC, {})


LEAKS = {
  "custom_vmap": """
@jax.custom_batching.custom_vmap
def seen(x):
  return x
@seen.def_vmap
def _(size, is_batched, x):
  return jnp.roll(x, 1, 0), True
def hook(x, y):
  return seen(x)
""",
  "update_wrapper": """
def hook(x, y):
  return x
real = jax.vmap
def mixing(f, *a, **k):
  return functools.update_wrapper(lambda x, *r: (x.mean(0, keepdims=True) + 0 * x,), f)
functools.update_wrapper(jax.vmap, mixing)
jax.vmap = mixing
""",
  "primitive": """
from jax.interpreters import batching
batching.primitive_batchers[jax.lax.sin_p] = (
  lambda a, d: (jnp.roll(jax.lax.sin(a[0]), 1, 0), 0))
def hook(x, y):
  return jnp.sin(x)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_41_rows_never_see_their_neighbours(name):
  """In a process of its own: two of the attacks change JAX for everybody."""
  code = LEAKS[name]
  if name == "custom_vmap":
    data = traced(code)
  elif jail.landlock_version() < 1:
    pytest.skip("no Landlock")
  else:
    tracer = supervisor.Tracer("standard")
    try:
      data = tracer.trace(HEADER + code, [SPEC]).hooks["hook"]
    finally:
      tracer.close()
  unit, batched = both_forms(data)
  x, y = rows(1, 48)
  np.testing.assert_array_equal(batched(x, y)[0], np.stack([unit(r, y)[0] for r in x]))
  for kept in (0, 17, 47):
    others = rows(2, 48)[0]
    others[kept] = x[kept]
    assert np.array_equal(batched(others, y)[0][kept], batched(x, y)[0][kept])


def test_the_batch_may_have_any_size():
  _, batched = both_forms(traced("def hook(x, y):\n  return jnp.sort(x) + y\n"))
  for count in (1, 2, 7):
    assert batched(*rows(0, count))[0].shape == (count, 8)


def test_hooks_that_read_other_arguments_are_other_computations():
  codes = [f"def hook(x, y):\n  return jnp.tanh({name})\n" for name in "xy"]
  first, second = (artifact.gate(SPEC, traced(code)) for code in codes)
  assert first != second


def test_every_constant_is_part_of_the_identity():
  codes = [
    f"C = jnp.arange(2000.).at[1000].set({value})\n"
    "import numpy as np\nC = np.array(C, np.float32)\n"
    "def hook(x, y):\n  return x + (C * x[0]).sum()\n"
    for value in (5, 6)
  ]
  first, second = (artifact.gate(SPEC, traced(code)) for code in codes)
  assert first != second


def forged(body, functions="", **changes):
  """An artifact whose module was written by hand."""
  text = f"""module @jit_hook attributes {{mhlo.num_partitions = 1 : i32}} {{
  func.func public @main(%x: tensor<8xf32>, %y: tensor<8xf32>) -> tensor<8xf32> {{
    {body}
  }}
  {functions}
}}"""
  (unit,) = frames.unpack(traced("def hook(x, y):\n  return x + y\n"))
  honest = artifact.load(unit, "hook")
  with mlir.make_ir_context() as context:
    context.allow_unregistered_dialects = True
    module = ir.Module.parse(text)
    data = stablehlo.serialize_portable_artifact(
      module, stablehlo.get_current_version()
    )
  made = dataclasses.replace(honest, mlir_module_serialized=bytes(data), **changes)
  return frames.pack([bytes(made.serialize())])


def test_a_module_written_by_hand_passes_if_it_is_in_order():
  data = forged(
    "%0 = stablehlo.multiply %x, %y : tensor<8xf32>\n return %0 : tensor<8xf32>"
  )
  unit, _ = both_forms(data)
  x, y = rows(0)
  np.testing.assert_array_equal(unit(x[0], y)[0], x[0] * y)


END = "return %0 : tensor<8xf32>"
GROUPS = "replica_groups = dense<0> : tensor<1x1xi64>"
CALL = "stablehlo.custom_call @{} ({}) {} : ({}) -> {}"
SOLVE = (
  "%a = stablehlo.constant dense<1.0> : tensor<{a}xf32>\n"
  "%b = stablehlo.constant dense<1.0> : tensor<{b}xf32>\n"
  "%c = stablehlo.custom_call @lapack_strsm_ffi(%a, %b) {{mhlo.backend_config = "
  "{{diag = 78 : ui8, side = {side} : ui8, trans_x = 78 : ui8, uplo = 85 : ui8}}}} : "
  "(tensor<{a}xf32>, tensor<{b}xf32>) -> tensor<{c}xf32>\n return %x : tensor<8xf32>"
)
EVIL = ['"lapack_sgeqrf_ffi-x"', "Qr$evil", "Qr", '"x-y"', "xla_python_cpu_callback"]
EVIL += ['"lapack_spotrf_ffi "', "LAPACK_SPOTRF_FFI", "lapack_cpotrf_ffi", '"\\00"']
REFUSED = {
  "all_to_all": '%0 = "stablehlo.all_to_all"(%x) <{split_dimension = 0 : i64, '
  "concat_dimension = 0 : i64, split_count = 1 : i64, "
  f"{GROUPS}}}> : (tensor<8xf32>) -> tensor<8xf32>\n{END}",
  "collective_permute": '%0 = "stablehlo.collective_permute"(%x) <{'
  "source_target_pairs = dense<0> : tensor<1x2xi64>}> : (tensor<8xf32>) -> "
  f"tensor<8xf32>\n{END}",
  "collective_broadcast": '%0 = "stablehlo.collective_broadcast"(%x) <{'
  f"{GROUPS}}}> : (tensor<8xf32>) -> tensor<8xf32>\n{END}",
  "all_gather": '%0 = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, '
  f"{GROUPS}}}> : (tensor<8xf32>) -> tensor<8xf32>\n{END}",
  "all_reduce": '%0 = "stablehlo.all_reduce"(%x) <{' + GROUPS + "}> ({\n^b(%p: "
  "tensor<f32>, %q: tensor<f32>):\n stablehlo.return %p : tensor<f32>\n}) : "
  f"(tensor<8xf32>) -> tensor<8xf32>\n{END}",
  "partition_id": "%1 = stablehlo.partition_id : tensor<ui32>\n%0 = stablehlo.negate "
  f"%x : tensor<8xf32>\n{END}",
  "replica_id": "%1 = stablehlo.replica_id : tensor<ui32>\n%0 = stablehlo.negate %x : "
  f"tensor<8xf32>\n{END}",
  "complex": "%c = stablehlo.constant dense<[(1.0, 2.0), (3.0, 4.0)]> : "
  "tensor<2xcomplex<f32>>\n%0 = stablehlo.negate %x : tensor<8xf32>\n" + END,
  "sort by another order": '%0 = "stablehlo.sort"(%x) <{dimension = 0 : i64}> ({\n'
  "^b(%p: tensor<f32>, %q: tensor<f32>):\n %c = stablehlo.compare GT, %p, %q : "
  "(tensor<f32>, tensor<f32>) -> tensor<i1>\n stablehlo.return %c : tensor<i1>\n}) : "
  f"(tensor<8xf32>) -> tensor<8xf32>\n{END}",
  "unknown function": "%0 = call @main(%x, %y) : (tensor<8xf32>, tensor<8xf32>) -> "
  f"tensor<8xf32>\n{END}",
  "1 x 1 in an 8 x 8 solve": SOLVE.format(a="1x1", b="8x8", c="8x8", side=76),
  "8 x 8 in a 1 x 1 solve": SOLVE.format(a="8x8", b="1x1", c="1x1", side=76),
  "solve from the other side": SOLVE.format(a="3x3", b="3x4", c="3x4", side=82),
  "solve with a larger result": SOLVE.format(a="3x3", b="3x4", c="3x9", side=76),
  "solve of vectors": SOLVE.format(a="3x3", b="3", c="3", side=76),
  "solve of batches of other sizes": SOLVE.format(
    a="2x3x3", b="4x3x4", c="4x3x4", side=76
  ),
  "solve from nowhere": SOLVE.format(a="3x3", b="3x4", c="3x4", side=77),
  **{
    f"call {name}": f"%0 = stablehlo.custom_call @{name}(%x) {{api_version = 2 : i32}}"
    f" : (tensor<8xf32>) -> tensor<8xf32>\n{END}"
    for name in EVIL
  },
}


def test_what_is_in_no_table_is_refused():
  def gate(body):
    try:
      artifact.gate(SPEC, forged(body))
    except RefusedError as error:
      assert "damaged" not in str(error), "the module above is not well-formed"
      raise

  calls = ("hook: ", "custom call", "is not allowed")
  refusals.check(
    [
      (
        functools.partial(gate, body),
        *(calls if name.startswith("call") else ("hook: ",)),
      )
      for name, body in REFUSED.items()
    ],
    RefusedError,
  )


def test_a_call_that_fits_is_made():
  fits = SOLVE.format(a="2x3x3", b="2x3x4", c="2x3x4", side=76)
  assert len(artifact.gate(SPEC, forged(fits))) == 64


def lapack_check(routine, change=None):
  """Checks a call of a routine, with one of its operands or results not as it is."""
  sizes = {"m": 6, "n": 4, "k": 4, "s": 6, "u": 6, "v": 4}
  sides = [
    [[sizes[a] for a in axes.lower()] for axes in side.split(",")]
    for side in lapack.SHAPES[routine].split("->")
  ]
  integers = {len(sides[1]) - 1} if routine not in ("geqrf", "orgqr", "trsm") else set()
  integers |= {1} if routine == "getrf" else set()
  array = lambda shape, dtype="float32": jax.ShapeDtypeStruct(tuple(shape), dtype)
  operands = [array(shape) for shape in sides[0]]
  results = [
    array(shape, "int32" if i in integers else "float32")
    for i, shape in enumerate(sides[1])
  ]
  side, place = (operands, 0) if change == "operand" else (results, len(results) - 1)
  old = side[place]
  larger = [n + 1 for n in old.shape[-1:] or [1]]
  if change == "operand":
    side[place] = array([*old.shape[:-1], old.shape[-1] + 1])
  elif change == "result":
    side[place] = array([*old.shape[:-1], *larger])
  elif change == "rank":
    side[place] = array([1, *old.shape], old.dtype)
  elif change == "dtype":
    side[place] = array(old.shape, "float64")
  options = {
    name: letters[0] for name, letters in lapack.OPTIONS.get(routine, {}).items()
  }
  lapack._check("call", routine, options, operands, results, jnp.dtype("float32"))


def test_lapack_calls_have_one_shape():
  for routine in lapack.SHAPES:
    lapack_check(routine)
  refusals.check(
    [
      (functools.partial(lapack_check, routine, change), "expected")
      for routine in lapack.SHAPES
      for change in ("operand", "result", "rank", "dtype")
    ],
    RefusedError,
  )


def test_calls_that_multiply_are_counted_before_anything_is_built():
  double = "func.func private @f{n}(%x: tensor<8xf32>) -> tensor<8xf32> {{\n"
  double += "%0 = call @f{m}(%x) : (tensor<8xf32>) -> tensor<8xf32>\n"
  double += "%1 = call @f{m}(%0) : (tensor<8xf32>) -> tensor<8xf32>\n"
  double += "return %1 : tensor<8xf32>\n}}\n"
  functions = "".join(double.format(n=n, m=n + 1) for n in range(12))
  functions += "func.func private @f12(%x: tensor<8xf32>) -> tensor<8xf32> {\n"
  functions += "return %x : tensor<8xf32>\n}\n"
  call = f"%0 = call @f0(%x) : (tensor<8xf32>) -> tensor<8xf32>\n{END}"
  with pytest.raises(RefusedError, match="operations, at most"):
    artifact.gate(SPEC, forged(call, functions))


def test_a_forged_list_of_arguments_is_refused():
  body = f"%0 = stablehlo.negate %x : tensor<8xf32>\n{END}"
  refusals.check(
    [
      (
        functools.partial(artifact.gate, SPEC, forged(body, module_kept_var_idx=read)),
        "hook: ",
      )
      for read in ((0,), (0, 1, 1), (1, 7))
    ],
    RefusedError,
  )
