"""The decoder as linen modules: the only file of the ports that imports flax.

Parameter names are nested Hugging Face names:
`params["layers_0"]["self_attn"]["q_proj"]["weight"]` is `[out, in]`.
"""

from collections.abc import Mapping
from typing import Any, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from mxjax.errors import ValueRefusal
from mxjax.layers.linear import (
  add_bias,
  linear,
  linear_many,
  linear_onto,
  take_rows,
)
from mxjax.models import functional
from mxjax.models.config import ModelConfig
from mxjax.models.parameters import attention_norms, layer_linears, layer_norms
from mxjax.numerics import elementwise
from mxjax.numerics.e4m3 import ScaledE4M3
from mxjax.numerics.precision import rounded
from mxjax.pallas_kernels import recovery as recovery_kernels
from mxjax.pallas_kernels.refinement import fused_inputs

LinearInput = TypeVar("LinearInput", bound=fused_inputs.Input)

CALIBRATION = "calibration"
"""The linen collection that receives the taps."""
CACHE = "cache"
"""The linen collection of an attention layer's key-value cache: `keys`, `values`
`[B, positions, kv_heads, head_dim]` and `start`, the number of filled positions of each
sequence, int32 `[B]`, or the int 0 of an empty cache.
"""
TREE = "tree"
"""The linen collection of an attention layer's `tree`, where sequences branch."""

PROJECTION_TAPS: dict[tuple[str, str], str] = {
  **{("self_attn", f"{name}_proj"): "qkv_input" for name in "qkv"},
  ("self_attn", "o_proj"): "o_input",
  ("mlp", "gate_proj"): "gate_up_input",
  ("mlp", "up_proj"): "gate_up_input",
  ("mlp", "down_proj"): "down_input",
}
"""The seven target linears of a layer in forward order, and the tap of their input."""


def _leaf(
  module: nn.Module, name: str, initializer: nn.initializers.Initializer, *shape: int
) -> Any:
  """Reads a parameter, or creates it in bfloat16 during initialization.

  `Module.param` rejects leaves that are not arrays, such as quantized weights;
  `get_variable` accepts them and still raises if the leaf is absent.
  """
  if module.has_variable("params", name):
    return module.get_variable("params", name)
  return module.param(name, initializer, shape, jnp.bfloat16)


def _tap(module: nn.Module, name: str, value: LinearInput) -> LinearInput:
  if module.is_mutable_collection(CALIBRATION) and not module.is_initializing():
    # Not `sow`, which would put it in a tuple.
    module.put_variable(CALIBRATION, name, fused_inputs.as_array(value))
  return value


def _run(module: nn.Module, params: Mapping[str, Any], x: jax.Array) -> jax.Array:
  return cast(jax.Array, module.apply({"params": params}, x))


class Linear(nn.Module):
  """A linear layer whose weight is an array or a quantized leaf."""

  in_features: int
  out_features: int
  use_bias: bool = False

  def setup(self) -> None:
    """Reads or creates the weight, `[out_features, in_features]`, and the bias."""
    normal = nn.initializers.normal(0.02)
    self.weight = _leaf(self, "weight", normal, self.out_features, self.in_features)
    self.bias = None
    if self.use_bias:
      self.bias = _leaf(self, "bias", nn.initializers.zeros, self.out_features)

  def __call__(self, x: fused_inputs.Input, onto: jax.Array | None = None) -> jax.Array:
    """Maps `[..., in_features]` to `[..., out_features]`, same dtype.

    Adds `onto`, if it is given, as a residual.
    """
    if onto is not None and self.bias is None:
      return linear_onto(onto, x, self.weight)
    y = add_bias(linear(x, self.weight), self.bias)
    return y if onto is None else rounded(onto + y)


def _linears(config: ModelConfig, block: str) -> list[Linear]:
  sizes = layer_linears(config).items()
  return [Linear(*size) for (inside, _), size in sizes if inside == block]


def _side_by_side(x: fused_inputs.Input, *layers: Linear) -> list[jax.Array]:
  products = linear_many(x, [layer.weight for layer in layers])
  return [add_bias(y, layer.bias) for layer, y in zip(layers, products, strict=True)]


