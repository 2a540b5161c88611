"""What a run's journal says: its events, the files of its last state, and leftovers."""

import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import pydantic

from mxjax.intake.reading import refusing
from mxjax.storage.atomic_io import PARTIAL
from mxjax.storage.sealed import Digest
from mxjax.storage.tree_io import Nodes

FOLDERS = ("gradients", "layers", "prepared", "streams", "tuning")
SCRATCH = "scratch-"
"""Begins the names of folders that only one process uses."""
Event = dict[str, Any]
_NAME = rf"^({'|'.join(FOLDERS)})/[^/\\]+\.safetensors$"
_Files = dict[Annotated[str, pydantic.StringConstraints(pattern=_NAME)], Digest]


class _Start(pydantic.BaseModel):
  environment: dict[str, Any]


class _Resume(pydantic.BaseModel):
  layer: int
  discarded: list[str]
  changed: dict[str, Any]


class _PreparedNodes(pydantic.BaseModel):
  learned: Nodes | None
  params: dict[str, Nodes] | None


class _Prepared(pydantic.BaseModel):
  files: _Files
  nodes: _PreparedNodes
  paths: list[str]
  record: Any


class _Clock(pydantic.BaseModel):
  seconds: dict[str, float]
  peak_bytes: dict[str, int]


class _Layer(pydantic.BaseModel):
  name: str
  files: _Files
  nodes: Nodes
  #: Hidden states entering the next layer; None if they were not written.
  streams: _Files | None
  record: dict[str, Any]
  clock: _Clock


class _Tuned(pydantic.BaseModel):
  files: Annotated[_Files, pydantic.Field(min_length=1, max_length=1)]
  loss: float
  #: That the step took; older runs did not say it.
  seconds: float | None = None


class _Finished(pydantic.BaseModel):
  sanity: dict[str, Any] | None
  seconds: dict[str, float]


_KINDS: dict[str, type[pydantic.BaseModel]] = {
  "start": _Start,
  "resume": _Resume,
  "prepared": _Prepared,
  "layer": _Layer,
  "tuned": _Tuned,
  "finished": _Finished,
}


def check(path: pathlib.Path, events: Sequence[Event]) -> None:
  """Checks the structure of a journal's events; `path` is for messages.

  Raises:
    ValueError: An event is none of a run, or lacks a field.
  """
  for number, event in enumerate(events, 1):
    expected = f"an event of a run in line {number}"
    with refusing(path, expected, "put back an intact copy of the folder"):
      if (event["event"] == "start") != (number == 1):
        raise ValueError("the start is not the first")
      _KINDS[event["event"]].model_validate(event, strict=True)


def last(events: Sequence[Event], name: str) -> Event | None:
  """Returns the last event of a name, or None."""
  return next((one for one in reversed(events) if one["event"] == name), None)


def written_layers(events: Sequence[Event]) -> list[Event]:
  """The events of the layers written since the last resume and of those it kept."""
  layers = []
  for one in events:
    if one["event"] == "resume":
      del layers[one["layer"] :]
    elif one["event"] == "layer":
      layers.append(one)
  return layers


def finished_layers(events: Sequence[Event]) -> list[Event]:
  """The events of the layers that a resumed run keeps, in order.

  It goes on from the last hidden states that were written, so it does the layers after
  them again.
  """
  layers = written_layers(events)
  while layers and layers[-1]["streams"] is None:
    layers.pop()
  return layers


def listed_files(events: Sequence[Event]) -> dict[str, dict[str, str]]:
  """Returns the SHA-256 of every file of the last state, by relative path."""
  layers, digests = finished_layers(events), {}
  for one in (last(events, "prepared"), *layers, last(events, "tuned")):
    digests |= one["files"] if one else {}
  digests |= layers[-1]["streams"] if layers else {}
  return {name: {"sha256": digest} for name, digest in digests.items()}


def unexplained(names: Iterable[str], events: Sequence[Event]) -> list[str]:
  """Selects unlisted files that no interruption of this run can have left.

  A killed process leaves what it was writing for the next event, or had not yet removed
  after the last: the files of one layer, streams, tuning; and layers after the last
  streams. More of them were finished once, and the journal has lost its lines.
  """
  written = written_layers(events)
  layers, known = len(written), {name for one in written for name in one["files"]}
  saved = [n for n, one in enumerate(written, 1) if one["streams"] is not None]
  tuned = sum(one["event"] == "tuned" for one in events)
  is_early = not layers and not last(events, "prepared")
  numbers = {
    "streams": {str(layers + 1), *map(str, saved[-2:-1])},
    "tuning": {str(tuned - 1), str(tuned + 1)},
  }
  odd, new_layers = [], []
  for name in names:
    folder, _, rest = name.partition("/")
    number = pathlib.Path(rest).stem.partition("-")[0]
    if folder.startswith(SCRATCH) or PARTIAL in name:
      continue
    is_ours = events and re.match(_NAME, name)
    if is_ours and folder == "layers":
      new_layers += [] if name in known else [name]
    elif not is_ours or not (
      folder == "gradients"
      or (folder == "prepared" and is_early)
      or number in numbers.get(folder, ())
    ):
      odd.append(name)
  return odd + (new_layers if len(new_layers) > 1 else [])
