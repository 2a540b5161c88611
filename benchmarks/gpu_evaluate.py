"""How long does an evaluation take: perplexity, and log-likelihoods of choices?

Random weights of Qwen3-8B's shapes with query and key norms, a few layers, as our BF16
and in HiRes form (dense maps, one code, both corrections; float8 products where
`pack_for_inference` takes them), beside torch compiled in BF16 on the same card. The
choices are 200 items of four, each choice 3 to 24 tokens after a context of 40 to 159.

The first pass of a process compiles; a second task has other items of other lengths.
Tokens a second count the context of every choice, because torch runs it for each, as
evaluation harnesses do. Each side runs in a process of its own.

  python benchmarks/gpu_evaluate.py            # at most 3 minutes on an H100
  python benchmarks/gpu_evaluate.py --tiny     # rehearses on a CPU
"""

import dataclasses
import importlib.util
import sys
import time

import common
import numpy as np

LIMITS = {"torch": 75, "bf16": 45, "hires": 60}
"""Sides, and the seconds after which each is stopped."""
MEASURES = "perplexity", "likelihoods"


@dataclasses.dataclass(frozen=True)
class Work:
  """What is evaluated."""

  layers: int = 4
  windows: int = 16
  length: int = 2048
  items: int = 200
  choices: int = 4
  context: tuple = (40, 160)
  choice: tuple = (3, 25)


TINY = Work(layers=2, windows=3, length=64, items=8, context=(8, 16), choice=(3, 6))


def task(work, seed, vocabulary):
  """Contexts, and the choices of each, int32 ids."""
  rng = np.random.default_rng(seed)
  draw = lambda ends: rng.integers(0, vocabulary, rng.integers(*ends)).astype(np.int32)
  return [
    (draw(work.context), [draw(work.choice) for _ in range(work.choices)])
    for _ in range(work.items)
  ]


def tokens_of(items):
  """Tokens of all choices, each with its context."""
  return sum(len(context) + len(c) for context, choices in items for c in choices)


def measured(results, name, tokens, call, other=None):
  """Seconds of a first pass, of later ones, and of a first pass of another task."""
  passes = []
  for _ in range(4):
    start = time.perf_counter()
    call()
    passes.append(time.perf_counter() - start)
  entry = {"first_s": passes[0], "again_s": min(passes[1:]), "tokens": tokens}
  entry["tokens_per_s"] = tokens / entry["again_s"]
  if other is not None:
    start = time.perf_counter()
    other()
    entry["other_task_first_s"] = time.perf_counter() - start
  results.put(name, entry)


def ours(work, shape, kind, results):
  """Evaluates a model of this library through its public functions."""
  import gpu_models
  import jax

  from mxjax.evaluation.measures.perplexity import perplexity
  from mxjax.evaluation.tasks.likelihoods import Request, score

  programs = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: (
      programs.append(seconds) if "backend_compile" in name else None
    )
  )
  model, params = gpu_models.random_model(shape, kind, work.layers)
  device = jax.devices()[0]
  results.put("model", {"device": device.device_kind, "layers": work.layers})
  rng = np.random.default_rng(1)
  windows = rng.integers(0, shape.vocabulary, (work.windows, work.length))
  windows = windows.astype(np.int32)

  def requests(items):
    return [
      Request(context, choice) for context, choices in items for choice in choices
    ]

  first, other = (task(work, seed, shape.vocabulary) for seed in (2, 3))
  run = lambda items: score(model, params, items, max_length=work.length)
  known = len(programs)

  def counted():
    nonlocal known
    made, known = programs[known:], len(programs)
    return {"programs": len(made), "compile_s": sum(made)}

  both = requests(first), requests(other)
  calls = (lambda: run(both[0]), lambda: run(both[1]))
  measured(results, "likelihoods", tokens_of(first), *calls)
  results.put("likelihoods compiled", counted())
  tokens = windows.size
  measured(results, "perplexity", tokens, lambda: perplexity(model, params, windows))
  results.put("perplexity compiled", counted())
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
  results.put("peak_GB", peak / 1e9)


