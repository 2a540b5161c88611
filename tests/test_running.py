"""How the tests themselves run: their order, and what a run says of itself."""

import types

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
