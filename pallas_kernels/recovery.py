"""Recovery operators fused with the neighbouring elementwise work, in one pass.

References: `mxjax.numerics.recovery.mlp_recovery.apply`,
`mxjax.numerics.recovery.value_recovery.apply`. The MLP kernel reads gate and up outputs
once and writes their corrected product once: 3 values of traffic per element. The value
kernel adds the projection's bias, computes in float32 and writes the dtype it read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.numerics import implementations
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.recovery import mlp_recovery, value_recovery
from mxjax.pallas_kernels import codec, lowering

FUSED_VALUES = 1 << 20
"""Number of values (an estimate) from which None selects the kernel instead of XLA."""


_ELEMENTS = 1024
"""Elements of the product per program."""
_TILE = 8, 128
"""Rows and features of the values per program."""


def _product_kernel(
  gate_ref: Any,
  up_ref: Any,
  scalars_ref: mlp_recovery.MlpRecovery,
  out_ref: Any,
  *,
  size: int,
  interpret: bool,
) -> None:
  mask = lowering.tail_mask(size, _ELEMENTS, lowering.program_id(0))
  gate, up = (lowering.load(ref, mask) for ref in (gate_ref, up_ref))
  lowering.store(out_ref, corrected_product(gate, up, scalars_ref, interpret), mask)


def silu_ptx() -> str:
  """Returns PTX of x / (1 + 2^(-x log2 e)) by the units' exponential and reciprocal.

  A division takes eight instructions more, and compilers compute the whole product
  twice inside the refinement. The reciprocal is within one unit in the last place, and
  one of a subnormal is 0, so from x = -88 on the result is 0 instead of 1e-36 or less.
  """
  # The two constants are -log2(e) and 1.
  return """{
  .reg .b32 e;
  mul.rn.f32 e, $1, 0fBFB8AA3B;
  ex2.approx.ftz.f32 e, e;
  add.rn.f32 e, e, 0f3F800000;
  rcp.approx.ftz.f32 e, e;
  mul.rn.f32 $0, $1, e;
}"""


def silu(x: jax.Array, interpret: bool) -> jax.Array:
  """Computes x / (1 + exp(-x)) of a float32 tile."""

  def meaning(word: jax.Array) -> jax.Array:
    wide = codec.from_bits(word)
    return codec.bits(wide / (1.0 + jnp.exp(-wide)))

  word = lowering.by_ptx(silu_ptx(), meaning, codec.bits(x), interpret=interpret)
  return codec.from_bits(word)


def corrected_product(
  gate: jax.Array,
  up: jax.Array,
  scalars_ref: mlp_recovery.MlpRecovery,
  interpret: bool,
) -> jax.Array:
  """Computes the corrected product of tiles of one shape, with scalars as `[1]`."""
  # Of the rank of the tile, because ranks are not promoted by themselves where JAX is
  # told to be strict, as in tests.
  scalars: mlp_recovery.MlpRecovery = jax.tree.map(
    lambda ref: ref[...].reshape((1,) * gate.ndim), scalars_ref
  )
  # Paper: Eq. hires-mlp-update, with beta, alpha, sigma_g and eta by their names.
  corrected = (1.0 + scalars.gate_scale) * gate.astype(jnp.float32)
  corrected += scalars.gate_shift * scalars.gate_deviation
  passed = silu(corrected, interpret)
  return (passed * ((1.0 + scalars.up_scale) * up.astype(jnp.float32))).astype(
    gate.dtype
  )


def launch_product(
  gate: jax.Array,
  up: jax.Array,
  recovery: mlp_recovery.MlpRecovery,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Runs the MLP kernel on arrays of one shape and dtype."""
  flat = lowering.BlockSpec((_ELEMENTS,), lambda i: (i,))
  scalar = lowering.BlockSpec((1,), lambda i: (0,))
  out = lowering.launch(
    functools.partial(_product_kernel, size=gate.size, interpret=interpret),
    gate.reshape(-1),
    up.reshape(-1),
    jax.tree.map(lambda a: a.reshape(1), recovery),
    name="mlp_recovery",
    grid=(-(-gate.size // _ELEMENTS),),
    in_specs=[flat, flat, jax.tree.map(lambda _: scalar, recovery)],
    out_specs=flat,
    out_shape=jax.ShapeDtypeStruct((gate.size,), gate.dtype),
    warps=4,
    interpret=interpret,
  )
  return out.reshape(gate.shape)


def _affine_kernel(
  values_ref: Any,
  recovery_ref: value_recovery.ValueRecovery,
  bias_ref: Any,
  out_ref: Any,
  *,
  shape: tuple[int, int],
  head_dim: int,
) -> None:
  place = lowering.program_id(0), lowering.program_id(1)
  masks = list(map(lowering.tail_mask, shape, _TILE, place))
  feature = place[1] * _TILE[1] + lax.iota(jnp.int32, _TILE[1])
  # The last tile may reach beyond the last head.
  head = jnp.minimum(feature, shape[1] - 1) // head_dim
  # Paper: Eq. hires-vo-fit; a head has one scale a and one offset b.
  scale = recovery_ref.scale[head].astype(jnp.float32)[None, :]
  offset = recovery_ref.offset[head].astype(jnp.float32)[None, :]
  values = lowering.load(values_ref, *masks).astype(jnp.float32)
  if bias_ref is not None:
    values += lowering.load(bias_ref, masks[1]).astype(jnp.float32)[None, :]
  lowering.store(out_ref, (scale * values + offset).astype(out_ref.dtype), *masks)


def launch_values(
  values: jax.Array,
  recovery: value_recovery.ValueRecovery,
  bias: jax.Array | None = None,
  *,
  interpret: bool = False,
) -> jax.Array:
  """Runs the value kernel on `[..., kv_heads, head_dim]`."""
  heads, head_dim = values.shape[-2:]
  features = heads * head_dim
  rows, (height, width) = values.size // features, _TILE
  spec = lowering.BlockSpec
  both = spec(_TILE, lambda i, j: (i, j))
  of_heads = spec((heads,), lambda i, j: (0,))
  out = lowering.launch(
    functools.partial(_affine_kernel, shape=(rows, features), head_dim=head_dim),
    values.reshape(rows, features),
    recovery,
    None if bias is None else bias.reshape(features),
    name="value_recovery",
    grid=(-(-rows // height), -(-features // width)),
    in_specs=[
      both,
      jax.tree.map(lambda _: of_heads, recovery),
      None if bias is None else spec((width,), lambda i, j: (j,)),
    ],
    out_specs=both,
    out_shape=jax.ShapeDtypeStruct((rows, features), values.dtype),
    warps=4,
    interpret=interpret,
  )
  return out.reshape(values.shape)


def _choose(
  implementation: Implementation | None, place: str, *arrays: jax.Array
) -> Implementation:
  """Chooses the implementation; None leaves few values to XLA, which adds no launch."""
  first, obstacle = arrays[0], None
  if any(a.shape != first.shape or a.dtype != first.dtype for a in arrays):
    obstacle = "operands must agree in shape and dtype"
  elif first.dtype not in (jnp.float32, jnp.bfloat16):
    obstacle = f"it takes float32 or bfloat16, got {first.dtype}"
  elif not first.size:
    obstacle = f"there is nothing to do in shape {first.shape}"
  flat = jax.ShapeDtypeStruct((first.size,), first.dtype)
  obstacle = obstacle or lowering.unaddressed(flat)
  slower = ("pallas",) if first.size < FUSED_VALUES else ()
  return implementations.choose(place, implementation, pallas=obstacle, slower=slower)


def gated_product(
  gate: jax.Array,
  up: jax.Array,
  recovery: mlp_recovery.MlpRecovery,
  *,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Computes `silu((1 + beta) gate + alpha sigma_g) * (1 + eta) up` in float32.

  `gate` and `up` are `[..., hidden]`, both float32 or bfloat16; the product is rounded
  to that dtype. `implementation` is as in `implementations.choose`, but None also
  prefers XLA's own fusion below `FUSED_VALUES` values.
  """
  place = "pallas_kernels.gated_product"
  implementation = _choose(implementation, place, gate, up)
  if implementation == "xla":
    return mlp_recovery.apply(gate, up, recovery)
  kernel = functools.partial(launch_product, interpret=implementation == "interpret")
  return lowering.with_reference(kernel, mlp_recovery.apply, gate, up, recovery)


def recover_values(
  values: jax.Array,
  recovery: value_recovery.ValueRecovery,
  bias: jax.Array | None = None,
  *,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Computes `a (values + bias) + b` of each head in float32.

  `values` is `[..., kv_heads, head_dim]`, float32 or bfloat16, and the result keeps its
  dtype. `recovery` is float32 `[kv_heads]`. `bias` is the projection's,
  `[kv_heads * head_dim]`, if not added yet. See `gated_product` for `implementation`.
  """
  place = "pallas_kernels.recover_values"
  implementation = _choose(implementation, place, values)
  if implementation == "xla":
    return _recovered(values, recovery, bias)
  kernel = functools.partial(launch_values, interpret=implementation == "interpret")
  return lowering.with_reference(kernel, _recovered, values, recovery, bias)


def _recovered(
  values: jax.Array, recovery: value_recovery.ValueRecovery, bias: jax.Array | None
) -> jax.Array:
  """Computes `recover_values` with the reference functions."""
  wide = values.astype(jnp.float32)
  if bias is not None:
    shape = (1,) * (values.ndim - 2) + values.shape[-2:]
    wide = wide + bias.astype(jnp.float32).reshape(shape)
  return value_recovery.apply(wide, recovery).astype(values.dtype)
