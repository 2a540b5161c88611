"""mxjax: strict MXFP4 W4A4 post-training quantization of decoder LLMs in JAX.

>>> import mxjax
>>> tensor = mxjax.encode([[1.0, -6.0] + [0.0] * 30])
>>> tensor.shape
(1, 32)
"""

from typing import TYPE_CHECKING, Any

from mxjax.calibration.calibration import Calibration
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.mxfp4 import MXTensor, Rules, decode
from mxjax.pallas_kernels.mxfp4_encode import encode
from mxjax.running.pipeline import quantize
from mxjax.storage.checkpoint import restore_checkpoint, save_checkpoint

if TYPE_CHECKING:
  from mxjax.models import from_pretrained, load_tokenizer

__all__ = [
  "PAPER_CONTRACT",
  "Calibration",
  "Contract",
  "MXTensor",
  "Program",
  "QuantizedLinear",
  "Rules",
  "decode",
  "encode",
  "from_pretrained",
  "linear",
  "load_tokenizer",
  "pack_for_inference",
  "quantize",
  "restore_checkpoint",
  "save_checkpoint",
]


def __getattr__(name: str) -> Any:
  """Loads the model floor (and flax) only when a model is asked for."""
  if name in ("from_pretrained", "load_tokenizer"):
    from mxjax import models

    return getattr(models, name)
  raise AttributeError(f"module 'mxjax' has no attribute {name!r}")
