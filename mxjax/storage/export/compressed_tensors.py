"""The compressed-tensors format `mxfp4-pack-quantized` of vLLM and llm-compressor.

A quantized linear `p` becomes `p.weight_packed`, uint8 `[out, in/2]` with the even
column in the low nibble, and `p.weight_scale`, uint8 E8M0 bytes `[out, in/32]`: the
unchanged bytes of an `MXTensor`. Everything else keeps its dtype. The format has no
rule for activations: a runtime uses its own and computes other codes than the floor
rule here.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from mxjax.errors import ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.loading.weights import tensor_name
from mxjax.numerics import mxfp4
from mxjax.storage.export import features, folder

FORMAT = "mxfp4-pack-quantized"
METHOD = "compressed-tensors"
RUNTIME_RULES = mxfp4.Rules(scale_rule="even", tie_rule="even")
"""How the compressed-tensors library rounds dynamic activations."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that runtimes fuse: all quantized and transformed alike, or none."""
_TRANSFORMS_MEND = (
  "Hadamards without signs can also stay, by --transforms, for a runtime that applies "
  "transform_config"
)


def _linears(params: Mapping[str, Any]) -> dict[str, Any]:
  """Maps modules, as `model.layers.0.mlp.up_proj`, to weights of all linears."""
  return {
    tensor_name(path).removesuffix(".weight"): node
    for path, node in features.nodes(params)
    if path[-1] == "weight" and (path[-2].endswith("_proj") or path[0] == "lm_head")
  }


def _hadamard_size(leaf: QuantizedLinear) -> int | None:
  return None if leaf.input_map is None else leaf.input_map.hadamard_size


def _check_fused(linears: Mapping[str, Any]) -> None:
  def kind(leaf: Any) -> Any:
    if isinstance(leaf, QuantizedLinear):
      return _hadamard_size(leaf), not leaf.rounding.is_legal
    return None

  for block in dict.fromkeys(module.rpartition(".")[0] for module in linears):
    for group in FUSED:
      kinds = {part: kind(linears.get(f"{block}.{part}")) for part in group}
      if len(set(kinds.values())) > 1:
        raise ValueRefusal(
          "export",
          expected=f"{', '.join(group)} of {block}, which runtimes join, to be "
          "quantized alike",
          got=kinds,
          mend="quantize them alike, or use --format dequant",
        )


def _arguments(*, dynamic: bool) -> dict[str, Any]:
  return {
    # The fields of the library's own preset MXFP4, with which a test compares them.
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": mxfp4.BLOCK_SIZE,
    "symmetric": True,
    "dynamic": dynamic,
    "scale_dtype": "torch.uint8",
  }


def quantization_config(linears: Mapping[str, Any]) -> dict[str, Any]:
  """Builds the JSON-ready `quantization_config` from weights by module name."""
  quantized = {k: v for k, v in linears.items() if isinstance(v, QuantizedLinear)}
  if not quantized:
    raise ValueRefusal(
      "export",
      expected="a model with quantized linears",
      got="none",
      mend="a float model is saved by models.weights.save_folder",
    )
  weight_only = {not leaf.rounding.is_legal for leaf in quantized.values()}
  # The one group below matches all linears, so that they share `input_activations`.
  if len(weight_only) > 1:
    raise ValueRefusal(
      "export",
      expected="one scheme for all linears, as compressed-tensors has it here",
      got="linears whose inputs are rounded beside some whose inputs are not",
      mend="make them alike",
    )
  # The runtime has a Linear head even if the embedding is tied to it.
  ignored = ["lm_head", *(k for k in linears if k not in quantized and k != "lm_head")]
  result: dict[str, Any] = {
    "quant_method": METHOD,
    "format": FORMAT,
    "quantization_status": "compressed",
    "config_groups": {
      "group_0": {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": _arguments(dynamic=False),
        "input_activations": None if weight_only.pop() else _arguments(dynamic=True),
        "output_activations": None,
      }
    },
    "ignore": ignored,
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
  }
  if transforms := _transform_config(quantized):
    result["transform_config"] = transforms
  return result


