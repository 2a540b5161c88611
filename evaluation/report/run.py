"""The part of the report that shows one run: from a record's dict to HTML."""

import html
import json
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from mxjax.evaluation.report import numbers, svg
from mxjax.evaluation.report.html import WIDE, figure, grid, legend, section, table
from mxjax.evaluation.report.recovery import Layers, recovery
from mxjax.evaluation.report.svg import Part, Series

STAGES = {
  "error_rtn": "native, nearest",
  "error_mapped_rtn": "mapped, nearest",
  "error_mapped_nearest": "mapped, final weights",
  "error_final": "final weights and A4 rule",
}
STEPS = {1.0: "full", 0.5: "half", 0.0: "identity"}
INTERACTION_BOUND = 1 / 8
MAX_COLORS = 7

escape = html.escape


def kinds(layers: Layers) -> list[str]:
  """Paths of the linears, in forward order."""
  return list(dict.fromkeys(path for layer in layers for path in layer["linears"]))


def _by_layer(layers: Layers, path: str, key: str) -> list[tuple[float, float]]:
  return [
    (float(index), float(layer["linears"][path][key]))
    for index, layer in enumerate(layers)
    if key in layer["linears"].get(path, {})
  ]


def _short(path: str) -> str:
  return path.rsplit("/", 1)[-1]


def errors(layers: Layers) -> str:
  """Relative squared output error by layer and stage, one panel a linear kind."""
  data = {
    path: {key: _by_layer(layers, path, key) for key in STAGES}
    for path in kinds(layers)
  }
  shown = [
    key
    for position, key in enumerate(STAGES)
    if not any(
      all(data[path][key] == data[path][later] for path in data)
      for later in list(STAGES)[position + 1 :]
    )
  ]
  values = [y for lines in data.values() for key in shown for _, y in lines[key]]
  limits = svg.value_range(values, log=True, zero=False)
  panels = [
    figure(
      _short(path),
      svg.line_chart(
        [Series(STAGES[key], lines[key], i) for i, key in enumerate(shown)],
        label=f"error by layer of {path}",
        width=246,
        height=180,
        log=True,
        y_range=limits,
      ),
    )
    for path, lines in data.items()
  ]
  keys = legend(STAGES[key] for key in shown)
  note = "One logarithmic axis for all; a stage equal to a later one is omitted."
  panels.append(
    f'<div class="card keys"><h4>Stages</h4>{keys}<p class="lead">{note}</p></div>'
  )
  return grid(panels, "small")


def _by_kind(layers: Layers, key: str, label: str, note: str, **options: Any) -> str:
  """One line a linear kind."""
  names = kinds(layers)[:MAX_COLORS]
  lines = [
    Series(_short(path), _by_layer(layers, path, key), i)
    for i, path in enumerate(names)
  ]
  if not any(y for line in lines for _, y in line.points):
    return ""
  chart = svg.line_chart(lines, label=label, **options)
  return figure(label, chart, note=note, keys=legend(map(_short, names)))


def _lists(layers: Layers, key: str) -> list[tuple[int, list[float]]]:
  """Values of a per-block list of every linear, by layer; layers without are left."""
  found = [
    (index, [v for linear in layer["linears"].values() for v in linear.get(key, ())])
    for index, layer in enumerate(layers)
  ]
  return [(index, values) for index, values in found if values]


def _balance(layers: Layers) -> str:
  found = _lists(layers, "balance_steps")
  if not found:
    return ""
  items = []
  for index, values in found:
    shares = [values.count(step) / len(values) for step in STEPS]
    parts = [
      Part(name, part, i)
      for i, (name, part) in enumerate(zip(STEPS.values(), shares, strict=True))
    ]
    items.append((str(index), parts))
  chart = svg.columns(items, label="balance steps accepted", x_label="layer")
  note = "Share of the 32-wide blocks that took the whole proposal, half, or none."
  keys = legend(STEPS.values())
  return figure("Balance steps accepted", chart, note=note, keys=keys)


