"""Plain charts as inline SVG text: lines, grouped bars, stacked columns and rows.

Colors are CSS classes `c0` to `c7`, so the page decides them for light and dark. Every
mark carries a `<title>`, which browsers show on hover and read aloud.
"""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mxjax.evaluation.report.numbers import number, share

Format = Callable[[float], str]


class Series(NamedTuple):
  """A line or a cloud of dots.

  Attributes:
    name: Shown on hover.
    points: (x, y); points that are not finite are left out.
    color: Palette index.
    band: (x, low, high) drawn behind the line, possibly empty.
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


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
  """Round numbers that cover at most `[low, high]`."""
  if high <= low:
    return [low]
  raw = (high - low) / count
  unit = 10.0 ** math.floor(math.log10(raw))
  step = next(f * unit for f in (1, 2, 5, 10) if f * unit >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Powers of ten in `[low, high]`, with 2 and 5 between when there are few."""
  decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  inside = lambda values: [v for v in values if low * 0.999 <= v <= high * 1.001]
  tens = inside(10.0**d for d in decades)
  if len(tens) > 2:
    return tens
  return inside(factor * 10.0**d for d in decades for factor in (1, 2, 5))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
  """The plot area of a chart and its two scales."""

  width: int
  height: int
  x: tuple[float, float]
  y: tuple[float, float]
  log: bool = False
  left: int = 52
  right: int = 12
  top: int = 12
  bottom: int = 38

  def px(self, value: float) -> float:
    """Horizontal pixel of a value."""
    low, high = self.x
    inner = self.width - self.left - self.right
    return self.left + inner * (value - low) / ((high - low) or 1)

  def py(self, value: float) -> float:
    """Vertical pixel of a value."""
    low, high = self.y
    if self.log:
      value, low, high = (math.log10(v) for v in (value, low, high))
    inner = self.height - self.top - self.bottom
    return self.height - self.bottom - inner * (value - low) / ((high - low) or 1)

  def holds(self, value: float) -> bool:
    """Whether a value has a place on the vertical axis."""
    return math.isfinite(value) and (not self.log or value > 0)


def text(
  x: float, y: float, content: str, anchor: str = "middle", kind: str = ""
) -> str:
  """An SVG text element, escaped."""
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


def _axes(frame: Frame, x_label: str, y_format: Format) -> list[str]:
  ticks = log_ticks(*frame.y) if frame.log else linear_ticks(*frame.y)
  edge = frame.width - frame.right
  parts = []
  for tick in ticks:
    y = frame.py(tick)
    parts.append(_line(frame.left, y, edge, y, "tick"))
    parts.append(text(frame.left - 6, y + 4, y_format(tick), "end"))
  base = frame.height - frame.bottom
  parts.append(_line(frame.left, base, edge, base, "axis"))
  middle = (frame.left + edge) / 2
  return [*parts, text(middle, frame.height - 4, x_label, kind="label")]


def _x_ticks(frame: Frame) -> list[str]:
  ticks = {round(t) for t in linear_ticks(*frame.x, 6)}
  y = frame.height - frame.bottom + 14
  return [text(frame.px(t), y, str(t)) for t in sorted(ticks)]


def value_range(
  values: Sequence[float], *, log: bool, zero: bool
) -> tuple[float, float]:
  """A vertical range that holds the values with a little air."""
  held = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
  if not held:
    return (1e-3, 1.0) if log else (0.0, 1.0)
  low, high = min(held), max(held)
  if log:
    return low / 1.3, high * 1.3
  if zero:
    low, high = min(low, 0.0), max(high, 0.0)
  air = 0.06 * ((high - low) or abs(high) or 1.0)
  return low if zero and low == 0 else low - air, high + air


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
  """Lines (or dots) over a shared axis.

  Args:
    series: What is drawn, in order.
    label: What a screen reader says.
    x_label: Under the horizontal axis, whose values are integers.
    width: Pixels.
    height: Pixels.
    log: Logarithmic vertical axis; values that are not positive are left out.
    zero: Whether the vertical axis must hold zero.
    dots: Dots alone, no lines.
    y_range: Vertical range; from the values when None.
    y_format: How vertical values are written.
    reference: A dashed horizontal line and its name, possibly empty.

  Returns:
    An `<svg>` element.
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
  parts = [*_axes(frame, x_label, y_format), *_x_ticks(frame)]
  for item in series:
    parts += _drawn(item, frame, dots, x_label, y_format)
  if reference:
    y = frame.py(reference[0])
    parts.append(_line(frame.left, y, width - frame.right, y, "reference"))
    parts.append(text(width - frame.right, y - 4, reference[1], "end", "label"))
  return _svg(width, height, label, parts)


def _drawn(
  series: Series, frame: Frame, dots: bool, x_label: str, y_format: Format
) -> list[str]:
  held = [(x, y) for x, y in series.points if frame.holds(y)]
  spots = [(frame.px(x), frame.py(y)) for x, y in held]
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
  for (px, py), (x, y) in zip(spots, held, strict=True):
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
  """Vertical bars side by side in named groups, with whiskers of one spread."""
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
  result = _axes(frame, "", y_format)
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
  # A negative value has a label and no bar: the axis begins at zero.
  top, base, middle = frame.py(max(value, 0.0)), frame.py(0), (left + right) / 2
  written = y_format(part.value)
  title = f"{part.name}: {written}"
  result, above = [], top
  if part.spread:
    title += f" ± {y_format(part.spread)}"
    above, below = (frame.py(value + sign * part.spread) for sign in (1, -1))
    result.append(_line(middle, above, middle, below, "whisker"))
  bar = _rect(left, top, right - left, base - top, part.color, title)
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
  """Stacked vertical columns; labels are thinned to what fits."""
  totals = [sum(p.value for p in parts) for _, parts in items]
  frame = Frame(
    width=width,
    height=height,
    x=(0, max(len(items), 1)),
    y=(0.0, max(totals, default=0.0) or 1.0),
  )
  result = _axes(frame, x_label, y_format)
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
      result.append(_rect(x, y, 0.88 * step, frame.py(low) - y, part.color, title))
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
  """Stacked horizontal bars, their total written at the end."""
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
      result.append(_rect(x, y, part.value * scale, pitch - 10, part.color, title))
      x += part.value * scale
    result.append(text(x + 6, middle, y_format(total), "start", "value"))
  return _svg(width, height, label, result)
