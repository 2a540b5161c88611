"""How the rounding of another instruction set grows within the first layer of a build.

  python benchmarks/machine_stages.py --data ../shared/data [--model llama]
    [--methods METHOD ...] [--layers 4]

Each method, a form of `hires-next`, is built twice without its tuning: with this
machine's instructions and with those of an older processor (`XLA with AVX` of
`machines.py`, which has the calibration and the windows as well). The table has for
each stage of a linear's build the difference of the two, relative and in the norm of
all values, and of weight codes the share that differ: the median over the linears of
the first layer, and the largest.
"""

import dataclasses
import pathlib
import statistics
import sys
from typing import ClassVar

import common
import hires_next
import jax.numpy as jnp
import machines
import numpy as np

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.methods.hires import stage1
from mxjax.methods.hires.next import HiResDescent
from mxjax.run.quantize import run

METHODS = (
  "hires-next",
  "hires-next:two_sided=false",
  "hires-next:two_sided=false:use_interaction=false:use_balance=false",
)
GRADIENTS, CODES, REFIT = "gradients of outputs", "weight codes", "refit of the map"
STAGES = {
  GRADIENTS: "as kept, bfloat16",
  "moment of inputs": "A",
  "moment of outputs": "B",
  "map": "P_ref, K and D",
  "folded weights": "of that map",
  CODES: "share",
  REFIT: "to the codes",
}
OTHER = "XLA with AVX"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(HiResDescent):
  """The same method, which keeps what each stage of a linear's build made, in order."""

  # One linear after another, and each once.
  compiles_together: ClassVar[bool] = False
  found: ClassVar[dict] = {stage: [] for stage in STAGES}

  def keep(self, stage, array):
    self.found[stage].append(np.asarray(array))

  def shape(self, weight, inputs):
    parts = [part.astype(jnp.float32) for part in inputs.gradients]
    self.keep(GRADIENTS, np.concatenate(parts))
    self.keep("moment of inputs", inputs.moment())
    moments = stage1.weight_moments(weight)
    self.keep("moment of outputs", stage1.output_moment(weight, inputs, moments))
    shaping = super().shape(weight, inputs)
    self.keep("map", shaping.input_map.matrix)
    return shaping

  def quantize_weight(self, weight, inputs, input_map):
    self.keep("folded weights", weight)
    realization = super().quantize_weight(weight, inputs, input_map)
    self.keep(CODES, realization.weight.codes)
    self.keep(REFIT, realization.correction)
    return realization


def build(options, method):
  """What the stages of the first layer's linears made, and KL of the whole model."""
  model, params, tokenizer = machines.loaded(options.model, options.layers)
  rows, windows = machines.texts(options.data, tokenizer)
  named = methods.get(method)
  fields = {f.name: getattr(named, f.name) for f in dataclasses.fields(named)}
  program = Recorded(**{**fields, "tune": None})
  built = run(params, Calibration(model, rows), program, check=False, probe=False)
  count = len(Recorded.found[CODES]) // model.num_layers
  found = {
    f"{stage} {place}": kept[place]
    for stage, kept in Recorded.found.items()
    for place in range(count)
  }
  kl = hires_next.measured(model, params, built.params, windows)["kl"]
  return {**found, "kl": np.asarray(kl)}


def built(options, method, changed):
  """The same of a process with other variables."""
  words = [sys.executable, __file__, "--data", str(options.data), "--methods", method]
  words += ["--model", options.model, "--layers", str(options.layers)]
  return machines.arrays_of(words, changed)


def compared(first, second):
  """By stage, the difference of every linear, and KL of both."""
  share = lambda first, second: float(np.not_equal(first, second).mean())
  differences = {}
  for stage in STAGES:
    measure = share if stage == CODES else machines.gap
    keys = [key for key in first if key.startswith(f"{stage} ")]
    differences[stage] = [measure(first[key], second[key]) for key in keys]
  kl = [float(one["kl"].mean()) for one in (first, second)]
  return {"differences": differences, "kl": kl}


def table(entries):
  """A row for each stage, a column for each method."""
  head = ["stage", *(f"`{entry['method']}`" for entry in entries)]
  lines = []
  for stage, meaning in STAGES.items():
    values = [entry["differences"][stage] for entry in entries]
    shown = "{:.1%} to {:.1%}" if stage == CODES else "{:.0e} to {:.0e}"
    cells = [shown.format(statistics.median(each), max(each)) for each in values]
    lines.append([f"{stage} ({meaning})", *cells])
  ends = [entry["kl"] for entry in entries]
  lines.append(["KL of both builds", *(f"{a:.4f}, {b:.4f}" for a, b in ends)])
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--model", default="llama")
  parser.add_argument("--methods", nargs="+", default=METHODS)
  parser.add_argument("--layers", type=int, default=4, help="of SmolLM2")
  parser.add_argument("--build", type=pathlib.Path, help="build here, into this file")
  options = parser.parse_args()
  if options.build:
    (method,) = options.methods
    np.savez(options.build, **build(options, method))
    return
  made, entries = common.stamp(), []
  for method in options.methods:
    pair = [built(options, method, each) for each in ({}, machines.REPETITIONS[OTHER])]
    entries.append({"method": method, **compared(*pair)})
    common.write(
      options.out, {**made, "model": options.model, "entries": entries}, table(entries)
    )


if __name__ == "__main__":
  main()
