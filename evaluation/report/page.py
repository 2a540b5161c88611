"""`write_report`: one self-contained HTML page about quantization runs."""

import html
import math
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import numbers, svg
from mxjax.evaluation.report import run as report_run
from mxjax.evaluation.report.html import (
  WIDE,
  colored_legend,
  document,
  figure,
  grid,
  legend,
  table,
)
from mxjax.evaluation.report.svg import Part, Series
from mxjax.storage.run_folder import write_durably

Run = Mapping[str, Any]
FLOAT_COLOR = 7
SIZE_PARTS = ("codes", "scales", "maps", "rounding tables", "recovery", "not quantized")
_KEYS = ("method", "perplexity", "record")


def _check(runs: Sequence[Run]) -> None:
  if not runs:
    raise ValueError(
      "write_report: expected at least one run, got none; quantize with some method "
      "first."
    )
  for index, run in enumerate(runs):
    if "error" in run:
      continue
    if missing := [key for key in _KEYS if key not in run]:
      raise ValueError(
        f"write_report: run {index} ({run.get('method', 'without a method')}) must "
        f"have {', '.join(_KEYS)}, got no {', '.join(missing)}; pass the dict that the "
        "evaluation wrote."
      )


def _mean(value: Any) -> float | None:
  """A number, the mean of a perplexity dict, or None."""
  if isinstance(value, Mapping):
    value = value.get("mean")
  return None if value is None else float(value)


def _float_perplexity(runs: Sequence[Run], dataset: str) -> float | None:
  """The float model's perplexity: a number, or numbers by dataset."""
  for run in runs:
    found = run.get("float_perplexity")
    if isinstance(found, Mapping) and "mean" not in found:
      found = found.get(dataset)
    if (value := _mean(found)) is not None:
      return value
  return None


def _datasets(runs: Sequence[Run]) -> list[str]:
  return list(dict.fromkeys(name for run in runs for name in run["perplexity"] or {}))


def _with_spread(value: Mapping[str, Any] | None) -> str:
  mean = _mean(value)
  if value is None or mean is None:
    return "–"
  spread = float(value.get("spread") or 0.0)
  return numbers.number(mean) + (f" ± {numbers.number(spread)}" if spread else "")


def _marked(
  cells: Sequence[str], values: Sequence[float | None], best: Any
) -> list[str]:
  """Cells of a column, the best one marked; ties are all marked."""
  finite = [v for v in values if v is not None and math.isfinite(v)]
  target = best(finite) if len(finite) > 1 else None
  return [
    f'<td class="best">{cell}</td>' if value is not None and value == target else cell
    for cell, value in zip(cells, values, strict=True)
  ]


def summary_table(runs: Sequence[Run]) -> str:
  """One row a method, the float model first."""
  datasets = _datasets(runs)
  columns = [[html.escape(str(run["method"])) for run in runs]]
  for name in datasets:
    values = [run["perplexity"].get(name) for run in runs]
    means = [_mean(value) for value in values]
    columns.append(_marked([_with_spread(v) for v in values], means, min))
  errors = [_mean(run.get("operator_error")) for run in runs]
  written = ["–" if e is None else numbers.number(e) for e in errors]
  columns.append(_marked(written, errors, min))
  sizes = [run.get("size") or {} for run in runs]
  columns.append([numbers.size(s["total"]) if s else "–" for s in sizes])
  columns.append([_bits(s) for s in sizes])
  ratios = [s.get("ratio") for s in sizes]
  columns.append(
    _marked(["–" if r is None else f"{r:.2f}×" for r in ratios], ratios, max)
  )
  head = (
    "method",
    *(f"perplexity, {name}" for name in datasets),
    "operator error",
    "size",
    "bits a weight",
    "smaller than BF16",
  )
  body = [_float_row(runs, datasets, sizes), *zip(*columns, strict=True)]
  return f'<div class="card">{table(head, body)}</div>'


def _bits(size: Mapping[str, Any]) -> str:
  bits = size.get("quantized_linears", {}).get("bits_per_weight")
  return "–" if bits is None else f"{bits:.3g}"


def _float_row(
  runs: Sequence[Run], datasets: Sequence[str], sizes: Sequence[Mapping[str, Any]]
) -> list[str]:
  found = [_float_perplexity(runs, name) for name in datasets]
  total = next((s["bf16_total"] for s in sizes if s), None)
  return [
    "float model",
    *("–" if value is None else numbers.number(value) for value in found),
    "–",
    "–" if total is None else numbers.size(total),
    "16",
    "–" if total is None else "1.00×",
  ]


def perplexity_chart(runs: Sequence[Run]) -> str:
  """Bars by dataset: the float model, then each method with its spread."""
  groups = []
  for name in _datasets(runs):
    value = _float_perplexity(runs, name)
    parts = [] if value is None else [Part("float model", value, FLOAT_COLOR)]
    for index, run in enumerate(runs):
      found = run["perplexity"].get(name)
      mean = _mean(found)
      if found is not None and mean is not None:
        spread = float(found.get("spread") or 0.0)
        parts.append(Part(run["method"], mean, _color(index), spread))
    groups.append((name, parts))
  if not groups:
    return ""
  chart = svg.bar_groups(groups, label="perplexity by method", width=516)
  return figure(
    "Perplexity",
    chart,
    keys=_method_legend(runs, with_float=True),
    note="Lower is better; the whisker is one spread over replicates.",
  )


