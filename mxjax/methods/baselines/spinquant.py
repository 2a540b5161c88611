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
backward pass; the rate falls linearly to zero; tokens are the common calibration set in
its order; rotations start as Hadamards with random signs, or as random orthogonal
matrices for sizes without a known Hadamard.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
from mxjax.methods.program import Prepared
from mxjax.numerics import mxfp4, precision, straight_through
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

Recipe = Literal["R1 and R2", "R2 only"]


class Rotations(NamedTuple):
  """R1 of the model and R2 of one layer; R1 is None where it cannot be fused."""

  residual: jax.Array | None
  value: jax.Array


def recipe(layer: Params) -> Recipe:
  """Chooses the rotations that a layer allows: R1 needs norms before its linears."""
  norms = {name for name in layer if name.endswith("layernorm")}
  return "R1 and R2" if norms == set(READERS) else "R2 only"


def _product(*matrices: jax.Array) -> jax.Array:
  return functools.reduce(
    lambda a, b: jnp.einsum("ij,jk->ik", a, b, precision=HIGHEST), matrices
  )


def rotate_layer(layer: Params, rotations: Rotations) -> dict[str, Any]:
  """Fuses rotations into a layer so that it maps rotated streams as before.

  R1 is `[d, d]` or None, R2 `[head_dim, head_dim]`; the new weights and biases have
  their dtype. With R1, the norms' gains become one.
  """
  r1, r2 = rotations
  dtype, head = r2.dtype, r2.shape[0]
  new: dict[str, Any] = {
    name: dict(part) if isinstance(part, dict) else part for name, part in layer.items()
  }

  def put(block: str, name: str, key: str, value: jax.Array) -> None:
    new[block][name] = {**new[block][name], key: value}

  weight_of = lambda block, name: new[block][name]["weight"].astype(dtype)
  if r1 is not None:
    for norm, (block, names) in READERS.items():
      gain = layer[norm]["weight"].astype(dtype)
      for name in names:
        scaled = weight_of(block, name) * gain[None, :]
        put(block, name, "weight", _product(scaled, r1))
      new[norm] = {**layer[norm], "weight": jnp.ones_like(layer[norm]["weight"])}
    for block, name in WRITERS:
      put(block, name, "weight", _product(r1.T, weight_of(block, name)))
      if "bias" in new[block][name]:
        bias = new[block][name]["bias"].astype(dtype)
        put(block, name, "bias", _product(bias[None], r1)[0])
  value = weight_of("self_attn", "v_proj").reshape(-1, head, layer_width(layer))
  turned = jnp.einsum("kid,ij->kjd", value, r2, precision=HIGHEST)
  put("self_attn", "v_proj", "weight", turned.reshape(-1, layer_width(layer)))
  if "bias" in new["self_attn"]["v_proj"]:
    bias = new["self_attn"]["v_proj"]["bias"].astype(dtype).reshape(-1, head)
    put("self_attn", "v_proj", "bias", _product(bias, r2).reshape(-1))
  output = weight_of("self_attn", "o_proj")
  heads = output.reshape(output.shape[0], -1, head)
  turned = jnp.einsum("dhi,ij->dhj", heads, r2, precision=HIGHEST)
  put("self_attn", "o_proj", "weight", turned.reshape(output.shape))
  return new


def layer_width(layer: Params) -> int:
  """Reads the width of the residual stream from a projection's shape."""
  return layer["self_attn"]["v_proj"]["weight"].shape[-1]


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
    new: dict[str, Any] = outer_params(params)
    if residual is not None:
      embedding = params["embed_tokens"]["weight"]
      head = params["lm_head"]["weight"] if "lm_head" in params else embedding
      gain = params["norm"]["weight"]
      rotated = _product(wide(embedding), residual)
      new["embed_tokens"] = {**params["embed_tokens"], "weight": narrow(rotated)}
      read = _product(wide(head) * wide(gain)[None, :], residual)
      new["lm_head"] = {**params.get("lm_head", {}), "weight": narrow(read)}
      new["norm"] = {**params["norm"], "weight": jnp.ones_like(gain)}
    for index in range(model.num_layers):
      name = model.layer_name(index)
      layer = rotate_layer(params[name], Rotations(residual, wide(r2[index])))
      new[name] = execution.block_on_cpu(
        jax.tree.map(lambda a: narrow(a) if a.dtype == jnp.float64 else a, layer)
      )
  return new


