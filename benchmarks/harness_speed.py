"""Items a second of a task, beside lm-evaluation-harness running torch.

Run it in the environment of benchmarks/harness_agreement.py, on the cores that both
sides are to share:

  taskset -c 0 .venv-harness/bin/python benchmarks/harness_speed.py --threads 1

Both sides are language models of the harness and score the same requests of the same
float32 weights, tokenization included; only `loglikelihood` is timed. Sides alternate:
a first round compiles and warms up, the rest are timed, and the median counts. The
harness's model keeps its defaults (requests sorted by length, one forward pass for
one-token continuations of a context) with the faster of the batch sizes given. Writes
benchmarks/results/harness_speed.json.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import harness_agreement
import numpy as np
import provenance
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from mxjax import models
from mxjax.evaluation.tasks import tasks
from mxjax.evaluation.tasks.harness import MxjaxLM
from mxjax.models.loading import weights

RESULT = pathlib.Path(__file__).parent / "results" / "harness_speed.json"


def instances(name, count):
  """The requests of the first items of a task."""
  items = tasks.load_items(name, limit=count)
  pairs = [
    pair
    for item in items
    for pair in zip(item.contexts, item.continuations, strict=True)
  ]
  return [
    Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)
  ]


def timed(model, requests):
  start = time.perf_counter()
  scores = model.loglikelihood(requests)
  return time.perf_counter() - start, np.asarray([score[0] for score in scores])


def measure(sides, name, options):
  """Seconds of each side by round, and the largest difference of a log-likelihood."""
  requests = instances(name, options.items)
  seconds, scores = {side: [] for side in sides}, {}
  for _ in range(1 + options.rounds):
    for side, model in sides.items():
      spent, scores[side] = timed(model, requests)
      seconds[side].append(spent)
  rates = {
    side: options.items / statistics.median(spent[1:])
    for side, spent in seconds.items()
  }
  best = max((side for side in sides if side != "mxjax"), key=rates.get)
  return {
    "items": options.items,
    "requests": len(requests),
    "seconds": seconds,
    "items_a_second": rates,
    "harness_side": best,
    "ratio": rates["mxjax"] / rates[best],
    "largest_log_likelihood_difference": float(
      np.abs(scores["mxjax"] - scores[best]).max()
    ),
  }


def table(report):
  """One row a task."""
  head = ["task", "items", "mxjax, items/s", "lm-eval, items/s", "ratio"]
  head += ["largest difference of a log-likelihood"]
  lines = []
  for name, found in report["tasks"].items():
    rates = found["items_a_second"]
    speeds = [f"{rates[side]:.2f}" for side in ("mxjax", found["harness_side"])]
    lines.append([name, str(found["items"]), *speeds, f"{found['ratio']:.1f}"])
    lines[-1].append(f"{found['largest_log_likelihood_difference']:.1e}")
  return provenance.markdown(head, lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--items", type=int, default=25, help="of each task, the first")
  parser.add_argument("--rounds", type=int, default=2, help="timed ones")
  parser.add_argument("--threads", type=int, default=1, help="of torch")
  parser.add_argument("--batch-sizes", default="1,8", help="of the harness's model")
  parser.add_argument("--tasks", default=",".join(tasks.TASKS))
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  torch.set_num_threads(options.threads)
  packages = ("lm_eval", "torch", "transformers")
  report = provenance.stamp(packages=packages, hidden=("--out",))
  report["machine"]["cores_used"] = len(os.sched_getaffinity(0))
  report |= {"model": "SmolLM2-135M-Instruct, float32 arithmetic", "tasks": {}}
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    model, params = models.from_pretrained()
    weights.save_folder(folder, harness_agreement.hf_config(model.config), params)
    models.load_tokenizer().save(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_file=str(folder / "tokenizer.json"),
      eos_token="<|im_end|>",
      pad_token="<|im_end|>",
    )
    sides = {"mxjax": MxjaxLM(pretrained=str(folder))}
    for size in map(int, options.batch_sizes.split(",")):
      options_of_theirs = {"tokenizer": tokenizer, "device": "cpu", "batch_size": size}
      sides[f"lm-eval, batch {size}"] = HFLM(pretrained=theirs, **options_of_theirs)
    for name in options.tasks.split(","):
      report["tasks"][name] = measure(sides, name, options)
      print(name, report["tasks"][name], flush=True)
  options.out.write_text(json.dumps(report, indent=1) + "\n")
  options.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
  main()
