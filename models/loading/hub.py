"""Resolves the name of a model to local files, downloading those of a hub id.

Whatever is read of a model is read from these files, so a hub id and a folder with the
same files are the same model.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Sequence

from mxjax.errors import FileNotFoundRefusal
from mxjax.models.loading import embedded

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files fetched from the hub for a config or a tokenizer."""
WEIGHTS = ("model*.safetensors",)
"""Files fetched for the weights: no pickles, no `consolidated` second copy."""
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
    return _snapshot(str(source), DESCRIPTIONS + (WEIGHTS if with_weights else ()))
  if not (path := pathlib.Path(source)).exists():
    raise FileNotFoundRefusal(
      source,
      expected="a .gguf file, a folder or a hub id `owner/name`",
      got="no such path",
      mend="check the spelling",
    )
  return path


def _snapshot(name: str, patterns: Sequence[str]) -> pathlib.Path:
  """Returns the folder of a hub model's files, from the cache if there is no network.

  Raises:
    FileNotFoundError: The hub has no such model, or it is not reached and the cache has
      none either.
  """
  import huggingface_hub
  from huggingface_hub import constants

  download = lambda **options: pathlib.Path(
    huggingface_hub.snapshot_download(name, allow_patterns=list(patterns), **options)
  )
  with _one_sentence(name):
    if not constants.HF_HUB_OFFLINE:
      if not (fault := _unreached(constants.ENDPOINT)):
        return download()
      with contextlib.suppress(FileNotFoundError):
        return download(local_files_only=True)
      raise FileNotFoundError(fault)
    return download(local_files_only=True)


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
def _one_sentence(name: str) -> Iterator[None]:
  """Turns what the hub's client raises into one sentence."""
  from huggingface_hub import constants, errors

  try:
    yield
  except (OSError, ValueError, errors.HfHubHTTPError) as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if constants.HF_HUB_OFFLINE:
      reason = "HF_HUB_OFFLINE is set, and the cache has no such model"
    raise FileNotFoundRefusal(
      name,
      expected="a folder here, or a hub repository that is reachable or in the cache",
      got=f"none ({reason})",
      mend="check the id and the network, or pass a local folder, a .gguf file or "
      "None for the embedded model",
    ) from error