def _transform_config(quantized: Mapping[str, QuantizedLinear]) -> dict[str, Any]:
  """Builds one group for each Hadamard size."""
  by_size: dict[int, list[str]] = {}
  for module, leaf in quantized.items():
    if size := _hadamard_size(leaf):
      by_size.setdefault(size, []).append(module)
  groups = {
    f"hadamard_{size}": {
      "type": "hadamard",
      "apply": [
        {"targets": modules, "location": "input", "inverse": False, "ignore": []},
        {"targets": modules, "location": "weight_input", "inverse": True, "ignore": []},
      ],
      "randomize": False,
      "requires_grad": False,
      "head_dim": size,
      "precision": "torch.float32",
    }
    for size, modules in sorted(by_size.items())
  }
  return {"config_groups": groups} if groups else {}


def check(params: Mapping[str, Any], *, transforms: bool = False) -> None:
  """Rejects a model that the format cannot hold.

  Raises:
    ValueError: It has features that the format lacks, all of them named, or linears
      that runtimes fuse are not quantized alike.
  """
  # Without --transforms every map is refused; with it, only those that are no plain
  # Hadamards.
  lacking, mends = features.features_of(params), {"maps": _TRANSFORMS_MEND}
  if transforms and (maps := lacking.pop("maps", None)):
    leaves = {".".join(path): node for path, node in features.nodes(params)}
    mends = {}
    if others := [path for path in maps if _hadamard_size(leaves[path]) is None]:
      lacking = {"maps": others, **lacking}
  features.refuse(METHOD, lacking, mends)
  _check_fused(_linears(params))


def to_tensors(params: Mapping[str, Any]) -> dict[str, jax.Array]:
  """Converts params to the tensors of the format by name."""
  tensors: dict[str, jax.Array] = {}
  for path, node in features.nodes(params):
    name = tensor_name(path)
    match node:
      case QuantizedLinear(weight=weight):
        mxfp4.check_legal(weight, f"export: {name}")
        tensors[f"{name}_packed"] = weight.codes
        tensors[f"{name}_scale"] = weight.scales
      case _:
        tensors[name] = node
  return tensors


def write_compressed_tensors(
  out: str | os.PathLike[str],
  source: folder.Source,
  companions: folder.Companions = folder.NO_COMPANIONS,
  *,
  transforms: bool = False,
  shard_bytes: int = folder.SHARD_BYTES,
) -> pathlib.Path:
  """Writes a folder that compressed-tensors decompresses to our decoded weights.

  `source` must be without features that the format lacks. `transforms` keeps Hadamards
  without signs as `transform_config`; it is off by default because a loader that
  ignores it computes nonsense.

  Raises:
    FileExistsError: The folder is not empty.
    NotImplementedError: The family's config cannot describe the model.
    ValueError: The format cannot hold features of the model; all are named.
  """
  check(source.params, transforms=transforms)
  scheme = quantization_config(_linears(source.params))
  rounds_inputs = scheme["config_groups"]["group_0"]["input_activations"] is not None
  hadamards = scheme.get("transform_config", {}).get("config_groups", {})
  # The library decodes weights to bfloat16 whatever the config says, and a model of
  # another dtype cannot multiply by them.
  values = folder.hf_values(source, companions) | {"torch_dtype": "bfloat16"}
  tensors = to_tensors(source.params)
  return folder.write_folder(
    out,
    METHOD,
    source,
    companions,
    tensors,
    json_files={"config.json": values | {"quantization_config": scheme}},
    details={
      "quantized_linears": sum(name.endswith("_packed") for name in tensors),
      "activations": "MXFP4 by the runtime's own rule, or none where it has no W4A4 "
      "kernel"
      if rounds_inputs
      else "not rounded (W4A16)",
      "transforms": sorted(hadamards),
    },
    shard_bytes=shard_bytes,
  )


def runtime_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns params with activations rounded as the compressed-tensors library does."""

  def swap(node: Any) -> Any:
    if isinstance(node, QuantizedLinear):
      return dataclasses.replace(node, rules=RUNTIME_RULES)
    return node

  return jax.tree.map(
    swap, dict(params), is_leaf=lambda node: isinstance(node, QuantizedLinear)
  )
