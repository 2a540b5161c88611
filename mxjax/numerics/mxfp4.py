r"""The MXFP4 codec: 32 E2M1 elements that share one E8M0 power-of-two scale.

Integer arithmetic on float bits decides every code, so no backend's `log2`, `exp2`,
subnormals, fused multiply-adds or division can change a code.

Paper: Quantization Setup (Appendix, Algorithm Details). The block exponent is

.. math::
  e = \operatorname{clip}(\lfloor \log_2 \max_i |x_i| \rfloor - 2, -127, 127)

and the element magnitudes are `MAGNITUDES`. A tie takes the larger magnitude, values
above 6 * 2^e saturate, and the sign bit follows the input.
"""

import dataclasses
import fractions
import math
from typing import Any, Literal, get_args

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax import compilation
from mxjax.errors import TypeRefusal, ValueRefusal
from mxjax.numerics import float_bits
from mxjax.numerics.jax_export import register_dataclass

BLOCK_SIZE = 32
"""Values that share one scale, contiguous on the input axis."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The E2M1 magnitudes, indexed by the low three bits of a code."""
SCALE_BIAS = 127
"""Bias of an E8M0 byte: the byte is the exponent plus 127."""
NOT_FINITE = 255
"""The E8M0 byte of a block with inf or NaN; never legal in a payload."""

