"""What `gpu.py` will measure, predicted from counts before any GPU has run it.

  python benchmarks/gpu_predictions.py

Reads `gpu_counts.json` and `gpu_programs.json` of `results` and writes ranges to
`gpu_predictions.json` there, by section and name; `gpu.py` puts each range beside its
measurement. The assumptions are below: shares of the peak rates of an H200 that kernels
of their kind reach elsewhere.
"""

import json
import pathlib

import gpu_models

HERE = pathlib.Path(__file__).resolve().parent
COPY = 0.78, 0.88
"""Of 4.8 TB/s: read and written by a copy, in TB/s 3.7 to 4.2."""
STREAM = 0.75, 0.92
"""Of a copy's rate: kernels that only stream."""
ISSUE = 0.60, 0.75
"""Of the rate at which a multiprocessor starts instructions."""
TENSOR, SQUARE = (0.60, 0.72), (0.68, 0.80)
"""Of 989 TFLOP/s in bfloat16: a layer's products, and one large square product."""
FLOAT8 = 0.55, 0.70
"""Of 1,979 TFLOP/s: products with exact sums."""
LAUNCH = 1.5e-6, 2.5e-6
"""Seconds by which a dependent launch in a graph delays the next."""
ATTENTION = 1.2, 2.0
"""Times that the kernel of whole sequences takes of cuDNN's, which runs at half of
TENSOR: what flash attention in Triton takes elsewhere. Its counts allow less."""
WIDE = 0.5, 0.8
"""Of 67 TFLOP/s: products in float32 without TF32, and in float64 on tensor cores."""
UNCOUNTED, COMPILATION = (20, 50), (60, 150)
"""Seconds of a build of 8B: eigenvalues, wide Cholesky factors, GPTQ, probes and work
of the host; and the compilation of its programs. Estimates, with nothing counted."""
SEQUENCES, LAYERS = 128, gpu_models.QWEN3_8B.layers
PEAK, PEAK8, PEAK_WIDE, MEMORY = 989e12, 1979e12, 67e12, 4.8e12
TOKENS, POSITIONS = 2048, 2048


def span(low, high, digits=3):
  """A range, smaller first, rounded to some leading digits."""
  return [float(f"{value:.{digits}g}") for value in sorted((low, high))]


def sums(*ranges):
  """The range of a sum."""
  return tuple(sum(ends) for ends in zip(*ranges, strict=True))


def times(count, each):
  """A range many times."""
  return tuple(count * end for end in each)


def inverse(amount, rates, peak):
  """Seconds for an amount at shares of a peak rate, shorter first."""
  return tuple(amount / (share * peak) for share in reversed(rates))


def share_of_copy(kernel):
  """Range of a kernel's rate, relative to a copy's: by memory, or by instructions."""
  # The counts compare with 4.3 TB/s, a copy here reaches COPY of the peak.
  bound = kernel["memory rate at most"] * 4.3e12 / MEMORY
  ends = zip(STREAM, ISSUE, reversed(COPY), strict=True)
  return span(*(min(stream, issue * bound / copy) for stream, issue, copy in ends))


def refinement(kernels, name, values):
  """Seconds in which a kernel refines so many values."""
  return inverse(values, ISSUE, kernels[name]["values a second at most"])


