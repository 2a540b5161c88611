"""Strict JAX modes, kept programs, the order of files, minutes told, golden vectors."""

import gc
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import threading
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Two workers on two cores: the threads of OpenBLAS would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from mxjax.cli.main import main
from mxjax.numerics import precision
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
TESTS = pathlib.Path(__file__).parent
GOLDEN = TESTS / "golden"
VECTORS_SHA256 = "cbc62b5727d2e9fca4b696f6213a0a4028f0a746c7f92cac4f768b88ae534556"


LONGEST_FIRST = (
  "ptq/test_programs.py",
  "devices/test_mesh.py",
  "run/test_toy_network.py",
  "methods/test_baselines.py",
  "methods/test_scale_distillation.py",
  "sandbox/test_sandbox.py",
  "loading/test_trained.py",
  "calibration/test_flax_model.py",
  "ptq/test_ptq.py",
  "tables/test_reproduction.py",
  "run/test_quantize.py",
  "examples/test_examples.py",
  "cli/test_distributed.py",
  "cli/test_cli.py",
  "layers/test_quantized_linear.py",
  "families/test_families.py",
  "search/test_search.py",
  "search/test_runs.py",
)
"""Files that a run starts with, so that no worker ends with a long one alone."""

CLEARING = (
  "models/test_generation.py",
  "run/test_compiling.py",
  "run/test_weight_only.py",
  "tests/test_running.py",
)
"""Files that drop every compiled program of their process, and so come last."""


OPTIMIZED = (
  "/mxjax/devices/",
  "layers/test_cpu_products.py",
  "/numerics/native/",
  "numerics/test_mxfp4.py",
  "realization/test_one_code.py",
  "loading/test_gguf.py",
  "run/test_chunks.py",
  "run/test_toy_network.py",
)
"""Tests whose programs are compiled as users compile them.

They hold results to exact bits, to those of another shape or device, or all of HiRes to
an oracle, where the instructions that the compiler chooses may matter. All others,
whose margins are wider or whose two sides are compiled alike, do with few of LLVM's
passes, in three fifths of the time: most of a run is compiling.
"""


def matches(item, parts):
  return any(part in item.nodeid for part in parts)


USERS = {
  "xla_cpu_use_fusion_emitters": True,
  "xla_cpu_parallel_codegen_split_count": 32,
}
"""XLA's defaults of two flags without which small programs compile faster.

One splits a program for several threads, which costs more than a small one gains. XLA
reads its flags once in a process, and processes that tests start inherit them, so that
they find what this one compiled. JAX 0.11 no longer has the first.

The 565 programs of two test files took 10.5 CPU seconds without these two and 17.0 with
them, nothing being cached. A whole run compiles more than ten thousand programs.
"""
PLAIN = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# A worker of pytest-xdist inherits the flags, too.
FLAGS = os.environ.get("XLA_FLAGS", "").replace(PLAIN, "").strip()
HAS_FLAGS = jax.__version_info__ < (0, 11)
WITH_PLAIN = f"{FLAGS} {PLAIN}".strip() if HAS_FLAGS else FLAGS
os.environ["XLA_FLAGS"] = WITH_PLAIN


def compile_options(*arguments, **options):
  """JAX's options of a program, with users' flags if the test is of their programs.

  JAX has no setting for this that a process could change after its first program.
  """
  made = jax_compile_options(*arguments, **options)
  if HAS_FLAGS and not jax.config.read("jax_disable_most_optimizations"):
    made.env_option_overrides = [*made.env_option_overrides, *USERS.items()]
  return made


jax_compile_options = compiler.get_compile_options
compiler.get_compile_options = compile_options


def optimize(wanted):
  """Sets how this process and those that tests start compile from now on."""
  if jax.config.read("jax_disable_most_optimizations") == wanted:
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", not wanted)
  os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not wanted))
  os.environ["XLA_FLAGS"] = FLAGS if wanted else WITH_PLAIN


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
  """Before any fixture of the test compiles something."""
  optimize(matches(item, OPTIMIZED))


