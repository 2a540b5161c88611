"""BF16 baselines of torch, where it is installed: SDPA, and a CUDA graph for a token.

The layers are those of `gpu_models`, written as a torch user would. Both forwards are
one captured graph, so that neither waits for Python.
"""

import functools
import statistics

TIMES, BATCH = 5, 10


def baselines(bench, shape):
  """Milliseconds of a prefill and of a token, or why there are none."""
  try:
    import torch
  except ImportError as error:
    return {"times": {}, "left out": f"no torch: {error}"}
  if not torch.cuda.is_available() and not bench.smoke:
    return {"times": {}, "left out": "this torch has no CUDA"}
  device = "cpu" if bench.smoke else "cuda"
  with torch.inference_mode():
    weights = random_weights(torch, shape, device)
    tokens, positions = bench.size((2048, 2048), (16, 8))
    times = {}
    for name, count, cached in (("prefill", tokens, 0), ("decode", 1, positions)):
      run = functools.partial(forward, torch, shape, weights)
      x = torch.randn(1, count, shape.hidden, dtype=torch.bfloat16, device=device)
      cache = [
        torch.zeros(
          *(2, 1, shape.kv_heads, cached, shape.head_dim),
          dtype=torch.bfloat16,
          device=device,
        )
        for _ in range(shape.layers if cached else 0)
      ]
      times[f"{name} {shape.name}"] = measured(torch, run, x, cache, bench.smoke)
  return {"times": times, "torch": torch.__version__}


def random_weights(torch, shape, device):
  """Weights `[out, in]` of every layer, and a head."""
  new = lambda m, d: torch.randn(m, d, dtype=torch.bfloat16, device=device).mul_(
    d**-0.5
  )
  layers = [
    {name: new(*sizes) for name, sizes in shape.linears().items()}
    for _ in range(shape.layers)
  ]
  norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)
  return {"layers": layers, "norm": norm, "head": new(shape.vocabulary, shape.hidden)}


def forward(torch, shape, weights, x, caches):
  """Logits of `[1, T, d]`; with caches, of the token in their last position."""
  functional = torch.nn.functional
  length = x.shape[1]
  last = caches[0].shape[3] - 1 if caches else 0
  half = torch.arange(shape.head_dim // 2, device=x.device, dtype=torch.float32)
  angles = torch.arange(last, last + length, device=x.device)[:, None] * 1e6 ** (
    -2 * half / shape.head_dim
  )
  angles = torch.cat([angles, angles], dim=-1)
  cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
  normal = lambda x: functional.rms_norm(x, (shape.hidden,), weights["norm"], 1e-6)

  def rotated(a):
    first, second = a.chunk(2, dim=-1)
    return a * cosine + torch.cat([-second, first], dim=-1) * sine

  heads = lambda a: a.view(1, length, -1, shape.head_dim).transpose(1, 2)
  for index, layer in enumerate(weights["layers"]):
    before = normal(x)
    q, k, v = (heads(before @ layer[name].T) for name in ("q", "k", "v"))
    q, k = rotated(q), rotated(k)
    if caches:
      caches[index][:, :, :, last:] = torch.stack([k, v])
      k, v = caches[index]
    attended = functional.scaled_dot_product_attention(
      q, k, v, is_causal=not caches, enable_gqa=True
    )
    x = x + attended.transpose(1, 2).reshape(1, length, -1) @ layer["o"].T
    before = normal(x)
    gate, up = before @ layer["gate"].T, before @ layer["up"].T
    x = x + (functional.silu(gate) * up) @ layer["down"].T
  return normal(x) @ weights["head"].T


def measured(torch, run, x, cache, smoke):
  """Two medians of the milliseconds of a captured graph, as `Bench.measure`."""
  if smoke:
    run(x, cache)
    return {"ms": 1.0, "runs_ms": [1.0, 1.0], "spread": 0.0}
  side = torch.cuda.Stream()
  side.wait_stream(torch.cuda.current_stream())
  with torch.cuda.stream(side):
    for _ in range(3):
      run(x, cache)
  torch.cuda.current_stream().wait_stream(side)
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    run(x, cache)
  runs = []
  for _ in range(2):
    times = []
    for _ in range(TIMES):
      start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
      start.record()
      for _ in range(BATCH):
        graph.replay()
      end.record()
      torch.cuda.synchronize()
      times.append(start.elapsed_time(end) / BATCH)
    runs.append(statistics.median(times))
  spread = (max(runs) - min(runs)) / min(runs)
  return {"ms": statistics.mean(runs), "runs_ms": runs, "spread": spread}
