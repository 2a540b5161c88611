"""`report.html`: what a build or a comparison gave, answer first, in one HTML file.

A sentence with the verdict, one table, two charts, a text of both models, and what made
the result. Every other number is in `result.json`, to which the page links.
"""

import html
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mxjax.errors import ValueRefusal
from mxjax.evaluation.measures.statistics import Interval, paired_interval
from mxjax.evaluation.report import numbers
from mxjax.evaluation.report.html import (
  document,
  folded,
  glossary,
  grid,
  lines,
  stacks,
  table,
  words,
)
from mxjax.evaluation.report.svg import Part, Series
from mxjax.evaluation.report.tables import Table, comma_separated
from mxjax.numerics.contract import Contract
from mxjax.storage.atomic_io import write_durably

Run = Mapping[str, Any]
FLOAT, FLOAT_COLOR = "float model", 7
BASELINE = "rtn"
"""What every other method is held against."""
WEIGHT_ONLY = "rtn:activations=float"
"""The same for methods that leave inputs as they are."""
LABELS = {
  BASELINE: BASELINE,
  WEIGHT_ONLY: Contract(activations="float").marked(WEIGHT_ONLY),
}
"""What their rows are called."""
SIZE_PARTS = ("codes", "scales", "maps", "rounding tables", "recovery", "not quantized")
MEASURES = {
  "KL": "--agreement",
  "flips": "--agreement",
  "operator error": "--operator-error",
}
"""What a command measures only when asked, and how it is asked."""
WORDS = {
  "perplexity": "How badly the model predicts text: the exponential of the mean loss. "
  "The interval is Student's, over the losses of the windows.",
  "operator error": "Relative squared error of a linear's output on the float model's "
  "inputs, the mean over linears.",
  "KL": "Mean divergence of the predictions from the float model's, nats a token.",
  "flips": "Share of positions where the likeliest token is another.",
  "bits a weight": "All stored bytes of the linears, with maps and tables, over their "
  "weights.",
  "RTN": "Round to nearest: no calibration, no map; what any method has to beat.",
  "map": "The transform of a block's inputs, folded into the weights.",
  "rounding tables": "What the activation rule reads to move codes off the nearest.",
  "recovery": "Corrections of attention values and of the MLP's gate that are fitted "
  "after quantization.",
  "damping": "What is added to a Hessian's diagonal so that it can be factored.",
  "sanity gate": "A comparison with the float model that stops a collapsed one.",
}
_KEYS = ("method", "perplexity", "float_perplexity", "operator_error", "record")


def _check(runs: Sequence[Run]) -> None:
  if not runs:
    raise ValueRefusal(
      "write_report",
      expected="at least one run",
      got="none",
      mend="quantize with some method first",
    )
  for index, run in enumerate(runs):
    missing = [key for key in _KEYS if key not in run]
    if missing and "error" not in run:
      raise ValueRefusal(
        "write_report",
        expected=f"{', '.join(_KEYS)} in run {index} "
        f"({run.get('method', 'without a method')})",
        got=f"no {', '.join(missing)}",
        mend="pass the dict that the evaluation wrote",
      )


class Column(NamedTuple):
  """A measure: its head with the unit, how it is written, and its value of each row.

  `best` is whether the least value is marked.
  """

  head: str
  form: Callable[[float], str]
  values: Sequence[float | None]
  best: bool = True


def _mebibytes(value: float) -> str:
  """Writes four digits, and all in front of the point."""
  return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"


def mean_interval(run: Run, name: str) -> Interval | None:
  """Returns the 95 % interval of the loss on a dataset, nats, over its windows."""
  losses = run["perplexity"].get(name, {}).get("window_losses", ())
  if len(losses) < 2 or not all(map(math.isfinite, losses)):
    return None
  return paired_interval(losses, [0.0] * len(losses))


def _perplexity_range(run: Run, name: str) -> str:
  found = mean_interval(run, name)
  if found is None:
    return ""
  # Losses far above any model's, whose exponential is no number.
  ends = [math.exp(min(end, 700.0)) for end in (found.low, found.high)]
  return " to ".join(map(numbers.number, ends))


def baseline_of(method: str) -> str:
  """Returns the baseline of a method, given the name of its row.

  What leaves inputs as they are is compared with what does so too: beside a baseline
  that rounds them, its gain would be that of the missing rounding.
  """
  form = LABELS[WEIGHT_ONLY].removeprefix(WEIGHT_ONLY)
  return WEIGHT_ONLY if method.endswith(form) else BASELINE


