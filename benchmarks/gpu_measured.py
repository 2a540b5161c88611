"""Tables of what an H200 did, beside what was predicted; reads `results/gpu`.

  python benchmarks/gpu_measured.py

A file is what one call of `gpu.py` wrote; its name begins with the card and the number
of the run. Runs differ in clocks and in code, so a ratio is of one run only.
"""

import json
import pathlib

import gpu_models

HERE = pathlib.Path(__file__).resolve().parent / "results"
SHOWN = 0.1
"""Milliseconds of a kernel in a forward from which it has a row."""


def read(name):
  """Results by section of one file."""
  return json.loads((HERE / "gpu" / f"h200_{name}.json").read_text())["results"]


def table(titles, rows):
  lines = [titles, ["---"] * len(titles), *rows]
  return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def span(ends):
  return f"{ends[0]:.3g} to {ends[1]:.3g}"


def goals():
  """Goals of `gpu.py`, runs from the first to the last."""
  predicted = json.loads((HERE / "gpu_predictions.json").read_text())["goals"]
  copies = [read("3_memory")["ceilings"]["copy_GBps"]]
  first, last = read("1_kernels")["memory-bound kernels"], read("3_memory")
  share = lambda kernels, copy: [
    kernels[f"encode {dtype}"]["GBps"] / copy for dtype in ("float32", "bfloat16")
  ]
  encode = "encode, share of copy bandwidth"
  prefill, eight = (
    "HiRes forward, times BF16",
    ("HiRes forward, float8 products, times BF16"),
  )
  decode = "HiRes decode, times BF16 tokens a second"
  build = "8B build, minutes"
  one, two, three, four = (read(f"{run}_models") for run in (1, 2, 3, 4))
  ratio = lambda models, kind: (
    models[f"prefill {kind}"]["ms"] / three["prefill BF16"]["ms"]
  )
  values = {
    encode: (
      min(share(first, read("2_kernels")["ceilings"]["copy_GBps"])),
      min(share(last["memory-bound kernels"], copies[0])),
    ),
    prefill: (
      one["prefill HiRes"]["/ BF16"],
      three["prefill HiRes"]["/ BF16"],
    ),
    eight: (
      one["prefill HiRes, float8 products"]["/ BF16"],
      ratio(read("3_float8"), "HiRes, float8 products"),
    ),
    decode: (two["decode HiRes"]["/ BF16"], four["decode HiRes"]["/ BF16"]),
    build: (None, read("4_build")["build 8B"]["model_minutes"]),
  }
  bounds = {encode: "0.80", prefill: "1.10", eight: "1.00", decode: "2.5", build: "5.0"}
  show = lambda value: "stopped" if value is None else f"{value:.3f}"
  return table(
    ["goal", "bound", "predicted", "before tuning", "after"],
    [
      [name, bounds[name], span(predicted[name]), *map(show, values[name])]
      for name in bounds
    ],
  )


def forwards():
  """Whole models, in milliseconds."""
  predicted = json.loads((HERE / "gpu_predictions.json").read_text())["predicted"]
  torch = read("3_models")["torch's baselines"]["times"]
  rows = []
  for name, files in (
    ("prefill BF16", ("1_models", "3_models")),
    ("prefill HiRes", ("1_models", "3_models")),
    ("prefill HiRes, float8 products", ("1_models", "3_float8")),
    ("decode BF16", ("2_models", "4_models")),
    ("decode HiRes", ("2_models", "4_models")),
    ("decode HiRes, int8 head", (None, "4_models")),
  ):
    times = [f"{read(f)[name]['ms']:.2f}" if f else "" for f in files]
    ends = span(predicted[name]["ms"]) if name in predicted else ""
    rows.append([name, ends, *times])
  for kind in ("prefill", "decode"):
    [entry] = (e for n, e in torch.items() if n.startswith(kind))
    rows.append([f"{kind} BF16 by torch", "", "", f"{entry['ms']:.2f}"])
  return table(
    ["forward of Qwen3-8B's shapes, ms", "predicted", "before", "after"], rows
  )


