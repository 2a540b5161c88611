"""Items a second of a task, beside lm-evaluation-harness running torch.

Run it in the environment of benchmarks/harness_agreement.py, on the cores that both
sides are to share:

  taskset -c 0 .venv-harness/bin/python benchmarks/harness_speed.py --threads 1

Both sides are language models of the harness and score the same requests of the same
float32 weights, tokenization included; only `loglikelihood` is timed. Sides alternate:
a first round compiles and warms up, the rest are timed, and the median counts, of
processor seconds: other programs on the core do not count. The
harness's model keeps its defaults (requests sorted by length, one forward pass for
one-token continuations of a context) with the faster of the batch sizes given.
"""

import os
import pathlib
import tempfile

import common
import harness_agreement
import numpy as np
import torch
from lm_eval.api.instance import Instance

from mxjax.evaluation.tasks import tasks
from mxjax.evaluation.tasks.harness import MxjaxLM


def instances(name, count):
  """The requests of the first items of a task."""
  pairs = [
    pair
    for item in tasks.load_items(name, limit=count)
    for pair in zip(item.contexts, item.continuations, strict=True)
  ]
  return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def measure(sides, name, options):
  """Processor seconds by side and round; the largest difference of a log-likelihood."""
  requests, scores = instances(name, options.items), {}

  def call(side):
    found = sides[side].loglikelihood(requests)
    scores[side] = np.asarray([score[0] for score in found])

  calls = {side: lambda side=side: call(side) for side in sides}
  for warm_up in calls.values():
    warm_up()
  wall, seconds = common.in_turns(calls, options.rounds)
  medians = common.medians(seconds)
  rates = {side: options.items / spent for side, spent in medians.items()}
  best = max((side for side in sides if side != "mxjax"), key=rates.get)
  difference = np.abs(scores["mxjax"] - scores[best]).max()
  return {
    "items": options.items,
    "requests": len(requests),
    "processor_seconds": seconds,
    "wall_seconds": wall,
    "items_a_second": rates,
    "harness_side": best,
    "ratio": rates["mxjax"] / rates[best],
    "largest_log_likelihood_difference": float(difference),
  }


def whole(found):
  """Items a second of all tasks together, by side, each side with its best batches."""
  seconds = {"mxjax": 0.0, "lm-eval": 0.0}
  for task in found:
    for side, name in zip(seconds, ("mxjax", task["harness_side"]), strict=True):
      seconds[side] += task["items"] / task["items_a_second"][name]
  items = sum(task["items"] for task in found)
  return items, {side: items / spent for side, spent in seconds.items()}


def table(report):
  """One row a task, and one of all."""
  head = ["task", "items", "mxjax, items/s", "lm-eval, items/s", "ratio"]
  head += ["largest difference of a log-likelihood"]
  lines = []
  for name, found in report["tasks"].items():
    rates = found["items_a_second"]
    speeds = [f"{rates[side]:.2f}" for side in ("mxjax", found["harness_side"])]
    lines.append([name, str(found["items"]), *speeds, f"{found['ratio']:.1f}"])
    lines[-1].append(f"{found['largest_log_likelihood_difference']:.1e}")
  items, rates = whole(report["tasks"].values())
  speeds = [f"{rate:.2f}" for rate in rates.values()]
  ratio = rates["mxjax"] / rates["lm-eval"]
  lines.append(["all of them", str(items), *speeds, f"{ratio:.1f}", ""])
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--items", type=int, default=25, help="of each task, the first")
  parser.add_argument("--rounds", type=int, default=2, help="timed ones")
  parser.add_argument("--threads", type=int, default=1, help="of torch")
  parser.add_argument("--batch-sizes", default="1,8", help="of the harness's model")
  parser.add_argument("--tasks", default=",".join(tasks.TASKS))
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  report = common.stamp(*harness_agreement.PACKAGES)
  report["machine"]["cores_used"] = len(os.sched_getaffinity(0))
  report["tasks"] = {}
  with tempfile.TemporaryDirectory() as scratch:
    twins = harness_agreement.Twins(pathlib.Path(scratch))
    sides = {"mxjax": MxjaxLM(pretrained=scratch, dtype="float32")}
    for size in map(int, options.batch_sizes.split(",")):
      sides[f"lm-eval, batch {size}"] = twins.harness(size)
    for name in options.tasks.split(","):
      report["tasks"][name] = measure(sides, name, options)
      print(name, report["tasks"][name], flush=True)
  common.write(options.out, report, table(report))


if __name__ == "__main__":
  main()
