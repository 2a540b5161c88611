"""The registry of quantization methods; each lives in a file of its own.

Their names are here without JAX, for the help texts of the command line.
"""

import dataclasses
import importlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mxjax.errors import ValueRefusal
from mxjax.intake import texts

if TYPE_CHECKING:
  from mxjax.methods import program

# Register a method with one line here. Its module is imported on first use, so that
# importing mxjax loads no optimizer library.
_REGISTERED = {
  "rtn": "program.RTN",
  "gptq": "gptq.GPTQ",
  "mr-gptq": "baselines.brq.MR_GPTQ",
  "brq": "baselines.brq.BRQ",
  "wush": "baselines.wush.WUSH",
  "torq": "baselines.torq.TORQ",
  "batquant": "baselines.batquant.BATQUANT",
  "spinquant": "baselines.spinquant.SPINQUANT",
  "focus": "baselines.focus.FOCUS",
  "wush+r": "baselines.wush.WUSH_R",
  "hires": "hires.hires.HIRES",
  "hires-descent": "hires.next.HIRES_DESCENT",
  "hires-next": "hires.next.HIRES_NEXT",
  "hires-rotated": "hires.next.HIRES_ROTATED",
  "map-descent": "hires.next.MAP_DESCENT",
  "map-search": "hires.next.MAP_SEARCH",
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


def _load(path: str) -> Any:
  module, _, attribute = path.rpartition(".")
  return getattr(importlib.import_module(f"mxjax.methods.{module}"), attribute)


class _Methods(Mapping[str, "program.Program"]):
  """The registered programs by name, each imported on first use."""

  def __getitem__(self, name: str) -> "program.Program":
    return _load(_REGISTERED[name])

  def __iter__(self) -> Iterator[str]:
    return iter(_REGISTERED)

  def __len__(self) -> int:
    return len(_REGISTERED)


METHODS: "Mapping[str, program.Program]" = _Methods()
"""Every registered method by name."""


def __getattr__(name: str) -> "program.Program":
  """Returns a registered program by its constant's name, such as `methods.HIRES`."""
  for path in _REGISTERED.values():
    if path.rpartition(".")[2] == name:
      return _load(path)
  raise AttributeError(f"module 'mxjax.methods' has no attribute {name!r}")


def base_name(method: str) -> str:
  """Returns the registered name in a method with options, `+r` and `+tune`."""
  name = method.partition("+tune")[0].partition(":")[0]
  plain = name.removesuffix("+r")
  # `wush+r` is a method of its own. With a second +r it stays whole, and so is unknown.
  return name if name in METHODS or plain.endswith("+r") else plain


def get(method: "str | program.Program") -> "program.Program":
  """Looks a program up by name; a `Program` is checked and returned unchanged.

  `method` may carry options, such as `gptq:scales=static:order=activation`, among them
  `recover`, whose value `stage3.parse` reads: `hires:recover=attention`, and
  `activations=float` for the weight-only form; see `Program.activations`. After
  the name, `+r` adds HiRes' recovery to any method. It may end in `+tune` for scale
  distillation, with options of its own, such as `hires:weighting=fisher+tune:epochs=2`.
  The program is then named by the whole text.

  Raises:
    ValueError: The name or an option is unknown, an option is given twice, or a value
      has the wrong type or is out of bounds; a recovery fit occurs twice; or inputs
      stay float in a method that is about A4.
  """
  if not isinstance(method, str):
    return _checked(method)
  base, tuned, tuning = method.partition("+tune")
  text, *settings = base.split(":")
  name = base_name(text)
  if name not in METHODS or (tuning and not tuning.startswith(":")):
    raise ValueRefusal(
      "methods",
      expected=f"one of {', '.join(METHODS)}, if you like with +r or +tune behind it, "
      "or a Program",
      got=repr(method),
    )
  program = METHODS[name]
  if name != text:
    program = dataclasses.replace(program, recover=METHODS["hires"].recover)
  if settings:
    program = _with_options(name, program, settings)
  if tuned:
    # Settings behind +tune change the method's own tuning where it has one.
    tune = program.tune or _load("scale_distillation.ScaleDistillation")()
    tune = _with_options("+tune", tune, tuning.split(":")[1:])
    program = dataclasses.replace(program, tune=tune)
  return _checked(
    program if method == name else dataclasses.replace(program, name=method)
  )


def _checked(program: "program.Program") -> "program.Program":
  from mxjax.methods import options

  options.check(program.name, program)
  if program.tune is not None:
    options.check(f"the tuning of {program.name}", program.tune)
  _check_without_a4(program)
  fits = [fit.name for fit in program.recover]
  if len({*fits}) < len(fits):
    raise ValueRefusal(
      "methods",
      expected=f"each recovery fit of {program.name} once, because a later one would "
      "take the place of the first",
      got=" and ".join(fits),
      mend="leave one out",
    )
  return program


def _check_without_a4(program: "program.Program") -> None:
  """Rejects `activations=float` where a method, or a fit of it, is about A4.

  Raises:
    ValueError: It is.
  """
  if program.activations == "mxfp4":
    return
  if program.needs_a4:
    raise ValueRefusal(
      "methods",
      expected=f"{program.name} to round its inputs, because {program.needs_a4}",
      got=f"activations={program.activations}",
      mend="choose a method whose codes do not come from A4, such as gptq or hires",
    )
  if early := [fit.label for fit in program.recover if fit.on == "unrounded"]:
    raise ValueRefusal(
      "methods",
      expected="fits of what the model computes, which has no A4 to leave out",
      got=f"{' and '.join(early)} beside activations={program.activations}",
      mend="leave -unrounded out",
    )


def _with_options(place: str, options: Any, settings: Sequence[str]) -> Any:
  """Returns a dataclass of options with some of them set; `place` is for messages."""
  if "" in settings:
    raise ValueRefusal(
      "methods",
      expected=f"option=value behind every colon of {place}",
      got="nothing behind one of them",
      mend="leave that colon out, or write an option behind it",
    )
  pairs = [_option(place, options, text) for text in settings]
  keys = [key for key, _ in pairs]
  if twice := sorted({key for key in keys if keys.count(key) > 1}):
    raise ValueRefusal(
      "methods",
      expected=f"each option of {place} once",
      got=f"{', '.join(twice)} more often",
      mend="leave one out",
    )
  chosen = dict(pairs)
  idle = [key for key in keys if key in getattr(options, "a4_options", ())]
  if idle and chosen.get("activations") == "float":
    raise ValueRefusal(
      "methods",
      expected=f"no {' and '.join(idle)} beside activations=float, which rounds no "
      "inputs",
      got=" and ".join(f"{key}={chosen[key]}" for key in idle),
      mend="leave one of them out",
    )
  return dataclasses.replace(options, **chosen)


def _option(place: str, program: Any, text: str) -> tuple[str, Any]:
  """Parses one `option=value`, with the value in the type of the dataclass's field."""
  key, equals, value = text.partition("=")
  # The name is the whole text, and `tune` is set by +tune.
  fields = {f.name for f in dataclasses.fields(program)} - {"name", "tune"}
  if not equals or key not in fields:
    known = sorted(fields)
    raise ValueRefusal(
      "methods",
      expected=f"option=value of an option of {place} ({', '.join(known)})",
      got=repr(text),
      mend=texts.mend(key, known),
    )
  if key == "recover":
    # Not at the top, because it loads JAX.
    from mxjax.methods.hires import stage3

    return key, stage3.parse(value)
  import pydantic

  from mxjax.methods import options

  # The extras are the bounds, see `options`.
  hint = typing.get_type_hints(type(program), include_extras=True)[key]
  adapter = pydantic.TypeAdapter(hint)
  try:
    # A name is taken as it is written, which as JSON would need quotes.
    if options.choices(hint):
      return key, adapter.validate_python(value)
    # Strict, or 1 would be taken for true and 2.0 for a count.
    return key, adapter.validate_json(value, strict=True)
  except pydantic.ValidationError as error:
    current = getattr(program, key)
    raise options.refusal(place, key, value, current, hint, error) from error
