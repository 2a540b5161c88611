"""What the jailed workers do beside isolation: imports before it, memory within."""

import dataclasses
import json
import os
import pathlib
import select
import signal

import jax
import jax.numpy as jnp
import pytest

from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.proposal import OutageError
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox import jail, jailed_executor, run_worker, supervisor
from mxjax.discovery.tasks import world
from tests.cases import slow

LIMITS = jail.Limits(seconds=90.0, cpu_seconds=3, memory_bytes=3 << 30, files=64)
SOLVES = """import jax.numpy as jnp
def geometry(x):
  return x + jnp.linalg.solve(2.0 * jnp.eye(2), jnp.ones(2)).sum()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="no namespaces")
def test_a_decomposition_traces_whatever_else_is_installed(tmp_path, monkeypatch):
  """JAX imports scipy.linalg for it, which imports this package if it is there."""
  package = tmp_path / "charset_normalizer"
  package.mkdir()
  (package / "__init__.py").write_text("")
  monkeypatch.syspath_prepend(tmp_path)
  spec = world.World(seed=3).interface.hook("geometry").to_dict()
  made = supervisor.Tracer("strict", LIMITS)
  try:
    reply = made.trace(SOLVES, [spec])
  finally:
    made.close()
  assert reply.status == Status.OK, reply.detail


@pytest.fixture
def caches():
  made = run_worker._Caches()
  yield made
  jax.monitoring.unregister_event_duration_listener(made.count)


def test_compiled_programs_are_dropped_once_for_each_growth(monkeypatch, caches):
  peak, cleared = [1 << 30], []
  usage = type("Usage", (), {"ru_maxrss": property(lambda self: peak[0] // 1024)})
  monkeypatch.setattr(run_worker.resource, "getrusage", lambda who: usage())
  monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(peak[0]))
  for gigabytes in (1, 2, 3, 3, 4, 5):
    peak[0] = gigabytes << 30
    caches.bound()
  assert cleared == [3 << 30, 5 << 30]


def test_compiled_programs_are_dropped_before_a_process_has_no_memory_maps_left(
  monkeypatch, caches
):
  cleared = []
  caches._limit = 1 << 50
  monkeypatch.setattr(run_worker, "PROGRAMS_UP_TO", 2)
  monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(caches._programs))
  arrays = [jnp.ones(3 + i) for i in range(7)]
  caches._programs = 0
  for i, array in enumerate(arrays):
    jax.jit(lambda x, i=i: x * i)(array)
    caches.bound()
  assert cleared == [3, 3]


@pytest.mark.parametrize(
  ("kills", "cpu_seconds", "status"),
  [(0, 900, Status.OK), (1, 900, Status.OK), (2, 900, Status.CRASHED), (1, 0, "slow")],
)
def test_a_trace_that_somebody_else_killed_is_tried_once_more(
  monkeypatch, kills, cpu_seconds, status
):
  """One that its own limit killed took too long, and is not."""
  asked = []

  def job(self, request):
    asked.append(request)
    number = 9 if len(asked) <= kills else 0
    outcome = {"output": "", "verdict": "", "signal": number, "code": 0}
    return outcome, b"" if number else b"A" + supervisor.frames.pack([b"h", b"unit"])

  monkeypatch.setattr(supervisor.Tracer, "_job", job)
  tracer = supervisor.Tracer.__new__(supervisor.Tracer)
  tracer._limits = jail.Limits(
    seconds=90.0, cpu_seconds=cpu_seconds, memory_bytes=1 << 30, files=8
  )
  if status == Status.CRASHED:
    # It has no outcome: what is stored would never be tried again.
    with pytest.raises(OutageError, match="two workers in a row were killed"):
      tracer.trace("x", [{"name": "h"}])
    assert len(asked) == 2
    return
  made = tracer.trace("x", [{"name": "h"}])
  if status == "slow":
    assert made.status == Status.TIMEOUT
    assert len(asked) == 1
    return
  assert made.status == status, made.detail
  assert len(asked) == kills + 1


def test_traces_and_their_checks_are_limited_by_processor_time(monkeypatch):
  """A machine that is busy, or halted, for minutes fails no honest program."""
  # A prompt tells a language model this many.
  assert supervisor.TRACE_LIMITS.cpu_seconds == candidate_source.TRACE_SECONDS
  assert supervisor.TRACE_LIMITS.seconds == candidate_source.WALL_SECONDS
  asked = []

  def ask(self, request, seconds=None, cpu_seconds=None):
    head, _ = supervisor.frames.unpack(request)
    asked.append((json.loads(head)["cpu_seconds"], seconds, cpu_seconds))
    answer = {"status": Status.OK, "computation": ["0" * 64]}
    return [json.dumps(answer).encode(), b""]

  ignores = lambda self, *given: None
  Stub = type("Stub", (), {"__init__": ignores, "ask": ask, "kill": ignores})
  monkeypatch.setattr(supervisor, "Worker", Stub)
  worker = supervisor.RunWorker({}, "fit", [], "standard")
  assert worker.gate([{"name": "h"}], {"h": b"unit"}) == {"h": "0" * 64}
  worker.close()
  assert asked == [(supervisor.GATE_SECONDS, None, supervisor.GATE_SECONDS)]


def test_a_worker_that_used_up_its_time_tells_the_record_of_that_call_alone(
  monkeypatch,
):
  record = b'["encode", {"the rest": 2}]'
  # What each call leaves, and whether it ends by its limit.
  calls = [(record, False), (b"", True), (record, True)]

  class Stub:
    is_alive = True

    def __init__(self, script, config, limits, files):
      (self.file,) = files
      assert config["progress"] == self.file

    def ask(self, request, seconds=None, cpu_seconds=None):
      left, is_used_up = calls.pop(0)
      os.pwrite(self.file, left, 0)
      if is_used_up:
        raise supervisor.UsedUpError(Status.TIMEOUT, "took more than 60 s")
      return [json.dumps({"status": Status.OK}).encode(), b""]

    def kill(self):
      pass

  monkeypatch.setattr(supervisor, "Worker", Stub)
  limits = dataclasses.replace(supervisor.RUN_LIMITS, call_cpu_seconds=60)
  worker = supervisor.RunWorker({}, "fit", [], "standard", limits)
  assert worker.run({}, {}, b"")[0]["status"] == Status.OK
  told = []
  for _ in range(2):
    with pytest.raises(supervisor.UsedUpError, match="took more than 60 s") as caught:
      worker.run({}, {}, b"", spent=50)
    told.append(str(caught.value).partition(": ")[2])
  assert told == ["", "in its phase fit encode 8, the rest 2; encode had not ended"]


def world_worker(folder):
  """An executor, and the call of the world's default program."""
  task = world.World(seed=3)
  executor = jailed_executor.JailedExecutor(task, store.Store(folder), level="standard")
  made = executor.trace(task.interface.default_source())
  assert made.status == Status.OK, made.detail
  call = Call(made.computation, task.interface.default_plan, {})
  return executor, call.active(task.interface)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [*slow(1), 2])
