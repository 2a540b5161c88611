"""Random-weight models of real shapes, and one layer function for all kinds of leaf.

Time does not depend on what weights hold, but it does depend on every layer having
its own. `random_model` is what users run, with the library's own attention. In
`forward_layer` norms, rotary positions and products are the library's, and attention
is the fastest that this machine offers: a baseline of bfloat16. Qwen3's norms of
queries and keys are left out on all sides.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.linear import linear, linear_many
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM, ModelConfig, functional
from mxjax.models.parameters import layer_norms
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping.input_maps import BlockDense, hadamard
from mxjax.pallas_kernels import recovery
from mxjax.pallas_kernels.refinement import fused_inputs


@dataclasses.dataclass(frozen=True)
class Shape:
  """Widths of a decoder model."""

  name: str
  hidden: int
  intermediate: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  vocabulary: int

  def linears(self):
    """`[out, in]` of the seven linears of a layer."""
    d, f, q = self.hidden, self.intermediate, self.heads * self.head_dim
    kv = self.kv_heads * self.head_dim
    return {
      "q": (q, d),
      "k": (kv, d),
      "v": (kv, d),
      "o": (d, q),
      "gate": (f, d),
      "up": (f, d),
      "down": (d, f),
    }

  def weights(self):
    """Weights of one layer's linears."""
    return sum(m * d for m, d in self.linears().values())

  def linear_flop(self, tokens):
    """Of one layer's linears."""
    return 2 * tokens * self.weights()

  def attention_flop(self, tokens):
    """Of one layer's causal attention, the masked half not counted."""
    return 2 * tokens * tokens * self.heads * self.head_dim


QWEN3_8B = Shape("Qwen3-8B-shaped", 4096, 12288, 36, 32, 8, 128, 151936)
QWEN3_32B = Shape("Qwen3-32B-shaped", 5120, 25600, 64, 64, 8, 128, 151936)
TINY = Shape("tiny", 64, 96, 2, 4, 2, 16, 61)


