"""BATQuant + GPTQ: a learned Kronecker map and learned clipping of every block.

The original maps inputs by P = diag(P_1 .. P_NB) with P_i = B_i (x) A, a shared 8 x 8
and a private 4 x 4 factor, clips both operands to learned shares of each block's range,
and trains with AdamW on text that the model wrote. The paper uses the common C4
calibration, 160 steps for each transformation group, then one strict GPTQ.

The structure follows the publication. Training follows its parent code base, FlatQuant,
and is an assumption: linears that read one tensor share a map; the loss is the squared
error of their outputs, with inputs and targets from the float model, divided by its own
value at every step; the learning rate is 2e-3 on factors and ten times that on clipping
logits, with cosine decay to a thousandth; factors start at the identity, shares at
sigmoid(4); rounding is straight-through, exponents are constants. Position p of a block
is (p // 8, p % 8). Trained weight clipping is applied before GPTQ; activation clipping
stays online. The condition number of P is recorded and bounded. Published scores are
about RTN's, so expect no more.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from mxjax.calibration import gradients
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.methods.gptq import Gptq
from mxjax.methods.options import Count, Positive
from mxjax.methods.program import Realization, Shaping
from mxjax.numerics import lapack, mxfp4, straight_through
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.realization.activation_quantizers import Clipped, clip_blocks
from mxjax.numerics.shaping import input_maps

FACTOR_RATE = 2e-3
CLIP_RATE = 10 * FACTOR_RATE
FINAL_SHARE = 1e-3
MAX_CONDITION = 1e4


class Learnable(NamedTuple):
  """Trained parameters of the linears on one tensor; all float32.

  A is `shared` `[8, 8]`, B is `private` `[blocks, 4, 4]`; `inputs` `[2, blocks]` are
  logits of the kept share of minimum and maximum, and `weights` are the same by linear
  for every output row, `[2, blocks, out_features]`.
  """

  shared: jax.Array
  private: jax.Array
  inputs: jax.Array
  weights: dict[str, jax.Array]


class Trained(NamedTuple):
  """What linears that read one tensor share, and the record of its training."""

  learnable: Learnable
  record: Mapping[str, Any]


class Operators(NamedTuple):
  """The learned parameters, and the inverses of the factors."""

  learnable: Learnable
  shared_inverse: jax.Array
  private_inverse: jax.Array


@execution.jit()
def _operators(learnable: Learnable) -> Operators:
  """Inverts the small factors, apart from the products (rule 2 of `execution`)."""
  shared = jnp.linalg.inv(learnable.shared)
  return Operators(
    learnable, shared, jnp.linalg.inv(lapack.after(learnable.private, shared))
  )


@execution.jit(static_argnames="rules")
def _loss_gradient(
  operators: Operators,
  weights: Mapping[str, jax.Array],
  x: jax.Array,
  rules: mxfp4.Rules,
) -> tuple[jax.Array, Operators]:
  """Computes the outputs' relative squared error and the gradient of its logarithm."""
  flat = lambda blocks: blocks.reshape(-1, blocks.shape[-1])
  outputs = lambda a, b: jnp.einsum("dn,dm->nm", flat(a), flat(b), precision=HIGHEST)
  # Targets are the outputs of the float weights on the float model's inputs.
  exact = {name: outputs(x, weight) for name, weight in weights.items()}
  signal = sum(jnp.square(y).sum() for y in exact.values())

  def loss(operators: Operators) -> jax.Array:
    learned = operators.learnable
    mapped = input_maps.Kronecker(learned.shared, learned.private).apply(x)
    clipped = clip_blocks(mapped, *jax.nn.sigmoid(learned.inputs))
    operand = straight_through.round_blocks(clipped, rules)
    total = jnp.float32(0)
    for name, weight in weights.items():
      fold = input_maps.Kronecker(*(inverse.mT for inverse in operators[1:]))
      folded = clip_blocks(fold.apply(weight), *jax.nn.sigmoid(learned.weights[name]))
      decoded = straight_through.round_blocks(folded, rules)
      total += jnp.square(outputs(operand, decoded) - exact[name]).sum()
    return total / jnp.where(signal > 0, signal, 1.0)

  # Factors and inverses are variables of their own here; `_update` joins them.
  value, gradient = jax.value_and_grad(loss)(operators)
  # Dividing the gradient by the loss makes steps independent of the loss scale.
  return value, jax.tree.map(lambda g: g / jnp.maximum(value, 1e-30), gradient)


