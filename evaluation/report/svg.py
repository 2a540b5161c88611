"""Plain charts as inline SVG text: lines, dots and steps, stacked bars.

All are as wide as a phone, where the page shows them at their size; a wide page has
several side by side. Colors are CSS classes `c0` to `c7`, so the page sets them for
light and dark mode. Every mark carries a `<title>`, which browsers show on hover and
read aloud. Sizes are in pixels; a `label` is for screen readers.
"""

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from mxjax.evaluation.report.numbers import number

Format = Callable[[float], str]
WIDTH = 340
"""Of every chart, in pixels."""
COLORS = 8
"""Of the palette."""


class Series(NamedTuple):
  """A line, dots or steps; `name` is shown on hover, `color` is a palette index.

  `points` are (x, y), of which those not finite are left out; `band` has (x, low,
  high), drawn behind the line, and may be empty. Steps hold a value until the next.
  """

  name: str
  points: Sequence[tuple[float, float]]
  color: int
  band: Sequence[tuple[float, float, float]] = ()
  form: Literal["line", "dots", "steps"] = "line"


def merged(series: Sequence[Series]) -> list[Series]:
  """Joins series that coincide into one with all of their names, in the first color."""
  joined: dict[Any, Series] = {}
  for each in series:
    key = tuple(each.points), tuple(each.band), each.form
    first = joined.get(key)
    name = f"{first.name} = {each.name}" if first else each.name
    joined[key] = (first or each)._replace(name=name)
  return list(joined.values())


class Part(NamedTuple):
  """A bar, or one part of a stacked bar: name, value, palette index, spread."""

  name: str
  value: float
  color: int
  spread: float = 0.0


