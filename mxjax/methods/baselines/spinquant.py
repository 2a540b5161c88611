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
from collections.abc import Callable, Sequence
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
from mxjax.methods.program import Learning, Prepared
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
  def prepare(
    self, params: Params, calib: Calibration, contract: Contract
  ) -> Learning[Prepared]:
    """Learns the rotations, a Cayley step at a time, and then fuses them."""
    model, first = calib.model, params[calib.model.layer_name(0)]
    rotated, head = recipe(first), _head_dim(model, params)
    width = first["self_attn"]["v_proj"]["weight"].shape[-1]
    # R1 has the seed itself, and the R2 of every layer one of its own.
    r1, kind = orthogonal.random_rotation(width, self.seed)
    has_r1 = rotated == "R1 and R2"

    def start() -> tuple[Any, Any]:
      narrow = lambda matrix: jnp.asarray(matrix, jnp.float32)
      seeds = range(self.seed + 1, self.seed + 1 + model.num_layers)
      own = [narrow(orthogonal.random_rotation(head, seed)[0]) for seed in seeds]
      # Without R1 there is None in its place, which has no leaf.
      matrices = (narrow(r1) if has_r1 else None), own
      return matrices, jax.tree.map(jnp.zeros_like, matrices)

    objective = _QuantizedLoss(model, contract.rules, contract.targets)
    batches = gradients.batches(len(calib.tokens), self.batch, self.steps)
    # Drawn beforehand, so that a resumed run renews what an undisturbed one does.
    rng = np.random.default_rng(self.seed)
    shape = self.steps, has_r1 + model.num_layers
    is_renewed = rng.integers(orthogonal.RENEWAL, size=shape) == 0

    def step(now: Any, losses: Sequence[float]) -> tuple[Any, float]:
      (shared, own), speeds = now
      number = len(losses)
      examples = [
        gradients.Example(jnp.asarray(calib.tokens[index : index + 1]))
        for index in batches[number]
      ]
      result = gradients.gradients(objective, params, shared, own, examples)
      rate = jnp.float32(self.rate * (1 - number / self.steps))
      moved, structure = [], jax.tree.structure(now[0])
      trees = now[0], speeds, (result.shared, result.own)
      for matrix, speed, slope, renews in zip(
        *map(jax.tree.leaves, trees), is_renewed[number], strict=True
      ):
        if renews:
          matrix = execution.block_on_cpu(orthogonal.renewed(matrix))
        moved.append(
          execution.block_on_cpu(orthogonal.cayley_step(matrix, speed, slope, rate))
        )
      both = [jax.tree.unflatten(structure, part) for part in zip(*moved, strict=True)]
      return tuple(both), result.shown

    def finish(now: Any, losses: list[float]) -> Prepared:
      record = {
        "recipe": rotated,
        "first_rotation": kind if has_r1 else None,
        "losses": losses,
        "batch": min(self.batch, len(calib.tokens)),
      }
      return Prepared(rotate_model(model, params, *now[0]), record=record)

    return Learning(
      start=start,
      steps=self.steps,
      step=step,
      finish=finish,
      sequences=min(self.batch, len(calib.tokens)),
      mend="lower the rate, such as spinquant:rate=0.5",
    )


def _head_dim(model: CausalLanguageModel, params: Params) -> int:
  """Reads the head dimension from the value tap's shape, computing nothing."""
  ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  layer = params[model.layer_name(0)]

  def values(ids: jax.Array) -> jax.Array:
    hidden = model.embed(outer_params(model, params), ids)
    return model.layer_with_taps(layer, hidden)[1]["value"]

  return jax.eval_shape(values, ids).shape[-1]


SPINQUANT = SpinQuant()