def _optimizer(steps: int) -> optax.GradientTransformation:
  # Optax refuses a schedule of no steps. The decay is AdamW's default in PyTorch, where
  # FlatQuant is written; that of optax is another.
  adam = lambda rate: optax.adamw(
    optax.cosine_decay_schedule(rate, max(steps, 1), FINAL_SHARE), weight_decay=0.01
  )
  label: Any = Learnable  # Holds names of optimizers here, in place of arrays.
  clips = lambda tree: dict.fromkeys(tree.weights, "clip")
  labels = lambda tree: label("factor", "factor", "clip", clips(tree))
  return optax.multi_transform(
    {"factor": adam(FACTOR_RATE), "clip": adam(CLIP_RATE)}, labels
  )


@execution.jit(static_argnames="steps")
def _update(
  learnable: Any, state: Any, gradient: Operators, steps: int
) -> tuple[Any, Any]:
  """Chains the gradient through the inverses and takes one optimizer step."""
  pullback = jax.vjp(_operators, learnable)[1]
  with jax.numpy_dtype_promotion("standard"):  # Optax mixes its counter with floats.
    updates, state = _optimizer(steps).update(pullback(gradient)[0], state, learnable)
  return optax.apply_updates(learnable, updates), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatQuant(Gptq):
  """Learned Kronecker maps and clipping + GPTQ.

  Attributes:
    steps: Optimizer steps for each group of linears.
    batch: Calibration sequences of a step, in calibration order.
    tokens: Tokens of each sequence, evenly spaced; all when None.
    clip_logit: Initial logit of every kept share.
  """

  name: str = "batquant"
  needs_a4 = "its maps and clipping are learned through the rounding of inputs"
  steps: Count = 160
  batch: Positive = 4
  tokens: Positive | None = None
  clip_logit: float = 4.0

  @override
  def shape_group(
    self, weights: Mapping[str, jax.Array], inputs: LinearInputs
  ) -> Trained:
    """Trains the map and the shares."""
    clips = lambda *shape: jnp.full((2, *shape), self.clip_logit, jnp.float32)
    # Hooks run in a float64 scope, in which the factors and Optax's state would be
    # float64.
    with jax.enable_x64(False):
      learnable: Any = Learnable(
        shared=jnp.eye(8),
        private=jnp.tile(jnp.eye(4)[None], (inputs.blocks, 1, 1)),
        inputs=clips(inputs.blocks),
        weights={n: clips(inputs.blocks, w.shape[-1]) for n, w in weights.items()},
      )
      state = _optimizer(self.steps).init(learnable)
      first = last = math.nan
      count = min(self.tokens or inputs.length, inputs.length)
      places = np.arange(count) * inputs.length // count
      batches = gradients.batches(inputs.sequences, self.batch, self.steps)
      for step, batch in enumerate(batches):
        parts = [inputs.sequence(index)[..., places] for index in batch]
        x = execution.block_on_cpu(jnp.concatenate(parts, axis=-1))
        loss, gradient = _loss_gradient(
          _operators(learnable), dict(weights), x, inputs.rules
        )
        learnable, state = _update(learnable, state, gradient, self.steps)
        first, last = (float(loss) if step == 0 else first), float(loss)
      factors = learnable.shared, learnable.private
      # A Kronecker product has the product of its factors' condition numbers. Of the
      # private factors the worst counts.
      condition = math.prod(
        float(np.linalg.cond(np.asarray(factor, np.float64)).max())
        for factor in factors
      )
    # NaN is refused as well.
    if not condition <= MAX_CONDITION:
      raise ValueRefusal(
        self.name,
        expected=f"a learned map of condition number at most {MAX_CONDITION:g}",
        got=f"{condition:.3g}",
        mend="train fewer steps or on more tokens",
      )
    record = {"learning_losses": [first, last], "map_condition": condition}
    return Trained(learnable, record)

  @override
  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    del weight
    learned, record = inputs.group
    return Shaping(input_maps.Kronecker(learned.shared, learned.private), record)

  @override
  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> Realization:
    """Clips the folded weights, then runs GPTQ."""
    learned = inputs.group.learnable
    low, high = jax.nn.sigmoid(learned.weights[inputs.name])
    clipped = execution.block_on_cpu(clip_blocks(weight, low, high))
    made = super().quantize_weight(clipped, inputs, input_map)
    return made._replace(rounding=Clipped(*jax.nn.sigmoid(learned.inputs)))

  @override
  def stored_map(self, blocks: int) -> input_maps.Kronecker:
    factor: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return input_maps.Kronecker(factor(8, 8), factor(blocks, 4, 4))

  @override
  def stored_rounding(self, blocks: int) -> Clipped:
    share: Any = jax.ShapeDtypeStruct((blocks,), jnp.float32)
    return Clipped(share, share)


BATQUANT = BatQuant()
"""The paper's baseline: 160 steps on batches of four sequences."""
