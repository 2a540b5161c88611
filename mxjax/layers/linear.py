"""Application of a linear layer, whatever its weight is stored as."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mxjax.layers.quantized_linear import (
  QuantizedLinear,
  element_gradient,
  input_gradient,
  quantized_products,
  quantized_sum,
  rounded_input_gradient,
)
from mxjax.numerics import mxfp4, pytree_nodes, straight_through
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.precision import HIGHEST, block_products, rounded
from mxjax.numerics.shaping import input_maps
from mxjax.pallas_kernels.refinement import fused_inputs


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Int8Matrix:
  """An embedding or head in int8: `codes * scales[:, None]`; never a target.

  Attributes:
    codes: int8 `[rows, features]`, in -127..127.
    scales: float32 `[rows]`.
  """

  codes: jax.Array
  scales: jax.Array

  @property
  def shape(self) -> tuple[int, ...]:
    """Logical shape `(rows, features)`."""
    return self.codes.shape

  def linear(self, x: jax.Array) -> jax.Array:
    """Multiplies `x` by the codes, exact in bfloat16, and then by the scales."""
    y = linear(x, self.codes)
    scales = self.scales.reshape((1,) * (y.ndim - 1) + (-1,))
    return (y.astype(jnp.float32) * scales).astype(x.dtype)

  def take_rows(self, index: jax.Array) -> jax.Array:
    """Looks up rows as float32; see `take_rows`."""
    codes = _rows(self.codes, index).astype(jnp.float32)
    return codes * _rows(self.scales, index)[..., None]


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class StraightThrough:
  """A linear for learning: rounds its inputs straight-through; never a result.

  `weight` `[out_features, in_features]` is already rounded if it should be; `rules` are
  those of the inputs (static).
  """

  weight: jax.Array
  rules: mxfp4.Rules = dataclasses.field(
    default=mxfp4.PAPER_RULES, metadata={"static": True}
  )

  def linear(self, x: jax.Array) -> jax.Array:
    """Multiplies the rounded inputs by the weight; see `linear`."""
    return linear(straight_through.round_rows(x, self.rules), self.weight)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Transformed:
  """A float linear in the coordinates of an input map, before both encodings.

  It computes what the float weight does, but for rounding in the dtype of the
  computation; recovery is fitted on it in a control, and it is never a result.

  Attributes:
    weight: The weight folded by the map, float32 `[out_features, in_features]`.
    input_map: The online map of the inputs.
  """

  weight: jax.Array
  input_map: input_maps.InputMap

  def linear(self, x: jax.Array) -> jax.Array:
    """Maps the inputs in float32 and multiplies in the dtype of `x`; see `linear`.

    `x` is `[..., in_features]`; their number is a multiple of 32.
    """
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    mapped = self.input_map.apply(mxfp4.to_blocks(rows))
    return linear(
      mxfp4.from_blocks(mapped).astype(x.dtype).reshape(x.shape), self.weight
    )


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class LearnedLinear:
  """A strict linear for learning its input map and its codes; never a result.

  The forward pass folds what is learned into the map U, which becomes (I + A) U F, and
  into the codes, and so is that of the linear with both installed, bit for bit, by the
  same kernels.

  Attributes:
    quantized: The linear, whose arrays get no gradient.
    factor: F, factors on the inputs before the map, float32 `[in_features]`.
    change: A, by block and in coordinates behind the map, float32 `[blocks, 32, 32]`,
      or None.
    moves: What is added to the weights' elements before they are rounded again, in
      units of a block's scale, float32 `[out_features, in_features]`, or None. The
      backward pass takes this rounding for the identity.
  """

  quantized: QuantizedLinear
  factor: jax.Array
  change: jax.Array | None = None
  moves: jax.Array | None = None

  def installed(self) -> QuantizedLinear:
    """Returns the linear with its map and its codes changed."""
    learned = input_maps.scaled(self.quantized.input_map, self.factor)
    if self.change is not None:
      identity = jnp.eye(mxfp4.BLOCK_SIZE, dtype=self.change.dtype)[None]
      followed = input_maps.followed(learned, identity + self.change)
      # Stored in as many bytes as before.
      dtype = learned.matrix.dtype
      learned = input_maps.BlockDense(followed.matrix.astype(dtype))
    return dataclasses.replace(self._with_codes(), input_map=learned)

  def _with_codes(self) -> QuantizedLinear:
    """Returns the linear with its codes changed."""
    if self.moves is None:
      return self.quantized
    quantized = self.quantized
    weight = mxfp4.move(quantized.weight, self.moves, quantized.rules)
    blocks = mxfp4.weight_blocks(mxfp4.decode(weight, jnp.float32))
    # The A4 rule's tables, and the scale of a float8 copy, are of the codes before.
    rounding = quantized.rounding.with_weight(blocks)
    return dataclasses.replace(
      quantized, weight=weight, rounding=rounding, float8_scale=None
    )

  def linear(self, x: jax.Array) -> jax.Array:
    """Multiplies inputs, by the learned map, by the learned codes; see `linear`."""
    learned = self.factor, self.change, self.moves
    return _learned_linear(x, *learned, self.quantized)

  def gradients(self, x: jax.Array, cotangent: jax.Array) -> tuple[Any, ...]:
    """Differentiates `linear` with respect to `x`, `factor`, `change` and `moves`.

    `cotangent` is float32.
    """
    quantized = self._with_codes()
    if self.change is not None:

      def mapped(x: jax.Array, factor: jax.Array, change: jax.Array) -> jax.Array:
        rows = x.astype(jnp.float32).reshape(-1, x.shape[-1]) * factor[None]
        blocks = mxfp4.to_blocks(rows)
        if quantized.input_map is not None:
          blocks = quantized.input_map.apply(blocks)
        return blocks + block_products(change, blocks)

      at_rounded = rounded_input_gradient(quantized, cotangent)
      of_map = jax.vjp(mapped, x, self.factor, self.change)[1](at_rounded)
    else:
      # Factors alone need no mapped inputs: U' comes to the gradient, once.
      at_scaled = input_gradient(quantized, cotangent)
      products = (x.astype(jnp.float32) * at_scaled).reshape(-1, x.shape[-1])
      # A product with ones: XLA:CPU sums columns ten times slower.
      ones = jnp.ones(len(products), products.dtype)
      sums = jnp.dot(ones, products, precision=HIGHEST)
      gradient = at_scaled * self.factor.reshape((1,) * (x.ndim - 1) + (-1,))
      of_map = gradient.astype(x.dtype), sums, None
    if self.moves is None:
      return *of_map, None
    return *of_map, element_gradient(self.installed(), x, cotangent)


# A rule of its own, because a quantized linear gives its arrays no gradient: that of
# its map would be zero.
@jax.custom_vjp
def _learned_linear(
  x: jax.Array,
  factor: jax.Array,
  change: jax.Array | None,
  moves: jax.Array | None,
  quantized: QuantizedLinear,
) -> jax.Array:
  return linear(x, LearnedLinear(quantized, factor, change, moves).installed())


def _learned_backward(saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
  x, *learned, quantized = saved
  # In float32 for a bfloat16 model too, whose steps are as large as what is learned.
  wide = cotangent.astype(jnp.float32)
  return *LearnedLinear(quantized, *learned).gradients(x, wide), None


_learned_linear.defvjp(
  lambda *args: (_learned_linear(*args), args),
  _learned_backward,
)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Perturbed:
  """A linear whose outputs are perturbed, to differentiate by them; never a result.

  Attributes:
    weight: Any weight that `linear` accepts.
    perturbation: Added to the outputs, `[tokens, out_features]`.
  """

  weight: Any
  perturbation: jax.Array

  def linear(self, x: jax.Array) -> jax.Array:
    """Multiplies by the weight and adds the perturbation; see `linear`."""
    y = linear(x, self.weight)
    return y + self.perturbation.reshape(y.shape).astype(y.dtype)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class RowSharded:
  """A weight whose output rows are sharded over `axis`; only inside `shard_map`.

  One device forms each product over the whole input axis, so no sum is split. `gather`
  is `weights` to gather the weights before the product, for devices with different
  inputs, or `outputs` to gather the outputs after it, for the same inputs (static).
  """

  weight: Any
  axis: str = dataclasses.field(metadata={"static": True})
  gather: Literal["weights", "outputs"] = dataclasses.field(metadata={"static": True})

  def whole(self) -> Any:
    """Gathers the rows of all devices."""
    # Tiled: the rows are joined, and no axis is added.
    gather = lambda a: jax.lax.all_gather(a, self.axis, axis=0, tiled=True)
    return map_rows(gather, lambda a: a, self.weight)

  def linear(self, x: jax.Array) -> jax.Array:
    """Multiplies after gathering the weights, or before gathering the outputs."""
    if self.gather == "weights":
      return linear(x, self.whole())
    y = linear(x, self.weight)
    return jax.lax.all_gather(y, self.axis, axis=y.ndim - 1, tiled=True)

  def take_rows(self, index: jax.Array) -> jax.Array:
    """Looks up rows on every device and keeps the row of the device that owns it."""
    if self.gather == "weights":
      return take_rows(self.whole(), index)
    rows = self.weight.shape[0]
    owner = index // rows
    is_here = owner == jax.lax.axis_index(self.axis)
    # An out-of-range index, here the number of rows, gives NaN.
    local = take_rows(self.weight, jnp.where(is_here, index % rows, rows))
    of_devices = jax.lax.all_gather(local, self.axis)
    last = of_devices.shape[0] - 1
    source = jnp.clip(owner, 0, last)[None, ..., None]
    return jnp.take_along_axis(of_devices, source, axis=0)[0]


Stored = jax.Array | Int8Matrix
Weight = (
  Stored
  | QuantizedLinear
  | StraightThrough
  | Transformed
  | LearnedLinear
  | Perturbed
  | RowSharded
)
"""The weight types that `linear` accepts."""


def map_rows(
  by_row: Callable[[Any], Any], whole: Callable[[Any], Any], weight: Any
) -> Any:
  """Applies `by_row` to arrays with one row per output and `whole` to the rest."""
  match weight:
    case QuantizedLinear():
      # Maps and tables belong to the inputs, which every row reads.
      names = ("input_map", "rounding", "float8_scale")
      others = {name: jax.tree.map(whole, getattr(weight, name)) for name in names}
      packed = map_rows(by_row, whole, weight.weight)
      return dataclasses.replace(weight, weight=packed, **others)
    case Transformed():
      whole_map = jax.tree.map(whole, weight.input_map)
      return Transformed(by_row(weight.weight), whole_map)
    case mxfp4.MXTensor() | Int8Matrix():
      return jax.tree.map(by_row, weight)
    case _:
      return by_row(weight)


def linear(
  x: fused_inputs.Input, weight: Weight, *, implementation: Implementation | None = None
) -> jax.Array:
  """Computes `x @ weight.T`, by its own A4 rule where the weight is quantized.

  Args:
    x: Inputs, `[..., in_features]`, float32 or bfloat16, or deferred inputs.
    weight: `[out_features, in_features]`. Only a `QuantizedLinear` or `StraightThrough`
      rounds its inputs; an array or int8 matrix does not.
    implementation: For quantized weights, see `implementations.choose`; `native`
      applies to the rounding of inputs only.

  Returns:
    Outputs, `[..., out_features]`, in the dtype of `x`. The gradient of a quantized
    linear with respect to `x` is straight-through, see `quantized_products`; its own
    arrays have none, that is zero.

  Raises:
    NotImplementedError: The requested implementation cannot run.
    ValueError: The width of a quantized linear is not a multiple of 32.
  """
  # Before `as_array`, because a kernel may compute deferred inputs itself.
  if isinstance(weight, QuantizedLinear):
    return quantized_products(x, [weight], implementation)[0]
  x = fused_inputs.as_array(x)
  match weight:
    case (
      Int8Matrix()
      | StraightThrough()
      | Transformed()
      | LearnedLinear()
      | Perturbed()
      | RowSharded()
    ):
      return weight.linear(x)
    case _:
      # Feature-major; see `elementwise.gated_product`.
      rows, weight = x.reshape(-1, x.shape[-1]), weight.astype(x.dtype)
      y = rounded(jnp.einsum("nd,md->mn", rows, weight, precision=HIGHEST)).T
      return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_onto(
  onto: jax.Array,
  x: fused_inputs.Input,
  weight: Weight,
  *,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Computes `onto + linear(x, weight)`, rounded once more, as a residual is added.

  `onto` has the outputs' shape and dtype. A kernel may add in its own launch, with the
  same roundings.
  """
  if isinstance(weight, QuantizedLinear):
    return quantized_sum(onto, x, weight, implementation)
  return rounded(onto + linear(x, weight, implementation=implementation))


