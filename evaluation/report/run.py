"""Report section about one run, from its record's dict."""

import collections
import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any

from mxjax.evaluation.report import figures, linears, numbers, svg
from mxjax.evaluation.report.html import grid, section, table
from mxjax.evaluation.report.recovery import recovery
from mxjax.evaluation.report.svg import Part


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
      f"than {usual}.</p><details open><summary>Which</summary>"
      f"{table(('linear', 'damping used'), raised)}</details>"
    )
  return f'<div class="card narrow">{content}</div>'


def cost(clock: Mapping[str, Any]) -> str:
  """Shows wall time and peak memory by stage."""
  bars = lambda title, key: [
    (stage, [Part(title, value, 0)]) for stage, value in clock.get(key, {}).items()
  ]
  time, memory = "Time by stage", "Peak memory"
  return grid(
    (
      figures.stacks(
        svg.rows,
        time,
        bars(time, "seconds"),
        "Wall clock, compilation included.",
        y_format=numbers.seconds,
      ),
      figures.stacks(
        svg.rows,
        memory,
        bars(memory, "peak_bytes"),
        "Largest resident memory of the process when the stage last ended.",
        y_format=numbers.size,
      ),
    )
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


def provenance(record: Mapping[str, Any]) -> str:
  """Shows what another result must share to be comparable with this one."""
  calibration = record["calibration"]
  shape = " × ".join(str(n) for n in calibration.get("shape", ()))
  values = {
    "contract": record["contract_hash"],
    "calibration": calibration.get("fingerprint", "unknown"),
    "calibration tokens": shape or "unknown",
    "program": json.dumps(record["program"], ensure_ascii=False),
  }
  cells = (
    (name, f'<td class="long mono">{escape(str(value))}</td>')
    for name, value in values.items()
  )
  return f'<div class="card facts">{table(("what", "value"), cells)}</div>'


def run_section(run: Mapping[str, Any], anchor: str) -> str:
  """Renders one of the runs of `write_report` as a `<section>` element."""
  record = run["record"]
  layers = record["layers"]
  parts = (
    section(
      "Error by layer",
      "Relative squared output error of each linear on calibration tokens, after "
      "each stage.",
      linears.errors(layers) + linears.numbers_table(layers) if layers else "",
    ),
    section(
      "Shaping and code choice",
      "What was decided for each block.",
      linears.shaping(layers),
    ),
    section(
      "Scales and saturation",
      "How the blocks use the format.",
      linears.ranges(layers),
    ),
    section(
      "Recovery", "Structural corrections fitted after quantization.", recovery(layers)
    ),
    section(
      "Damping",
      "Added to each Hessian's diagonal, relative to its mean, to factor it.",
      damping(record),
    ),
    section(
      "Time and memory", "What the run cost on its machine.", cost(record["clock"])
    ),
    section(
      "Sanity gate",
      "Logits against the float model right after quantization.",
      sanity(record.get("sanity")),
    ),
    section(
      "Provenance", "Results compare only under equal fingerprints.", provenance(record)
    ),
  )
  name = escape(str(run["method"]))
  return f'<section class="run" id="{anchor}"><h2>{name}</h2>{"".join(parts)}</section>'
