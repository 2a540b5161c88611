"""The part of the report that shows recovery fits: coefficients and errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import svg
from mxjax.evaluation.report.html import WIDE, figure, grid, legend
from mxjax.evaluation.report.svg import Series

Layers = Sequence[Mapping[str, Any]]


def _fits(layers: Layers, name: str) -> list[tuple[int, Mapping[str, Any]]]:
  return [
    (index, layer["recovery"][name])
    for index, layer in enumerate(layers)
    if name in layer.get("recovery", {})
  ]


def _pair(
  fits: Sequence[tuple[int, Mapping[str, Any]]], title: str, after: str, note: str
) -> str:
  names = {"error_before": "before", after: "after"}
  lines = [
    Series(name, [(float(i), fit[key]) for i, fit in fits if key in fit], color)
    for color, (key, name) in enumerate(names.items())
  ]
  chart = svg.line_chart(lines, label=title, log=True)
  return figure(title, chart, note=note, keys=legend(names.values()))


def _per_head(
  fits: Sequence[tuple[int, Mapping[str, Any]]], key: str, title: str, neutral: float
) -> str:
  points = [(float(index), value) for index, fit in fits for value in fit[key]]
  chart = svg.line_chart(
    [Series("head", points, 0)],
    label=title,
    dots=True,
    reference=(neutral, ""),
  )
  note = f"One dot for each key-value head; the dashed {neutral:g} changes nothing."
  return figure(title, chart, note=note)


def _mlp(fits: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
  names = {
    "alpha": "alpha, gate shift",
    "beta": "beta, gate scale",
    "eta": "eta, up scale",
  }
  lines = [
    Series(name, [(float(i), fit[key]) for i, fit in fits], color)
    for color, (key, name) in enumerate(names.items())
  ]
  chart = svg.line_chart(lines, label="MLP coefficients", zero=True, width=WIDE)
  note = "Alpha in units of the gate's deviation; the sum of magnitudes is at most 1/8."
  keys = legend(names.values())
  return [
    _pair(
      fits,
      "Error of the gated product",
      "error_after_linearized",
      "Relative squared error; after is the linear prediction, not a measurement.",
    ),
    figure("MLP coefficients", chart, note=note, keys=keys, kind="wide"),
  ]


def recovery(layers: Layers) -> str:
  """Coefficients and errors of the recovery fits, where the run had any."""
  attention, mlp = _fits(layers, "attention"), _fits(layers, "mlp")
  figures = []
  if attention:
    figures = [
      _per_head(attention, "scale", "Value scale a", 1.0),
      _per_head(attention, "offset", "Value offset b", 0.0),
      _pair(
        attention,
        "Error of the value outputs",
        "error_after",
        "Relative squared error against the float trajectory.",
      ),
    ]
  return grid(figures + (_mlp(mlp) if mlp else []))