def shown(runs: Sequence[Run]) -> list[Run]:
  """Returns the rows of the table: the runs, and RTN before them if it was measured."""
  baseline = next((run["baseline"] for run in runs if run.get("baseline")), None)
  if baseline and all(run["method"] != baseline["method"] for run in runs):
    return [baseline, *runs]
  return list(runs)


def _datasets(runs: Iterable[Run]) -> list[str]:
  return list(dict.fromkeys(name for run in runs for name in run["perplexity"] or {}))


def columns(runs: Sequence[Run]) -> list[Column]:
  """Returns what was measured of the float model and then of each run."""
  scaled = lambda values, unit: [v if v is None else v * unit for v in values]
  sizes = [run.get("size") or {} for run in runs]
  whole = next((size["bf16_total"] for size in sizes if size), None)
  bits = [size.get("quantized_linears", {}).get("bits_per_weight") for size in sizes]
  totals = [size.get("total") for size in sizes]
  shares = [total / whole if total and whole else None for total in totals]
  # How good it is stands first, where a narrow screen shows it. The float model's row
  # is the first, in BF16.
  made = []
  for name in _datasets(runs):
    exact = [run.get("float_perplexity", {}).get(name) for run in runs]
    means = [run["perplexity"].get(name, {}).get("mean") for run in runs]
    first = next((value for value in exact if value is not None), None)
    made.append(Column(f"perplexity, {name}", numbers.number, [first, *means]))
  of = lambda key: [(run.get("agreement") or {}).get(key) for run in runs]
  errors = [run.get("operator_error") for run in runs]
  made += [
    Column("KL, nats a token", numbers.number, [0.0, *of("kl_mean")]),
    Column("flips, %", "{:.3g}".format, scaled([0.0, *of("flips")], 100)),
    Column("bits a weight", "{:.3g}".format, [16.0, *bits]),
    Column("size, MiB", _mebibytes, scaled([whole, *totals], 2**-20)),
    Column("size to BF16", "{:.2f}".format, [1.0, *shares]),
    Column("operator error", numbers.number, [0.0, *errors]),
    Column("build, s", "{:.0f}".format, [None, *(r.get("seconds") for r in runs)]),
  ]
  return [column for column in made if any(v is not None for v in column.values[1:])]


def _names(runs: Sequence[Run]) -> list[str]:
  return [FLOAT, *(str(run["method"]) for run in runs)]


def comma_separated_table(runs: Sequence[Run], title: str) -> str:
  """Returns the table as CSV, every number with all of its digits."""
  rows = shown([run for run in runs if "error" not in run])
  made = columns(rows)
  cells = [["" if v is None else repr(v) for v in column.values] for column in made]
  heads = ["method", *(column.head for column in made)]
  return comma_separated(
    [Table(title, heads, [*zip(_names(rows), *cells, strict=True)])]
  )


def summary_table(runs: Sequence[Run]) -> str:
  """Returns the table: the float model, RTN, and each method, the best values marked.

  Only quantized models compete.
  """
  made = columns(runs)
  cells = []
  for column in made:
    ours = [v for v in column.values[1:] if v is not None and math.isfinite(v)]
    least = min(ours) if column.best and len(ours) > 1 else None
    written = ["–" if v is None else column.form(v) for v in column.values]
    # Only perplexities have losses by window, and so intervals.
    name = column.head.removeprefix("perplexity, ")
    if name in _datasets(runs):
      noise = [_perplexity_range(run, name) for run in runs]
      for index, run in enumerate(runs):
        if spread := run["perplexity"].get(name, {}).get("spread"):
          spread_text = f"± {numbers.number(spread / 2)} by replicates"
          noise[index] = "; ".join(filter(None, (noise[index], spread_text)))
      written = [
        f"{cell}<small>{html.escape(span)}</small>" if span else cell
        for cell, span in zip(written, ["", *noise], strict=True)
      ]
    cells.append(
      [
        f'<td class="best">{cell}</td>' if value == least and index else cell
        for index, (cell, value) in enumerate(zip(written, column.values, strict=True))
      ]
    )
  names = map(words, _names(runs))
  rows = zip(names, *cells, strict=True)
  shared = table(["method", *(column.head for column in made)], rows)
  return f'<div class="card">{shared}</div>'


def _lowest(runs: Sequence[Run]) -> Run:
  """Returns the run nearest to the float model, by KL if all have it."""
  name = next(iter(_datasets(runs)), "")
  measures: list[Callable[[Run], float | None]] = [
    lambda run: (run.get("agreement") or {}).get("kl_mean"),
    lambda run: run["perplexity"].get(name, {}).get("mean"),
    lambda run: run["operator_error"],
  ]
  for measure in measures:
    values = [measure(run) for run in runs]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if finite and None not in values:
      return runs[values.index(min(finite))]
  return runs[0]