def kernels():
  """Where the time of a forward goes: milliseconds, and launches."""
  last, decoding = read("3_models"), read("4_models")
  kinds = {
    "prefill BF16": last["prefill BF16"],
    "prefill HiRes": last["prefill HiRes"],
    "token BF16": decoding["decode BF16"],
    "token HiRes": decoding["decode HiRes"],
  }
  sums = {}
  for kind, result in kinds.items():
    for name, (ms, _) in result["device"]["kernels"].items():
      of = group(name)
      sums.setdefault(of, {}).setdefault(kind, 0.0)
      sums[of][kind] += ms
  rows = [
    [of, *(f"{parts[kind]:.2f}" if kind in parts else "" for kind in kinds)]
    for of, parts in sorted(sums.items(), key=lambda item: -max(item[1].values()))
    if max(parts.values()) >= SHOWN
  ]
  return table(["kernels, ms", *kinds], rows)


def group(name):
  """What a kernel of the profile is."""
  for part, meaning in (
    ("nvjet", "products of the library and of XLA"),
    ("gemm_fusion", "products of the library and of XLA"),
    ("input_reduce", "products of one row by XLA"),
    ("one_code", "map, encode and refinement"),
    ("mxfp4_decode", "weights decoded"),
    ("mxfp4_matmul", "packed products"),
    ("mxfp4_int8_matmul", "packed products"),
    ("attention", "attention"),
  ):
    if part in name:
      return meaning
  return "norms, rotary positions, sums and the rest"


def builds():
  """Minutes of a build of 36 layers, from two: the first in a process, and the next."""
  titles, rows = ["build of Qwen3-8B's shapes, minutes", "first", "programs kept"], {}
  for name in ("4_build", "4_build_again"):
    entry = read(name)["build 8B"]
    layers = gpu_models.QWEN3_8B.layers
    parts = {
      f"{stage}, of all layers": seconds * layers / 2
      for stage, seconds in entry["stage_seconds"].items()
      if stage != "preparation"
    }
    saves = layers / entry["layers_between_saves"]
    parts["hidden states written"] = entry["writing_seconds"] * saves
    parts["compilation"] = entry["first_run_seconds"] - entry["seconds"]
    for part, seconds in parts.items():
      rows.setdefault(part, []).append(f"{seconds / 60:.2f}")
    rows.setdefault("sum", []).append(f"{entry['model_minutes']:.2f}")
  order = [*(part for part in rows if part != "sum"), "sum"]
  return table(titles, [[part, *rows[part]] for part in order])


def mosaic():
  """Triton's forms and Mosaic's, in milliseconds; the runs are not the same."""
  of_run = read("4_tiles")["Mosaic forms"]["times"]
  products = read("1_kernels")["packed products"]
  refined = read("2_kernels")["tiles of refinement"]["times"]
  # Two sections time the refinement as the library has it since: three stages.
  pairs = {
    f"one code, {name}": (refined[f"{name}, stages 3"], of_run[f"{name}, Mosaic"])
    for name in ("1 linear, values", "3 linears, values", "gated product, values")
  }
  for rows in (64, 256, 2048):
    pairs[f"packed product, {rows} rows"] = (
      products[f"{rows} rows, pallas"],
      of_run[f"{rows} rows, packed product, Mosaic"],
    )
  for rows in (256, 2048):
    pairs[f"float8 product, {rows} rows"] = (
      products[f"{rows} rows, float8"],
      of_run[f"{rows} rows, float8 product, Mosaic"],
    )
  return table(
    ["kernel, ms", "Triton", "Mosaic"],
    [[name, *(f"{each['ms']:.3f}" for each in pair)] for name, pair in pairs.items()],
  )


def main():
  text = "\n".join((goals(), forwards(), kernels(), builds(), mosaic()))
  (HERE / "gpu_measured.md").write_text(text)
  print(text)


if __name__ == "__main__":
  main()
