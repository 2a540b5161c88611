"""Report section that compares runs: a table and three charts."""

import html
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.evaluation.measures.statistics import paired_interval
from mxjax.evaluation.report import numbers, svg
from mxjax.evaluation.report.html import figure, grid, lines, stacks, table
from mxjax.evaluation.report.svg import Part, Series

Run = Mapping[str, Any]
FLOAT, FLOAT_COLOR = "float model", 7
SIZE_PARTS = ("codes", "scales", "maps", "rounding tables", "recovery", "not quantized")
NONE = "–"


def _datasets(runs: Sequence[Run]) -> list[str]:
  return list(dict.fromkeys(name for run in runs for name in run["perplexity"] or {}))


def _written(value: float | None, form: Callable[[float], str]) -> str:
  return NONE if value is None else form(value)


def _float_perplexity(runs: Sequence[Run], name: str) -> float | None:
  values = [run["float_perplexity"].get(name) for run in runs]
  return next((value for value in values if value is not None), None)


def _with_spread(value: Mapping[str, Any] | None) -> str:
  if value is None:
    return NONE
  spread = f" ± {numbers.number(value['spread'])}" if value["spread"] else ""
  return f"{numbers.number(value['mean'])}{spread}"


def _marked(
  cells: Sequence[str], values: Sequence[float | None], best: Any
) -> list[str]:
  """Marks the best cells of a column, ties included."""
  finite = [v for v in values if v is not None and math.isfinite(v)]
  target = best(finite) if len(finite) > 1 else None
  return [
    f'<td class="best">{cell}</td>' if value is not None and value == target else cell
    for cell, value in zip(cells, values, strict=True)
  ]


def summary_table(runs: Sequence[Run]) -> str:
  """Lists one row per method, the float model first."""
  sizes = [run.get("size") or {} for run in runs]
  total = next((s["bf16_total"] for s in sizes if s), None)
  columns = {"method": [FLOAT, *(html.escape(str(run["method"])) for run in runs)]}
  for name in _datasets(runs):
    values = [run["perplexity"].get(name) for run in runs]
    means = [value and value["mean"] for value in values]
    cells = _marked([_with_spread(value) for value in values], means, min)
    exact = _written(_float_perplexity(runs, name), numbers.number)
    columns[f"perplexity, {name}"] = [exact, *cells]
  errors = [run["operator_error"] for run in runs]
  cells = _marked([_written(e, numbers.number) for e in errors], errors, min)
  columns["operator error"] = [NONE, *cells]
  for head, key, form in (
    ("KL, nats", "kl_mean", numbers.number),
    ("flips", "flips", numbers.share),
  ):
    found = [(run.get("agreement") or {}).get(key) for run in runs]
    if any(value is not None for value in found):
      cells = _marked([_written(value, form) for value in found], found, min)
      columns[head] = ["0", *cells]
  totals = [total, *(s.get("total") for s in sizes)]
  columns["size"] = [_written(value, numbers.size) for value in totals]
  bits = [s.get("quantized_linears", {}).get("bits_per_weight") for s in sizes]
  columns["bits a weight"] = ["16", *(_written(b, "{:.3g}".format) for b in bits)]
  ratios = [s.get("ratio") for s in sizes]
  cells = _marked([_written(r, "{:.2f}×".format) for r in ratios], ratios, max)
  columns["smaller than BF16"] = [NONE if total is None else "1.00×", *cells]
  rows = zip(*columns.values(), strict=True)
  return f'<div class="card">{table(list(columns), rows)}</div>'


def _color(index: int) -> int:
  return index % FLOAT_COLOR


def perplexity_chart(runs: Sequence[Run], name: str) -> str:
  """Charts perplexity on a dataset: the float model, then each method."""
  value = _float_perplexity(runs, name)
  bars = [] if value is None else [(FLOAT, [Part(name, value, FLOAT_COLOR)])]
  for index, run in enumerate(runs):
    if found := run["perplexity"].get(name):
      part = Part(name, found["mean"], _color(index), found["spread"])
      bars.append((str(run["method"]), [part]))
  has_spread = any(part.spread for _, parts in bars for part in parts)
  note = "Lower is better." + " The whisker is one spread over replicates." * has_spread
  return figure(
    f"Perplexity, {name}", svg.rows(bars, label=f"perplexity on {name}"), note=note
  )