class Embedding(nn.Module):
  """The embedding matrix: a lookup table and, when tied, the output head."""

  config: ModelConfig

  def setup(self) -> None:
    """Reads or creates the weight, `[vocab_size, hidden_size]`."""
    shape = self.config.vocab_size, self.config.hidden_size
    self.weight = _leaf(self, "weight", nn.initializers.normal(0.02), *shape)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up int32 `[B, T]`; ids outside the vocabulary give NaN rows."""
    return take_rows(self.weight, tokens).astype(self.config.dtype)

  def attend(self, hidden: jax.Array) -> jax.Array:
    """Scores hidden states `[B, T, d]` against every row: `[B, T, V]`."""
    return linear(hidden, self.weight)


class RMSNorm(nn.Module):
  """RMSNorm with a scale; see `elementwise.rms_norm`."""

  width: int
  config: ModelConfig

  def setup(self) -> None:
    """Creates the scale."""
    self.weight = _leaf(self, "weight", nn.initializers.ones, self.width)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Normalizes `[..., width]`, same dtype."""
    config = self.config
    # OLMo-2 is the only family with norms behind the blocks.
    return elementwise.rms_norm(
      x, self.weight, config.norm_eps, rounds_once=config.is_post_norm
    )

  def defer(self, x: jax.Array) -> fused_inputs.Normalized:
    """Defers a norm in front of a block, so that a linear's kernel can compute it."""
    assert not self.config.is_post_norm, "kernels round before the scale"
    return fused_inputs.Normalized(x, self.weight, self.config.norm_eps)


