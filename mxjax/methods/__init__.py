"""The quantizers, one readable file each, and their names."""

import dataclasses
import json
import typing
from typing import Any, Literal

from mxjax.methods.baselines.batquant import BATQUANT
from mxjax.methods.baselines.brq import BRQ
from mxjax.methods.baselines.focus import FOCUS, RTN_RCEIL
from mxjax.methods.baselines.mr_gptq import MR_GPTQ
from mxjax.methods.baselines.rtn import RTN
from mxjax.methods.baselines.rtn_gain import RTN_GAIN
from mxjax.methods.baselines.spinquant import SPINQUANT
from mxjax.methods.baselines.torq import TORQ
from mxjax.methods.baselines.wush import WUSH, WUSH_R, Wush
from mxjax.methods.gptq import GPTQ
from mxjax.methods.hires.hires import HIRES, HiRes
from mxjax.methods.hires.hires_next import HIRES_NEXT
from mxjax.methods.program import Program

METHODS: dict[str, Program] = {
  program.name: program
  for program in (
    RTN,
    GPTQ,
    MR_GPTQ,
    BRQ,
    WUSH,
    TORQ,
    BATQUANT,
    SPINQUANT,
    FOCUS,
    WUSH_R,
    HIRES,
    HIRES_NEXT,
    RTN_GAIN,
    RTN_RCEIL,
  )
}
"""The paper's nine baselines, WUSH with our refinement, HiRes, what we made of it, and
two controls."""

PAPER_METHODS = tuple(
  name for name in METHODS if "+" not in name and name != HIRES_NEXT.name
)
"""The ten rows of the paper's comparison, HiRes last."""


def get(method: str | Program) -> Program:
  """Looks a program up by name, or passes one through.

  Args:
    method: A program, a name in `METHODS`, or a name with options such as
      `gptq:scales=static:order=activation`; the result carries the whole text as its
      name.

  Raises:
    ValueError: An unknown name or option, or a value of the wrong type.
  """
  if isinstance(method, Program):
    return method
  name, *settings = method.split(":")
  if name not in METHODS:
    raise ValueError(
      f"methods: unknown method {name!r}; use one of {', '.join(METHODS)} or pass a "
      "Program."
    )
  if not settings:
    return METHODS[name]
  options = dict(_option(METHODS[name], text) for text in settings)
  return dataclasses.replace(METHODS[name], name=method, **options)


def _option(program: Program, text: str) -> tuple[str, Any]:
  """One `option=value` of a program, with the value in the type of the field."""
  key, equals, value = text.partition("=")
  fields = {f.name for f in dataclasses.fields(program)} - {"name", "recover"}
  if not equals or key not in fields:
    raise ValueError(
      f"methods: {program.name} has no option {text!r}; write one of "
      f"{', '.join(sorted(fields))} as option=value."
    )
  hint = typing.get_type_hints(type(program))[key]
  choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else None
  try:
    parsed = value if choices else json.loads(value, parse_constant=float)
  except ValueError:
    parsed = value
  if isinstance(parsed, list):
    parsed = tuple(parsed)
  current = getattr(program, key)
  wrong = choices is not None and parsed not in choices
  if isinstance(current, bool) or isinstance(current, str):
    wrong |= type(parsed) is not type(current)
  elif isinstance(current, (int, float)):
    wrong |= not isinstance(parsed, (int, float)) or isinstance(parsed, bool)
  if wrong:
    raise ValueError(
      f"methods: option {key} of {program.name} cannot be {value!r}; its default is "
      f"{current!r}" + (f" of {', '.join(map(str, choices))}." if choices else ".")
    )
  return key, float(typing.cast(float, parsed)) if isinstance(
    current, float
  ) else parsed


__all__ = [
  "BATQUANT",
  "BRQ",
  "FOCUS",
  "GPTQ",
  "HIRES",
  "HIRES_NEXT",
  "METHODS",
  "MR_GPTQ",
  "PAPER_METHODS",
  "RTN",
  "RTN_GAIN",
  "RTN_RCEIL",
  "SPINQUANT",
  "TORQ",
  "WUSH",
  "WUSH_R",
  "HiRes",
  "Program",
  "Wush",
  "get",
]
