"""SpinQuant + GPTQ: learned rotations fused into the float model, then GPTQ.

The original folds the norms' gains into the following linears, rotates the residual
stream by R1 and each layer's values by R2, and learns both on the loss with quantized
activations by Cayley SGD (100 steps, batch 8, rate 1.5); further rotations run online.
Under our contract everything is fused, nothing runs online, and one strict GPTQ pass
follows on the rotated model's own inputs. The head gets its own matrix because its
rotation differs from the embedding's.

R1 commutes with an RMS norm only without gain, so it needs norms in front of the
linears. Where norms follow them (OLMo-2, Gemma), only R2 is used, as in the paper's
port; the record names the recipe.

Assumptions: training also fake-quantizes weights by RTN; exponents are constants of the
backward pass; the rate falls linearly to zero; rotations start as Hadamards with random
signs, or as random orthogonal matrices for sizes without a known Hadamard.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from mxjax.calibration import gradients
from mxjax.calibration.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.calibration.streams import outer_params
from mxjax.devices import execution
from mxjax.layers.linear import StraightThrough
from mxjax.methods.gptq import Gptq
from mxjax.methods.options import Count, Positive, Share
from mxjax.methods.program import Prepared
from mxjax.numerics import precision, straight_through
from mxjax.numerics.contract import Contract
from mxjax.numerics.precision import HIGHEST
from mxjax.numerics.shaping import orthogonal

READERS = {
  "input_layernorm": ("self_attn", ("q_proj", "k_proj", "v_proj")),
  "post_attention_layernorm": ("mlp", ("gate_proj", "up_proj")),
}
"""The linears behind each norm of a pre-norm layer, which absorb its gain."""
WRITERS = (("self_attn", "o_proj"), ("mlp", "down_proj"))
"""The linears that write to the residual stream."""


def recipe(layer: Params) -> str:
  """Chooses the rotations that a layer allows: R1 needs norms before its linears."""
  norms = {name for name in layer if name.endswith("layernorm")}
  return "R1 and R2" if norms == set(READERS) else "R2 only"


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
  return jnp.einsum("ij,jk->ik", left, right, precision=HIGHEST)


def rotate_layer(layer: Params, r1: jax.Array | None, r2: jax.Array) -> dict[str, Any]:
  """Fuses rotations into a layer so that it maps rotated streams as before.

  R1 of the model is `[d, d]`, or None where it cannot be fused; R2 of this layer is
  `[head_dim, head_dim]`. The new weights and biases have their dtype. With R1, the
  norms' gains become one.
  """
  head, new = r2.shape[0], dict(layer)

  def change(
    sublayer: str,
    name: str,
    weight: Callable[[jax.Array], jax.Array],
    bias: Callable[[jax.Array], jax.Array] | None = None,
  ) -> None:
    linear = dict(new[sublayer][name])
    linear["weight"] = weight(linear["weight"].astype(r2.dtype))
    if bias is not None and "bias" in linear:
      linear["bias"] = bias(linear["bias"].astype(r2.dtype))
    new[sublayer] = {**new[sublayer], name: linear}

  if r1 is not None:
    for norm, (sublayer, names) in READERS.items():
      gain = layer[norm]["weight"]
      row = gain.astype(r2.dtype)[None, :]
      for name in names:
        # The gain scales inputs, so it goes into the columns, and before the rotation.
        change(sublayer, name, lambda w, row=row: _product(w * row, r1))
      new[norm] = {**layer[norm], "weight": jnp.ones_like(gain)}
    for sublayer, name in WRITERS:
      change(
        sublayer, name, lambda w: _product(r1.T, w), lambda b: _product(b[None], r1)[0]
      )
  # Rows of v_proj are [key-value head, coordinate], and columns of o_proj [head,
  # coordinate]: each head reads values of its group, which are turned by the one R2.
  turn = lambda axes, x, *shape: jnp.einsum(
    axes, x.reshape(shape), r2, precision=HIGHEST
  ).reshape(x.shape)
  change(
    "self_attn",
    "v_proj",
    lambda w: turn("kid,ij->kjd", w, -1, head, w.shape[-1]),
    lambda b: turn("ij,jk->ik", b, -1, head),
  )
  change("self_attn", "o_proj", lambda w: turn("dhi,ij->dhj", w, len(w), -1, head))
  return new


def rotate_model(
  model: CausalLanguageModel, params: Params, r1: Any, r2: Any
) -> dict[str, Any]:
  """Fuses rotations into the whole model; multiplies in float64, returns float32.

  `r1` is `[d, d]` or None; `r2` is `[layers, head_dim, head_dim]`.
  """
  narrow = lambda array: array.astype(jnp.float32)
  with precision.float64_scope():
    wide = lambda array: jnp.asarray(array).astype(jnp.float64)
    residual = None if r1 is None else wide(r1)
    new: dict[str, Any] = outer_params(model, params)
    if residual is not None:
      embedding = params["embed_tokens"]["weight"]
      head = params["lm_head"]["weight"] if "lm_head" in params else embedding
      gain = params["norm"]["weight"]
      rotated = _product(wide(embedding), residual)
      new["embed_tokens"] = {**params["embed_tokens"], "weight": narrow(rotated)}
      # The head reads the last norm, so it takes that gain as the other readers do
      # theirs.
      read = _product(wide(head) * wide(gain)[None, :], residual)
      new["lm_head"] = {**params.get("lm_head", {}), "weight": narrow(read)}
      new["norm"] = {**params["norm"], "weight": jnp.ones_like(gain)}
    for index in range(model.num_layers):
      name = model.layer_name(index)
      layer = rotate_layer(params[name], residual, wide(r2[index]))
      new[name] = execution.block_on_cpu(
        jax.tree.map(lambda a: narrow(a) if a.dtype == jnp.float64 else a, layer)
      )
  return new


@dataclasses.dataclass(frozen=True)
class _QuantizedLoss(gradients.Objective):
  """Next-token loss of the rotated model with fake-quantized operands."""

  targets: tuple[str, ...]

  def embed(self, shared: Any, outer: Params, ids: jax.Array) -> jax.Array:
    """Embeds the tokens and rotates the rows, which equals rotating the table."""
    hidden = self.model.embed(outer, ids)
    if shared is None:
      return hidden
    return jnp.matmul(hidden, shared.astype(hidden.dtype), precision=HIGHEST)

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs the rotated layer with W4 by RTN and A4, both straight-through."""
    rotated = rotate_layer(layer, shared, own)
    leaves = {}
    for sublayer, name in self.model.projection_taps:
      if name in self.targets:
        weight = rotated[sublayer][name]["weight"].astype(jnp.float32)
        rounded = straight_through.round_rows(weight, self.rules)
        leaves[sublayer, name] = StraightThrough(rounded, self.rules)
    return self.model.layer(replace_weights(rotated, leaves), hidden)

  def loss(
    self, shared: Any, hidden: jax.Array, outer: Params, example: gradients.Example
  ) -> jax.Array:
    """Applies the head to unrotated hidden states; the norm commutes with rotations."""
    if shared is not None:
      # Rotated back instead of fused into norm and head, which are the model's own
      # here.
      back = shared.T.astype(hidden.dtype)
      hidden = jnp.matmul(hidden, back, precision=HIGHEST)
    length = example.ids.shape[1]
    following = jnp.roll(example.ids[0], -1)
    # The roll gives the last token the first one to follow.
    weights = (jnp.arange(length) < length - 1).astype(jnp.float32)

    def chunk(states: jax.Array, wanted: jax.Array) -> jax.Array:
      logits = self.model.logits(outer, states[None])[0]
      target = jnp.take_along_axis(logits, wanted[:, None], axis=-1)[:, 0]
      return jax.nn.logsumexp(logits, axis=-1) - target

    return gradients.chunked_mean(chunk, length, hidden[0], following, weights=weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpinQuant(Gptq):
  """Fused learned rotations + GPTQ.

  Attributes:
    steps: Cayley steps; 0 keeps the random rotations (QuaRot, fused).
    batch: Calibration sequences of a step, in calibration order.
    rate: Initial learning rate; it falls linearly to zero.
    seed: Seed of the initial rotations and of renewals.
  """

  name: str = "spinquant"
  needs_a4 = "its rotations are learned through the rounding of inputs"
  steps: Count = 100
  batch: Positive = 8
  rate: Share = 1.5
  seed: Count = 0

  rotates_model: ClassVar[bool] = True

  @override
  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    """Learns the rotations and fuses them."""
    model, first = calib.model, params[calib.model.layer_name(0)]
    rotated, head = recipe(first), _head_dim(model, params)
    width = first["self_attn"]["v_proj"]["weight"].shape[-1]
    # R1 has the seed itself, and the R2 of every layer one of its own.
    r1, kind = orthogonal.random_rotation(width, self.seed)
    own = [
      jnp.asarray(orthogonal.random_rotation(head, seed)[0], jnp.float32)
      for seed in range(self.seed + 1, self.seed + 1 + model.num_layers)
    ]
    shared = jnp.asarray(r1, jnp.float32) if rotated == "R1 and R2" else None
    shared, own, losses = self._learn(params, calib, contract, (shared, own))
    record = {
      "recipe": rotated,
      "first_rotation": kind if shared is not None else None,
      "losses": losses,
      "batch": min(self.batch, len(calib.tokens)),
    }
    return Prepared(rotate_model(model, params, shared, own), record=record)

  def _learn(
    self, params: Params, calib: Calibration, contract: Contract, start: Any
  ) -> tuple[jax.Array | None, list[jax.Array], list[float]]:
    """Returns R1, the R2 of the layers, and the loss before every step."""
    objective = _QuantizedLoss(calib.model, contract.rules, contract.targets)
    rng = np.random.default_rng(self.seed)
    matrices, treedef = jax.tree.flatten(start)
    speeds, losses = [jnp.zeros_like(matrix) for matrix in matrices], []
    batches = gradients.batches(len(calib.tokens), self.batch, self.steps)
    for step, batch in enumerate(batches):
      examples = [
        gradients.Example(jnp.asarray(calib.tokens[index : index + 1]))
        for index in batch
      ]
      shared, own = jax.tree.unflatten(treedef, matrices)
      result = gradients.gradients(objective, params, shared, own, examples)
      losses.append(result.shown)
      rate = jnp.float32(self.rate * (1 - step / self.steps))
      # In the order of `matrices`: without R1 both have None there, which has no leaf.
      slopes = jax.tree.leaves((result.shared, result.own))
      for number, slope in enumerate(slopes):
        matrix = matrices[number]
        if rng.integers(orthogonal.RENEWAL) == 0:
          matrix = execution.block_on_cpu(orthogonal.renewed(matrix))
        matrices[number], speeds[number] = execution.block_on_cpu(
          orthogonal.cayley_step(matrix, speeds[number], slope, rate)
        )
    return *jax.tree.unflatten(treedef, matrices), losses


def _head_dim(model: CausalLanguageModel, params: Params) -> int:
  """Reads the head dimension from the value tap's shape, computing nothing."""
  ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  layer = params[model.layer_name(0)]

  def values(ids: jax.Array) -> jax.Array:
    hidden = model.embed(outer_params(model, params), ids)
    return model.layer_with_taps(layer, hidden)[1]["value"]

  return jax.eval_shape(values, ids).shape[-1]


SPINQUANT = SpinQuant()
