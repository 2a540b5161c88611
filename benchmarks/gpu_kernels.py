"""How long does one operation take, beside the library that others use for it?

Through public functions: `encode` and `decode` against a copy; a quantized linear with
its A4 rule, `[12288, 4096]` in HiRes form and with several codes, at 1 to 2,048 rows
against torch's BF16 product; and a layer's causal attention against torch's. Times are
the device's: many calls form one program, because a kernel of microseconds is shorter
than its start from Python, and operands rotate through more memory than the
second-level cache holds, because a model's weights do not stay there either.

  python benchmarks/gpu_kernels.py            # at most 2.5 minutes on an H100
  python benchmarks/gpu_kernels.py --tiny     # rehearses on a CPU
  python benchmarks/gpu_kernels.py --candidate "float8 stream-K" --out FILE

With `--candidate` a product that is no default is checked first and then timed beside
what `choice.py` takes, as the linears of a layer call them and alone, and beside a BF16
product that torch compiled. The last lines say which rows of the table should change.
At most nine minutes; each time is written as it is measured.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.util
import statistics
import sys
import time

import common

LIMITS = {"torch": 40, "ours": 110}
"""Sides, and the seconds after which each is stopped."""
CANDIDATE_LIMITS = {"torch compiled": 100, "candidate": 430}
"""The same of a candidate."""
FASTER = 0.98
"""Share of the time of what is there from which a candidate should replace it."""
ROTATED = 4 * 50 * 2**20
"""Bytes that operands rotate through: four times the second-level cache of an H100."""
MOST_SETS, MOST_CALLS = 32, 16
"""Sets of operands in a program, and calls in flight: JAX waits behind 32."""
HOST_BOUND = 0.9
"""Share of a call's time from which its start on the host decides it."""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Shapes of the operations."""

  encode: tuple = (16384, 8192)
  linear: tuple = (12288, 4096)
  rows: tuple = (1, 4, 16, 64, 128, 256, 512, 2048)
  attention: tuple = (2048, 32, 8, 128)
  batches: int = 5
  layers: tuple = (
    ("gate", (12288,), 4096, (8, 16, 32, 64, 5, 256)),
    ("q, k, v", (4096, 1024, 1024), 4096, (8, 32, 64, 256)),
    ("o", (4096,), 4096, (8, 32, 64, 256)),
    ("down", (4096,), 12288, (8, 32, 64, 256)),
    ("gate, up", (12288, 12288), 4096, (8, 32, 64, 256, 511)),
  )
  """Linears of one input that a candidate multiplies: outputs, width, and rows."""


TINY = Sizes(
  (32, 64), (96, 64), (1, 20), (40, 4, 2, 16), 1, (("gate", (128,), 512, (5,)),)
)


def rows_for(tried, of_rows):
  """Rows at which a candidate is timed: those of a layer that it takes, and few."""
  most = tried.most or max(of_rows)
  return [n for n in sorted({1, 2, 4, *of_rows}) if tried.rows <= n <= most]


