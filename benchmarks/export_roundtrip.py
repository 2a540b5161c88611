"""Exports quantized models and lets the programs they are meant for read them.

Quantizing, exporting and our own numbers run in the project's environment; the reading
side runs in one of its own, which has torch, transformers and compressed-tensors:

  python -m venv .venv-consumer
  .venv-consumer/bin/pip install torch==2.13.0
  .venv-consumer/bin/pip install transformers==5.23.0 compressed-tensors==0.20.0
  .venv/bin/python benchmarks/export_roundtrip.py --consumer .venv-consumer/bin/python

For every export: do the library's decompressed weights equal ours bit for bit, does
transformers load the same values, and what perplexity do both sides compute on the
same tokens. Three of ours are compared with torch: weights alone (activations not
rounded, which is also all that a dequant folder computes), activations rounded as
compressed-tensors does it, and strict W4A4, which the code in a `transformers` folder
computes. For the last, the mean KL between both sides is measured as well.
"""

import dataclasses
import json
import pathlib
import subprocess
import tempfile

import common
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save_file

from mxjax import models
from mxjax.cli import main as cli
from mxjax.evaluation import datasets
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.loading.weights import tensor_name
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.storage import checkpoint, export
from mxjax.storage.export import compressed_tensors, dequant, features

TEXT = "The steam engine of 1712 pumped water: 12 strokes a minute.\n"
EXPORTS = {
  "rtn": [("compressed-tensors", ())],
  "batquant": [("transformers", ())],
  "gptq": [("compressed-tensors", ()), ("dequant", ())],
  "spinquant": [("compressed-tensors", ())],
  "torq": [("transformers", ())],
  "mr-gptq": [
    ("compressed-tensors", ("--transforms",)),
    ("dequant", ()),
    ("transformers", ()),
  ],
  "hires": [
    ("transformers", ()),
    ("dequant", ()),
    ("dequant", ("--dtype", "float32")),
    ("compressed-tensors", ("--drop", "maps,refinement,recovery")),
  ],
}
"""What is exported of each method, with further options."""


def run(*arguments):
  code = cli.main([str(part) for part in arguments])
  assert code == 0, arguments


def is_quantized(node):
  return isinstance(node, QuantizedLinear)


def unrounded(params):
  """The same model with inputs that are mapped but not rounded."""
  change = lambda leaf: dataclasses.replace(leaf, rounding=Unrounded())
  return jax.tree.map(
    lambda leaf: change(leaf) if is_quantized(leaf) else leaf,
    params,
    is_leaf=is_quantized,
  )


def decoded(params):
  return {
    tensor_name(path): mxfp4.decode(leaf.weight)
    for path, leaf in features.nodes(params)
    if is_quantized(leaf)
  }


def ours(form, params, config, tokens, options):
  """Our perplexities of what an export computes, and of the strict model."""
  model = models.CausalLM(config)
  of = lambda model, params: perplexity(model, params, tokens).mean
  result = {
    "strict_w4a4_floor": of(model, params),
    "weight_only": of(model, unrounded(params)),
  }
  if form == "transformers":
    return result
  if form == "compressed-tensors":
    result["activations_as_compressed_tensors"] = of(
      model, compressed_tensors.runtime_params(params)
    )
    return result
  dtype = options[options.index("--dtype") + 1] if "--dtype" in options else "bfloat16"
  effective, new, error = dequant.effective_params(params, config, jnp.dtype(dtype))
  result["effective_weights"] = of(models.CausalLM(new), effective)
  result["largest_relative_rounding_error"] = error
  return result


def exports_of(source, method, scratch, tokens, options):
  """Quantizes once, exports in every form; yields name, job entry and our numbers."""
  out = scratch / method
  model = [source] if source else []
  arguments = ["quantize", *model, "--method", method, "--out", out, "--windows", 1]
  arguments += ["--sequences", options.sequences, "--length", options.length]
  run(*arguments, "--window-length", options.length, "--dtype", "float32")
  params, config = checkpoint.restore_checkpoint(out / "checkpoint")
  config = models.ModelConfig.from_dict(config)
  for number, (form, extra) in enumerate(EXPORTS[method]):
    folder = scratch / f"{method}-{number}"
    run("export", out, "--format", form, "--out", folder, "--windows", options.windows,
        "--window-length", options.length, *extra)  # fmt: skip
    kept = params
    if "--drop" in extra:
      kept = export.drop(params, features.parse(extra[extra.index("--drop") + 1]))
    entry = {"folder": str(folder), "format": form}
    if form == "compressed-tensors":
      entry["expected"] = str(scratch / f"{method}-{number}.expected.safetensors")
      save_file(decoded(kept), entry["expected"])
      again = export.read_compressed_tensors(folder).params
      pairs = zip(jax.tree.leaves(again), jax.tree.leaves(kept), strict=True)
      same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
      assert same, "our importer read other bits"
    if form == "transformers":
      entry["logits"] = str(scratch / f"{method}-{number}.logits.npy")
      logits = models.CausalLM(config).apply({"params": params}, tokens[:1])
      np.save(entry["logits"], np.asarray(logits))
    name = " ".join([method, form, *extra])
    yield name, entry, ours(form, kept, config, tokens, extra)