def _color(index: int) -> int:
  return index % FLOAT_COLOR


def _method_legend(runs: Sequence[Run], *, with_float: bool) -> str:
  names = [(str(run["method"]), _color(i)) for i, run in enumerate(runs)]
  if with_float:
    names.insert(0, ("float model", FLOAT_COLOR))
  return colored_legend(names)


def size_chart(runs: Sequence[Run]) -> str:
  """Stored bytes by what they are for, beside BF16."""
  sized = [(str(run["method"]), run["size"]) for run in runs if run.get("size")]
  if not sized:
    return ""
  items = [("BF16", [Part("everything", sized[0][1]["bf16_total"], FLOAT_COLOR)])]
  for name, size in sized:
    linears = size["quantized_linears"]
    values = (
      *(linears[key] for key in ("codes", "scales", "maps", "rounding")),
      size["recovery"],
      size["other"],
    )
    parts = zip(SIZE_PARTS, values, strict=True)
    items.append((name, [Part(part, v, i) for i, (part, v) in enumerate(parts)]))
  chart = svg.rows(
    items, label="stored bytes", y_format=numbers.size, left=80, pitch=40
  )
  note = "All bytes a method stores, its tables included."
  return figure("Size", chart, note=note, keys=legend(SIZE_PARTS))


def error_chart(runs: Sequence[Run]) -> str:
  """Final error by layer of every method: the geometric mean over its linears."""
  series = []
  for index, run in enumerate(runs):
    points = []
    for layer_index, layer in enumerate(run["record"]["layers"]):
      found = [v.get("error_final", 0.0) for v in layer["linears"].values()]
      held = [v for v in found if v > 0 and math.isfinite(v)]
      if held:
        points.append((float(layer_index), statistics.geometric_mean(held)))
    series.append(Series(str(run["method"]), points, _color(index)))
  if not any(item.points for item in series):
    return ""
  chart = svg.line_chart(
    series, label="final error by layer", log=True, width=WIDE, height=240
  )
  note = "Relative squared output error, geometric mean over the layer's linears."
  keys = _method_legend(runs, with_float=False)
  return figure("Final error by layer", chart, note=note, keys=keys, kind="wide")


def _failures(runs: Sequence[Run]) -> str:
  """A flagged line for each method that ended in an error."""
  return "".join(
    f'<p class="flag"><b>{html.escape(str(run.get("method", "a run")))}</b> gave no '
    f"result: {html.escape(str(run['error']))}</p>"
    for run in runs
    if "error" in run
  )


def _summary(runs: Sequence[Run]) -> str:
  if not runs:
    return ""
  figures = (perplexity_chart(runs), size_chart(runs), error_chart(runs))
  lead = "Best value of each column in color. Sizes count every stored byte."
  table_and_charts = summary_table(runs) + grid(f for f in figures if f)
  return f'<p class="lead">{lead}</p>{table_and_charts}'


def page(runs: Sequence[Run], *, title: str, subtitle: str) -> str:
  """The whole HTML document as text; see `write_report`."""
  _check(runs)
  good = [run for run in runs if "error" not in run]
  links = "".join(
    f'<a href="#run-{index}">{html.escape(str(run["method"]))}</a>'
    for index, run in enumerate(good)
  )
  sections = "".join(
    report_run.run_section(run, f"run-{index}") for index, run in enumerate(good)
  )
  body = f"""<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>
<nav aria-label="sections"><a href="#summary">Summary</a>{links}</nav></header>
<section id="summary"><h2>Summary</h2>{_failures(runs)}{_summary(good)}</section>
{sections}
<footer>Written by mxjax. Hover over a mark to read its value.</footer>"""
  return document(title, body)


def write_report(
  path: str | os.PathLike[str], runs: Sequence[Run], *, title: str, subtitle: str
) -> pathlib.Path:
  """Writes a page with everything measured, readable without a network.

  Style and charts are inside the file: no script, no font, no image is fetched.

  Args:
    path: The file, replaced if it exists, or a folder, which gets `report.html`.
    runs: One JSON-ready dict a method: `method`; `perplexity`, by dataset `mean`,
      `spread` and `values`; `float_perplexity`, a number or numbers by dataset;
      `operator_error` or None; `size` of `sizes.size_report` or None; and
      `record`, of `QuantizationRecord.to_dict`. A run with an `error` instead is
      shown with that sentence.
    title: Heading of the page.
    subtitle: A line under it, such as model, data and machine.

  Returns:
    The file.

  Raises:
    ValueError: No runs, or one without a needed key.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / "report.html"
  content = page(runs, title=title, subtitle=subtitle)
  file.parent.mkdir(parents=True, exist_ok=True)
  write_durably(file, content.encode())
  return file
