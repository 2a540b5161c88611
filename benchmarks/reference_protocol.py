"""The reference protocol on SmolLM2-135M-Instruct: fixed ids in, one result file out.

  python benchmarks/reference_protocol.py [--builds NAME ...] [--replicates 3]

Operator error is measured on the first test window, perplexity on all windows asked
for. A build with recovery gives a row before it and one after each fit, because
recovery leaves codes alone. The result file is rewritten after every row, and rows
already in it are kept.
"""

import collections
import dataclasses
import time

import common

from mxjax import methods, models
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution, kept_programs
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers import sizes
from mxjax.methods.hires.hires import HiRes
from mxjax.methods.program import Shaping
from mxjax.numerics.shaping import input_maps
from mxjax.run.quantize import run
from mxjax.run.record import peak_memory_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedOneCode(HiRes):
  """Stage II on a block Hadamard in place of the fitted map."""

  def shape(self, weight, inputs):
    """See `Program.shape`."""
    del weight, inputs
    return Shaping(input_maps.Hadamard())


VARIANTS = {
  "hires I + RTN weights, nearest": {"weights": "rtn", "rounding": "nearest"},
  "hires I + GPTQ, nearest": {"rounding": "nearest"},
  "hires I + II, D = I": {"use_balance": False},
  "hires I + II, K = 0": {"use_interaction": False},
  "hires I + II, K = 0, D = I": {"use_interaction": False, "use_balance": False},
}
BUILDS = {
  **methods.METHODS,
  **{
    name: dataclasses.replace(methods.HIRES, recover=(), **changes)
    for name, changes in VARIANTS.items()
  },
  "Hadamard-32 + GPTQ, one-code": RotatedOneCode(name="rotated-one-code", recover=()),
}
HOURS = ("batquant", "spinquant")
"""What takes hours on a CPU, and is built if it is named."""
CUMULATIVE = {
  "hires": ("hires I + II", "hires I + II + attention", "hires full"),
  "wush+r": ("wush + one-code", "wush + one-code + attention", "wush+r"),
}


def without(params, block, name):
  """Params without one kind of recovery leaf."""
  return {
    key: layer
    if not key.startswith("layers_")
    else {**layer, block: {k: v for k, v in layer[block].items() if k != name}}
    for key, layer in params.items()
  }


def states(name, params):
  """Cumulative states that one build contains."""
  if name not in CUMULATIVE:
    return {name: params}
  attention = without(params, "mlp", "mlp_recovery")
  before = without(attention, "self_attn", "value_recovery")
  return dict(zip(CUMULATIVE[name], (before, attention, params), strict=True))


def balance_steps(record):
  """Shares of full, half and no step over all blocks, or None."""
  steps = collections.Counter(
    step
    for layer in record.layers
    for linear in layer["linears"].values()
    for step in linear.get("balance_steps", [])
  )
  total = steps.total()
  return {str(s): steps[s] / total for s in (1.0, 0.5, 0.0)} if total else None


def main():
  parser = common.parser(__doc__, data=True)
  told = f"rows, or methods with options; all but {' and '.join(HOURS)} if omitted"
  builds = [name for name in BUILDS if name not in HOURS]
  parser.add_argument("--builds", nargs="+", default=builds, metavar="NAME", help=told)
  parser.add_argument("--replicates", type=int, default=3)
  parser.add_argument("--compiled", metavar="DIR", help="of compiled programs to keep")
  options = parser.parse_args()
  calib, tests = (ids[:8] for ids in common.smollm2_ids(options.data))
  result = common.read(options.out, {"rows": {}})
  execution.keep_freed_memory()
  if options.compiled:
    kept_programs.keep_compiled(options.compiled)
  model, params = models.from_pretrained()
  for name in options.builds:
    made, start = common.stamp(), time.perf_counter()
    program = BUILDS.get(name) or methods.get(name)
    built = run(params, Calibration(model, calib), program, check=False)
    entry = {
      **made,
      "build_seconds": time.perf_counter() - start,
      "stage_seconds": built.record.clock.seconds,
      "peak_bytes": peak_memory_bytes(),
      "operator_error": operator_error(model, built.reference, built.params, tests[:1]),
      "calibration": built.record.calibration,
      "balance_steps": balance_steps(built.record),
    }
    for row, quantized in states(name, built.params).items():
      found = perplexity(model, quantized, tests, replicates=options.replicates)
      size = sizes.size_report(quantized)
      result["rows"][row] = entry | {"size": size, "perplexity": found.to_dict()}
      common.write(options.out, result)
      print(f"{row}: {entry['operator_error']:.6f}, {found.values}", flush=True)


if __name__ == "__main__":
  main()
