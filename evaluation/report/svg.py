"""Plain charts as inline SVG text: lines, grouped bars, stacked columns and rows.

Colors are CSS classes `c0` to `c7`, so the page sets them for light and dark mode.
Every mark carries a `<title>`, which browsers show on hover and read aloud.
"""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from mxjax.evaluation.report.axes import (
  Format,
  Frame,
  axes,
  line,
  rect,
  text,
  value_range,
  x_ticks,
)
from mxjax.evaluation.report.numbers import number, share


class Series(NamedTuple):
  """A line or a set of dots; `name` is shown on hover, `color` is a palette index.

  `points` are (x, y), of which those not finite are left out; `band` has (x, low,
  high), drawn behind the line, and may be empty.
  """

  name: str
  points: Sequence[tuple[float, float]]
  color: int
  band: Sequence[tuple[float, float, float]] = ()


class Part(NamedTuple):
  """A bar, or one part of a stacked bar: name, value, palette index, spread."""

  name: str
  value: float
  color: int
  spread: float = 0.0


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
  width: int = 516,
  height: int = 220,
  log: bool = False,
  zero: bool = False,
  dots: bool = False,
  y_range: tuple[float, float] | None = None,
  y_format: Format = number,
  reference: tuple[float, str] | None = None,
) -> str:
  """Draws lines, or dots alone with `dots`, over a shared axis as an `<svg>` element.

  The horizontal axis has integer values. On a `log` axis, values that are not positive
  are left out; `zero` forces the vertical axis to include zero, and `y_range` None
  takes the range of the values. `reference` is a dashed horizontal line and its name,
  possibly empty. `label` is for screen readers; sizes are in pixels.
  """
  ys = [y for s in series for _, y in s.points]
  ys += [y for s in series for band in s.band for y in band[1:]]
  ys += [reference[0]] if reference else []
  xs = [x for s in series for x, _ in s.points] or [0.0]
  frame = Frame(
    width=width,
    height=height,
    log=log,
    x=(min(xs) - 0.3, max(xs) + 0.3),
    y=y_range or value_range(ys, log=log, zero=zero),
  )
  parts = [*axes(frame, x_label, y_format), *x_ticks(frame)]
  for item in series:
    parts += _drawn(item, frame, dots, x_label, y_format)
  if reference:
    y = frame.py(reference[0])
    parts.append(line(frame.left, y, width - frame.right, y, "reference"))
    parts.append(text(width - frame.right, y - 4, reference[1], "end", "label"))
  return _svg(width, height, label, parts)


def _drawn(
  series: Series, frame: Frame, dots: bool, x_label: str, y_format: Format
) -> list[str]:
  points = [(x, y) for x, y in series.points if frame.holds(y)]
  spots = [(frame.px(x), frame.py(y)) for x, y in points]
  parts = []
  if band := [b for b in series.band if frame.holds(b[1]) and frame.holds(b[2])]:
    upper = [f"{frame.px(x):.1f},{frame.py(high):.1f}" for x, _, high in band]
    lower = [f"{frame.px(x):.1f},{frame.py(low):.1f}" for x, low, _ in band]
    outline = " ".join(upper + lower[::-1])
    parts.append(f'<polygon points="{outline}" class="band c{series.color}"/>')
  if not dots and len(spots) > 1:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    parts.append(f'<polyline points="{path}" class="line s{series.color}"/>')
  radius = 2.6 if dots or len(spots) < 3 else 1.8
  for (px, py), (x, y) in zip(spots, points, strict=True):
    title = html.escape(f"{series.name}, {x_label} {x:g}: {y_format(y)}")
    parts.append(
      f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius}" class="c{series.color}">'
      f"<title>{title}</title></circle>"
    )
  return parts


