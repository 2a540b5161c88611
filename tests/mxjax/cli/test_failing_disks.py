"""Disks that are full or read-only, folders that move, clocks that go back."""

import os
import subprocess
import tempfile
import time

import pytest

from mxjax.storage import checkpoint
from tests.mxjax.cli import square


@pytest.fixture
def disk(tmp_path):
  """A small disk of its own, and a call that changes it; only root has one."""
  place = tmp_path / "disk"
  place.mkdir()

  def mount(options):
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0

  if os.geteuid() or not mount("size=100k"):
    pytest.skip("no disk can be mounted here")
  yield place, lambda options: mount(f"remount,{options}")
  subprocess.run(["umount", str(place)], check=True)


def said(words, folder):
  """What a command that must fail prints."""
  words = [word for word in words if word not in ("--log", "json")]
  with square.start(words, subprocess.PIPE) as process:
    error = process.stderr.read()
  assert process.returncode == 2, error
  # What a run that fails later says of itself is there as well.
  lines = [line for line in error.splitlines() if line.startswith("mxjax ")]
  assert len(lines) == 1 and str(folder) in lines[0], error
  return lines[0]


@pytest.mark.slow
def test_one_sentence_each_and_then_the_same_bits(disk, tmp_path, mxjax, monkeypatch):
  place, remount = disk
  model, out = square.write(tmp_path / "model"), place / "out"
  full = said(square.quantize(model, out, "rtn", "--resume"), out)
  assert "bytes free, got " in full
  assert (out / "run/layers/layers_2.safetensors").is_file()
  assert remount("ro")
  text = said(square.quantize(model, out, "rtn", "--resume"), out)
  assert "(Read-only file system); mount it for writing, then" in text
  assert "Read-only" in said(square.quantize(model, place / "other", "rtn"), place)
  assert remount("rw,size=8m")
  moved = out.rename(place / "moved")
  monkeypatch.setattr(time, "time", lambda: 1e9)
  # As on a machine whose own place for such files is full.
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
  mxjax(*square.quantize(model, moved, "rtn", "--resume"))
  assert mxjax("verify", moved)["faults"] == []
  assert sorted(p.name for p in moved.iterdir()) == [
    *("checkpoint", "mxjax_files.json", "report.html"),
    *("result.csv", "result.json", "run"),
  ]
  monkeypatch.undo()
  undisturbed = tmp_path / "undisturbed"
  mxjax(*square.quantize(model, undisturbed, "rtn"))
  ours, theirs = (
    checkpoint.read_manifest(folder / "checkpoint") for folder in (moved, undisturbed)
  )
  assert ours["arrays"] == theirs["arrays"] and ours["nodes"] == theirs["nodes"]
