"""What every export says of itself: each field of its config and of its manifest."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from mxjax.models import families
from mxjax.storage import digested_json, export
from mxjax.storage.export import compressed_tensors, transformers_folder

BIASED = {"attention_bias": True, "mlp_bias": True}


def write(form, out, source, **options):
  """Writes an export and returns its config and manifest, without its list of files."""
  getattr(export, f"write_{form}")(out, source, **options)
  config = json.loads((out / "config.json").read_text())
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert digested_json.digest(manifest) == manifest.pop("digest")
  assert manifest.pop("files")
  assert manifest.pop("version") == 1
  assert manifest.pop("source") == {"digest": "ab"}
  return config, manifest


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plain_folder(dtype, hires, source, tiny_config, tensors_in, tmp_path):
  out = tmp_path / "out"
  config, manifest = write("dequant", out, source(hires), dtype=jnp.dtype(dtype))
  biased = dataclasses.replace(tiny_config, **BIASED)
  assert config == {**families.to_hf_config(biased), "torch_dtype": dtype}
  linears = {
    str(tensor.dtype) for name, tensor in tensors_in(out).items() if "_proj." in name
  }
  assert linears == {config["torch_dtype"]}
  assert 0 < manifest.pop("largest_relative_rounding_error") < 1e-2
  assert manifest == {
    "format": "dequant",
    "activations": "not rounded: this folder computes weight-only quantization",
    "folded_into_weights": ["maps", "value-recovery", "mlp-recovery"],
    "without_meaning_here": ["refinement"],
    "dtype": dtype,
  }


def test_a_compressed_tensors_folder(rtn, unrounded, source, tiny_config, tmp_path):
  activations = {
    "strict": "MXFP4 by the runtime's own rule, or none where it has no W4A4 kernel",
    "weights": "not rounded (W4A16)",
  }
  for name, params in (("strict", rtn), ("weights", unrounded(rtn))):
    config, manifest = write("compressed_tensors", tmp_path / name, source(params))
    linears = compressed_tensors._linears(params)
    assert config == {
      **families.to_hf_config(tiny_config),
      "torch_dtype": "bfloat16",
      "quantization_config": compressed_tensors.quantization_config(linears),
    }
    assert manifest == {
      "format": "compressed-tensors",
      "quantized_linears": 14,
      "activations": activations[name],
      "transforms": [],
    }


def test_a_transformers_folder(hires, unrounded, source, tiny_config, tmp_path):
  activations = {"strict": "as in the checkpoint", "weights": "not rounded (W4A16)"}
  for name, params in (("strict", hires), ("weights", unrounded(hires))):
    config, manifest = write("transformers", tmp_path / name, source(params))
    _, linears = transformers_folder.to_tensors(params)
    assert config == {
      **families.to_hf_config(tiny_config),
      "torch_dtype": "bfloat16",
      "architectures": ["MXFP4LlamaForCausalLM"],
      "auto_map": {"AutoModelForCausalLM": "modeling_mxfp4.MXFP4LlamaForCausalLM"},
      "mxfp4": {"linears": linears},
    }
    assert manifest == {
      "format": "mxjax-transformers",
      "activations": activations[name],
      "quantized_linears": 14,
    }
