"""Two local processes quantize one model; either is lost, and the job resumes."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from mxjax import checkpoint, distributed
from mxjax.evaluation import cli

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "models" / "trained" / "llama"
pytestmark = pytest.mark.slow


def arguments(folder, out):
  data = str(folder / "tokens.npy")
  return [
    "quantize",
    str(MODEL),
    *("--method", "rtn", "--calib", data, "--data", data, "--out", str(out)),
    *("--sequences", "2", "--length", "64", "--windows", "2", "--window-length", "64"),
  ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("distributed")
  tokens = np.random.default_rng(0).integers(0, 2048, (2, 64)).astype(np.int32)
  np.save(path / "tokens.npy", tokens)
  return path


class Job:
  """Both processes of a job, each with its output in a file."""

  def __init__(self, folder, out, *more):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    self.logs = [folder / f"{out.name}-{port}-{i}.log" for i in range(2)]
    self.processes = []
    for i, log in enumerate(self.logs):
      words = [*arguments(folder, out), "--log", "json", *more]
      words += ["--distributed", "--coordinator", f"127.0.0.1:{port}"]
      words += ["--processes", "2", "--process", str(i)]
      command = [sys.executable, "-m", "mxjax.evaluation.cli", *words]
      with open(log, "wb") as stream:
        self.processes.append(
          subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stream, env=environment
          )
        )

  def wait_for_layer(self, layer):
    """Returns when process 0 says that it is at work on a layer."""
    wanted = f'"layer": {layer},'
    while wanted not in self.logs[0].read_text():
      assert self.processes[0].poll() is None, self.logs[0].read_text()
      try:
        self.processes[0].wait(0.05)
      except subprocess.TimeoutExpired:
        pass

  def ends(self):
    """The exit codes."""
    return [process.wait(300) for process in self.processes]


def test_a_lost_process_ends_the_job_and_the_job_resumes(folder):
  out = folder / "lost"
  for lost, layer in ((1, 1), (0, 2)):
    job = Job(folder, out, "--resume")
    job.wait_for_layer(layer)
    job.processes[lost].send_signal(signal.SIGKILL)
    codes = job.ends()
    left = 1 - lost
    assert codes[lost] == -signal.SIGKILL
    assert codes[left] == distributed.LOST, job.logs[left].read_text()
    assert distributed.LOST_MESSAGE in job.logs[left].read_text()
  job = Job(folder, out, "--resume")
  assert job.ends() == [0, 0], [log.read_text() for log in job.logs]

  assert cli.main(arguments(folder, folder / "alone")) == 0
  arrays = lambda name: checkpoint.read_manifest(folder / name / "checkpoint")["arrays"]
  assert arrays("lost") == arrays("alone")
  row, alone = (
    json.loads((folder / name / "result.json").read_text())[0]
    for name in ("lost", "alone")
  )
  assert row["record"]["mesh"] == {"data": 2, "model": 1, "processes": 2}
  assert row["record"]["layers"] == alone["record"]["layers"]
  assert row["perplexity"] == alone["perplexity"]
  assert len(row["record"]["resumed"]) >= 2


def test_processes_without_distributed_are_refused(folder, capsys):
  words = [*arguments(folder, folder / "refused"), "--processes", "2"]
  assert cli.main(words) == 2
  assert "expected --distributed beside --processes" in capsys.readouterr().err
  assert not (folder / "refused").exists()