def roundtrip(source, methods, options):
  with tempfile.TemporaryDirectory() as place:
    scratch = pathlib.Path(place)
    tokenizer = models.load_tokenizer(source)
    tokens = datasets.load_tokens(
      None, tokenizer, count=options.windows, length=options.length, split="test"
    )
    np.save(scratch / "tokens.npy", tokens)
    job = {"tokens": str(scratch / "tokens.npy"), "text": TEXT, "folders": {}}
    numbers = {}
    for method in methods:
      for name, entry, own in exports_of(source, method, scratch, tokens, options):
        job["folders"][name], numbers[name] = entry, own
    (scratch / "job.json").write_text(json.dumps(job))
    command = [
      options.consumer,
      str(pathlib.Path(__file__).with_name("export_consumer.py")),
      scratch / "job.json",
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    reply = json.loads(output.splitlines()[-1])
    ids = tokenizer.encode(TEXT).tolist()
    rows = {}
    for name, theirs in reply["results"].items():
      theirs["tokenizer_agrees"] = theirs.pop("text_ids") == ids
      found = {"ours": numbers[name], "theirs": theirs}
      rows[name] = found | compare(numbers[name], theirs)
      print(json.dumps({name: rows[name]}, indent=1), flush=True)
    return rows, reply["versions"]


COMPARED = {
  "weight_only": ("weights alone", "weight_only", "perplexity_weight_only"),
  "strict": ("strict W4A4", "strict_w4a4_floor", "perplexity_strict"),
  "activations_rounded": (
    "activations as compressed-tensors rounds them",
    "activations_as_compressed_tensors",
    "perplexity_as_loaded",
  ),
  "effective_weights": ("effective weights", "effective_weights", "perplexity"),
}
"""Perplexities that should be one number: their name, ours and theirs."""


def compare(own, theirs):
  """Relative differences of what both sides computed."""
  return {
    "relative_difference": {
      key: theirs[other] / own[mine] - 1
      for key, (_, mine, other) in COMPARED.items()
      if mine in own and other in theirs
    }
  }


def table(result):
  """The table of docs/guides/export.md."""
  head = ["model", "export", "linears equal bit for bit", "compared", "ours", "theirs"]
  lines = []
  for model, found in result.items():
    for name, row in found["exports"].items():
      theirs = row["theirs"]
      equal = "-"
      if "linears" in theirs:
        equal = theirs["linears"] - len(theirs["library_bits_unequal"])
        equal = f"{equal} of {theirs['expected_linears']}"
      for key, difference in row["relative_difference"].items():
        label, mine, other = COMPARED[key]
        values = [f"{row['ours'][mine]:.4f}", f"{theirs[other]:.4f}"]
        lines.append([model, name, equal, label, *values, f"{difference:+.0e}"])
  return common.markdown([*head, "relative difference"], lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--consumer", required=True, help="python with torch")
  parser.add_argument("--models", default="models/trained/llama")
  parser.add_argument("--methods", default=",".join(EXPORTS))
  parser.add_argument("--sequences", type=int, default=16)
  parser.add_argument("--windows", type=int, default=8)
  parser.add_argument("--length", type=int, default=256)
  options = parser.parse_args()
  made, result = common.stamp(), common.read(options.out, {})
  for source in options.models.split(","):
    rows, versions = roundtrip(
      None if source == "embedded" else source, options.methods.split(","), options
    )
    name = "SmolLM2-135M-Instruct" if source == "embedded" else source
    known = result.get(name, {}).get("exports", {})
    result[name] = made | {"exports": known | rows}
    result[name]["versions"] = made["versions"] | versions
    common.write(options.out, result, table(result))


if __name__ == "__main__":
  main()
