"""The first token and the steps after it, as a user of the public API meets them.

Random weights of Qwen3-8B's shapes with query and key norms, a few layers, as our BF16
and in HiRes form (dense maps, one code, both corrections) as `mxjax.load` gives it,
beside torch compiled in BF16 on the same card, with fused weights, SDPA and CUDA
graphs, where torch is installed. Each runs in a process of its own.

Measured are the first token of several prompts; the seconds that a user waits at
another prompt length in the same bucket, at a new bucket, and at another number of new
tokens; and a step at several batch sizes beside 2,048 tokens of context. With --cache,
only steps of 32 sequences beside 2,048 and 16,384 tokens are, with keys and values in
bfloat16 and in E4M3, against our BF16 with a bfloat16 cache.

  python benchmarks/gpu_generate.py            # 4 layers: at most 200 s on an H100
  python benchmarks/gpu_generate.py --cache --out FILE      # at most 200 s, untried
  python benchmarks/gpu_generate.py --tiny     # rehearses on a CPU

What XLA's trials of products cost at a new bucket, and gain in the first token, shows
a second run, with another --out, under

  XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""

import argparse
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import common

PARTS = ("torch", "bf16", "hires")
BASE = "torch"
SECONDS = {"torch": 80, "bf16": 50, "hires": 100}
"""After which a part is stopped; what it had measured stays."""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Widths of the model, and what is asked of it."""

  layers: int = 4
  hidden: int = 4096
  intermediate: int = 12288
  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  vocabulary: int = 151936
  prompts: tuple = ((1, 2048), (8, 2048), (1, 16384))
  steps_at: tuple = ((1, 2048), (8, 2048), (32, 2048), (64, 2048))
  formats: tuple = ("compute",)
  context: int = 2048
  same_bucket: int = 1971
  new_bucket: int = 1100
  steps: int = 16

  def name(self, batch, context, cache_format="compute"):
    """How a step of so many sequences beside such a context is called."""
    beside = f" x {context:,}" if context != self.context else ""
    return f"step, batch {batch}{beside}" + ", E4M3 cache" * (cache_format == "e4m3")

  def caches(self):
    """Batch, context and format of the cache of every step."""
    return [(*at, how) for at in self.steps_at for how in self.formats]


TINY = {
  "hidden": 64,
  "intermediate": 128,
  "heads": 4,
  "kv_heads": 2,
  "head_dim": 32,
  "vocabulary": 512,
  "prompts": ((1, 64), (2, 64), (1, 128)),
  "steps_at": ((1, 64), (2, 64)),
  "context": 64,
  "same_bucket": 55,
  "new_bucket": 40,
  "steps": 4,
}
CACHE = {
  "prompts": (),
  "steps_at": ((32, 2048), (32, 16384)),
  "formats": ("compute", "e4m3"),
}
"""What --cache changes."""
GOALS = {(32, 2048): 2.0, (32, 16384): 1.7}
"""Rates of HiRes with an E4M3 cache, over our BF16 with a bfloat16 cache."""


def seconds_of(call):
  """Seconds of one call."""
  begin = time.perf_counter()
  call()
  return round(time.perf_counter() - begin, 3)


