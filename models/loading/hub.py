"""Resolves the name of a model to a local file or folder."""

import pathlib

from mxjax.models.loading import embedded

PATTERNS = ["*.json", "model*.safetensors", "*.jinja"]
"""Files fetched from the hub: no pickles, no `consolidated` second copy."""


def resolve(
  source: str | pathlib.Path | None, *, only_config: bool = False
) -> pathlib.Path:
  """Returns the local file or folder of a model, downloading it if it is a hub id.

  `source` is as in `mxjax.models.from_pretrained`; `only_config` skips the weights of a
  hub id.

  Raises:
    FileNotFoundError: The path is absent, the hub cannot be reached, or it has no such
      model.
  """
  if source is None:
    return embedded.gguf_path()
  path = pathlib.Path(source)
  if path.exists():
    return path
  name = str(source)
  if isinstance(source, pathlib.Path) or path.suffix == ".gguf" or name.count("/") != 1:
    raise FileNotFoundError(
      f"{name}: expected a .gguf file, a folder or a hub id `owner/name`, got no such "
      "path; check the spelling."
    )
  return _download(name, ["config.json"] if only_config else PATTERNS)


def _download(name: str, patterns: list[str]) -> pathlib.Path:
  import huggingface_hub
  from huggingface_hub import errors

  try:
    folder = huggingface_hub.snapshot_download(name, allow_patterns=patterns)
    return pathlib.Path(folder)
  except (
    errors.LocalEntryNotFoundError,
    errors.HfHubHTTPError,
    errors.HFValidationError,
    ConnectionError,
  ) as error:
    raise FileNotFoundError(
      f"{name}: expected a folder here or a reachable hub repository, got "
      f"{type(error).__name__} ({str(error).splitlines()[0]}); check the id and the "
      "network, or pass a local folder, a .gguf file or None for the embedded model."
    ) from error
