"""Random models of Qwen3's shapes for the scripts that ask something of a GPU.

Time does not depend on what weights hold, but it does depend on every layer having its
own, and on codes, scales and tables that belong to a weight: quantized leaves encode
one. `random_model` is what users run, with Qwen3's norms of queries and keys; the check
of a whole layer runs `forward_layer`, whose implementation it chooses, without them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import mxjax
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.linear import linear_many
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM, ModelConfig, functional
from mxjax.models.parameters import insert, parameter_shapes
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
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


QWEN3_8B = Shape("Qwen3-8B-shaped", 4096, 12288, 36, 32, 8, 128, 151936)
TINY = Shape("tiny", 64, 96, 2, 4, 2, 16, 512)


@functools.partial(jax.jit, static_argnames=("m", "d", "quantized"))
def random_linear(key, m, d, quantized):
  """A bfloat16 weight, or its HiRes leaf: a map near the identity, and its tables."""
  of_weight, of_map = jax.random.split(key)
  dense = (jax.random.normal(of_weight, (m, d)) * d**-0.5).astype(jnp.bfloat16)
  if not quantized:
    return dense
  blocks = d // 32
  near = jnp.eye(32) + 0.05 * jax.random.normal(of_map, (blocks, 32, 32))
  wide = lambda a: a.reshape(m, blocks, 32)
  packed = mxjax.encode(dense.astype(jnp.float32))
  got = wide(mxjax.decode(packed, jnp.float32))
  how = {"precision": jax.lax.Precision.HIGHEST}
  gram = jnp.einsum("mbi,mbj->bij", got, got, **how)
  cross = jnp.einsum("mbi,mbj->bij", got, wide(dense.astype(jnp.float32)) - got, **how)
  rule = OneCode(one_code.pack_symmetric(gram), cross)
  return QuantizedLinear(packed, BlockDense(near), rule)


@functools.partial(jax.jit, static_argnames=("m", "d"))
def steady_linear(key, m, d):
  """A HiRes leaf whose tables are near a multiple of the identity.

  Few of its codes change if an input's rounding does: two implementations of a layer of
  them can be compared.
  """
  keys = jax.random.split(key, 4)
  blocks = d // 32
  codes = jax.random.bits(keys[0], (m, d // 2), jnp.uint8)
  weight = mxfp4.MXTensor(codes, jnp.full((m, blocks), 118, jnp.uint8))
  signs = jax.random.rademacher(keys[1], (blocks, 1, 32), jnp.float32)
  rows, columns = jnp.triu_indices(32)
  diagonal = (rows == columns).astype(jnp.float32)[None]
  gram = 32 * diagonal + jax.random.normal(keys[2], (blocks, 528), jnp.float32)
  cross = 0.1 * jax.random.normal(keys[3], (blocks, 32, 32), jnp.float32)
  turned = BlockDense(hadamard(32)[None] * signs)
  return QuantizedLinear(weight, turned, OneCode(gram, cross))


def corrections(kv_heads):
  """Both recoveries of a layer, near the identity."""
  one, heads = jnp.ones(()), jnp.ones(kv_heads)
  of_mlp = MlpRecovery(0.01 * one, 0.01 * one, 0.01 * one, one)
  return ValueRecovery(heads, 0.01 * heads), of_mlp


def random_layer(key, shape):
  """The params of `forward_layer` in HiRes form."""
  keys = jax.random.split(key, 7)
  params = {
    name: steady_linear(k, m, d)
    for k, (name, (m, d)) in zip(keys, shape.linears().items(), strict=True)
  }
  params["norms"] = [jnp.ones(shape.hidden, jnp.bfloat16)] * 2
  params["value_recovery"], params["mlp_recovery"] = corrections(shape.kv_heads)
  return params


def forward_layer(shape, implementation, params, hidden, cache=None, start=0):
  """One decoder layer on `[1, T, d]`; with a cache, on the token at `start`."""
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
  if cache is None:
    out = functional.causal_attention(q, k, v, implementation=implementation)
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


def config_of(shape, layers=None, *, positions=32768, qk_norm="head"):
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
    max_positions=positions,
    dtype="bfloat16",
    qk_norm=qk_norm,
    family="qwen3" if qk_norm == "head" else "llama",
  )


def random_model(shape, kind, layers=None):
  """A `CausalLM` and random params: `BF16`, or `HiRes` in the fastest products."""
  config = config_of(shape, layers)
  shapes, params = parameter_shapes(config), {}
  keys = jax.random.split(jax.random.key(7), len(shapes))
  for key, (path, size) in zip(keys, shapes.items(), strict=True):
    is_target = kind != "BF16" and path[-2].endswith("_proj")
    one = lambda size=size: jnp.ones(size, jnp.bfloat16)
    leaf = one() if len(size) == 1 else random_linear(key, *size, is_target)
    insert(params, path, leaf)
  if kind != "BF16":
    for index in range(config.num_layers):
      layer, made = params[f"layers_{index}"], corrections(config.num_kv_heads)
      layer["self_attn"]["value_recovery"], layer["mlp"]["mlp_recovery"] = made
    params = pack_for_inference(params, tables=False)
  return CausalLM(config), jax.block_until_ready(params)
