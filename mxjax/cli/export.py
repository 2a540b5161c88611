"""`mxjax export`: writes a quantized model in the format of another program."""

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mxjax import methods
from mxjax.cli import options as shared
from mxjax.errors import FileNotFoundRefusal, ValueRefusal

if TYPE_CHECKING:
  import numpy as np

  from mxjax.calibration.calibration import Params
  from mxjax.storage.export import Source

FORMATS = ("compressed-tensors", "gguf", "dequant", "safetensors", "transformers")
COMPRESSED = ("rtn", "gptq", "spinquant", "focus")
"""Methods whose models compressed-tensors holds as they are."""
TRANSFORMED = ("mr-gptq", "brq")
"""Methods whose models it holds with --transforms."""


def formats(method: str, model: str | None = None) -> tuple[str, ...]:
  """Returns the formats that can hold what a method makes of a float model.

  `method` has its options. `model` is its place, None for the embedded one; a model
  that is no GGUF file has nothing from which gguf takes tokenizer and settings.
  """
  has_gguf = model is None or model.endswith(".gguf")
  name, tuned = methods.base_name(method), "+tune" in method
  # Both add to a linear what compressed-tensors has no place for.
  is_recovered = method.startswith(f"{name}+r") or "recover=" in method
  plain = () if tuned or is_recovered else (*COMPRESSED, *TRANSFORMED)
  lacking = () if name in plain else ("compressed-tensors",)
  # A GGUF file holds no online maps, so that what needs --transforms has no place in
  # it.
  lacking += () if name in plain and name in COMPRESSED and has_gguf else ("gguf",)
  return tuple(form for form in FORMATS if form not in lacking)


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "export",
    help="write a quantized model for other programs",
    description="Writes a folder of `quantize` in another format. What the format "
    "cannot hold is refused by name; --drop leaves it out, and then the model is "
    "measured again before it is written, with the result in "
    "OUT/mxjax_export.json.",
  )
  shared.add(parser, "checkpoint")
  add = parser.add_argument
  add(
    "--format",
    required=True,
    choices=FORMATS,
    help="compressed-tensors, which transformers reads with that library, where the "
    f"activation rule is the runtime's, for {', '.join(COMPRESSED)}, and "
    f"{' and '.join(TRANSFORMED)} with --transforms; gguf, for llama.cpp, which rounds "
    f"activations its own way, for {', '.join(COMPRESSED)} of Llama models with a GGUF "
    "file of the float model as --model; dequant, a plain folder of effective weights "
    "whose activations are not rounded; safetensors, all of our own state; "
    "transformers, everything, and torch code that runs the strict model, slowly",
  )
  shared.add(parser, "--out")
  add(
    "--drop",
    metavar="NAMES",
    help="comma list of what to leave out, by the names that a refusal gives, such as "
    "maps,refinement",
  )
  add(
    "--transforms",
    action="store_true",
    help="keep Hadamards without signs as transform_config; a runtime that ignores it "
    "computes nonsense",
  )
  add(
    "--model",
    metavar="PLACE",
    help="the folder of the float model, of which config.json, generation config and "
    "tokenizer files are taken; for gguf its .gguf file, of which tokenizer and "
    "settings are",
  )
  add(
    "--dtype",
    default="bfloat16",
    choices=("bfloat16", "float32"),
    help="of the linears of dequant",
  )
  add("--shard-gb", type=float, default=5.0, metavar="GB", help="largest file")
  group = parser.add_argument_group("measuring")
  shared.add(group, "--data", help="the embedded text when omitted")
  help_text = "0 measures nothing, where nothing is dropped"
  shared.add(group, "--windows", type=shared.whole(0), help=help_text)
  shared.add(group, "--window-length")
  shared.add(parser, "--json")
  parser.set_defaults(run=run, unset={"dtype": parser.get_default("dtype")})


