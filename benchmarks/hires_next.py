"""hires-next, its parts and its controls, over calibration draws.

  python benchmarks/hires_next.py --data ../shared/data [--draws 1 2 3] [--rows ROW ...]
    [--model models/trained/llama] [--runs DIR]

Calibration is 8 rows of C4 tokens a draw: rows 0 to 7, 8 to 15 and 16 to 23 of the
documents in the file, of 2,048 tokens for SmolLM2-135M and of 512 for a small trained
model. Test windows of the same length, 8 each (16 for a small model), are the first of
WikiText-2 and rows 40 and on of the C4 documents, which no draw reads. KL is from
the float model, in nats a token; differences of log perplexity and of KL from `hires I
+ II` on the same draw are paired by window, with their standard error. The result file
is rewritten after every row; rows already in it are kept. With `--runs` each build
writes a run folder, as `mxjax quantize` does, and keeps its gradients there.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import time

import common
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution, kept_programs
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.run.quantize import run
from mxjax.run.record import peak_memory_bytes

HERE = pathlib.Path(__file__).parent / "results"
LENGTH, CHUNK = 2048, 256
SMALL, WINDOWS = 512, 16
REFERENCE, PAPER = "hires I + II", "hires"
WITHOUT_BOTH = ":use_interaction=false:use_balance=false"
OLDER = ":chart=reference:max_condition=8:damping=0.01"
"""Options of `hires-next` before the geometric chart."""
LABELS = {
  WITHOUT_BOTH: ", K = 0, D = I",
  OLDER: ", older",
  ":two_sided=false": ", one-sided",
  ":recover=attention+mlp": ", recovery",
  "+tune:epochs=3:length=1024:label_weight=0": ", three passes, no labels",
  "+tune:label_weight=0": ", no labels",
}
"""How tables show options of `hires-next`."""
hires = functools.partial(dataclasses.replace, methods.HIRES)
ROWS = {
  REFERENCE: hires(recover=()),
  PAPER: methods.HIRES,
  "fisher": hires(recover=(), weighting="fisher"),
  "fisher, K = 0, D = I": hires(
    recover=(), weighting="fisher", use_interaction=False, use_balance=False
  ),
  "tuned": hires(recover=(), tune=ScaleDistillation()),
  "fisher, tuned": hires(recover=(), weighting="fisher", tune=ScaleDistillation()),
  "hires-next": methods.HIRES_NEXT,
  "rtn": methods.get("rtn"),
  "rtn, tuned": methods.get("rtn+tune"),
  "wush": methods.get("wush"),
  "wush, fisher, tuned": methods.get("wush:weighting=fisher+tune"),
}


def texts(data):
  """Calibration rows by draw and test windows by name."""
  tokenizer = models.load_tokenizer(None)
  lines = (data / "c4" / "c4_en_train_first1000.jsonl").read_text().splitlines()
  ids = tokenizer.encode("\n\n".join(json.loads(line)["text"] for line in lines))
  rows = np.asarray(ids[: 48 * LENGTH], np.int32).reshape(48, LENGTH)
  fixed = np.load(data / "c4" / "smollm2_calib_16x2048.npy")
  assert (rows[:16] == fixed).all(), "the tokenizer is not that of the fixed ids"
  wikitext = np.load(data / "wikitext2" / "smollm2_test_8x2048.npy")
  return _drawn(rows), {"WikiText-2": wikitext, "C4": rows[40:]}


def small_texts(data, source):
  """The same of a small model, from the same documents by its own tokenizer."""
  tokenizer = models.load_tokenizer(source)
  read = lambda *names: data.joinpath(*names).read_text()
  lines = read("c4", "c4_en_train_first1000.jsonl").splitlines()
  documents = {
    "C4": "\n\n".join(json.loads(line)["text"] for line in lines),
    "WikiText-2": read("wikitext2", "wiki.test.raw"),
  }
  ids = {name: tokenizer.encode(text) for name, text in documents.items()}
  cut = lambda ids, count: np.asarray(ids[: count * SMALL], np.int32).reshape(-1, SMALL)
  rows, wikitext = cut(ids["C4"], 40 + WINDOWS), cut(ids["WikiText-2"], WINDOWS)
  return _drawn(rows), {"WikiText-2": wikitext, "C4": rows[40:]}


def _drawn(rows):
  return {draw: rows[8 * draw - 8 : 8 * draw] for draw in (1, 2, 3)}


@functools.partial(jax.jit, static_argnames="model")
def of_window(model, outer, exact, ours, ids):
  """Mean KL and mean negative log-likelihood of a window."""

  def chunk(item):
    exact, ours, targets = item
    scores = [
      jax.nn.log_softmax(model.logits(outer, hidden[None])[0])
      for hidden in (exact, ours)
    ]
    divergence = (jnp.exp(scores[0]) * (scores[0] - scores[1])).sum(-1)
    return divergence, -jnp.take_along_axis(scores[1], targets[:, None], 1)[:, 0]

  split = lambda a: a.reshape(-1, CHUNK, *a.shape[1:])
  targets = jnp.roll(ids[0], -1)
  divergence, loss = jax.lax.map(
    chunk, (split(exact[0]), split(ours[0]), split(targets))
  )
  return divergence.mean(), loss.reshape(-1)[:-1].mean()


def measured(model, params, quantized, windows):
  """KL and negative log-likelihood by window."""
  outer = streams.outer_params(model, params)
  ids = [jnp.asarray(window[None]) for window in windows]
  hiddens = zip(
    streams.final_hiddens(model, params, ids),
    streams.final_hiddens(model, quantized, ids),
    ids,
    strict=True,
  )
  values = [of_window(model, outer, *one) for one in hiddens]
  kl, loss = (np.asarray([float(v[i]) for v in values]) for i in (0, 1))
  return {"kl": kl.tolist(), "loss": loss.tolist()}


def paired(row, reference):
  """Mean and standard error of a difference over windows."""
  difference = np.subtract(row, reference)
  return difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5


def label(name):
  """How tables name a row."""
  for options, short in LABELS.items():
    name = name.replace(options, short)
  return name


def tables(rows):
  """Markdown tables, one for each draw."""
  head = ["row"]
  for name in ("WikiText-2", "C4"):
    head += [f"{name} KL", "difference", f"{name} ppl", "difference of ln ppl"]
  head.append("build, s")
  parts = []
  with_reference = {row["draw"] for row in rows if row["name"] == REFERENCE}
  for draw in sorted(with_reference):
    here = {row["name"]: row for row in rows if row["draw"] == draw}
    lines = []
    for name, row in here.items():
      cells = [label(name)]
      for text in row["texts"]:
        ours, base = row["texts"][text], here[REFERENCE]["texts"][text]
        cells.append(f"{np.mean(ours['kl']):.4f}")
        cells.append("{:+.4f} ± {:.4f}".format(*paired(ours["kl"], base["kl"])))
        cells.append(f"{np.exp(np.mean(ours['loss'])):.2f}")
        cells.append("{:+.4f} ± {:.4f}".format(*paired(ours["loss"], base["loss"])))
      lines.append([*cells, f"{row['build_seconds']:.0f}"])
    parts.append(f"Draw {draw}:\n\n" + common.markdown(head, lines))
  return "\n".join([*parts, over_draws(rows)])


def from_paper(same, papers, text):
  """Mean over draws of the difference of KL from `hires`, with its error by window."""
  if not all(row["draw"] in papers for row in same):
    return ""
  mean = lambda rows: np.mean([row["texts"][text]["kl"] for row in rows], axis=0)
  others = [papers[row["draw"]] for row in same]
  return "{:+.4f} ± {:.4f}".format(*paired(mean(same), mean(others)))


def over_draws(rows):
  """A table of the rows with several draws: means and standard deviations over them."""
  head, lines = ["row", "draws"], []
  for name in ("WikiText-2", "C4"):
    head += [f"{name} KL", f"less that of {PAPER}"]
    head += [f"{name} ppl over that of {REFERENCE}"]
  papers = {row["draw"]: row for row in rows if row["name"] == PAPER}
  base = {row["draw"]: row for row in rows if row["name"] == REFERENCE}
  for name in dict.fromkeys(row["name"] for row in rows):
    same = [row for row in rows if row["name"] == name and row["draw"] in base]
    if len(same) < 2:
      continue
    cells = [label(name), f"{len(same)}"]
    for text in same[0]["texts"]:
      of = lambda row, key, text=text: np.mean(row["texts"][text][key])
      kl = [of(row, "kl") for row in same]
      gains = [of(row, "loss") - of(base[row["draw"]], "loss") for row in same]
      spread = lambda values: f"{np.mean(values):.4f} ± {np.std(values, ddof=1):.4f}"
      cells += [spread(kl), from_paper(same, papers, text), spread(np.exp(gains))]
    lines.append(cells)
  return "Mean and standard deviation over draws:\n\n" + common.markdown(head, lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", type=pathlib.Path, default="../shared/data")
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  parser.add_argument("--rows", nargs="+", default=[REFERENCE, "hires", "hires-next"])
  parser.add_argument("--model", help="a folder; SmolLM2-135M if omitted")
  parser.add_argument("--out", type=pathlib.Path, help="results/hires_next*.json")
  parser.add_argument("--compiled", help="a folder of compiled programs to keep")
  parser.add_argument("--runs", type=pathlib.Path, help="a folder of run folders")
  options = parser.parse_args()
  if options.out is None:
    name = f"_{pathlib.Path(options.model).name}" if options.model else ""
    options.out = HERE / f"hires_next{name}.json"
  made = common.stamp()
  execution.keep_freed_memory()
  if options.compiled:
    kept_programs.keep_compiled(options.compiled)
  model, params = models.from_pretrained(options.model)
  found = small_texts(options.data, options.model) if options.model else None
  draws, tests = found or texts(options.data)
  rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
  for draw in options.draws:
    for name in options.rows:
      if any((row["draw"], row["name"]) == (draw, name) for row in rows):
        continue
      program = ROWS.get(name) or methods.get(name)
      run_dir = options.runs and options.runs / f"draw-{draw}-{len(rows)}"
      start = time.perf_counter()
      built = run(
        *(params, Calibration(model, draws[draw]), program),
        run_dir=run_dir,
        check=False,
        probe=False,
      )
      row = {
        "draw": draw,
        "name": name,
        "build_seconds": time.perf_counter() - start,
        "stage_seconds": built.record.clock.seconds,
        "peak_bytes": peak_memory_bytes(),
        "stage_peak_bytes": built.record.clock.peak_bytes,
        "has_run_folder": run_dir is not None,
        "tuning": built.record.tuning,
        "date": made["date"],
        "texts": {
          text: measured(model, params, built.params, windows)
          for text, windows in tests.items()
        },
      }
      rows.append(row)
      result = json.dumps({**made, "rows": rows}, indent=1)
      options.out.write_text(result + "\n")
      options.out.with_suffix(".md").write_text(tables(rows))
      print(tables([r for r in rows if r["draw"] == draw]), flush=True)


if __name__ == "__main__":
  main()