LOWERINGS = 100
"""Programs that a thread lowers in one MLIR context: it keeps their constants."""


def ir_context():
  """The MLIR context of this thread, renewed now and then.

  JAX makes one for each program, which takes half of the lowering of a small one: the
  same 565 took 10.5 CPU seconds with this and 13.5 without. Every test process lowers
  its programs anew, whatever the cache of compiled ones holds.
  """
  uses = getattr(lowering, "uses", 0)
  if uses % LOWERINGS == 0:
    lowering.context = jax_ir_context()
  lowering.uses = uses + 1
  return lowering.context


jax_ir_context, lowering = mlir.make_ir_context, threading.local()
mlir.make_ir_context = ir_context


def pytest_configure(config):
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.config.update("jax_numpy_rank_promotion", "raise")
  if not hasattr(config, "workerinput"):
    config.pluginmanager.register(Minutes(config))
  share_compiled_programs(config)
  keep_folders_in_memory()


def pytest_collection_finish():
  """Looks for cyclic garbage less often, and never among what importing made.

  Tracing makes millions of objects, few of which are garbage of this kind.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)


def set_aside():
  """Leaves what lives now out of collections, until a process is full.

  JAX keeps what it traced, so that after some files a process holds millions of
  objects. A full collection looks at each of them, and where objects are frozen, as
  here, reading a checkpoint ends with one: after other files it took seconds.
  """
  gc.collect(1)
  gc.freeze()


def keep_folders_in_memory():
  """Folders of tests lie in memory where there is room: on a disk each fsync waits."""
  memory = pathlib.Path("/dev/shm")
  if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 1 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def share_compiled_programs(config):
  """One compilation cache for the workers of a run and the processes that tests start.

  Most of a run is compiling, and many modules compile the same programs. The cache ends
  with the run, unless JAX_COMPILATION_CACHE_DIR already names a folder to keep.
  """
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="mxjax-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
  # JAX's own cache, which the environment also gives to processes that tests start.
  jax.config.update(
    "jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"]
  )
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  # What JAX cannot read it compiles, such as an entry that a killed test was writing.
  unread = "ignore:Error reading persistent compilation cache entry"
  config.addinivalue_line("filterwarnings", unread)


def pytest_collection_modifyitems(items):
  """A worker takes whole files (`--dist loadfile`), in this order.

  Files with optimized tests are together, so that a worker rarely drops its programs.
  """

  def rank(item):
    path = item.path.as_posix()
    ranks = (i for i, end in enumerate(LONGEST_FIRST) if path.endswith(end))
    place = next(ranks, len(LONGEST_FIRST))
    return not matches(item, OPTIMIZED), path.endswith(CLEARING), place

  items.sort(key=rank)


MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CACHES_UP_TO = max(3 << 30, MEMORY // 5)
"""Resident bytes of a test process above which compiled programs are dropped."""
PROCESS, MOST_MAPS = "/proc/self", "/proc/sys/vm/max_map_count"
MAPS_UP_TO = 0.5
"""Share of the memory maps that Linux allows a process above which they are dropped.

