"""What one map and one rule for all linears on the same inputs cost in quality.

  python benchmarks/shared_maps.py --data ../shared/data [--models llama smollm2]
    [--methods hires:recover=none wush] [--draws 1 2 3]

The queries, keys and values of a layer read one tensor, and so do the gate and the up
projection. With a map and tables of their own for each of them, the tensor is mapped
and refined five times instead of twice, and the tables take five places instead of
two. Here a method treats the linears on one tensor as a single linear with all their
rows: its map, its GPTQ and its rule of the inputs then come from W'W summed over them.

`attention` shares for queries, keys and values only, `mlp` for gate and up, and `both`
for both. Calibration, texts and KL are those of `hires_next.py`, which has the same
draws. The operator error is the mean over all linears of the relative error of the
outputs. The result file is rewritten after every row; rows already in it are kept.
"""

import dataclasses
import json

import common
import hires_next
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution
from mxjax.methods.program import LinearResult
from mxjax.numerics import mxfp4
from mxjax.run.quantize import run

SMALL = ("llama", "qwen3", "mistral", "olmo2")
METHODS = ("hires:recover=none", "wush")
TEXTS = ("WikiText-2", "C4")
SHARED = {
  "none": (),
  "attention": ("q_proj", "k_proj", "v_proj"),
  "mlp": ("gate_proj", "up_proj"),
  "both": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
}


def sharing(program, names):
  """A program like `program` that quantizes the named linears on one tensor as one."""

  class Sharing(type(program)):
    def shape_group(self, weights, inputs):
      members = {name: weights[name] for name in weights if name in names}
      if len(members) < 2:
        return {}
      rows = [mxfp4.from_blocks(weight) for weight in members.values()]
      leaf = super().quantize_linear(jnp.concatenate(rows), inputs).leaf
      ends = np.cumsum([len(part) for part in rows])
      parts = {}
      for name, end, part in zip(members, ends, rows, strict=True):
        own = slice(int(end) - len(part), int(end))
        weight = mxfp4.MXTensor(leaf.weight.codes[own], leaf.weight.scales[own])
        parts[name] = dataclasses.replace(leaf, weight=weight)
      return parts

    def quantize_linear(self, weight, inputs):
      if inputs.name in inputs.group:
        return LinearResult(inputs.group[inputs.name])
      return super().quantize_linear(weight, inputs)

  fields = dataclasses.fields(program)
  return Sharing(**{field.name: getattr(program, field.name) for field in fields})


def row(model, params, program, calibration, tests):
  """KL by text and window, and the mean operator error."""
  built = run(params, Calibration(model, calibration), program, check=False)
  errors = [
    linear["error_final"]
    for layer in built.record.layers
    for linear in layer["linears"].values()
  ]
  kl = {
    name: hires_next.measured(model, params, built.params, windows)["kl"]
    for name, windows in tests.items()
  }
  return {"operator_error": float(np.mean(errors)), "kl": kl}


def table(rows):
  """Means over draws, and the change from maps of each linear's own."""
  head = ["model", "method", "shared", "draws", "operator error", "WikiText-2 KL"]
  head.append("C4 KL")
  found = {}
  for each in rows:
    key = each["model"], each["method"], each["shared"]
    found.setdefault(key, {})[each["draw"]] = each
  lines = []
  for (model, method, shared), own in found.items():
    base = found.get((model, method, "none"), {})
    draws = sorted(own.keys() & base.keys())
    values = lambda made, draws=draws: np.mean(
      [
        [made[d]["operator_error"], *map(np.mean, made[d]["kl"].values())]
        for d in draws
      ],
      axis=0,
    )
    if not draws:
      continue
    change = values(own) / values(base) - 1
    told = zip(values(own), change, (".5f", ".4f", ".4f"), strict=True)
    cells = [
      f"{value:{digits}}" + (f" ({part:+.1%})" if shared != "none" else "")
      for value, part, digits in told
    ]
    lines.append([model, method, shared, f"{len(draws)}", *cells])
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--models", nargs="+", default=list(SMALL))
  parser.add_argument("--methods", nargs="+", default=list(METHODS))
  parser.add_argument("--shared", nargs="+", default=list(SHARED), choices=SHARED)
  parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3])
  options = parser.parse_args()
  made = common.stamp()
  execution.keep_freed_memory()
  rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
  known = {(r["model"], r["method"], r["draw"], r["shared"]) for r in rows}
  for name in options.models:
    path = None if name == "smollm2" else f"models/trained/{name}"
    model, params = models.from_pretrained(path)
    texts = hires_next.texts(options.data, hires_next.GERMAN, path)
    tests = {text: texts.test[text] for text in TEXTS}
    for method in options.methods:
      for draw in options.draws:
        for shared in options.shared:
          key = {"model": name, "method": method, "draw": draw, "shared": shared}
          if tuple(key.values()) in known:
            continue
          program = sharing(methods.get(method), SHARED[shared])
          found = row(model, params, program, texts.draws[draw], tests)
          rows.append({**key, **found, "date": made["date"]})
          text = json.dumps({**made, "rows": rows}, indent=1)
          options.out.write_text(text + "\n")
          options.out.with_suffix(".md").write_text(table(rows))
          print(table([r for r in rows if r["model"] == name]), flush=True)


if __name__ == "__main__":
  main()
