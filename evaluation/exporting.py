"""What `mxjax export` does: refuse, measure and write a quantized model."""

import dataclasses
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
  """What to write.

  Attributes:
    format: `compressed-tensors`, `dequant` or `safetensors`.
    dropped: Names of `features.FEATURES` to leave out.
    transforms: Whether compressed-tensors keeps Hadamards as `transform_config`.
    dtype: Of the linears of `dequant`.
    shard_bytes: Largest file.
  """

  format: str
  dropped: tuple[str, ...]
  transforms: bool
  dtype: str
  shard_bytes: int


def tokenizer_folder(folder: pathlib.Path) -> pathlib.Path:
  """Where a checkpoint has its tokenizer."""
  return folder / checkpoint.TOKENIZER


def open_checkpoint(folder: pathlib.Path) -> export.Source:
  """A checkpoint under its own contract, with the facts that an export repeats."""
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
  """Params without what is dropped, after checking that the format can hold them.

  Raises:
    ValueError: The model does not have what should be dropped, the options do not fit
      the format, or the format cannot hold what is left.
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
  params = dict(source.params)
  if target.dropped:
    params = export.drop(params, target.dropped)
  if target.format == "compressed-tensors":
    compressed_tensors.check(params, transforms=target.transforms)
  elif target.format == "dequant":
    dequant.check(params, source.config)
  return params


def measure(
  target: Target, source: export.Source, changed: Params, tokens: np.ndarray
) -> dict[str, Any]:
  """Perplexity of the checkpoint, and of what the folder will compute; JSON-ready.

  `changed` has the params without what is dropped; tokens are `[windows, length]`.
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
  """Params whose activations follow the compressed-tensors library's own rule."""
  is_linear = lambda node: isinstance(node, QuantizedLinear)
  swap = lambda leaf: (
    dataclasses.replace(leaf, rules=compressed_tensors.RUNTIME_RULES)
    if is_linear(leaf)
    else leaf
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
  """Writes the folder `out`; returns its manifest, which repeats `record`.

  `changed` has the params without what is dropped. The tokenizer of the checkpoint's
  `folder` goes along, and config and tokenizer files of the float model's.
  """
  ready = dataclasses.replace(source, params=changed, record=dict(record))
  companions = export.Companions(tokenizer_folder(folder), float_folder)
  options: dict[str, Any] = {"shard_bytes": target.shard_bytes}
  if target.format == "compressed-tensors":
    writer = export.write_compressed_tensors
    options["transforms"] = target.transforms
  elif target.format == "dequant":
    writer, options["dtype"] = export.write_dequant, jnp.dtype(target.dtype)
  else:
    writer = export.write_state
  writer(out, ready, companions, **options)
  return json.loads((out / MANIFEST).read_text())