def random_model(sizes, kind):
  """A `CausalLM`, and random params: bfloat16, or in HiRes form as `load` gives it."""
  import jax
  import jax.numpy as jnp

  import mxjax
  from mxjax.layers import inference_packing
  from mxjax.models import CausalLM, ModelConfig
  from mxjax.models.parameters import insert, parameter_shapes
  from mxjax.numerics.realization import one_code
  from mxjax.numerics.realization.activation_quantizers import OneCode
  from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
  from mxjax.numerics.recovery.value_recovery import ValueRecovery
  from mxjax.numerics.shaping.input_maps import BlockDense

  config = ModelConfig(
    vocab_size=sizes.vocabulary,
    hidden_size=sizes.hidden,
    intermediate_size=sizes.intermediate,
    num_layers=sizes.layers,
    num_heads=sizes.heads,
    num_kv_heads=sizes.kv_heads,
    head_dim=sizes.head_dim,
    norm_eps=1e-6,
    rope_theta=1e6,
    tie_embeddings=False,
    max_positions=32768,
    dtype="bfloat16",
    qk_norm="head",
  )

  def normal(key, rows, columns):
    drawn = jax.random.normal(key, (rows, columns), jnp.bfloat16)
    return (drawn * columns**-0.5).astype(jnp.bfloat16)

  def hires(key, rows, columns):
    of_weight, of_map = jax.random.split(key)
    weight = normal(of_weight, rows, columns).astype(jnp.float32)
    blocks = columns // 32
    near = jnp.eye(32) + 0.05 * jax.random.normal(of_map, (blocks, 32, 32))
    packed = mxjax.encode(weight)
    wide = lambda a: a.reshape(rows, blocks, 32)
    got = wide(mxjax.decode(packed, jnp.float32))
    how = {"precision": jax.lax.Precision.HIGHEST}
    gram = jnp.einsum("mbi,mbj->bij", got, got, **how)
    cross = jnp.einsum("mbi,mbj->bij", got, wide(weight) - got, **how)
    rule = OneCode(one_code.pack_symmetric(gram), cross)
    return mxjax.QuantizedLinear(packed, BlockDense(near), rule)

  make = {
    function: jax.jit(function, static_argnums=(1, 2)) for function in (normal, hires)
  }
  shapes, params = parameter_shapes(config), {}
  keys = jax.random.split(jax.random.key(7), len(shapes))
  for key, (path, shape) in zip(keys, shapes.items(), strict=True):
    is_target = kind == "hires" and path[-2].endswith("_proj")
    if len(shape) == 1:
      leaf = jnp.ones(shape, jnp.bfloat16)
    else:
      leaf = make[hires if is_target else normal](key, *shape)
    insert(params, path, leaf)
  if kind == "hires":
    one, heads = jnp.ones(()), jnp.ones(config.num_kv_heads)
    for index in range(config.num_layers):
      layer = params[f"layers_{index}"]
      layer["self_attn"]["value_recovery"] = ValueRecovery(heads, 0.01 * heads)
      few = 0.01 * one
      layer["mlp"]["mlp_recovery"] = MlpRecovery(few, few, few, one)
    params = inference_packing.with_products(params)
  return CausalLM(config), jax.block_until_ready(params)


