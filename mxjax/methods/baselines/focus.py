"""FOCUS: learned block scales and codes, distilled end to end; no map, no GPTQ.

With frozen weights, the original learns a factor on every block's maximum and four
divisors that push codes outward and leave no trace at run time (`learned_scales`). Its
loss is the divergence from the float model on its 1000 likeliest tokens: AdamW without
decay, one epoch, global batch 32, activations quantized dynamically with nothing
learned, rceil scales for both operands.

Under our contract weights keep the method's rceil scales, which are legal exponents;
activations (floor by default) and ties follow the contract. With 128 sequences an epoch
is four steps, so compare with RTN under rceil before crediting the learning.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from mxjax import compilation
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
  replace_weights,
  targets,
)
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.layers.linear import StraightThrough
from mxjax.methods.options import Count, Positive
from mxjax.methods.program import Learning, Prepared, Program, Realization
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Contract
from mxjax.numerics.realization import learned_scales
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.realization.learned_scales import LearnedScales
from mxjax.numerics.shaping.input_maps import InputMap

# The original's rates, which stay constant, and its number of tokens.
FACTOR_RATE = 2e-2
LOGIT_RATE = 5e-2
TOP_TOKENS = 1000


@dataclasses.dataclass(frozen=True)
class _Distillation(gradients.Objective):
  """KL divergence from the float model over its `top` likeliest tokens."""

  top: int

  @override
  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Relaxes W4 weights, and rounds A4 straight-through."""
    leaves = {}
    for path, learned in own.items():
      sublayer, name = path.split("/")
      blocks = mxfp4.to_blocks(layer[sublayer][name]["weight"].astype(jnp.float32))
      relaxed = mxfp4.from_blocks(learned_scales.relaxed(blocks, learned, self.rules))
      leaves[sublayer, name] = StraightThrough(relaxed, self.rules)
    return self.model.layer(replace_weights(layer, leaves), hidden)

  def loss(
    self, shared: Any, hidden: jax.Array, outer: Params, example: gradients.Example
  ) -> jax.Array:
    """Computes the mean over tokens of KL(teacher || student) on the top k tokens."""
    assert example.teacher is not None
    length = example.ids.shape[1]

    def chunk(states: jax.Array, targets: jax.Array) -> jax.Array:
      wanted = jax.lax.stop_gradient(self.model.logits(outer, targets[None])[0])
      top, index = jax.lax.top_k(wanted, min(self.top, wanted.shape[-1]))
      logits = self.model.logits(outer, states[None])[0]
      # Both distributions are normalized over these tokens alone, as in the original.
      student = jax.nn.log_softmax(jnp.take_along_axis(logits, index, -1))
      target = jax.nn.log_softmax(top)
      return (jnp.exp(target) * (target - student)).sum(-1)

    weights = jnp.ones(length, jnp.float32)
    arrays = hidden[0], example.teacher[0]
    return gradients.chunked_mean(chunk, length, *arrays, weights=weights)


def _optimizer() -> optax.GradientTransformation:
  label: Any = LearnedScales  # Holds names of optimizers here, in place of arrays.
  labels = lambda tree: jax.tree.map(
    lambda _: label("factor", "logits"),
    tree,
    is_leaf=lambda node: isinstance(node, LearnedScales),
  )
  adam = lambda rate: optax.adamw(rate, weight_decay=0.0)
  return optax.multi_transform(
    {"factor": adam(FACTOR_RATE), "logits": adam(LOGIT_RATE)}, labels
  )


@execution.jit()
def _update(learned: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
  with jax.numpy_dtype_promotion("standard"):  # Optax mixes its counter with floats.
    updates, state = _optimizer().update(gradient, state, learned)
  learned = optax.apply_updates(learned, updates)
  is_scales = lambda node: isinstance(node, LearnedScales)
  # Below the bound a factor would have no gradient and never come back.
  bounded = lambda node: dataclasses.replace(
    node, factor=jnp.maximum(node.factor, learned_scales.MIN_FACTOR)
  )
  return jax.tree.map(bounded, learned, is_leaf=is_scales), state


_round = compilation.jit(static_argnums=2)(learned_scales.quantize_weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Focus(Program):
  """Learned scales, distilled end to end.

  Attributes:
    epochs: Passes over the calibration set.
    batch: Sequences of an optimizer step.
    top: Number of likeliest teacher tokens in the divergence.
    divisor_logit: Initial logit of every divisor; infinity means no divisor.
  """

  name: str = "focus"
  needs_a4 = "its scales are learned through the rounding of inputs"
  epochs: Count = 1
  batch: Positive = 32
  top: Positive = TOP_TOKENS
  divisor_logit: float = learned_scales.DIVISOR_LOGIT

  @override
  def prepare(
    self, params: Params, calib: Calibration, contract: Contract
  ) -> Learning[Prepared]:
    """Learns the scales, a step of AdamW at a time, and keeps the params."""
    model = calib.model
    objective = _Distillation(model, contract.rules, self.top)
    # Whole batches: what is left of an epoch begins the next one.
    size = min(self.batch, len(calib.tokens))
    steps = self.epochs * (len(calib.tokens) // size)
    batches = gradients.batches(len(calib.tokens), self.batch, steps)

    def start() -> tuple[Any, Any]:
      own: Any = [
        self._initial(params[model.layer_name(index)], model, contract)
        for index in range(model.num_layers)
      ]
      return own, _optimizer().init(own)

    def step(now: Any, losses: Sequence[float]) -> tuple[Any, float]:
      own, state = now
      batch = batches[len(losses)]
      rows = [jnp.asarray(calib.tokens[index : index + 1]) for index in batch]
      teachers = [streams.final_hiddens(model, params, [row])[0] for row in rows]
      examples = [gradients.Example(*pair) for pair in zip(rows, teachers, strict=True)]
      result = gradients.gradients(objective, params, None, own, examples)
      return _update(own, state, result.own), result.shown

    def finish(now: Any, losses: list[float]) -> Prepared:
      learned = {
        f"{model.layer_name(index)}/{path}": scales
        for index, layer in enumerate(now[0])
        for path, scales in layer.items()
      }
      return Prepared(
        params, learned, {"losses": losses, "batch": size, "steps": steps}
      )

    return Learning(
      start=start,
      steps=steps,
      step=step,
      finish=finish,
      sequences=size,
      mend="take fewer epochs, or larger batches",
    )

  def _initial(
    self, layer: Params, model: CausalLanguageModel, contract: Contract
  ) -> dict[str, LearnedScales]:
    scales = {}
    for sublayer, name in targets(model, contract):
      rows, width = layer[sublayer][name]["weight"].shape
      blocks = width // contract.block_size
      first = learned_scales.initial(blocks, rows, self.divisor_logit)
      scales[f"{sublayer}/{name}"] = first
    return scales

  @override
  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realization:
    """Encodes with the learned scales."""
    del input_map
    factor = inputs.learned.factor
    record = {"learned_factor": [float(factor.min()), float(factor.max())]}
    codes = _round(weight, inputs.learned, inputs.rules)
    return Realization(codes, Nearest(), record=record)


FOCUS = Focus()
