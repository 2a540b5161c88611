"""Report section about one run, from its record's dict."""

import collections
import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

from mxjax.evaluation.report import layers, numbers, svg
from mxjax.evaluation.report.html import (
  folded,
  grid,
  lines,
  section,
  stacks,
  table,
)
from mxjax.evaluation.report.svg import Part, Series


def damping(record: Mapping[str, Any]) -> str:
  """Shows the damping of each Hessian and flags values other than the default."""
  used = {
    f"{layer['name']}/{path}": linear["damping"]
    for layer in record["layers"]
    for path, linear in layer["linears"].items()
    if "damping" in linear
  }
  if not used:
    return ""
  default = record["program"].get("options", {}).get("damping", min(used.values()))
  usual = numbers.number(default)
  flag = '<td class="flag">{} (not the default)</td>'.format
  counts = collections.Counter(map(numbers.number, used.values()))
  content = table(
    ("relative damping", "linears"),
    [(v if v == usual else flag(v), str(count)) for v, count in counts.items()],
  )
  raised = [
    (escape(name), numbers.number(value))
    for name, value in used.items()
    if not math.isclose(value, default, rel_tol=1e-4)
  ]
  if raised:
    content += (
      f'<p class="flag">{len(raised)} of {len(used)} linears needed another damping '
      f"than {usual}.</p>"
      + folded("Which", table(("linear", "damping used"), raised), is_open=True)
    )
  return f'<div class="card narrow">{content}</div>'


def cost(clock: Mapping[str, Any]) -> str:
  """Shows wall time and peak memory by stage."""
  stages = (
    (
      "Time by stage",
      "seconds",
      numbers.seconds,
      "Wall clock, compilation included.",
    ),
    (
      "Peak memory",
      "peak_bytes",
      numbers.size,
      "Largest resident memory of the process when the stage last ended.",
    ),
  )
  return grid(
    stacks(
      svg.rows,
      title,
      [(stage, [Part(title, n, 0)]) for stage, n in clock.get(key, {}).items()],
      note,
      y_format=form,
    )
    for title, key, form, note in stages
  )


def sanity(values: Mapping[str, Any] | None) -> str:
  """Shows the numbers of the sanity gate, or that it was not run."""
  if not values:
    return '<p class="flag">The sanity gate was not run.</p>'
  tiles = {
    "float loss, nats a token": numbers.number(values["float_loss"]),
    "quantized loss, nats a token": numbers.number(values["quantized_loss"]),
    "KL divergence, nats": numbers.number(values["divergence"]),
    f"same top token, of {values['tokens']:,}": numbers.share(values["agreement"]),
  }
  cards = (
    f'<div class="card tile"><b>{value}</b><span>{name}</span></div>'
    for name, value in tiles.items()
  )
  return f'<div class="tiles">{"".join(cards)}</div>'


def tuning(record: Mapping[str, Any] | None) -> str:
  """Charts the divergence over the steps of scale distillation, and what moved."""
  if not record:
    return ""
  losses, moved = record["divergence"], record["change_by_layer"]
  # One pass over the tokens, so that easy and hard chunks average out.
  window = len(set(record["order"]))
  means = [
    (float(end), sum(losses[end - window : end]) / window)
    for end in range(window, len(losses) + 1)
  ]
  steps = [(float(step), loss) for step, loss in enumerate(losses, 1)]
  return grid(
    (
      lines(
        "Divergence from the float model, nats a token",
        [Series("step", steps, 0), Series(f"mean of {window}", means, 1)],
        f"{len(losses)} steps; each is one chunk of the calibration tokens.",
        x_label="step",
        zero=True,
      ),
      lines(
        "Change of the factors by layer",
        [Series("root mean square", list(enumerate(map(float, moved))), 0)],
        f"{record['parameters']:,} factors, all 1 before.",
        y_format=numbers.share,
        zero=True,
      ),
    )
  )


def _words(value: Any) -> str:
  """Writes JSON of an arithmetic on one line, such as `attention bfloat16`."""
  if isinstance(value, Mapping):
    return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
  return value if isinstance(value, str) else " and ".join(value)


def provenance(run: Mapping[str, Any]) -> str:
  """Shows what another result must share to be comparable, and what made this one."""
  record, made_by = run["record"], run.get("made_by") or {}
  arithmetic = run.get("arithmetic") or {}
  calibration = record["calibration"]
  shape = " × ".join(str(n) for n in calibration.get("shape", ()))
  is_strict = record.get("form", "W4A4") == "W4A4"
  outside = () if is_strict else (f"{record['form']}, outside the paper's contract",)
  values = {
    "contract": ", ".join((record["contract_hash"], *outside)),
    "calibration": calibration.get("fingerprint", "unknown"),
    "calibration tokens": shape or "unknown",
    "program": json.dumps(record["program"], ensure_ascii=False),
    "arithmetic": "; ".join(
      f"{name.replace('_', ' ')}: {_words(one)}" for name, one in arithmetic.items()
    )
    or "unknown",
    **{key: made_by[key] for key in ("date", "command", "device") if key in made_by},
  }
  if versions := made_by.get("versions"):
    values["versions"] = ", ".join(f"{name} {v}" for name, v in versions.items())
  cells = (
    (name, f'<td class="long mono">{escape(str(value))}</td>')
    for name, value in values.items()
  )
  return f'<div class="card facts">{table(("what", "value"), cells)}</div>'


def run_section(run: Mapping[str, Any], anchor: str, *, is_open: bool = False) -> str:
  """Renders one of the runs of `write_report`, folded under its name."""
  record = run["record"]
  found = record["layers"]
  by_layer = layers.errors(found) + layers.numbers_table(found) if found else ""
  parts = {
    "Error by layer": (
      "Relative squared output error of each linear on calibration tokens, after "
      "each stage.",
      by_layer,
    ),
    "Shaping and code choice": (
      "What was decided for each block.",
      layers.shaping(found),
    ),
    "Scales and saturation": ("How the blocks use the format.", layers.ranges(found)),
    "Recovery": (
      "Structural corrections fitted after quantization.",
      layers.recovery(found),
    ),
    "Scale distillation": (
      "Input scales learned from the float model's predictions.",
      tuning(record.get("tuning")),
    ),
    "Damping": (
      "Added to each Hessian's diagonal, relative to its mean, to factor it.",
      damping(record),
    ),
    "Time and memory": ("What the run cost on its machine.", cost(record["clock"])),
    "Sanity gate": (
      "Logits against the float model right after quantization.",
      sanity(record.get("sanity")),
    ),
    "Provenance": (
      "Results compare only under equal fingerprints.",
      provenance(run),
    ),
  }
  body = "".join(section(title, *part) for title, part in parts.items())
  linears = (run.get("size") or {}).get("quantized_linears", {})
  bits = linears.get("bits_per_weight")
  title = str(run["method"]) + (f", {bits:.3g} bits a weight" if bits else "")
  # A link to what is inside opens the fold.
  inside = f'<div id="{anchor}">{body}</div>'
  return f'<section class="run">{folded(title, inside, is_open=is_open)}</section>'
