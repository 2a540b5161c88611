"""What commands load before they begin."""

import argparse

from mxjax import models
from mxjax.cli import demo, inputs, quantize
from mxjax.cli import options as shared
from mxjax.models.loading import embedded, gguf


def test_a_command_reads_the_header_of_its_model_once(monkeypatch):
  parser = argparse.ArgumentParser()
  demo.add_parser(parser.add_subparsers())
  options = parser.parse_args(["demo"])
  options.log = "none"
  read, actual = [], gguf._read_header
  monkeypatch.setattr(gguf, "_read_header", lambda at: read.append(at) or actual(at))
  loaded = lambda name, *_, **__: models.load_tokenizer(name)
  monkeypatch.setattr(inputs.subjects, "prepare", loaded)
  assert inputs.prepare(options).encode("a text").size
  assert len(read) == 1


def test_the_memory_of_what_tuning_learns_is_told_before():
  parser = argparse.ArgumentParser()
  quantize.add_parser(parser.add_subparsers())
  model = embedded.trained_folder("llama")
  options = parser.parse_args(["quantize", str(model), "--out", "x"])
  config = models.load_config(model, dtype="float32")
  shared.fit_lengths(options, config.max_positions)
  tell = lambda *names: inputs._announcement(options, config, names, on_disk=False)
  of_memory = lambda *names: [line for line in tell(*names) if "memory" in line]
  [plain] = of_memory("rtn+tune")
  # 16 and 24 bytes for each of 786,432 weights, and of methods the one with the most.
  told = f"{plain}, and 12 MiB more while tuning learns, which takes 18 MiB of a run "
  told += "folder"
  assert of_memory("rtn", "rtn+tune:code_rate=0.03") == [told]
