"""Where builds of one checkpoint part on machines with other instructions.

  python benchmarks/machines.py --data ../shared/data [--models llama SmolLM2 ...]
    [--methods hires hires-next] [--layers 4] [--stages]

A build is repeated in a process of its own that uses other instructions than this
machine would choose: XLA's programs those of an older processor (`--xla_cpu_max_isa`),
or the linear algebra (OpenBLAS, which chooses its code by the processor, too) that of
another one (`OPENBLAS_CORETYPE`), or one core instead of all. The first repetition
changes nothing. Calibration is 8 rows of 512 tokens of C4 and KL is measured on 8
windows of WikiText-2, as in `replicate_noise.py`; of SmolLM2-135M-Instruct the first
`--layers` are taken.

The result tells, stage after stage, how far each repetition is from the first build:
the relative difference of the float model's hidden states, then layer by layer that of
the maps and the share of 4-bit weight codes that differ, the divergence that scale
distillation starts from, if the method has it, and KL from the float model at the end.

With `--stages` it tells how the difference grows within the first layer: for each stage
of a linear's build the median and the largest relative difference over the layer's
linears. The methods are then forms of `hires-next`, built without their tuning.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

import common
import hires_next
import jax
import jax.numpy as jnp
import numpy as np
import replicate_noise

from mxjax import methods, models
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.run.quantize import run

REPETITIONS = {
  "unchanged": {},
  "XLA with AVX": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"},
  "XLA with SSE4.2": {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
  "LAPACK of Sandy Bridge": {"OPENBLAS_CORETYPE": "Sandybridge"},
  "one core": {},
}
SMOLLM2 = "SmolLM2"


def loaded(name, layers):
  """The model, its params and its tokenizer; of SmolLM2 the first layers."""
  source = None if name == SMOLLM2 else f"models/trained/{name}"
  model, params = models.from_pretrained(source)
  if name == SMOLLM2:
    config = dataclasses.replace(model.config, num_layers=layers)
    dropped = {model.layer_name(index) for index in range(layers, model.num_layers)}
    model = type(model)(config)
    params = {key: value for key, value in params.items() if key not in dropped}
  return model, params, models.load_tokenizer(source)


def texts(data, tokenizer):
  """Rows of C4 to calibrate on and windows of WikiText-2 to measure on."""
  read = replicate_noise.rows_of
  rows = read(tokenizer, common.c4_text(data), 0, replicate_noise.CALIBRATION_ROWS)
  wikitext = (data / common.WIKITEXT).read_text()
  return rows, read(tokenizer, wikitext, 0, replicate_noise.WINDOWS)


def build(data, name, method, layers):
  """What a build leaves, stage by stage, as named arrays."""
  model, params, tokenizer = loaded(name, layers)
  rows, windows = texts(data, tokenizer)
  found = {
    "hidden": np.stack(
      streams.final_hiddens(model, params, [jnp.asarray(row[None]) for row in rows])
    )
  }
  built = run(
    params, Calibration(model, rows), methods.get(method), check=False, probe=False
  )
  for index in range(model.num_layers):
    layer = built.params[model.layer_name(index)]
    linears = jax.tree.leaves_with_path(
      layer, is_leaf=lambda leaf: isinstance(leaf, QuantizedLinear)
    )
    for path, linear in linears:
      if isinstance(linear, QuantizedLinear):
        key = f"{index} {jax.tree_util.keystr(path)}"
        found[f"codes {key}"] = linear.weight.codes
        if linear.input_map is not None:
          found[f"maps {key}"] = linear.input_map.block_matrices()
  if built.record.tuning:
    found["divergence"] = built.record.tuning["divergence"]
  found["kl"] = hires_next.measured(model, params, built.params, windows)["kl"]
  return {key: np.asarray(value) for key, value in found.items()}


def repeated(options, name, method, changed, is_single):
  """The same of a process with other variables, on one core or on all."""
  words = [sys.executable, __file__, "--data", str(options.data), "--layers"]
  words += [str(options.layers), "--models", name, "--methods", method]
  return arrays_of(["taskset", "--cpu-list", "0"] * is_single + words, changed)


def arrays_of(words, changed):
  """What a command writes into the file that it is told by `--build`, by name."""
  # Programs that another instruction set compiled would be read again.
  inherited = {k: v for k, v in os.environ.items() if k != common.KEPT_PROGRAMS}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "built.npz")
    command = [*words, "--build", str(file)]
    subprocess.run(command, check=True, env={**inherited, **changed})
    with np.load(file) as arrays:
      return dict(arrays)


def gap(first, second):
  """The relative difference of arrays, in the norm of all their values."""
  wide = [np.asarray(array, np.float64) for array in (first, second)]
  return float(np.linalg.norm(wide[1] - wide[0]) / np.linalg.norm(wide[0]))


def differing(first, second):
  """The share of 4-bit codes, two a byte, that differ."""
  other = first ^ second
  return float(((other & 15) > 0).mean() + ((other >> 4) > 0).mean()) / 2


def compared(first, second):
  """How far a repetition is from the first build, stage by stage."""
  numbers = sorted({int(key.split()[1]) for key in first if key.startswith("codes")})
  of = lambda kind, number: [k for k in first if k.startswith(f"{kind} {number} ")]
  mean = lambda kind, measure, number: float(
    np.mean([measure(first[key], second[key]) for key in of(kind, number)] or 0)
  )
  start = "divergence"
  return {
    "is_equal": all(np.array_equal(first[key], second[key]) for key in first),
    "hidden": gap(first["hidden"], second["hidden"]),
    "maps": [mean("maps", gap, number) for number in numbers],
    "codes": [mean("codes", differing, number) for number in numbers],
    "divergence": float(second[start].flat[0]) if start in second else None,
    "kl": float(second["kl"].mean()),
  }


def table(entries):
  """A line for each model, method and repetition."""
  head = [
    "model",
    "method",
    "repetition",
    "float hidden states, relative difference",
    "maps, relative difference by layer",
    "% of weight codes that differ by layer",
    "first divergence of tuning",
    "KL",
  ]
  lines = []
  for entry in entries:
    values = (f"{entry['hidden']:.1g}", entry["maps"], entry["codes"])
    shown = [
      values[0],
      " / ".join(f"{value:.1g}" for value in values[1]),
      " / ".join(f"{100 * value:.2g}" for value in values[2]),
    ]
    started = entry["divergence"]
    lines.append(
      [
        *(entry[key] for key in ("model", "method", "repetition")),
        *(["bit for bit equal", "", ""] if entry["is_equal"] else shown),
        "" if started is None else f"{started:.5f}",
        f"{entry['kl']:.5f}",
      ]
    )
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--models", nargs="+", default=[*replicate_noise.MODELS, SMOLLM2])
  parser.add_argument("--methods", nargs="+", default=["hires", "hires-next"])
  parser.add_argument("--layers", type=int, default=4, help="of SmolLM2")
  parser.add_argument("--build", type=pathlib.Path, help="build here, into this file")
  options = parser.parse_args()
  if options.build:
    (name,), (method,) = options.models, options.methods
    np.savez(options.build, **build(options.data, name, method, options.layers))
    return
  made, entries = common.stamp(), []
  for name in options.models:
    for method in options.methods:
      first = repeated(options, name, method, {}, is_single=False)
      for repetition, changed in REPETITIONS.items():
        is_single = repetition == "one core"
        second = repeated(options, name, method, changed, is_single=is_single)
        entry = {"model": name, "method": method, "repetition": repetition}
        entries.append({**entry, **compared(first, second)})
        common.write(options.out, {**made, "entries": entries}, table(entries))


if __name__ == "__main__":
  main()
