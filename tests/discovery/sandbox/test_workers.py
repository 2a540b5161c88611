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
