"""Tables of what an H200 did, beside what was predicted; reads `results/gpu`.

  python benchmarks/gpu_measured.py

A file is what one call of `gpu.py` wrote; its name begins with the card and the number
of the run. Runs differ in clocks and in code, so a ratio is of one run only.
"""

import json
import pathlib

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
  one, two, three = (read(f"{run}_models") for run in (1, 2, 3))
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
    decode: (two["decode HiRes"]["/ BF16"], None),
  }
  bounds = {encode: "0.80", prefill: "1.10", eight: "1.00", decode: "2.5"}
  show = lambda value: "not timed" if value is None else f"{value:.3f}"
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
    ("decode BF16", ("2_models", None)),
    ("decode HiRes", ("2_models", None)),
  ):
    times = [f"{read(f)[name]['ms']:.2f}" if f else "" for f in files]
    rows.append([name, span(predicted[name]["ms"]), *times])
  for kind in ("prefill", "decode"):
    [entry] = (e for n, e in torch.items() if n.startswith(kind))
    rows.append([f"{kind} BF16 by torch", "", "", f"{entry['ms']:.2f}"])
  return table(
    ["forward of Qwen3-8B's shapes, ms", "predicted", "before", "after"], rows
  )


def kernels():
  """Where the time of a forward goes: milliseconds, and launches."""
  last, decoding = read("3_models"), read("2_models")
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
    ("attention", "attention"),
  ):
    if part in name:
      return meaning
  return "norms, rotary positions, sums and the rest"


def main():
  text = "\n".join((goals(), forwards(), kernels()))
  (HERE / "gpu_measured.md").write_text(text)
  print(text)


if __name__ == "__main__":
  main()
