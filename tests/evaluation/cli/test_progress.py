"""Clock, Ctrl-C and events without a model; and real processes that are killed."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mxjax.evaluation.cli import parser, progress
from mxjax.running import pipeline
from mxjax.storage import checkpoint

ROOT = pathlib.Path(__file__).parents[3]


class TestClock:
  def test_time_left_is_that_of_the_work_seen(self):
    now = [100.0]
    clock = progress.Clock(lambda: now[0])
    # A resumed run: half was done by another process, in no time of this one.
    assert clock.update(0.5) == (0.0, None)
    now[0] = 110.0
    assert clock.update(0.75) == (10.0, pytest.approx(10.0))
    now[0] = 120.0
    assert clock.update(1.0) == (20.0, 0.0)


class TestStopper:
  def make(self):
    said, seen = [], []
    stop = progress.Stopper(said.append)
    return stop, stop.follow(seen.append), said, seen

  def test_waits_for_the_layer_in_work(self):
    stop, follow, said, seen = self.make()
    now = pipeline.Progress(0, 2, "calibration", 0.0)
    follow(now)
    assert seen == [now] and not said
    stop.ask(signal.SIGINT, None)
    assert "SIGINT: stopping when this layer is finished" in said[0]
    assert stop()

  def test_twice_stops_now(self):
    stop, follow, _, _ = self.make()
    follow(pipeline.Progress(0, 2, "calibration", 0.0))
    stop.ask(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)

  def test_between_layers_there_is_nothing_to_wait_for(self):
    stop, follow, _, _ = self.make()
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)
    follow(pipeline.Progress(0, 2, "calibration", 0.0))
    assert not stop()
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)

  def test_handlers_are_put_back(self):
    before = signal.getsignal(signal.SIGINT)
    with progress.stopper(print):
      assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_events_are_lines_of_json(capsys):
  stream = io.StringIO()
  progress.emit("x", stream, value=1)
  assert json.loads(stream.getvalue()) | {"time": 0} == {
    "event": "x",
    "time": 0,
    "value": 1,
  }
  with progress.progress("json") as begin:
    update = begin("gptq")
    update(pipeline.Progress(1, 4, "quantization", 0.25))
  event = json.loads(capsys.readouterr().err)
  assert event["method"] == "gptq" and event["fraction"] == 0.25
  assert event["layer"] == 1 and event["layers"] == 4
  assert event["seconds_left"] is None


def test_the_command_that_resumes():
  words = ["quantize", "a folder", "--out", "x"]
  said = "mxjax quantize 'a folder' --out x --resume"
  assert progress.resume_command(words) == said
  assert progress.resume_command([*words, "--resume"]) == said


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, write_model):
  sizes = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
  path = tmp_path_factory.mktemp("model")
  write_model(path, num_layers=3, num_kv_heads=1, max_positions=64, **sizes)
  np.save(path / "ids.npy", np.arange(64, dtype=np.int32).reshape(2, 32) % 60)
  return path


def words(folder, out, *extra):
  ids = str(folder / "ids.npy")
  sizes = ["--sequences", "2", "--length", "32", "--windows", "2"]
  data = ["--calib", ids, "--data", ids, "--window-length", "32"]
  method = ["--method", "mr-gptq", "--log", "json", "--json"]
  return ["quantize", str(folder), "--out", str(out), *data, *sizes, *method, *extra]


def start(folder, out, *extra):
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  return subprocess.Popen(
    [sys.executable, "-m", "mxjax.evaluation.cli.parser", *words(folder, out, *extra)],
    env=environment,
    cwd=ROOT,
    stderr=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    text=True,
  )


def events(process):
  """The child's events as they come; what is no event ends up in the assertion."""
  for line in process.stderr:
    assert line.startswith("{"), line + process.stderr.read()
    yield json.loads(line)


def arrays(out):
  manifest = checkpoint.read_manifest(out / "checkpoint")
  return {key: manifest[key] for key in ("arrays", "nodes", "program", "calibration")}


def test_killed_processes_go_on_to_the_same_checkpoint(model_folder, tmp_path, capsys):
  """One child dies in its second layer; the next is stopped by SIGINT in the third."""
  out = tmp_path / "out"
  first = start(model_folder, out)
  for event in events(first):
    if event["event"] == "progress" and event["layer"] == 1:
      first.send_signal(signal.SIGKILL)
      break
  assert first.wait(300) == -signal.SIGKILL
  first.stderr.close()
  second = start(model_folder, out, "--resume")
  seen = []
  for event in events(second):
    seen.append(event)
    if event["event"] == "progress" and len(seen) < 50:
      # While it holds the folder, nobody else gets in.
      if not any(one["event"] == "asked" for one in seen):
        assert parser.main(words(model_folder, out, "--resume")) == 2
        refused = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert "another process is at work in" in refused["message"]
        second.send_signal(signal.SIGINT)
        seen.append({"event": "asked"})
    if event["event"] == "stopped":
      break
  assert second.wait(300) == 130
  assert second.stderr.read() == ""
  second.stderr.close()
  layers = [one["layer"] for one in seen if one["event"] == "progress"]
  assert min(layers) >= 1
  assert "go on with: mxjax quantize" in seen[-1]["message"]
  assert seen[-1]["message"].endswith("--resume")
  assert not (out / "checkpoint").exists()
  assert parser.main(words(model_folder, out, "--resume")) == 0
  told = capsys.readouterr()
  last = json.loads(told.err.splitlines()[-1])
  assert last["event"] == "finished"
  undisturbed = tmp_path / "undisturbed"
  assert parser.main(words(model_folder, undisturbed)) == 0
  assert arrays(out) == arrays(undisturbed)
  for file in sorted((undisturbed / "run/layers").iterdir()):
    assert (out / "run/layers" / file.name).read_bytes() == file.read_bytes()
  capsys.readouterr()
  # Finished work is not done again, nor a sound checkpoint written again.
  before = (out / "checkpoint/mxjax.json").stat().st_mtime_ns
  time.sleep(0.01)
  assert parser.main(words(model_folder, out, "--resume")) == 0
  assert (out / "checkpoint/mxjax.json").stat().st_mtime_ns == before
  capsys.readouterr()
  assert parser.main(["verify", str(out), "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["faults"] == []
  layer = out / "run/layers/layers_1.safetensors"
  layer.write_bytes(layer.read_bytes()[:-1])
  assert parser.main(["verify", str(out)]) == 1
  assert "run/layers/layers_1.safetensors has another SHA-256." in (
    capsys.readouterr().out.splitlines()
  )
  assert parser.main(words(model_folder, out, "--resume")) == 2
  assert "layers/layers_1.safetensors has another" in capsys.readouterr().err
