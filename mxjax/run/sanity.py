"""The sanity gate after quantization: compares logits with the float model's."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, CausalLanguageModel, Params
from mxjax.devices import execution
from mxjax.errors import FloatingPointRefusal

SANITY_TOKENS, SANITY_EXAMPLES = 256, 8
MAX_EXCESS_NATS = 2.5
"""Excess over the float model's loss that counts as collapse: perplexity times 12."""
MIN_AGREEMENT = 0.05
"""Minimum share of positions where both models predict the same token."""
_MEND = (
  "look for the first layer with a large error in the report, or pass check=False to "
  "keep the result anyway"
)


@dataclasses.dataclass(frozen=True)
class SanityReport:
  """Comparison of the float and the quantized model's logits on the same tokens.

  Losses are mean negative log-likelihoods, nats a token; `divergence` is the mean
  KL(float || quantized), nats; `agreement` is the share of positions with the same most
  likely token; `tokens` counts the predictions.
  """

  float_loss: float
  quantized_loss: float
  divergence: float
  agreement: float
  tokens: int

  def check(self, name: str) -> None:
    """Raises if the quantized model collapsed.

    Raises:
      FloatingPointError: The loss is not finite or far above the float model's, or the
        models hardly agree.
    """
    excess = self.quantized_loss - self.float_loss
    # A better loss than the float model's is no fault, however large the difference.
    if np.isfinite(excess) and excess <= MAX_EXCESS_NATS:
      if self.agreement >= MIN_AGREEMENT:
        return
    raise FloatingPointRefusal(
      "sanity",
      expected=f"a loss of at most {self.float_loss + MAX_EXCESS_NATS:.3f} nats "
      f"({self.float_loss:.3f} of the float model) and an agreement of at least "
      f"{MIN_AGREEMENT:.1%}",
      got=f"a model that collapsed under {name}: loss {self.quantized_loss:.3f}, "
      f"agreement {self.agreement:.1%} on {self.tokens} tokens",
      mend=_MEND,
    )


@dataclasses.dataclass(frozen=True)
class OutputReport:
  """Comparison of the outputs of a model of any kind on the same examples.

  `relative_error` is ||q - f||^2 / ||f||^2 over all float outputs.
  """

  relative_error: float
  examples: int

  def check(self, name: str) -> None:
    """Raises FloatingPointError if outputs of zero would not be farther away."""
    # So written, NaN is refused, too.
    if not self.relative_error < 1:
      raise FloatingPointRefusal(
        "sanity",
        expected="outputs whose squared error is below their square",
        got=f"a model that collapsed under {name}: error {self.relative_error:.3f} of "
        f"the square on {self.examples} examples",
        mend=_MEND,
      )


def report(
  calib: Calibration, params: Params, quantized: Params
) -> SanityReport | OutputReport:
  """Compares the models on the first calibration examples."""
  model: Any = calib.model
  if not hasattr(model, "outputs"):
    # One short sequence: the gate looks for collapse, not for quality.
    tokens = calib.tokens[:1, :SANITY_TOKENS]
    return compare(model, params, quantized, tokens)
  inputs = jax.tree.map(lambda a: a[:SANITY_EXAMPLES], calib.tokens)
  run = compilation.jit()(model.outputs)
  pairs = zip(
    *(jax.tree.leaves(run(p, inputs)) for p in (params, quantized)), strict=True
  )
  error = total = 0.0
  for exact, got in pairs:
    # Outputs of any dtype, also one whose squares overflow.
    exact, got = (np.asarray(a, np.float64) for a in (exact, got))
    error, total = error + ((got - exact) ** 2).sum(), total + (exact**2).sum()
  return OutputReport(float(error / total), min(calib.count, SANITY_EXAMPLES))


@compilation.jit(static_argnames="model")
def _log_probabilities(
  model: CausalLanguageModel, params: Params, hidden: jax.Array
) -> jax.Array:
  return jax.nn.log_softmax(model.logits(params, hidden), axis=-1)


def _run(model: CausalLanguageModel, params: Params, tokens: jax.Array) -> jax.Array:
  (hidden,) = streams.final_hiddens(model, params, [tokens])
  return _log_probabilities(model, streams.outer_params(model, params), hidden)


@execution.jit()
def _compared(
  ours: jax.Array, theirs: jax.Array, tokens: jax.Array
) -> dict[str, jax.Array]:
  """Compares log-probabilities `[B, T, vocabulary]`, ours of the quantized model."""
  # Position t predicts token t + 1; the last position has no token to be compared with.
  ours, theirs, wanted = ours[:, :-1], theirs[:, :-1], tokens[:, 1:, None]
  pick = lambda logp: -jnp.take_along_axis(logp, wanted, -1).mean()
  return {
    "float_loss": pick(theirs),
    "quantized_loss": pick(ours),
    "divergence": (jnp.exp(theirs) * (theirs - ours)).sum(-1).mean(),
    "agreement": (ours.argmax(-1) == theirs.argmax(-1)).mean(dtype=jnp.float32),
  }


def compare(
  model: CausalLanguageModel, params: Params, quantized: Params, tokens: Any
) -> SanityReport:
  """Compares two sets of params of one model on tokens `[B, T]`."""
  tokens = jnp.asarray(tokens, jnp.int32)
  ours, theirs = (_run(model, p, tokens) for p in (quantized, params))
  measured = _compared(ours, theirs, tokens)
  numbers = {name: float(value) for name, value in measured.items()}
  return SanityReport(**numbers, tokens=int(tokens[:, 1:].size))
