"""What 32B, 70B and 405B take: memory by stage, bytes moved, time.

The tables of docs/guides/devices.md.

  python benchmarks/scale_plan.py

Memory is that of `mxjax plan` on a mesh. Operations are counted: products of the model
passes, raw Hessians, GPTQ, its factors. Rates are those of the HiRes row of
benchmarks/results/reference_protocol.json, operations of SmolLM2-135M by the seconds of
its stages; nothing is measured here. Writes benchmarks/results/scale_plan.json.
"""

import datetime
import json
import math
import pathlib
import platform

from mxjax.audit import plan
from mxjax.models import ModelConfig

RESULTS = pathlib.Path(__file__).parent / "results"
SOURCE = RESULTS / "reference_protocol.json"
ROW = "hires full"
COMMON = {
  "norm_eps": 1e-6,
  "tie_embeddings": False,
  "rope_theta": 1e6,
  "max_positions": 131072,
  "dtype": "bfloat16",
}
SMOLLM2 = ModelConfig(
  vocab_size=49152,
  hidden_size=576,
  intermediate_size=1536,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  **COMMON | {"tie_embeddings": True},
)
MODELS = {
  "32B (Qwen3)": ModelConfig(
    vocab_size=151936,
    hidden_size=5120,
    intermediate_size=25600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    **COMMON,
  ),
  "70B (Llama 3)": ModelConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    **COMMON,
  ),
  "405B (Llama 3.1)": ModelConfig(
    vocab_size=128256,
    hidden_size=16384,
    intermediate_size=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    head_dim=128,
    **COMMON,
  ),
}
CASES = (
  ("32B (Qwen3)", (1, 1)),
  ("32B (Qwen3)", (8, 1)),
  ("70B (Llama 3)", (1, 1)),
  ("70B (Llama 3)", (8, 1)),
  ("70B (Llama 3)", (1, 8)),
  ("405B (Llama 3.1)", (8, 1)),
  ("405B (Llama 3.1)", (1, 8)),
  ("405B (Llama 3.1)", (8, 8)),
)


def operations(config, tokens):
  """Operations of the whole run: model passes, raw Hessians, GPTQ and its factors."""
  planned = plan.plan(config, sequences=1, length=tokens)
  d, ffn = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  values = config.num_kv_heads * config.head_dim
  taps = (d, queries, d, ffn)
  linears = [(queries, d), (values, d), (values, d), (d, queries)]
  linears += [(ffn, d), (ffn, d), (d, ffn)]
  return {
    "model passes": planned.forward_flops,
    "Hessians": config.num_layers * sum(2 * tokens * width**2 for width in taps),
    # Each group of columns against the errors of all rows.
    "GPTQ": config.num_layers * sum(2 * rows * width**2 for rows, width in linears),
    # A Cholesky factor and its inverse for each input, on the lead alone.
    "factors": config.num_layers * sum(4 * width**3 // 3 for width in taps),
  }


def moved(config, sequences, length, data, model):
  """Bytes that one device receives from others, and what goes to disk, in all."""
  devices, layers = data * model, config.num_layers
  passes = sequences // devices * (1 + plan.RECOVERY_FITS)
  planned = plan.plan(config, sequences=sequences, length=length)
  weights = 2 * planned.target_weights * (model - 1) // model
  d, ffn = config.hidden_size, config.intermediate_size
  widths = (d, config.num_heads * config.head_dim, d, ffn)
  hessians = 4 * sum(width**2 for width in widths) * (devices - 1) // devices
  streams = (1 + plan.RECOVERY_FITS) * sequences * length * d * 2
  return {
    "weights gathered": passes * weights,
    "Hessian shares": layers * (sequences // devices) * hessians,
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


def main():
  rates = measured_rates()
  sequences, length = 128, 2048
  rows = []
  for name, (data, model) in CASES:
    config = MODELS[name]
    planned = plan.plan(
      config, sequences=sequences, length=length, data=data, model=model
    )
    counted = operations(config, sequences * length)
    passes, solving = counted["model passes"], counted["Hessians"] + counted["GPTQ"]
    rows.append(
      {
        "model": name,
        "mesh": {"data": data, "model": model},
        "parameters": planned.parameters,
        "bf16": planned.bf16,
        "packed": planned.packed_total,
        "first_device_bytes": planned.memory,
        "operations": counted,
        "bytes_moved": moved(config, sequences, length, data, model),
        "hours_at_measured_rates_one_machine": (
          passes / rates["model_passes_per_second"]
          + solving / rates["quantization_per_second"]
        )
        / 3600,
      }
    )
  result = {
    "command": "python benchmarks/scale_plan.py",
    "date": datetime.date.today().isoformat(),
    "python": platform.python_version(),
    "calibration": [sequences, length],
    "rates": rates,
    "rows": rows,
  }
  path = RESULTS / "scale_plan.json"
  path.write_text(json.dumps(result, indent=1) + "\n")
  print(json.dumps(rates, indent=1))
  for row in rows:
    memory = {k: round(v / 1e9, 1) for k, v in row["first_device_bytes"].items()}
    bytes_moved = {k: round(v / 1e9) for k, v in row["bytes_moved"].items()}
    counted = {k: f"{v:.2e}" for k, v in row["operations"].items()}
    hours = row["hours_at_measured_rates_one_machine"]
    print(row["model"], row["mesh"], memory, bytes_moved, counted, f"{hours:.0f} h")


if __name__ == "__main__":
  main()