def _interaction(layers: Layers) -> str:
  found = _lists(layers, "interaction_norm")
  if not found:
    return ""
  line = Series(
    "median",
    [(float(i), statistics.median(v)) for i, v in found],
    0,
    [(float(i), min(v), max(v)) for i, v in found],
  )
  chart = svg.line_chart(
    [line],
    label="interaction norm",
    zero=True,
    width=WIDE,
    reference=(INTERACTION_BOUND, "bound 1/8"),
  )
  note = "Spectral norm of K over blocks: median, and the range from least to largest."
  return figure("Interaction norm", chart, note=note, kind="wide")


def shaping(layers: Layers) -> str:
  """What the map and the code choice did, layer by layer."""
  edits = _by_kind(
    layers,
    "edit_rate",
    "Edit rate",
    "Share of activation blocks in which one code was moved off the nearest.",
    y_format=numbers.share,
  )
  return grid(f for f in (_balance(layers), edits, _interaction(layers)) if f)


def _histogram(layers: Layers, key: str, title: str) -> str:
  counts: dict[int, int] = {}
  for layer in layers:
    for linear in layer["linears"].values():
      for exponent, count in linear.get(key, {}).items():
        counts[int(exponent)] = counts.get(int(exponent), 0) + count
  if not counts:
    return ""
  total = sum(counts.values())
  items = [
    (str(e), [Part("blocks", counts.get(e, 0) / total, 0)])
    for e in range(min(counts), max(counts) + 1)
  ]
  chart = svg.columns(items, label=title, x_label="block exponent")
  return figure(title, chart, note=f"Share of {total:,} blocks, all layers together.")


def ranges(layers: Layers) -> str:
  """Where the scales lie, and how much saturates."""
  figures = (
    _histogram(layers, "weight_exponents", "Exponents of weight blocks"),
    _histogram(layers, "activation_exponents", "Exponents of activation blocks"),
    _by_kind(
      layers,
      "saturated_activations",
      "Activations beyond the top code",
      "Share of mapped inputs above 6 times their block's scale.",
      y_format=numbers.share,
      zero=True,
    ),
    _by_kind(
      layers,
      "top_code_weights",
      "Weights at the top code",
      "Share of weight codes with magnitude 6.",
      y_format=numbers.share,
      zero=True,
    ),
  )
  return grid(f for f in figures if f)


def damping(record: Mapping[str, Any]) -> str:
  """The damping each Hessian needed; those that needed more are flagged."""
  layers = record["layers"]
  used = [
    (f"{layer['name']}/{path}", linear["damping"])
    for layer in layers
    for path, linear in layer["linears"].items()
    if "damping" in linear
  ]
  if not used:
    return ""
  options = record["program"].get("options", {})
  default = options.get("damping", min(value for _, value in used))
  raised = [(n, v) for n, v in used if not math.isclose(v, default, rel_tol=1e-4)]
  counts: dict[str, int] = {}
  for _, value in used:
    counts[numbers.number(value)] = counts.get(numbers.number(value), 0) + 1
  wanted = numbers.number(default)
  mark = lambda v: v if v == wanted else f'<td class="flag">{v} (not the default)</td>'
  content = table(
    ("relative damping", "linears"),
    ((mark(value), str(count)) for value, count in counts.items()),
  )
  if raised:
    rows = ((escape(name), numbers.number(value)) for name, value in raised)
    content += (
      f'<p class="flag">{len(raised)} of {len(used)} linears needed another damping '
      f"than {wanted}.</p><details open><summary>Which</summary>"
      f"{table(('linear', 'damping used'), rows)}</details>"
    )
  return f'<div class="card narrow">{content}</div>'


