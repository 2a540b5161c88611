"""The reference protocol on SmolLM2-135M: fixed token ids in, one result file out.

  python benchmarks/reference_protocol.py --data ../shared/data [--replicates 3]

Operator error is measured on the first test window, perplexity on all windows asked
for. A build with recovery gives a row before it and one after each fit, because
recovery leaves codes alone.
The result file is rewritten after every row, and rows already in it are kept.
"""

import argparse
import dataclasses
import json
import pathlib
import time

import numpy as np
import provenance

from mxjax import methods, models
from mxjax.audit import sizes
from mxjax.calibration.calibration import Calibration
from mxjax.devices import execution
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.methods.hires.hires import HiRes
from mxjax.numerics.shaping import input_maps
from mxjax.running import pipeline
from mxjax.running.run_record import peak_memory_bytes

HIRES = methods.HIRES


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedOneCode(HiRes):
  """Stage II on a block Hadamard in place of the fitted map."""

  def shape(self, weight, inputs):
    """See `Program.shape`."""
    del weight, inputs
    return input_maps.Hadamard()


BUILDS = {
  **methods.METHODS,
  "hires I + RTN weights, nearest": dataclasses.replace(
    HIRES, weights="rtn", rounding="nearest", recover=()
  ),
  "hires I + GPTQ, nearest": dataclasses.replace(HIRES, rounding="nearest", recover=()),
  "hires I + II, D = I": dataclasses.replace(HIRES, use_balance=False, recover=()),
  "hires I + II, K = 0": dataclasses.replace(HIRES, use_interaction=False, recover=()),
  "hires I + II, K = 0, D = I": dataclasses.replace(
    HIRES, use_interaction=False, use_balance=False, recover=()
  ),
  "hires I + II, layer-level J_b": dataclasses.replace(
    HIRES, balance_by="layer", recover=()
  ),
  "Hadamard-32 + GPTQ, one-code": RotatedOneCode(name="rotated-one-code", recover=()),
}

HOURS = ("batquant", "spinquant")

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


def variants(name, params):
  """Cumulative states that one build contains."""
  if name not in CUMULATIVE:
    return {name: params}
  attention = without(params, "mlp", "mlp_recovery")
  states = (without(attention, "self_attn", "value_recovery"), attention, params)
  return dict(zip(CUMULATIVE[name], states, strict=True))


def balance_steps(record):
  """Shares of full, half and identity over all blocks, or None."""
  steps = [
    step
    for layer in record.layers
    for linear in layer["linears"].values()
    for step in linear.get("balance_steps", [])
  ]
  return (
    {str(s): steps.count(s) / len(steps) for s in (1.0, 0.5, 0.0)} if steps else None
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--data", default="../shared/data")
  parser.add_argument(
    "--builds",
    nargs="+",
    default=[name for name in BUILDS if name not in HOURS],
    metavar="NAME",
    help="rows, or methods with options such as batquant:tokens=256; all but "
    f"{' and '.join(HOURS)} when omitted, which take hours on a CPU",
  )
  parser.add_argument("--sequences", type=int, default=8)
  parser.add_argument("--windows", type=int, default=8)
  parser.add_argument("--replicates", type=int, default=3)
  parser.add_argument(
    "--compiled",
    metavar="DIR",
    help="keep compiled programs here and use those of earlier runs; the row says so",
  )
  parser.add_argument("--out", default="benchmarks/results/reference_protocol.json")
  options = parser.parse_args()
  data = pathlib.Path(options.data)
  calib = np.load(data / "c4/smollm2_calib_16x2048.npy")[: options.sequences]
  tests = np.load(data / "wikitext2/smollm2_test_8x2048.npy")[: options.windows]
  out = pathlib.Path(options.out)
  result = json.loads(out.read_text()) if out.exists() else {"rows": {}}
  command = "python benchmarks/reference_protocol.py --data DIR"
  command += f" --sequences {options.sequences} --windows {options.windows}"
  command += f" --replicates {options.replicates}"
  execution.keep_freed_memory()
  if options.compiled:
    command += " --compiled DIR"
    execution.keep_compiled(options.compiled)
  command += " --builds"
  model, params = models.from_pretrained(None)
  for name in options.builds:
    made, start = provenance.stamp(), time.perf_counter()
    built = pipeline.quantize_with_record(
      params,
      Calibration(model, calib),
      BUILDS.get(name) or methods.get(name),
      check=False,
    )
    seconds = time.perf_counter() - start
    peak = peak_memory_bytes()
    error = operator_error(model, built.reference, built.params, tests[:1])
    print(f"{name}: built in {seconds:.0f} s, operator error {error:.6f}", flush=True)
    for row, quantized in variants(name, built.params).items():
      entry = {
        "command": f"{command} {name!r}",
        "machine": made["machine"],
        "versions": made["versions"],
        "date": made["date"],
        "operator_error": error,
        "build_seconds": seconds,
        "stage_seconds": built.record.clock.seconds,
        "peak_bytes": peak,
        "calibration": built.record.calibration,
        "balance_steps": balance_steps(built.record),
        "size": sizes.size_report(quantized),
      }
      if options.replicates:
        entry["perplexity"] = perplexity(
          model, quantized, tests, replicates=options.replicates
        ).to_dict()
        print(f"  {row}: {entry['perplexity']['values']}", flush=True)
      result["rows"][row] = entry
      out.parent.mkdir(parents=True, exist_ok=True)
      out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
  main()