ScaleRule = Literal["floor", "even", "rceil"]
TieRule = Literal["away", "even"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """Rules for the block scale and for rounding ties.

  Attributes:
    scale_rule: With block maximum a, E = floor(log2 a) and mantissa a / 2^E: `floor`
      (the paper, OCP) uses 2^(E-2); `even` uses 2^(E-1) from mantissa 1.75 up; `rceil`
      uses 2^ceil(log2(a / 6)) and never clips.
    tie_rule: `away` (the paper) rounds a tie to the larger magnitude, `even` to the
      code with the even index.
  """

  scale_rule: ScaleRule = "floor"
  tie_rule: TieRule = "away"

  def __post_init__(self) -> None:
    """Checks the names."""
    for name, kind in (("scale_rule", ScaleRule), ("tie_rule", TieRule)):
      got, known = getattr(self, name), get_args(kind)
      if got not in known:
        raise ValueRefusal(
          "mxfp4.Rules",
          expected=f"{name} of {', '.join(known)}",
          got=repr(got),
          mend="take one of these",
        )


PAPER_RULES = Rules()


@register_dataclass
@dataclasses.dataclass(frozen=True)
class MXTensor:
  """A packed MXFP4 array of logical shape `[..., d]`, 4.25 bits per value.

  Attributes:
    codes: uint8 `[..., d/2]`: two E2M1 codes per byte, the even column in the low
      nibble; a code is sign * 8 + magnitude index.
    scales: uint8 `[..., d/32]`: E8M0 bytes, exponent + 127.
  """

  codes: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """The logical shape `[..., d]`."""
    return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


def block_exponent(
  x: jax.Array, rules: Rules = PAPER_RULES, *, axis: int = -2
) -> jax.Array:
  """Computes each block's exponent from the bits of its largest magnitude.

  `x` is float32 or float64 with a block's values on `axis`, which is reduced. Returns
  int32 in [-127, 127], or 128 where the block has inf or NaN.
  """
  form = float_bits.float_format(x)
  # Of integers: inf and NaN win against every finite value, and XLA:CPU takes several
  # times as long for a maximum of floats.
  largest = jnp.max(float_bits.magnitude_bits(x), axis=axis)
  field = largest >> form.integer(form.mantissa_bits)
  mantissa = largest & form.integer((1 << form.mantissa_bits) - 1)
  half = form.integer(1 << (form.mantissa_bits - 1))
  # A field of zero is that of all subnormals, whose exponents are clipped at -127
  # anyway.
  exponent = field.astype(jnp.int32) - form.bias
  # The largest element, 6 = 1.5 x 2^2, has the exponent 2, hence E - 2. `even` takes
  # the next power of two from 1.75 = 7 / 4 on, `rceil` above 1.5 = 6 / 4.
  if rules.scale_rule == "floor":
    exponent -= 2
  elif rules.scale_rule == "even":
    exponent += jnp.where(mantissa >= half + (half >> 1), -1, -2).astype(jnp.int32)
  elif rules.scale_rule == "rceil":
    exponent += jnp.where(mantissa > half, -1, -2).astype(jnp.int32)
  clipped = jnp.clip(exponent, -127, 127)
  # The exponent field of inf and NaN has all bits set.
  finite = field < form.integer(2 * form.bias + 1)
  return jnp.where(finite, clipped, jnp.int32(128))


def _thresholds(rules: Rules, dtype: np.dtype) -> tuple[np.floating, ...]:
  """Returns the smallest scaled magnitudes in `dtype` that reach codes 1 to 7."""
  dtype = np.dtype(dtype)
  values = [fractions.Fraction(m) for m in MAGNITUDES]
  result = []
  for index in range(7):
    middle = (values[index] + values[index + 1]) / 2
    nearest = dtype.type(float(middle))
    # A tie between an even index and the next stays below under `even`: the next code
    # begins at the first number above the midpoint. From an odd index it goes up under
    # both.
    strictly_above = rules.tie_rule == "even" and index % 2 == 0
    exact = fractions.Fraction(float(nearest))
    if exact < middle or (exact == middle and strictly_above):
      nearest = np.nextafter(nearest, dtype.type(math.inf))
    result.append(nearest)
  return tuple(result)


def _scaled_bits(x: jax.Array, exponent: jax.Array) -> jax.Array:
  """Returns the bits of |x| / 2^exponent, or less where the code is zero anyway.

  Division by a power of two subtracts from the exponent field. Subnormals have no such
  field, so their integer mantissa is converted to float, which is exact.
  """
  form = float_bits.float_format(x)
  bits = float_bits.magnitude_bits(x)
  shift = exponent.astype(form.integer) << form.integer(form.mantissa_bits)
  # A difference below zero is less than every threshold, so its code is zero, too.
  scaled = bits - shift
  # A subnormal of float64 is far below a quarter of every scale, where code 1 begins.
  if form.mantissa_bits == 23:
    # Above 2^-100 no subnormal reaches a nonzero code: the clamp prevents overflow.
    mantissa_shift = (jnp.minimum(exponent, -100) + 149) << 23
    subnormal = float_bits.bits(bits.astype(jnp.float32)) - mantissa_shift
    scaled = jnp.where(bits < (1 << 23), subnormal, scaled)
  return scaled


def magnitude_index(
  x: jax.Array, exponent: jax.Array, rules: Rules = PAPER_RULES
) -> jax.Array:
  """Returns the int32 magnitude index 0..7 of each value at an exponent, saturating.

  `x` is float32 or float64; `exponent` is int32, of the same rank and broadcastable.
  A value of 2^129 scales or more may get index 0: no scale of its own block is so
  small, only one that was fixed for other values.
  `rules` decides ties.
  """
  scaled = _scaled_bits(x, exponent)
  index = jnp.zeros(x.shape, jnp.int32)
  integer = float_bits.float_format(x).integer
  for threshold in _thresholds(rules, x.dtype):
    edge = integer(threshold.view(integer))
    index += (scaled >= edge).astype(jnp.int32)
  return index


def nearest_codes(
  x: jax.Array, exponent: jax.Array, rules: Rules = PAPER_RULES
) -> jax.Array:
  """Returns the nearest codes 0..15 at given exponents; see `magnitude_index`."""
  # `x < 0` would miss the sign of -0.0, which the code keeps.
  sign = jnp.signbit(x).astype(jnp.int32)
  return magnitude_index(x, exponent, rules) | (sign << 3)


def magnitude(index: jax.Array) -> jax.Array:
  """Returns the float32 magnitude of an index 0..7, built from bits without a table."""
  # E2M1 has the exponent bias 1 and one mantissa bit, so from index 2 on the field is
  # 127 - 1 + index // 2. Indices 0 and 1, the value 0 and the subnormal .5, have no
  # exponent.
  exponent_field = (126 + (index >> 1)) << 23
  normal = lax.bitcast_convert_type(exponent_field | ((index & 1) << 22), jnp.float32)
  return jnp.where(index >= 2, normal, 0.5 * index.astype(jnp.float32))


def round_elements(
  x: jax.Array, exponent: jax.Array, rules: Rules = PAPER_RULES
) -> jax.Array:
  """Rounds float32 to element values in units of the scale; see `magnitude_index`."""
  return jnp.copysign(magnitude(magnitude_index(x, exponent, rules)), x)


def scale_of(exponent: jax.Array) -> jax.Array:
  """Returns the float32 factor that decodes elements at an exponent."""
  return float_bits.power_of_two(exponent)


def round_blocks(x: jax.Array, rules: Rules = PAPER_RULES) -> jax.Array:
  """Rounds blocks `[..., 32, columns]` to nearest: encodes, then decodes, in float32.

  The 32 values of a block lie on axis -2.
  """
  exponent = block_exponent(x, rules)[..., None, :]
  return round_elements(x, exponent, rules) * scale_of(exponent)


def to_blocks(x: jax.Array) -> jax.Array:
  """Converts rows `[n, d]` to feature-major blocks `[d/32, 32, n]`.

  In this layout a block reduction is elementwise over vectors of rows, and a block
  transform is one GEMM.
  """
  rows, features = x.shape
  return x.T.reshape(features // BLOCK_SIZE, BLOCK_SIZE, rows)


@compilation.jit()
def weight_blocks(weight: jax.Array) -> jax.Array:
  """Converts a weight `[n, d]` to blocks as `to_blocks` does, in float32."""
  return to_blocks(weight.astype(jnp.float32))


def from_blocks(blocks: jax.Array) -> jax.Array:
  """Converts feature-major blocks `[blocks, 32, n]` to rows `[n, 32 * blocks]`."""
  return blocks.reshape(-1, blocks.shape[-1]).T


def check_width(place: str, features: int) -> None:
  """Raises ValueError, naming the place, if a width is not a multiple of 32."""
  if features % BLOCK_SIZE or features == 0:
    raise ValueRefusal(
      place,
      expected=f"a last axis that is a positive multiple of {BLOCK_SIZE}",
      got=features,
      mend="leave this projection in floating point or pad it yourself, because "
      "padding changes the model's function under rounding",
    )


def pack(codes: jax.Array) -> jax.Array:
  """Packs codes `[..., d]` in 0..15 to uint8 `[..., d/2]`, even column low."""
  # A sum over pairs, because XLA:CPU takes several times as long for slices of every
  # second byte.
  shape = *codes.shape[:-1], codes.shape[-1] // 2, 2
  pairs = codes.astype(jnp.int32).reshape(shape)
  weights = jnp.array([1, 16], jnp.int32).reshape((1,) * (pairs.ndim - 1) + (2,))
  return (pairs * weights).sum(-1, dtype=jnp.int32).astype(jnp.uint8)


def unpack(codes: jax.Array) -> jax.Array:
  """Unpacks uint8 `[..., d/2]` to uint8 codes `[..., d]`."""
  pairs = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
  return pairs.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def pack_tensor(codes: jax.Array, exponent: jax.Array) -> MXTensor:
  """Packs codes `[..., d]` in 0..15 and int32 exponents `[..., d/32]`."""
  return MXTensor(pack(codes), (exponent + SCALE_BIAS).astype(jnp.uint8))


@compilation.jit(static_argnames="rules")
def _encode(x: jax.Array, rules: Rules) -> MXTensor:
  # No size is left to be found, because an empty array does not tell it.
  blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)
  exponent = block_exponent(blocks, rules, axis=-1)
  codes = nearest_codes(blocks, exponent[..., None], rules)
  return pack_tensor(codes.reshape(x.shape), exponent)


@jax.custom_jvp
def _no_gradient(x: jax.Array) -> jax.Array:
  return x


@_no_gradient.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
  raise TypeRefusal(
    "mxfp4.encode",
    expected="an input that is not differentiated",
    got="one that is",
    mend="codes are integers without a gradient, so round with "
    "mxjax.numerics.straight_through.round_rows, or call encode on "
    "jax.lax.stop_gradient(x)",
  )


def without_gradient(x: jax.Array) -> jax.Array:
  """Returns `x`; differentiating what is computed from it raises a TypeError."""
  # Differentiation always traces, so other calls need no wrapper.
  return _no_gradient(x) if isinstance(x, jax.core.Tracer) else x


def check_encodable(x: jax.Array) -> None:
  """Checks that `x` is floating point (TypeError) and in blocks of 32 (ValueError)."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeRefusal("mxfp4.encode", expected="a floating-point array", got=x.dtype)
  check_width("mxfp4.encode", x.shape[-1])


def check_finite(x: jax.Array, encoded: MXTensor) -> None:
  """Raises ValueError if the scale bytes show inf or NaN; no check under a trace."""
  if isinstance(encoded.scales, jax.core.Tracer):
    return
  if bad := int((np.asarray(encoded.scales) == NOT_FINITE).sum()):
    # Only for the message: a call without errors reads one byte for each block.
    values = np.asarray(x).astype(np.float64)
    raise ValueRefusal(
      "mxfp4.encode",
      expected="finite values",
      got=f"{np.isnan(values).sum()} NaN and {np.isinf(values).sum()} inf in {bad} "
      f"blocks of shape {x.shape}",
      mend="find the operation that produced them, because MXFP4 has no code for them",
    )


def encode(x: jax.Array, rules: Rules = PAPER_RULES) -> MXTensor:
  """Encodes the last axis in blocks of 32, exactly for every finite value.

  This XLA function is the definition; `mxjax.encode`, which gives the same bits with
  the platform's fastest encoder, describes arguments and errors. Subnormals follow the
  formula literally. The scale byte 255 of a block with inf or NaN decodes to NaN.
  """
  x = without_gradient(jnp.asarray(x))
  check_encodable(x)
  # The narrower floats are exact in float32.
  is_wide = x.dtype in (jnp.float32, jnp.float64)
  tensor = _encode(x if is_wide else x.astype(jnp.float32), rules)
  check_finite(x, tensor)
  return tensor


@compilation.jit(static_argnames="dtype", inline=True)
def decode(tensor: MXTensor, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
  """Decodes to `[..., d]`, exactly.

  `dtype` is bfloat16 or float32. Both hold every value below 2^128; those from there
  on, which only the scale bytes 253 and 254 reach, are inf with their sign. Our encoder
  writes these bytes under the rules `even` and `rceil` alone, for maxima that round up
  to 2^128. Signed zeros are kept. All values of a block with the scale byte 255, which
  is NaN in OCP MX, are NaN. `check_legal` refuses that byte.
  """
  codes = unpack(tensor.codes).astype(jnp.int32)
  shape = *codes.shape[:-1], codes.shape[-1] // BLOCK_SIZE, BLOCK_SIZE
  blocks = codes.reshape(shape)
  exponent = tensor.scales.astype(jnp.int32)[..., None] - SCALE_BIAS
  index = blocks & 7
  # Scaled by adding to the exponent field, as in `magnitude`: a product could flush a
  # subnormal value to zero.
  field = jnp.where(index >= 2, 126 + (index >> 1), 126) + exponent
  mantissa = jnp.where(index >= 2, (index & 1) << 22, 0)
  # Below the normal range the implicit leading one becomes an explicit, shifted bit.
  subnormal = (mantissa | (1 << 23)) >> jnp.clip(1 - field, 0, 31)
  magnitude_bits = jnp.where(field >= 1, (field << 23) | mantissa, subnormal)
  # From 2^128 on. The field would run into the sign.
  magnitude_bits = jnp.where(field >= 255, jnp.int32(0x7F800000), magnitude_bits)
  magnitude_bits = jnp.where(index == 0, 0, magnitude_bits)
  magnitude_bits = jnp.where(exponent > 127, jnp.int32(0x7FC00000), magnitude_bits)
  bits = (magnitude_bits | ((blocks >> 3) << 31)).reshape(codes.shape)
  if jnp.dtype(dtype) == jnp.bfloat16:
    # Truncation is exact here and, unlike a conversion, keeps subnormals.
    upper = lax.shift_right_logical(bits, jnp.int32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)
  return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


@compilation.jit(static_argnames="rules", inline=True)
def move(tensor: MXTensor, moves: jax.Array, rules: Rules = PAPER_RULES) -> MXTensor:
  """Adds to the elements and rounds them again, at the scales that they have.

  `moves` is in units of each block's scale, float32 `[..., d]`.
  """
  codes = unpack(tensor.codes).astype(jnp.int32)
  elements = jnp.where(codes < 8, magnitude(codes & 7), -magnitude(codes & 7))
  moved = nearest_codes(elements + moves, jnp.zeros_like(codes), rules)
  # A zero that stays one keeps its sign.
  is_zero = ((codes | moved) & 7) == 0
  return MXTensor(pack(jnp.where(is_zero, codes, moved)), tensor.scales)


def check_legal(tensor: MXTensor, place: str = "mxfp4.check_legal") -> None:
  """Checks the dtypes, shapes and scale bytes of a concrete tensor.

  `place` begins the error message: TypeError for leaves that are not uint8, ValueError
  for shapes that disagree or a scale byte of 255.
  """
  for name in ("codes", "scales"):
    leaf = getattr(tensor, name)
    if leaf.dtype != jnp.uint8:
      raise TypeRefusal(place, expected=f"uint8 {name}", got=leaf.dtype)
  check_width(place, tensor.shape[-1])
  expected = (*tensor.shape[:-1], tensor.shape[-1] // BLOCK_SIZE)
  if tensor.scales.shape != expected:
    raise ValueRefusal(
      place,
      expected=f"scales of shape {expected} for codes of logical shape {tensor.shape}",
      got=tensor.scales.shape,
      mend="load it again, because the payload is damaged",
    )
  if bad := int((np.asarray(tensor.scales) == NOT_FINITE).sum()):
    raise ValueRefusal(
      place,
      expected="no scale bytes of 255, which E8M0 reserves for NaN",
      got=f"{bad} of them",
      mend="encode it again from an array without inf or NaN",
    )
