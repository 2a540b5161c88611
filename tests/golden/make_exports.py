"""Makes golden/exports.npz with compressed-tensors and transformers, without JAX.

Run it in an environment of its own, so that torch is no dependency of the project:

  python -m venv /tmp/torchenv
  /tmp/torchenv/bin/pip install torch==2.13.0 transformers==5.23.0
  /tmp/torchenv/bin/pip install compressed-tensors==0.20.0
  /tmp/torchenv/bin/python tests/golden/make_exports.py

`compressed/*`: random codes and scale bytes, and the bits of the bfloat16 weight that
compressed-tensors decompresses them to; `encoded/*`: a bfloat16 weight and the packed
tensors that the library compresses it to; `activations/*`: float32 rows and what its
dynamic MXFP4 makes of them; `scheme`: the library's own JSON of its MXFP4 preset.
`strict/*`: buffers of linears of every kind, inputs, and the outputs of the code that a
transformers folder carries, whose SHA-256 is `strict/code`.
"""

import hashlib
import importlib.util
import json
import pathlib

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
  QuantizationConfig,
  QuantizationScheme,
  preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

OUT = pathlib.Path(__file__).parent / "exports.npz"
CODE = pathlib.Path(__file__).parents[2] / "mxjax/storage/export/modeling_mxfp4.py"
ROWS, BLOCKS = 48, 2


def bits(tensor):
  return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def operators(rng):
  """Input maps and A4 rules by name, as the buffers of a strict linear."""
  near = lambda *shape: np.float32(np.eye(32) + 0.1 * rng.standard_normal(shape))
  whitened = rng.standard_normal((BLOCKS, 32, ROWS))
  gram = whitened @ whitened.transpose(0, 2, 1)
  rows, columns = np.triu_indices(32)
  hadamard = np.ones((1, 1))
  while len(hadamard) < 32:
    hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
  rotation, _ = np.linalg.qr(rng.standard_normal((32, 32)))
  return {
    "plain": {},
    "refined": {
      "input_blocks": near(BLOCKS, 32, 32),
      "refine_gram": gram[:, rows, columns],
      "refine_cross": 0.1 * rng.standard_normal((BLOCKS, 32, 32)),
    },
    "few codes": {
      "input_blocks": near(BLOCKS, 32, 32),
      "refine_gram": gram[:, rows, columns],
      "refine_how": np.array([3, 1]),
    },
    "clipped": {
      "input_blocks": near(BLOCKS, 32, 32),
      "clip_low": np.array([0.8, 0.9]),
      "clip_high": np.array([0.95, 0.7]),
    },
    "hadamard": {
      "input_signs": rng.choice([-1.0, 1.0], 64),
      "input_mix": np.array([[1, 1], [1, -1]]) / np.sqrt(2),
      "input_blocks": hadamard[None] / np.sqrt(32),
    },
    "two-level": {
      "input_mix": np.array([[0.6, -0.8], [0.8, 0.6]]),
      "input_blocks": rotation[None],
    },
    # Draws of its own, so that the other kinds keep theirs.
    "weight-only": {
      "input_blocks": np.random.default_rng(1).standard_normal((BLOCKS, 32, 32)),
      "inputs_float": np.ones(1),
    },
  }


def strict(rng):
  """Buffers, inputs and outputs of strict linears, by the code of the folder."""
  spec = importlib.util.spec_from_file_location("modeling_mxfp4", CODE)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  x = rng.standard_normal((3, 5, 32 * BLOCKS)).astype(np.float32)
  x[0, 0, :8] = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]
  x[0, 1] = 0
  code = hashlib.sha256(CODE.read_bytes()).hexdigest()
  arrays = {"strict/code": np.array(code), "strict/x": x}
  for kind, operator in operators(rng).items():
    buffers = {
      "weight_packed": rng.integers(0, 256, (ROWS, 16 * BLOCKS), dtype=np.uint8),
      "weight_scale": rng.integers(120, 130, (ROWS, BLOCKS), dtype=np.uint8),
      "bias": rng.standard_normal(ROWS).astype(np.float32),
      "output_scale": rng.uniform(0.5, 2, ROWS).astype(np.float32),
      "output_shift": rng.standard_normal(ROWS).astype(np.float32),
      **{name: np.float32(value) for name, value in operator.items()},
    }
    shapes = {name: (a.shape, str(a.dtype)) for name, a in buffers.items()}
    linear = module.MXFP4Linear(shapes)
    linear.load_state_dict({k: torch.from_numpy(a) for k, a in buffers.items()})
    with torch.no_grad():
      y = linear(torch.from_numpy(x)).numpy()
    arrays |= {f"strict/{kind}/{name}": a for name, a in buffers.items()}
    arrays[f"strict/{kind}/y"] = y
  return arrays


def main():
  rng = np.random.default_rng(0)
  arrays = {}
  scheme = preset_name_to_scheme("MXFP4", ["Linear"])
  compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")

  # All exponents whose decoded values a bfloat16 holds, all codes, both nibbles.
  packed = rng.integers(0, 256, (63, 64), dtype=np.uint8)
  scale = np.arange(252, dtype=np.uint8).reshape(63, 4)
  state = {
    "weight_packed": torch.from_numpy(packed),
    "weight_scale": torch.from_numpy(scale),
  }
  weight = compressor.decompress(state, scheme)["weight"]
  arrays["compressed/packed"], arrays["compressed/scale"] = packed, scale
  arrays["compressed/weight_bits"] = bits(weight.to(torch.bfloat16))

  # A weight on the grid comes back as the codes it was made of.
  exponents = rng.integers(-6, 3, (8, 2))
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
  values = grid[rng.integers(0, 8, (8, 64))] * rng.choice([-1, 1], (8, 64))
  values[:, ::32] = 6.0
  # The library's encoder drops the sign of a zero; adding zero does as well.
  wide = values * np.repeat(2.0**exponents, 32, axis=1) + 0.0
  state = {
    "weight": torch.from_numpy(wide).to(torch.bfloat16),
    "weight_scale": torch.from_numpy(2.0**exponents).to(torch.bfloat16),
  }
  result = compressor.compress(state, scheme)
  arrays["encoded/weight_bits"] = bits(state["weight"])
  arrays["encoded/packed"] = result["weight_packed"].numpy()
  arrays["encoded/scale"] = result["weight_scale"].numpy()

  rows = rng.standard_normal((16, 64)).astype(np.float32)
  # Ties of elements, and maxima at the edges of the scale rule.
  rows[0, :8] = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]
  rows[1, 0], rows[1, 32] = 7.0, 6.99
  x = torch.from_numpy(rows)
  arguments = scheme.input_activations
  scales, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Linear(64, 1))
  arrays["activations/rows"] = rows
  arrays["activations/rounded"] = fake_quantize(x, scales, zero, arguments).numpy()

  # Draws of no use but to leave those of `strict` as the stored file has them.
  rng.integers(0, 256, (2, 6, 2, 16), dtype=np.uint8)
  rng.integers(100, 140, (2, 6, 2), dtype=np.uint8)

  config = QuantizationConfig(
    config_groups={
      "group_0": QuantizationScheme(
        **{**scheme.model_dump(), "format": "mxfp4-pack-quantized"}
      )
    },
    format="mxfp4-pack-quantized",
    quantization_status="compressed",
    ignore=["lm_head"],
  )
  arrays["scheme"] = np.array(json.dumps(config.to_dict(), sort_keys=True))
  np.savez_compressed(OUT, **arrays, **strict(rng))


if __name__ == "__main__":
  main()
