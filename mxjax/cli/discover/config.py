"""One config of a run or a study: a TOML file, or lines of one by `--set KEY=VALUE`.

Its options have the names of the command line and become words before those of it, so
both are read and checked by the same parser; `--set` wins over the file, and the
command line over both. A key of a table has its name before it, as in
`--set task-options.seed=3`. An example::

    task = "world"
    proposer = "llm"
    max-tokens = 2_000_000  # in and out
    max-cost = 5.0          # dollars

    endpoint = "https://example.org/v1"
    endpoint-model = "large"
    prices = [2.0, 8.0]     # dollars a million tokens, in and out
    deadline = 120          # seconds for a request with its retries
    probe-seconds = 60      # seconds for its first word, before the run begins
    key-variable = "KEY"    # environment variable of its key

    [task-options]
    seed = 3
"""

import argparse
import itertools
import json
import pathlib
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from mxjax.cli import options as shared
from mxjax.errors import ValueRefusal
from mxjax.intake import texts

UNSET = ("help", "config", "set")


class Parser(shared.Parser):
  """A parser that reads the file of its option `--config`, if it has that option.

  The parsed options hold `resolved`, the value of every option by its name.

  Attributes:
    holder: The parser whose options the file may hold; those that this one does not
      have are left alone.
  """

  holder: "Parser | None" = None

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses like `options.Parser`, with the words of the file first."""
    if "--config" not in self._option_string_actions:
      return super().parse_known_args(args, namespace)
    # Found before the parser itself runs: options that it requires may stand in the
    # file.
    finder = argparse.ArgumentParser(add_help=False)
    # With `nargs`, an option without a value passes here, and the parser itself refuses
    # it.
    finder.add_argument("--config", nargs="?")
    finder.add_argument("--set", nargs="?", action="append", default=[])
    found = finder.parse_known_args(args)[0]
    try:
      table = _read(found.config) if found.config else {}
      before = self._words(found.config, table)
      before += self._words("--set", _set(filter(None, found.set)))
    except (ValueError, OSError) as error:
      self.error(str(error))
    # A name that comes first stays so, or an array of the file would go on into it.
    given = [*(args or ())]
    first = [*itertools.takewhile(lambda word: not word.startswith("-"), given)]
    words = [*first, *before, *given[len(first) :]]
    options, rest = super().parse_known_args(words, namespace)
    options.resolved = {
      name: getattr(options, action.dest) for name, action in self.named().items()
    }
    return options, rest

  def named(self) -> dict[str, argparse.Action]:
    """Returns the options that a file may hold, by name."""
    return {
      action.option_strings[0][2:]: action
      for action in self._actions
      if action.option_strings and action.dest not in UNSET
    }

  def _words(self, path: str, table: Mapping[str, Any]) -> list[str]:
    known, mine, words = (self.holder or self).named(), self.named(), []
    for name, value in table.items():
      if name not in known:
        raise ValueRefusal(
          path,
          expected="options of this command",
          got=repr(name),
          mend=texts.mend(name, known) or "leave it out",
        )
      if name in mine:
        words += _option(path, name, value, mine[name])
    return words


def _read(path: str) -> dict[str, Any]:
  """Returns a TOML file.

  Raises:
    ValueError: It is none.
  """
  try:
    return tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
  except (ValueError, RecursionError) as error:
    raise ValueRefusal(
      path,
      expected="TOML in UTF-8",
      got=f"what does not read ({error})",
      mend="correct the file",
    ) from None


def _set(given: Iterable[str]) -> dict[str, Any]:
  """Returns the table that `KEY=VALUE`s make; what is no TOML value is text.

  Raises:
    ValueError: One has no key, or a key stands for a value and for a table.
  """
  table: dict[str, Any] = {}
  for line in given:
    key, is_set, text_ = line.partition("=")
    *path, name = key.strip().split(".")
    if not is_set or not all((*path, name)):
      raise ValueRefusal(
        "--set",
        expected="KEY=VALUE, as in seed=3 or task-options.objective=kl",
        got=repr(line),
        mend="write it so",
      )
    try:
      # As TOML first, so that 3 is a number and true a boolean; a bare word is none of
      # it, and is text.
      value = tomllib.loads(f"value = {text_}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
      value = text_
    inner = table
    for part in path:
      inner = inner.setdefault(part, {})
      if not isinstance(inner, dict):
        raise ValueRefusal(
          "--set",
          expected="a key that stands for a value, or for a table",
          got=f"both for {part!r}",
          mend="leave one out",
        )
    inner[name] = value
  return table


def _option(path: str, name: str, value: Any, action: argparse.Action) -> list[str]:
  """Returns the words for one option.

  Raises:
    ValueError: The value is of another kind than the option's.
  """
  expected = "a number or text"
  if action.nargs == 0:
    expected = "true or false"
    if isinstance(value, bool):
      return [f"--{'' if value else 'no-'}{name}"]
  elif action.metavar == "JSON":
    expected = "a table, an array of tables or JSON text"
    if isinstance(value, str):
      # In one word, so that a value may begin with a dash.
      return [f"--{name}={value}"]
    if isinstance(value, dict | list):
      return [f"--{name}={_json(path, name, value)}"]
  elif action.nargs is not None:
    expected = "an array"
    if isinstance(value, list):
      return [f"--{name}", *map(str, value)]
  elif isinstance(value, int | float | str) and not isinstance(value, bool):
    return [f"--{name}={value}"]
  raise ValueRefusal(f"{path}: {name}", expected, got=repr(value))


def _json(path: str, name: str, value: Any) -> str:
  try:
    return json.dumps(value, allow_nan=False)
  except (TypeError, ValueError) as error:
    # TOML has dates, times and infinities, which JSON does not.
    raise ValueRefusal(
      f"{path}: {name}",
      expected="what JSON can hold",
      got=f"what it cannot ({error})",
      mend="write it as text",
    ) from None


def text(resolved: Mapping[str, Any]) -> str:
  """Returns options as a file that `--config` reads; those without a value are out."""
  lines = []
  for name, value in resolved.items():
    if value is not None:
      # A JSON text, number or array of these is TOML, but for one control character.
      written = json.dumps(value, ensure_ascii=False, default=str)
      lines.append(f"{name} = {written}\n".replace("\x7f", r"\u007f"))
  return "".join(lines)
