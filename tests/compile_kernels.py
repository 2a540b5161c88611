"""Compiles every kernel for four kinds of GPU without one; part of `make check`.

  python tests/compile_kernels.py [name part] [architecture ...]

XLA's GPU compiler runs on any machine if it is told what device to compile for. What
is shown is what `ptxas` says of the code that would run: registers, spills, and which
matrix instructions are used. Code that does not compile is a failure, and TF32 where
float32 was meant. So are, for an H200 (sm_90a), for which the kernels were tuned, a
spill, products that `ptxas` makes wait for each other, and faults of whole functions;
see `hot_functions.py`. A kernel that a device does not take is named, with the reason.

Needs the CUDA plugin of the installed jax (two wheels, no CUDA libraries) and `ptxas`
with `libdevice` from a CUDA toolkit. Without them it says so and ends with code 77.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The folder of this script holds one named mxjax too.
sys.path[0] = str(ROOT)

SKIPPED = 77


@dataclasses.dataclass(frozen=True)
class Architecture:
  """A GPU to compile for: what `ptxas` calls it, and what XLA is told of it.

  Memory is shared memory in KiB: of a multiprocessor, and of a program at most.
  """

  name: str
  kind: str
  capability: tuple[int, int]
  multiprocessors: int
  shared: tuple[int, int]
  threads: int = 2048

  @property
  def target(self):
    """XLA's description of the device."""
    major, minor = self.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared[0] * 1024}
  threads_per_core_limit: {self.threads} core_count: {self.multiprocessors}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: {self.shared[1] * 1024}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


HOPPER = Architecture("sm_90a", "NVIDIA H200", (9, 0), 132, (228, 227))
ARCHITECTURES = (
  Architecture("sm_80", "NVIDIA A100", (8, 0), 108, (164, 163)),
  Architecture("sm_89", "NVIDIA L4", (8, 9), 58, (100, 99), threads=1536),
  HOPPER,
  Architecture("sm_120", "NVIDIA RTX PRO 6000", (12, 0), 188, (100, 99), threads=1536),
)
FLOAT8 = "__cublas$lt$matmul$f8"
"""The library's product of float8, which XLA must find in what we write."""
REGISTERS = 168
"""Of a thread, at most, where three programs of four warps run at once."""
WAITS = {"one code, split": 2, "two codes, split": 3, "nearest, split": 1}
"""For products of a tile, by form of Triton's refinement and for each linear."""
EXPONENTIALS = {"split": 16, "1 row": 1}
"""Of a thread, by form: one for each of its values of a gated product."""
MATRIX = (r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k\d+)\.f32\.(\w+)", r"mma\.sync")


def toolkit():
  """The folder of a CUDA toolkit with ptxas and libdevice, or None."""
  folders = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
  on_path = shutil.which("nvcc") or shutil.which("ptxas")
  folders.append(
    str(pathlib.Path(on_path).resolve().parent.parent) if on_path else None
  )
  for folder in filter(None, folders):
    home = pathlib.Path(folder)
    has_library = (home / "nvvm" / "libdevice" / "libdevice.10.bc").is_file()
    if has_library and (home / "bin" / "ptxas").is_file():
      return home
  return None


def obstacle():
  """Why nothing can be compiled here, or None."""
  version = importlib.metadata.version("jax")
  found = {}
  for cuda in ("cuda13", "cuda12"):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[cuda] = importlib.metadata.version(f"jax-{cuda}-plugin")
  if version not in found.values():
    return (
      f"jax {version} needs its own CUDA plugin and found {found or 'none'}; `make "
      f"kernels`, or pip install --no-deps jax-cuda13-plugin=={version} "
      f"jax-cuda13-pjrt=={version}"
    )
  if toolkit() is None:
    return "no CUDA toolkit with ptxas and libdevice in CUDA_HOME or /usr/local/cuda"
  return None


def prepare():
  """Sets what XLA reads from the environment; before jax is imported."""
  os.environ |= {
    "JAX_PLATFORMS": "cpu",
    # Else every trace that a compiler keeps is looked up in its library, for seconds.
    "LLVM_DISABLE_SYMBOLIZATION": "1",
    "PATH": f"{toolkit() / 'bin'}{os.pathsep}{os.environ['PATH']}",
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={toolkit()} --xla_gpu_autotune_level=0 "
    # Without a GPU nothing can be timed, and the library's product is what is meant.
    "--xla_gpu_enable_triton_gemm=false",
  }