def cost(clock: Mapping[str, Any]) -> str:
  """Wall time and peak memory by stage."""
  charts: list[tuple[str, str, Callable[[float], str], str]] = [
    ("Time by stage", "seconds", numbers.seconds, "Wall clock, compilation included."),
    (
      "Peak memory",
      "peak_bytes",
      numbers.size,
      "Largest resident memory of the process when the stage last ended.",
    ),
  ]
  return grid(
    figure(
      title,
      svg.rows(
        [(stage, [Part(title, value, 0)]) for stage, value in clock[key].items()],
        label=title,
        y_format=form,
      ),
      note=note,
    )
    for title, key, form, note in charts
    if clock.get(key)
  )


def sanity(values: Mapping[str, Any] | None) -> str:
  """The gate's numbers, or that it was not run."""
  if not values:
    return '<p class="flag">The sanity gate was not run.</p>'
  tiles = (
    (numbers.number(values["float_loss"]), "float loss, nats a token"),
    (numbers.number(values["quantized_loss"]), "quantized loss, nats a token"),
    (numbers.number(values["divergence"]), "KL divergence, nats"),
    (numbers.share(values["agreement"]), f"same top token, of {values['tokens']:,}"),
  )
  cards = (
    f'<div class="card tile"><b>{number}</b><span>{name}</span></div>'
    for number, name in tiles
  )
  return f'<div class="tiles">{"".join(cards)}</div>'


def provenance(record: Mapping[str, Any]) -> str:
  """What another result must share to be compared with this one."""
  calibration = record["calibration"]
  shape = " × ".join(str(n) for n in calibration.get("shape", ()))
  rows = (
    ("contract", record["contract_hash"]),
    ("calibration", calibration.get("fingerprint", "unknown")),
    ("calibration tokens", shape or "unknown"),
    ("program", json.dumps(record["program"], ensure_ascii=False)),
  )
  cells = (
    (name, f'<td class="long mono">{escape(str(value))}</td>') for name, value in rows
  )
  return f'<div class="card facts">{table(("what", "value"), cells)}</div>'


def linears(layers: Layers) -> str:
  """Every linear's errors as a folded table."""
  rows = (
    (
      escape(f"{layer['name']}/{path}"),
      " × ".join(str(n) for n in linear.get("shape", ())),
      escape(str(linear.get("map", ""))),
      escape(str(linear.get("rounding", ""))),
      *(numbers.number(linear[key]) if key in linear else "" for key in STAGES),
      numbers.share(linear["edit_rate"]) if "edit_rate" in linear else "",
    )
    for layer in layers
    for path, linear in layer["linears"].items()
  )
  head = (
    "linear",
    "shape",
    "map",
    "A4 rule",
    "native",
    "mapped",
    "with weights",
    "final",
    "edit rate",
  )
  return (
    "<details><summary>Every linear in numbers</summary>"
    f'<div class="card">{table(head, rows)}</div></details>'
  )


def run_section(run: Mapping[str, Any], anchor: str) -> str:
  """All sections of one run.

  Args:
    run: One entry of the runs given to `report.write_report`.
    anchor: The id of the section.

  Returns:
    A `<section>` element.
  """
  record = run["record"]
  layers = record["layers"]
  name = escape(str(run["method"]))
  parts = (
    section(
      "Error by layer",
      "Relative squared output error of each linear on calibration "
      "tokens, after each stage.",
      errors(layers) + linears(layers) if layers else "",
    ),
    section(
      "Shaping and code choice", "What was decided for each block.", shaping(layers)
    ),
    section("Scales and saturation", "How the blocks use the format.", ranges(layers)),
    section(
      "Recovery", "Structural corrections fitted after quantization.", recovery(layers)
    ),
    section(
      "Damping",
      "Added to each Hessian's diagonal, relative to its mean, to factor it.",
      damping(record),
    ),
    section(
      "Time and memory", "What the run cost on its machine.", cost(record["clock"])
    ),
    section(
      "Sanity gate",
      "Logits against the float model right after quantization.",
      sanity(record.get("sanity")),
    ),
    section(
      "Provenance", "Results compare only under equal fingerprints.", provenance(record)
    ),
  )
  return f'<section class="run" id="{anchor}"><h2>{name}</h2>{"".join(parts)}</section>'
