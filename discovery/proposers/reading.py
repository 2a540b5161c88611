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
THINKING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.S | re.I)
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)\n?[ \t]*```", re.S | re.M)
CODE = ("python", "py", "jax", "")


def answer(text: str, keys: frozenset[str]) -> dict[str, Any]:
  """Returns the JSON object of an answer.

  Thinking tags, prose, fences in any order and case and a byte order mark are passed
  over. Of several objects, the last with one of `keys` is the answer. If it holds no
  code, that of a fence outside of it becomes its `code`.

  Raises:
    ValueError: The answer is too long, or there is no such object.
  """
  if len(text) > MAX_ANSWER:
    raise ValueRefusal(
      "answer",
      expected=f"at most {MAX_ANSWER} characters",
      got=len(text),
      mend="send only the hooks that you change",
    )
  text = _without_thinking(text.lstrip("\ufeff"))
  found, last = _objects(text), None
  for start, end, value in found:
    if keys & value.keys():
      last = (start, end, value)
  if last is None:
    raise ValueError(_complaint(text, found, keys))
  start, end, value = last
  if not {"code", "source"} & {k for k, v in value.items() if v}:
    outside = text[:start] + "\n" + text[end:]
    fences = [body for name, body in FENCE.findall(outside) if name.lower() in CODE]
    if code := [body for body in fences if "def " in body]:
      value = {**value, "code": "\n\n".join(code)}
  return {name: each for name, each in value.items() if each is not None}


def _without_thinking(text: str) -> str:
  text = THINKING.sub("", text)
  # Servers that cut the opening tag off leave the closing one.
  return re.split(r"</(?:think|thinking|reasoning)>", text, flags=re.I)[-1]


def _objects(text: str) -> list[tuple[int, int, dict[str, Any]]]:
  """Returns the outermost JSON objects of a text with their places."""
  # Models break lines inside strings; JSON would have them escaped.
  decoder, found, at = json.JSONDecoder(strict=False), [], 0
  # Bounded, because every try may read to the end of the text before it fails.
  for _ in range(MAX_OBJECTS):
    if (at := text.find("{", at)) < 0:
      break
    try:
      value, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
      at += 1
      continue
    found.append((at, end, value))
    at = end
  return found


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
