"""Strict parsing of what run workers answer, which may be anything."""

import json
import os
import re
from typing import Any

from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox import processor


def strict_json(data: bytes) -> Any:
  """Parses JSON without NaN, infinities or repeated keys.

  Raises:
    ValueError: The data is not such JSON; the message names the fault.
  """

  def distinct(items: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(items)) != len(items):
      raise ValueError(f"repeated keys in {[key for key, _ in items]}")
    return dict(items)

  def refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

  return json.loads(data, object_pairs_hook=distinct, parse_constant=refuse)


def parse(head: bytes) -> dict[str, Any]:
  """Parses the answer of a run worker, whose values `Outcome` checks.

  Raises:
    ValueError: It is none; the message names the fault.
  """
  answer = strict_json(head)
  parts = {"status": str, "detail": str, "values": dict, "outputs": dict}
  if not isinstance(answer, dict) or not all(
    isinstance(answer.get(name, kind()), kind) for name, kind in parts.items()
  ):
    raise ValueError(f"no answer: {head[:100]!r}")
  if not all(isinstance(value, str) for value in answer.get("outputs", {}).values()):
    raise ValueError(f"outputs that are no digests: {answer['outputs']!r:.100}")
  processor.checked(answer.get("processor", {}))
  return {"detail": "", **answer, "status": Status(answer.get("status", ""))}


def unfinished(file: int, limit: float) -> str:
  """Says what a call that used up `limit` processor seconds had spent them on.

  `file` is the open file that its `processor.Meter` wrote into. Nothing is said of a
  call that left no record there, or something else.
  """
  try:
    now, spent = strict_json(os.pread(file, processor.RECORD, 0))
    spent = processor.checked({now: 0.0, **spent})
  except (ValueError, TypeError, RecursionError):
    return ""
  # The part that was being worked on has what is left of the limit.
  spent[now] += max(limit - sum(spent.values()), 0.0)
  parts = sorted(spent.items(), key=lambda part: (-part[1], part[0]))
  told = ", ".join(f"{name} {each:.3g}" for name, each in parts if each >= 0.05)
  return f"{told}; {now} had not ended"


def is_identity(value: Any) -> bool:
  """Returns whether a value is a SHA-256 in hex."""
  return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
