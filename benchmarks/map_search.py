"""Maps that are searched, learned or fitted to codes, on four small models.

  python benchmarks/map_search.py --data ../shared/data [--models llama ...]
    [--draws 1 2]

Texts and calibration draws are those of `hires_next.py`: 8 rows of 512 tokens of C4 a
draw, and 16 windows of 512 tokens of each of four kinds of text that no draw reads. KL
is from the float model, in nats a token, over the windows of all four texts.
Differences are paired by window: their mean over draws, plus or minus 1.96 standard
errors over windows; a row of fewer draws is compared on these. The result is written
after every row, and goes on from the rows that it has.

Of `hires-next`, two controls share the map of the search but for the search: `one
candidate` is the first, in principal axes, and `K = 0, D = I` the chart with the
Hadamard matrix alone. `map-descent, one candidate` descends from the first as well, and
so does `hires-next, first map descended`, which is quicker than a search among 84. The
maps of `hires-rotated` are made like that and then fitted.
"""

import pathlib
import time

import common
import hires_next
import numpy as np

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution
from mxjax.models.loading import embedded
from mxjax.run.quantize import run

MODELS = ["llama", "qwen3", "mistral", "olmo2"]
Z = 1.96
ONE_MAP = "hires-next:use_interaction=false:use_balance=false"
ROWS = {
  "hires": "hires",
  "wush": "wush",
  "hires-descent": "hires-descent",
  "hires-descent, maps fitted": "hires-descent:map_fits=16",
  "map-search": "map-search",
  "map-descent, one candidate": "map-descent:candidates=1",
  "map-descent": "map-descent",
  "map-descent, 600 steps": "map-descent:map_steps=600",
  "hires-next": "hires-next",
  "hires-next, maps fitted": "hires-next:map_fits=16",
  "hires-next, K = 0, D = I": ONE_MAP,
  "hires-next, one candidate": f"{ONE_MAP}:candidates=1",
  "hires-next, maps searched": f"{ONE_MAP}:candidates=84",
  "hires-next, maps descended": f"{ONE_MAP}:candidates=84:map_steps=300",
  "hires-next, first map descended": f"{ONE_MAP}:candidates=1:map_steps=300",
  "hires-rotated": "hires-rotated",
}
AGAINST = "hires", "hires-descent", "map-search", "hires-next", "map-descent"


def row(model, params, texts, draw, method):
  """KL by window of each text of a method that is built on a draw, and its seconds."""
  start = time.perf_counter()
  calibration = Calibration(model, texts.draws[draw])
  built = run(params, calibration, methods.get(method), check=False, probe=False)
  seconds = time.perf_counter() - start
  kl = {
    text: hires_next.measured(model, params, built.params, windows)["kl"]
    for text, windows in texts.test.items()
  }
  return {"build_seconds": round(seconds, 1), "kl": kl}


def of_windows(rows, model, name):
  """KL of each window of all texts of a row, by draw."""
  found = [row for row in rows if (row["model"], row["name"]) == (model, name)]
  return {row["draw"]: np.concatenate(list(row["kl"].values())) for row in found}


def difference(ours, base):
  """Mean and half interval of a difference by window over shared draws, and in %."""
  draws = ours.keys() & base.keys()
  if not draws:
    return ""
  windows = np.mean([ours[draw] - base[draw] for draw in draws], axis=0)
  half = Z * windows.std(ddof=1) / len(windows) ** 0.5
  share = 100 * windows.mean() / np.mean([base[draw] for draw in draws])
  return f"{windows.mean():+.4f} ± {half:.4f} ({share:+.1f} %)"


def table(rows):
  """A line for each model and method: KL, and its differences from five methods."""
  lines = []
  for model in dict.fromkeys(row["model"] for row in rows):
    for name in ROWS:
      ours = of_windows(rows, model, name)
      if not ours:
        continue
      cells = [model, name, str(len(ours)), f"{np.mean(list(ours.values())):.4f}"]
      for reference in AGAINST:
        base = of_windows(rows, model, reference)
        cells.append("" if name == reference else difference(ours, base))
      lines.append(cells)
  head = ["model", "method", "draws", "KL", *(f"less that of {a}" for a in AGAINST)]
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--models", nargs="+", default=MODELS)
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2])
  parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
  parser.add_argument("--german", type=pathlib.Path, default=hires_next.GERMAN)
  options = parser.parse_args()
  made = common.stamp()
  execution.keep_freed_memory()
  rows = common.read(options.out, {"rows": []})["rows"]
  done = {(row["model"], row["draw"], row["name"]) for row in rows}
  for draw in options.draws:
    for name in options.models:
      folder = str(embedded.trained_folder(name))
      model, params = models.from_pretrained(folder)
      texts = hires_next.texts(options.data, options.german, folder)
      for label in options.rows:
        if (name, draw, label) in done:
          continue
        of_row = row(model, params, texts, draw, ROWS[label])
        rows.append({"model": name, "draw": draw, "name": label, **of_row})
        common.write(options.out, {**made, "rows": rows}, table(rows))


if __name__ == "__main__":
  main()
