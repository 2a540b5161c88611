"""Compares decisions of a strict model with the harness running its export in torch.

Run it in the environment of benchmarks/harness_agreement.py:

  .venv-harness/bin/python benchmarks/harness_quantized.py --method hires

Quantizes the embedded SmolLM2-135M-Instruct on a few sequences, exports it with
`mxjax export --format transformers`, and lets lm-evaluation-harness score the items
with torch and the folder's own code; mxjax scores them with the checkpoint, both in
float32. A sum in another order beside a boundary of an activation's scale or code moves
the code, and every later one with it. How far that reaches is measured on our side
alone, with two changes of the checkpoint's embedding: `rows` multiplies each row by
1 + 1e-6 N(0, 1), as replicates of perplexity do, which the first norm undoes again;
`entries` moves every number to a float32 number next to it, up or down. The result file
keeps an entry a method.
"""

import pathlib
import sys
import tempfile

import common
import harness_agreement
import jax.numpy as jnp
import numpy as np
import transformers

from mxjax import models
from mxjax.cli import main as cli
from mxjax.evaluation.measures.perplexity import perturbed
from mxjax.evaluation.tasks import multiple_choice, tasks
from mxjax.storage import checkpoint

SIDES = ("harness", "rows", "entries")


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


def moved_entries(params, seed):
  """The model with every number of its embedding one float32 neighbour up or down."""
  weight = np.asarray(params["embed_tokens"]["weight"], np.float32)
  is_up = np.random.default_rng(seed).random(weight.shape) < 0.5
  moved = np.nextafter(weight, np.where(is_up, np.inf, -np.inf).astype(np.float32))
  return {**params, "embed_tokens": {"weight": jnp.asarray(moved)}}


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
    ours = score(params)
    of = lambda rows: [row["log_likelihoods"] for row in rows]
    sides = {
      "harness": theirs,
      "rows": of(score(perturbed(params, 1))),
      "entries": of(score(moved_entries(params, 1))),
    }
    yield (
      name,
      {
        side: harness_agreement.compare(task, items, ours, others)
        | {"differences": differences(of(ours), others)}
        for side, others in sides.items()
      },
    )


def table(report):
  """The table of docs/guides/evaluate.md."""
  head = ["method", "task", "items", "accuracy: mxjax"]
  for side in SIDES:
    head += [f"{side}: same choice", "accuracy", "median, largest difference"]
  lines = []
  for method, entry in report.items():
    for name, found in entry["tasks"].items():
      first = found["harness"]
      line = [method, name, str(first["items"]), f"{100 * first['accuracy_mxjax']:.1f}"]
      for one in (found[side] for side in SIDES):
        gaps = one["differences"]
        line += [f"{100 * one['agreement']:.0f} %"]
        line += [f"{100 * one['accuracy_harness']:.1f}"]
        line += [f"{gaps['median']:.2f}, {gaps['largest']:.1f}"]
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