def ours(sizes, kind, results):
  """Measures a model of this library."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from mxjax.layers import inference_packing
  from mxjax.models import generation

  model, params = random_model(sizes, kind)
  device = jax.devices()[0]
  results.put(
    "model",
    {
      "device": device.device_kind,
      "float8_products": inference_packing.has_float8_products(params),
      "GB": round(sum(a.nbytes for a in jax.tree.leaves(params)) / 1e9, 2),
    },
  )
  rng = np.random.default_rng(0)

  def first(batch, length):
    ids = rng.integers(0, sizes.vocabulary, (batch, length)).astype(np.int32)
    return lambda: np.asarray(generation.prefill(model, params, ids)[0].newest)

  def state(batch, context, cache_format):
    capacity = generation.capacity_of(context + sizes.steps)
    cache = generation.empty_cache(model, batch, capacity, cache_format)
    return generation.Decoding(
      dataclasses.replace(cache, lengths=jnp.full(batch, context, jnp.int32)),
      jnp.zeros(batch, jnp.int32),
      jnp.zeros(batch, bool),
      context,
    )

  def steps(*at):
    held = [state(*at)]
    batch, context, _ = at
    lengths = np.full(batch, context, np.int32)

    def run():
      after, tokens = generation.decode(model, params, held[0], steps=sizes.steps)
      cache = dataclasses.replace(after.cache, lengths=jnp.asarray(lengths))
      held[0] = dataclasses.replace(after, cache=cache, longest=context)
      return np.asarray(tokens)

    return run

  # Compiled side by side, as far as they were not; alone below, where it is timed. A
  # cache is made when its program is called, so that few are there at once.
  start = time.perf_counter()
  workers = 4 if device.platform == "gpu" else 1
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    calls = [first(*prompt) for prompt in sizes.prompts]
    calls += [lambda at=at: steps(*at)() for at in sizes.caches()]
    # A candidate that is tried is tried in the threads as well.
    contexts = [contextvars.copy_context() for _ in calls]
    list(pool.map(lambda context, call: context.run(call), contexts, calls))
  programs = len(calls)
  del calls
  seconds = round(time.perf_counter() - start, 1)
  results.put("compiled side by side", {"programs": programs, "seconds": seconds})
  for batch, length in sizes.prompts:
    results.put(f"first token {batch} x {length}", common.clock(first(batch, length)))
  for at in sizes.caches():
    made = common.clock(steps(*at))
    each = {name: round(made[name] / sizes.steps, 4) for name in ("ms", "least_ms")}
    results.put(sizes.name(*at), made | each)
  if sizes.prompts:
    waits_of_a_user(sizes, model, params, first, results)
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
  results.put("peak_GB", round(peak / 1e9, 2))


def waits_of_a_user(sizes, model, params, first, results):
  """Measures what a user waits for at prompts and numbers of tokens of other sizes."""
  import numpy as np

  from mxjax.models import generation

  wait = seconds_of(first(1, sizes.same_bucket))
  results.put("another length in the same bucket", {"seconds": wait})
  call = first(1, sizes.new_bucket)
  wait, again = seconds_of(call), seconds_of(call)
  results.put("a new bucket", {"seconds": wait, "again": again})
  rng = np.random.default_rng(1)
  ids = rng.integers(0, sizes.vocabulary, (1, sizes.context)).astype(np.int32)
  run = lambda new: np.asarray(
    generation.generate(model, params, ids, max_new_tokens=new)
  )
  waits = [seconds_of(lambda new=new: run(new)) for new in (5, 5, 9)]
  names = ("seconds", "again", "another number of new tokens")
  results.put("generate", dict(zip(names, waits, strict=True)))


def torchs(sizes, results):
  """Measures torch: weights of q, k, v and of gate, up are fused, as engines do."""
  import torch
  import torch.nn.functional as F

  is_gpu = torch.cuda.is_available()
  device = "cuda" if is_gpu else "cpu"
  d, width = sizes.hidden, sizes.head_dim
  heads, kv_heads, eps = sizes.heads, sizes.kv_heads, 1e-6
  normal = lambda rows, columns: torch.randn(
    rows, columns, dtype=torch.bfloat16, device=device
  ).mul_(columns**-0.5)
  layers = [
    {
      "qkv": normal((heads + 2 * kv_heads) * width, d),
      "o": normal(d, heads * width),
      "gate_up": normal(2 * sizes.intermediate, d),
      "down": normal(d, sizes.intermediate),
    }
    for _ in range(sizes.layers)
  ]
  ones = lambda n: torch.ones(n, dtype=torch.bfloat16, device=device)
  norm, of_head = ones(d), ones(width)
  head, embedding = normal(sizes.vocabulary, d), normal(sizes.vocabulary, d)
  name = torch.cuda.get_device_name() if is_gpu else "cpu"
  results.put("model", {"device": name, "torch": torch.__version__})

  def turned(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin

  def before(x, w, cos, sin):
    batch, length, _ = x.shape
    y = F.rms_norm(x, (d,), norm, eps) @ w["qkv"].T
    y = y.view(batch, length, -1, width).transpose(1, 2)
    q, k, v = y.split([heads, kv_heads, kv_heads], 1)
    q, k = (F.rms_norm(a, (width,), of_head, eps) for a in (q, k))
    return turned(q, cos, sin), turned(k, cos, sin), v

  def after(x, attended, w):
    x = x + attended @ w["o"].T
    y = F.rms_norm(x, (d,), norm, eps) @ w["gate_up"].T
    gate, up = y.chunk(2, -1)
    return x + (F.silu(gate) * up) @ w["down"].T

  def angles(start, length):
    half = torch.arange(width // 2, device=device, dtype=torch.float32)
    turns = torch.arange(start, start + length, device=device)[:, None]
    turns = turns * 1e6 ** (-half / (width // 2))
    turns = torch.cat([turns, turns], -1)
    return turns.cos().bfloat16(), turns.sin().bfloat16()

  if is_gpu:
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = 64
    before, after = (torch.compile(f, dynamic=False) for f in (before, after))

  def prefill(ids):
    batch, length = ids.shape
    x, turns, kept = embedding[ids], angles(0, length), []
    for w in layers:
      q, k, v = before(x, w, *turns)
      kept.append((k, v))
      y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
      x = after(x, y.transpose(1, 2).reshape(batch, length, -1), w)
    return (F.rms_norm(x[:, -1], (d,), norm, eps) @ head.T).argmax(-1)

  def decode(ids, caches):
    batch, context = len(ids), caches[0][0].shape[2] - 1
    x, turns = embedding[ids][:, None], angles(context, 1)
    for w, (keys, values) in zip(layers, caches, strict=True):
      q, k, v = before(x, w, *turns)
      keys[:, :, context:], values[:, :, context:] = k, v
      # Heads of a group are queries of one key-value head: attention splits over keys.
      grouped = q.reshape(batch, kv_heads, heads // kv_heads, width)
      y = F.scaled_dot_product_attention(grouped, keys, values)
      x = after(x, y.reshape(batch, 1, heads * width), w)
    return (F.rms_norm(x, (d,), norm, eps)[:, 0] @ head.T).argmax(-1)

  def measured(run):
    if not is_gpu:
      return common.clock(run)
    graph, out = common.cuda_graph(torch, run)

    def replay():
      graph.replay()
      return out.cpu()

    return common.clock(replay)

  with torch.inference_mode():
    for batch, length in sizes.prompts:
      ids = torch.randint(0, sizes.vocabulary, (batch, length), device=device)
      results.put(
        f"first token {batch} x {length}", measured(lambda ids=ids: prefill(ids))
      )
    for batch, context in sizes.steps_at:
      shape = 2, batch, kv_heads, context + 1, width
      full = {"fill_value": 0.1, "dtype": torch.bfloat16, "device": device}
      caches = [torch.full(shape, **full).unbind(0) for _ in layers]
      ids = torch.zeros(batch, dtype=torch.long, device=device)
      run = lambda ids=ids, caches=caches: decode(ids, caches)
      results.put(sizes.name(batch, context), measured(run))
      del caches, run


def sizes_of(options):
  """The sizes that the options ask for."""
  changes = TINY if options.tiny else {}
  if options.cache:
    few = {"steps_at": ((2, 64), (2, 128))} if options.tiny else {}
    changes = changes | CACHE | few
  if options.candidate and not options.tiny:
    batches = 1, 4, 8, 32, 64
    changes = {"prompts": (), "steps_at": tuple((each, 2048) for each in batches)}
  return Sizes(**{"layers": options.layers, **changes})


def compared(parts):
  """Rows of a table: what was measured, and ratios to torch and to our BF16."""
  names = [name for part in parts.values() for name, e in part.items() if "ms" in e]
  rows = []
  for name in dict.fromkeys(names):
    ms = {part: parts[part][name]["ms"] for part in parts if name in parts[part]}
    ratio = lambda over, under, ms=ms: (
      f"{ms[over] / ms[under]:.2f}" if over in ms and under in ms else "-"
    )
    cells = [f"{ms[part]:.3f}" if part in ms else "-" for part in PARTS]
    ratios = [ratio(*pair) for pair in (("bf16", BASE), ("hires", BASE))]
    rows.append([name, *cells, *ratios, ratio("hires", "bf16")])
  return rows


def rates(sizes, parts):
  """Rows of a table: each model and cache over our BF16 with a bfloat16 cache."""
  rows = []
  for at in sizes.steps_at:
    ms = lambda part, how, at=at: (
      parts.get(part, {}).get(sizes.name(*at, how), {}).get("ms")
    )
    base, found = ms("bf16", "compute"), []
    for part, how in (("bf16", "e4m3"), ("hires", "compute"), ("hires", "e4m3")):
      one = ms(part, how)
      found.append(f"{base / one:.2f}" if base and one else "-")
    goal = f"{GOALS[at]:.1f}" if at in GOALS else "-"
    rows.append([f"{at[0]} x {at[1]:,}", *found, goal])
  return rows


def main():
  """Runs each part in a process of its own, and writes what they measured."""
  parser = common.parser(__doc__)
  parser.add_argument("--layers", type=int, default=4, help="of the model's 36")
  parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
  parser.add_argument("--cache", action="store_true", help="caches of 32 sequences")
  help = "products of choice.py that are no default: steps of HiRes by them"
  parser.add_argument("--candidate", nargs="+", help=help)
  parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
  options = parser.parse_args()
  is_own = not options.tiny and options.out == common.own_result()
  if (options.cache or options.candidate) and is_own:
    parser.error("--cache and --candidate need an --out of their own")
  sizes = sizes_of(options)
  if options.only:
    results = common.Entries(options.out)
    if options.only == "torch":
      torchs(sizes, results)
    else:
      with contextlib.ExitStack() as stack:
        if options.candidate and options.only == "hires":
          from mxjax.pallas_kernels import choice

          by_name = {each.name: each for each in choice.CANDIDATES}
          for name in options.candidate:
            stack.enter_context(choice.trying(by_name[name]))
        ours(sizes, options.only, results)
    return
  found = [part for part in options.parts if part != BASE]
  if BASE in options.parts and importlib.util.find_spec(BASE):
    found.insert(0, BASE)
  stamp, parts, failures = common.stamp(), {}, {}
  if not options.tiny and options.out.is_file():
    # Parts of an earlier call stay, if they are of the same card and sizes.
    before = json.loads(options.out.read_text())
    same = card_of(before) == card_of(stamp)
    if same and before["sizes"] == json.loads(json.dumps(dataclasses.asdict(sizes))):
      parts = before["parts"]
  for part in found:
    print(part, flush=True)
    failures.pop(part, None)
    with tempfile.TemporaryDirectory() as folder:
      file = pathlib.Path(folder) / "part.json"
      words = [sys.executable, __file__, "--only", part, "--out", str(file)]
      words += ["--layers", str(options.layers)]
      words += [f"--{name}" for name in ("tiny", "cache") if getattr(options, name)]
      if options.candidate:
        words += ["--candidate", *options.candidate]
      try:
        limit = None if options.tiny else SECONDS[part]
        ended = subprocess.run(words, check=False, timeout=limit)
        if ended.returncode:
          failures[part] = f"ended with {ended.returncode}"
      except subprocess.TimeoutExpired:
        failures[part] = f"stopped after {SECONDS[part]} s"
      parts[part] = json.loads(file.read_text()) if file.is_file() else {}
    report(options, sizes, stamp, parts, failures)
  sys.exit(bool(failures))


def card_of(stamp):
  """The name of the card and the versions of a result, without clocks and load."""
  return stamp["machine"].get("gpu", "").split(",")[0], stamp["versions"]


def report(options, sizes, stamp, parts, failures):
  """Writes what was measured so far; prints it if the sizes are small."""
  measured = {
    part: {name: e for name, e in entries.items() if isinstance(e, dict)}
    for part, entries in parts.items()
  }
  rows = compared(measured)
  head = ["ms", "torch BF16", "our BF16", "HiRes", "BF16 / torch", "HiRes / torch"]
  text = common.markdown([*head, "HiRes / BF16"], rows)
  if len(sizes.formats) > 1:
    head = ["rate over BF16's with its cache", "BF16, E4M3 cache"]
    head += ["HiRes, bfloat16 cache", "HiRes, E4M3 cache", "goal"]
    text += "\n" + common.markdown(head, rates(sizes, measured))
  result = stamp | {
    "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    "sizes": dataclasses.asdict(sizes),
    "parts": parts,
  }
  if failures:
    result["failures"] = failures
    text += f"\nNot measured to the end: {failures}\n"
  if options.tiny:
    print(text)
  else:
    common.write(options.out, result, text)


if __name__ == "__main__":
  main()
