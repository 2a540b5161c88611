"""mxjax: strict MXFP4 W4A4 post-training quantization of decoder LLMs in JAX.

>>> import mxjax
>>> tensor = mxjax.encode([[1.0, -6.0] + [0.0] * 30])
>>> tensor.shape
(1, 32)

Each name is imported when it is first used: `mxjax --help` must not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  # `as` the same name: type checkers take it for exported.
  from mxjax.calibration.calibration import Calibration as Calibration
  from mxjax.calibration.flax_calls import apply as apply
  from mxjax.calibration.flax_model import FlaxModel as FlaxModel
  from mxjax.devices.kept_programs import keep_compiled as keep_compiled
  from mxjax.errors import Refusal as Refusal
  from mxjax.layers.inference_packing import pack_for_inference as pack_for_inference
  from mxjax.layers.linear import linear as linear
  from mxjax.layers.quantized_linear import QuantizedLinear as QuantizedLinear
  from mxjax.methods.program import Program as Program
  from mxjax.models import from_pretrained as from_pretrained
  from mxjax.models import load_tokenizer as load_tokenizer
  from mxjax.numerics.contract import PAPER_CONTRACT as PAPER_CONTRACT
  from mxjax.numerics.contract import Contract as Contract
  from mxjax.numerics.mxfp4 import MXTensor as MXTensor
  from mxjax.numerics.mxfp4 import Rules as Rules
  from mxjax.numerics.mxfp4 import decode as decode
  from mxjax.pallas_kernels.mxfp4_encode import encode as encode
  from mxjax.run.quantize import quantize as quantize
  from mxjax.storage.checkpoint import load as load
  from mxjax.storage.checkpoint import restore_checkpoint as restore_checkpoint
  from mxjax.storage.checkpoint import save_checkpoint as save_checkpoint

_MODULES = {
  "PAPER_CONTRACT": "numerics.contract",
  "Calibration": "calibration.calibration",
  "Contract": "numerics.contract",
  "FlaxModel": "calibration.flax_model",
  "MXTensor": "numerics.mxfp4",
  "Program": "methods.program",
  "QuantizedLinear": "layers.quantized_linear",
  "Refusal": "errors",
  "Rules": "numerics.mxfp4",
  "apply": "calibration.flax_calls",
  "decode": "numerics.mxfp4",
  "encode": "pallas_kernels.mxfp4_encode",
  "from_pretrained": "models",
  "keep_compiled": "devices.kept_programs",
  "linear": "layers.linear",
  "load": "storage.checkpoint",
  "load_tokenizer": "models",
  "pack_for_inference": "layers.inference_packing",
  "quantize": "run.quantize",
  "restore_checkpoint": "storage.checkpoint",
  "save_checkpoint": "storage.checkpoint",
}
"""The module that defines each public name."""

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def _version() -> str:
  from importlib import metadata

  try:
    return metadata.version("mxjax")
  except metadata.PackageNotFoundError as error:
    raise AttributeError(
      "mxjax.__version__: expected an installed package, got a bare checkout; run "
      "`make install`."
    ) from error


def __getattr__(name: str) -> Any:
  """Imports a public name, or reads `__version__`, on first use."""
  if name == "__version__":
    value = _version()
  elif name in _MODULES:
    value = getattr(importlib.import_module(f"mxjax.{_MODULES[name]}"), name)
  else:
    raise AttributeError(f"module 'mxjax' has no attribute {name!r}")
  # Python asks `__getattr__` only for what a module does not have: the next use finds
  # it there.
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