@dataclasses.dataclass(frozen=True)
class _QuantizedLoss:
  """Next-token loss of the rotated model with fake-quantized operands."""

  model: CausalLanguageModel
  rules: mxfp4.Rules
  targets: tuple[str, ...]

  def embed(self, shared: Any, outer: Params, ids: jax.Array) -> jax.Array:
    """Embeds the tokens and rotates the rows, which equals rotating the table."""
    hidden = self.model.embed(outer, ids)
    if shared is None:
      return hidden
    return jnp.matmul(hidden, shared.astype(hidden.dtype), precision=HIGHEST)

  def layer(self, shared: Any, own: Any, hidden: jax.Array, layer: Params) -> jax.Array:
    """Runs the rotated layer with W4 by RTN and A4, both straight-through."""
    rotated = rotate_layer(layer, Rotations(shared, own))
    leaves = {}
    for block, name in self.model.projection_taps:
      if name in self.targets:
        weight = rotated[block][name]["weight"].astype(jnp.float32)
        rounded = straight_through.round_rows(weight, self.rules)
        leaves[block, name] = StraightThrough(rounded, self.rules)
    return self.model.layer(replace_weights(rotated, leaves), hidden)

  def loss(
    self,
    shared: Any,
    hidden: jax.Array,
    outer: Params,
    ids: jax.Array,
    teacher: jax.Array | None,
  ) -> jax.Array:
    """Applies the head to unrotated hidden states; the norm commutes with rotations."""
    del teacher
    if shared is not None:
      back = shared.T.astype(hidden.dtype)
      hidden = jnp.matmul(hidden, back, precision=HIGHEST)
    length = ids.shape[1]
    following = jnp.roll(ids[0], -1)
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
  steps: int = 100
  batch: int = 8
  rate: float = 1.5
  seed: int = 0

  def prepare(self, params: Params, calib: Calibration, contract: Contract) -> Prepared:
    """See `Program.prepare`; learns the rotations and fuses them."""
    model = calib.model
    first = params[model.layer_name(0)]
    rotated = recipe(first)
    width, head = layer_width(first), _head_dim(model, params)
    r1, kind = orthogonal.random_rotation(width, self.seed)
    r2 = [
      orthogonal.random_rotation(head, self.seed + 1 + index)[0]
      for index in range(model.num_layers)
    ]
    shared = jnp.asarray(r1, jnp.float32) if rotated == "R1 and R2" else None
    own = [jnp.asarray(matrix, jnp.float32) for matrix in r2]
    shared, own, losses = self._learn(params, calib, contract, shared, own)
    record = {
      "recipe": rotated,
      "first_rotation": kind if shared is not None else None,
      "losses": losses,
      "batch": min(self.batch, len(calib.tokens)),
    }
    return Prepared(rotate_model(model, params, shared, own), record=record)

  def _learn(
    self,
    params: Params,
    calib: Calibration,
    contract: Contract,
    shared: jax.Array | None,
    own: list[jax.Array],
  ) -> tuple[jax.Array | None, list[jax.Array], list[float]]:
    objective = _QuantizedLoss(calib.model, contract.rules, contract.targets)
    rng = np.random.default_rng(self.seed)
    velocity = jax.tree.map(jnp.zeros_like, (shared, own))
    losses = []
    batches = gradients.batches(len(calib.tokens), self.batch, self.steps)
    for step, batch in enumerate(batches):
      rows = [jnp.asarray(calib.tokens[index : index + 1]) for index in batch]
      result = gradients.gradients(objective, params, shared, own, rows)
      losses.append(result.loss)
      rate = jnp.float32(self.rate * (1 - step / self.steps))
      matrices, treedef = jax.tree.flatten((shared, own))
      speeds = jax.tree.leaves(velocity)
      slopes = jax.tree.leaves((result.shared, result.own))
      moved = []
      for matrix, speed, slope in zip(matrices, speeds, slopes, strict=True):
        if rng.integers(orthogonal.RENEWAL) == 0:
          matrix = execution.block_on_cpu(orthogonal.renewed(matrix))
        moved.append(
          execution.block_on_cpu(orthogonal.cayley_step(matrix, speed, slope, rate))
        )
      shared, own = jax.tree.unflatten(treedef, [new for new, _ in moved])
      velocity = jax.tree.unflatten(treedef, [speed for _, speed in moved])
    return shared, own, losses


def _head_dim(model: CausalLanguageModel, params: Params) -> int:
  """Reads the head dimension from the value tap's shape, computing nothing."""
  ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
  layer = params[model.layer_name(0)]

  def values(ids: jax.Array) -> jax.Array:
    hidden = model.embed(outer_params(params), ids)
    return model.layer_with_taps(layer, hidden)[1]["value"]

  return jax.eval_shape(values, ids).shape[-1]


SPINQUANT = SpinQuant()
