"""The quantizers, one readable file each, and their names."""

import contextlib
import dataclasses
import json
import typing
from typing import Any, Literal

# A method is registered by one line here: METHODS has every program that is imported.
from mxjax.methods.baselines.batquant import BATQUANT as BATQUANT
from mxjax.methods.baselines.brq import BRQ as BRQ
from mxjax.methods.baselines.focus import FOCUS as FOCUS
from mxjax.methods.baselines.focus import RTN_RCEIL as RTN_RCEIL
from mxjax.methods.baselines.mr_gptq import MR_GPTQ as MR_GPTQ
from mxjax.methods.baselines.rtn import RTN as RTN
from mxjax.methods.baselines.rtn_gain import RTN_GAIN as RTN_GAIN
from mxjax.methods.baselines.spinquant import SPINQUANT as SPINQUANT
from mxjax.methods.baselines.torq import TORQ as TORQ
from mxjax.methods.baselines.wush import WUSH as WUSH
from mxjax.methods.baselines.wush import WUSH_R as WUSH_R
from mxjax.methods.gptq import GPTQ as GPTQ
from mxjax.methods.hires.hires import HIRES as HIRES
from mxjax.methods.hires.hires_next import HIRES_NEXT as HIRES_NEXT
from mxjax.methods.program import Program as Program

PAPER_METHODS = (
  "rtn",
  "gptq",
  "mr-gptq",
  "brq",
  "wush",
  "torq",
  "batquant",
  "spinquant",
  "focus",
  "hires",
)
"""The ten rows of the paper's comparison, HiRes last."""

_PROGRAMS = {p.name: p for p in list(vars().values()) if isinstance(p, Program)}
METHODS: dict[str, Program] = {
  name: _PROGRAMS[name] for name in (*PAPER_METHODS, *sorted(_PROGRAMS))
}
"""Every registered method by name: those of the paper, then all others."""


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
  choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
  parsed: Any = value
  if not choices:
    with contextlib.suppress(ValueError):
      parsed = json.loads(value, parse_constant=float)
  if isinstance(parsed, list):
    parsed = tuple(parsed)
  current = getattr(program, key)
  wrong = bool(choices) and parsed not in choices
  if isinstance(current, (bool, str)):
    wrong |= type(parsed) is not type(current)
  elif isinstance(current, (int, float)):
    wrong |= not isinstance(parsed, (int, float)) or isinstance(parsed, bool)
  if wrong:
    raise ValueError(
      f"methods: option {key} of {program.name} cannot be {value!r}; its default is "
      f"{current!r}" + (f" of {', '.join(map(str, choices))}." if choices else ".")
    )
  return key, float(parsed) if isinstance(current, float) else parsed
