"""Executes the kernels as they are compiled for a GPU, without one.

  python tests/execute_kernels.py [name part] [architecture]   # or `make kernels`

The checks of `benchmarks/gpu_checks.py`, at a small size and on fresh inputs: every
kernel is compiled for sm_90a, or the architecture that is named, as
`compile_kernels.py` does, and its PTX is executed by `pallas_kernels/ptx_emulator.py`,
which says what that shows and what it cannot: no missing barrier, and no speed.
"""

import concurrent.futures
import contextlib
import functools
import pathlib
import secrets
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tests import compile_kernels

SIZE = 40
"""Of the checks, as of `benchmarks/gpu_checks.py --tiny`."""


def emulated(compile_for_gpu):
  """A stand-in of `lowering.launch` that compiles now and executes when called."""
  import jax
  import numpy as np

  from mxjax.pallas_kernels import lowering
  from tests.pallas_kernels import ptx_emulator

  on_gpu = lowering.launch
  # A thread of its own, begun here: XLA's flush subnormals to zero.
  thread = concurrent.futures.ThreadPoolExecutor(1)
  thread.submit(int).result()

  def launch(kernel, *operands, grid, out_shape, in_place=None, **options):
    options |= {"grid": grid, "out_shape": out_shape, "in_place": in_place}
    run = functools.partial(on_gpu, kernel, **options)
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    [path], _ = compile_for_gpu(run, *jax.tree.map(like, operands))
    ptx, source = path.read_text(), {o: i for i, o in (in_place or {}).items()}
    outputs, form = jax.tree.flatten(out_shape)

    def execute(*leaves):
      arrays = [np.array(leaf) for leaf in leaves]
      for place, like in enumerate(outputs):
        # What is not written shows: bytes of ones are no number of any float type.
        fresh = np.full(like.size * like.dtype.itemsize, 0xFF, np.uint8)
        fresh = fresh.view(like.dtype).reshape(like.shape)
        arrays.append(arrays[source[place]] if place in source else fresh)
      blocks = (*grid, 1, 1)[:3]
      after = thread.submit(ptx_emulator.launch, ptx, blocks, arrays).result()
      return tuple(after[-len(outputs) :])

    found = jax.pure_callback(execute, tuple(outputs), *jax.tree.leaves(operands))
    return jax.tree.unflatten(form, found)

  return launch


@contextlib.contextmanager
def instead_of_a_gpu(launch, of):
  """Kernels are chosen as on a GPU of an architecture, and launched by `launch`."""
  from mxjax.numerics import implementations
  from mxjax.pallas_kernels import lowering
  from mxjax.pallas_kernels.mosaic import device

  target = implementations.Target("gpu", of.kind, of.capability, of.multiprocessors)
  changes = (
    (lowering, "launch", launch),
    (implementations, "target", lambda: target),
    (device, "obstacle", lambda: "the emulator knows no TMA"),
  )
  before = [getattr(place, name) for place, name, _ in changes]
  for place, name, value in changes:
    setattr(place, name, value)
  try:
    yield
  finally:
    for (place, name, _), value in zip(changes, before, strict=True):
      setattr(place, name, value)


def decodes_by_blocks(compile_for_gpu, seed):
  """Whether Mosaic's decoding of a step's weights gives each register its columns.

  The kernels around it copy by TMA, which the emulator does not know: this one reads
  the codes and scales from memory, and writes what it decodes. Alone in a kernel, the
  decoding has the layouts that it has in `mosaic/stream_k.py`.
  """
  import jax
  import jax.numpy as jnp
  import numpy as np

  from mxjax.pallas_kernels.mosaic import device, weights
  from mxjax.pallas_kernels.products import float8
  from tests.pallas_kernels import ptx_emulator
  from tests.pallas_kernels.operands import packed

  def mxjax_by_blocks(words, scales, out):
    words = device.load(words, device.gpu.Layout.WGMMA_8BIT)
    scales = device.load(scales, device.words_layout())
    out[...] = weights.by_blocks(words, scales, jnp.int32(127), interpret=False)

  array = jax.ShapeDtypeStruct
  shape = 64, weights.COLUMNS
  run = device.gpu.kernel(
    mxjax_by_blocks,
    out_type=array(shape, float8.FORM),
    grid=(1,),
    grid_names=("program",),
  )
  tensor = packed(*shape, -9, 9, seed=seed)
  codes, scales = np.asarray(tensor.codes).view(np.int32), np.asarray(tensor.scales)
  [path], _ = compile_for_gpu(run, *(array(a.shape, a.dtype) for a in (codes, scales)))
  out = np.full(shape, 0xFF, np.uint8)
  arrays = [codes.copy(), scales.copy(), out]
  got = ptx_emulator.launch(path.read_text(), (1, 1, 1), arrays)[-1]
  interpreted = weights.by_blocks(
    jnp.asarray(codes), jnp.asarray(scales), jnp.int32(127), interpret=True
  )
  return np.array_equal(got, np.asarray(interpreted).view(np.uint8))


def main():
  """Runs the checks whose name contains the first argument, or all.

  For the architecture that the second names, or Hopper.
  """
  if why_not := compile_kernels.obstacle():
    print(f"skipped, no kernel was executed: {why_not}")
    return compile_kernels.SKIPPED
  with tempfile.TemporaryDirectory() as folder:
    compile_kernels.prepare()
    import gpu_checks
    import jax

    # The compilers of CPU and GPU crash where one runs beside the other's programs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    selected = sys.argv[1] if len(sys.argv) > 1 else ""
    # The emulator knows no TMA and no barriers in memory.
    del gpu_checks.CHECKS["Mosaic forms"]
    gpu_checks.CHECKS = {n: c for n, c in gpu_checks.CHECKS.items() if selected in n}
    seed = secrets.randbits(32)
    by_name = {each.name: each for each in compile_kernels.ARCHITECTURES}
    of = by_name[sys.argv[2]] if len(sys.argv) > 2 else compile_kernels.HOPPER
    print(f"jax {jax.__version__}, {of.name}, seed {seed}")
    compile_for_gpu = compile_kernels.compiler(pathlib.Path(folder), of)
    launch = emulated(compile_for_gpu)
    # One after the other: the compiler's folder is one.
    with (
      instead_of_a_gpu(launch, of),
      concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
      results = gpu_checks.run("pallas", seed, SIZE, pool)
    if of is compile_kernels.HOPPER and selected in (name := "Mosaic by blocks"):
      is_equal = decodes_by_blocks(compile_for_gpu, seed)
      results[name] = {"passed": is_equal}
      print(f"{'ok  ' if is_equal else 'FAIL'} {name}: {{'passed': {is_equal}}}")
  failed = [name for name, result in results.items() if not result["passed"]]
  print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
