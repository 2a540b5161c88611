"""Champions of searches against library methods, on models and texts never searched.

  python benchmarks/discovery_champion.py RUN ... [--methods hires gptq]

Every program is fitted from scratch on each small trained model, to 8 windows of 512 C4
tokens a draw, and measured on 64 windows of WikiText-2 and 64 of C4 documents that no
draw reads. KL is from the float model, in nats a token. Differences from HiRes on the
same model, draw and text are paired by window; the interval is the mean over draws of
a window's difference, plus or minus 1.96 standard errors over windows. The result is
written after every row, and goes on from the rows that it has of the same programs.
"""

import json
import pathlib
import tempfile

import common
import numpy as np

import mxjax
from mxjax.discovery.core import store
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq import candidate, payload, phases
from mxjax.discovery.tasks.ptq.structure import order
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.evaluation.measures.agreement import agreement
from mxjax.models.loading import embedded

MODELS, TEXTS = ["llama", "qwen3", "mistral", "olmo2"], ("WikiText-2", "C4")
REFERENCE, Z = "hires", 1.96


def champion(run):
  """Source of the best program of a closed run, its call and the task's A4 rule."""
  events = store.read_events(run)
  last = [e for e in events if e["event"] == "program"][-1]
  source = (run / "programs" / f"{last['champion']}.py").read_text()
  rule = events[0]["task"].get("activation_rule", "program")
  return {"source": source, "program": last["champion"], "activation_rule": rule}


def write_texts(data, folder):
  """Files of C4 for calibration, of other C4 documents, and of WikiText-2."""
  for file, name in zip(
    common.split_c4(data, folder), ("calibration", "C4"), strict=True
  ):
    documents = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    (folder / f"{name}.txt").write_text("\n\n".join(documents))
  (folder / "WikiText-2.txt").write_text((data / common.WIKITEXT).read_text())


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
  encoder = call.computation.get("encode_act")
  rule = candidate.activation_rule(executor.artifacts, encoder)
  exact = order.arranged(params, model, operands)
  return payload.to_params(operands, exact, model, rule)


def kl_of_windows(task, quantized):
  """Mean KL of each window of a task's text from the float model, in nats a token."""
  model, params = task.options.load()
  compared = agreement(model, params, quantized, task.options.tokens("measure"))
  return compared.divergence.mean(-1, dtype=np.float64).tolist()


def difference(ours, base):
  """Mean and half interval of KL less another, `[draws, windows]`, by window."""
  windows = np.mean(np.subtract(ours, base), axis=0)
  half = Z * windows.std(ddof=1) / len(windows) ** 0.5
  return f"{windows.mean():+.4f} ± {half:.4f}"


def row(name, draw, label, program, folder):
  """Mean KL of each window by text; a label without a program is a method."""
  rule = program["activation_rule"] if program else "program"
  tasks = {text: task_on(name, folder, text, draw, rule) for text in TEXTS}
  first = tasks["C4"]
  if program:
    quantized = fitted(first, program["source"])
  else:
    model, params = first.options.load()
    calib = mxjax.Calibration(model, first.options.tokens("fit"))
    quantized = mxjax.quantize(params, calib, label)
  kl = {text: kl_of_windows(task, quantized) for text, task in tasks.items()}
  return {"model": name, "draw": draw, "program": label, "kl": kl}


def table(rows):
  """A line a model and program: mean KL on both texts, and its difference."""
  lines = []
  of = lambda model, program, text: [
    row["kl"][text]
    for row in rows
    if (row["model"], row["program"]) == (model, program)
  ]
  for model, program in dict.fromkeys((r["model"], r["program"]) for r in rows):
    cells = [model, program]
    for text in TEXTS:
      ours, base = of(model, program, text), of(model, REFERENCE, text)
      cells += [f"{np.mean(ours):.4f}", ""]
      if base and len(ours) == len(base):
        cells[-1] = difference(ours, base)
    lines.append(cells)
  columns = [[f"{text} KL", f"less that of {REFERENCE}"] for text in TEXTS]
  return common.markdown(["model", "program", *columns[0], *columns[1]], lines)


def text(result):
  """JSON with a line a row."""
  rows = ",\n".join(json.dumps(row) for row in result["rows"])
  head = json.dumps({**result, "rows": []}, indent=1)
  return head.replace('"rows": []', f'"rows": [\n{rows}\n]') + "\n"


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("runs", type=pathlib.Path, nargs="+")
  parser.add_argument("--models", nargs="+", default=MODELS)
  parser.add_argument("--methods", nargs="+", default=[REFERENCE, "gptq"])
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  options = parser.parse_args()
  programs = {run.name: champion(run) for run in options.runs}
  folder = pathlib.Path(tempfile.mkdtemp(prefix="mxjax-champion-"))
  write_texts(options.data, folder)
  earlier = common.read(options.out, {"programs": programs, "rows": []})
  rows = earlier["rows"] if earlier["programs"] == programs else []
  done = {(row["model"], row["draw"], row["program"]) for row in rows}
  for name in options.models:
    for draw in options.draws:
      for label in (*options.methods, *programs):
        if (name, draw, label) in done:
          continue
        rows.append(row(name, draw, label, programs.get(label), folder))
        result = {**common.stamp(), "programs": programs, "rows": rows}
        options.out.write_text(text(result))
        options.out.with_suffix(".md").write_text(table(rows))
        print(name, draw, label, flush=True)
  print(table(rows))


if __name__ == "__main__":
  main()
