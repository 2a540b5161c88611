"""Formats numbers for people."""

import math


def number(value: float) -> str:
  """Formats four significant digits; values that are not finite are named."""
  if not math.isfinite(value):
    return "∞" if value == math.inf else "not finite"
  if value == 0:
    return "0"
  if 1e-3 <= abs(value) < 1e5:
    return f"{value:.4g}"
  mantissa, exponent = f"{value:.2e}".split("e")
  return f"{float(mantissa):g}e{int(exponent)}"


def share(value: float) -> str:
  """Formats a share as a percentage."""
  return f"{100 * value:.3g}%"


def size(value: float) -> str:
  """Formats bytes in the largest fitting binary unit."""
  units = ("B", "KiB", "MiB", "GiB", "TiB")
  power = min(max(int(abs(value)).bit_length() - 1, 0) // 10, len(units) - 1)
  return f"{value / 1024**power:.4g} {units[power]}"


def about(value: float) -> str:
  """Formats estimated seconds with two digits."""
  return seconds(float(f"{value:.2g}"))


def seconds(value: float) -> str:
  """Formats seconds, or minutes and hours if long, milli- and microseconds if short."""
  # What rounds to 1,000 of a unit is one of the next.
  if 0 < value < 999.5e-6:
    return f"{1e6 * value:.3g} µs"
  if 0 < value < 0.1:
    return f"{1e3 * value:.3g} ms"
  if value < 120:
    return f"{value:.3g} s"
  return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"
