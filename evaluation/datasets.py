"""Token windows for calibration and tests, from any source of text."""

import pathlib
import random
from collections.abc import Sequence

import numpy as np

from mxjax.errors import FileNotFoundRefusal, ValueRefusal
from mxjax.evaluation import text_sources
from mxjax.evaluation.text_sources import HUB_SETS, SAMPLINGS
from mxjax.intake import texts
from mxjax.intake.reading import refusing
from mxjax.intake.token_ids import token_ids
from mxjax.models.tokenizer import Tokenizer


def check_source(source: str | None, place: str) -> None:
  """Rejects a source of text that `load_tokens` could not read; reads nothing.

  Raises:
    FileNotFoundError: It is neither a file nor a name of hub data.
  """
  if source not in (None, *HUB_SETS) and not pathlib.Path(source).is_file():
    raise FileNotFoundRefusal(
      place,
      expected=f"a file or one of {', '.join(HUB_SETS)}",
      got="neither",
      mend=texts.mend(source, HUB_SETS) or "check the path",
    )


def place_of(source: str | None, split: str) -> str:
  """Names the data of a split in an error."""
  return f"{split} data" + (f" {source}" if source else "")


def load_tokens(
  source: str | None,
  tokenizer: Tokenizer,
  *,
  count: int | None,
  length: int,
  split: str,
  seed: int | None = None,
  sampling: str | None = None,
) -> np.ndarray:
  """Loads token windows from any source.

  Args:
    source: None for the embedded text, `c4` or `wikitext2` for hub data, or a path:
      `.npy` holds token ids `[n, length]` used as they are, `.jsonl` (or `.json`,
      possibly `.gz`) has a `text` in each line, anything else is plain text.
    tokenizer: Gives `encode` and `prefix_ids`, with which text begins, be it of the hub
      or of a file.
    count: Number of windows; None takes all of an array, or all that `windows` cuts.
    length: Tokens per window.
    split: `calibration` or `test`: the part of hub data or embedded text to use.
    seed: Seed of the sample. With `windows`, None or 0 takes the first windows.
    sampling: `windows` cuts the joined text and takes the first windows or, with a
      seed, random ones; `documents` is the standard C4 sample, `offsets` the standard
      WikiText-2 sample. None selects the standard sample for hub calibration data, and
      `windows` for everything else.

  Returns:
    int32 `[count, length]`.

  Raises:
    FileNotFoundError: The file does not exist.
    ValueError: There is too little text, an array has the wrong shape, a size is too
      small, or the sampling is unknown or of an array.
    ConnectionError: Hub data was requested without a network.
  """
  place = place_of(source, split)
  if sampling not in (None, *SAMPLINGS):
    raise ValueRefusal(
      place, expected=f"a sampling of {', '.join(SAMPLINGS)}", got=sampling
    )
  # A window of one token predicts nothing.
  least = 2 if split == "test" else 1
  if length < least or (count is not None and count < 1):
    raise ValueRefusal(
      place,
      expected=f"at least one window of at least {least} tokens",
      got=f"{count} of {length}",
      mend="ask for more",
    )
  check_source(source, place)
  if source is not None and source.endswith(".npy"):
    if sampling not in (None, "windows"):
      raise ValueRefusal(
        place,
        expected="no sampling of token ids, which are used as they are",
        got=sampling,
        mend="leave it out, or give text",
      )
    return _array_windows(_array(source), count, length, place)
  if sampling is None:
    is_sampled = split == "calibration" and source in HUB_SETS
    sampling = HUB_SETS[str(source)] if is_sampled else "windows"
  if count is None and sampling != "windows":
    raise ValueRefusal(place, expected="a number of windows to sample", got="none")
  documents, separator = text_sources.documents(source, split)
  if sampling == "documents":
    return _document_windows(documents, tokenizer, count or 0, length, seed or 0, place)
  text = separator.join(documents)
  ids = _with_prefix(tokenizer, text, place)
  if sampling == "offsets":
    return _offset_windows(ids, count or 0, length, seed or 0, place)
  available = len(ids) // length
  if count is None:
    # At least one, so that too little text raises an error.
    count = max(1, available)
  # Where text is short, `windows` says how much.
  if not seed or available < count:
    return windows(ids, count, length, place)
  order = np.random.default_rng(seed).permutation(available)
  return windows(ids, available, length, place)[order[:count]]


