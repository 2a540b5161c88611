"""`mxjax export` and `mxjax import`: quantized models between programs."""

import argparse
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.calibration.calibration import token_fingerprint
from mxjax.evaluation import datasets
from mxjax.evaluation.cli import console
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.contract import Contract
from mxjax.storage import atomic_io, checkpoint
from mxjax.storage import export as exporters
from mxjax.storage.export import compressed_tensors, dequant, features
from mxjax.storage.export.folder import MANIFEST

FORMATS = ("compressed-tensors", "dequant", "safetensors")
Params = Mapping[str, Any]


def export(options: argparse.Namespace) -> None:
  """`mxjax export`."""
  out = atomic_io.check_output(options.out)
  dropped = features.parse(options.drop)
  source, companions, tokenizer = _open(options)
  changed = exporters.drop(source.params, dropped) if dropped else source.params
  _check_asked(options, dropped, source.params)
  # What stays and cannot be held is refused before anything is measured.
  _refuse(options, changed, source.config)
  record: dict[str, Any] = {"dropped": list(dropped)}
  if options.windows:
    record["evaluation"] = _measure(options, source, changed, tokenizer)
  elif dropped:
    raise ValueError(
      "export: a model that lost something is measured before it is written, got "
      "--windows 0; give it windows to be measured on."
    )
  ready = dataclasses.replace(source, params=changed, record=record)
  _write(options, out, ready, companions)
  manifest = json.loads((out / MANIFEST).read_text())
  if options.json:
    print(json.dumps(manifest))
    return
  for name, value in record.get("evaluation", {}).get("perplexity", {}).items():
    console.STDOUT.print(f"perplexity, {name}: {value:.4f}", highlight=False)
  console.STDOUT.print(f"activations: {manifest['activations']}", highlight=False)
  console.STDOUT.print(f"wrote {options.format}: {out}", highlight=False)


def _open(
  options: argparse.Namespace,
) -> tuple[exporters.Source, exporters.Companions, models.Tokenizer]:
  """The checkpoint of a folder of `quantize`, under its own contract."""
  folder = pathlib.Path(options.checkpoint)
  if (folder / "checkpoint").is_dir():
    folder = folder / "checkpoint"
  manifest = checkpoint.read_manifest(folder)
  contract = Contract.from_dict(manifest["contract"])
  params, config = checkpoint.restore_checkpoint(folder, contract=contract)
  keys = ("digest", "contract", "contract_hash", "program", "calibration", "extra")
  source = exporters.Source(
    params,
    models.ModelConfig.from_dict(config),
    facts={key: manifest.get(key) for key in keys},
  )
  place = folder / checkpoint.TOKENIZER
  model = pathlib.Path(options.model) if options.model else None
  return (
    source,
    exporters.Companions(place, model),
    models.Tokenizer.from_folder(place),
  )


def _check_asked(
  options: argparse.Namespace, dropped: tuple[str, ...], params: Params
) -> None:
  present = features.features_of(params)
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


def _refuse(
  options: argparse.Namespace, params: Params, config: models.ModelConfig
) -> None:
  if options.format == "compressed-tensors":
    compressed_tensors.check(params, transforms=options.transforms)
  elif options.format == "dequant":
    dequant.check(params, config)


def _measure(
  options: argparse.Namespace,
  source: exporters.Source,
  changed: Params,
  tokenizer: models.Tokenizer,
) -> dict[str, Any]:
  """Perplexity of the checkpoint, and of what the folder will compute."""
  tokens = datasets.load_tokens(
    options.data,
    tokenizer,
    count=options.windows,
    length=options.window_length,
    split="test",
  )
  model = models.CausalLM(source.config)
  of: Callable[[models.CausalLM, Params], float] = lambda model, params: (
    perplexity(model, params, tokens).mean
  )
  measured = {"checkpoint": of(model, source.params)}
  if options.drop:
    measured["with what was dropped left out"] = of(model, changed)
  if options.format == "dequant":
    params, config, _ = dequant.effective_params(
      changed, source.config, jnp.dtype(options.dtype)
    )
    measured["exported, activations not rounded"] = of(models.CausalLM(config), params)
  if options.format == "compressed-tensors":
    measured["exported, activations as compressed-tensors rounds them"] = of(
      model, runtime_params(changed)
    )
  return {
    "perplexity": measured,
    "data": options.data or "embedded test",
    "windows": list(np.shape(tokens)),
    "tokens": token_fingerprint(tokens),
  }


