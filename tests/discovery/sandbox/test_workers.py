"""What the jailed workers do beside isolation: imports before it, memory within."""

import os

import jax
import pytest

from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox import jail, run_worker, supervisor
from mxjax.discovery.tasks import world

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


def test_compiled_programs_are_dropped_once_for_each_growth(monkeypatch):
  peak, cleared = [1 << 30], []
  usage = type("Usage", (), {"ru_maxrss": property(lambda self: peak[0] // 1024)})
  monkeypatch.setattr(run_worker.resource, "getrusage", lambda who: usage())
  monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(peak[0]))
  caches = run_worker._Caches()
  for gigabytes in (1, 2, 3, 3, 4, 5):
    peak[0] = gigabytes << 30
    caches.bound()
  assert cleared == [3 << 30, 5 << 30]


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
  made = tracer.trace("x", [{"name": "h"}])
  if status == "slow":
    assert made.status == Status.TIMEOUT
    assert len(asked) == 1
    return
  assert made.status == status, made.detail
  assert len(asked) == min(kills + 1, 2)
  if status == Status.CRASHED:
    assert "killed twice by another process" in made.detail
