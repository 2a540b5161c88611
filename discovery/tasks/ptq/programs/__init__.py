"""Whole methods of the library as programs of the task: source text, never imported."""

import importlib.resources


def source(name: str) -> str:
  """Returns the source of a program: `gptq`, `hires` or `wush`."""
  return (importlib.resources.files(__name__) / f"{name}.py").read_text()
