"""Champions of searches against library methods, on models and texts never searched.

  python benchmarks/discovery_champion.py RUN ... [--data ../shared/data]
    [--models llama qwen3 mistral olmo2] [--methods hires gptq] [--draws 1 2 3]

Every program is fitted from scratch on each small trained model, to 8 windows of 512 C4
tokens a draw, and measured on 64 windows of WikiText-2 and 64 of C4 documents that no
draw reads. KL is from the float model, in nats a token. Differences from HiRes on the
same model, draw and text are paired by window; the interval is the mean over draws of
a window's difference, plus or minus 1.96 standard errors over windows. Writes --out,
results/discovery_champion.{json,md}, after every row, and goes on from the rows that it
has of the same programs.
"""

import argparse
import json
import pathlib
import tempfile

import numpy as np
import provenance

import mxjax
from mxjax.discovery.core import store
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq import candidate, payload, phases
from mxjax.discovery.tasks.ptq.structure import order
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.evaluation.measures.agreement import agreement
from mxjax.models.loading import embedded

RESULT = pathlib.Path(__file__).parent / "results" / "discovery_champion.json"
MODELS = ["llama", "qwen3", "mistral", "olmo2"]
REFERENCE, Z = "hires", 1.96


def champion(run):
  """Source of the best program of a closed run, its call and the task's A4 rule."""
  events = [json.loads(line) for line in (run / "log.jsonl").open()]
  last = [e for e in events if e["event"] == "program"][-1]
  source = (run / "programs" / f"{last['champion']}.py").read_text()
  rule = events[0]["task"].get("activation_rule", "program")
  return {"source": source, "program": last["champion"], "activation_rule": rule}


def texts(data, folder):
  """Files of C4 for calibration, of other C4 documents, and of WikiText-2."""
  lines = (data / "c4" / "c4_en_train_first1000.jsonl").read_text().splitlines()
  documents = [json.loads(line)["text"] for line in lines]
  for name, part in (("calibration", documents[:600]), ("C4", documents[600:])):
    (folder / f"{name}.txt").write_text("\n\n".join(part))
  (folder / "WikiText-2.txt").write_text(
    (data / "wikitext2" / "wiki.test.raw").read_text()
  )


def task_on(model, folder, text, draw, rule):
  """The ptq task of a model, calibration draw and test text."""
  return PtqTask(
    model=str(embedded.trained_folder(model)),
    text=str(folder / "calibration.txt"),
    test_text=str(folder / f"{text}.txt"),
    calibration=[8, 512],
    windows=[64, 512],
    seed=draw,
    objective="kl",
    activation_rule=rule,
  )


def fitted(task, source):
  """The model's params as a program quantizes them."""
  executor = LocalExecutor(task)
  evaluator = CachedEvaluator(task, executor, store.Store(tempfile.mkdtemp()))
  call = evaluator.prepare(source).full_call.active(task.interface)
  _, packed = phases.Fit(task.options).run(call, executor.artifacts, b"")
  operands = payload.from_bytes(packed)
  model, params = task.options.load()
  rule = candidate.activation_rule(
    executor.artifacts, call.computation.get("encode_act")
  )
  exact = order.arranged(params, model, operands)
  return payload.to_params(operands, exact, model, rule)


def rows(options, folder, programs, done):
  """One row a model, draw and program not in `done`: mean KL of each window by text."""
  for name in options.models:
    for draw in options.draws:
      for label in (*options.methods, *programs):
        if (name, draw, label) in done:
          continue
        program = programs.get(label, {"activation_rule": "program"})
        tasks = {
          text: task_on(name, folder, text, draw, program["activation_rule"])
          for text in ("WikiText-2", "C4")
        }
        first = tasks["C4"]
        model, params = first.options.load()
        if label in programs:
          quantized = fitted(first, program["source"])
        else:
          calib = mxjax.Calibration(model, first.options.tokens("fit"))
          quantized = mxjax.quantize(params, calib, label)
        kl = {
          text: agreement(model, params, quantized, task.options.tokens("measure"))
          .divergence.mean(-1, dtype=np.float64)
          .tolist()
          for text, task in tasks.items()
        }
        yield {"model": name, "draw": draw, "program": label, "kl": kl}


def difference(rows, model, program, text):
  """Difference from the reference with half an interval, or None if rows lack."""
  of = lambda label: [
    row["kl"][text] for row in rows if (row["model"], row["program"]) == (model, label)
  ]
  ours, base = of(program), of(REFERENCE)
  if not ours or len(ours) != len(base):
    return None
  windows = np.mean(np.subtract(ours, base), axis=0)
  return windows.mean(), Z * windows.std(ddof=1) / len(windows) ** 0.5


def table(rows):
  """Markdown: a line a model and program, with both texts."""
  head, lines = ["model", "program"], []
  for text in ("WikiText-2", "C4"):
    head += [f"{text} KL", f"less that of {REFERENCE}"]
  for model, program in dict.fromkeys((r["model"], r["program"]) for r in rows):
    cells = [model, program]
    for text in ("WikiText-2", "C4"):
      same = [r for r in rows if (r["model"], r["program"]) == (model, program)]
      cells.append(f"{np.mean([r['kl'][text] for r in same]):.4f}")
      found = difference(rows, model, program, text)
      cells.append("{:+.4f} ± {:.4f}".format(*found) if found else "")
    lines.append(cells)
  return provenance.markdown(head, lines)


def text(result):
  """JSON with a line a row."""
  rows = ",\n".join(json.dumps(row) for row in result["rows"])
  head = json.dumps({**result, "rows": []}, indent=1)
  return head.replace('"rows": []', f'"rows": [\n{rows}\n]') + "\n"


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("runs", type=pathlib.Path, nargs="+")
  parser.add_argument("--data", type=pathlib.Path, default="../shared/data")
  parser.add_argument("--models", nargs="+", default=MODELS)
  parser.add_argument("--methods", nargs="+", default=[REFERENCE, "gptq"])
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  parser.add_argument("--out", type=pathlib.Path, default=RESULT)
  options = parser.parse_args()
  programs = {run.name: champion(run) for run in options.runs}
  folder, done = pathlib.Path(tempfile.mkdtemp(prefix="mxjax-champion-")), []
  if options.out.exists():
    earlier = json.loads(options.out.read_text())
    done = earlier["rows"] if earlier["programs"] == programs else []
  texts(options.data, folder)
  known = {(row["model"], row["draw"], row["program"]) for row in done}
  for row in rows(options, folder, programs, known):
    done.append(row)
    result = {**provenance.stamp(), "programs": programs, "rows": done}
    options.out.write_text(text(result))
    options.out.with_suffix(".md").write_text(table(done))
    means = {text: float(np.mean(values)) for text, values in row["kl"].items()}
    print({**row, "kl": means}, flush=True)
  options.out.with_suffix(".md").write_text(table(done))
  print(table(done))


if __name__ == "__main__":
  main()
