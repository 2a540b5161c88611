"""Report sections about linears: errors, decisions and ranges by layer."""

import html
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import figures, numbers, svg
from mxjax.evaluation.report.axes import value_range
from mxjax.evaluation.report.html import figure, grid, legend, table
from mxjax.evaluation.report.svg import Part, Series

Layers = Sequence[Mapping[str, Any]]
STAGES = {
  "error_rtn": "native, nearest",
  "error_mapped_rtn": "mapped, nearest",
  "error_mapped_nearest": "mapped, final weights",
  "error_final": "final weights and A4 rule",
}
STEPS = {1.0: "full", 0.5: "half", 0.0: "identity"}
INTERACTION_BOUND = 1 / 8
MAX_COLORS = 7


def kinds(layers: Layers) -> list[str]:
  """Returns the paths of the linears, in forward order."""
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
  """Charts relative squared output error by layer and stage, one panel per kind."""
  data = {
    path: {key: _by_layer(layers, path, key) for key in STAGES}
    for path in kinds(layers)
  }
  is_same = lambda key, later: all(d[key] == d[later] for d in data.values())
  keys = list(STAGES)
  shown = [
    key
    for position, key in enumerate(keys)
    if not any(is_same(key, later) for later in keys[position + 1 :])
  ]
  values = [y for lines in data.values() for key in shown for _, y in lines[key]]
  limits = value_range(values, log=True, zero=False)
  panels = []
  for path, lines in data.items():
    series = [Series(STAGES[key], lines[key], i) for i, key in enumerate(shown)]
    label = f"error by layer of {path}"
    size = {"width": 246, "height": 180}
    chart = svg.line_chart(series, label=label, log=True, y_range=limits, **size)
    panels.append(figure(_short(path), chart))
  names = legend((STAGES[key], color) for color, key in enumerate(shown))
  note = "One logarithmic axis for all; a stage equal to a later one is omitted."
  panels.append(
    f'<div class="card keys"><h4>Stages</h4>{names}<p class="lead">{note}</p></div>'
  )
  return grid(panels, "small")


def _by_kind(layers: Layers, key: str, title: str, note: str, **options: Any) -> str:
  series = [
    Series(_short(path), _by_layer(layers, path, key), color)
    for color, path in enumerate(kinds(layers)[:MAX_COLORS])
  ]
  return figures.lines(title, series, note, y_format=numbers.share, **options)


def _lists(layers: Layers, key: str) -> list[tuple[int, list[float]]]:
  """Collects the values of a per-block list by layer index, all linears together."""
  lists = [
    [value for linear in layer["linears"].values() for value in linear.get(key, ())]
    for layer in layers
  ]
  return [(index, values) for index, values in enumerate(lists) if values]


def _balance(layers: Layers) -> str:
  bars = []
  for index, steps in _lists(layers, "balance_steps"):
    shares = [(name, steps.count(step) / len(steps)) for step, name in STEPS.items()]
    bars.append((str(index), [Part(*part, i) for i, part in enumerate(shares)]))
  return figures.stacks(
    svg.columns,
    "Balance steps accepted",
    bars,
    "Share of the 32-wide blocks that took the whole proposal, half, or none.",
    x_label="layer",
  )


def _interaction(layers: Layers) -> str:
  norms = _lists(layers, "interaction_spectral_norm")
  middle = [(float(i), statistics.median(values)) for i, values in norms]
  band = [(float(i), min(values), max(values)) for i, values in norms]
  return figures.lines(
    "Interaction norm",
    [Series("median", middle, 0, band)],
    "Spectral norm of K over blocks: median, and the range from least to largest.",
    zero=True,
    wide=True,
    reference=(INTERACTION_BOUND, "bound 1/8"),
  )


def shaping(layers: Layers) -> str:
  """Charts what the map and the code choice did, layer by layer."""
  edits = _by_kind(
    layers,
    "edit_rate",
    "Edit rate",
    "Share of activation blocks in which one code was moved off the nearest.",
  )
  return grid((_balance(layers), edits, _interaction(layers)))


def _histogram(layers: Layers, key: str, title: str) -> str:
  counts: dict[int, int] = {}
  for layer in layers:
    for linear in layer["linears"].values():
      for exponent, count in linear.get(key, {}).items():
        counts[int(exponent)] = counts.get(int(exponent), 0) + count
  total = sum(counts.values())
  exponents = range(min(counts, default=0), max(counts, default=-1) + 1)
  share = lambda exponent: counts.get(exponent, 0) / total
  bars = [(str(e), [Part("blocks", share(e), 0)]) for e in exponents]
  note = f"Share of {total:,} blocks, all layers together."
  return figures.stacks(svg.columns, title, bars, note, x_label="block exponent")


def ranges(layers: Layers) -> str:
  """Charts the distribution of the scales, and how much saturates."""
  return grid(
    (
      _histogram(layers, "weight_exponents", "Exponents of weight blocks"),
      _histogram(layers, "activation_exponents", "Exponents of activation blocks"),
      _by_kind(
        layers,
        "saturated_activations",
        "Activations beyond the top code",
        "Share of mapped inputs above 6 times their block's scale.",
        zero=True,
      ),
      _by_kind(
        layers,
        "top_code_weights",
        "Weights at the top code",
        "Share of weight codes with magnitude 6.",
        zero=True,
      ),
    )
  )


def numbers_table(layers: Layers) -> str:
  """Lists every linear's errors in a folded table."""
  heads = "linear,shape,map,A4 rule,native,mapped,with weights,final,edit rate"
  rows = (
    (
      html.escape(f"{layer['name']}/{path}"),
      " × ".join(str(n) for n in linear.get("shape", ())),
      html.escape(str(linear.get("map", ""))),
      html.escape(str(linear.get("rounding", ""))),
      *(numbers.number(linear[key]) if key in linear else "" for key in STAGES),
      numbers.share(linear["edit_rate"]) if "edit_rate" in linear else "",
    )
    for layer in layers
    for path, linear in layer["linears"].items()
  )
  return (
    "<details><summary>Every linear in numbers</summary>"
    f'<div class="card">{table(heads.split(","), rows)}</div></details>'
  )
