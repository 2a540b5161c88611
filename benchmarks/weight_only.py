"""What A4 costs: every method strictly W4A4, and with its inputs left as they are.

  python benchmarks/weight_only.py [smollm2 llama qwen3 mistral olmo2]

It calls `mxjax compare`, as a person would. Small models are calibrated and measured on
16 x 256 tokens, SmolLM2-135M-Instruct on 4 x 512. Rows that the result file or runs/
has are not made again, so that a killed run goes on where it was. Bytes are all that
are stored, over those of the model in bfloat16.
"""

import json
import pathlib

import common

from mxjax.cli import main as cli

RUNS = pathlib.Path("runs/weight_only")
MODELS = ("smollm2", "llama", "qwen3", "mistral", "olmo2")
METHODS = ("gptq", "rtn", "brq", "hires")
SHAPES = {"smollm2": (4, 512)}
SMALL = 16, 256
SHOWN = {"smollm2": "SmolLM2-135M-Instruct"}
FORMS = "W4A4", "W4A16"


def names(method):
  """The two forms of a method as a command names them, and as its rows do."""
  weights = f"{method}:activations=float"
  return {method: method, weights: f"{weights} [W4A16]"}


def words(model, methods):
  """The arguments of a model's comparison of these methods."""
  count, length = map(str, SHAPES.get(model, SMALL))
  return [
    "compare",
    *([] if model == "smollm2" else [f"models/trained/{model}"]),
    *("--methods", ",".join(methods), "--dtype", "float32"),
    *("--sequences", count, "--length", length),
    *("--windows", count, "--window-length", length),
    *("--operator-error", "--agreement", "--out", str(RUNS / model)),
  ]


def finished(model):
  """The finished rows of a comparison, without what they recorded by layer."""
  files = (RUNS / model).glob("rows/*")
  rows = [json.loads(file.read_text()) for file in files]
  slim = lambda row: {key: value for key, value in row.items() if key != "record"}
  return {row["method"]: slim(row) for row in rows}


def table(models):
  """A line for each method of a model that is finished in both forms."""
  head = ["model", "method", "float perplexity"]
  head += [f"{f} {what}" for what in ("perplexity", "KL", "bytes") for f in FORMS]
  lines = []
  for model, rows in models.items():
    for method in METHODS:
      pair = [rows[name] for name in names(method).values() if name in rows]
      if len(pair) < len(FORMS):
        continue
      [exact] = pair[0]["float_perplexity"].values()
      texts = [next(iter(row["perplexity"].values())) for row in pair]
      sizes = [row["size"] for row in pair]
      lines.append(
        [
          SHOWN.get(model, model),
          f"`{method}`",
          f"{exact:.2f}",
          *(f"{text['mean']:.2f}" for text in texts),
          *(f"{row['agreement']['kl_mean']:.4f}" for row in pair),
          *(f"{size['total'] / size['bf16_total']:.2f}" for size in sizes),
        ]
      )
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
  parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
  options = parser.parse_args()
  result = common.read(options.out, {"models": {}})
  for model in options.models:
    rows = result["models"].setdefault(model, {})
    rows |= finished(model)
    asked = {told: row for one in options.methods for told, row in names(one).items()}
    if missing := [told for told, row in asked.items() if row not in rows]:
      arguments = words(model, missing)
      if code := cli.main(arguments):
        raise SystemExit(f"mxjax {' '.join(arguments)} ended with {code}")
      rows |= finished(model)
    # Each row says itself which command made it.
    models = {name: result["models"].get(name, {}) for name in MODELS}
    result = {**common.stamp(), "models": models}
    common.write(options.out, result, table(models))


if __name__ == "__main__":
  main()
