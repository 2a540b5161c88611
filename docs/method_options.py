"""Prints the page of every method's options and defaults, from the code.

  python docs/method_options.py > docs/reference/method_options.md

A test compares the page with what this prints.
"""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Collection, Iterator
from typing import Any

from mxjax import methods
from mxjax.methods import options

HEAD = """\
# Options of methods

Which options does a method have, and what is their default? An option follows the name
after a colon, as in `gptq:damping=0.05`, and several follow one another, as in
`gptq:scales=static:order=activation`. The options of `+tune` are written behind it, as
in `brq+tune:epochs=2`. Attributes of the same names are described in the docstrings of
the [methods](methods.rst). This page is printed by `docs/method_options.py`.
"""
NO_OPTIONS = ("name", "tune", "recover")
"""Fields that a name has in other forms: the name itself, `+tune`, `recover=`."""


def shown(value: Any) -> str:
  """Returns a value as one writes it in a method's name."""
  return value if isinstance(value, str) else json.dumps(value)


def rows(settings: Any, without: Collection[str] = ()) -> Iterator[str]:
  """Yields the table of the options of a program or of its tuning."""
  hints = typing.get_type_hints(type(settings))
  yield "\n| option | default | meaning |"
  yield "| --- | --- | --- |"
  described = documented(type(settings))
  for field in dataclasses.fields(settings):
    if field.name in NO_OPTIONS or field.name in without:
      continue
    names = [shown(name) for name in options.choices(hints[field.name])]
    default = shown(getattr(settings, field.name))
    others = ", ".join(f"`{name}`" for name in names if name != default)
    says = described.get(field.name, "") + (f" Or: {others}." if others else "")
    yield f"| `{field.name}` | `{default}` | {says} |"


def documented(cls: type) -> dict[str, str]:
  """Returns what the docstrings of a class and its bases say of each attribute."""
  said: dict[str, str] = {}
  for each in reversed(cls.__mro__):
    text = inspect.cleandoc(each.__dict__.get("__doc__") or "")
    section = re.search(r"Attributes:\n(.*?)(?:\n\n\S|\Z)", text, re.DOTALL)
    entry = r"^  (\w+): (.*?)(?=^  \w|\Z)"
    for name, what in re.findall(entry, section[1] if section else "", re.M | re.S):
      said[name] = " ".join(what.split()).replace("|", "\\|")
  return said


def page() -> str:
  """Returns the page."""
  rtn, tune = methods.METHODS["rtn"], methods.METHODS["hires-next"].tune
  common = {field.name for field in dataclasses.fields(rtn)}
  parts = [HEAD, "## Every method", *rows(rtn), ""]
  for name, program in methods.METHODS.items():
    table = [*rows(program, common)]
    if table[2:]:
      parts += [f"## {name}", *table, ""]
  return "\n".join([*parts, "## +tune", *rows(tune), ""])


if __name__ == "__main__":
  print(page(), end="")