def _with_prefix(tokenizer: Tokenizer, text: str, place: str) -> np.ndarray:
  prefix = np.asarray(tokenizer.prefix_ids, np.int32)
  # Ids are checked before they join the prefix: numpy would convert both to a common
  # dtype.
  return np.concatenate([prefix, token_ids(tokenizer.encode(text), place)])


def _document_windows(
  documents: Sequence[str],
  tokenizer: Tokenizer,
  count: int,
  length: int,
  seed: int,
  place: str,
) -> np.ndarray:
  """Draws the standard C4 sample, int32 `[count, length]` in the order of the draws.

  Documents are drawn with replacement from Python's seeded generator until one has more
  tokens than the window; then an offset is drawn. The draws equal those of the GPTQ
  loaders, so equal seeds, shards and tokenizers give equal ids. Each document begins
  with the tokenizer's prefix.
  """
  draws = random.Random(seed)
  encoded: dict[int, np.ndarray] = {}
  sample: list[np.ndarray] = []
  while len(sample) < count:
    index = draws.randint(0, len(documents) - 1) if documents else 0
    if documents and index not in encoded:
      encoded[index] = _with_prefix(tokenizer, documents[index], place)
    # Draws are with replacement: they never end where every document is short, and that
    # is known once each has been encoded. Without documents it is known at once.
    if len(encoded) == len(documents) and all(
      len(ids) <= length for ids in encoded.values()
    ):
      raise ValueRefusal(
        place,
        expected=f"documents of more than {length} tokens",
        got=f"{len(documents)} shorter ones",
        mend="ask for shorter sequences, give longer documents, or sample windows of "
        "the joined text",
      )
    ids = encoded[index]
    # As in the GPTQ loaders, an offset is at most len - length - 1: a document of
    # exactly `length` tokens is too short, and no window has a document's last token.
    if len(ids) > length:
      start = draws.randint(0, len(ids) - length - 1)
      sample.append(ids[start : start + length])
  return token_ids(sample, place)


def _offset_windows(
  ids: np.ndarray, count: int, length: int, seed: int, place: str
) -> np.ndarray:
  """Draws the standard WikiText-2 sample: random offsets of the joined text."""
  if len(ids) <= length:
    raise ValueRefusal(
      place,
      expected=f"more than {length} tokens",
      got=len(ids),
      mend="ask for shorter windows, or give more text",
    )
  draws = random.Random(seed)
  # The bound of the GPTQ loaders, by which no window has the text's last token.
  starts = [draws.randint(0, len(ids) - length - 1) for _ in range(count)]
  return token_ids([ids[start : start + length] for start in starts], place)


def windows(ids: np.ndarray, count: int, length: int, place: str) -> np.ndarray:
  """Cuts the first `count` windows, int32 `[count, length]`.

  Raises:
    ValueError: There are not enough tokens; the message begins with `place`.
  """
  if len(ids) < count * length:
    is_test = place.startswith("test")
    names = "--windows, --window-length" if is_test else "--sequences, --length"
    raise ValueRefusal(
      place,
      expected=f"{count * length} tokens for {count} windows of {length}",
      got=len(ids),
      mend=f"ask for fewer or shorter windows ({names}), or give more text",
    )
  return token_ids(ids[: count * length], place).reshape(count, length)


def _array(source: str) -> np.ndarray:
  """Maps an array of a file; a header that asks for more than the file is refused."""
  with refusing(source, "an .npy file with an array of token ids", "save it again"):
    # A map, so that only the windows that are taken are read. A pickle would run code.
    array = np.load(source, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
      raise ValueRefusal(
        source,
        expected="an .npy file with one array",
        got=f"several, {type(array).__name__}",
        mend="save it again",
      )
    return array


def _array_windows(
  array: np.ndarray, count: int | None, length: int, place: str
) -> np.ndarray:
  # At least one, so that an array without rows is refused.
  wanted = count or max(1, array.shape[0] if array.ndim else 0)
  if array.ndim != 2 or array.shape[0] < wanted or array.shape[1] < length:
    raise ValueRefusal(
      place,
      expected=f"token ids of at least [{wanted}, {length}]",
      got=array.shape,
      mend="ask for fewer or shorter sequences",
    )
  return token_ids(array[:wanted, :length], place)
