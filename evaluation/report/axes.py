"""Plot area, scales and ticks of a chart, and the SVG elements drawn on it."""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence

Format = Callable[[float], str]


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
  """Returns round numbers within `[low, high]`."""
  if high <= low:
    return [low]
  raw = (high - low) / count
  unit = 10.0 ** math.floor(math.log10(raw))
  step = next(f * unit for f in (1, 2, 5, 10) if f * unit >= raw * 0.999)
  first = math.ceil(low / step - 1e-9)
  return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Returns powers of ten in `[low, high]`, with 2 and 5 between if there are few."""
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

  def holds(self, value: float) -> bool:
    """Tells whether a value can be drawn on the vertical axis."""
    return math.isfinite(value) and (not self.log or value > 0)


def text(
  x: float, y: float, content: str, anchor: str = "middle", kind: str = ""
) -> str:
  """Returns an SVG text element, escaped."""
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
    f"{html.escape(content)}</text>"
  )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
  """Returns an SVG line."""
  return (
    f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
  )


def rect(x: float, y: float, w: float, h: float, color: int, title: str) -> str:
  """Returns an SVG bar that shows its title on hover."""
  return (
    f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0):.1f}" height="{max(h, 0):.1f}" '
    f'class="c{color}"><title>{html.escape(title)}</title></rect>'
  )


def axes(frame: Frame, x_label: str, y_format: Format) -> list[str]:
  """Draws horizontal grid lines with their values, the base line and its label."""
  ticks = log_ticks(*frame.y) if frame.log else linear_ticks(*frame.y)
  edge = frame.width - frame.right
  parts = []
  for tick in ticks:
    y = frame.py(tick)
    parts.append(line(frame.left, y, edge, y, "tick"))
    parts.append(text(frame.left - 6, y + 4, y_format(tick), "end"))
  base = frame.height - frame.bottom
  parts.append(line(frame.left, base, edge, base, "axis"))
  middle = (frame.left + edge) / 2
  return [*parts, text(middle, frame.height - 4, x_label, kind="label")]


def x_ticks(frame: Frame) -> list[str]:
  """Draws integers under the horizontal axis."""
  ticks = {round(t) for t in linear_ticks(*frame.x, 6)}
  y = frame.height - frame.bottom + 14
  return [text(frame.px(t), y, str(t)) for t in sorted(ticks)]


def value_range(
  values: Sequence[float], *, log: bool, zero: bool
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
