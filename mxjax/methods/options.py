"""Bounds of the options of methods, which `methods.get` checks."""

import inspect
import json
import typing
from typing import Annotated, Any, Literal

import pydantic

from mxjax.errors import ValueRefusal

Share = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least 0, such as a damping or a learning rate."""
Fraction = Annotated[float, pydantic.Field(ge=0, le=1, allow_inf_nan=False)]
"""A part of a whole, from 0 to 1."""
Factor = Annotated[float, pydantic.Field(ge=1, allow_inf_nan=False)]
"""A finite number of at least 1, such as a condition number."""
Count = Annotated[int, pydantic.Field(ge=0)]
Positive = Annotated[int, pydantic.Field(ge=1)]


def choices(hint: Any) -> tuple[Any, ...]:
  """Returns the names that a `Literal` allows; none for any other type."""
  return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def refusal(
  place: str, key: str, value: Any, default: Any, hint: Any, error: Any
) -> ValueRefusal:
  """Builds the error for a value that an option cannot have.

  The default is shown as one writes it in a method's name.
  """
  shown = default if isinstance(default, str) else json.dumps(default)
  first = error.errors(include_url=False)[0]
  expected = first["msg"].replace("Input should be", "a value that is")
  if first["type"] == "json_invalid":
    expected = "a value written as in JSON"
  if known := choices(hint):
    expected = f"one of {', '.join(map(str, known))}"
  return ValueRefusal(
    f"methods: option {key} of {place}",
    expected=expected,
    got=repr(value),
    mend=f"leave it out for the default, {shown}",
  )


def _is_bounded(hint: Any) -> bool:
  return typing.get_origin(hint) in (Literal, Annotated) or any(
    map(_is_bounded, typing.get_args(hint))
  )


def check(place: str, options: Any) -> None:
  """Checks the options that classes of this library bound; `place` names the method.

  Raises:
    ValueError: A value is none of an option's names, or out of its bounds.
  """
  for cls in type(options).__mro__:
    if cls.__module__.partition(".")[0] != "mxjax":
      continue
    # Those of this class alone: a field is bounded by the class that declares it.
    for key, hint in inspect.get_annotations(cls, eval_str=True).items():
      if not _is_bounded(hint):
        continue
      value = getattr(options, key)
      try:
        pydantic.TypeAdapter(hint).validate_python(value)
      except pydantic.ValidationError as error:
        raise refusal(place, key, value, getattr(cls, key), hint, error) from error
