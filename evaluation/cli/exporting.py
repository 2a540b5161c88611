"""Implements `mxjax export`: checks, measures and writes a quantized model."""

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.evaluation.cli import console, inputs
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.contract import Contract
from mxjax.storage import atomic_io, checkpoint, export
from mxjax.storage.export import (
  compressed_tensors,
  dequant,
  features,
  transformers_folder,
)
from mxjax.storage.export.folder import MANIFEST


def run(options: argparse.Namespace) -> None:
  """Writes the model that options name, and prints what was written.

  Raises:
    ValueError: Something dropped would not be measured, or `check` fails.
  """
  out = atomic_io.check_output(options.out)
  dropped = features.parse(options.drop)
  folder = inputs.checkpoint_folder(options.checkpoint)
  source = _open(folder)
  # Features that the format cannot hold are rejected before anything is measured.
  params = _check(options, dropped, source)
  record: dict[str, Any] = {"dropped": list(dropped)}
  if options.windows:
    tokenizer = models.Tokenizer.from_folder(folder / checkpoint.TOKENIZER)
    tokens = inputs.test_windows(options, options.data, tokenizer)
    record["evaluation"] = {
      "data": options.data or "embedded test",
      "perplexity": _measure(options, bool(dropped), source, params, tokens),
      "windows": list(np.shape(tokens)),
      "tokens": token_fingerprint(tokens),
    }
  elif dropped:
    raise ValueError(
      "export: a model that lost something is measured before it is written, got "
      "--windows 0; give it windows to be measured on."
    )
  writers = {
    "compressed-tensors": functools.partial(
      export.write_compressed_tensors, transforms=options.transforms
    ),
    "dequant": functools.partial(export.write_dequant, dtype=jnp.dtype(options.dtype)),
    "safetensors": export.write_state,
    "transformers": export.write_transformers,
  }
  ready = dataclasses.replace(source, params=params, record=record)
  float_folder = pathlib.Path(options.model) if options.model else None
  companions = export.Companions(folder / checkpoint.TOKENIZER, float_folder)
  shard_bytes = int(options.shard_gb * 1e9)
  writers[options.format](out, ready, companions, shard_bytes=shard_bytes)
  manifest = json.loads((out / MANIFEST).read_text())
  if options.json:
    print(json.dumps(manifest))
    return
  for name, value in record.get("evaluation", {}).get("perplexity", {}).items():
    console.say(f"perplexity, {name}: {value:.4f}")
  console.say(f"activations: {manifest['activations']}")
  console.say(f"wrote {options.format}: {out}")


def _open(folder: pathlib.Path) -> export.Source:
  """Opens a checkpoint under its own contract, with the metadata of an export."""
  manifest = checkpoint.read_manifest(folder)
  contract = Contract.from_dict(manifest["contract"])
  params, config = checkpoint.restore_checkpoint(folder, contract=contract)
  keys = ("digest", "contract", "contract_hash", "program", "calibration", "extra")
  facts = {key: manifest.get(key) for key in keys}
  return export.Source(params, models.ModelConfig.from_dict(config), facts=facts)


def _check(
  options: argparse.Namespace, dropped: tuple[str, ...], source: export.Source
) -> dict[str, Any]:
  """Drops features and checks that the format can hold the remaining params."""
  present = features.features_of(source.params)
  if absent := [name for name in dropped if name not in present]:
    raise ValueError(
      f"export: expected --drop of what the model has ({', '.join(present) or 'no'}), "
      f"got {', '.join(absent)}; leave these names out."
    )
  if dropped and options.format == "safetensors":
    raise ValueError(
      "export: --format safetensors holds everything, so there is nothing to --drop; "
      "leave it out."
    )
  if options.transforms and options.format != "compressed-tensors":
    raise ValueError(
      "export: --transforms is for --format compressed-tensors; leave it out."
    )
  params = export.drop(source.params, dropped)
  if options.format == "compressed-tensors":
    compressed_tensors.check(params, transforms=options.transforms)
  elif options.format == "dequant":
    dequant.check(params, source.config)
  elif options.format == "transformers":
    transformers_folder.to_tensors(params)
  return params


def _measure(
  options: argparse.Namespace,
  is_changed: bool,
  source: export.Source,
  params: Params,
  tokens: np.ndarray,
) -> dict[str, float]:
  """Measures perplexity of the checkpoint and of the exported model."""
  of = lambda params, config=source.config: (
    perplexity(models.CausalLM(config), params, tokens).mean
  )
  measured = {"checkpoint": of(source.params)}
  if is_changed:
    measured["with what was dropped left out"] = of(params)
  if options.format == "dequant":
    dtype = jnp.dtype(options.dtype)
    effective, config, _ = dequant.effective_params(params, source.config, dtype)
    measured["exported, activations not rounded"] = of(effective, config)
  if options.format == "compressed-tensors":
    name = "exported, activations as compressed-tensors rounds them"
    measured[name] = of(runtime_params(params))
  return measured


def runtime_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """Returns params with activations rounded as the compressed-tensors library does."""
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  rules = compressed_tensors.RUNTIME_RULES
  swap = lambda leaf: (
    dataclasses.replace(leaf, rules=rules) if is_linear(leaf) else leaf
  )
  return jax.tree.map(swap, dict(params), is_leaf=is_linear)