Bars = Sequence[tuple[str, Sequence[Part]]]
"""Named bars, each with its parts; one without parts is a heading."""


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
  """Returns round numbers within `[low, high]`."""
  if high <= low:
    return [low]
  raw = (high - low) / count
  unit = 10.0 ** math.floor(math.log10(raw))
  # Rounding must neither skip a step nor, below, cost the tick at an end.
  step = next(f * unit for f in (1, 2, 5, 10) if f * unit >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Returns powers of ten in `[low, high]`, with 2 and 5 between if there are few.

  A range without two of these gets round numbers, so that a distance can be read.
  """
  decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  inside = lambda values: [v for v in values if low * 0.999 <= v <= high * 1.001]
  tens = inside(10.0**d for d in decades)
  if len(tens) > 2:
    return tens
  between = inside(factor * 10.0**d for d in decades for factor in (1, 2, 5))
  return between if len(between) > 1 else linear_ticks(low, high)


def value_range(
  values: Sequence[float], *, log: bool = False, zero: bool = False
) -> tuple[float, float]:
  """Returns a vertical range that contains the values, with a margin."""
  drawn = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
  if not drawn:
    return (1e-3, 1.0) if log else (0.0, 1.0)
  low, high = min(drawn), max(drawn)
  if log:
    return low / 1.3, high * 1.3
  if zero:
    low, high = min(low, 0.0), max(high, 0.0)
  air = 0.06 * ((high - low) or abs(high) or 1.0)
  return low if zero and low == 0 else low - air, high + air


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frame:
  """The plot area of a chart and its two scales."""

  width: int
  height: int
  x: tuple[float, float]
  y: tuple[float, float]
  log: bool = False
  left: int = 52
  right: int = 12
  top: int = 16
  bottom: int = 38

  def px(self, value: float) -> float:
    """Returns the horizontal pixel of a value."""
    low, high = self.x
    inner = self.width - self.left - self.right
    return self.left + inner * (value - low) / ((high - low) or 1)

  def py(self, value: float) -> float:
    """Returns the vertical pixel of a value."""
    low, high = self.y
    if self.log:
      value, low, high = (math.log10(v) for v in (value, low, high))
    inner = self.height - self.top - self.bottom
    return self.height - self.bottom - inner * (value - low) / ((high - low) or 1)

  def holds(self, *values: float) -> bool:
    """Tells whether values can be drawn on the vertical axis."""
    return all(math.isfinite(v) and (not self.log or v > 0) for v in values)

  def axes(self, x_label: str, y_format: Format) -> list[str]:
    """Draws horizontal grid lines with their values, the base line and its label."""
    ticks = log_ticks(*self.y) if self.log else linear_ticks(*self.y)
    edge = self.width - self.right
    parts = []
    for tick in ticks:
      y = self.py(tick)
      parts.append(_line(self.left, y, edge, y, "tick"))
      parts.append(_text(self.left - 6, y + 4, y_format(tick), "end"))
    base = self.height - self.bottom
    parts.append(_line(self.left, base, edge, base, "axis"))
    if self.log:
      parts.append(_text(self.left, 9, "logarithmic axis", "start"))
    middle = (self.left + edge) / 2
    return [*parts, _text(middle, self.height - 4, x_label, kind="label")]

  def x_ticks(self) -> list[str]:
    """Draws integers under the horizontal axis."""
    # Two ticks may round to one layer.
    ticks = {round(t) for t in linear_ticks(*self.x, 6)}
    y = self.height - self.bottom + 14
    return [_text(self.px(t), y, str(t)) for t in sorted(ticks)]

  def svg(self, label: str, parts: Sequence[str]) -> str:
    """Returns the chart as an `<svg>` element."""
    return _svg(self.width, self.height, label, parts)


def _text(
  x: float, y: float, content: str, anchor: str = "middle", kind: str = ""
) -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
    f"{html.escape(content)}</text>"
  )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
  )


def _rect(x: float, y: float, w: float, h: float, color: int, title: str) -> str:
  return (
    f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0):.1f}" height="{max(h, 0):.1f}" '
    f'class="c{color}"><title>{html.escape(title)}</title></rect>'
  )


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
  return (
    f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
    f'aria-label="{html.escape(label)}">{"".join(parts)}</svg>'
  )


def line_chart(
  series: Sequence[Series],
  *,
  label: str,
  x_label: str = "layer",
  width: int = WIDTH,
  height: int = 200,
  log: bool = False,
  zero: bool = False,
  y_range: tuple[float, float] | None = None,
  y_format: Format = number,
  reference: tuple[float, str] | None = None,
) -> str:
  """Draws series over a shared axis as an `<svg>` element; those that coincide once.

  The horizontal axis has integer values. On a `log` axis, values that are not positive
  are left out; `zero` forces the vertical axis to include zero, and `y_range` None
  takes the range of the values. `reference` is a dashed horizontal line and its name,
  possibly empty.
  """
  ys = [y for s in series for _, y in s.points]
  ys += [y for s in series for band in s.band for y in band[1:]]
  ys += [reference[0]] if reference else []
  xs = [x for s in series for x, _ in s.points] or [0.0]
  # Room for the marks of the first and the last layer.
  x_range = min(xs) - 0.3, max(xs) + 0.3
  y_range = y_range or value_range(ys, log=log, zero=zero)
  frame = _Frame(width=width, height=height, log=log, x=x_range, y=y_range)
  parts = [*frame.axes(x_label, y_format), *frame.x_ticks()]
  for item in merged(series):
    parts += _drawn(item, frame, x_label, y_format)
  if reference:
    y, edge = frame.py(reference[0]), width - frame.right
    parts.append(_line(frame.left, y, edge, y, "reference"))
    parts.append(_text(edge, y - 4, reference[1], "end", "label"))
  return frame.svg(label, parts)


def _drawn(series: Series, frame: _Frame, x_label: str, y_format: Format) -> list[str]:
  place = lambda x, y: f"{frame.px(x):.1f},{frame.py(y):.1f}"
  points = [(x, y) for x, y in series.points if frame.holds(y)]
  parts = []
  if band := [b for b in series.band if frame.holds(*b[1:])]:
    outline = [place(x, high) for x, _, high in band]
    outline += [place(x, low) for x, low, _ in reversed(band)]
    parts.append(
      f'<polygon points="{" ".join(outline)}" class="band c{series.color}"/>'
    )
  if series.form != "dots" and len(points) > 1:
    # A step goes on at the height before, and then at that after.
    corners = [
      (x, y)
      for (_, before), (x, after) in itertools.pairwise(points)
      for y in (before, after)
    ]
    outline = points if series.form == "line" else [points[0], *corners]
    path = " ".join(place(x, y) for x, y in outline)
    parts.append(f'<polyline points="{path}" class="line s{series.color}"/>')
  if series.form == "steps" and len(points) > 1:
    return parts
  radius = 2.6 if series.form == "dots" or len(points) < 3 else 1.8
  for x, y in points:
    title = html.escape(f"{series.name}, {x_label} {x:g}: {y_format(y)}")
    parts.append(
      f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="{radius}" '
      f'class="c{series.color}"><title>{title}</title></circle>'
    )
  return parts


def rows(
  items: Bars, *, label: str, y_format: Format = number, width: int = WIDTH
) -> str:
  """Draws stacked horizontal bars, each under its name and with its total at the end.

  A total that is not finite fills the width, a negative one has no bar: the axis begins
  at zero. A part with a spread gets a whisker of one spread.
  """
  totals = [sum(p.value for p in parts) for _, parts in items]
  reach = [
    total + sum(p.spread for p in parts)
    for (_, parts), total in zip(items, totals, strict=True)
  ]
  highest = max(filter(math.isfinite, reach), default=0.0)
  # Behind the longest bar there is room for its total.
  scale = (width - 74) / (highest if highest > 0 else 1.0)
  result, y = [], 0
  for (name, parts), total in zip(items, totals, strict=True):
    result.append(_text(0, y + 13, name, "start", "label" if parts else "value"))
    y += 18
    if not parts:
      continue
    x = 0.0
    for part in parts:
      title = f"{name}, {part.name}: {y_format(part.value)}"
      span = part.value * scale if math.isfinite(part.value) else width - 74
      result.append(_rect(x, y, span, 14, part.color, title))
      x += max(span, 0.0)
      if part.spread and math.isfinite(part.value):
        low, high = (x + sign * part.spread * scale for sign in (-1, 1))
        result.append(_line(low, y + 7, high, y + 7, "whisker"))
        x = high
    result.append(_text(x + 6, y + 11, y_format(total), "start", "value"))
    y += 22
  return _svg(width, y, label, result)
