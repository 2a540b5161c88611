"""Reads what a language model answered: JSON, code, and whatever stands around them."""

import json
import re
from collections.abc import Iterable
from typing import Any

from mxjax.errors import ValueRefusal

MAX_ANSWER = 262_144
"""Characters of an answer that are read."""
MAX_OBJECTS = 256
"""Braces at which an object is tried."""
MAX_COMMAS = 256
"""Trailing commas of a reply that are passed over."""
THINKING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.S | re.I)
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)\n?[ \t]*```", re.S | re.M)
CODE = ("python", "py", "jax", "")
CONSTANT = re.compile(r"^[A-Za-z_]\w*[ \t]*=(?!=)", re.M)
"""What makes a fence code that names its language, and has no function."""


def answer(text: str, keys: frozenset[str]) -> dict[str, Any]:
  """Returns the JSON object of an answer.

  Thinking tags, prose, fences in any order and case and a byte order mark are passed
  over, and so is a comma behind the last member of an object or an array, which leaves
  one way to read it. Of several objects, the last with one of `keys` is the answer. If
  none has one, but exactly one object inside them does, as in `{"answer": {...}}`, that
  is the answer; of two inside, neither is guessed. If the answer holds no code, that of
  a fence outside of it becomes its `code`.

  Raises:
    ValueError: The answer is too long, there is no such object, or none but several
      inside of others.
  """
  if len(text) > MAX_ANSWER:
    raise ValueRefusal(
      "answer",
      expected=f"at most {MAX_ANSWER} characters",
      got=len(text),
      mend="send only the hooks that you change",
    )
  text = _without_thinking(text.lstrip("\ufeff"))
  found, mended = _objects(text)
  last = None
  for start, end, value in found:
    if keys & value.keys():
      last = (start, end, value)
  if last is None:
    inside = [
      (start, end, each) for start, end, value in found for each in _inside(value, keys)
    ]
    if len(inside) > 1:
      raise ValueRefusal(
        "answer",
        expected=f"one JSON object with some of {_listed(keys)}",
        got=f"{len(inside)} inside of others",
        mend="answer with one of them alone",
      )
    last = next(iter(inside), None)
  if last is None:
    raise ValueError(_complaint(mended, found, keys))
  start, end, value = last
  if not {"code", "source"} & {k for k, v in value.items() if v}:
    outside = text[:start] + "\n" + text[end:]
    fences = [each for each in FENCE.findall(outside) if each[0].lower() in CODE]
    if code := [
      body
      for name, body in fences
      if "def " in body or (name and CONSTANT.search(body))
    ]:
      value = {**value, "code": "\n\n".join(code)}
  return {name: each for name, each in value.items() if each is not None}


def _without_thinking(text: str) -> str:
  text = THINKING.sub("", text)
  # Servers that cut the opening tag off leave the closing one.
  return re.split(r"</(?:think|thinking|reasoning)>", text, flags=re.I)[-1]


def _inside(value: Any, keys: frozenset[str]) -> list[dict[str, Any]]:
  """Returns the outermost objects inside of an object that have one of `keys`."""
  found = []
  for each in value.values():
    if isinstance(each, dict):
      found += [each] if keys & each.keys() else _inside(each, keys)
  return found


def _objects(text: str) -> tuple[list[tuple[int, int, dict[str, Any]]], str]:
  """Returns the outermost JSON objects of a text with their places.

  Second is the text in which they are JSON: spaces in place of trailing commas.
  """
  # Models break lines inside strings; JSON would have them escaped.
  decoder, found, at, commas = json.JSONDecoder(strict=False), [], 0, 0
  # Bounded, because every try may read to the end of the text before it fails.
  for _ in range(MAX_OBJECTS + MAX_COMMAS):
    if (at := text.find("{", at)) < 0:
      break
    try:
      value, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
      comma = _trailing_comma(text, error.pos)
      if comma is None or commas == MAX_COMMAS:
        at += 1
      else:
        # A space, so that places in the text stay what they are.
        text, commas = f"{text[:comma]} {text[comma + 1 :]}", commas + 1
      continue
    except RecursionError:
      at += 1
      continue
    found.append((at, end, value))
    at = end
  return found, text


def _trailing_comma(text: str, at: int) -> int | None:
  """Returns the place of the comma at which a decoder failed, if it is a trailing one.

  Python tells the place of the bracket behind it, and from 3.13 on that of the comma.
  """
  is_comma = text[at : at + 1] == ","
  before = text[: at + is_comma].rstrip()
  behind = text[at + is_comma :].lstrip()
  is_trailing = before.endswith(",") and behind[:1] in ("}", "]")
  # After another comma, a bracket or a colon, a member is missing.
  if not is_trailing or before[:-1].rstrip()[-1:] in (",", "{", "[", ":"):
    return None
  return len(before) - 1


def _complaint(
  text: str, found: list[tuple[int, int, dict[str, Any]]], keys: frozenset[str]
) -> str:
  told, at = f"expected one JSON object with some of {_listed(keys)}", text.find("{")
  if at < 0:
    return f"answer: {told}, got {text.strip()[:80]!r}; answer with the object."
  try:
    json.JSONDecoder(strict=False).raw_decode(text, at)
  except RecursionError:
    return f"answer: {told}, got one nested too deep; flatten it."
  except ValueError as error:
    return f"answer: {told}, got text that is no JSON: {error}; mend it."
  return f"answer: {told}, got one with {_listed(found[-1][2])[:200]}; mend it."


def _listed(names: Iterable[str]) -> str:
  return ", ".join(sorted(names))
