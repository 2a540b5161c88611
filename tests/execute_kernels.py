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
    launch = emulated(compile_kernels.compiler(pathlib.Path(folder), of))
    # One after the other: the compiler's folder is one.
    with (
      instead_of_a_gpu(launch, of),
      concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
      results = gpu_checks.run("pallas", seed, SIZE, pool)
  failed = [name for name, result in results.items() if not result["passed"]]
  print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
