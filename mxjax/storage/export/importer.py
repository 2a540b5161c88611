"""Reads other programs' MXFP4 checkpoints, for evaluation here."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.intake.reading import refusing
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import families, parameters
from mxjax.models.config import ModelConfig
from mxjax.models.loading.weights import params_path, read_hf_config
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import TARGETS
from mxjax.numerics.realization.activation_quantizers import Nearest, Unrounded
from mxjax.numerics.shaping.input_maps import Hadamard
from mxjax.storage.export.compressed_tensors import FORMAT, METHOD
from mxjax.storage.export.folder import check_folder, read_tensors

_HADAMARDS = {2**exponent for exponent in range(5, 17)}


class Imported(NamedTuple):
  """A model of another program; `rounds_inputs` if its scheme rounds activations."""

  params: dict[str, Any]
  config: ModelConfig
  rounds_inputs: bool


def _check_scheme(place: str, scheme: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the scheme's one group of symmetric MXFP4 weights; rejects all else."""
  groups = list((scheme.get("config_groups") or {}).values())
  group = groups[0] if groups else {}
  weights = group.get("weights") or {}
  expected = {
    "quant_method": (scheme.get("quant_method"), METHOD),
    "groups": (len(groups), 1),
    "format": (group.get("format") or scheme.get("format"), FORMAT),
    "num_bits": (weights.get("num_bits"), 4),
    "type": (weights.get("type"), "float"),
    "strategy": (weights.get("strategy"), "group"),
    "group_size": (weights.get("group_size"), mxfp4.BLOCK_SIZE),
    "symmetric": (weights.get("symmetric"), True),
    "kv_cache_scheme": (scheme.get("kv_cache_scheme"), None),
    "output_activations": (group.get("output_activations"), None),
  }
  checks = expected.items()
  wrong = [f"{k} {got!r}, not {want!r}" for k, (got, want) in checks if got != want]
  # None is W4A16; whatever rounds inputs must round them as the A4 rule here can.
  if inputs := group.get("input_activations"):
    keys = ("num_bits", "type", "group_size", "dynamic")
    got = tuple(inputs.get(key) for key in keys)
    if got != (4, "float", mxfp4.BLOCK_SIZE, True):
      wrong.append(f"input_activations {got}, not dynamic MXFP4")
  if wrong:
    raise ValueRefusal(
      place,
      expected=f"a {METHOD} folder of {FORMAT}",
      got="; ".join(wrong),
      mend="convert it, or evaluate it where it came from",
    )
  return group


def _read_maps(place: str, scheme: Mapping[str, Any]) -> dict[str, Hadamard]:
  """Reads online Hadamards by module name from `transform_config`."""
  by_module: dict[str, Hadamard] = {}
  groups = (scheme.get("transform_config") or {}).get("config_groups") or {}
  for name, group in groups.items():
    # What was applied to weights is in their codes already; only inputs are mapped when
    # it runs.
    online = [a for a in group["apply"] if not a["location"].startswith("weight_")]
    plain = group["type"] == "hadamard" and not group.get("randomize")
    exact = not any(
      "re:" in target or target == "Linear" for a in online for target in a["targets"]
    )
    if not (plain and exact and all(a["location"] == "input" for a in online)):
      raise ValueRefusal(
        place,
        expected="transforms of the type hadamard at inputs of modules named one by "
        "one",
        got=f"{name}: {group}",
        mend="evaluate it where it came from",
      )
    if group.get("head_dim") not in _HADAMARDS:
      raise ValueRefusal(
        place,
        expected=f"head_dim, a power of two, in the transform {name}",
        got=group.get("head_dim"),
        mend="write the size of its blocks there",
      )
    targets = [target for a in online for target in a["targets"]]
    by_module |= dict.fromkeys(targets, Hadamard(group["head_dim"]))
  return by_module