def verdict(runs: Sequence[Run]) -> str:
  """Returns one sentence on what the best run costs and saves, against RTN and float.

  It holds only what was measured.
  """
  rows = shown(runs)
  run = _lowest(runs)
  label = LABELS[baseline_of(run["method"])]
  plain = next((row for row in rows if row["method"] == label), None)
  # RTN is not held against itself.
  plain = None if plain is run else plain
  head = str(run["method"])
  if len(runs) > 1:
    head = f"Of {len(runs)} methods, {head} is nearest to the float model: it"
  parts = []
  if size := run.get("size"):
    parts.append(
      f"stores {size['quantized_linears']['bits_per_weight']:.3g} bits a weight, "
      f"{numbers.size(size['total'])} in all, "
      f"{size['total'] / size['bf16_total']:.2f} times the size of BF16"
    )
  for name, found in (run["perplexity"] or {}).items():
    said = f"has a perplexity of {numbers.number(found['mean'])} on {name}"
    span = _perplexity_range(run, name)
    said += f" (95 % interval {span})" if span else ""
    beside = {"the float model": run["float_perplexity"].get(name)}
    if plain:
      beside["RTN"] = plain["perplexity"].get(name, {}).get("mean")
    others = [f"{numbers.number(v)} of {k}" for k, v in beside.items() if v is not None]
    said += f", beside {' and '.join(others)}" if others else ""
    parts.append(said + _against_baseline(run, plain, name))
  if compared := run.get("agreement"):
    said = (
      f"diverges by {numbers.number(compared['kl_mean'])} nats a token and flips "
      f"{numbers.share(compared['flips'])} of the predictions"
    )
    if plain and (other := plain.get("agreement")):
      said += (
        f" (RTN: {numbers.number(other['kl_mean'])} nats and "
        f"{numbers.share(other['flips'])})"
      )
    parts.append(said)
  return f"{head} {'; it '.join(parts) or 'was not measured'}."


def _against_baseline(run: Run, plain: Run | None, name: str) -> str:
  """Says by how much perplexity is below RTN's, paired by window, or nothing.

  The losses of windows differ far more from each other than the methods do on one
  window, so that the interval of a perplexity says little about their order.
  """
  ours, theirs = (
    row["perplexity"].get(name, {}).get("window_losses", []) if row else []
    for row in (run, plain)
  )
  if len(ours) != len(theirs) or len(ours) < 2:
    return ""
  found = paired_interval(ours, theirs)
  if not (math.isfinite(found.low) and math.isfinite(found.high)):
    return ""
  if found.low <= 0 <= found.high:
    return f"; the same {len(ours)} windows do not tell it from RTN"
  # Losses are logarithms of perplexities: a difference of theirs is a ratio.
  change = sorted(abs(math.expm1(end)) for end in (found.low, found.high))
  return (
    f"; on the same {len(ours)} windows it is {abs(math.expm1(found.mean)):.1%} "
    f"{'below' if found.mean < 0 else 'above'} RTN (95 % interval {change[0]:.1%} to "
    f"{change[1]:.1%})"
  )


def remarks(runs: Sequence[Run]) -> list[str]:
  """Returns sentences on what was not measured, and on what is out of the ordinary."""
  said = [s for name in _datasets(runs) for s in _undecided(shown(runs), name)]
  missing = {
    "KL": all(not run.get("agreement") for run in runs),
    "flips": all(not run.get("agreement") for run in runs),
    "operator error": all(run["operator_error"] is None for run in runs),
  }
  absent = [name for name, is_absent in missing.items() if is_absent]
  if absent:
    flags = dict.fromkeys(MEASURES[name] for name in absent)
    said.append(f"Not measured: {', '.join(absent)}; ask by {' and '.join(flags)}.")
  if all(row["method"] not in LABELS.values() for row in shown(runs)):
    said.append("RTN was not measured beside it.")
  for run in runs:
    size = run.get("size") or {}
    if size and 2 * size["total"] > size["bf16_total"]:
      linears = size["quantized_linears"]
      own = linears["maps"] + linears["rounding"]
      cause = (
        "a map and a table have one size for 32 inputs, and this model has few "
        "outputs to share them"
        if own > size["other"]
        else "what is not quantized, such as embeddings, weighs most"
      )
      whole = "BF16" if size["total"] >= size["bf16_total"] else "half of BF16"
      said.append(f"{run['method']} is larger than {whole} here: {cause}.")
    if not run["record"].get("sanity"):
      said.append(f"The sanity gate of {run['method']} was not run.")
    if raised := _raised(run["record"]):
      said.append(f"{run['method']} needed more damping than usual: {raised}.")
  return said


