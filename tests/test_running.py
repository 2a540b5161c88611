"""How the tests themselves run: their order, and what a run says of itself."""

import gc
import pathlib
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

from tests import conftest


@pytest.mark.parametrize("listed", ["LONGEST_FIRST", "OPTIMIZED", "CLEARING"])
def test_every_listed_file_is_there(listed):
  files = [path.as_posix() for path in conftest.TESTS.rglob("test_*.py")]
  parts = getattr(conftest, listed)
  assert not [part for part in parts if not any(part in file for file in files)]


def test_a_run_says_each_minute_how_far_it_is():
  lines, waited = [], []
  terminal = types.SimpleNamespace(write=lambda text, flush: lines.append(text))
  plugins = types.SimpleNamespace(get_plugin={"terminalreporter": terminal}.get)
  minutes = conftest.Minutes(types.SimpleNamespace(pluginmanager=plugins), 60.0)
  waits = iter([False, False, True])
  minutes._over = types.SimpleNamespace(wait=lambda s: waited.append(s) or next(waits))
  minutes._start = conftest.time.monotonic() - 121
  minutes.pytest_xdist_node_collection_finished(None, ["a", "b", "c"])
  minutes.pytest_runtest_logstart("tests/test_a.py::test_b")
  for when in ("setup", "call", "teardown", "setup"):
    minutes.pytest_runtest_logreport(types.SimpleNamespace(when=when))
  minutes._tell()
  assert waited == [60.0] * 3
  told = "minute 2: 1 of 3 tests have ended; started last: tests/test_a.py::test_b"
  assert lines == [f"\n{told}\n"] * 2


@pytest.mark.parametrize(
  ("resident", "maps", "is_full"),
  [(0, 5, False), (0, 6, True), (conftest.CACHES_UP_TO + 1, 0, True)],
)
def test_programs_are_dropped_before_memory_or_its_maps_run_out(
  tmp_path, resident, maps, is_full
):
  pages = -(-resident // conftest.os.sysconf("SC_PAGE_SIZE"))
  (tmp_path / "statm").write_text(f"{pages} {pages} 0 0 0 0 0\n")
  (tmp_path / "maps").write_text("a map\n" * maps)
  (tmp_path / "most").write_text("10\n")
  assert conftest.is_full(tmp_path, tmp_path / "most") == is_full
  assert not conftest.is_full(tmp_path / "absent", tmp_path / "most")


class Node:
  """An object that only a collection of cycles frees."""

  def __init__(self):
    self.itself = self


@pytest.mark.parametrize("is_full", [False, True])
def test_objects_of_ended_files_are_collected_only_if_a_process_is_full(
  monkeypatch, request, is_full
):
  """Reading a checkpoint collects all the others: it would take seconds."""
  assert "bounded_caches" in request.fixturenames
  monkeypatch.setattr(conftest, "is_full", lambda: False)
  dropped = []
  monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(1))
  node = Node()
  gone = weakref.ref(node)
  conftest.end_module()
  assert not any(one is node for one in gc.get_objects())
  del node
  gc.collect()
  assert gone() is not None
  monkeypatch.setattr(conftest, "is_full", lambda: is_full)
  conftest.end_module()
  assert (gone() is None) == is_full == bool(dropped)
  gc.unfreeze()
  gc.collect()
  assert gone() is None
  conftest.set_aside()


@pytest.mark.slow
@pytest.mark.skipif(
  not pathlib.Path(conftest.PROCESS, "maps").is_file(), reason="needs Linux' maps"
)
def test_dropping_programs_gives_their_memory_maps_back():
  maps = lambda: pathlib.Path(conftest.PROCESS, "maps").read_bytes().count(b"\n")
  vector = jnp.ones(3)
  # A function that is gone takes its programs along.
  functions = [jax.jit(lambda x, factor=i: x * factor) for i in range(40)]
  before = maps()
  for function in functions:
    function(vector).block_until_ready()
  held = maps()
  jax.clear_caches()
  gc.collect()
  assert held - before > len(functions)
  assert maps() < (before + held) / 2
