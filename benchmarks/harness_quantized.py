"""Compares decisions of a strict model with the harness running its export in torch.

Run it in the environment of benchmarks/harness_agreement.py:

  .venv-harness/bin/python benchmarks/harness_quantized.py --method hires

Quantizes the embedded SmolLM2-135M on a few sequences, exports it with
`mxjax export --format transformers`, and lets lm-evaluation-harness score the items
with torch and the folder's own code; mxjax scores them with the checkpoint, both in
float32. A sum in another order beside a boundary of an activation's scale or code moves
the code, and every later one with it. How far that reaches is measured on our side
alone: the same checkpoint with its embedding perturbed by one part in a million. The
result file keeps an entry a method.
"""

import pathlib
import sys
import tempfile

import common
import harness_agreement
import numpy as np
import transformers

from mxjax import models
from mxjax.evaluation.cli import parser as cli
from mxjax.evaluation.measures.perplexity import perturbed
from mxjax.evaluation.tasks import multiple_choice, tasks
from mxjax.storage import checkpoint


def run(*arguments):
  code = cli.main([str(part) for part in arguments])
  assert code == 0, arguments


def build(scratch, options):
  """Quantizes and exports; returns the checkpoint's folder and the export's."""
  out, folder = scratch / "run", scratch / "export"
  windows = ["--windows", 1, "--window-length", options.length]
  calibration = ["--sequences", options.sequences, "--length", options.length]
  run("quantize", "--method", options.method, "--out", out, *calibration, *windows,
      "--dtype", "float32")  # fmt: skip
  run("export", out, "--format", "transformers", "--out", folder, *windows)
  return out / "checkpoint", folder


def in_torch(folder):
  """The export as transformers runs it, its weights decoded once and kept."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype="float32", trust_remote_code=True
  )
  module, known = sys.modules[type(model).__module__], {}
  decode = module.decode

  def kept(codes, scales):
    place = codes.data_ptr()
    if place not in known:
      known[place] = decode(codes, scales)
    return known[place]

  module.decode = kept
  return model.eval()


def differences(left, right):
  """Median and largest difference of two lists of log-likelihoods by item."""
  gaps = np.abs(np.concatenate(left) - np.concatenate(right))
  return {"median": float(np.median(gaps)), "largest": float(gaps.max())}


def measure(scratch, options):
  """What both sides and the perturbed checkpoint choose; yields task by task."""
  saved, folder = build(scratch, options)
  params, config = checkpoint.restore_checkpoint(saved)
  model = models.CausalLM(models.ModelConfig.from_dict(config))
  tokenizer = models.load_tokenizer()
  other = harness_agreement.as_harness(
    in_torch(folder), harness_agreement.load_tokenizer(folder), options.batch_size
  )
  for name in options.tasks.split(","):
    task, items = tasks.TASKS[name], tasks.load_items(name, limit=options.items)
    [theirs] = harness_agreement.run_harness(
      scratch, [name], options.items, other
    ).values()
    score = lambda used, task=task, items=items: multiple_choice.evaluate(
      model, used, tokenizer, task, items, max_length=config["max_positions"]
    )[1]
    ours, moved = score(params), score(perturbed(params, 1))
    own = [row["log_likelihoods"] for row in ours]
    moved = [row["log_likelihoods"] for row in moved]
    yield (
      name,
      {
        side: harness_agreement.compare(task, items, ours, others)
        | {"differences": differences(own, others)}
        for side, others in {"harness": theirs, "perturbed": moved}.items()
      },
    )


def table(report):
  """The table of docs/guides/evaluate.md."""
  head = ["method", "task", "items", "same choice: harness", "same choice: perturbed"]
  head += [
    "accuracy: mxjax / harness / perturbed",
    "median, largest difference: harness",
  ]
  head += ["median, largest difference: perturbed"]
  lines = []
  for method, entry in report.items():
    for name, found in entry["tasks"].items():
      sides = [found["harness"], found["perturbed"]]
      accuracies = [sides[0]["accuracy_mxjax"]]
      accuracies += [side["accuracy_harness"] for side in sides]
      gaps = [side["differences"] for side in sides]
      line = [method, name, str(sides[0]["items"])]
      line += [f"{100 * side['agreement']:.0f} %" for side in sides]
      line.append(" / ".join(f"{100 * value:.1f}" for value in accuracies))
      line += [f"{gap['median']:.2f}, {gap['largest']:.1f}" for gap in gaps]
      lines.append(line)
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--method", default="hires")
  parser.add_argument("--items", type=int, default=100, help="of each task, the first")
  parser.add_argument("--sequences", type=int, default=8, help="of the calibration")
  parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
  parser.add_argument("--batch-size", type=int, default=16, help="of the harness")
  parser.add_argument("--tasks", default=",".join(tasks.TASKS))
  options = parser.parse_args()
  report = common.read(options.out, {})
  entry = common.stamp(*harness_agreement.PACKAGES) | {"tasks": {}}
  with tempfile.TemporaryDirectory() as scratch:
    for name, found in measure(pathlib.Path(scratch), options):
      entry["tasks"][name] = found
      report[options.method] = entry
      common.write(options.out, report, table(report))


if __name__ == "__main__":
  main()
