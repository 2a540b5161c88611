"""The typed leaf of a quantized linear, and the functions that look at it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mxjax.numerics import implementations, mxfp4, straight_through
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.precision import HIGHEST, float32_sums
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.pallas_kernels.products import matmul
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul
from mxjax.pallas_kernels.refinement import fused_inputs
from mxjax.pallas_kernels.refinement.a4_operands import a4_operands


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
  """A strict W4A4 linear in place of a weight `[out_features, in_features]`.

  Attributes:
    weight: Packed weights in the coordinates of `input_map`.
    input_map: The online map of the inputs, or None.
    rounding: The dynamic A4 rule.
    gain: A factor on the outputs, a float32 scalar, or None; only a control has one.
    rules: Scale and tie rules of both operands (static).
    float8_scale: Of the weight's values in float8, a float32 scalar, where a GPU may
      multiply many rows so, or None; see `pack_for_inference` and `float8_matmul`. It
      holds for this weight only: who replaces the weight sets it to None.
  """

  weight: mxfp4.MXTensor
  input_map: InputMap | None
  rounding: ActivationQuantizer
  gain: jax.Array | None = None
  rules: mxfp4.Rules = dataclasses.field(
    default=mxfp4.PAPER_RULES, metadata={"static": True}
  )
  float8_scale: jax.Array | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """`(out_features, in_features)`, as of the array it replaces."""
    return self.weight.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Matrix:
  """An embedding or head in eight bits, `codes * scales[:, None]`; never a target.

  Attributes:
    codes: int8 `[rows, features]`, in -127..127.
    scales: float32 `[rows]`.
  """

  codes: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """`(rows, features)`, as of the array it replaces."""
    return self.codes.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StraightThrough:
  """A linear whose inputs are rounded with a gradient, for learning; never a result.

  Attributes:
    weight: Weights `[out_features, in_features]`, rounded already if they should be.
    rules: Scale and tie rules of the inputs (static).
  """

  weight: jax.Array
  rules: mxfp4.Rules = dataclasses.field(
    default=mxfp4.PAPER_RULES, metadata={"static": True}
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSharded:
  """A weight whose output rows lie on several devices; only inside `shard_map`.

  Both ways of use form every product over the whole input axis on one device, so no
  sum is split.

  Attributes:
    weight: This device's rows of any leaf that `linear` takes.
    axis: The mesh axis that the rows are shared out over (static).
    gather: What travels: the `weights` of every device before the product, where each
      device has inputs of its own; or the `outputs` after it, where all have the same
      inputs (static).
  """

  weight: Any
  axis: str = dataclasses.field(metadata={"static": True})
  gather: Literal["weights", "outputs"] = dataclasses.field(metadata={"static": True})

  def whole(self) -> Any:
    """The weight with the rows of all devices."""
    gather = lambda a: jax.lax.all_gather(a, self.axis, axis=0, tiled=True)
    return map_rows(gather, lambda a: a, self.weight)

  def linear(self, x: jax.Array) -> jax.Array:
    """See `linear`."""
    if self.gather == "weights":
      return linear(x, self.whole())
    y = linear(x, self.weight)
    return jax.lax.all_gather(y, self.axis, axis=y.ndim - 1, tiled=True)

  def take_rows(self, index: jax.Array) -> jax.Array:
    """See `take_rows`: every device looks up its rows, the owner's are kept."""
    if self.gather == "weights":
      return take_rows(self.whole(), index)
    rows = self.weight.shape[0]
    owner = index // rows
    is_here = owner == jax.lax.axis_index(self.axis)
    # An index outside, here the number of rows, gives NaN.
    found = take_rows(self.weight, jnp.where(is_here, index % rows, rows))
    all_found = jax.lax.all_gather(found, self.axis)
    last = all_found.shape[0] - 1
    kept = jnp.clip(owner, 0, last)[None, ..., None]
    return jnp.take_along_axis(all_found, kept, axis=0)[0]


def map_rows(
  by_row: Callable[[Any], Any], whole: Callable[[Any], Any], weight: Any
) -> Any:
  """Maps the arrays of a weight: those with a row for each output, and the others."""
  match weight:
    case QuantizedLinear():
      names = ("input_map", "rounding", "gain", "float8_scale")
      others = {name: jax.tree.map(whole, getattr(weight, name)) for name in names}
      packed = map_rows(by_row, whole, weight.weight)
      return dataclasses.replace(weight, weight=packed, **others)
    case mxfp4.MXTensor() | Int8Matrix():
      return jax.tree.map(by_row, weight)
    case _:
      return by_row(weight)