def _raised(record: Mapping[str, Any]) -> str:
  """Lists the linears whose damping is not that of the program."""
  used = {
    f"{layer['name']}/{path}": linear["damping"]
    for layer in record["layers"]
    for path, linear in layer["linears"].items()
    if "damping" in linear
  }
  usual = (
    record["program"].get("options", {}).get("damping", min(used.values(), default=0))
  )
  return ", ".join(
    f"{numbers.number(value)} in {name}"
    for name, value in used.items()
    # Raised damping is ten times as large; less is the rounding of a dtype.
    if not math.isclose(value, usual, rel_tol=1e-4)
  )


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


def _errors_by_layer(run: Run, key: str) -> list[tuple[float, float]]:
  points = []
  for index, layer in enumerate(run["record"]["layers"]):
    errors = [linear.get(key, 0.0) for linear in layer["linears"].values()]
    # A geometric mean and a logarithmic axis take positive numbers alone.
    drawn = [error for error in errors if error > 0 and math.isfinite(error)]
    if drawn:
      points.append((float(index), statistics.geometric_mean(drawn)))
  return points


def charts(runs: Sequence[Run]) -> str:
  """Returns the two charts: output error by layer, and where the bytes are."""
  # The last color of the palette is the float model's.
  series = [
    Series(
      str(run["method"]), _errors_by_layer(run, "error_final"), index % FLOAT_COLOR
    )
    for index, run in enumerate(runs)
  ]
  if all(run["method"] not in LABELS.values() for run in runs):
    plain = _errors_by_layer(runs[0], "error_rtn")
    series.append(Series("nearest, no map (RTN)", plain, FLOAT_COLOR))
  bars = []
  for run in shown(runs):
    if not (size := run.get("size")):
      continue
    if not bars:
      bars.append(("BF16", [Part("everything", size["bf16_total"], FLOAT_COLOR)]))
    linears = size["quantized_linears"]
    values = [linears[key] for key in ("codes", "scales", "maps", "rounding")]
    values += [size["recovery"], size["other"]]
    parts = enumerate(zip(SIZE_PARTS, values, strict=True))
    made = [Part(*part, i) for i, part in parts if part[1]]
    bars.append((str(run["method"]), made))
  return grid(
    (
      lines(
        "Output error by layer",
        series,
        "This is the relative squared error of the linears' outputs on calibration "
        "tokens, as a geometric mean; lower is better.",
        log=True,
      ),
      stacks(
        "Stored bytes",
        bars,
        "These are the bytes of the whole model, with all that the method needs.",
        # In the unit of the table.
        y_format=lambda value: f"{_mebibytes(value / 2**20)} MiB",
      ),
    )
  )


def samples(runs: Sequence[Run]) -> str:
  """Shows how the float model and each quantized one continue the same text."""
  made = [run for run in runs if run.get("sample")]
  if not made:
    return ""
  texts = {FLOAT: made[0]["sample"]["float"]}
  texts |= {str(run["method"]): run["sample"]["quantized"] for run in made}
  prompt = html.escape(made[0]["sample"]["prompt"])
  cards = "".join(
    f'<figure><h4>{words(name)}</h4><p class="sample">{prompt}'
    f"<b>{html.escape(text)}</b></p></figure>"
    for name, text in texts.items()
  )
  lead = "The prompt, a text of the test, is plain; its likeliest continuation is bold."
  return f'<h2>How it writes</h2><p class="lead">{lead}</p>{grid([cards])}'


def _words(value: Any) -> str:
  """Writes JSON of an arithmetic on one line, such as `attention bfloat16`."""
  if isinstance(value, Mapping):
    return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
  return value if isinstance(value, str) else " and ".join(value)


def _gate(found: Mapping[str, Any] | None) -> str:
  """Says what the sanity gate compared, on calibration tokens that no test has."""
  if not found:
    return "not run"
  if "divergence" not in found:
    return (
      f"outputs off by {found['relative_error']:.2%} of their square, on "
      f"{found['examples']} calibration examples"
    )
  return (
    f"KL {numbers.number(found['divergence'])} nats a token, the same likeliest token "
    f"at {found['agreement']:.1%}, loss {found['quantized_loss']:.3f} beside "
    f"{found['float_loss']:.3f}; {found['tokens']} predictions of calibration tokens"
  )