def linear_many(
  x: fused_inputs.Input,
  weights: Sequence[Weight],
  *,
  implementation: Implementation | None = None,
) -> list[jax.Array]:
  """Applies several linears to the same inputs; quantized ones share kernel launches.

  Arguments, results and errors are those of `linear`.
  """
  quantized = [weight for weight in weights if isinstance(weight, QuantizedLinear)]
  if len(quantized) == len(weights):
    return quantized_products(x, quantized, implementation)
  x = fused_inputs.as_array(x)
  return [linear(x, weight, implementation=implementation) for weight in weights]


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
  """Adds a bias, if any, to products `[..., out_features]`, in their dtype."""
  if bias is None:
    return y
  return rounded(y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape))


def take_rows(weight: Stored | RowSharded, index: jax.Array) -> jax.Array:
  """Looks up rows of an embedding `[rows, d]`; an index that no row has gives NaN.

  `index` is int32 of any shape; nothing counts from the end. The result `[..., d]` is
  float32 from an int8 matrix, otherwise in the dtype of the array.
  """
  if isinstance(weight, Int8Matrix | RowSharded):
    return weight.take_rows(index)
  return _rows(weight, index)


def _rows(a: jax.Array, index: jax.Array) -> jax.Array:
  """Looks up rows; those that do not exist, negative ones too, are filled."""
  rows = jnp.asarray(a).at[index]
  return rows.get(mode="fill", wrap_negative_indices=False)