def quantized_inputs(
  x: jax.Array,
  weight: QuantizedLinear,
  implementation: Implementation | None = None,
) -> jax.Array:
  """The legal A4 operand of a quantized linear, decoded.

  Args:
    x: Inputs, `[..., in_features]`.
    weight: The linear.
    implementation: Of the one-code rule: see `code_refinement.refined_blocks`.

  Returns:
    float32 `[in_features, n]`, feature-major, n the product of the leading axes.
  """
  mxfp4.check_width("quantized_linear.linear", x.shape[-1])
  rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
  blocks = mxfp4.to_blocks(rows)
  input_map = weight.input_map
  matrix = None if input_map is None else input_map.block_matrices()
  if matrix is not None and matrix.shape[0] == blocks.shape[0]:
    matrix = matrix.astype(blocks.dtype)
  elif input_map is not None:
    # One matrix for all blocks is a wide product, at which XLA is better.
    blocks, matrix = input_map.apply(blocks), None
  rounded = weight.rounding.round(
    blocks, weight.rules, matrix=matrix, implementation=implementation
  )
  return rounded.reshape(x.shape[-1], -1)


Stored = jax.Array | mxfp4.MXTensor | Int8Matrix
Weight = Stored | QuantizedLinear | StraightThrough | RowSharded
"""What a linear may have for a weight."""


def linear(
  x: fused_inputs.Input, weight: Weight, *, implementation: Implementation | None = None
) -> jax.Array:
  """Computes `x @ weight.T`, strictly W4A4 where the leaf is quantized.

  Args:
    x: Inputs, `[..., in_features]`, float32 or bfloat16, or what is to become them.
    weight: An array `[out_features, in_features]`; a packed one or a byte table,
      whose values are used as they are with inputs that are not rounded; a quantized
      leaf, or the differentiable stand-in of one; any of them by rows on a mesh.
    implementation: For packed and quantized weights: `pallas`, `interpret` or `xla`,
      never another than asked for; None takes kernels on a GPU where they can.

  Returns:
    Outputs, `[..., out_features]`, in the dtype of `x`.

  Raises:
    NotImplementedError: Kernels were asked for and cannot run.
    ValueError: The quantized leaf's width is not a multiple of 32.
  """
  if isinstance(weight, QuantizedLinear):
    return _quantized(x, [weight], implementation)[0]
  x = fused_inputs.as_array(x)
  match weight:
    case RowSharded():
      return weight.linear(x)
    case StraightThrough():
      return _product(
        straight_through.round_rows(x, weight.rules), weight.weight.astype(x.dtype)
      )
    case mxfp4.MXTensor():
      return _weight_only(x, weight, implementation)
    case Int8Matrix():
      # Bytes are exact in bfloat16; the scale of a row comes out of the product.
      y = linear(x, weight.codes)
      scales = weight.scales.reshape((1,) * (y.ndim - 1) + (-1,))
      return (y.astype(jnp.float32) * scales).astype(x.dtype)
    case _:
      return _product(x, weight.astype(x.dtype))


def linear_many(
  x: fused_inputs.Input,
  weights: Sequence[Weight],
  *,
  implementation: Implementation | None = None,
) -> list[jax.Array]:
  """`linear` of several weights; quantized ones of few inputs share their launches.

  Args:
    x: Inputs of all of them, `[..., in_features]`; see `linear`.
    weights: Each `[out_features, in_features]`, of any kind that `linear` takes.
    implementation: See `linear`.

  Returns:
    Outputs of each weight, `[..., out_features]`, in the dtype of `x`.

  Raises:
    NotImplementedError: Kernels were asked for and cannot run.
    ValueError: The width of quantized leaves is not a multiple of 32.
  """
  quantized = [weight for weight in weights if isinstance(weight, QuantizedLinear)]
  if len(quantized) == len(weights):
    return _quantized(x, quantized, implementation)
  # Made once.
  x = fused_inputs.as_array(x)
  return [linear(x, weight, implementation=implementation) for weight in weights]


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`x @ weight.T`, made feature-major: see `elementwise.gated_product`."""
  rows = x.reshape(-1, x.shape[-1])
  y = jnp.einsum("nd,md->mn", rows, weight, precision=HIGHEST).T
  return y.reshape(*x.shape[:-1], weight.shape[0])


def _quantized(
  x: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None,
) -> list[jax.Array]:
  """Outputs of quantized linears `[..., out_features]`, in the dtype of x."""
  width = x.shape[-1]
  mxfp4.check_width("quantized_linear.linear", width)
  obstacles = [_obstacle(x, weight) for weight in weights]
  obstacle = next(filter(None, obstacles), None)
  # `native` concerns the A4 rule alone, which decides when it rounds.
  chosen = implementations.choose(
    "linear", implementation, native=None, pallas=obstacle
  )
  if chosen in ("pallas", "interpret"):
    outputs = _by_kernels(fused_inputs.flat(x), weights, implementation, chosen)
  else:
    array = fused_inputs.as_array(x)
    outputs = [_by_xla(array, weight, implementation) for weight in weights]
  result = []
  for y, weight in zip(outputs, weights, strict=True):
    scaled = y if weight.gain is None else y * weight.gain.astype(y.dtype)
    result.append(scaled.reshape(*x.shape[:-1], weight.shape[0]))
  return result


def _by_xla(
  x: jax.Array, weight: QuantizedLinear, implementation: Implementation | None
) -> jax.Array:
  """Outputs `[n, out_features]` by XLA's products."""
  dtype = _operand_dtype(x, weight)
  operand = quantized_inputs(x, weight, implementation).astype(dtype)
  decoded = mxfp4.decode(weight.weight, dtype, weight.rules)
  return float32_sums(decoded, operand).T.astype(x.dtype)