def torchs(work, shape, results):
  """Evaluates torch's model: choices sorted by length, 64 a batch, padded to 32."""
  import gpu_torch
  import torch
  import torch.nn.functional as F

  where = gpu_torch.device()
  name = torch.cuda.get_device_name() if where == "cuda" else "cpu"
  results.put("model", {"device": name, "torch": torch.__version__})
  # A first pass compiles, where a rehearsal has no compiler to wait for.
  model = gpu_torch.Model(shape, work.layers, is_compiled=where == "cuda")
  rng = np.random.default_rng(1)
  windows = torch.as_tensor(
    rng.integers(0, shape.vocabulary, (work.windows, work.length))
  )

  def losses(states, ids):
    return F.cross_entropy((states @ model.head.T).float(), ids, reduction="none")

  def of_windows():
    found = []
    for window in windows:
      ids = window[None].to(where)
      states = model.hidden(ids)[0, :-1]
      wanted = ids[0, 1:]
      found += [
        losses(states[at : at + 512], wanted[at : at + 512])
        for at in range(0, len(wanted), 512)
      ]
    return torch.cat(found).mean().item()

  def of_choices(items):
    rows = sorted(
      ((context, choice) for context, choices in items for choice in choices),
      key=lambda row: len(row[0]) + len(row[1]),
    )
    found = []
    for start in range(0, len(rows), 64):
      part = rows[start : start + 64]
      width = -(-max(len(c) + len(k) for c, k in part) // 32) * 32
      ids = np.zeros((len(part), width), np.int64)
      at, wanted = [], []
      for row, (context, choice) in enumerate(part):
        ids[row, : len(context) + len(choice)] = np.concatenate([context, choice])
        first = row * width + len(context) - 1
        at.append(np.arange(first, first + len(choice)))
        wanted.append(choice)
      states = model.hidden(torch.as_tensor(ids).to(where))
      at, wanted = (
        torch.as_tensor(np.concatenate(a)).long().to(where) for a in (at, wanted)
      )
      states = states.reshape(-1, shape.hidden)[at]
      found += [
        losses(states[k : k + 512], wanted[k : k + 512])
        for k in range(0, len(wanted), 512)
      ]
    return torch.cat(found).cpu()

  with torch.inference_mode():
    first, other = (task(work, seed, shape.vocabulary) for seed in (2, 3))
    calls = (lambda: of_choices(first), lambda: of_choices(other))
    measured(results, "likelihoods", tokens_of(first), *calls)
    measured(results, "perplexity", windows.numel(), of_windows)


def compared(parts):
  """Rows of the table: passes, tokens a second, and ratios to torch."""
  rows = []
  for measure in MEASURES:
    base = parts.get("torch", {}).get(measure, {}).get("tokens_per_s")
    for side, entries in parts.items():
      if entry := entries.get(measure):
        made = entries.get(f"{measure} compiled", {})
        told = [entry["first_s"], entry.get("other_task_first_s"), entry["again_s"]]
        rate = entry["tokens_per_s"]
        cells = ["-" if value is None else f"{value:.2f}" for value in told]
        ratio = f"{rate / base:.2f}" if base else "-"
        programs = str(made.get("programs", "-"))
        rows.append([measure, side, *cells, programs, f"{rate:,.0f}", ratio])
  return rows


def main():
  """Runs each side in a process of its own, and writes what they measured."""
  parser = common.parser(__doc__, tiny=True)
  parser.add_argument("--layers", type=int, help="of the model's 36")
  parser.add_argument("--only", choices=LIMITS, help="one side, into --out")
  options = parser.parse_args()
  work = TINY if options.tiny else Work()
  if options.layers:
    work = dataclasses.replace(work, layers=options.layers)
  if options.only:
    import gpu_models

    shape = gpu_models.TINY if options.tiny else gpu_models.QWEN3_8B
    results = common.Entries(options.out)
    if options.only == "torch":
      torchs(work, shape, results)
    else:
      ours(work, shape, {"bf16": "BF16", "hires": "HiRes"}[options.only], results)
    return
  has_torch = importlib.util.find_spec("torch") is not None
  limits = {side: s for side, s in LIMITS.items() if side != "torch" or has_torch}
  if options.tiny:
    limits = dict.fromkeys(limits, 600)
  words = ["--layers", str(work.layers), *(["--tiny"] if options.tiny else [])]
  parts, failures = common.in_processes(limits, words)
  head = ["measure", "side", "first pass, s", "another task, s", "again, s"]
  head += ["programs", "tokens a second", "/ torch"]
  text = common.markdown(head, compared(parts))
  if failures:
    text += f"\nNot measured to the end: {failures}\n"
  made = common.stamp(*(["torch"] if has_torch else []))
  result = made | {"work": dataclasses.asdict(work), "parts": parts}
  common.finish(options, result | {"failures": failures}, text)
  sys.exit(bool(failures))


if __name__ == "__main__":
  main()
