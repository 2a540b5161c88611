"""What other programs make of our exports; run by benchmarks/export_roundtrip.py.

Imports torch, transformers and compressed-tensors, and neither JAX nor mxjax. Reads a
JSON file that lists folders and what to compare them with, prints JSON.
"""

import json
import pathlib
import sys

import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.transform import TransformConfig, TransformFactory
from safetensors.torch import load_file
from transformers.utils.quantization_config import CompressedTensorsConfig

transformers.logging.set_verbosity_error()


def tensors_of(folder):
  return {
    name: tensor
    for file in sorted(folder.glob("*.safetensors"))
    for name, tensor in load_file(file).items()
  }


def same_bits(left, right):
  return (
    left.dtype == right.dtype
    and left.shape == right.shape
    and bool((left.view(torch.int16) == right.view(torch.int16)).all())
  )


def perplexity(model, tokens):
  losses = []
  with torch.no_grad():
    for window in torch.from_numpy(tokens).long():
      logits = model(window[None]).logits[0, :-1].double()
      losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
  return float(np.exp(np.mean(losses)))


def load(folder, **options):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager", **options
  ).eval()


def load_rounding(folder):
  """The folder with the library's own activation rounding, computed in float32.

  Decompressed weights are bfloat16; widening them changes no value.
  """
  model = load(folder)
  model.hf_quantizer.compressor.decompress_model(model)
  return torch.nn.Module.float(model)


def decompressed_by_library(folder):
  """Every packed weight through compressed-tensors' own registry."""
  config = json.loads((folder / "config.json").read_text())["quantization_config"]
  transforms = config.pop("transform_config", None)
  scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
  if transforms is not None:
    TransformConfig.model_validate(transforms)
  compressor = BaseCompressor.get_value_from_registry(scheme.format)
  tensors = tensors_of(folder)
  weights = {}
  for name in tensors:
    if name.endswith(".weight_packed"):
      module = name.removesuffix(".weight_packed")
      parts = ("weight_packed", "weight_scale")
      state = {part: tensors[f"{module}.{part}"] for part in parts}
      weights[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"]
  return weights, transforms


def apply_inputs(model, transforms):
  """Hooks the library's transforms on inputs; those of weights are in the weights."""
  for name, scheme in TransformConfig.model_validate(transforms).config_groups.items():
    scheme.apply = [part for part in scheme.apply if part.location == "input"]
    TransformFactory.from_scheme(scheme, name=name).apply_to_model(model, False)


def check_compressed(folder, expected, tokens):
  weights, transforms = decompressed_by_library(folder)
  unequal = [k for k, w in weights.items() if not same_bits(w, expected[k])]
  model = load(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
  state = model.state_dict()
  differing = [
    name
    for name, weight in expected.items()
    if not torch.equal(state[name], weight.to(torch.float32))
  ]
  if transforms is not None:
    apply_inputs(model, transforms)
  result = {
    "linears": len(weights),
    "expected_linears": len(expected),
    "library_bits_unequal": unequal,
    "transformers_values_unequal": differing,
    "perplexity_weight_only": perplexity(model, tokens),
  }
  if transforms is None:
    result["perplexity_as_loaded"] = perplexity(load_rounding(folder), tokens)
  return result


def check_strict(folder, logits, tokens):
  """The strict model by the code in the folder, beside our logits of one window."""
  model = load(folder, trust_remote_code=True)
  with torch.no_grad():
    theirs = model(torch.from_numpy(tokens[:1]).long()).logits
  scores = [s.double().log_softmax(-1) for s in (torch.from_numpy(logits), theirs)]
  divergence = (scores[0].exp() * (scores[0] - scores[1])).sum(-1).mean()
  return {
    "perplexity_strict": perplexity(model, tokens),
    "divergence_from_ours": divergence.item(),
  }


def check_tokenizer(folder, text):
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  return tokenizer.encode(text, add_special_tokens=False)


def main(path):
  job = json.loads(pathlib.Path(path).read_text())
  tokens = np.load(job["tokens"])
  results = {}
  for name, entry in job["folders"].items():
    folder = pathlib.Path(entry["folder"])
    if entry["format"] == "compressed-tensors":
      results[name] = check_compressed(folder, load_file(entry["expected"]), tokens)
    elif entry["format"] == "transformers":
      results[name] = check_strict(folder, np.load(entry["logits"]), tokens)
    else:
      results[name] = {"perplexity": perplexity(load(folder), tokens)}
    results[name]["text_ids"] = check_tokenizer(folder, job["text"])
  versions = {
    module.__name__: module.__version__
    for module in (torch, transformers, compressed_tensors)
  }
  print(json.dumps({"versions": versions, "results": results}))


if __name__ == "__main__":
  main(sys.argv[1])
