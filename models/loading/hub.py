"""Resolves the name of a model to local files, downloading those of a hub id.

Whatever is read of a model is read from these files, so a hub id and a folder with the
same files are the same model.
"""

import contextlib
import functools
import glob
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from mxjax.errors import FileNotFoundRefusal
from mxjax.models import tokenizer
from mxjax.models.loading import embedded, weights

DESCRIPTIONS = (
  weights.CONFIG_FILE,
  weights.GENERATION_FILE,
  *tokenizer.FILES,
  # What tells that it is no float model, and what it is instead.
  weights.ADAPTER_FILE,
  *weights.OWN_FILES,
)
"""Files fetched from the hub for a config or a tokenizer: those that are read."""
OFFLINE = "HF_HUB_OFFLINE is set"
PATIENCE = 10.0
"""Seconds that the hub has for its first answer."""


def is_id(source: str | pathlib.Path | None) -> bool:
  """Tells whether `source` is a hub id `owner/name` and no local path."""
  if not isinstance(source, str) or pathlib.Path(source).exists():
    return False
  return (
    source.count("/") == 1
    and not source.startswith(("/", ".", "~"))
    and (not source.endswith(".gguf"))
  )


def default_dtype(source: str | pathlib.Path | None) -> str:
  """Returns the compute dtype of a model for which none is asked.

  It is bfloat16, as in the paper, of a hub id and of a folder as transformers saves
  them; a GGUF file, and so the embedded model, computes in float32.
  """
  is_gguf = source is None or str(source).endswith(".gguf")
  return "float32" if is_gguf else "bfloat16"


def resolve(
  source: str | pathlib.Path | None, *, with_weights: bool = True
) -> pathlib.Path:
  """Returns the local file or folder of a model, downloading it if it is a hub id.

  `source` is as in `mxjax.models.from_pretrained`. Without weights, only what describes
  the model and its tokenizer is downloaded.

  Raises:
    FileNotFoundError: The path is absent, the hub cannot be reached, or it has no such
      model.
  """
  if source is None:
    return embedded.gguf_path()
  if is_id(source):
    return _snapshot(str(source), with_weights=with_weights)
  if not (path := pathlib.Path(source)).exists():
    raise FileNotFoundRefusal(
      source,
      expected="a .gguf file, a folder or a hub id `owner/name`",
      got="no such path",
      mend="check the spelling",
    )
  return path


def _snapshot(name: str, *, with_weights: bool) -> pathlib.Path:
  """Returns the folder of a hub model's files, from the cache if there is no network.

  Raises:
    FileNotFoundError: The hub has no such model or no safetensors of it, or it is not
      reached and the cache has none either.
  """
  from huggingface_hub import constants

  fault = None if constants.HF_HUB_OFFLINE else _unreached(constants.ENDPOINT)
  if fault or constants.HF_HUB_OFFLINE:
    folder = _fetched(name, DESCRIPTIONS, local_files_only=True, fault=fault)
    if with_weights and not _has_weights(folder):
      raise FileNotFoundRefusal(
        name,
        expected="the model's weights in the cache, as the hub is not asked",
        got=f"none ({fault or OFFLINE})",
        mend="load it once with a network, or pass a local folder",
      )
    return folder
  folder = _fetched(name, DESCRIPTIONS)
  if not any(folder.rglob("*.json")):
    _refuse_other(name)
  if with_weights:
    # They are of the same commit, whatever is uploaded meanwhile.
    fetch = functools.partial(_fetched, name, revision=folder.name)
    fetch((weights.SINGLE_FILE, weights.INDEX_FILE))
    if not _has_weights(folder):
      _refuse_other(name)
    if not (folder / weights.SINGLE_FILE).is_file():
      # The client takes patterns, and names of files are none.
      fetch(set(map(glob.escape, weights.read_index(folder).values())))
  return folder


def _fetched(
  name: str, files: Iterable[str], *, fault: str | None = None, **options: Any
) -> pathlib.Path:
  """Returns the folder of those of the files that the hub has.

  `options` are for its client; `fault` is why the hub is not reached.
  """
  import huggingface_hub

  with _one_sentence(name, fault):
    return pathlib.Path(
      huggingface_hub.snapshot_download(name, allow_patterns=sorted(files), **options)
    )


def _has_weights(folder: pathlib.Path) -> bool:
  names = weights.SINGLE_FILE, weights.INDEX_FILE
  return any((folder / name).is_file() for name in names)


def _refuse_other(name: str) -> NoReturn:
  """Raises FileNotFoundError that says what a hub model has instead of ours."""
  import huggingface_hub

  with _one_sentence(name):
    names = huggingface_hub.list_repo_files(name)
  got, mend = weights.other_weights(names)
  raise FileNotFoundRefusal(
    name,
    expected=f"{weights.CONFIG_FILE} with {weights.SINGLE_FILE}, or with shards and "
    f"their index {weights.INDEX_FILE}",
    got=got,
    mend=mend,
  )


def _unreached(endpoint: str) -> str | None:
  """Says why the hub does not answer; None if it does.

  Asked once: the hub's client would try for minutes.
  """
  import huggingface_hub

  try:
    session = huggingface_hub.get_session()
    session.head(endpoint, timeout=PATIENCE)
  # Of two HTTP libraries, by the version of the client.
  except Exception as error:
    return f"{endpoint} is not reached ({type(error).__name__}: {error})"
  return None


@contextlib.contextmanager
def _one_sentence(name: str, fault: str | None = None) -> Iterator[None]:
  """Turns what the hub's client raises into one sentence, about a `fault` if given."""
  from huggingface_hub import constants, errors

  try:
    yield
  except (OSError, ValueError, errors.HfHubHTTPError) as error:
    reason = fault or (str(error).splitlines() or [type(error).__name__])[0]
    if constants.HF_HUB_OFFLINE:
      reason = f"{OFFLINE}, and the cache has no such model"
    raise FileNotFoundRefusal(
      name,
      expected="a folder here, or a hub repository that is reachable or in the cache",
      got=f"none ({reason})",
      mend="check the id and the network, or pass a local folder, a .gguf file or "
      "None for the embedded model",
    ) from error