def run(options: argparse.Namespace) -> None:
  """Writes the model in the format, after measuring what it lost, and says so.

  Raises:
    FileNotFoundError: The float model's folder does not exist.
    ValueError: The largest file has no size, options would be ignored, something
      dropped would not be measured, or the format cannot hold the model.
  """
  model = None if options.model is None else pathlib.Path(options.model)
  if options.format == "gguf":
    what, is_there = "GGUF file", model is not None and model.is_file()
  else:
    what, is_there = "folder", model is None or model.is_dir()
  if not is_there:
    raise FileNotFoundRefusal(
      "export",
      expected=f"--model with the {what} of the float model",
      got="none" if model is None else f"{model}, which is not a {what}",
      mend="pass its path, or use --format dequant, which needs no such file"
      if options.format == "gguf"
      else "correct the path",
    )
  if not 0 < options.shard_gb < float("inf"):
    raise ValueRefusal("export", "a finite --shard-gb above 0", got=options.shard_gb)
  if options.format != "dequant" and shared.given(options, "dtype"):
    raise ValueRefusal(
      "export",
      expected="--format dequant beside --dtype",
      got=f"{options.format}, which writes what the checkpoint has",
      mend="leave --dtype out",
    )
  import jax.numpy as jnp
  import numpy as np

  from mxjax import models
  from mxjax.calibration.calibration import token_fingerprint
  from mxjax.cli import inputs, output
  from mxjax.evaluation import subjects
  from mxjax.storage import atomic_io, checkpoint, export
  from mxjax.storage.export import card, features
  from mxjax.storage.export.folder import MANIFEST

  out = atomic_io.check_output(options.out)
  dropped = features.parse(options.drop)
  folder = subjects.checkpoint_folder(options.checkpoint)
  source = _open(folder)
  shared.fit_lengths(options, source.config.max_positions)
  # Features that the format cannot hold are rejected before anything is measured.
  params = _check(options, dropped, source)
  record: dict[str, Any] = {
    "dropped": list(dropped),
    "built": _built(folder.parent, source.facts),
  }
  # Measured before it is written, so that the folder's manifest and card say what the
  # export lost.
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
    raise ValueRefusal(
      "export",
      expected="--windows of 1 or more for a model that lost something, which is "
      "measured before it is written",
      got=0,
    )
  writers = {
    "compressed-tensors": functools.partial(
      export.write_compressed_tensors, transforms=options.transforms
    ),
    "gguf": export.write_gguf,
    "dequant": functools.partial(export.write_dequant, dtype=jnp.dtype(options.dtype)),
    "safetensors": export.write_state,
    "transformers": export.write_transformers,
  }
  output.stage("export, writing")
  writers[options.format](
    out,
    dataclasses.replace(source, params=params, record=record),
    export.Companions(folder / checkpoint.TOKENIZER, model),
    shard_bytes=int(options.shard_gb * 1e9),
  )
  manifest = json.loads((out / MANIFEST).read_text())
  if options.json:
    print(json.dumps(manifest))
    return
  for name, perplexity in card.perplexities(record.get("evaluation")).items():
    output.say(f"{name}: {perplexity}")
  output.say(f"activations: {manifest['activations']}")
  output.say(f"wrote {options.format}: {out}")


def _open(folder: pathlib.Path) -> "Source":
  """Opens a checkpoint under its own contract, with the metadata of an export."""
  from mxjax import models
  from mxjax.numerics.contract import Contract
  from mxjax.storage import checkpoint
  from mxjax.storage.export import Source

  manifest = checkpoint.read_manifest(folder)
  # Its own, whatever that is: an export holds a model as it was built.
  contract = Contract.from_dict(manifest["contract"])
  params, config = checkpoint.restore_checkpoint(folder, contract=contract)
  keys = ("digest", "contract", "contract_hash", "program", "calibration", "extra")
  facts = {key: manifest.get(key) for key in keys}
  return Source(params, models.ModelConfig.from_dict(config), facts=facts)


