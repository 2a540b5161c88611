"""Implements `mxjax export`: checks, measures and writes a quantized model."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.calibration.calibration import token_fingerprint
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.contract import Contract
from mxjax.storage import checkpoint, export
from mxjax.storage.export import compressed_tensors, dequant, features
from mxjax.storage.export.folder import MANIFEST

Params = Mapping[str, Any]


class Target(NamedTuple):
  """Output options of an export.

  `format` is `compressed-tensors`, `dequant` or `safetensors`; `dropped` are names of
  `features.FEATURES` to leave out. `transforms` keeps Hadamards as `transform_config`
  of compressed-tensors; `dtype` is that of the linears of `dequant`; `shard_bytes` the
  largest file size.
  """

  format: str
  dropped: tuple[str, ...]
  transforms: bool
  dtype: str
  shard_bytes: int


def open_checkpoint(folder: pathlib.Path) -> export.Source:
  """Opens a checkpoint under its own contract, with the metadata of an export."""
  manifest = checkpoint.read_manifest(folder)
  contract = Contract.from_dict(manifest["contract"])
  params, config = checkpoint.restore_checkpoint(folder, contract=contract)
  keys = ("digest", "contract", "contract_hash", "program", "calibration", "extra")
  return export.Source(
    params,
    models.ModelConfig.from_dict(config),
    facts={key: manifest.get(key) for key in keys},
  )


def check(target: Target, source: export.Source) -> dict[str, Any]:
  """Drops `target.dropped` and checks that the format can hold the remaining params.

  Raises:
    ValueError: The model lacks a feature to drop, the options do not fit the format, or
      the format cannot hold the remaining params.
  """
  present = features.features_of(source.params)
  if absent := [name for name in target.dropped if name not in present]:
    raise ValueError(
      f"export: expected --drop of what the model has ({', '.join(present) or 'no'}), "
      f"got {', '.join(absent)}; leave these names out."
    )
  if target.dropped and target.format == "safetensors":
    raise ValueError(
      "export: --format safetensors holds everything, so there is nothing to --drop; "
      "leave it out."
    )
  if target.transforms and target.format != "compressed-tensors":
    raise ValueError(
      "export: --transforms is for --format compressed-tensors; leave it out."
    )
  params = export.drop(source.params, target.dropped)
  if target.format == "compressed-tensors":
    compressed_tensors.check(params, transforms=target.transforms)
  elif target.format == "dequant":
    dequant.check(params, source.config)
  return params


def measure(
  target: Target, source: export.Source, changed: Params, tokens: np.ndarray
) -> dict[str, Any]:
  """Measures perplexity of the checkpoint and of the exported model; JSON-ready.

  `changed` are the params after dropping features; tokens are `[windows, length]`.
  """
  of = lambda params, config=source.config: (
    perplexity(models.CausalLM(config), params, tokens).mean
  )
  measured = {"checkpoint": of(source.params)}
  if target.dropped:
    measured["with what was dropped left out"] = of(changed)
  if target.format == "dequant":
    dtype = jnp.dtype(target.dtype)
    params, config, _ = dequant.effective_params(changed, source.config, dtype)
    measured["exported, activations not rounded"] = of(params, config)
  if target.format == "compressed-tensors":
    name = "exported, activations as compressed-tensors rounds them"
    measured[name] = of(runtime_params(changed))
  return {
    "perplexity": measured,
    "windows": list(np.shape(tokens)),
    "tokens": token_fingerprint(tokens),
  }


def runtime_params(params: Params) -> dict[str, Any]:
  """Returns params with activations rounded as the compressed-tensors library does."""
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  rules = compressed_tensors.RUNTIME_RULES
  swap = lambda leaf: (
    dataclasses.replace(leaf, rules=rules) if is_linear(leaf) else leaf
  )
  return jax.tree.map(swap, dict(params), is_leaf=is_linear)


def write(
  out: pathlib.Path,
  target: Target,
  source: export.Source,
  changed: Params,
  record: Mapping[str, Any],
  folder: pathlib.Path,
  float_folder: pathlib.Path | None,
) -> dict[str, Any]:
  """Writes the folder `out`; returns its manifest, which includes `record`.

  `changed` are the params after dropping features. The tokenizer is copied from the
  checkpoint's `folder`, config and tokenizer files from `float_folder`.
  """
  writers = {
    "compressed-tensors": functools.partial(
      export.write_compressed_tensors, transforms=target.transforms
    ),
    "dequant": functools.partial(export.write_dequant, dtype=jnp.dtype(target.dtype)),
    "safetensors": export.write_state,
  }
  ready = dataclasses.replace(source, params=changed, record=dict(record))
  companions = export.Companions(folder / checkpoint.TOKENIZER, float_folder)
  writers[target.format](out, ready, companions, shard_bytes=target.shard_bytes)
  return json.loads((out / MANIFEST).read_text())
