"""The registry of quantization methods; each lives in a file of its own.

Their names are here without JAX, for the help texts of the command line.
"""

import contextlib
import dataclasses
import importlib
import json
import typing
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
  from mxjax.methods.program import Program

# Register a method with one line here. Its module is imported on first use, so that
# importing mxjax loads no optimizer library.
_REGISTERED = {
  "rtn": "baselines.rtn.RTN",
  "gptq": "gptq.GPTQ",
  "mr-gptq": "baselines.mr_gptq.MR_GPTQ",
  "brq": "baselines.brq.BRQ",
  "wush": "baselines.wush.WUSH",
  "torq": "baselines.torq.TORQ",
  "batquant": "baselines.batquant.BATQUANT",
  "spinquant": "baselines.spinquant.SPINQUANT",
  "focus": "baselines.focus.FOCUS",
  "wush+r": "baselines.wush.WUSH_R",
  "hires": "hires.hires.HIRES",
  "hires-next": "hires.hires_next.HIRES_NEXT",
  "rtn+gain": "baselines.rtn_gain.RTN_GAIN",
  "rtn+rceil": "baselines.focus.RTN_RCEIL",
}

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


def _load(path: str) -> "Program":
  module, _, attribute = path.rpartition(".")
  return getattr(importlib.import_module(f"mxjax.methods.{module}"), attribute)


class _Methods(Mapping[str, "Program"]):
  """The registered programs by name, each imported on first use."""

  def __getitem__(self, name: str) -> "Program":
    return _load(_REGISTERED[name])

  def __iter__(self) -> Iterator[str]:
    return iter(_REGISTERED)

  def __len__(self) -> int:
    return len(_REGISTERED)


METHODS: "Mapping[str, Program]" = _Methods()
"""Every registered method by name."""


def __getattr__(name: str) -> "Program":
  """Returns a registered program by its constant's name, such as `methods.HIRES`."""
  for path in _REGISTERED.values():
    if path.rpartition(".")[2] == name:
      return _load(path)
  raise AttributeError(f"module 'mxjax.methods' has no attribute {name!r}")


def get(method: "str | Program") -> "Program":
  """Looks a program up by name; a `Program` is returned unchanged.

  `method` may carry options, such as `gptq:scales=static:order=activation`; the program
  is then named by the whole text.

  Raises:
    ValueError: The name or an option is unknown, or a value has the wrong type.
  """
  if not isinstance(method, str):
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


def _option(program: "Program", text: str) -> tuple[str, Any]:
  """Parses one `option=value`, with the value in the type of the program's field."""
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
