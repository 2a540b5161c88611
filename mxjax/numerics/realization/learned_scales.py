r"""Weight quantization with learned scales: the relaxation of FOCUS.

Each block has a factor m on its maximum a and four divisors c_j, one for each run of
eight values; only codes and scales are stored:

.. math::
  S = 2^{\lceil \log_2 (m\,a / 6) \rceil}, \qquad
  \hat W = S\,Q\!\left(\operatorname{clip}(W / (S c_j), \pm 6)\right)
"""

import dataclasses

import jax
import jax.numpy as jnp

from mxjax.numerics import float_bits, mxfp4, pytree_nodes
from mxjax.numerics.realization import gptq

SUBGROUPS = 4
DIVISOR_LOGIT = 6.0
"""Initial logit of every divisor: c = .9975."""
MIN_FACTOR = 2.0**-10
"""Lower bound of a learned factor, because the scale of a block must stay positive."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class LearnedScales:
  """The learned parameters of one linear, float32.

  `factor` is m, `[blocks, rows]`; `logits` is q, `[blocks, 4, rows]`: c = sigmoid(q).
  """

  factor: jax.Array
  logits: jax.Array


def initial(
  blocks: int, rows: int, divisor_logit: float = DIVISOR_LOGIT
) -> LearnedScales:
  """Returns the initial parameters: every m is 1 and all logits are equal."""
  return LearnedScales(
    jnp.ones((blocks, rows), jnp.float32),
    jnp.full((blocks, SUBGROUPS, rows), divisor_logit, jnp.float32),
  )


def _rules(rules: mxfp4.Rules) -> mxfp4.Rules:
  """Returns the rules with the method's own scale rule and the contract's ties."""
  return dataclasses.replace(rules, scale_rule="rceil")


def _exponent(
  weight: jax.Array, factor: jax.Array, rules: mxfp4.Rules
) -> tuple[jax.Array, jax.Array]:
  """Returns the exponent of m times the block maximum, and m bounded from below."""
  bounded = jnp.maximum(factor, MIN_FACTOR)
  largest = jnp.abs(weight).max(-2) * bounded
  # The exponent of a block whose only value is its maximum.
  return mxfp4.block_exponent(largest[..., None, :], _rules(rules)), bounded


def _divisors(logits: jax.Array) -> jax.Array:
  width = mxfp4.BLOCK_SIZE // SUBGROUPS
  return jnp.repeat(jax.nn.sigmoid(logits), width, axis=-2)


@jax.custom_vjp
def _round(scaled: jax.Array, even: jax.Array) -> jax.Array:
  """Rounds values in [-6, 6] to E2M1, with the identity as gradient."""
  # Values are in units of their scale already.
  zero = jnp.zeros((1,) * scaled.ndim, jnp.int32)
  away = mxfp4.round_elements(scaled, zero, mxfp4.Rules())
  other = mxfp4.round_elements(scaled, zero, mxfp4.Rules(tie_rule="even"))
  return jnp.where(even, other, away)


_round.defvjp(
  lambda scaled, even: (_round(scaled, even), None),
  lambda residual, gradient: (gradient, None),
)


def relaxed(
  weight: jax.Array, learned: LearnedScales, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> jax.Array:
  """Decodes weights differentiably in the learned scales, float32 `[blocks, 32, rows]`.

  Gradients pass straight through rounding and the ceiling of the exponent; a clipped
  value has none. Of `rules`, only the tie rule matters.
  """
  exponent, bounded = _exponent(weight, learned.factor, rules)
  # A zero block has no scale: dividing by one leaves it zero.
  empty = exponent <= -127
  fixed = float_bits.power_of_two(jnp.where(empty, 0, exponent))
  # The ratio equals one, so the scale is an exact power of two with slope S / m.
  scale = (fixed * (bounded / jax.lax.stop_gradient(bounded)))[..., None, :]
  scaled = jnp.clip(weight / (scale * _divisors(learned.logits)), -6.0, 6.0)
  return _round(scaled, jnp.asarray(rules.tie_rule == "even")) * scale


def quantize_weight(
  weight: jax.Array, learned: LearnedScales, rules: mxfp4.Rules = mxfp4.PAPER_RULES
) -> gptq.Reconstruction:
  """Returns the legal codes for the learned scales; the divisors are not stored."""
  exponent, _ = _exponent(weight, learned.factor, rules)
  scale = float_bits.power_of_two(exponent)[..., None, :]
  divided = weight / _divisors(learned.logits)
  rules = _rules(rules)
  codes, decoded = gptq.round_value(divided, exponent[..., None, :], scale, rules)
  return gptq.Reconstruction(codes, exponent, decoded)