def read_compressed_tensors(folder: str | os.PathLike[str]) -> Imported:
  """Reads an `mxfp4-pack-quantized` folder, from here or from llm-compressor.

  The folder holds `config.json` and safetensors, single or sharded. Codes and scales
  are read bit for bit. Activations are rounded by our rule, as the format has none.

  Raises:
    FileNotFoundError: A file is absent.
    NotImplementedError: The architecture is not supported.
    ValueError: Another scheme, tensors that are missing, illegal or mis-shaped, or, in
      a folder from here, files whose SHA-256 is not the one of its manifest.
  """
  folder = pathlib.Path(folder)
  check_folder(folder, is_ours=False)
  values = read_hf_config(folder / "config.json")
  scheme = values.pop("quantization_config", None) or {}
  with refusing(folder / "config.json", f"a config of {METHOD}"):
    group = _check_scheme(str(folder), scheme)
    config = families.from_hf_config(values)
    rounding = Unrounded() if group.get("input_activations") is None else Nearest()
    maps = _read_maps(str(folder), scheme)
  leaves: dict[parameters.Path, Any] = {}
  tensors = read_tensors(folder)
  packed = [name for name in tensors if name.endswith(".weight_packed")]
  for module in (name.removesuffix(".weight_packed") for name in packed):
    tensor = _take_packed(str(folder), module, tensors)
    # Taken out, so that what is left names no quantized linear.
    leaf = QuantizedLinear(tensor, maps.pop(module, None), rounding)
    _check_map(str(folder), module, leaf)
    leaves[params_path(f"{module}.weight")] = leaf
  if maps:
    raise ValueRefusal(
      folder,
      expected="transforms at quantized linears of the folder only",
      got=f"some at {', '.join([*maps][:3])}",
      mend="without them it would compute another function, so correct the names in "
      "its config.json",
    )
  leaves |= {params_path(name): tensor for name, tensor in tensors.items()}
  if config.tie_embeddings:
    _drop_tied_head(folder, leaves)
  _check_leaves(folder, leaves, config)
  params: dict[str, Any] = {}
  # In the order of a model's own params, whatever that of the files.
  for path in parameters.parameter_shapes(config):
    parameters.insert(params, path, leaves[path])
  return Imported(params, config, rounding.is_legal)


def _drop_tied_head(folder: pathlib.Path, leaves: dict[parameters.Path, Any]) -> None:
  """Removes a head that is the embedding once more; rejects any other."""
  head = leaves.pop(("lm_head", "weight"), None)
  embedding = leaves.get(("embed_tokens", "weight"))
  if head is None or embedding is None:
    return
  if isinstance(head, QuantizedLinear) or not np.array_equal(head, embedding):
    raise ValueRefusal(
      folder,
      expected="lm_head.weight to equal the embedding because tie_word_embeddings is "
      "true",
      got="another",
      mend="set it to false in config.json",
    )


def _check_map(place: str, module: str, leaf: QuantizedLinear) -> None:
  if isinstance(leaf.input_map, Hadamard) and leaf.shape[1] % leaf.input_map.size:
    raise ValueRefusal(
      place,
      expected=f"a transform whose head_dim divides the {leaf.shape[1]} inputs of "
      f"{module}",
      got=leaf.input_map.size,
      mend="write the size of its blocks there",
    )


def _take_packed(
  place: str, module: str, tensors: dict[str, jax.Array]
) -> mxfp4.MXTensor:
  """Removes and returns the two tensors of a quantized linear."""
  codes = tensors.pop(f"{module}.weight_packed")
  scales = tensors.pop(f"{module}.weight_scale", None)
  if scales is None:
    raise ValueRefusal(
      place,
      expected=f"{module}.weight_scale beside its weight_packed",
      got="none",
      mend="download the checkpoint again",
    )
  if f"{module}.weight" in tensors:
    raise ValueRefusal(
      place, expected=f"{module} packed or plain", got="both", mend="leave one out"
    )
  tensor = mxfp4.MXTensor(codes, scales)
  mxfp4.check_legal(tensor, f"{place}: {module}")
  return tensor


def _check_leaves(
  folder: pathlib.Path, leaves: Mapping[parameters.Path, Any], config: ModelConfig
) -> None:
  # The checks of the loaders look at names and shapes and never read.
  read = lambda: np.empty(0)
  stored = {
    path: parameters.StoredTensor(".".join(path), tuple(leaf.shape), read)
    for path, leaf in leaves.items()
  }
  parameters.check_shapes(stored, parameters.parameter_shapes(config), str(folder))
  plain = {k: v for k, v in leaves.items() if not isinstance(v, QuantizedLinear)}
  parameters.check_finite({".".join(k): v for k, v in plain.items()}, str(folder))
  outside = [
    ".".join(path)
    for path, leaf in leaves.items()
    if isinstance(leaf, QuantizedLinear) and path[-2] not in TARGETS
  ]
  if outside:
    raise ValueRefusal(
      folder,
      expected=f"quantized weights of {', '.join(TARGETS)} only",
      got=f"also {', '.join(outside)}",
      mend="evaluate it where it came from",
    )