def _by_kernels(
  rows: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None,
  chosen: Implementation,
) -> list[jax.Array]:
  """Outputs `[n, out_features]` of inputs `[n, in_features]`, in their dtype."""
  # Once for all linears, where the kernel does not make its input itself.
  rows = fused_inputs.for_kernel(rows)
  is_many = rows.shape[0] >= matmul.LIBRARY_ROWS
  how = {"dtype": rows.dtype, "implementation": implementation}
  if not is_many:
    operators = [(w.input_map, w.rounding) for w in weights]
    operands = a4_operands(rows, operators, "planes", chosen)
    return matmul.matmul_each(operands, [w.weight for w in weights], **how)
  outputs = []
  for weight in weights:
    form = "values" if weight.float8_scale is None else "float8"
    operator = weight.input_map, weight.rounding
    [operand] = a4_operands(rows, [operator], form, chosen)
    if weight.float8_scale is None:
      outputs.append(matmul.matmul(operand, weight.weight, **how))
    else:
      unit = weight.float8_scale
      outputs.append(float8_matmul(operand, weight.weight, unit, **how))
  return outputs


def _operand_dtype(x: jax.Array, weight: QuantizedLinear) -> jax.typing.DTypeLike:
  """What both operands are exact in, the narrowest type that processors multiply.

  Legal values have two significant bits, so products of bfloat16 are exact and sums
  are in float32 either way; where a processor multiplies bfloat16 it does so twice as
  fast. A scale of `mx43` is a third of a power of two, and inputs that are not rounded
  are no legal values.
  """
  is_legal = weight.rounding.is_legal
  return jnp.bfloat16 if is_legal and weight.rules.scale_rule != "mx43" else x.dtype


def _obstacle(x: fused_inputs.Input, weight: QuantizedLinear) -> str | None:
  """Why the kernels cannot run a quantized leaf, or None."""
  if weight.rules != mxfp4.PAPER_RULES:
    return f"kernels know the paper's rules only, got {weight.rules}"
  if weight.rounding.kernel_tables() is None:
    return f"kernels do not know the rounding {type(weight.rounding).__name__}"
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    return f"kernels take float32 or bfloat16 inputs, got {x.dtype}"
  return None if math.prod(x.shape) else f"there are no inputs in shape {x.shape}"


def _weight_only(
  x: jax.Array, weight: mxfp4.MXTensor, implementation: Implementation | None
) -> jax.Array:
  obstacle = None
  if x.dtype != jnp.bfloat16:
    obstacle = f"a packed weight alone takes bfloat16 inputs, got {x.dtype}"
  if implementations.choose("linear", implementation, pallas=obstacle) == "xla":
    return _product(x, mxfp4.decode(weight, x.dtype))
  rows = x.reshape(-1, x.shape[-1])
  y = matmul.matmul(rows, weight, dtype=x.dtype, implementation=implementation)
  return y.reshape(*x.shape[:-1], weight.shape[0])


def take_rows(weight: Stored | RowSharded, index: jax.Array) -> jax.Array:
  """Rows of a table that may be packed; an index outside gives NaN rows.

  Args:
    weight: `[rows, d]`, an array, packed or a byte table; also by rows on a mesh.
    index: int32, any shape.

  Returns:
    `[..., d]`, in the dtype of the array; packed, bfloat16 (exact); bytes, float32.
  """
  if isinstance(weight, RowSharded):
    return weight.take_rows(index)
  if isinstance(weight, Int8Matrix):
    codes = jnp.take(weight.codes, index, axis=0, mode="clip").astype(jnp.float32)
    return codes * jnp.take(weight.scales, index, axis=0, mode="fill")[..., None]
  if not isinstance(weight, mxfp4.MXTensor):
    return jnp.take(weight, index, axis=0, mode="fill")
  fill = lambda a, value: jnp.take(a, index, axis=0, mode="fill", fill_value=value)
  # A filled scale byte decodes to NaN.
  return mxfp4.decode(
    mxfp4.MXTensor(fill(weight.codes, 0), fill(weight.scales, mxfp4.NOT_FINITE))
  )
