"""StableHLO operations in terms of JAX's own; what is in no table is refused."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mxjax.discovery.core.task import RefusedError


def _guarded(
  operation: Callable[..., Any], at_zero: Callable[[jax.Array], jax.Array]
) -> Callable[..., Any]:
  """Returns a division whose integer form never has a divisor of zero.

  XLA folds constants on the host, where a division of integers by zero is a signal
  that ends the process. `at_zero` returns of the dividend what XLA computes there.
  """

  def divided(a: Any, b: Any) -> Any:
    is_integer = jnp.issubdtype(b.dtype, jnp.integer)
    if not is_integer or (isinstance(b, np.ndarray | np.generic) and np.all(b)):
      return operation(a, b)
    is_zero = lax.eq(b, jnp.zeros_like(b))
    result = operation(a, lax.select(is_zero, jnp.ones_like(b), b))
    return lax.select(is_zero, at_zero(jnp.asarray(a)), result)

  return divided


ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
  **{
    f"stablehlo.{name}": getattr(lax, name)
    for name in """abs add atan2 cbrt ceil clamp complex floor imag is_finite log
    logistic real rsqrt select shift_left shift_right_arithmetic shift_right_logical
    sign sqrt tan tanh""".split()
  },
  "stablehlo.and": lax.bitwise_and,
  "stablehlo.cosine": lax.cos,
  "stablehlo.count_leading_zeros": lax.clz,
  # All bits are set in the quotient.
  "stablehlo.divide": _guarded(lax.div, lambda a: ~jnp.zeros_like(a)),
  "stablehlo.exponential": lax.exp,
  "stablehlo.exponential_minus_one": lax.expm1,
  "stablehlo.log_plus_one": lax.log1p,
  "stablehlo.maximum": lax.max,
  "stablehlo.minimum": lax.min,
  "stablehlo.multiply": lax.mul,
  "stablehlo.negate": lax.neg,
  "stablehlo.not": lax.bitwise_not,
  "stablehlo.or": lax.bitwise_or,
  "stablehlo.popcnt": lax.population_count,
  "stablehlo.power": lax.pow,
  "stablehlo.remainder": _guarded(lax.rem, lambda a: a),
  "stablehlo.round_nearest_afz": lambda x: lax.round(
    x, lax.RoundingMethod.AWAY_FROM_ZERO
  ),
  "stablehlo.round_nearest_even": lambda x: lax.round(
    x, lax.RoundingMethod.TO_NEAREST_EVEN
  ),
  "stablehlo.sine": lax.sin,
  "stablehlo.subtract": lax.sub,
  "stablehlo.xor": lax.bitwise_xor,
  **{
    f"chlo.{name}": getattr(lax, name)
    for name in """acos acosh asin asinh atan atanh bessel_i1e cosh digamma erf erf_inv
    erfc lgamma sinh square tan""".split()
  },
  "chlo.next_after": lax.nextafter,
  "stablehlo.optimization_barrier": lambda *x: lax.optimization_barrier(x),
}
REDUCERS = {
  "stablehlo.add": lax.scatter_add,
  "stablehlo.maximum": lax.scatter_max,
  "stablehlo.minimum": lax.scatter_min,
  "stablehlo.multiply": lax.scatter_mul,
  "stablehlo.subtract": lax.scatter_sub,
  "": lax.scatter,
}
"""Scatters by the operation that combines an update with what was there."""
COMPARISONS = {
  "EQ": lax.eq,
  "NE": lax.ne,
  "LT": lax.lt,
  "LE": lax.le,
  "GT": lax.gt,
  "GE": lax.ge,
}
DTYPES = {
  "i1": "bool",
  **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
  **{f"ui{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
  **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
  "bf16": "bfloat16",
  "complex<f32>": "complex64",
  "complex<f64>": "complex128",
}
Values = Sequence[Any]


def _dtype(kind: ir.Type) -> Any:
  if str(kind) not in DTYPES:
    raise RefusedError(f"arrays of {kind} are not supported; use {sorted(DTYPES)}.")
  return jnp.dtype(DTYPES[str(kind)])


def aval(value: ir.Value) -> jax.ShapeDtypeStruct:
  """Returns the abstract array of a value.

  Raises:
    RefusedError: Its shape is not static or its dtype not in `DTYPES`.
  """
  kind = ir.RankedTensorType(value.type)
  if not kind.has_static_shape:
    raise RefusedError("shapes that depend on data are not supported.")
  return jax.ShapeDtypeStruct(tuple(kind.shape), _dtype(kind.element_type))


class Attributes:
  """Attributes of an operation as plain Python values; a missing one is the default."""

  def __init__(self, op: ir.Operation) -> None:
    self._op = op

  def raw(self, name: str) -> Any:
    """Returns an attribute as MLIR has it, or None."""
    return self._op.attributes[name] if name in self._op.attributes else None

  def get(self, name: str, default: Any = None) -> Any:
    """Returns a number, or a list of numbers or attributes."""
    found = self.raw(name)
    if found is None:
      return default
    if isinstance(found, ir.DenseIntElementsAttr):
      return np.array(found).tolist()
    if isinstance(found, ir.ArrayAttr | ir.DenseI64ArrayAttr | ir.DenseBoolArrayAttr):
      return list(found)
    return found.value

  def word(self, name: str) -> str:
    """Returns the keyword of an enumeration, such as `LT` or `RFFT`."""
    return str(self.raw(name)).rpartition(" ")[2].rstrip(">")


def _fingerprint(region: ir.Region) -> list[Any]:
  """Returns the operations of a region in a form that two equal regions share."""
  (block,) = region.blocks
  numbers = {value: index for index, value in enumerate(block.arguments)}
  found: list[Any] = []

  def named(value: ir.Value) -> Any:
    if value in numbers:
      return numbers[value]
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != "stablehlo.constant":
      raise RefusedError("a comparator reads more than its two elements.")
    return str(owner.attributes["value"])

  for op in block.operations:
    shown = sorted(f"{name}={op.attributes[name]}" for name in op.attributes)
    if op.operation.name == "stablehlo.constant":
      continue
    found.append((op.operation.name, shown, [named(v) for v in op.operands]))
    numbers |= {value: len(numbers) + i for i, value in enumerate(op.results)}
  return found


def _sort_keys(op: ir.Operation, operands: Values, dimension: int) -> int:
  """Returns the number of keys for which `lax.sort` has the comparator of `op`."""
  # The number of keys is in the comparator alone, so each is lowered and compared.
  for keys in range(1, len(operands) + 1):
    sort = lambda *x, keys=keys: lax.sort(x, dimension=dimension, num_keys=keys)
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    lowered = jax.jit(sort).lower(*avals).compiler_ir("stablehlo")
    (main,) = (f for f in lowered.body.operations if f.name.value == "main")
    block = main.regions[0].blocks[0]
    theirs = next(o for o in block.operations if o.operation.name == "stablehlo.sort")
    if _fingerprint(theirs.regions[0]) == _fingerprint(op.regions[0]):
      return keys
  raise RefusedError("a sort with a comparator of its own is not supported.")


# Operations on arrays: attributes, result and operands to the result.


def _constant(at: Attributes, out: Any) -> Any:
  value = ir.DenseElementsAttr(at.raw("value"))
  if value.is_splat:
    return lax.full(out.shape, value.get_splat_value().value, out.dtype)
  # NumPy reads constants of bfloat16 as objects.
  if out.dtype == jnp.bfloat16 or out.dtype == jnp.float16:
    return np.array(list(ir.DenseFPElementsAttr(value)), out.dtype).reshape(out.shape)
  return np.array(value).astype(out.dtype).reshape(out.shape)


def _total_order(x: Any) -> Any:
  """Returns integers in the order of floats: -NaN, -inf, ..., -0, 0, ..., inf, NaN."""
  bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
  # As integers, negative floats are in reverse: all bits but the sign are turned
  # around.
  return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _compare(at: Attributes, out: Any, a: Any, b: Any) -> Any:
  del out
  if at.raw("compare_type") is not None and at.word("compare_type") == "TOTALORDER":
    a, b = (_total_order(x) if x.dtype.kind not in "iub" else x for x in (a, b))
  return COMPARISONS[at.word("comparison_direction")](a, b)


def _dot(at: Attributes, out: Any, a: Any, b: Any) -> Any:
  n = stablehlo.DotDimensionNumbers(at.raw("dot_dimension_numbers"))
  contracting = n.lhs_contracting_dimensions, n.rhs_contracting_dimensions
  batching = n.lhs_batching_dimensions, n.rhs_batching_dimensions
  precision = [
    str(p).rpartition(" ")[2].rstrip(">") for p in at.get("precision_config", [])
  ]
  return lax.dot_general(
    a,
    b,
    (tuple(map(tuple, contracting)), tuple(map(tuple, batching))),
    precision=tuple(lax.Precision[p] for p in precision) or None,
    # What products are added up in, such as int32 for int8, is said by the result
    # alone.
    preferred_element_type=out.dtype,
  )


def _vectors(indices: Any, dimension: int) -> Any:
  """Returns indices with their vectors along the last axis."""
  if dimension == indices.ndim:
    return lax.expand_dims(indices, (dimension,))
  return jnp.moveaxis(indices, dimension, -1)


def _gather(at: Attributes, out: Any, operand: Any, indices: Any) -> Any:
  del out
  n = stablehlo.GatherDimensionNumbers(at.raw("dimension_numbers"))
  numbers = lax.GatherDimensionNumbers(
    offset_dims=tuple(n.offset_dims),
    collapsed_slice_dims=tuple(n.collapsed_slice_dims),
    start_index_map=tuple(n.start_index_map),
    operand_batching_dims=tuple(n.operand_batching_dims),
    start_indices_batching_dims=tuple(n.start_indices_batching_dims),
  )
  return lax.gather(
    operand,
    _vectors(indices, n.index_vector_dim),
    numbers,
    tuple(at.get("slice_sizes")),
    indices_are_sorted=at.get("indices_are_sorted", False),
    # StableHLO moves a slice that begins outside to the edge.
    mode=lax.GatherScatterMode.CLIP,
  )


def _pairs(padding: list[list[int]]) -> list[tuple[int, int]]:
  return [(low, high) for low, high in padding]


ARRAYS: Mapping[str, Callable[..., Any]] = {
  "stablehlo.bitcast_convert": lambda at, out, x: lax.bitcast_convert_type(
    x, out.dtype
  ),
  "stablehlo.broadcast_in_dim": lambda at, out, x: lax.broadcast_in_dim(
    x, out.shape, at.get("broadcast_dimensions")
  ),
  "stablehlo.compare": _compare,
  "stablehlo.concatenate": lambda at, out, *x: lax.concatenate(x, at.get("dimension")),
  "stablehlo.constant": _constant,
  "stablehlo.convert": lambda at, out, x: lax.convert_element_type(x, out.dtype),
  "stablehlo.dot_general": _dot,
  "stablehlo.dynamic_slice": lambda at, out, x, *start: lax.dynamic_slice(
    x, start, out.shape
  ),
  "stablehlo.dynamic_update_slice": lambda at, out, x, y, *start: (
    lax.dynamic_update_slice(x, y, start)
  ),
  "stablehlo.fft": lambda at, out, x: lax.fft(
    x, at.word("fft_type"), tuple(at.get("fft_length"))
  ),
  "stablehlo.gather": _gather,
  "stablehlo.iota": lambda at, out: lax.broadcasted_iota(
    out.dtype, out.shape, at.get("iota_dimension")
  ),
  "stablehlo.pad": lambda at, out, x, y: lax.pad(
    x,
    y,
    list(
      zip(
        at.get("edge_padding_low"),
        at.get("edge_padding_high"),
        at.get("interior_padding"),
        strict=True,
      )
    ),
  ),
  "stablehlo.reduce_precision": lambda at, out, x: lax.reduce_precision(
    x, at.get("exponent_bits"), at.get("mantissa_bits")
  ),
  "stablehlo.reshape": lambda at, out, x: lax.reshape(x, out.shape),
  "stablehlo.reverse": lambda at, out, x: lax.rev(x, at.get("dimensions")),
  "stablehlo.slice": lambda at, out, x: lax.slice(
    x, at.get("start_indices"), at.get("limit_indices"), at.get("strides")
  ),
  "stablehlo.transpose": lambda at, out, x: lax.transpose(x, at.get("permutation")),
}


# Operations that hold code: attributes, operation, operands and the code.


def _reduce(
  at: Attributes, op: Any, operands: Values, inner: Callable[..., Any]
) -> Any:
  del op
  half = len(operands) // 2
  function = lambda a, b: inner(*a, *b)
  values, first = tuple(operands[:half]), tuple(operands[half:])
  return lax.reduce(values, first, function, at.get("dimensions"))


def _reduce_window(
  at: Attributes, op: Any, operands: Values, inner: Callable[..., Any]
) -> Any:
  del op
  x, first = operands
  ones = (1,) * x.ndim
  result = lax.reduce_window(
    x,
    first,
    lambda a, b: inner(a, b)[0],
    tuple(at.get("window_dimensions")),
    tuple(at.get("window_strides", ones)),
    _pairs(np.broadcast_to(at.get("padding", 0), (x.ndim, 2)).tolist()),
    tuple(at.get("base_dilations", ones)),
    tuple(at.get("window_dilations", ones)),
  )
  return [result]


def _scatter(at: Attributes, op: Any, operands: Values, inner: Any) -> Any:
  del inner
  x, indices, updates = operands
  n = stablehlo.ScatterDimensionNumbers(at.raw("scatter_dimension_numbers"))
  *steps, (_, _, last) = _fingerprint(op.regions[0])
  name = steps[0][0] if steps else ""
  # Either nothing is computed and the update, 1, returned; or one operation on the old
  # value, 0, and the update, whose result, 2, is returned.
  if [(s[0], s[2]) for s in steps] not in ([], [(name, [0, 1])]) or last != [
    2 if steps else 1
  ]:
    raise RefusedError("a scatter with a combiner of its own is not supported.")
  numbers = lax.ScatterDimensionNumbers(
    update_window_dims=tuple(n.update_window_dims),
    inserted_window_dims=tuple(n.inserted_window_dims),
    scatter_dims_to_operand_dims=tuple(n.scattered_dims_to_operand_dims),
    operand_batching_dims=tuple(n.input_batching_dims),
    scatter_indices_batching_dims=tuple(n.scatter_indices_batching_dims),
  )
  result = REDUCERS[name](
    x,
    _vectors(indices, n.index_vector_dim),
    updates,
    numbers,
    indices_are_sorted=at.get("indices_are_sorted", False),
    unique_indices=at.get("unique_indices", False),
    # StableHLO leaves out updates that lie outside.
    mode=lax.GatherScatterMode.FILL_OR_DROP,
  )
  return [result]


def _sort(at: Attributes, op: Any, operands: Values, inner: Any) -> Any:
  del inner
  dimension = at.get("dimension", -1)
  return lax.sort(
    tuple(operands),
    dimension=dimension,
    is_stable=at.get("is_stable", False),
    num_keys=_sort_keys(op, operands, dimension),
  )


def _case(at: Attributes, op: Any, operands: Values, *inner: Any) -> Any:
  del at, op
  index, last = operands[0], len(inner) - 1
  # StableHLO takes the last branch for an index outside, also a negative one.
  index = jnp.where((index < 0) | (index > last), last, index)
  return lax.switch(index, inner)


WITH_REGIONS: Mapping[str, Callable[..., Any]] = {
  "stablehlo.case": _case,
  "stablehlo.if": lambda at, op, operands, yes, no: lax.cond(operands[0], yes, no),
  "stablehlo.reduce": _reduce,
  "stablehlo.reduce_window": _reduce_window,
  "stablehlo.scatter": _scatter,
  "stablehlo.sort": _sort,
  "stablehlo.while": lambda at, op, operands, go_on, body: lax.while_loop(
    lambda x: go_on(*x)[0], lambda x: body(*x), tuple(operands)
  ),
}
