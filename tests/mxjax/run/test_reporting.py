"""Nothing is silent: lines by layer, and a thread that speaks while work goes on."""

import logging
import pathlib
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.calibration.calibration import Calibration
from mxjax.run import reporting
from mxjax.run.progress import SANITY, Progress

LAYERS = [
  Progress(0, 2, "calibration", 0.0),
  Progress(0, 2, "quantization", 0.25),
  Progress(0, 2, "q_proj", 0.25),
  Progress(1, 2, "calibration", 0.5),
  Progress(1, 2, SANITY, 1.0),
]


def test_a_heartbeat_speaks_while_nothing_returns():
  said = []
  with reporting.Heartbeat(said.append, "loading", 0.05) as heartbeat:
    time.sleep(0.2)
    heartbeat.at("layer 1/2")
    before = len(said)
    time.sleep(0.2)
  assert said[0].startswith("still at loading, for 0 s")
  assert len(said) > before > 0 and said[-1].startswith("still at layer 1/2, for")
  ended = len(said)
  time.sleep(0.1)
  assert len(said) == ended


def test_a_heartbeat_tells_what_is_left_of_what_was_left():
  beat = reporting.Heartbeat(print, "layer 1/2")
  beat.at("layer 2/2", 90.0)
  assert re.fullmatch(r"still at layer 2/2, for 0 s; about (89|90) s left", beat.line())
  beat.at("layer 2/2", 0.0)
  assert beat.line() == "still at layer 2/2, for 0 s"


def test_a_heartbeat_is_silent_while_others_speak():
  said = []
  with reporting.Heartbeat(said.append, "loading", 0.5) as heartbeat:
    for _ in range(8):
      time.sleep(0.1)
      heartbeat.spoke()
  assert not said


def test_a_heartbeat_names_what_compiles(monkeypatch):
  monkeypatch.setattr(reporting, "BRIEF", 0.0)
  beat = reporting.Heartbeat(print, "layer 1/2")
  with beat:
    jax.monitoring.record_scalar(reporting.COMPILING, 0.0, fun_name="jit(layer)")
    assert "; compiling jit(layer), for 0 s" in beat.line()
    jax.monitoring.record_event_duration_secs(reporting.COMPILING, 1.0)
    assert "compiling" not in beat.line()


def test_jax_tells_when_a_compilation_begins_and_ends():
  begun, ended = [], []
  start = lambda event, value, **facts: begun.append((event, facts.get("fun_name")))
  end = lambda event, value, **facts: ended.append((event, facts.get("fun_name")))
  jax.monitoring.register_scalar_listener(start)
  jax.monitoring.register_event_duration_secs_listener(end)
  try:

    def never_compiled_before(x):
      return x * 3.14159 + 2.71828

    jax.jit(never_compiled_before)(jnp.ones(7))
  finally:
    jax.monitoring.unregister_scalar_listener(start)
    jax.monitoring.unregister_event_duration_listener(end)
  program = (reporting.COMPILING, "jit(never_compiled_before)")
  assert program in begun and program in ended


def test_a_line_for_each_layer_and_each_stage_outside_them():
  said = []
  follow = reporting.lines("gptq", said.append)
  tuned = [Progress(1, 2, f"scale distillation {i}/8, KL 0.1", 0.9) for i in range(3)]
  for now in (*LAYERS, *tuned):
    follow(now)
  heads = [line.partition(" (")[0] for line in said]
  assert heads == [
    "gptq, layer 1/2",
    "gptq, layer 2/2",
    "gptq, sanity gate",
    "gptq, scale distillation 0/8, KL 0.1",
  ]
  assert "(0% after 0 s, compiling as the first)" in said[0]
  assert "(50% after 0 s)" in said[1] and ", about 0 s left)" in said[3]


def test_logging_that_a_program_has_configured_is_used_as_it_is(caplog, capsys):
  with caplog.at_level(logging.INFO, "mxjax"), reporting.logged("rtn") as follow:
    follow(LAYERS[0])
  assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
    "rtn, layer 1/2"
  ]
  assert not capsys.readouterr().err
  caplog.clear()
  with caplog.at_level(logging.WARNING, "mxjax"), reporting.logged("rtn") as follow:
    follow(LAYERS[0])
  assert not caplog.records


def test_without_any_logging_the_lines_go_to_stderr(monkeypatch, capsys):
  # The handlers of the test runner are at the root.
  monkeypatch.setattr(reporting.LOGGER, "propagate", False)
  with reporting.logged("rtn") as follow:
    follow(LAYERS[0])
  assert capsys.readouterr().err.startswith("mxjax: rtn, layer 1/2 (0%")
  assert not reporting.LOGGER.handlers
  assert reporting.LOGGER.level == logging.NOTSET


@pytest.mark.parametrize("given", [None, lambda now: None], ids=["default", "own"])
def test_quantize_logs_unless_its_caller_follows(
  given, tiny_model, tiny_params, tiny_tokens, caplog
):
  calib = Calibration(tiny_model, tiny_tokens[:2])
  with caplog.at_level(logging.INFO, "mxjax"):
    mxjax.quantize(tiny_params, calib, "rtn", on_progress=given)
  said = [record.getMessage() for record in caplog.records]
  wanted = ["rtn, layer 1/2", "rtn, layer 2/2", "rtn, sanity gate"]
  begun = [any(line.startswith(head) for line in said) for head in wanted]
  assert begun == [given is None] * 3


def test_the_pages_callback_logs_to_tensorboard(
  tiny_model, tiny_params, tiny_tokens, monkeypatch
):
  page = pathlib.Path(__file__).parents[3] / "docs/guides/quantize.md"
  blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
  (code,) = [block for block in blocks if "SummaryWriter" in block]
  scalars, texts = [], []

  class SummaryWriter:
    """What the page calls of TensorBoard's."""

    def __init__(self, log_dir):
      assert log_dir == "runs/log"

    def add_scalar(self, tag, scalar_value, global_step):
      scalars.append((tag, scalar_value, global_step))

    def add_text(self, tag, text_string, global_step):
      texts.append((tag, text_string, global_step))

  fake = types.ModuleType("torch.utils.tensorboard")
  fake.SummaryWriter = SummaryWriter
  for name in ("torch", "torch.utils"):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
  monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
  calib = Calibration(tiny_model, tiny_tokens[:2])
  exec(code, {"mxjax": mxjax, "params": tiny_params, "calib": calib})
  assert [step for *_, step in scalars] == list(range(1, len(scalars) + 1))
  values = [value for _, value, _ in scalars]
  assert values == sorted(values) and values[-1] == 1
  assert texts[0][1] == "layer 0: calibration" and len(texts) == len(scalars)
