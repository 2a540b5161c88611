"""What 32B, 70B and 405B take: memory, bytes moved, time.

  python benchmarks/scale_plan.py

Memory is what a run on a mesh holds at once, by the rule of thumb of `mxjax plan`.
Operations are counted: products of the model passes, raw Hessians, GPTQ, its factors.
Rates are those of the HiRes row of benchmarks/results/reference_protocol.json,
operations of SmolLM2-135M-Instruct by the seconds of its stages; nothing is measured
here.
"""

import json
import math

import common

from mxjax.audit import plan
from mxjax.models import ModelConfig

SOURCE, ROW = common.RESULTS / "reference_protocol.json", "hires full"
SEQUENCES, LENGTH = 128, 2048
MESHES = {
  "32B (Qwen3)": ((1, 1), (8, 1)),
  "70B (Llama 3)": ((1, 1), (8, 1), (1, 8)),
  "405B (Llama 3.1)": ((8, 1), (1, 8), (8, 8)),
}


def config(vocabulary, width, ffn, layers, heads, kv_heads, head_dim=128, tied=False):
  return ModelConfig(
    vocab_size=vocabulary,
    hidden_size=width,
    intermediate_size=ffn,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    norm_eps=1e-6,
    tie_embeddings=tied,
    rope_theta=1e6,
    max_positions=131072,
    dtype="bfloat16",
  )


SMOLLM2 = config(49152, 576, 1536, 30, 9, 3, 64, tied=True)
MODELS = {
  "32B (Qwen3)": config(151936, 5120, 25600, 64, 64, 8),
  "70B (Llama 3)": config(128256, 8192, 28672, 80, 64, 8),
  "405B (Llama 3.1)": config(128256, 16384, 53248, 126, 128, 8),
}


def input_widths(config):
  """Of what q, k and v read, o, gate and up, down."""
  queries = config.num_heads * config.head_dim
  return config.hidden_size, queries, config.hidden_size, config.intermediate_size


def operations(config, tokens):
  """Operations of the whole run: model passes, raw Hessians, GPTQ and its factors."""
  d, queries, _, ffn = input_widths(config)
  values = config.num_kv_heads * config.head_dim
  linears = [(queries, d), (values, d), (values, d), (d, queries)]
  linears += [(ffn, d), (ffn, d), (d, ffn)]
  layers, widths = config.num_layers, input_widths(config)
  return {
    "model passes": plan.plan(config, sequences=1, length=tokens).forward_flops,
    "Hessians": layers * sum(2 * tokens * width**2 for width in widths),
    # Each group of columns against the errors of all rows.
    "GPTQ": layers * sum(2 * rows * width**2 for rows, width in linears),
    # A Cholesky factor and its inverse for each input, on the lead alone.
    "factors": layers * sum(4 * width**3 // 3 for width in widths),
  }


def moved(config, data, model):
  """Bytes that one device receives from others, and what goes to disk, in all."""
  devices, layers = data * model, config.num_layers
  passes = SEQUENCES // devices * (1 + plan.RECOVERY_FITS)
  planned = plan.plan(config, sequences=SEQUENCES, length=LENGTH)
  weights = 2 * planned.target_weights * (model - 1) // model
  squares = sum(width**2 for width in input_widths(config))
  hessians = 4 * squares * (devices - 1) // devices
  streams = (1 + plan.RECOVERY_FITS) * SEQUENCES * LENGTH * config.hidden_size * 2
  return {
    "weights gathered": passes * weights,
    "Hessian shares": layers * (SEQUENCES // devices) * hessians,
    "streams written": (layers - 1) * streams,
    "layers written": planned.disk["run folder"],
  }


def measured_rates():
  """Operations a second of the two kinds of work, from the HiRes row."""
  row = json.loads(SOURCE.read_text())["rows"][ROW]
  seconds = row["stage_seconds"]
  counted = operations(SMOLLM2, math.prod(row["calibration"]["shape"]))
  passes = sum(seconds[s] for s in seconds if s != "quantization")
  solving = counted["Hessians"] + counted["GPTQ"]
  return {
    "source": f"{SOURCE.name}, row {ROW!r}",
    "machine": row["machine"],
    "model_passes_per_second": counted["model passes"] / passes,
    "quantization_per_second": solving / seconds["quantization"],
  }


def row(name, data, model, rates):
  """What a model takes on a mesh."""
  config = MODELS[name]
  shape = {"sequences": SEQUENCES, "length": LENGTH, "data": data, "model": model}
  planned = plan.plan(config, **shape)
  counted = operations(config, SEQUENCES * LENGTH)
  solving = counted["Hessians"] + counted["GPTQ"]
  seconds = counted["model passes"] / rates["model_passes_per_second"]
  seconds += solving / rates["quantization_per_second"]
  return {
    "model": name,
    "mesh": {"data": data, "model": model},
    "parameters": planned.parameters,
    "bf16": planned.bf16,
    "packed": planned.packed_total,
    "first_device_bytes": planned.memory | {"all": sum(planned.memory.values())},
    "operations": counted,
    "bytes_moved": moved(config, data, model),
    "hours_at_measured_rates_one_machine": seconds / 3600,
  }


def main():
  options = common.parser(__doc__).parse_args()
  rates = measured_rates()
  rows = [row(name, *mesh, rates) for name in MESHES for mesh in MESHES[name]]
  shape = [SEQUENCES, LENGTH]
  result = {**common.stamp(), "calibration": shape, "rates": rates, "rows": rows}
  common.write(options.out, result)
  for one in rows:
    memory = {k: f"{v / 1e9:.1f}" for k, v in one["first_device_bytes"].items()}
    hours = one["hours_at_measured_rates_one_machine"]
    print(one["model"], one["mesh"], memory, f"{hours:.0f} h")


if __name__ == "__main__":
  main()