A compiled program of XLA's CPU backend takes 3 to 15 maps, by the version of jaxlib.
When no map is left, on 0.11.2 after some 4,400 programs, LLVM ends the process with a
segmentation fault.
"""


def is_full(process=PROCESS, most_maps=MOST_MAPS):
  """Returns whether a process should drop its compiled programs; False off Linux."""
  statm = pathlib.Path(process, "statm")
  if not statm.is_file():
    return False
  resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  maps = pathlib.Path(process, "maps").read_bytes().count(b"\n")
  most = int(pathlib.Path(most_maps).read_text())
  return resident > CACHES_UP_TO or maps > MAPS_UP_TO * most


def end_module():
  """Drops what fills a small machine, or else sets it aside."""
  if is_full():
    jax.clear_caches()
    # Programs of functions that were set aside go as well.
    gc.unfreeze()
    gc.collect()
  set_aside()


@pytest.fixture(scope="module", autouse=True)
def bounded_caches():
  """Thousands of compiled programs of earlier modules would fill a small machine."""
  yield
  end_module()


class Minutes:
  """Says once a minute how far a run is, also while one test takes longer.

  Pytest's own dots tell a newcomer neither that nor what takes so long.
  """

  def __init__(self, config, seconds=60.0):
    self._config, self._seconds = config, seconds
    self._total, self._ended, self._last = 0, 0, "none"
    self._over = threading.Event()

  def pytest_collection_finish(self, session):
    self._total = max(self._total, len(session.items))

  @pytest.hookimpl(optionalhook=True)
  def pytest_xdist_node_collection_finished(self, node, ids):
    del node
    self._total = len(ids)

  def pytest_sessionstart(self):
    self._start = time.monotonic()
    threading.Thread(target=self._tell, daemon=True).start()

  def pytest_runtest_logstart(self, nodeid):
    self._last = nodeid

  def pytest_runtest_logreport(self, report):
    self._ended += report.when == "teardown"

  def pytest_sessionfinish(self):
    self._over.set()

  def _tell(self):
    while not self._over.wait(self._seconds):
      minute = round((time.monotonic() - self._start) / 60)
      terminal = self._config.pluginmanager.get_plugin("terminalreporter")
      if terminal is not None:
        told = f"minute {minute}: {self._ended} of {self._total} tests have ended"
        # Pytest thinks that it is at the start of a line while workers print dots.
        terminal.write(f"\n{told}; started last: {self._last}\n", flush=True)


class Vectors:
  """Golden arrays by name, float64 oracle values made without JAX."""

  def __init__(self, path):
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    assert digest == VECTORS_SHA256, f"{path} changed: {digest}"
    self._arrays = np.load(path)

  def __getitem__(self, name):
    return self._arrays[name]

  def cases(self, group):
    """Names of the second level below a group."""
    names = {key.split("/")[1] for key in self._arrays.files if key.startswith(group)}
    return sorted(names)


@pytest.fixture(scope="session")
def vectors():
  return Vectors(GOLDEN / "vectors.npz")


@pytest.fixture(scope="session")
def tiny_config():
  return tiny.config()


@pytest.fixture
def float64():
  with precision.float64_scope():
    yield


@pytest.fixture(scope="session")
def shared():
  """The folder of reference data beside the checkout; tests skip without it."""
  if not SHARED.is_dir():
    pytest.skip(f"no reference data at {SHARED}")
  return SHARED


@pytest.fixture(scope="session")
def tiny_model(tiny_config):
  from mxjax.models import CausalLM

  return CausalLM(tiny_config)


@pytest.fixture(scope="session")
def tiny_params(tiny_model):
  """Weights larger than an init's, each with one loud channel: rounding matters."""
  tokens = np.zeros((1, 4), np.int32)
  params = tiny_model.init(jax.random.key(0), tokens)["params"]
  rng = np.random.default_rng(0)

  def louder(path, leaf):
    if "proj" not in jax.tree_util.keystr(path):
      return leaf
    scale = np.ones(leaf.shape[-1])
    scale[rng.integers(leaf.shape[-1])] = 6.0
    loud = rng.standard_normal(leaf.shape) * 0.15 * scale
    return jax.numpy.asarray(loud, "bfloat16")

  return jax.tree_util.tree_map_with_path(louder, params)


@pytest.fixture(scope="session")
def tiny_tokens():
  return np.random.default_rng(1).integers(0, 61, (5, 32)).astype(np.int32)


@pytest.fixture
def mxjax(capsys):
  """Runs a command; returns the JSON of its last printed line, or all that it said."""

  def run(*words, as_json=True, code=0):
    capsys.readouterr()
    assert main([*map(str, words), *["--json"] * as_json]) == code
    printed = capsys.readouterr().out
    return json.loads(printed.strip().splitlines()[-1]) if as_json else printed

  return run


@pytest.fixture
def refused(capsys):
  """Runs a command that must fail; returns its one line."""

  def run(*words):
    capsys.readouterr()
    assert main(list(map(str, words))) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]

  return run
