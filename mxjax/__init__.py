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
  from mxjax.calibration.calibration import Calibration
  from mxjax.calibration.flax_calls import apply
  from mxjax.calibration.flax_model import FlaxModel
  from mxjax.layers.inference_packing import pack_for_inference
  from mxjax.layers.linear import linear
  from mxjax.layers.quantized_linear import QuantizedLinear
  from mxjax.methods.program import Program
  from mxjax.models import from_pretrained, load_tokenizer
  from mxjax.numerics.contract import PAPER_CONTRACT, Contract
  from mxjax.numerics.mxfp4 import MXTensor, Rules, decode
  from mxjax.pallas_kernels.mxfp4_encode import encode
  from mxjax.run.quantize import quantize
  from mxjax.storage.checkpoint import load, restore_checkpoint, save_checkpoint

__all__ = [
  "PAPER_CONTRACT",
  "Calibration",
  "Contract",
  "FlaxModel",
  "MXTensor",
  "Program",
  "QuantizedLinear",
  "Rules",
  "apply",
  "decode",
  "encode",
  "from_pretrained",
  "linear",
  "load",
  "load_tokenizer",
  "pack_for_inference",
  "quantize",
  "restore_checkpoint",
  "save_checkpoint",
]

_MODULES = {
  "PAPER_CONTRACT": "numerics.contract",
  "Calibration": "calibration.calibration",
  "Contract": "numerics.contract",
  "FlaxModel": "calibration.flax_model",
  "MXTensor": "numerics.mxfp4",
  "Program": "methods.program",
  "QuantizedLinear": "layers.quantized_linear",
  "Rules": "numerics.mxfp4",
  "apply": "calibration.flax_calls",
  "decode": "numerics.mxfp4",
  "encode": "pallas_kernels.mxfp4_encode",
  "from_pretrained": "models",
  "linear": "layers.linear",
  "load": "storage.checkpoint",
  "load_tokenizer": "models",
  "pack_for_inference": "layers.inference_packing",
  "quantize": "run.quantize",
  "restore_checkpoint": "storage.checkpoint",
  "save_checkpoint": "storage.checkpoint",
}
"""The module that defines each public name."""


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
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
