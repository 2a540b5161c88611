"""Two local processes quantize one model; either is lost, and the job resumes."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mxjax.devices import processes
from mxjax.evaluation.cli import parser
from mxjax.storage import checkpoint

ROOT = pathlib.Path(__file__).parents[3]
pytestmark = pytest.mark.slow

# What Python runs first in a process, and in the child that does its work, that never
# gets past the start of a layer: layers here take less time than a look at the log.
HELD = """
import pathlib, time
from mxjax.running import layer_quantization

quantize_layer = layer_quantization.quantize_layer

def held(*args, **options):
  if {layer!r} in args:
    pathlib.Path({sign!r}).touch()
    time.sleep(600)
  return quantize_layer(*args, **options)

layer_quantization.quantize_layer = held
"""


def arguments(folder, out):
  data = str(folder / "tokens.npy")
  sizes = ("--sequences", "2", "--length", "32", "--windows", "2")
  source = ("--calib", data, "--data", data, "--window-length", "32")
  model = str(folder / "model")
  return ["quantize", model, "--method", "rtn", "--out", str(out), *source, *sizes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_square_model):
  path = tmp_path_factory.mktemp("distributed")
  write_square_model(path / "model")
  tokens = np.random.default_rng(0).integers(0, 64, (2, 32)).astype(np.int32)
  np.save(path / "tokens.npy", tokens)
  return path


class Job:
  """Both processes of a job, each with its output in a file.

  Attributes:
    processes: The two; where `held` is given, its (process, layer) stays there.
    logs: What each wrote.
    sign: The file that is made when the held process has reached its layer.
  """

  def __init__(self, folder, out, *, held=None):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      port = free.getsockname()[1]
    self.logs = [folder / f"{out.name}-{port}-{i}.log" for i in range(2)]
    self.sign = folder / f"{out.name}-{port}-held"
    self.processes = []
    for i, log in enumerate(self.logs):
      words = [*arguments(folder, out), "--resume", "--log", "json", "--distributed"]
      words += ["--coordinator", f"127.0.0.1:{port}"]
      words += ["--processes", "2", "--process", str(i)]
      command = [sys.executable, "-m", "mxjax.evaluation.cli.parser", *words]
      path = str(ROOT)
      if held and held[0] == i:
        first = folder / f"first-{port}"
        first.mkdir()
        code = HELD.format(layer=f"layers_{held[1]}", sign=str(self.sign))
        (first / "sitecustomize.py").write_text(code)
        path = os.pathsep.join([str(first), path])
      own = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
      with open(log, "wb") as stream:
        self.processes.append(
          subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream, env=own)
        )

  def wait_until_held(self):
    """Returns when the held process has reached its layer."""
    while not self.sign.exists():
      codes = [process.poll() for process in self.processes]
      assert codes == [None, None], [log.read_text() for log in self.logs]
      time.sleep(0.05)

  def ends(self):
    """The exit codes."""
    return [process.wait(300) for process in self.processes]


def test_a_lost_process_ends_the_job_and_the_job_resumes(folder):
  out = folder / "lost"
  for lost, layer in ((1, 1), (0, 2)):
    job = Job(folder, out, held=(lost, layer))
    job.wait_until_held()
    job.processes[lost].send_signal(signal.SIGKILL)
    codes = job.ends()
    left = 1 - lost
    assert codes[lost] == -signal.SIGKILL
    assert codes[left] == processes.LOST, job.logs[left].read_text()
    assert processes.LOST_MESSAGE in job.logs[left].read_text()
  job = Job(folder, out)
  assert job.ends() == [0, 0], [log.read_text() for log in job.logs]

  assert parser.main(arguments(folder, folder / "alone")) == 0
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
