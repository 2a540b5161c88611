"""Whole methods of the library as programs of the task: source text, never imported."""

import functools
import importlib.resources
from collections.abc import Mapping

from mxjax.discovery.core import candidate_source

FILES: Mapping[str, tuple[str, ...]] = {
  "gptq": ("gptq",),
  "wush": ("wush",),
  "recovery": ("recovery",),
  "hires": ("hires", "gptq", "recovery"),
}
"""Files of each program; the first has its plan and wins where two define a name."""
NAMES = tuple(FILES)


def source(name: str) -> str:
  """Returns the source of one of `NAMES`."""
  folder = importlib.resources.files(__name__)
  texts = [(folder / f"{file}.py").read_text() for file in FILES[name]]
  return functools.reduce(
    lambda whole, part: candidate_source.with_functions(whole, part, replace=False),
    texts,
  )