def assemble(ptx, folder, architecture=HOPPER):
  """Registers, spilled bytes and matrix instructions of one PTX file."""
  cubin = folder / "kernel.cubin"
  command = [toolkit() / "bin" / "ptxas", f"-arch={architecture.name}", "-v"]
  done = subprocess.run(
    [*map(str, command), "-o", str(cubin), str(ptx)],
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    return {"error": done.stderr.strip()}
  text = ptx.read_text()
  numbers = lambda pattern: [int(n) for n in re.findall(pattern, done.stderr)]
  wgmma = sorted({".".join(m) for m in re.findall(MATRIX[0], text)})
  return {
    "registers": max(numbers(r"Used (\d+) registers")),
    "spills": sum(numbers(r"(\d+) bytes spill")),
    "wgmma": wgmma,
    "serialized": "wgmma.mma_async instructions are serialized" in done.stderr,
    "mma.sync": len(re.findall(MATRIX[1], text)),
    "entry": re.findall(r"\.entry\s+mxjax_(\w+)", text)[0],
    "tf32": "tf32" in text,
    "fma": text.count("fma.rn.f32"),
  }


def entries(dump):
  """Dumped PTX files that hold a Pallas kernel (not XLA's own helpers)."""
  return [
    path
    for path in sorted(dump.rglob("*.ptx"))
    if re.search(r"\.entry\s+mxjax_", path.read_text())
  ]


@functools.cache
def target(architecture=HOPPER):
  """A mesh of the GPU that is not there, and what places abstract arrays on it."""
  import jax
  from jax.experimental import topologies

  from mxjax.numerics import implementations

  topology = topologies.get_topology_desc(
    platform="cuda", target_config=architecture.target, topology="1x1x1"
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  implementations.describe(mesh.devices.flat[0])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return mesh, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def compiler(dump, architecture=HOPPER):
  """A function that compiles for a GPU: our kernels' PTX files, and the program."""
  import jax

  mesh, place = target(architecture)
  # Mosaic GPU writes what it compiles to a folder of its own choice.
  os.environ |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTX": "1"}

  def run(function, *arguments):
    for path in filter(pathlib.Path.is_file, dump.rglob("*")):
      path.unlink()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      traced = jax.jit(function).lower(*jax.tree.map(place, arguments))
      # Not for all compilers of the process: the CPU's crashes when it dumps so.
      dumping = {"xla_dump_to": str(dump), "xla_dump_emitter_re": ".*"}
      program = traced.compile(compiler_options=dumping).as_text()
    return entries(dump), program

  return run


def compile_all(selected, dump, architecture=HOPPER):
  """Compiles and prints; returns the names of those at fault."""
  # JAX must not be loaded before `prepare`.
  from tests import kernel_cases

  chosen = {n: case for n, case in kernel_cases.cases().items() if selected in n}
  if not chosen:
    print("nothing to compile with this jax")
  run, faults = compiler(dump, architecture), []
  for name, (function, *arguments) in chosen.items():
    if why_not := kernel_cases.not_taken(name, architecture.capability):
      print(f"none {name:54s} {why_not}")
      continue
    start = time.perf_counter()
    try:
      found, program = run(function, *arguments)
    except Exception as error:  # The compiler's errors have no type of their own.
      found, program, results = [], "", [{"error": str(error).strip()[:500]}]
    else:
      results = [assemble(path, dump, architecture) for path in found]
    seconds = time.perf_counter() - start
    wrong = ["error", "tf32"]
    if architecture is HOPPER:
      wrong += ["spills", "serialized"]
      if name.startswith("float8 product") and FLOAT8 not in program:
        results.append({"error": f"{FLOAT8} is not in the program"})
      results += [{"error": fault} for fault in slow(name, results, found)]
    for result in results or [{"error": "no PTX of ours was dumped"}]:
      shown = f"{name}: {result.get('entry')}" if len(results) > 1 else name
      bad = any(result.get(fault) for fault in wrong)
      print(
        f"{'FAIL' if bad else 'ok  '} {shown:54s} {describe(result)} {seconds:.1f} s",
        flush=True,
      )
      faults += [f"{name} ({architecture.name})"] if bad else []
  return faults


def slow(name, results, found):
  """What makes a refinement slow without a spill."""
  if "3 linears" in name or "2 linears" in name:
    # With few rows one program has a multiprocessor.
    if "split" in name and " rows" not in name:
      if max(r.get("registers", 0) for r in results) > REGISTERS:
        yield f"more than {REGISTERS} registers"
  linears = re.search(r"(\d) linears", name)
  waits = sum(path.read_text().count("wgmma.wait_group") for path in found)
  for form, of_a_tile in WAITS.items():
    wanted = of_a_tile * int(linears[1] if linears else 1)
    if form in name and waits != wanted:
      yield f"waits for products {waits} times instead of {wanted}"
  if "of a gated product" in name:
    once = next(count for form, count in EXPONENTIALS.items() if form in name)
    if max(path.read_text().count("ex2.approx") for path in found) > once:
      yield "SiLU is computed more than once"


def describe(result):
  """One line of text."""
  if "error" in result:
    return result["error"]
  words = [f"{result['registers']:3d} registers, {result['spills']} B spilled"]
  words += result["wgmma"]
  words += [f"{result['mma.sync']} mma.sync"] if result["mma.sync"] else []
  words += [f"{result['fma']} fma"] if result["fma"] else []
  words += ["TF32"] if result["tf32"] else []
  words += ["serialized"] if result["serialized"] else []
  return ", ".join(words)


def main():
  """Compiles the kernels whose name contains the first argument, or all.

  For the architectures that the others name, or all.
  """
  why_not = obstacle()
  if why_not:
    print(f"skipped, no kernel was compiled: {why_not}")
    return SKIPPED
  with tempfile.TemporaryDirectory() as folder:
    prepare()
    import jax

    from tests import hot_functions

    selected = sys.argv[1] if len(sys.argv) > 1 else ""
    faults = []
    for architecture in ARCHITECTURES:
      if architecture.name in (sys.argv[2:] or [a.name for a in ARCHITECTURES]):
        print(f"jax {jax.__version__}, {architecture.name}")
        faults += compile_all(selected, pathlib.Path(folder), architecture)
    if HOPPER.name in (sys.argv[2:] or [HOPPER.name]):
      faults += [name for name, _, wrong in hot_functions.check(selected) if wrong]
  print(f"at fault: {', '.join(faults)}" if faults else "no spills, waits or copies")
  return 1 if faults else 0


if __name__ == "__main__":
  sys.exit(main())
