"""Clock, Ctrl-C and events without a model; and real processes that are killed."""

import argparse
import datetime
import html
import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import jax
import pytest
from rich.console import Console

from mxjax import methods
from mxjax.audit import plan
from mxjax.cli import main as cli
from mxjax.cli import output, stopping
from mxjax.cli.main import main
from mxjax.evaluation import estimates
from mxjax.intake.texts import printable
from mxjax.run import reporting
from mxjax.run.progress import Progress, Report
from mxjax.run.record import StageClock
from mxjax.storage import checkpoint
from tests import tiny
from tests.mxjax.cli import square


def test_time_left_is_that_of_the_work_seen():
  now = [100.0]
  clock = reporting.Clock(lambda: now[0])
  # A resumed run: half was done by another process, in no time of this one.
  assert clock.update(0.5) == (0.0, None)
  now[0] = 110.0
  assert clock.update(0.75) == (10.0, pytest.approx(10.0))
  now[0] = 120.0
  assert clock.update(1.0) == (20.0, 0.0)


def test_time_left_does_not_count_the_layer_that_compiles():
  now = [0.0]
  clock = reporting.Clock(lambda: now[0])
  assert clock.update(0.0, 0) == (0.0, None)
  now[0] = 60.0
  assert clock.update(0.1, 0) == (60.0, None)
  # The second layer begins: nothing is known of a layer without compilation.
  assert clock.update(0.2, 1) == (60.0, None)
  now[0] = 65.0
  assert clock.update(0.4, 2) == (65.0, pytest.approx(15.0))


def test_time_left_in_steps_counts_from_the_second_one():
  now = [0.0]
  clock = reporting.Clock(lambda: now[0])
  for second, step, left in ((0, 0, None), (60, 1, None), (70, 2, 60.0), (80, 3, 50.0)):
    now[0] = float(second)
    place = Progress(0, 2, f"learning {step}/4, loss 1.0", step / 8)
    assert clock.follow(place) == (now[0], left and pytest.approx(left))
  # The layers behind the steps compile anew, and are told of from the second one on.
  for second, layer, left in (
    (90, 0, None),
    (150, 0, None),
    (160, 1, None),
    (170, 2, 10),
  ):
    now[0] = float(second)
    place = Progress(layer, 4, "calibration", (5 + layer) / 8)
    assert clock.follow(place) == (now[0], left and pytest.approx(left))


class TestStopper:
  NOW = Progress(0, 2, "calibration", 0.0)

  def make(self):
    said, seen = [], []
    stop = stopping.Stopper(said.append)
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
    follow(Progress(1, 2, "evaluating, window 1/4", 0.9))
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)
    follow(self.NOW)
    assert not stop()
    with pytest.raises(KeyboardInterrupt):
      stop.ask(signal.SIGINT, None)

  def test_a_run_that_tunes_does_not_go_on_to_its_end(self):
    """Its layers are on disk and so is every step: nothing is lost, or waited for."""
    stop, follow, said, _ = self.make()
    follow(self.NOW)
    assert not stop()
    report = Report(methods.get("rtn+tune"), 2, StageClock(), follow)
    for tell in (report.learning, report.tuning):
      follow(self.NOW)
      tell(3, 8, 0.125)
      with pytest.raises(KeyboardInterrupt):
        stop.ask(signal.SIGTERM, None)
    assert not said

  def test_handlers_are_put_back(self):
    before = signal.getsignal(signal.SIGINT)
    with stopping.stopper(print):
      assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_events_are_lines_of_json(capsys):
  with output.progress("json") as begin:
    begin("gptq")(Progress(1, 4, "quantization", 0.25))
  event = json.loads(capsys.readouterr().err)
  assert abs(event.pop("time") - time.time()) < 60
  where = {"method": "gptq", "layer": 1, "layers": 4, "stage": "quantization"}
  clock = {"fraction": 0.25, "seconds": 0.0, "seconds_left": None}
  assert event == {"event": "progress", **where, **clock}


