"""Perplexity over fixed windows, jitted layer by layer, strict A4, no cache."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mxjax import compilation
from mxjax.calibration import streams
from mxjax.calibration.calibration import CausalLanguageModel, Params, model_ids
from mxjax.devices import execution
from mxjax.devices.mesh import DATA
from mxjax.devices.placement import EVALUATION, ONE_DEVICE, Placement
from mxjax.errors import ValueRefusal
from mxjax.evaluation import device_calls
from mxjax.evaluation.device_calls import CallShapes

PERTURBATION = 1e-6
"""Relative change of the embedding rows in a replicate in float32."""
HEAD_CHUNK = 512
CALLS_TOGETHER = 16
"""Calls run through a layer while it is resident; does not affect results."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
  """Perplexity of one model on one set of windows.

  Strict-A4 perplexity of small models is chaotic at the 1 % level: even a rounding
  error of the embedding moves it. Replicates measure that spread; a smaller
  difference is a tie.

  Attributes:
    values: One perplexity per replicate; the first is unperturbed.
    windows: Number of windows.
    length: Tokens per window; each window makes `length - 1` predictions.
    window_losses: Mean negative log-likelihood of each window, nats, unperturbed.
  """

  values: tuple[float, ...]
  windows: int
  length: int
  window_losses: tuple[float, ...]

  @property
  def mean(self) -> float:
    """Mean over replicates."""
    return float(np.mean(self.values))

  @property
  def spread(self) -> float:
    """Largest minus smallest replicate; 0 for a single one."""
    return float(np.ptp(self.values))

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready form."""
    return {**dataclasses.asdict(self), "mean": self.mean, "spread": self.spread}


@compilation.jit(static_argnames=("model", "placement"))
def _losses(
  model: CausalLanguageModel,
  params: Params,
  hidden: jax.Array,
  targets: jax.Array,
  placement: Placement,
) -> jax.Array:
  """Returns negative log-likelihoods `[B, T]`, applying the head chunk by chunk."""

  def run(params: Params, hidden: jax.Array, targets: jax.Array) -> jax.Array:
    batch, length, width = hidden.shape
    # Padding predicts the id 0, and is cut off below.
    padding = -length % HEAD_CHUNK
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)))

    def chunk(item: tuple[jax.Array, jax.Array]) -> jax.Array:
      states, ids = item
      logits = model.logits(params, states[None])[0]
      wanted = jnp.take_along_axis(logits, ids[:, None], axis=-1)[:, 0]
      return jax.nn.logsumexp(logits, axis=-1) - wanted

    losses = jax.lax.map(
      chunk, (hidden.reshape(-1, HEAD_CHUNK, width), targets.reshape(-1, HEAD_CHUNK))
    )
    return losses.reshape(batch, -1)[:, :length]

  return placement.call(run, params, hidden, targets, sharing=EVALUATION)


def window_losses(
  model: CausalLanguageModel,
  params: Params,
  tokens: Any,
  *,
  on_window: Callable[[int, int], None] | None = None,
  placement: Placement = ONE_DEVICE,
  shapes: CallShapes | None = None,
) -> np.ndarray:
  """Computes mean negative log-likelihoods per window, nats, float64 `[windows]`.

  Tokens are int32 `[windows, length]`. `on_window` is called with (done, windows) after
  each window; `placement` names the devices over which windows and output rows are
  sharded; `shapes` say how many windows a device's call has, by default
  `device_calls.of_device()`.
  """
  rows = model_ids(model, tokens, "perplexity")
  count = (shapes or device_calls.of_device()).windows(rows.shape[1])
  # Each device along `data` has as many windows as one device alone.
  count *= placement.mesh.shape[DATA] if placement.mesh else 1
  batches = [
    placement.put(call, P(DATA)) for call in device_calls.filled_calls(rows, count)
  ]
  outer = placement.shard_rows(streams.outer_params(model, params))
  losses = []
  for start in range(0, len(batches), CALLS_TOGETHER):
    group = batches[start : start + CALLS_TOGETHER]
    hiddens = streams.final_hiddens(model, params, group, placement)
    # All are started before the first is waited for: a GPU goes from one to the next.
    found = [
      execution.block_on_cpu(
        _losses(model, outer, hidden[:, :-1], ids[:, 1:], placement)
      )
      for ids, hidden in zip(group, hiddens, strict=True)
    ]
    for new in found:
      by_window = np.asarray(placement.to_primary(new), np.float64)
      # Copies of the last window fill up the last call; their losses are dropped.
      for loss in by_window[: len(rows) - len(losses)]:
        losses.append(loss.mean())
        if on_window:
          on_window(len(losses), len(rows))
  return np.asarray(losses)


def perturbed(params: Params, seed: int, dtype: Any = jnp.float32) -> Params:
  """Moves the embedding of a model that computes in `dtype` by a rounding error.

  In float32 its rows are multiplied by 1 + 1e-6 N(0, 1). That would round away in
  bfloat16, where one random entry of each row goes to its neighbour away from zero.
  """
  weight = jnp.asarray(params["embed_tokens"]["weight"], jnp.float32)
  key, (rows, width) = jax.random.key(seed), weight.shape
  if dtype == jnp.bfloat16:
    entry = jax.random.randint(key, (rows, 1), 0, width, jnp.int32)
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.bfloat16), jnp.uint16)
    # The next pattern of bits is the neighbour away from zero, for both signs.
    bits += (jnp.arange(width, dtype=jnp.int32)[None] == entry).astype(jnp.uint16)
    changed = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
  else:
    noise = jax.random.normal(key, (rows, 1), jnp.float32)
    changed = weight * (1.0 + PERTURBATION * noise)
  # Not a dict of both: that would read every layer of params on disk.
  maps: list[Any] = [{"embed_tokens": {"weight": changed}}, params]
  return collections.ChainMap(*maps)


def perplexity(
  model: CausalLanguageModel,
  params: Params,
  tokens: Any,
  *,
  replicates: int = 1,
  on_window: Callable[[int, int], None] | None = None,
  mesh: Mesh | None = None,
) -> Perplexity:
  """Computes perplexity over fixed windows: exp of the mean loss of all predictions.

  Tokens are int32 `[windows, length]`. All `replicates` but the first perturb the
  embedding; `on_window` is called with (done, windows) after each window of each. Over
  `mesh`, windows are sharded along the axis `data` and weights by output rows along
  `model`.

  Raises:
    ValueError: `replicates` is less than one, or windows are too short.
  """
  tokens = np.asarray(tokens)
  if replicates < 1 or tokens.ndim != 2 or tokens.shape[1] < 2:
    raise ValueRefusal(
      "perplexity",
      expected="at least one replicate and windows [n, length >= 2]",
      got=f"replicates={replicates!r} and shape {tokens.shape}",
      mend="cut the text into windows first",
    )
  runs, placement = [], Placement.of(mesh)
  options = {"on_window": on_window, "placement": placement}
  outer = streams.outer_params(model, params)
  # A model of the protocol need not have a config; what it embeds has its dtype.
  embedded = jax.eval_shape(model.embed, outer, jnp.asarray(tokens[:1]))
  dtype = jax.tree.leaves(embedded)[0].dtype
  for seed in range(replicates):
    used = perturbed(placement.on_primary(params), seed, dtype) if seed else params
    runs.append(window_losses(model, used, tokens, **options))
  return Perplexity(
    # Every window makes as many predictions, so that a mean over windows is one over
    # predictions.
    values=tuple(float(np.exp(losses.mean())) for losses in runs),
    windows=tokens.shape[0],
    length=tokens.shape[1],
    window_losses=tuple(float(loss) for loss in runs[0]),
  )