def _built(folder: pathlib.Path, facts: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns what the build in `folder` measured of a model on its first text.

  `facts` are of the checkpoint. Without a finished build in the folder, or with one of
  other models alone, nothing is known, and None is returned.

  Raises:
    ValueError: The results are not what the build wrote.
  """
  from mxjax.storage import atomic_io, digested_json

  # A file of this name may be anybody's where no build has listed it.
  if not (folder / digested_json.OUTPUTS).is_file():
    return None
  expected, mend = "the results that a build wrote", f"see mxjax verify {folder}"
  listed = digested_json.read(folder / digested_json.OUTPUTS, expected, mend)["files"]
  results = {name: entry for name, entry in listed.items() if name == "result.json"}
  if faults := atomic_io.damaged_files(folder, results):
    raise ValueRefusal(folder, expected, got=faults[0], mend=mend)
  rows = [row for name in results for row in json.loads((folder / name).read_text())]
  known = {"program": facts["program"], "calibration": facts["calibration"]}
  for row in rows:
    if {key: row["record"][key] for key in known} == known:
      text, measured = next(iter(row["perplexity"].items()))
      return {
        "data": text,
        "windows": [measured["windows"], measured["length"]],
        "perplexity": {
          "float model": row["float_perplexity"][text],
          row["record"]["form"]: measured["mean"],
        },
        "agreement": row["agreement"],
      }
  return None


def _check(
  options: argparse.Namespace, dropped: tuple[str, ...], source: "Source"
) -> dict[str, Any]:
  """Drops features and checks that the format can hold the remaining params."""
  from mxjax.storage.export import (
    compressed_tensors,
    dequant,
    features,
    gguf,
    transformers_folder,
  )

  present = features.features_of(source.params)
  if absent := [name for name in dropped if name not in present]:
    raise ValueRefusal(
      "export",
      expected=f"--drop of what the model has ({', '.join(present) or 'nothing'})",
      got=", ".join(absent),
      mend="leave these names out",
    )
  if dropped and options.format == "safetensors":
    raise ValueRefusal(
      "export",
      expected="nothing to --drop for --format safetensors, which holds everything",
      got=", ".join(dropped),
      mend="leave it out",
    )
  if options.transforms and options.format != "compressed-tensors":
    raise ValueRefusal(
      "export",
      expected="--format compressed-tensors beside --transforms",
      got=options.format,
      mend="leave --transforms out",
    )
  params = features.drop(source.params, dropped)
  if options.format == "compressed-tensors":
    compressed_tensors.check(params, transforms=options.transforms)
  elif options.format == "gguf":
    gguf.check(params)
  elif options.format == "dequant":
    dequant.check(params, source.config)
  elif options.format == "transformers":
    # For its refusals; the tensors are made again when they are written.
    transformers_folder.to_tensors(params)
  return params


def _measure(
  options: argparse.Namespace,
  is_changed: bool,
  source: "Source",
  params: "Params",
  tokens: "np.ndarray",
) -> dict[str, float]:
  """Measures perplexity of the checkpoint and of the exported model."""
  import jax.numpy as jnp

  from mxjax import models
  from mxjax.cli import output
  from mxjax.evaluation.measures.perplexity import perplexity
  from mxjax.storage.export import compressed_tensors, dequant, gguf

  measured: dict[str, float] = {}

  def measure(
    what: str, params: "Params", config: models.ModelConfig = source.config
  ) -> None:
    output.stage(f"export, perplexity, {what}")
    measured[what] = perplexity(models.CausalLM(config), params, tokens).mean

  # The same tokens for all of them, so that the differences are those of the models.
  measure("checkpoint", source.params)
  if is_changed:
    measure("with what was dropped left out", params)
  if options.format == "dequant":
    dtype = jnp.dtype(options.dtype)
    effective, config, _ = dequant.effective_params(params, source.config, dtype)
    measure("exported, activations not rounded", effective, config)
  if options.format == "gguf":
    measure("exported, activations not rounded", gguf.runtime_params(params))
  if options.format == "compressed-tensors":
    facts = source.facts["contract"]
    is_float = facts.get("activations") == "float"
    how = "not rounded" if is_float else "as compressed-tensors rounds them"
    measure(f"exported, activations {how}", compressed_tensors.runtime_params(params))
  return measured
