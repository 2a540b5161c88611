"""Every edit card of the PTQ task, executed end to end on the initial program.

  python benchmarks/edit_cards.py

Admits, traces, gates and runs the first parameters of all cards on the small trained
Llama-family model: status and observables of each, beside the initial program's and the
registered margins.
"""

import common

from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.task import Call
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import edit_templates, margins, task
from mxjax.models.loading import embedded

SHAPES = {"calibration": [8, 64], "windows": [16, 128]}
SHOWN = ("log_ppl", "operator_error", "activation_error", "weight_error")


def measure(ptq, executor, source):
  program = admit(source, ptq.interface)
  traced = executor.trace(source)
  if not traced.computation:
    return {"status": traced.status, "detail": traced.detail}
  active = {h.name for h in ptq.interface.hooks if h.is_active(program.plan)}
  hooks = {k: v for k, v in traced.computation.items() if k in active}
  found = []
  executor.run([Call(hooks, program.plan, {})], lambda *done: found.append(done))
  _, outcome, seconds = found[0]
  values = {name: round(outcome.values[name], 6) for name in SHOWN if outcome.values}
  told = {"status": outcome.status, "detail": outcome.detail}
  return {**told, "seconds": round(seconds, 1), **values}


def table(result):
  """One line a card."""
  lines = [
    [f"`{label}`", row.get("kind", "-"), str(row["status"])]
    + [f"{row[name]:.6f}" if name in row else "-" for name in SHOWN]
    for label, row in result["cards"].items()
  ]
  known = [f"{result['margins'][name]:.6f}" for name in SHOWN]
  lines.append(["margin of a change", "", "", *known])
  head = ["edit", "kind", "status", *(name.replace("_", " ") for name in SHOWN)]
  return common.markdown(head, lines)


def main():
  options = common.parser(__doc__).parse_args()
  model = {"model": str(embedded.trained_folder("llama"))}
  found = margins.calibrated(model | SHAPES)
  ptq = task.PtqTask(**{k: v for k, v in found.items() if k != "task"})
  executor, source = LocalExecutor(ptq), ptq.interface.default_source()
  rows = {"(initial program)": measure(ptq, executor, source)}
  for card in edit_templates.EDIT_TEMPLATES:
    params = dict(card.params[0])
    kind = "useful" if card in edit_templates.USEFUL else "decoy"
    row = measure(ptq, executor, card.edit(source, params))
    rows[card.label(params)] = {"kind": kind, **row}
    print(card.label(params), row, flush=True)
  result = {
    **common.stamp(),
    **SHAPES,
    "ideal_log_ppl": round(ptq.ideal(), 6),
    "margins": {name: ptq.margins[name] for name in SHOWN},
    "cards": rows,
  }
  common.write(options.out, result, table(result))


if __name__ == "__main__":
  main()
