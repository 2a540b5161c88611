"""Environments that `make` makes: by one make at a time, and whole."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = """#!/bin/sh
# Stands for Python: makes an environment in no time, and installs while `hold` is
# there, but not for ever.
case "$1 $2" in
  "-m venv") echo "$2" >> {log}; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip") 
    echo "$2" >> {log}; turns=0
    while [ -e {hold} ] && [ $turns -lt 400 ]; do
      sleep 0.05; turns=$((turns + 1))
    done ;;
  *) exec {python} "$@" ;;
esac
"""
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


class Checkout:
  """The Makefile in a folder of its own, with an interpreter that installs nothing."""

  def __init__(self, folder):
    (folder / ".ci").mkdir(parents=True)
    for name in ("Makefile", ".ci/locked.py", "pyproject.toml"):
      shutil.copy(ROOT / name, folder / name)
    self.folder, self.hold, self.log = folder, folder / "hold", folder / "log"
    self.marker = folder / ".venv-fake" / ".installed"
    self.log.touch()
    self.python = folder / "fake"
    paths = {"log": self.log, "hold": self.hold, "python": sys.executable}
    self.python.write_text(PYTHON.format(**paths))
    self.python.chmod(0o755)
    self.started = []

  def make(self, target="install"):
    # Not the options of a make that runs these tests, nor its lock.
    outside = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "HAS_LOCK")
    process = subprocess.Popen(
      ["make", target, f"PYTHON={self.python}"],
      cwd=self.folder,
      env={k: v for k, v in os.environ.items() if k not in outside},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    self.started.append(process)
    return process

  def kill(self, process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()

  def count(self, word):
    return self.log.read_text().split().count(word)

  def wait_for(self, word, count):
    end = time.monotonic() + 60
    while self.count(word) < count:
      assert time.monotonic() < end, self.log.read_text()
      time.sleep(0.02)


@pytest.fixture
def checkout(tmp_path):
  made = Checkout(tmp_path / "checkout")
  yield made
  made.hold.unlink(missing_ok=True)
  for process in made.started:
    if process.poll() is None:
      made.kill(process)
    process.stdout.close()


def test_of_two_makes_at_once_one_makes_the_environment_and_the_other_waits(checkout):
  checkout.hold.touch()
  first = checkout.make()
  checkout.wait_for("pip", 1)
  second = checkout.make()
  lines = iter(second.stdout.readline, "")
  assert any("waiting until it has ended" in line for line in lines)
  assert not checkout.marker.exists()
  checkout.hold.unlink()
  assert (first.wait(60), second.wait(60)) == (0, 0)
  assert checkout.marker.exists()
  assert (checkout.count("venv"), checkout.count("pip")) == (1, 3)
  # What is there is used without a word.
  third = checkout.make()
  assert third.wait(60) == 0 and checkout.count("venv") == 1


def test_what_a_killed_make_leaves_is_made_again(checkout):
  assert checkout.make().wait(60) == 0
  before = (checkout.folder / "pyproject.toml").stat()
  later = before.st_mtime + 1000
  os.utime(checkout.folder / "pyproject.toml", (later, later))
  checkout.hold.touch()
  killed = checkout.make()
  checkout.wait_for("venv", 2)
  checkout.wait_for("pip", 4)
  checkout.kill(killed)
  checkout.hold.unlink()
  # Half of an environment counts for none, though its requirements are older again.
  os.utime(checkout.folder / "pyproject.toml", (before.st_atime, before.st_mtime))
  assert not checkout.marker.exists()
  assert checkout.make().wait(60) == 0
  assert checkout.marker.exists() and checkout.count("venv") == 3
