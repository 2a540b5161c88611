"""Whole random models in one program, as users run them, beside BF16 baselines."""

import functools
import time

import gpu_models
import jax
import jax.numpy as jnp
import numpy as np

from mxjax.layers.inference_packing import pack_for_inference
from mxjax.models import CausalLM, generation

BASELINE = "BF16, fastest attention"


def whole_model(bench, shape, kind):
  """A program of the logits of all tokens, and what makes its arguments.

  Each kind is the library's `CausalLM` with its own attention, as users run it;
  `BASELINE` is layers of bfloat16 with the fastest attention that there is.
  """
  key, tokens = jax.random.key(7), bench.size(2048, 16)
  ids = lambda: jax.random.randint(key, (1, tokens), 0, shape.vocabulary)
  if kind != BASELINE:
    model = CausalLM(gpu_models.config_of(shape))
    run = jax.jit(lambda params, ids: model.apply({"params": params}, ids))
    return run, lambda: (gpu_models.random_model(key, shape, kind)[1], ids())
  attention, _ = gpu_models.fastest_attention()
  forward = functools.partial(gpu_models.forward_all, shape, attention, bench.runtime)

  def make():
    keys = jax.random.split(key, shape.layers)
    layers = [gpu_models.random_layer(k, shape, "BF16") for k in keys]
    hidden = jax.random.normal(key, (1, tokens, shape.hidden), jnp.bfloat16)
    return layers, gpu_models.random_head(key, shape), hidden

  return jax.jit(forward), make


def best(bench, name, shape):
  """The fastest BF16 of earlier sections: milliseconds, and whose."""
  kinds = (BASELINE, "BF16") if name == "prefill" else ("BF16",)
  found = {kind: bench.earlier(f"{name} {kind}").get("ms") for kind in kinds}
  times = bench.earlier("torch's baselines").get("times", {})
  found["torch"] = times.get(f"{name} {shape.name}", {}).get("ms")
  found = {kind: ms for kind, ms in found.items() if ms}
  whose = min(found, key=found.get) if found else None
  return found.get(whose, float("nan")), whose


def prefill(bench, shape, kind):
  """The logits of 2,048 tokens of a random model in one program."""
  run, make = whole_model(bench, shape, kind)
  arguments = make()
  start = time.perf_counter()
  jax.block_until_ready(run(*arguments))
  first = time.perf_counter() - start
  result = bench.measure({kind: (run, arguments, 1)})[kind]
  result["device"] = bench.device_times(run, *arguments)
  tokens = bench.size(2048, 16)
  flop = shape.layers * (shape.linear_flop(tokens) + shape.attention_flop(tokens))
  flop += 2 * tokens * shape.hidden * shape.vocabulary
  stats = jax.devices()[0].memory_stats() or {}
  result |= {
    "first_call_seconds": first,
    "TFLOPs": flop / result["ms"] / 1e9,
    "params_GB": sum(a.nbytes for a in jax.tree.leaves(arguments)) / 1e9,
    "peak_GB": stats.get("peak_bytes_in_use", 0) / 1e9,
  }
  if kind == BASELINE:
    result["attention"] = ": ".join(gpu_models.fastest_attention())
  else:
    result["attention"] = CausalLM(gpu_models.config_of(shape)).attention["sequences"]
  if "BF16" not in kind:
    baseline, result["baseline"] = best(bench, "prefill", shape)
    result["/ BF16"] = result["ms"] / baseline
  return result


def decoding(bench):
  """Prompt, tokens to generate, and tokens of a program."""
  prompt, count = bench.size((1920, 129), (4, 5))
  return prompt, count, bench.size(generation.TOKENS_AT_ONCE, 2)


def of_a_token(fewer, more, tokens):
  """Kernels of a token: those of a longer run less those of a shorter one."""
  if "kernels" not in fewer or "kernels" not in more:
    return more
  kernels = {}
  for name, (ms, count) in more["kernels"].items():
    less_ms, less = fewer["kernels"].get(name, (0.0, 0))
    if count > less:
      kernels[name] = [round((ms - less_ms) / tokens, 5), (count - less) / tokens]
  each = lambda name: (more[name] - fewer[name]) / tokens
  return {name: each(name) for name in ("busy_ms", "span_ms", "events")} | {
    "kernels": kernels
  }


def decode(bench, shape, kind):
  """A token of `generate()` beside a cache of 2,048 positions.

  A program generates several tokens. The time is that of many tokens less that of one
  program: prompt and first token are in both, and so is the size of the cache.
  """
  prompt, count, at_once = decoding(bench)
  key, few = jax.random.key(7), at_once + 1
  ids = np.asarray(jax.random.randint(key, (1, prompt), 0, shape.vocabulary))
  model, params = gpu_models.random_model(key, shape, kind.partition(",")[0])
  if "int8" in kind:
    params = pack_for_inference(params, tables=False, embeddings="int8", products=None)
  how = {"use_cache": True, "tokens_at_once": at_once}
  run = lambda n: generation.generate(model, params, ids, max_new_tokens=n, **how)
  jax.block_until_ready(run(few))
  times = bench.measure({n: (run, (n,), 1) for n in (few, count)}, batches=3)
  taken = [
    (all_ms - few_ms) / (count - few)
    for few_ms, all_ms in zip(
      times[few]["runs_ms"], times[count]["runs_ms"], strict=True
    )
  ]
  result = {
    "ms": sum(taken) / 2,
    "runs_ms": taken,
    "spread": abs(taken[0] - taken[1]) / min(taken),
    "tokens_in_a_program": at_once,
    "prompt_and_one_program_ms": times[few]["ms"],
  }
  result["tokens_per_second"] = 1e3 / result["ms"]
  result["device"] = of_a_token(
    *(bench.device_times(run, n) for n in (few, count)), count - few
  )
  if "BF16" not in kind:
    baseline, result["baseline"] = best(bench, "decode", shape)
    result["/ BF16"] = baseline / result["ms"]
  return result
