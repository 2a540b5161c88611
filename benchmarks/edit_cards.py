"""Every edit card of the PTQ task, executed end to end on the initial program.

  python benchmarks/edit_cards.py

Admits, traces, gates and runs the first parameters of all cards on the small trained
Llama-family model, and writes results/edit_cards.json (status and observables of each,
beside the initial program's and the registered margins) and a table of it.
"""

import datetime
import json
import pathlib
import platform

import jax
import provenance

from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.task import Call
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import (
  edit_templates,
)
from mxjax.discovery.tasks.ptq import (
  margins as ptq_margins,
)
from mxjax.discovery.tasks.ptq import (
  task as ptq,
)
from mxjax.models.loading import embedded

RESULT = pathlib.Path(__file__).parent / "results" / "edit_cards.json"
SHOWN = ("log_ppl", "operator_error", "activation_error", "weight_error")


def measure(task, executor, source):
  program = admit(source, task.interface)
  traced = executor.trace(source)
  if not traced.computation:
    return {"status": traced.status, "detail": traced.detail}
  active = {h.name for h in task.interface.hooks if h.is_active(program.plan)}
  hooks = {k: v for k, v in traced.computation.items() if k in active}
  found = []
  executor.run([Call(hooks, program.plan, {})], lambda *done: found.append(done))
  _, outcome, seconds = found[0]
  values = {name: round(outcome.values[name], 6) for name in SHOWN if outcome.values}
  return {
    "status": outcome.status,
    "detail": outcome.detail,
    "seconds": round(seconds, 1),
    **values,
  }


def table(result):
  """One line a card."""
  lines = [
    [
      f"`{label}`",
      row.get("kind", "-"),
      str(row["status"]),
      *(f"{row[name]:.6f}" if name in row else "-" for name in SHOWN),
    ]
    for label, row in result["cards"].items()
  ]
  margins = [f"{result['margins'][name]:.6f}" for name in SHOWN]
  lines.append(["margin of a change", "", "", *margins])
  head = ["edit", "kind", "status", *(name.replace("_", " ") for name in SHOWN)]
  return provenance.markdown(head, lines)


def main():
  options = ptq_margins.calibrated(
    {
      "model": str(embedded.trained_folder("llama")),
      "calibration": [8, 64],
      "windows": [16, 128],
    }
  )
  task = ptq.PtqTask(**{k: v for k, v in options.items() if k != "task"})
  executor, source = LocalExecutor(task), task.interface.default_source()
  rows = {"(initial program)": measure(task, executor, source)}
  for card in edit_templates.EDIT_TEMPLATES:
    params = dict(card.params[0])
    row = measure(task, executor, card.edit(source, params))
    kind = "useful" if card in edit_templates.USEFUL else "decoy"
    rows[card.label(params)] = {"kind": kind, **row}
    print(card.label(params), row, flush=True)
  result = {
    "command": "python benchmarks/edit_cards.py",
    "date": datetime.date.today().isoformat(),
    "machine": platform.machine(),
    "python": platform.python_version(),
    "jax": jax.__version__,
    "calibration": [8, 64],
    "windows": [16, 128],
    "ideal_log_ppl": round(task.ideal(), 6),
    "margins": {name: task.margins[name] for name in SHOWN},
    "cards": rows,
  }
  RESULT.write_text(json.dumps(result, indent=1) + "\n")
  RESULT.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
  main()