@pytest.mark.slow
def test_without_a_terminal_lines_take_the_place_of_bars(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(reporting, "SILENCE", 0.02)
  model, out = square.write(tmp_path / "model"), tmp_path / "out"
  words = square.quantize(model, out, "rtn")
  place = words.index("--log")
  assert main([*words[:place], *words[place + 2 :]]) == 0
  said = capsys.readouterr().err.splitlines()
  wanted = [f"rtn, layer {layer}/3 (" for layer in (1, 2, 3)]
  wanted += [
    "rtn, sanity gate",
    "rtn, evaluating, window 0/2",
    "float model, evaluating",
  ]
  for head in wanted:
    assert sum(line.startswith(head) for line in said) == 1, head
  # Reading the model and compiling take longer than what counts as silence here.
  assert any(line.startswith("still at ") for line in said)


def test_counts_are_lines_without_a_terminal(capsys):
  with output.task_bars() as update:
    for done in range(3):
      update("piqa", done, 2)
  assert capsys.readouterr().err == "piqa: 0/2\npiqa: 2/2\n"


def test_what_is_said_within_generated_text_begins_a_line(capsys, monkeypatch):
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  tell = output.teller("bars")
  output.piece("The moon is")
  tell("compiling")
  tell("still compiling")
  assert capsys.readouterr().err == "\ncompiling\nstill compiling\n"
  output.piece(" round.\n")
  tell("done")
  assert capsys.readouterr().err == "done\n"


def test_a_text_that_flows_keeps_the_heartbeat_silent(monkeypatch):
  spoke = []
  beating = types.SimpleNamespace(spoke=lambda: spoke.append(1))
  monkeypatch.setattr(output, "_heartbeats", [beating])
  output.piece("")
  assert not spoke
  output.piece("The moon is")
  assert spoke


def test_a_bar_says_what_compiles_what_is_evaluated_and_ends_full():
  fields = "{task.fields[method]}", "{task.description}", "{task.fields[left]}"
  with output._bars(*fields) as shown:
    update = output._begin_bar(shown, "gptq")
    (task,) = shown.tasks
    told = []
    for now in (
      Progress(0, 2, "calibration", 0.0),
      Progress(1, 2, "quantization", 0.45),
      Progress(1, 2, "evaluating, window 3/4", 0.975),
      Progress(1, 2, "evaluating, window 4/4", 1.0),
    ):
      update(now)
      told.append(task.description)
    assert told == [
      "layer 1/2: calibration, compiling",
      "layer 2/2: quantization",
      "evaluating, window 3/4",
      "evaluating, window 4/4",
    ]
    assert task.finished and task.percentage == 100


def test_a_run_tells_its_settings_its_cost_and_what_made_it(tmp_path, capsys):
  model, out = square.write(tmp_path / "model"), tmp_path / "out"
  words = square.quantize(model, out, "rtn", "--replicates", "2")
  assert main(words) == 0
  said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
  messages = [event["text"] for event in said if event["event"] == "message"]
  assert messages[0] == f"loading {model}"
  assert f"calibration: 2 x 32 tokens of {model / 'ids.npy'}, seed 0" in messages
  [memory] = [text for text in messages if text.startswith("expected memory: about ")]
  assert memory.endswith("in memory")
  assert any(text.startswith("expected time: about ") for text in messages)
  for method, windows in (("rtn", 4), ("float model", 2)):
    run = [e for e in said if e.get("method") == method]
    fractions = [event["fraction"] for event in run]
    assert fractions == sorted(fractions) and fractions[-1] == 1
    assert run[-1]["stage"] == f"evaluating, window {windows}/{windows}"
  (row,) = json.loads((out / "result.json").read_text())
  made_by = row["made_by"]
  assert made_by["command"] == shlex.join(["mxjax", *words])
  assert made_by["versions"]["jax"] == jax.__version__
  assert made_by["device"].startswith("cpu: ")
  assert datetime.datetime.fromisoformat(made_by["date"]).tzinfo
  # Options stand in marks that keep them on one line.
  page = re.sub(r"</?(span|wbr)\b[^>]*>", "", (out / "report.html").read_text())
  assert html.escape(made_by["command"]) in page and made_by["date"] in page


MEASURED = {
  ("rtn", 4, 256): 13,
  ("rtn", 8, 512): 22,
  ("gptq", 4, 256): 23,
  ("gptq", 8, 512): 34,
  ("hires", 4, 256): 72,
  ("hires", 8, 512): 90,
}
"""Seconds of SmolLM2-135M-Instruct on a core of 104 GFLOP/s, with one window of 256."""


BUILT = {
  "hires": (182, 311e9),
  "hires-next": (453, 311e9),
  "hires-rotated": (593, 311e9),
  "map-descent": (3174, 104e9),
  "spinquant:batch=1:steps=10": (466, 104e9),
  "focus": (349, 104e9),
  "torq": (103, 104e9),
  "batquant:tokens=256:steps=40": (701, 104e9),
}
"""Seconds that builds of the same model took for 8 x 2,048 tokens, without evaluation
(`hires_next_smollm2`, `map_descent_smollm2`, `tables_smollm2_methods`), and FLOP/s of
their machines, which were measured apart; that of the first three is in `map_work`."""


def planned_for(sequences, length):
  """The plan of SmolLM2-135M-Instruct."""
  config = tiny.config(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
  )
  return plan.plan(config, sequences=sequences, length=length)


@pytest.mark.parametrize("method", BUILT)
def test_the_expected_time_has_what_maps_and_baselines_learn(method):
  seconds, rate = BUILT[method]
  expected = estimates.expected_seconds(planned_for(8, 2048), [method], rate=rate)
  assert 0.5 < expected / seconds < 2


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_expected_time_is_within_a_factor_of_two(case):
  method, sequences, length = case
  planned = planned_for(sequences, length)
  expect = lambda *names: estimates.expected_seconds(planned, names, None, 256, 104e9)
  assert 0.5 < expect(method) / MEASURED[case] < 2
  assert expect(method, "hires-next") > 2 * expect(method)
  timed = lambda tests, of_these: estimates.expected_seconds(
    planned, [method], None, tests, 104e9, compared_tokens=of_these
  )
  # A method's own pass and the float model's, and both again to compare them.
  alone, compared = timed(256, 0) - timed(0, 0), timed(256, 256) - timed(256, 0)
  assert compared == pytest.approx(alone)
  assert estimates.expected_seconds(planned, [method], "data=2") is None


def test_tables_fit_a_terminal_of_80_columns(monkeypatch):
  size = {"total": 153.8 * 2**20, "bf16_total": 256.6 * 2**20}
  size["quantized_linears"] = {"bits_per_weight": 7.88}
  row = {
    "method": "gptq:scales=static:order=activation",
    "perplexity": {"embedded test": {"mean": 1234.56, "spread": 2.0, "values": [1, 2]}},
    "float_perplexity": {"embedded test": 1200.0},
    "operator_error": 0.012345,
    "agreement": {"kl_mean": 0.12345, "flips": 0.3346},
    "size": size,
    "seconds": 12345.6,
  }
  failed = {"method": "batquant", "error": "ValueError: too little memory"}
  text = io.StringIO()
  monkeypatch.setattr(output, "STDOUT", Console(file=text, width=80))
  output.print_table(output.comparison_table([row, failed]))
  assert max(map(len, text.getvalue().splitlines())) <= 80
  words = text.getvalue().split()
  assert {"0.0123", "0.1235", "33.46%", "7.88", "153.8", "256.6", "failed"} <= set(
    words
  )
  assert "batquant: ValueError: too little memory" in text.getvalue()
  baseline = {key: row[key] for key in row if key != "float_perplexity"}
  beside = row | {"baseline": baseline | {"method": "rtn"}}
  names = [cells[0] for cells in output.comparison_table([beside]).rows]
  assert names == ["BF16", "rtn", row["method"]]
  plain = row | {"agreement": None, "operator_error": None}
  assert not {"KL", "flips", "operator error"} & set(
    output.comparison_table([plain]).head
  )


def test_the_command_that_resumes():
  words = ["quantize", "a folder", "--out", "x"]
  said = "mxjax quantize 'a folder' --out x --resume"
  assert stopping.resume_command(words) == said
  assert stopping.resume_command([*words, "--resume"]) == said


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


@pytest.mark.slow
def test_killed_processes_go_on_to_the_same_checkpoint(tmp_path, mxjax, refused):
  """One child dies in its second layer; the next is stopped by SIGINT in the third."""
  out = tmp_path / "out"
  model = square.write(tmp_path / "model")
  quantize = square.quantize(model, out, "mr-gptq", "--resume")
  with square.start(quantize, subprocess.PIPE) as first:
    assert 1 in layers_of(first)
    # Layer 0 is written behind the work on layer 1. With programs that are kept a layer
    # takes 30 ms, and a child that is killed after the last leaves none to stop in.
    state = out / "run/state.json"
    while not (state.is_file() and json.loads(state.read_bytes())["layers"]):
      assert first.poll() is None
      time.sleep(0.001)
    first.send_signal(signal.SIGKILL)
  assert first.wait(300) == -signal.SIGKILL
  with square.start(quantize, subprocess.PIPE) as second:
    assert next(layers_of(second)) >= 1
    # While it holds the folder, here at rest, nobody else gets in.
    second.send_signal(signal.SIGSTOP)
    assert "got another process; wait" in json.loads(refused(*quantize))["message"]
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
  size = layer.stat().st_size
  layer.write_bytes(layer.read_bytes()[:-1])
  fault = f"run/layers/layers_1.safetensors has {size - 1} bytes, not {size}."
  assert fault in mxjax("verify", out, as_json=False, code=1).splitlines()
  assert f"layers/layers_1.safetensors has {size - 1} bytes" in refused(*quantize)


def test_no_printed_text_acts_on_the_terminal(capsys):
  evil = "a\x1b[2J\x07\x9b1m\r\u202e\ud800\u2028é"
  escaped = "a\\x1b[2J\\x07\\x9b1m\\r\\u202e\\ud800\\u2028é"
  assert printable(evil + "\n\t") == escaped + "\n\t"
  output.say(evil)
  cli._report(argparse.Namespace(log="text", command="quantize"), "error", evil)
  printed = capsys.readouterr()
  assert escaped in printed.out.replace("\n", "")
  assert printed.err == f"mxjax quantize: {escaped}\n"