def size_chart(runs: Sequence[Run]) -> str:
  """Charts stored bytes by purpose, beside BF16."""
  bars = []
  for run in runs:
    if not (size := run.get("size")):
      continue
    if not bars:
      bars.append(("BF16", [Part("everything", size["bf16_total"], FLOAT_COLOR)]))
    linears = [size["quantized_linears"][k] for k in ("codes", "scales", "maps")]
    rounding = size["quantized_linears"]["rounding"]
    values = (*linears, rounding, size["recovery"], size["other"])
    parts = enumerate(zip(SIZE_PARTS, values, strict=True))
    bars.append((str(run["method"]), [Part(*part, i) for i, part in parts]))
  note = "All bytes a method stores, its tables included."
  return stacks(svg.rows, "Size", bars, note, y_format=numbers.size)


def error_chart(runs: Sequence[Run]) -> str:
  """Charts each method's final error by layer: the geometric mean over linears."""
  series = []
  for index, run in enumerate(runs):
    points = []
    for layer_index, layer in enumerate(run["record"]["layers"]):
      errors = [linear.get("error_final", 0.0) for linear in layer["linears"].values()]
      positive = [e for e in errors if e > 0 and math.isfinite(e)]
      if positive:
        points.append((float(layer_index), statistics.geometric_mean(positive)))
    series.append(Series(str(run["method"]), points, _color(index)))
  return lines(
    "Final error by layer",
    series,
    "Relative squared output error, geometric mean over the layer's linears.",
    log=True,
  )


def summary(runs: Sequence[Run]) -> str:
  """Returns table and charts; empty if every run failed."""
  if not runs:
    return ""
  lead = "Best value of each column in color. Sizes count every stored byte."
  charts = grid(
    (
      *(perplexity_chart(runs, name) for name in _datasets(runs)),
      size_chart(runs),
      error_chart(runs),
    )
  )
  said = [*winners(runs), *map(verdict, runs)]
  verdicts = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in said)
  return (
    f'<ul class="verdict">{verdicts}</ul>{summary_table(runs)}'
    f'<p class="lead">{lead}</p>{charts}'
  )


def winners(runs: Sequence[Run]) -> list[str]:
  """Returns a sentence on which methods are best, ties included; none for one run."""
  bits = lambda run: (run.get("size") or {}).get("quantized_linears", {})
  measures: dict[str, Callable[[Run], float | None]] = {
    **{
      f"perplexity on {name}": lambda run, name=name: (
        run["perplexity"].get(name, {}).get("mean")
      )
      for name in _datasets(runs)
    },
    "operator error": lambda run: run["operator_error"],
    "KL": lambda run: (run.get("agreement") or {}).get("kl_mean"),
    "number of bits a weight": lambda run: bits(run).get("bits_per_weight"),
  }
  parts = []
  for name, measure in measures.items():
    values = {str(run["method"]): measure(run) for run in runs}
    finite = [v for v in values.values() if v is not None and math.isfinite(v)]
    if len(finite) > 1:
      best = [method for method, value in values.items() if value == min(finite)]
      parts.append(f"lowest {name}: {', '.join(best)}")
  best = [f"L{'; '.join(parts)[1:]}."] if parts else []
  return best + [s for name in _datasets(runs) for s in _undecided(runs, name)]


def _undecided(runs: Sequence[Run], name: str) -> list[str]:
  """Returns a sentence on methods that the windows do not tell from the best."""
  losses = {
    str(run["method"]): run["perplexity"][name].get("window_losses", [])
    for run in runs
    if math.isfinite(run["perplexity"].get(name, {}).get("mean", math.nan))
  }
  counts = {len(windows) for windows in losses.values()}
  if len(losses) < 2 or len(counts) > 1 or min(counts) < 2:
    return []
  best = min(losses, key=lambda method: statistics.fmean(losses[method]))
  close = [
    method
    for method, windows in losses.items()
    if method != best and paired_interval(windows, losses[best]).low <= 0
  ]
  if not close:
    return []
  return [
    f"{counts.pop()} windows of {name} do not tell {', '.join(close)} from {best}: the "
    "95 % interval of the paired difference contains zero."
  ]


def verdict(run: Run) -> str:
  """Returns a sentence on what a method costs and saves."""
  parts = []
  for name, found in (run["perplexity"] or {}).items():
    exact = run["float_perplexity"].get(name)
    if exact and math.isfinite(found["mean"]):
      parts.append(f"perplexity {found['mean'] / exact - 1:+.1%} on {name}")
  if agreement := run.get("agreement"):
    parts.append(f"{numbers.share(agreement['flips'])} of predictions flipped")
  if size := run.get("size"):
    bits = size["quantized_linears"]["bits_per_weight"]
    parts.append(f"{bits:.3g} bits a weight")
    ratio, word = size["ratio"], "smaller"
    if ratio < 1:
      ratio, word = 1 / ratio, "larger"
    parts.append(f"the whole model {ratio:.2f}× {word} than in BF16")
  return f"{run['method']}: {', '.join(parts) or 'nothing was measured'}."