def runtime_params(params: Params) -> dict[str, Any]:
  """Params whose activations follow the compressed-tensors library's own rule."""
  swap = lambda leaf: (
    dataclasses.replace(leaf, rules=compressed_tensors.RUNTIME_RULES)
    if isinstance(leaf, QuantizedLinear)
    else leaf
  )
  return jax.tree.map(
    swap, dict(params), is_leaf=lambda n: isinstance(n, QuantizedLinear)
  )


def _write(
  options: argparse.Namespace,
  out: pathlib.Path,
  source: exporters.Source,
  companions: exporters.Companions,
) -> None:
  shard_bytes = int(options.shard_gb * 1e9)
  if options.format == "compressed-tensors":
    exporters.write_compressed_tensors(
      out,
      source,
      companions,
      transforms=options.transforms,
      shard_bytes=shard_bytes,
    )
  elif options.format == "dequant":
    exporters.write_dequant(
      out,
      source,
      companions,
      dtype=jnp.dtype(options.dtype),
      shard_bytes=shard_bytes,
    )
  else:
    exporters.write_state(out, source, companions, shard_bytes=shard_bytes)


def import_(options: argparse.Namespace) -> None:
  """`mxjax import`."""
  out = atomic_io.check_output(options.out)
  folder = pathlib.Path(options.folder)
  model = exporters.read_compressed_tensors(folder)
  tokenizer = models.load_tokenizer(str(folder))
  with tempfile.TemporaryDirectory() as scratch:
    tokenizer.save(pathlib.Path(scratch))
    checkpoint.save_checkpoint(
      out / "checkpoint",
      model.params,
      model.config,
      program={"name": f"imported from {compressed_tensors.METHOD}"},
      tokenizer_files=sorted(pathlib.Path(scratch).iterdir()),
      extra={"rounds_inputs": model.rounds_inputs},
    )
  rounds = "rounded by our rule" if model.rounds_inputs else "not rounded (W4A16)"
  console.STDOUT.print(f"activations: {rounds}", highlight=False)
  console.STDOUT.print(f"wrote checkpoint: {out}", highlight=False)


def add_commands(commands: Any) -> None:
  """Adds `export` and `import` to the parser of `mxjax`."""
  _add_export(
    commands.add_parser(
      "export",
      help="write a quantized model for other programs",
      description="Writes a folder of `quantize` in another format. What the format "
      "cannot hold is refused by name; --drop leaves it out, and then the model is "
      "measured again before it is written, with the result in "
      "OUT/mxjax_export.json.",
    )
  )
  parser = commands.add_parser(
    "import",
    help="read a compressed-tensors MXFP4 model, to evaluate it here",
    description="Reads a compressed-tensors folder (mxfp4-pack-quantized) and writes "
    "OUT/checkpoint, which `mxjax evaluate` takes. Codes and scales stay as they are.",
  )
  parser.add_argument("folder", metavar="FOLDER")
  parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  parser.set_defaults(run=import_)


def _add_export(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    "checkpoint", metavar="DIR", help="a folder written by `quantize`"
  )
  parser.add_argument(
    "--format",
    required=True,
    choices=FORMATS,
    help="compressed-tensors for vLLM and its like, where the activation rule is the "
    "runtime's; dequant, a plain folder of effective weights whose activations are not "
    "rounded; safetensors, all of our own state",
  )
  parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
  names = ", ".join([*features.FEATURES, *features.GROUPS])
  parser.add_argument("--drop", metavar="NAMES", help=f"comma list of {names}")
  parser.add_argument(
    "--transforms",
    action="store_true",
    help="keep Hadamards without signs as transform_config; a runtime that ignores it "
    "computes nonsense",
  )
  parser.add_argument(
    "--model",
    metavar="FOLDER",
    help="the folder of the float model: its config.json, generation config and "
    "tokenizer files are taken",
  )
  parser.add_argument(
    "--dtype",
    default="bfloat16",
    choices=("bfloat16", "float32"),
    help="of the linears of dequant",
  )
  parser.add_argument("--shard-gb", type=float, default=5.0, metavar="GB")
  group = parser.add_argument_group("measuring")
  group.add_argument("--data", metavar="DATA", help="the embedded text when omitted")
  group.add_argument(
    "--windows",
    type=int,
    default=8,
    metavar="N",
    help="0 measures nothing, where nothing is dropped",
  )
  group.add_argument("--window-length", type=int, default=2048, metavar="T")
  parser.add_argument("--json", action="store_true", help="print the manifest")
  parser.set_defaults(run=export)