def provenance(run: Run) -> str:
  """Shows what another result must share to be comparable, and what made this one."""
  record, made_by = run["record"], run.get("made_by") or {}
  arithmetic = run.get("arithmetic") or {}
  calibration = record["calibration"]
  shape = " × ".join(str(n) for n in calibration.get("shape", ()))
  seconds = record["clock"]["seconds"]
  peak = max(record["clock"].get("peak_bytes", {}).values(), default=None)
  form = record.get("form", "W4A4")
  outside = "" if form == "W4A4" else f", {form}, outside the paper's contract"
  values = {
    "contract": f"{record['contract_hash']}{outside}",
    "calibration": calibration.get("fingerprint", "unknown"),
    "calibration tokens": shape or "unknown",
    "program": json.dumps(record["program"], ensure_ascii=False),
    "arithmetic": "; ".join(
      f"{name.replace('_', ' ')}: {_words(one)}" for name, one in arithmetic.items()
    )
    or "unknown",
    "time": ", ".join(f"{name} {numbers.seconds(n)}" for name, n in seconds.items()),
    "peak memory": "unknown" if peak is None else numbers.size(peak),
    "sanity gate": _gate(record.get("sanity")),
    **{key: made_by[key] for key in ("date", "command", "device") if key in made_by},
  }
  if versions := made_by.get("versions"):
    values["versions"] = ", ".join(f"{name} {v}" for name, v in versions.items())
  cells = (
    (name, f'<td class="long mono">{words(str(value))}</td>')
    for name, value in values.items()
  )
  return f'<div class="card facts">{table(("what", "value"), cells)}</div>'


def page(
  runs: Sequence[Run], *, title: str, subtitle: str, files: Sequence[str] = ()
) -> str:
  """Returns the whole HTML document as text; see `write_report`."""
  _check(runs)
  failures = "".join(
    f'<p class="flag"><b>{words(str(run.get("method", "a run")))}</b> gave no '
    f"result: {words(str(run['error']))}</p>"
    for run in runs
    if "error" in run
  )
  good = [run for run in runs if "error" not in run]
  links = "".join(
    f'<a href="{html.escape(name)}">{html.escape(name)}</a>' for name in files
  )
  nav = f'<nav aria-label="files">{links}</nav>' if links else ""
  parts = [failures]
  if good:
    said = "".join(f"<li>{words(sentence)}</li>" for sentence in remarks(good))
    made = [
      folded(str(run["method"]), provenance(run), is_open=len(good) == 1)
      for run in good
    ]
    lead = (
      "Small numbers are 95 % intervals over windows of text; the best quantized value "
      "of each column is in color."
    )
    parts += [
      f'<p class="verdict">{words(verdict(good))}</p>',
      f'<ul class="remarks">{said}</ul>' if said else "",
      summary_table(shown(good)),
      f'<p class="lead">{lead}</p>',
      charts(good),
      samples(good),
      '<h2>What made it</h2><p class="lead">Results compare only where '
      f"contract and calibration are equal.</p>{''.join(made)}",
    ]
  body = f"""<header><h1>{words(title)}</h1><p>{words(subtitle)}</p>{nav}
</header>
{"".join(parts)}
{glossary(WORDS)}
<footer>Written by mxjax. result.json has every number of this page.</footer>"""
  return document(title, body)


def write_report(
  path: str | os.PathLike[str],
  runs: Sequence[Run],
  *,
  title: str,
  subtitle: str,
  files: Sequence[str] = (),
) -> pathlib.Path:
  """Writes a page with the answer first, readable without a network; returns its path.

  Args:
    path: The file, replaced if it exists, or a folder, which gets `report.html`.
    runs: One JSON-ready dict per method: `method`; `perplexity`, by dataset `mean`,
      `spread`, `values` and `window_losses`; `float_perplexity`, numbers by dataset;
      `operator_error` or None; `size` of `sizes.size_report` or None; `record`, of
      `QuantizationRecord.to_dict`; and where they were made `agreement`, `baseline`
      (such a dict of RTN, without a record) and `sample` (texts `prompt`, `float`,
      `quantized`). A failed run has an `error` instead, which is shown.
    title: Heading of the page.
    subtitle: A line under the heading, such as model, data and machine.
    files: Names of files beside it that have the numbers, to which it links.

  Raises:
    ValueError: There are no runs, or one lacks a required key.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / "report.html"
  content = page(runs, title=title, subtitle=subtitle, files=files)
  file.parent.mkdir(parents=True, exist_ok=True)
  write_durably(file, content.encode())
  return file
