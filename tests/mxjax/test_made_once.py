"""What workers share is made once, whole, and again where its maker was killed."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.mxjax.made_once import made_once

ROOT = pathlib.Path(__file__).parents[2]
MAKE = """
import pathlib, sys, time
from tests.mxjax.made_once import made_once

class Slow:
  # Told while the pickle is written, and never done.
  def __reduce__(self):
    print("writing", flush=True)
    time.sleep(600)

def make():
  print("making", flush=True)
  if sys.argv[2] == "slow":
    # The first part is longer than the buffers of pickle and file.
    return [b"1" * (1 << 20), b"2" * (1 << 20), Slow()]
  sys.stdin.readline()
  return "of the first"

print("asking", flush=True)
print(made_once(pathlib.Path(sys.argv[1]), make), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
  """Starts a process that makes the result; ends it with the test."""
  started = []

  def start(how):
    process = subprocess.Popen(
      [sys.executable, "-c", MAKE, str(tmp_path / "a.pickle"), how],
      cwd=ROOT,
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.communicate()


def test_what_a_killed_worker_had_half_written_is_made_again(worker, tmp_path):
  path = tmp_path / "a.pickle"
  process = worker("slow")
  assert [process.stdout.readline() for _ in range(2)] == ["asking\n", "making\n"]
  assert process.stdout.readline() == "writing\n"
  written = [file for file in tmp_path.iterdir() if file.stat().st_size > 1 << 20]
  assert len(written) == 1 and not path.exists()
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert made_once(path, lambda: "whole") == "whole"
  assert made_once(path, pytest.fail) == "whole"
  # What the killed one left was taken over, not left behind.
  assert sorted(file.suffix for file in tmp_path.iterdir()) == [".lock", ".pickle"]


def test_a_worker_waits_for_the_one_that_makes_it(worker):
  first = worker("once")
  assert [first.stdout.readline() for _ in range(2)] == ["asking\n", "making\n"]
  second = worker("once")
  assert second.stdout.readline() == "asking\n"
  with pytest.raises(subprocess.TimeoutExpired):
    second.wait(2)
  first.stdin.write("\n")
  first.stdin.flush()
  assert first.stdout.readline() == "of the first\n"
  # It says nothing of making.
  assert second.stdout.readline() == "of the first\n"


def test_what_could_not_be_made_is_no_result(tmp_path):
  path = tmp_path / "a.pickle"
  with pytest.raises(ZeroDivisionError):
    made_once(path, lambda: 1 / 0)
  assert made_once(path, lambda: 2) == 2
