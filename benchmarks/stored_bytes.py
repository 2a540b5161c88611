"""All stored bytes of methods on three sizes of models, beside the error measured.

  python benchmarks/stored_bytes.py [--measure METHOD ... --data ../shared/data]

Bytes are those of `mxjax plan --method`: every array that a checkpoint holds. KL from
the float model is taken from results/hires_next_smollm2.json, or for three methods from
the older results/hires_next.json, where it was measured on SmolLM2-135M-Instruct and
WikiText-2 after the first calibration draw. `--measure` builds further methods and
measures them on the same tokens, as `hires_next.py` does; they are kept in the result
file. No error was measured at 1B and 8B. It also writes results/paper_by_size.json,
what the paper's tables say by model size.
"""

import json
import pathlib
import statistics
import time

import common
import hires_next

from mxjax import methods, models
from mxjax.audit import plan
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.tables.paper import PAPER, value
from mxjax.models import families
from mxjax.run.quantize import run

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden"
LLAMA_1B = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 128256,
  "hidden_size": 2048,
  "intermediate_size": 8192,
  "num_hidden_layers": 16,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "head_dim": 64,
  "tie_word_embeddings": True,
}
"""The shapes of Llama-3.2-1B."""
METHODS = (
  "rtn",
  "gptq",
  "brq",
  "wush",
  "wush:weighting=fisher+tune",
  "hires",
  "hires:storage=bfloat16",
  "hires-next",
  "hires-rotated",
  "gptq:activations=float",
  "hires:activations=float",
)
MEASURED = {
  "hires_next_smollm2": {
    name: name for name in ("hires", "hires-next", "hires-rotated")
  },
  "hires_next": {
    "rtn": "rtn",
    "wush": "wush",
    "wush:weighting=fisher+tune": "wush, fisher, tuned",
  },
}
"""By result file, the rows that are one of these methods."""
TEXT, DRAW = "WikiText-2", 1
PAPER_METHODS = ("BF16", "RTN", "GPTQ", "BRQ", "WUSH", "HiRes")
SHOWN = "RTN", "HiRes"


def configs():
  """The models by the name of their size."""
  values = json.loads((GOLDEN / "paper_configs.json").read_text())["Llama-3-8B"]
  return {
    "SmolLM2-135M-Instruct": models.load_config(None),
    "Llama-3.2-1B": families.from_hf_config(LLAMA_1B),
    "Llama-3-8B": families.from_hf_config(values),
  }


def built_and_measured(method, data):
  """KL and loss of a method by window, on the tokens of the result files."""
  c4, windows = common.smollm2_ids(data)
  model, params = models.from_pretrained()
  calibration = Calibration(model, c4[8 * DRAW - 8 : 8 * DRAW])
  start = time.perf_counter()
  built = run(params, calibration, methods.get(method), check=False, probe=False)
  seconds = time.perf_counter() - start
  found = hires_next.measured(model, params, built.params, windows)
  return {**common.stamp(), "build_seconds": seconds, **found}


def measured(built):
  """KL by method on the smallest model, nats a token; `built` are by `--measure`."""
  windows = {}
  for file, names in MEASURED.items():
    rows = json.loads((common.RESULTS / f"{file}.json").read_text())["rows"]
    of = {row["name"]: row["texts"][TEXT]["kl"] for row in rows if row["draw"] == DRAW}
    windows |= {method: of[name] for method, name in names.items()}
  windows |= {method: row["kl"] for method, row in built.items()}
  return {name: statistics.fmean(windows[name]) for name in METHODS if name in windows}


def table(sizes, kl):
  """A line a method: all bytes against bfloat16, and KL where it was measured."""
  head = ["method", "form", *sizes, f"KL, {next(iter(sizes))}"]
  lines = []
  for method in METHODS:
    of = [parts[method] for parts in sizes.values()]
    shown = [
      f"{one['total'] / 1e9:.3f} GB, {one['total'] / one['bf16']:.2f}" for one in of
    ]
    told = f"{kl[method]:.3f}" if method in kl else "-"
    lines.append([f"`{method}`", of[0]["form"], *shown, told])
  bf16 = [next(iter(parts.values()))["bf16"] for parts in sizes.values()]
  lines.append(["float", "BF16", *(f"{size / 1e9:.3f} GB, 1.00" for size in bf16), "0"])
  return common.markdown(head, lines)


def by_size():
  """The paper's WikiText-2 perplexities and Fit-7 by model, smallest first."""
  found = {}
  for model, part in PAPER["raw_seven_task"].items():
    rows = {row["Method"]: row for row in part["rows"]}
    found[model] = {name: rows[name] for name in PAPER_METHODS}
  return found


def paper_table(found):
  """A line a model: perplexities, what RTN and HiRes add to BF16's, their Fit-7."""
  lines = [
    [
      model,
      *(rows[name]["WT2"] for name in PAPER_METHODS),
      *(
        f"{value(rows[n]['WT2']) / value(rows['BF16']['WT2']) - 1:+.1%}" for n in SHOWN
      ),
      *(rows[name]["Fit-7"] for name in SHOWN),
    ]
    for model, rows in found.items()
  ]
  head = ["model", *PAPER_METHODS, *(f"{n} over BF16" for n in SHOWN)]
  head += [f"Fit-7, {name}" for name in SHOWN]
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  told = "methods to build and measure: gptq brq"
  parser.add_argument("--measure", nargs="+", default=(), choices=METHODS, help=told)
  options = parser.parse_args()
  sizes = {
    model: {name: plan.stored(config, methods.get(name)) for name in METHODS}
    for model, config in configs().items()
  }
  built = common.read(options.out, {}).get("built", {})
  for method in options.measure:
    built[method] = built_and_measured(method, options.data)
  kl = measured(built)
  result = {
    **common.stamp(),
    "sizes": sizes,
    "text": TEXT,
    "measured": kl,
    "built": built,
  }
  common.write(options.out, result, table(sizes, kl))
  found = by_size()
  result = {**common.stamp(), "models": found}
  common.write(common.RESULTS / "paper_by_size.json", result, paper_table(found))


if __name__ == "__main__":
  main()
