"""Resolves the name of a model to local files, or to what the hub knows of it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mxjax.models.loading import embedded

if TYPE_CHECKING:
  import transformers

PATTERNS = ["*.json", "model*.safetensors", "*.jinja"]
"""Files fetched from the hub: no pickles, no `consolidated` second copy."""


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


def resolve(source: str | pathlib.Path | None) -> pathlib.Path:
  """Returns the local file or folder of a model, downloading it if it is a hub id.

  `source` is as in `mxjax.models.from_pretrained`.

  Raises:
    FileNotFoundError: The path is absent, the hub cannot be reached, or it has no such
      model.
  """
  if source is None:
    return embedded.gguf_path()
  if is_id(source):
    import huggingface_hub

    with _reached(str(source)):
      return pathlib.Path(
        huggingface_hub.snapshot_download(str(source), allow_patterns=PATTERNS)
      )
  if not (path := pathlib.Path(source)).exists():
    raise FileNotFoundError(
      f"{source}: expected a .gguf file, a folder or a hub id `owner/name`, got no "
      "such path; check the spelling."
    )
  return path


def config(name: str) -> dict[str, Any]:
  """Returns the fields of a hub model's config, with the defaults of `transformers`.

  Raises:
    FileNotFoundError: The hub cannot be reached, or it has no such model.
  """
  with _reached(name):
    return quiet_transformers().AutoConfig.from_pretrained(name).to_dict()


def tokenizer(name: str) -> tuple["transformers.PreTrainedTokenizerBase", str | None]:
  """Returns the tokenizer of a hub model, and the path of its `tokenizer.json`.

  `transformers` finds the special tokens and the chat template, and converts older
  formats. A `tokenizer.json`, if there is one, is what the model was trained with:
  `transformers` 5 builds some classes anew and loses rules of splitting.

  Raises:
    FileNotFoundError: The hub cannot be reached, or it has no such tokenizer.
  """
  import huggingface_hub

  with _reached(name):
    built = quiet_transformers().AutoTokenizer.from_pretrained(name)
    file = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
    return built, file if isinstance(file, str) else None


def quiet_transformers() -> Any:
  """Imports `transformers`, which takes a second, without its advice to add torch."""
  os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
  import transformers

  return transformers


@contextlib.contextmanager
def _reached(name: str) -> Iterator[None]:
  """Turns what the hub's client raises into one sentence."""
  from huggingface_hub import errors

  try:
    yield
  except (OSError, errors.HfHubHTTPError, errors.HFValidationError) as error:
    raise FileNotFoundError(
      f"{name}: expected a folder here or a reachable hub repository, got "
      f"{type(error).__name__} ({str(error).splitlines()[0]}); check the id and the "
      "network, or pass a local folder, a .gguf file or None for the embedded model."
    ) from error
