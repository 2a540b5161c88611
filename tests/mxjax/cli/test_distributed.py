"""Two local processes quantize one model; either is lost, and the job resumes."""

import json
import signal
import socket
import time

import pytest

from mxjax.cli.main import main
from mxjax.devices import processes
from mxjax.storage import checkpoint
from tests.mxjax.cli import square

pytestmark = pytest.mark.slow

# What Python runs first in a process, and in the child that does its work, that never
# gets past the start of a layer: layers here take less time than a look at the log.
HELD = """
import pathlib, time
from mxjax.run import quantize

quantize_layer = quantize.quantize_layer

def held(setup, trajectories, report):
  if setup.layers[trajectories.index] == {layer!r}:
    pathlib.Path({sign!r}).touch()
    time.sleep(600)
  return quantize_layer(setup, trajectories, report)

quantize.quantize_layer = held
"""


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
    self.logs = [out.with_name(f"{out.name}-{port}-{i}.log") for i in range(2)]
    self.sign = out.with_name(f"{out.name}-{port}-held")
    self.processes = []
    for i, log in enumerate(self.logs):
      words = square.quantize(folder, out, "rtn", "--resume", "--distributed")
      words += ["--coordinator", f"127.0.0.1:{port}"]
      words += ["--processes", "2", "--process", str(i)]
      path = []
      if held and held[0] == i:
        path = [out.with_name(f"first-{port}")]
        path[0].mkdir()
        code = HELD.format(layer=f"layers_{held[1]}", sign=str(self.sign))
        (path[0] / "sitecustomize.py").write_text(code)
      with open(log, "wb") as stream:
        self.processes.append(square.start(words, stream, path))

  def wait_until_held(self):
    """Returns when the held process has reached its layer."""
    while not self.sign.exists():
      codes = [process.poll() for process in self.processes]
      assert codes == [None, None], [log.read_text() for log in self.logs]
      time.sleep(0.05)

  def ends(self):
    """The exit codes."""
    return [process.wait(300) for process in self.processes]


def test_a_lost_process_ends_the_job_and_the_job_resumes(tmp_path):
  model, out = square.write(tmp_path / "model"), tmp_path / "lost"
  for lost, layer in ((1, 1), (0, 2)):
    job = Job(model, out, held=(lost, layer))
    job.wait_until_held()
    job.processes[lost].send_signal(signal.SIGKILL)
    codes = job.ends()
    left = 1 - lost
    assert codes[lost] == -signal.SIGKILL
    assert codes[left] == processes.LOST, job.logs[left].read_text()
    assert processes.LOST_MESSAGE in job.logs[left].read_text()
  job = Job(model, out)
  assert job.ends() == [0, 0], [log.read_text() for log in job.logs]

  assert main(square.quantize(model, tmp_path / "alone", "rtn")) == 0
  folders = (out, tmp_path / "alone")
  ours, theirs = (checkpoint.read_manifest(f / "checkpoint")["arrays"] for f in folders)
  assert ours == theirs
  row, alone = (json.loads((f / "result.json").read_text())[0] for f in folders)
  assert row["record"]["mesh"] == {"data": 2, "model": 1, "processes": 2}
  assert row["record"]["layers"] == alone["record"]["layers"]
  assert row["perplexity"] == alone["perplexity"]
  assert len(row["record"]["resumed"]) >= 2