def measure(calls, sizes, results):
  """Times calls by name, of functions and arguments; compiled side by side."""
  import jax
  import jax.numpy as jnp

  def rotating(function, arguments):
    """A program of a call for each of several copies of its arguments; how many."""
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arguments))
    count = min(max(-(-ROTATED // nbytes), 2), MOST_SETS) if sizes.batches > 1 else 2
    # Operands of their own, or XLA would run one call for all.
    sets = [jax.tree.map(jnp.copy, arguments) for _ in range(count)]
    # Its kernels are lowered once.
    one = jax.jit(lambda *each: function(*each))
    return jax.jit(lambda sets: [one(*each) for each in sets]), sets

  def once(run, sets):
    """Median seconds of a program, and the share of it until the host had begun it."""
    start = time.perf_counter()
    jax.block_until_ready(run(sets))
    taken = time.perf_counter() - start
    count = min(max(1, int(0.02 / taken)), MOST_CALLS) if sizes.batches > 1 else 1
    times, begun = [], []
    for _ in range(sizes.batches):
      start = time.perf_counter()
      for _ in range(count):
        made = run(sets)
      called = time.perf_counter()
      jax.block_until_ready(made)
      times.append((time.perf_counter() - start) / count)
      begun.append((called - start) / count / times[-1])
      del made
    return statistics.median(times), statistics.median(begun)

  programs = {name: rotating(*call) for name, call in calls.items()}
  # One kernel is interpreted at a time.
  workers = 8 if sizes.batches > 1 else 1
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    list(pool.map(lambda p: jax.block_until_ready(p[0](p[1])), programs.values()))
  for name, (run, sets) in programs.items():
    rounds = [once(run, sets) for _ in range(2)]
    runs = [1e3 * seconds / len(sets) for seconds, _ in rounds]
    entry = {"ms": statistics.mean(runs), "runs_ms": runs}
    entry["host_bound"] = max(share for _, share in rounds) >= HOST_BOUND
    operands = (*calls[name][1], jax.eval_shape(calls[name][0], *calls[name][1]))
    moved = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(operands))
    results.put(name, entry | {"GBps": moved / entry["ms"] / 1e6})


def ours(sizes, results):
  """Times the operations of this library."""
  import gpu_models
  import jax
  import jax.numpy as jnp

  import mxjax
  from mxjax.layers.inference_packing import pack_for_inference
  from mxjax.layers.linear import linear
  from mxjax.models import functional
  from mxjax.numerics.realization.activation_quantizers import FewCodes

  results.put("device", jax.devices()[0].device_kind)

  wide = jax.random.normal(jax.random.key(0), sizes.encode, jnp.float32)
  narrow = wide.astype(jnp.bfloat16)
  calls = {
    # Negation reads and writes everything once and cannot be optimized away.
    "copy": (lambda x: -x, (narrow,)),
    "encode float32": (mxjax.encode, (wide,)),
    "encode bfloat16": (mxjax.encode, (narrow,)),
    "decode to bfloat16": (
      functools.partial(mxjax.decode, dtype=jnp.bfloat16),
      (mxjax.encode(narrow),),
    ),
  }
  measure(calls, sizes, results)
  del wide, narrow, calls
  key = jax.random.key(1)
  dense, one = (
    gpu_models.random_linear(key, *sizes.linear, quantized)
    for quantized in (False, True)
  )
  few = dataclasses.replace(one, rounding=FewCodes(one.rounding.gram, 4, True))
  weights = {"BF16": dense}
  for name, leaf in (("HiRes", one), ("four codes", few)):
    packed = pack_for_inference({"layer": leaf}, tables=False)["layer"]
    weights[name] = packed
  for rows in sizes.rows:
    x = jax.random.normal(key, (1, rows, sizes.linear[1]), jnp.bfloat16)
    calls = {
      f"linear, {rows} rows, {name}": (linear, (x, w)) for name, w in weights.items()
    }
    measure(calls, sizes, results)
  tokens, heads, kv_heads, width = sizes.attention
  draw = lambda n: jax.random.normal(key, (1, tokens, n, width), jnp.bfloat16)
  operands = draw(heads), draw(kv_heads), draw(kv_heads)
  calls = {f"attention of {tokens} tokens": (functional.causal_attention, operands)}
  measure(calls, sizes, results)


def candidate(name, sizes, results):
  """Checks a product that is no default, then times it beside what the table takes."""
  import gpu_models
  import gpu_mosaic
  import jax
  import jax.numpy as jnp
  import numpy as np

  from mxjax.layers.inference_packing import with_products
  from mxjax.layers.linear import linear, linear_many, linear_onto
  from mxjax.pallas_kernels import choice
  from mxjax.pallas_kernels.products import float8_matmul, matmul
  from mxjax.pallas_kernels.refinement.a4_operands import a4_operands

  results.put("device", jax.devices()[0].device_kind)
  [tried] = [each for each in choice.CANDIDATES if each.name == name]
  is_gpu = jax.default_backend() == "gpu"
  how = "pallas" if is_gpu else "interpret"
  checks = gpu_mosaic.CANDIDATES[name](np.random.default_rng(0), how)
  results.put("checks", checks)
  if not checks["passed"]:
    sys.exit("the candidate is wrong: no time was taken")

  def by(side):
    """What a side's functions run in while they are traced."""
    return contextlib.nullcontext() if side == "table" else choice.trying(tried)

  def linears(side):
    def run(x, leaves):
      with by(side):
        return linear_many(x, leaves, implementation=None if is_gpu else how)

    return run

  def added(side):
    """A linear and the addition to what came before it, as of a residual."""

    def run(x, leaves):
      with by("table" if side is None else side):
        [leaf] = leaves
        onto = jnp.ones((len(x), leaf.shape[0]), x.dtype)
        return linear_onto(onto, x, leaf, implementation=None if is_gpu else how)

    return run

  def product(side, x, leaves):
    """The product alone, and its operands."""
    with by(side):
      [form] = {
        choice.product(len(x), *leaf.shape, has_float8=True).inputs for leaf in leaves
      }
    operators = [(leaf.input_map, leaf.rounding) for leaf in leaves]
    operands = jax.jit(lambda x: a4_operands(x, operators, form, how))(x)
    tensors, scales = [leaf.weight for leaf in leaves], [w.float8_scale for w in leaves]

    def run(operands, tensors, scales):
      options = {"dtype": jnp.bfloat16, "implementation": how}
      with by(side):
        if form.startswith("float8"):
          return float8_matmul.float8_matmul_each(operands, tensors, scales, **options)
        return matmul.matmul_each(operands, tensors, **options)

    return run, (operands, tensors, scales)

  for layer, outputs, width, of_rows in sizes.layers:
    keys = jax.random.split(jax.random.key(1), len(outputs) + 1)
    drawn = [
      gpu_models.random_linear(k, m, width, True)
      for k, m in zip(keys[1:], outputs, strict=True)
    ]
    leaves = list(with_products(dict(enumerate(drawn)), "float8").values())
    dense = gpu_models.random_linear(keys[0], sum(outputs), width, False)
    if tried.adds and len(outputs) > 1:
      continue  # Only what is added to a residual is to be gained.
    for rows in rows_for(tried, of_rows):
      x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
      calls = {f"{layer}, {rows} rows, our BF16": (linear, (x, dense))}
      for side in ("table", name):
        given = x, leaves
        if tried.adds:
          calls[f"{layer}, {rows} rows, our BF16"] = added(None), (x, [dense])
          calls[f"{layer}, {rows} rows, linears by {side}"] = added(side), given
        else:
          calls[f"{layer}, {rows} rows, linears by {side}"] = linears(side), given
        if not tried.refines:
          calls[f"{layer}, {rows} rows, product by {side}"] = product(side, x, leaves)
      measure(calls, sizes, results)


def torchs(sizes, results, compiled=False):
  """Times torch's operations in captured graphs, operands rotating.

  Products and attention, or the products of a candidate's layers, compiled.
  """
  import torch
  import torch.nn.functional as F

  is_gpu = torch.cuda.is_available()
  device = "cuda" if is_gpu else "cpu"
  results.put("device", [torch.cuda.get_device_name() if is_gpu else "cpu"])
  normal = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device=device)

  def measure(name, function, make):
    nbytes = sum(a.nbytes for a in make())
    sets = [make() for _ in range(min(max(-(-ROTATED // nbytes), 2), MOST_SETS))]
    run = lambda: [function(*each) for each in sets]
    if not is_gpu:
      results.put(name, {"ms": common.clock(run)["ms"] / len(sets)})
      return
    graph, _ = common.cuda_graph(torch, run)
    runs = []
    for _ in range(2 * sizes.batches):
      start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
      start.record()
      for _ in range(4):
        graph.replay()
      end.record()
      torch.cuda.synchronize()
      runs.append(start.elapsed_time(end) / 4 / len(sets))
    results.put(name, {"ms": statistics.median(runs), "runs_ms": runs})

  with torch.inference_mode():
    if compiled:
      # One weight for linears of one input: what a good engine does.
      multiply = torch.compile(F.linear, dynamic=False) if is_gpu else F.linear
      for layer, outputs, width, of_rows in sizes.layers:
        for rows in of_rows:
          shapes = (rows, width), (sum(outputs), width)
          make = lambda shapes=shapes: tuple(normal(*shape) for shape in shapes)
          measure(f"{layer}, {rows} rows", multiply, make)
      return
    m, d = sizes.linear
    for rows in sizes.rows:
      make = lambda rows=rows: (normal(rows, d), normal(m, d))
      measure(f"linear, {rows} rows, BF16", lambda x, w: x @ w.T, make)
    tokens, heads, kv_heads, width = sizes.attention
    attend = functools.partial(
      F.scaled_dot_product_attention, is_causal=True, enable_gqa=True
    )
    make = lambda: tuple(
      normal(1, n, tokens, width) for n in (heads, kv_heads, kv_heads)
    )
    measure(f"attention of {tokens} tokens", attend, make)


def compared(parts):
  """Rows of the table: milliseconds, GB/s relative to a copy, and ratios to torch."""
  mine, base, rows = parts.get("ours", {}), parts.get("torch", {}), []
  copy = mine.get("copy", {}).get("GBps")
  for name, entry in mine.items():
    if isinstance(entry, dict):
      other = base.get(name) or base.get(name.rpartition(", ")[0] + ", BF16")
      share = f"{entry['GBps'] / copy:.2f}" if copy else "-"
      ratio = f"{entry['ms'] / other['ms']:.2f}" if other else "-"
      mark = " (host)" if entry["host_bound"] else ""
      rows.append([name, f"{entry['ms']:.4f}{mark}", share, ratio])
  return rows


def of_candidate(parts, tried, layers):
  """Rows of a candidate's table, and what of `choice.py` should change, in words."""
  name = tried.name
  mine, base = parts.get("candidate", {}), parts.get("torch compiled", {})
  rows, ratios = [], {}
  for layer, _, _, of_rows in layers:
    for n in rows_for(tried, of_rows):
      at = f"{layer}, {n} rows"
      ms = lambda what, at=at: mine.get(f"{at}, {what}", {}).get("ms")
      now, then, torch = ms("linears by table"), ms(f"linears by {name}"), base.get(at)
      times = [
        *(now, then, ms("product by table"), ms(f"product by {name}")),
        *(ms("our BF16"), torch and torch["ms"]),
      ]
      if now and then:
        ratios.setdefault(n, []).append(then / now)
        shown = ["-" if t is None else f"{t:.4f}" for t in times]
        rows.append([at, *shown, f"{then / now:.2f}"])
  wins = sorted(n for n, found in ratios.items() if max(found) <= FASTER)
  if not wins:
    return rows, "No row of choice.py should change."
  listed = lambda numbers: f"{', '.join(map(str, numbers))} rows"
  text = f"In choice.py, {name} should be taken at {listed(wins)}"
  lost = sorted(set(ratios) - set(wins))
  return rows, f"{text}, and not at {listed(lost)}." if lost else f"{text}."


def main():
  """Runs each side in a process of its own, and writes what they measured."""
  parser = common.parser(__doc__, tiny=True)
  sides = [*LIMITS, *CANDIDATE_LIMITS]
  parser.add_argument("--only", choices=sides, help="one side, into --out")
  parser.add_argument("--candidate", help="a product of choice.py that is no default")
  options = parser.parse_args()
  sizes = TINY if options.tiny else Sizes()
  if options.only:
    run = {
      "ours": ours,
      "torch": torchs,
      "torch compiled": functools.partial(torchs, compiled=True),
      "candidate": functools.partial(candidate, options.candidate),
    }[options.only]
    run(sizes, common.Entries(options.out))
    return
  has_torch = importlib.util.find_spec("torch") is not None
  limits = CANDIDATE_LIMITS if options.candidate else LIMITS
  limits = {s: n for s, n in limits.items() if not s.startswith("torch") or has_torch}
  words = ["--tiny"] if options.tiny else []
  if options.tiny:
    limits = dict.fromkeys(limits, 600)
  if options.candidate:
    words += ["--candidate", options.candidate]
  parts, failures = common.in_processes(limits, words)
  if options.candidate:
    from mxjax.pallas_kernels import choice

    by_name = {each.name: each for each in choice.CANDIDATES}
    rows, verdict = of_candidate(parts, by_name[options.candidate], sizes.layers)
    who = ["table", options.candidate]
    head = [
      "linears",
      *(f"{what} by {by}, ms" for what in ("all", "product") for by in who),
    ]
    head += ["our BF16", "torch BF16, compiled", "all / table"]
    text = f"{common.markdown(head, rows)}\n{verdict}\n"
  else:
    head = ["operation", "ms", "bytes a second / copy", "time / torch BF16"]
    text = common.markdown(head, compared(parts))
  if failures:
    text += f"\nNot measured to the end: {failures}\n"
  made = common.stamp(*(["torch"] if has_torch else []))
  result = made | {"sizes": dataclasses.asdict(sizes), "parts": parts}
  common.finish(options, result | {"failures": failures}, text)
  sys.exit(bool(failures))


if __name__ == "__main__":
  main()