@functools.partial(jax.jit, static_argnames=("m", "d", "quantized"))
def random_linear(key, m, d, quantized):
  """A bfloat16 weight, or a HiRes leaf with a map and refinement tables."""
  keys = jax.random.split(key, 5)
  if not quantized:
    return jax.random.normal(keys[0], (m, d), jnp.bfloat16) * d**-0.5
  blocks = d // 32
  weight = mxfp4.MXTensor(
    jax.random.bits(keys[0], (m, d // 2), jnp.uint8),
    jnp.full((m, blocks), 118, jnp.uint8),
  )
  signs = jax.random.rademacher(keys[1], (blocks, 1, 32), jnp.float32)
  rows, columns = jnp.triu_indices(32)
  diagonal = (rows == columns).astype(jnp.float32)[None]
  noise = jax.random.normal(keys[2], (blocks, 528), jnp.float32)
  gram = 32 * diagonal + noise
  cross = 0.1 * jax.random.normal(keys[3], (blocks, 32, 32), jnp.float32)
  return QuantizedLinear(
    weight, BlockDense(hadamard(32)[None] * signs), OneCode(gram, cross)
  )


KINDS = ("HiRes", "HiRes, float8 products", "BF16")


def random_layer(key, shape, kind):
  """The params of one layer."""
  quantized = kind != "BF16"
  keys = jax.random.split(key, 7)
  params = {
    name: random_linear(k, m, d, quantized)
    for k, (name, (m, d)) in zip(keys, shape.linears().items(), strict=True)
  }
  params["norms"] = [jnp.ones(shape.hidden, jnp.bfloat16)] * 2
  if quantized:
    one = jnp.ones((), jnp.float32)
    params["mlp_recovery"] = MlpRecovery(0.01 * one, 0.01 * one, 0.01 * one, one)
    heads = jnp.ones(shape.kv_heads, jnp.float32)
    params["value_recovery"] = ValueRecovery(heads, 0.01 * heads)
  if "float8" in kind:
    params = pack_for_inference(params, tables=False, products="float8")
  return params


def random_head(key, shape):
  """Final norm and an untied bfloat16 head."""
  head = jax.random.normal(key, (shape.vocabulary, shape.hidden), jnp.bfloat16)
  return {"norm": jnp.ones(shape.hidden, jnp.bfloat16), "head": head * 0.02}


def fastest_attention():
  """`cudnn` where it runs, `xla` otherwise, and why."""
  if jax.default_backend() != "gpu":
    return "xla", "no GPU"
  probe = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
  attend = functools.partial(
    jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
  )
  try:
    jax.block_until_ready(jax.jit(attend)(probe, probe, probe))
  except (RuntimeError, NotImplementedError, ValueError) as error:
    return "xla", f"cudnn failed: {str(error)[:200]}"
  return "cudnn", "it ran"


def forward_layer(
  shape, attention, implementation, params, hidden, cache=None, start=0
):
  """One decoder layer on `[1, T, d]`; with a cache, on the token at `start`.

  `attention` is an implementation of `jax.nn.dot_product_attention`, or None for the
  library's own.
  """
  multiply = functools.partial(linear_many, implementation=implementation)
  frequencies = functional.inverse_frequencies(shape.head_dim, 1e6)
  by_head = (*hidden.shape[:2], -1, shape.head_dim)
  before = fused_inputs.Normalized(hidden, params["norms"][0], 1e-6)
  q, k, v = multiply(before, [params[name] for name in ("q", "k", "v")])
  q = functional.rotary(q.reshape(by_head), frequencies, start)
  k = functional.rotary(k.reshape(by_head), frequencies, start)
  v = v.reshape(by_head)
  if "value_recovery" in params:
    v = recovery.recover_values(
      v, params["value_recovery"], implementation=implementation
    )
  if cache is None and attention is None:
    out = functional.causal_attention(q, k, v, implementation=implementation)
  elif cache is None:
    out = jax.nn.dot_product_attention(
      q, k, v, is_causal=True, implementation=attention
    ).reshape(*hidden.shape[:2], -1)
  else:
    past = cache["k"], cache["v"]
    out, (k, v) = functional.cached_attention(
      q, k, v, past, start, implementation=implementation
    )
    cache = {"k": k, "v": v}
  [attended] = multiply(out, [params["o"]])
  hidden = hidden + attended
  before = fused_inputs.Normalized(hidden, params["norms"][1], 1e-6)
  gate, up = multiply(before, [params["gate"], params["up"]])
  product = fused_inputs.GatedProduct(gate, up, params.get("mlp_recovery"))
  [made] = multiply(product, [params["down"]])
  return hidden + made, cache


def config_of(shape, layers=None):
  """The configuration of a `CausalLM` of this shape in bfloat16."""
  return ModelConfig(
    vocab_size=shape.vocabulary,
    hidden_size=shape.hidden,
    intermediate_size=shape.intermediate,
    num_layers=layers or shape.layers,
    num_heads=shape.heads,
    num_kv_heads=shape.kv_heads,
    head_dim=shape.head_dim,
    norm_eps=1e-6,
    rope_theta=1e6,
    tie_embeddings=False,
    max_positions=4096,
    dtype="bfloat16",
  )


def random_model(key, shape, kind, layers=None):
  """A `CausalLM` as users run it, and random params of this kind of leaf."""
  config = config_of(shape, layers)
  keys = jax.random.split(key, config.num_layers + 1)
  one = jnp.ones(shape.hidden, jnp.bfloat16)
  head = random_head(keys[-1], shape)["head"]
  params = {
    "embed_tokens": {"weight": head},
    "norm": {"weight": one},
    "lm_head": {"weight": head[::-1]},
  }
  for index in range(config.num_layers):
    layer = random_layer(keys[index], shape, kind)
    inside = {"self_attn": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
    blocks = {
      block: {f"{name}_proj": {"weight": layer[name]} for name in names}
      for block, names in inside.items()
    }
    if kind != "BF16":
      blocks["self_attn"]["value_recovery"] = layer["value_recovery"]
      blocks["mlp"]["mlp_recovery"] = layer["mlp_recovery"]
    norms = {name: {"weight": one} for name in layer_norms(config)}
    params[f"layers_{index}"] = {**blocks, **norms}
  return CausalLM(config), params


def forward_head(params, hidden):
  """Logits of all positions, bfloat16."""
  return linear(fused_inputs.Normalized(hidden, params["norm"], 1e-6), params["head"])


def forward_all(shape, attention, implementation, layers, head, hidden):
  """Logits `[1, T, vocabulary]` of hidden states by all layers."""
  for layer in layers:
    hidden, _ = forward_layer(shape, attention, implementation, layer, hidden)
  return forward_head(head, hidden)


def empty_cache(shape, positions):
  """Keys of zeros and values of ones."""
  keys = jnp.zeros((1, positions, shape.kv_heads, shape.head_dim), jnp.bfloat16)
  return {"k": keys, "v": keys + 1}
