"""What commands load before they begin."""

import argparse

from mxjax import models
from mxjax.cli import demo, inputs
from mxjax.models.loading import gguf


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
