"""Report sections by layer: errors, decisions and ranges of linears; recovery fits."""

import html
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import numbers, svg
from mxjax.evaluation.report.html import (
  figure,
  folded,
  grid,
  legend,
  lines,
  stacks,
  table,
)
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


def _kinds(layers: Layers) -> list[str]:
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
    for path in _kinds(layers)
  }
  # Stages that are equal in every linear are one line with all of their names.
  names: dict[str, str] = {}
  for key in STAGES:
    same = (k for k in names if all(d[k] == d[key] for d in data.values()))
    first = next(same, None)
    names[first or key] = f"{names[first]} = {STAGES[key]}" if first else STAGES[key]
  values = [y for points in data.values() for key in names for _, y in points[key]]
  options = {"log": True, "y_range": svg.value_range(values, log=True)}
  panels = []
  for path, points in data.items():
    series = [
      Series(name, points[key], i) for i, (key, name) in enumerate(names.items())
    ]
    chart = svg.line_chart(series, label=f"error by layer of {path}", **options)
    panels.append(figure(_short(path), chart))
  keys = legend((name, color) for color, name in enumerate(names.values()))
  note = '<p class="lead">All have the same vertical range.</p>'
  return f"{keys}{note}{grid(panels)}"


def _by_kind(layers: Layers, key: str, title: str, note: str, **options: Any) -> str:
  series = [
    Series(_short(path), _by_layer(layers, path, key), color)
    for color, path in enumerate(_kinds(layers)[:MAX_COLORS])
  ]
  return lines(title, series, note, y_format=numbers.share, **options)


def _lists(layers: Layers, key: str) -> list[tuple[int, list[float]]]:
  """Collects the values of a per-block list by layer index, all linears together."""
  lists = [
    [value for linear in layer["linears"].values() for value in linear.get(key, ())]
    for layer in layers
  ]
  return [(index, values) for index, values in enumerate(lists) if values]


def shaping(layers: Layers) -> str:
  """Charts what the map and the code choice did, layer by layer."""
  balance = []
  for index, steps in _lists(layers, "balance_steps"):
    shares = [(name, steps.count(step) / len(steps)) for step, name in STEPS.items()]
    balance.append((str(index), [Part(*part, i) for i, part in enumerate(shares)]))
  norms = _lists(layers, "interaction_spectral_norm")
  middle = [(float(i), statistics.median(values)) for i, values in norms]
  band = [(float(i), min(values), max(values)) for i, values in norms]
  return grid(
    (
      stacks(
        svg.columns,
        "Balance steps accepted",
        balance,
        "Share of the 32-wide blocks that took the whole proposal, half, or none.",
        x_label="layer",
      ),
      _by_kind(
        layers,
        "edit_rate",
        "Edit rate",
        "Share of activation blocks in which one code was moved off the nearest.",
      ),
      lines(
        "Interaction norm",
        [Series("median", middle, 0, band)],
        "Spectral norm of K over blocks: median, and the range from least to largest.",
        zero=True,
        reference=(INTERACTION_BOUND, "bound 1/8"),
      ),
    )
  )


def _histogram(layers: Layers, key: str, title: str) -> str:
  counts: Counter[int] = Counter()
  for layer in layers:
    for linear in layer["linears"].values():
      counts.update({int(e): count for e, count in linear.get(key, {}).items()})
  total = counts.total()
  exponents = range(min(counts, default=0), max(counts, default=-1) + 1)
  bars = [(str(e), [Part("blocks", counts[e] / total, 0)]) for e in exponents]
  note = f"Share of {total:,} blocks, all layers together."
  return stacks(svg.columns, title, bars, note, x_label="block exponent")


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
  content = f'<div class="card">{table(heads.split(","), rows)}</div>'
  return folded("Every linear in numbers", content)


Fits = Sequence[tuple[int, Mapping[str, Any]]]
"""Layer indices with the fits of each layer."""


def _fits(layers: Layers, name: str) -> Fits:
  return [
    (index, layer["recovery"][name])
    for index, layer in enumerate(layers)
    if name in layer.get("recovery", {})
  ]


def _series(fits: Fits, names: Mapping[str, str]) -> list[Series]:
  return [
    Series(name, [(float(i), fit[key]) for i, fit in fits if key in fit], color)
    for color, (key, name) in enumerate(names.items())
  ]


def _per_head(fits: Fits, key: str, title: str, neutral: float) -> str:
  points = [(float(index), value) for index, fit in fits for value in fit[key]]
  note = f"One dot for each key-value head; the dashed {neutral:g} changes nothing."
  series = [Series("head", points, 0, form="dots")]
  return lines(title, series, note, reference=(neutral, ""))


def recovery(layers: Layers) -> str:
  """Charts coefficients and errors of the recovery fits, if the run had any."""
  attention, mlp = _fits(layers, "attention"), _fits(layers, "mlp")
  coefficients = {
    "alpha": "alpha, gate shift",
    "beta": "beta, gate scale",
    "eta": "eta, up scale",
  }
  before = {"error_before": "before"}
  return grid(
    (
      _per_head(attention, "scale", "Value scale a", 1.0),
      _per_head(attention, "offset", "Value offset b", 0.0),
      lines(
        "Error of the value outputs",
        _series(attention, before | {"error_after": "after"}),
        "Relative squared error against the float trajectory.",
        log=True,
      ),
      lines(
        "Error of the gated product",
        _series(mlp, before | {"error_after_linearized": "after"}),
        "Relative squared error; after is the linear prediction, not a measurement.",
        log=True,
      ),
      lines(
        "MLP coefficients",
        _series(mlp, coefficients),
        "Alpha in units of the gate's deviation; the sum of magnitudes is at most 1/8.",
        zero=True,
      ),
    )
  )