def product(rows, name, counts):
  """Seconds of a product with a weight `[12288, 4096]`, as `gpu_sections.products`.

  None for the kernel at numbers of rows for which nothing was counted.
  """
  m, d = 12288, 4096
  slower = lambda *ranges: tuple(map(max, *ranges))
  moved = lambda of_weight: inverse(
    of_weight * m * d + 2 * rows * (m + d), COPY, MEMORY
  )
  many = inverse(2 * rows * m * d, TENSOR, PEAK)
  plain = sums(slower(moved(2), many), LAUNCH)
  if name == "bf16 weight":
    return plain
  if name == "float8":
    narrow = inverse(2 * rows * m * d, FLOAT8, PEAK8)
    decode = inverse((17 / 32 + 1) * m * d, COPY, MEMORY)
    return sums(slower(moved(1), narrow), decode, times(2, LAUNCH))
  if name == "xla":
    return sums(plain, inverse((17 / 32 + 2) * m * d, COPY, MEMORY), LAUNCH)
  kernel = counts["kernels"].get(
    f"matmul bfloat16 x packed, {rows} row" + "s" * (rows > 1)
  )
  if kernel is None:
    return None
  # A program decodes the weights of its tile for its own 128 rows.
  values = m * d * -(-rows // 128)
  issued = inverse(values, ISSUE, kernel["values a second at most"])
  # Decoding hides behind the products before it, or not at all.
  hidden, beside = slower(issued, many), sums(issued, many)
  return sums(slower(moved(17 / 32), (hidden[0], beside[1])), LAUNCH)


def attention(shape):
  """Seconds of a layer's attention of 2,048 tokens, by what computes it."""
  fast = inverse(shape.attention_flop(TOKENS), times(0.5, TENSOR), PEAK)
  ours = tuple(a * b for a, b in zip(ATTENTION, fast, strict=True))
  return {"cudnn": fast, "pallas": ours}


def forward(shape, kind, counts):
  """Seconds of the logits of 2,048 tokens."""
  kernels, layers = counts["kernels"], shape.layers
  launches = counts["launches of a Qwen3-8B-shaped layer"][kind]["2048 tokens"]
  peak, shares = (PEAK8, FLOAT8) if "float8" in kind else (PEAK, TENSOR)
  parts = [
    times(layers, inverse(shape.linear_flop(TOKENS), shares, peak)),
    times(layers * launches, LAUNCH),
    inverse(2 * TOKENS * shape.hidden * shape.vocabulary, TENSOR, PEAK),
  ]
  of = attention(shape)
  parts.append(times(layers, of["cudnn" if "fastest" in kind else "pallas"]))
  if "BF16" not in kind:
    q = shape.heads * shape.head_dim
    alone = "one code, split, float8" if "float8" in kind else "one code, split, values"
    linears = "2 linears" if "float8" in kind else "3 linears"
    # q, k and v, and gate and up, refine the layer's inputs, o the attention's.
    for name, width in ((f"{alone}, {linears}", 5 * shape.hidden), (alone, q)):
      of_inputs = refinement(kernels, name, TOKENS * width)
      parts.append(times(layers, of_inputs))
    gated = "one code, split, values, of a gated product"
    of_down = refinement(kernels, gated, TOKENS * shape.intermediate)
    parts.append(times(layers, of_down))
    # Weights are decoded to bfloat16 or float8 before the library's product.
    width = 1 if "float8" in kind else 2
    moved = layers * shape.weights() * (17 / 32 + 2 * width)
    parts.append(inverse(moved, COPY, MEMORY))
  return sums(*parts)


def token(shape, kind, counts):
  """Seconds of a token beside a cache."""
  stored = "BF16" if kind == "BF16" else "HiRes"
  launches = counts["launches of a Qwen3-8B-shaped layer"][stored]["one token"]
  head = shape.hidden * shape.vocabulary * (1 if "int8" in kind else 2)
  cache = 2 * 2 * shape.kv_heads * shape.head_dim * POSITIONS
  weights = shape.weights() * (2 if kind == "BF16" else 17 / 32)
  parts = [inverse(shape.layers * (weights + cache) + head, COPY, MEMORY)]
  parts.append(times(shape.layers * launches, LAUNCH))
  if kind != "BF16":
    cycles = counts["refinements of a token"].values()
    each = sum(one["cycles at least"] for one in cycles)
    parts.append(times(shape.layers, inverse(each, ISSUE, 1.755e9)))
    tables = sum(d // 32 for _, d in shape.linears().values()) * (2 * 1024 + 528) * 4
    parts.append(inverse(shape.layers * tables, COPY, MEMORY))
  return sums(*parts)


def call(counted):
  """Seconds of a counted function: its products hide behind its memory, or do not."""
  parts = [inverse(counted["bytes"], COPY, MEMORY)]
  for name, amount in counted.items():
    if name.endswith("operations of products"):
      is_narrow = name.startswith("bf16")
      how = (TENSOR, PEAK) if is_narrow else (WIDE, PEAK_WIDE)
      parts.append(inverse(amount, *how))
  together = max(low for low, _ in parts), sum(high for _, high in parts)
  return sums(together, times(counted["launches"], LAUNCH))


def built_layer(functions):
  """Seconds of a layer of the 8B build."""
  calls = {"capture": 1, "attention recovery": 1, "mlp recovery": 1}
  # q, k and v share their inputs, and so do gate and up; down's are wider.
  for steps, linears in (
    (("Hessian", "moments"), 3),
    (("anchor", "errors", "trials", "half step"), 6),
  ):
    for step in steps:
      calls |= {f"{step}, width 4096": linears, f"{step}, width 12288": 1}
  of_sequences = [times(n * SEQUENCES, call(functions[f])) for f, n in calls.items()]
  # Full step, half step and identity, as if all linears were as large as gate.
  trials = times(3 * 7, call(functions["a trial"]))
  return sums(*of_sequences, trials, times(1 / LAYERS, UNCOUNTED))


def predictions(counts, functions):
  """Ranges by section and name."""
  kernels, shape = counts["kernels"], gpu_models.QWEN3_8B
  known = {
    "encode float32": "encode float32",
    "encode bfloat16": "encode bfloat16",
    "one code bfloat16, codes": "one code, split, codes",
    "one code bfloat16, values": "one code, split, values",
    "one code bfloat16, float8": "one code, split, float8",
    "decode bfloat16": "decode to bfloat16",
  }
  result = {
    "ceilings": {
      "copy_GBps": span(*times(MEMORY / 1e9, COPY)),
      "bf16_TFLOPs": span(*times(PEAK / 1e12, SQUARE)),
    },
    "memory-bound kernels": {
      "share_of_copy": {
        name: share_of_copy(kernels[kernel]) for name, kernel in known.items()
      }
    },
  }
  for kind in ("BF16, fastest attention", "BF16", *gpu_models.KINDS[:-1]):
    stored = kind.partition(", fastest")[0]
    seconds = forward(shape, kind, counts | _launches(counts, kind, stored))
    result[f"prefill {kind}"] = {"ms": span(*times(1e3, seconds))}
  result["packed products"] = {
    f"{rows} rows, {name}": {"ms": span(*times(1e3, seconds))}
    for rows in (1, 4, 16, 64, 256, 2048)
    for name in ("bf16 weight", "pallas", "xla", "float8")
    if (rows >= 256 or name != "float8") and (seconds := product(rows, name, counts))
  }
  result["attention of a prefill"] = {
    f"{name}, ms": span(*times(1e3, each)) for name, each in attention(shape).items()
  }
  large = forward(gpu_models.QWEN3_32B, "HiRes", counts)
  result["prefill 32B"] = {"ms": span(*times(1e3, large))}
  result["build 8B"] = {
    "seconds": span(*times(2, built_layer(functions))),
    "compilation_seconds": list(COMPILATION),
  }
  for kind in ("BF16", "HiRes", "HiRes, int8 head"):
    result[f"decode {kind}"] = {"ms": span(*times(1e3, token(shape, kind, counts)))}
  return result


def goals(predicted, functions):
  """Ranges of what `gpu.py` compares with goals.

  Both sides of a ratio depend on the same shares of peaks, so their ends go together.
  """
  ms = lambda name: predicted[name]["ms"]
  over = lambda a, b: span(*(x / y for x, y in zip(ms(a), ms(b), strict=True)))
  baseline, float8 = "prefill BF16, fastest attention", "HiRes, float8 products"
  minutes = times(1 / 60, sums(times(LAYERS, built_layer(functions)), COMPILATION))
  encode = predicted["memory-bound kernels"]["share_of_copy"]
  return {
    "encode, share of copy bandwidth": encode["encode float32"],
    "HiRes forward, times BF16": over("prefill HiRes", baseline),
    "HiRes forward, float8 products, times BF16": over(f"prefill {float8}", baseline),
    "HiRes decode, times BF16 tokens a second": over("decode BF16", "decode HiRes"),
    "8B build, minutes": span(*minutes),
  }


def _launches(counts, kind, stored):
  name = "launches of a Qwen3-8B-shaped layer"
  return {name: {**counts[name], kind: counts[name][stored]}}


def main():
  """Writes and prints the result."""
  counts = json.loads((HERE / "results" / "gpu_counts.json").read_text())
  programs = json.loads((HERE / "results" / "gpu_programs.json").read_text())
  functions = programs["functions"]
  predicted = predictions(counts, functions)
  document = {
    "command": "python benchmarks/gpu_predictions.py",
    "from": {
      "gpu_counts.json": counts["date"],
      "gpu_programs.json": programs["date"],
      "versions": counts["versions"],
    },
    "for": "one NVIDIA H200; nothing was run",
    "goals": goals(predicted, functions),
    "predicted": predicted,
  }
  text = json.dumps(document, indent=1)
  (HERE / "results" / "gpu_predictions.json").write_text(text + "\n")
  print(text)


if __name__ == "__main__":
  main()