def test_a_worker_that_is_killed_within_a_call_is_no_fault_of_the_candidate(
  tmp_path, monkeypatch, caplog, kills
):
  executor, call = world_worker(tmp_path)
  write, outcomes = supervisor.Worker._write, []

  def killing(self, data, deadline):
    nonlocal kills
    write(self, data, deadline)
    if kills and b'"kind": "run"' in data:
      kills -= 1
      # As the kernel does: the process that evaluates, and not the one that waits.
      children = f"/proc/{self._process.pid}/task/{self._process.pid}/children"
      os.kill(int(pathlib.Path(children).read_text().split()[0]), signal.SIGKILL)

  monkeypatch.setattr(supervisor.Worker, "_write", killing)
  ran = lambda: executor.run([call], lambda _, outcome, __: outcomes.append(outcome))
  try:
    if kills == 2:
      with pytest.raises(OutageError, match="two workers in a row .* Free memory"):
        ran()
      assert not outcomes, "nothing that could be stored"
    ran()
  finally:
    executor.close()
  (outcome,) = outcomes
  assert outcome.status == Status.OK, outcome.detail
  assert "is asked of a new worker" in caplog.text


@pytest.mark.slow
def test_a_request_that_reached_no_worker_is_sent_again(tmp_path, monkeypatch, caplog):
  executor, call = world_worker(tmp_path)
  write, gone, outcomes = supervisor.Worker._write, [True], []

  def absent(self, data, deadline):
    if gone:
      gone.pop()
      os.killpg(self._process.pid, signal.SIGKILL)
      # Nobody is left to read: the process that waits and the one that evaluates.
      pipe = select.poll()
      pipe.register(self._process.stdin.fileno(), select.POLLERR)
      assert pipe.poll(10_000)
    write(self, data, deadline)

  monkeypatch.setattr(supervisor.Worker, "_write", absent)
  try:
    executor.run([call], lambda _, outcome, __: outcomes.append(outcome))
  finally:
    executor.close()
  assert outcomes[0].status == Status.OK
  assert "the request reached no worker" in caplog.text
