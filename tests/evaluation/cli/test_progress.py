"""Clock, Ctrl-C and events without a model; and real processes that are killed."""

import argparse
import json
import signal
import subprocess
import time

import pytest

from mxjax.evaluation.cli import console, launch, progress
from mxjax.running import pipeline
from mxjax.storage import checkpoint
from tests.evaluation.cli import square


def test_time_left_is_that_of_the_work_seen():
  now = [100.0]
  clock = progress.Clock(lambda: now[0])
  # A resumed run: half was done by another process, in no time of this one.
  assert clock.update(0.5) == (0.0, None)
  now[0] = 110.0
  assert clock.update(0.75) == (10.0, pytest.approx(10.0))
  now[0] = 120.0
  assert clock.update(1.0) == (20.0, 0.0)


class TestStopper:
  NOW = pipeline.Progress(0, 2, "calibration", 0.0)

  def make(self):
    said, seen = [], []
    stop = progress.Stopper(said.append)
    return stop, stop.follow(seen.append), said, seen

  def test_waits_for_the_layer_in_work_and_twice_stops_now(self):
    stop, follow, said, seen = self.make()
    follow(self.NOW)
    assert seen == [self.NOW] and not said
    stop.ask(signal.SIGTERM, None)
    assert "SIGTERM: stopping when this layer is finished" in said[0]
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)
    assert stop()

  def test_between_layers_there_is_nothing_to_wait_for(self):
    stop, follow, _, _ = self.make()
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)
    follow(self.NOW)
    assert not stop()
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)

  def test_handlers_are_put_back(self):
    before = signal.getsignal(signal.SIGINT)
    with progress.stopper(print):
      assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_events_are_lines_of_json(capsys):
  with progress.progress("json") as begin:
    begin("gptq")(pipeline.Progress(1, 4, "quantization", 0.25))
  event = json.loads(capsys.readouterr().err)
  assert abs(event.pop("time") - time.time()) < 60
  where = {"method": "gptq", "layer": 1, "layers": 4, "stage": "quantization"}
  clock = {"fraction": 0.25, "seconds": 0.0, "seconds_left": None}
  assert event == {"event": "progress", **where, **clock}


def test_the_command_that_resumes():
  words = ["quantize", "a folder", "--out", "x"]
  said = "mxjax quantize 'a folder' --out x --resume"
  assert progress.resume_command(words) == said
  assert progress.resume_command([*words, "--resume"]) == said


def events(process):
  """The child's events as they come; what is no event ends up in the assertion."""
  for line in process.stderr:
    assert line.startswith("{"), line + process.stderr.read()
    yield json.loads(line)


def layers_of(process):
  """The layers of a child's progress, as it comes."""
  return (e["layer"] for e in events(process) if e["event"] == "progress")


def arrays(out):
  manifest = checkpoint.read_manifest(out / "checkpoint")
  return {key: manifest[key] for key in ("arrays", "nodes", "program", "calibration")}


def test_killed_processes_go_on_to_the_same_checkpoint(tmp_path, mxjax, refused):
  """One child dies in its second layer; the next is stopped by SIGINT in the third."""
  out = tmp_path / "out"
  model = square.write(tmp_path / "model")
  quantize = square.quantize(model, out, "mr-gptq", "--resume")
  with square.start(quantize, subprocess.PIPE) as first:
    assert 1 in layers_of(first)
    first.send_signal(signal.SIGKILL)
  assert first.wait(300) == -signal.SIGKILL
  with square.start(quantize, subprocess.PIPE) as second:
    assert next(layers_of(second)) >= 1
    # While it holds the folder, here at rest, nobody else gets in.
    second.send_signal(signal.SIGSTOP)
    assert "another process is at work in" in json.loads(refused(*quantize))["message"]
    second.send_signal(signal.SIGINT)
    second.send_signal(signal.SIGCONT)
    seen = list(events(second))
  assert second.wait(300) == 130
  assert min(one["layer"] for one in seen if one["event"] == "progress") >= 1
  assert seen[-1]["event"] == "stopped"
  assert "go on with: mxjax quantize" in seen[-1]["message"]
  assert seen[-1]["message"].endswith("--resume")
  assert not (out / "checkpoint").exists()
  mxjax(*quantize)
  undisturbed = tmp_path / "undisturbed"
  mxjax(*square.quantize(model, undisturbed, "mr-gptq"))
  assert arrays(out) == arrays(undisturbed)
  for file in sorted((undisturbed / "run/layers").iterdir()):
    assert (out / "run/layers" / file.name).read_bytes() == file.read_bytes()
  # Finished work is not done again, nor a sound checkpoint written again.
  before = (out / "checkpoint/mxjax.json").stat().st_mtime_ns
  time.sleep(0.01)
  mxjax(*quantize)
  assert (out / "checkpoint/mxjax.json").stat().st_mtime_ns == before
  assert mxjax("verify", out)["faults"] == []
  layer = out / "run/layers/layers_1.safetensors"
  layer.write_bytes(layer.read_bytes()[:-1])
  fault = "run/layers/layers_1.safetensors has another SHA-256."
  assert fault in mxjax("verify", out, as_json=False, code=1).splitlines()
  assert "layers/layers_1.safetensors has another" in refused(*quantize)


def test_no_printed_text_acts_on_the_terminal(capsys):
  evil = "a\x1b[2J\x07\x9b1m\r\u202e\ud800\u2028é"
  escaped = "a\\x1b[2J\\x07\\x9b1m\\r\\u202e\\ud800\\u2028é"
  assert console.printable(evil + "\n\t") == escaped + "\n\t"
  console.say(evil)
  launch._report(argparse.Namespace(log="text", command="quantize"), "error", evil)
  printed = capsys.readouterr()
  assert escaped in printed.out.replace("\n", "")
  assert printed.err == f"mxjax quantize: {escaped}\n"
