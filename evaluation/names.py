"""How models are named in commands and results; light, because help reads it."""

import os

DEFAULT_MODEL = "SmolLM2-135M"
"""Name of the embedded model."""


def short_name(model: str) -> str:
  """Returns the last part of a model's path or hub id, also of `.` and `..`."""
  return os.path.basename(os.path.abspath(model))


def source(model: str) -> str | None:
  """Returns what loads a model of this name: None for the embedded one."""
  return None if model == DEFAULT_MODEL else model
