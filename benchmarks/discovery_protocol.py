"""The paper's discovery protocol on small trained models, with and without transfer.

  python benchmarks/discovery_protocol.py [--data ../shared/data] [--budget 240]

Starts from GPTQ and minimizes Fit-3 (next tokens stand in for ARC-Challenge) of the
Qwen3-family model behind the strict jail. One run accepts a gain only if the
Llama-family model shares it, the other any gain; the Mistral-family model is held out.
Runs that are begun in --out are resumed. Writes results/discovery_protocol.json and
its table.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import discovery_log
import provenance

from mxjax.discovery.core import store
from mxjax.discovery.search import runs
from mxjax.models.loading import embedded

RESULT = pathlib.Path(__file__).parent / "results" / "discovery_protocol.json"
MODELS = {"model": "qwen3", "transfer-model": "llama", "holdout-model": "mistral"}
SHAPES = {"calibration": [16, 128], "windows": [16, 128]}
CLI = [sys.executable, "-m", "mxjax.discovery.cli.parser", "discover"]
DOCUMENTS = 600
"""C4 documents to calibrate on; the others are the second text."""


def texts(data, folder):
  """Options that name the texts; C4 is divided into two files."""
  file = data / "c4" / "c4_en_train_first1000.jsonl"
  lines = file.read_text().splitlines(keepends=True)
  parts = {"text": lines[:DOCUMENTS], "second_text": lines[DOCUMENTS:]}
  folder.mkdir(parents=True, exist_ok=True)
  for name, part in parts.items():
    (folder / f"{name}.jsonl").write_text("".join(part))
  return {
    "test_text": str(data / "wikitext2" / "wiki.test.raw"),
    **{name: str(folder / f"{name}.jsonl") for name in parts},
  }


def complete(folder, options, words):
  """Runs or resumes a search to its end."""
  compiled = ["--compiled", str(folder.parent / "compiled")]
  if (folder / "run.json").exists():
    subprocess.run([*CLI, "resume", str(folder), *compiled], check=True)
    return
  task = ["--task", "ptq", "--start", "gptq", "--task-options", json.dumps(options)]
  subprocess.run([*CLI, "run", *task, *words, "--out", folder, *compiled], check=True)


def summary(folder):
  """What a run did, and what it accepted."""
  events = store.read_events(folder)
  judged = [e["accepted"] for e in events if e["event"] == "transfer"]
  found = discovery_log.summary(folder)
  programs = [e for e in events if e["event"] == "program"]
  return found | {
    "initial": programs[0]["value"],
    "gains_judged": len(judged),
    "gains_accepted": sum(judged),
    "margin": runs.read_options(folder).task["margins"]["fit3"],
  }


def table(result):
  """One line a run."""
  lines = []
  for name, run in result["runs"].items():
    accepted = f"{run['gains_accepted']} of {run['gains_judged']}"
    first, last = run["heldout"][0][1], run["heldout"][-1][1]
    lines.append(
      [
        name,
        str(run["ledger"]["total"]),
        accepted if run["gains_judged"] else "all",
        f"{run['initial']:.4f} to {run['lineage'][-1][1]:.4f}",
        f"{first:.4f} to {last:.4f}",
        ", ".join(f"`{label}`" for label, _ in run["lineage"][1:]),
      ]
    )
  first = result["marks"][0]
  head = ["a gain counts", "calls", "gains accepted", "visible Fit-3"]
  head += [f"held-out Fit-3, call {first} to the end", "steps to the champion"]
  return provenance.markdown(head, lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", type=pathlib.Path, default="../shared/data")
  parser.add_argument("--out", type=pathlib.Path, default="runs/discovery_protocol")
  parser.add_argument("--budget", type=int, default=240)
  options = parser.parse_args()
  made = provenance.stamp(hidden=("--data", "--out"))
  named = texts(options.data.resolve(), options.out.resolve())
  models = {f"--{k}": str(embedded.trained_folder(v)) for k, v in MODELS.items()}
  arms = {"on two models": models, "on one": dict(models)}
  del arms["on one"]["--transfer-model"]
  found = {}
  for name, flags in arms.items():
    words = [word for pair in flags.items() for word in pair]
    folder = options.out / name.replace(" ", "-")
    task = {"objective": "fit3", **SHAPES, **named}
    complete(folder, task, [*words, "--budget", str(options.budget)])
    found[name] = summary(folder)
  marks = [call for call, _ in found["on two models"]["heldout"]]
  result = made | SHAPES | {"models": MODELS, "marks": marks, "runs": found}
  RESULT.write_text(json.dumps(result, indent=1) + "\n")
  RESULT.with_suffix(".md").write_text(table(result))
  print(table(result))


if __name__ == "__main__":
  main()