class Attention(nn.Module):
  """Causal grouped-query attention with rotary positions."""

  config: ModelConfig

  def setup(self) -> None:
    """Creates the projections."""
    linears = _linears(self.config, "self_attn")
    self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears
    if widths := attention_norms(self.config):
      self.q_norm = RMSNorm(widths["q_norm"], self.config)
      self.k_norm = RMSNorm(widths["k_norm"], self.config)

  def __call__(self, x: fused_inputs.Input, onto: jax.Array | None = None) -> jax.Array:
    """Maps the layer's input `[B, T, d]` to the attention output, same shape.

    It is added to `onto`, if that is given.
    """
    _tap(self, "qkv_input", x)
    queries, keys, values = self._project(x)
    # Before the correction, because value recovery is fitted to what the linear gives.
    values = _tap(self, "value", values)
    if self.has_variable("params", "value_recovery"):
      recovery = self.get_variable("params", "value_recovery")
      values = recovery_kernels.recover_values(values, recovery)
    outputs = _tap(self, "o_input", self._attend(queries, keys, values))
    return self.o_proj(outputs, onto)

  def _project(self, x: fused_inputs.Input) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated queries, rotated keys, and values: `[B, T, heads, head_dim]`."""
    config = self.config
    head_dim = config.head_dim
    by_head = lambda y: y.reshape(*y.shape[:2], y.shape[2] // head_dim, head_dim)
    queries, keys, values = _side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
    # OLMo-2 normalizes the whole projection and Qwen3 each head, both before the
    # rotation.
    if config.qk_norm == "projection":
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    queries, keys = by_head(queries), by_head(keys)
    if config.qk_norm == "head":
      queries, keys = self.q_norm(queries), self.k_norm(keys)
    frequencies = functional.inverse_frequencies(
      config.head_dim, config.rope_theta, config.rope_scaling
    )
    tree = self.get_variable(TREE, "tree")
    # Positions count on behind the cached tokens; in a tree they are depths.
    start = tree.positions if tree else self.get_variable(CACHE, "start", 0)
    queries = functional.rotary(queries, frequencies, start)
    keys = functional.rotary(keys, frequencies, start)
    return queries, keys, by_head(values)

  def _attend(self, queries: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
    """Attends to the past, using the cache if there is one: `[B, T, features]`."""
    window = self.config.sliding_window
    if not self.has_variable(CACHE, "start"):
      tree = self.get_variable(TREE, "tree")
      return functional.causal_attention(
        queries, keys, values, window=window, tree=tree
      )
    past = self.get_variable(CACHE, "keys"), self.get_variable(CACHE, "values")
    start = self.get_variable(CACHE, "start")
    outputs, filled = functional.cached_attention(
      queries, keys, values, past, start, window=window
    )
    self.put_variable(CACHE, "keys", filled[0])
    self.put_variable(CACHE, "values", filled[1])
    return outputs


class MLP(nn.Module):
  """Gated MLP."""

  config: ModelConfig

  def setup(self) -> None:
    """Creates the projections."""
    self.gate_proj, self.up_proj, self.down_proj = _linears(self.config, "mlp")

  def __call__(self, x: fused_inputs.Input, onto: jax.Array | None = None) -> jax.Array:
    """Maps the layer's input `[B, T, d]` to the MLP output, same shape.

    It is added to `onto`, if that is given.
    """
    _tap(self, "gate_up_input", x)
    gate, up = _side_by_side(x, self.gate_proj, self.up_proj)
    gate, up = _tap(self, "gate", gate), _tap(self, "up", up)
    recovery = self.get_variable("params", "mlp_recovery", None)
    product = fused_inputs.GatedProduct(gate, up, recovery)
    return self.down_proj(_tap(self, "down_input", product), onto)


class DecoderLayer(nn.Module):
  """One decoder layer with pre-norm or post-norm."""

  config: ModelConfig

  def setup(self) -> None:
    """Creates the submodules; `layer_norms` names the norms."""
    config = self.config
    self.self_attn = Attention(config)
    self.mlp = MLP(config)
    for name in layer_norms(config):
      # Their names are those of the checkpoint, which differ between pre-norm and
      # post-norm.
      setattr(self, name, RMSNorm(config.hidden_size, config))

  def __call__(self, hidden: jax.Array) -> jax.Array:
    """Maps hidden states `[B, T, d]` to hidden states, same dtype."""
    norms = [getattr(self, name) for name in layer_norms(self.config)]
    for norm, block in zip(norms, (self.self_attn, self.mlp), strict=True):
      if self.config.is_post_norm:
        hidden = rounded(hidden + norm(block(hidden)))
      else:
        # Norm and residual go into the block, whose kernels can compute them.
        hidden = block(norm.defer(hidden), hidden)
    return hidden


class CausalLM(nn.Module):
  """A decoder language model.

  `model.apply({"params": params}, tokens)` runs all of it; the pure, jit-able methods
  `embed`, `layer`, `layer_with_taps` and `logits` run an unbound model in pieces with
  the same result. A model is hashable, so it can be a static argument.
  """

  config: ModelConfig

  def setup(self) -> None:
    """Creates the submodules; flax names the list's members layers_0, layers_1, ..."""
    config = self.config
    self.embed_tokens = Embedding(config)
    self.layers = [DecoderLayer(config) for _ in range(config.num_layers)]
    self.norm = RMSNorm(config.hidden_size, config)
    # A head among the params overrides tying, because rotated models need their own.
    self.has_head = not config.tie_embeddings or self.has_variable("params", "lm_head")
    if self.has_head:
      self.lm_head = Linear(config.hidden_size, config.vocab_size)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Computes float32 logits `[B, T, V]` of int32 tokens `[B, T]` below `vocab_size`.

    Row t scores the token after t.

    Raises:
      ValueError: T exceeds the model's positions.
    """
    if tokens.shape[-1] > self.config.max_positions:
      raise ValueRefusal(
        "CausalLM",
        expected=f"at most {self.config.max_positions} tokens, the positions of the "
        "model",
        got=tokens.shape[-1],
        mend="cut the text into shorter windows",
      )
    hidden = self.embed_tokens(tokens)
    for layer in self.layers:
      hidden = layer(hidden)
    head = self.lm_head if self.has_head else self.embed_tokens.attend
    return head(self.norm(hidden)).astype(jnp.float32)

  @property
  def num_layers(self) -> int:
    """Number of decoder layers."""
    return self.config.num_layers

  @property
  def attention(self) -> dict[str, str]:
    """What computes attention on this machine: see `functional.attention_chosen`."""
    return functional.attention_chosen(self.config.dtype, self.config.head_dim)

  @property
  def projection_taps(self) -> dict[tuple[str, str], str]:
    """See `PROJECTION_TAPS`."""
    return PROJECTION_TAPS

  @nn.nowrap
  def layer_name(self, index: int) -> str:
    """Returns the key of layer `index` in the params."""
    return f"layers_{index}"

  @nn.nowrap
  def embed(self, params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
    """Embeds int32 tokens `[B, T]` as hidden states `[B, T, d]`, compute dtype."""
    # Without a parent, or linen would take it for a child of a model that it runs in.
    return _run(Embedding(self.config, parent=None), params["embed_tokens"], tokens)

  @nn.nowrap
  def layer(
    self,
    layer_params: Mapping[str, Any],
    hidden: jax.Array,
    tree: functional.Tree | None = None,
  ) -> jax.Array:
    """Runs one decoder layer, the value of a `layers_i` key; shape and dtype stay.

    The sequences of `hidden` may branch, see `functional.Tree`.
    """
    variables: dict[str, Any] = {"params": layer_params}
    if tree is not None:
      variables[TREE] = {"self_attn": {"tree": tree}}
    return cast(
      jax.Array, DecoderLayer(self.config, parent=None).apply(variables, hidden)
    )

  @nn.nowrap
  def layer_with_taps(
    self, layer_params: Mapping[str, Any], hidden: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one decoder layer like `layer`, and returns captured activations.

    Returns:
      Hidden states, and the taps: `qkv_input`, `o_input`, `gate_up_input`, `down_input`
      `[B, T, in]`; `value` `[B, T, kv_heads, head_dim]` before its correction; `gate`,
      `up` `[B, T, intermediate]`.
    """
    decoder_layer = DecoderLayer(self.config, parent=None)
    # Only where the collection is mutable does `_tap` keep what it sees.
    output, state = decoder_layer.apply(
      {"params": layer_params}, hidden, mutable=[CALIBRATION]
    )
    taps = cast(dict[str, dict[str, jax.Array]], state[CALIBRATION])
    return cast(jax.Array, output), taps["self_attn"] | taps["mlp"]

  @nn.nowrap
  def empty_cache(
    self,
    batch: int,
    positions: int,
    cache_format: functional.CacheFormat = "compute",
  ) -> dict[str, Any]:
    """Allocates the cache of one layer for `positions` tokens, all zero.

    Raises:
      ValueError: The format is unknown.
    """
    config = self.config
    shape = batch, positions, config.num_kv_heads, config.head_dim
    if cache_format not in (known := get_args(functional.CacheFormat)):
      raise ValueRefusal(
        "empty_cache", f"a cache format of {', '.join(known)}", got=cache_format
      )

    def empty() -> functional.Kept:
      if cache_format == "compute":
        return jnp.zeros(shape, config.dtype)
      return ScaledE4M3(jnp.zeros(shape, jnp.uint8), jnp.zeros(shape[:3], jnp.uint8))

    return {"self_attn": {"keys": empty(), "values": empty()}}

  @nn.nowrap
  def layer_with_cache(
    self,
    layer_params: Mapping[str, Any],
    cache: Mapping[str, Any],
    hidden: jax.Array,
    start: jax.Array | int,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Runs one decoder layer on the next tokens of cached sequences.

    `hidden` `[B, T, d]` belongs to the T tokens after the `start` cached ones of each
    sequence, int32 `[B]`, or the int 0 where nothing is cached: then hidden states are
    those of `layer`, if the cache has the compute dtype. `cache` must have room.
    Returns hidden states and the new cache.
    """
    decoder_layer = DecoderLayer(self.config, parent=None)
    past = {"self_attn": {**cache["self_attn"], "start": start}}
    output, state = decoder_layer.apply(
      {"params": layer_params, CACHE: past}, hidden, mutable=[CACHE]
    )
    filled = cast(dict[str, Any], state[CACHE])["self_attn"]
    # Without `start`, which the caller counts.
    updated = {name: filled[name] for name in cache["self_attn"]}
    return cast(jax.Array, output), {"self_attn": updated}

  @nn.nowrap
  def logits(self, params: Mapping[str, Any], hidden: jax.Array) -> jax.Array:
    """Applies the final norm and the head to outputs of the last layer.

    Reads only the norm, head and embedding. Maps `[B, T, d]` to float32 `[B, T, V]`.
    """
    norm = RMSNorm(self.config.hidden_size, self.config, parent=None)
    normal = _run(norm, params["norm"], hidden)
    # A head among the params wins, as in `setup`.
    tied = self.config.tie_embeddings and "lm_head" not in params
    head = "embed_tokens" if tied else "lm_head"
    return linear(normal, params[head]["weight"]).astype(jnp.float32)
