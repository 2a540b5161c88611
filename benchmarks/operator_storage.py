"""What maps and one-code tables in bfloat16 change of HiRes, over calibration draws.

  python benchmarks/operator_storage.py [llama qwen3 mistral olmo2 smollm2] [--draws 3]

Each model is quantized twice a draw on the same tokens, with maps and tables stored in
float32, as in the paper, and in bfloat16. Small models are calibrated on 16 x 256
tokens and measured on 16 x 256, SmolLM2-135M-Instruct on 4 x 512 and on 4 x 512. The
noise of a measure is its standard deviation over the draws in float32; bfloat16 holds
where the mean of its paired differences is within that. Their t interval is beside it.
The result file is rewritten after every build, and builds already in it are kept.
"""

import statistics

import common

from mxjax.evaluation import builds, subjects
from mxjax.evaluation.measures.statistics import paired_interval
from mxjax.models.loading import embedded

FAMILIES = ("llama", "qwen3", "mistral", "olmo2")
SHAPES = {"smollm2": (4, 512)}
SMALL = 16, 256
STORAGES = ("float32", "bfloat16")
MEASURES = ("operator_error", "kl", "log_perplexity")


def measured(model, draw, storage):
  """Quantizes a model on a draw and returns what is compared of it."""
  sequences, length = SHAPES.get(model, SMALL)
  prepared = subjects.prepare(
    None if model == "smollm2" else str(embedded.trained_folder(model)),
    subjects.CalibrationSample(sequences=sequences, length=length, seed=draw),
    subjects.Evaluation(
      windows=sequences, window_length=length, operator_error=True, agreement=True
    ),
    dtype="float32",
  )
  row, _ = builds.run_method(
    prepared.subject, prepared.tokens, f"hires:storage={storage}", probe=False
  )
  [text] = row["perplexity"].values()
  losses = text["window_losses"]
  return {
    "operator_error": row["operator_error"],
    "kl": row["agreement"]["kl_mean"],
    "log_perplexity": statistics.fmean(losses),
    "flips": row["agreement"]["flips"],
    "bits_per_weight": row["size"]["quantized_linears"]["bits_per_weight"],
    "total_bytes": row["size"]["total"],
    "seconds": row["seconds"],
  }


def compared(builds_of):
  """The paired differences of a model's measures over its draws, with their noise."""
  pairs = [pair for pair in builds_of.values() if len(pair) == len(STORAGES)]
  if len(pairs) < 2:
    return {}
  found = {}
  for measure in MEASURES:
    wide, narrow = ([pair[name][measure] for pair in pairs] for name in STORAGES)
    interval = paired_interval(narrow, wide)
    noise = statistics.stdev(wide)
    found[measure] = {
      "draws": len(pairs),
      "float32": statistics.fmean(wide),
      "difference": interval.mean,
      "interval": [interval.low, interval.high],
      "noise": noise,
      "holds": abs(interval.mean) <= noise,
    }
  return found


def table(result):
  """A line for each model and measure."""
  head = ["model", "draws", "measure", "float32", "bfloat16 less float32", "t interval"]
  lines = [
    [
      model,
      str(one["draws"]),
      measure.replace("_", " "),
      f"{one['float32']:.5f}",
      f"{one['difference']:+.6f}",
      f"[{one['interval'][0]:+.6f}, {one['interval'][1]:+.6f}]",
      f"{one['noise']:.6f}",
      "yes" if one["holds"] else "no",
    ]
    for model, measures in result["compared"].items()
    for measure, one in measures.items()
  ]
  return common.markdown([*head, "noise between draws", "within noise"], lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("models", nargs="*", default=FAMILIES, metavar="MODEL")
  parser.add_argument("--draws", type=int, default=3)
  options = parser.parse_args()
  kept = common.read(options.out, {"builds": {}})
  result = {**common.stamp(), "builds": kept["builds"], "compared": {}}
  for model in options.models:
    of_model = result["builds"].setdefault(model, {})
    for draw in range(options.draws):
      pair = of_model.setdefault(str(draw), {})
      for storage in STORAGES:
        if storage not in pair:
          pair[storage] = measured(model, draw, storage)
          print(model, draw, storage, pair[storage], flush=True)
        result["compared"] = {
          name: compared(made) for name, made in result["builds"].items()
        }
        common.write(options.out, result)
  common.write(options.out, result, table(result))


if __name__ == "__main__":
  main()
