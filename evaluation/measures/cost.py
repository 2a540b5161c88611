"""What a model costs in use: a complete forward pass, and a generated token."""

import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.calibration import Params
from mxjax.models import CausalLM
from mxjax.models.streaming import PrefixCache, stream

WARM_UPS, RUNS = 10, 30
"""The paper's (Section Full-forward latency)."""
NEW_TOKENS = 32


def running_cost(
  model: CausalLM,
  params: Params,
  tokens: np.ndarray,
  *,
  warm_ups: int = WARM_UPS,
  runs: int = RUNS,
  new_tokens: int = NEW_TOKENS,
) -> dict[str, float]:
  """Times complete forwards of one sequence, and greedy decoding behind it.

  `tokens` are int32 `[T]`. The first token after the prompt is not timed, and the
  prompt leaves room for the new ones.

  Paper: Tables hires-full-cost and onecode-cost.

  Returns:
    `forward_ms`, the median of `runs` forwards after `warm_ups`; `tokens_per_second`.
  """
  forward = jax.jit(lambda params, ids: model.apply({"params": params}, ids))
  batch = jnp.asarray(tokens[None])
  seconds: list[float] = []
  for _ in range(warm_ups + runs):
    start = time.perf_counter()
    jax.block_until_ready(forward(params, batch))
    seconds.append(time.perf_counter() - start)
  cache = PrefixCache(model, params, len(tokens) + new_tokens)
  # A cache has no more positions than its model: a long prompt loses its end.
  prompt = tokens[: cache.limit - new_tokens]
  times: list[float] = []
  for _ in range(2):  # The first time compiles.
    made = stream(cache, prompt, max_new_tokens=new_tokens)
    times = [time.perf_counter() for _ in itertools.islice(made, new_tokens)]
  return {
    "forward_ms": 1e3 * statistics.median(seconds[warm_ups:]),
    # The first token ends the prompt: between n points of time lie n - 1 steps.
    "tokens_per_second": (new_tokens - 1) / (times[-1] - times[0]),
  }
