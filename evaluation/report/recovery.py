"""Report section about recovery fits: coefficients and errors."""

from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report import figures
from mxjax.evaluation.report.html import grid
from mxjax.evaluation.report.svg import Series

Layers = Sequence[Mapping[str, Any]]
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


def _errors(fits: Fits, title: str, after: str, note: str) -> str:
  names = {"error_before": "before", after: "after"}
  return figures.lines(title, _series(fits, names), note, log=True)


def _per_head(fits: Fits, key: str, title: str, neutral: float) -> str:
  points = [(float(index), value) for index, fit in fits for value in fit[key]]
  note = f"One dot for each key-value head; the dashed {neutral:g} changes nothing."
  series = [Series("head", points, 0)]
  return figures.lines(title, series, note, dots=True, reference=(neutral, ""))


def recovery(layers: Layers) -> str:
  """Charts coefficients and errors of the recovery fits, if the run had any."""
  attention, mlp = _fits(layers, "attention"), _fits(layers, "mlp")
  coefficients = {
    "alpha": "alpha, gate shift",
    "beta": "beta, gate scale",
    "eta": "eta, up scale",
  }
  return grid(
    (
      _per_head(attention, "scale", "Value scale a", 1.0),
      _per_head(attention, "offset", "Value offset b", 0.0),
      _errors(
        attention,
        "Error of the value outputs",
        "error_after",
        "Relative squared error against the float trajectory.",
      ),
      _errors(
        mlp,
        "Error of the gated product",
        "error_after_linearized",
        "Relative squared error; after is the linear prediction, not a measurement.",
      ),
      figures.lines(
        "MLP coefficients",
        _series(mlp, coefficients),
        "Alpha in units of the gate's deviation; the sum of magnitudes is at most 1/8.",
        zero=True,
        wide=True,
      ),
    )
  )
