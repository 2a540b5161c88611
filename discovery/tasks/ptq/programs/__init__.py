"""Whole methods of the library as programs of the task: source text, never imported."""

import importlib.resources

NAMES = ("gptq", "wush", "hires")


def source(name: str) -> str:
  """Returns the source of one of `NAMES`."""
  return (importlib.resources.files(__name__) / f"{name}.py").read_text()