def bar_groups(
  groups: Sequence[tuple[str, Sequence[Part]]],
  *,
  label: str,
  width: int = 516,
  height: int = 260,
  y_format: Format = number,
) -> str:
  """Draws vertical bars in named groups, with whiskers of one spread."""
  values = [p.value + p.spread for _, parts in groups for p in parts]
  finite = [v for v in values if math.isfinite(v)]
  frame = Frame(
    width=width,
    height=height,
    x=(0, max(len(groups), 1)),
    top=22,
    bottom=26,
    y=(0.0, 1.05 * max(finite, default=1.0) or 1.0),
  )
  result = axes(frame, "", y_format)
  for index, (name, parts) in enumerate(groups):
    result.append(text(frame.px(index + 0.5), height - 8, name, kind="label"))
    step = min(0.8 / max(len(parts), 1), 64 / (frame.px(1) - frame.px(0)))
    start = index + 0.5 - step * len(parts) / 2
    for place, part in enumerate(parts):
      result += _bar(frame, start + step * place, step, part, y_format)
  return _svg(width, height, label, result)


def _bar(
  frame: Frame, x: float, step: float, part: Part, y_format: Format
) -> list[str]:
  left, right = frame.px(x + 0.08 * step), frame.px(x + 0.92 * step)
  value = part.value if math.isfinite(part.value) else frame.y[1]
  # A negative value gets a label and no bar: the axis begins at zero.
  top, base, middle = frame.py(max(value, 0.0)), frame.py(0), (left + right) / 2
  written = y_format(part.value)
  title = f"{part.name}: {written}"
  result, above = [], top
  if part.spread:
    title += f" ± {y_format(part.spread)}"
    above, below = (frame.py(value + sign * part.spread) for sign in (1, -1))
    result.append(line(middle, above, middle, below, "whisker"))
  bar = rect(left, top, right - left, base - top, part.color, title)
  return [bar, *result, text(middle, above - 5, written, kind="value")]


def columns(
  items: Sequence[tuple[str, Sequence[Part]]],
  *,
  label: str,
  x_label: str,
  width: int = 516,
  height: int = 220,
  y_format: Format = share,
) -> str:
  """Draws stacked vertical columns; labels are thinned to fit."""
  totals = [sum(p.value for p in parts) for _, parts in items]
  frame = Frame(
    width=width,
    height=height,
    x=(0, max(len(items), 1)),
    y=(0.0, max(totals, default=0.0) or 1.0),
  )
  result = axes(frame, x_label, y_format)
  step = frame.px(1) - frame.px(0)
  thin = max(1, math.ceil(26 / step))
  for index, (name, parts) in enumerate(items):
    if index % thin == 0:
      result.append(text(frame.px(index + 0.5), height - frame.bottom + 14, name))
    total = 0.0
    for part in parts:
      low, total = total, total + part.value
      y, x = frame.py(total), frame.px(index + 0.06)
      title = f"{x_label} {name}, {part.name}: {y_format(part.value)}"
      result.append(rect(x, y, 0.88 * step, frame.py(low) - y, part.color, title))
  return _svg(width, height, label, result)


def rows(
  items: Sequence[tuple[str, Sequence[Part]]],
  *,
  label: str,
  y_format: Format,
  width: int = 516,
  left: int = 128,
  pitch: int = 30,
) -> str:
  """Draws stacked horizontal bars with their totals at the end."""
  height = pitch * len(items) + 8
  totals = [sum(p.value for p in parts) for _, parts in items]
  scale = (width - left - 84) / (max(totals, default=0.0) or 1.0)
  result = []
  for index, ((name, parts), total) in enumerate(zip(items, totals, strict=True)):
    y, x = pitch * index + 6, float(left)
    middle = y + (pitch - 10) / 2 + 4
    result.append(text(left - 8, middle, name, "end", "label"))
    for part in parts:
      title = f"{name}, {part.name}: {y_format(part.value)}"
      result.append(rect(x, y, part.value * scale, pitch - 10, part.color, title))
      x += part.value * scale
    result.append(text(x + 6, middle, y_format(total), "start", "value"))
  return _svg(width, height, label, result)
