"""Strict W4A4 linear layer: the pytree leaf and its product with inputs."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.implementations import Implementation
from mxjax.numerics.jax_export import register_dataclass
from mxjax.numerics.precision import float32_sums, rounded
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.pallas_kernels import choice, lowering
from mxjax.pallas_kernels.mosaic import fused
from mxjax.pallas_kernels.products import matmul
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul_each
from mxjax.pallas_kernels.refinement import fused_inputs
from mxjax.pallas_kernels.refinement.a4_operands import (
  a4_operands,
  map_outside,
  tables_of,
)
from mxjax.pallas_kernels.refinement.one_code import Form


@register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedLinear:
  """A strict W4A4 linear that replaces a weight `[out_features, in_features]`.

  It is weight-only, W4A16, where the rule of its inputs is `Unrounded`: outside the
  paper's contract, see `Contract.activations`.

  Attributes:
    weight: Packed weights in the coordinates of `input_map`.
    input_map: The online map of the inputs, or None.
    rounding: The dynamic A4 rule.
    rules: Scale and tie rules of both operands (static).
    float8_scale: Scale of the weight's float8 copy (float32 scalar), or None unless
      float8 products are enabled; see `pack_for_inference`. Reset it to None when you
      replace the weight.
  """

  weight: mxfp4.MXTensor
  input_map: InputMap | None
  rounding: ActivationQuantizer
  rules: mxfp4.Rules = dataclasses.field(
    default=mxfp4.PAPER_RULES, metadata={"static": True}
  )
  float8_scale: jax.Array | None = None

  @property
  def shape(self) -> tuple[int, ...]:
    """Logical shape `(out_features, in_features)`."""
    return self.weight.shape


def quantized_inputs(
  x: jax.Array,
  weight: QuantizedLinear,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Returns the decoded legal A4 operand of inputs `[..., in_features]`.

  The result is float32 `[in_features, n]`, feature-major, where n is the product of the
  leading axes.
  """
  mxfp4.check_width("linear", x.shape[-1])
  rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
  blocks = mxfp4.to_blocks(rows)
  input_map = weight.input_map
  matrix = None if input_map is None else input_map.block_matrices()
  if matrix is not None and matrix.shape[0] == blocks.shape[0]:
    matrix = matrix.astype(blocks.dtype)
  elif input_map is not None:
    # XLA is faster at one matrix for all blocks, which is a single wide product.
    blocks, matrix = input_map.apply(blocks), None
  rounded = weight.rounding.round(
    blocks, weight.rules, matrix=matrix, implementation=implementation
  )
  return rounded.reshape(x.shape[-1], -1)


def quantized_products(
  x: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None = None,
) -> list[jax.Array]:
  """Computes the outputs of quantized linears on the same inputs; see `linear_many`.

  The backward pass takes the A4 rule for the identity: the gradient at `x` is the sum
  of U' W' d over the linears, with W decoded and d the gradient at the output, in
  products of `implementations.product_dtype` with float32 sums. The linears' arrays
  get no gradient.
  """
  outputs: Any = _products(x, weights, implementation)
  return outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(
  x: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None,
) -> list[jax.Array]:
  width = x.shape[-1]
  mxfp4.check_width("linear", width)
  # One linear that kernels cannot run is enough: all share their launches.
  obstacle = next(filter(None, (_obstacle(x, weight) for weight in weights)), None)
  # `native` applies only to the A4 rule, which resolves it when it rounds.
  resolved = implementations.choose(
    "linear", implementation, native=None, pallas=obstacle
  )
  if resolved in ("pallas", "interpret"):
    outputs = _by_kernels(fused_inputs.flat(x), weights, implementation, resolved)
  else:
    array = fused_inputs.as_array(x)
    outputs = [_by_xla(array, weight, implementation) for weight in weights]
  return [
    y.reshape(*x.shape[:-1], weight.shape[0])
    for y, weight in zip(outputs, weights, strict=True)
  ]


def _forward(
  x: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None,
) -> tuple[list[jax.Array], Any]:
  # The gradient at the inputs does not depend on them, so plain ones are not kept.
  deferred = None if isinstance(x, jax.Array) else x
  return _products(x, weights, implementation), (deferred, weights)


def _backward(
  implementation: Implementation | None, saved: Any, cotangents: list[jax.Array]
) -> tuple[Any, None]:
  del implementation
  deferred, weights = saved
  parts = map(input_gradient, weights, cotangents)
  gradient = functools.reduce(jnp.add, parts)
  if deferred is None:
    return gradient, None
  [at_parts] = jax.vjp(fused_inputs.as_array, deferred)[1](gradient)
  return at_parts, None


_products.defvjp(_forward, _backward)


def input_gradient(weight: QuantizedLinear, cotangent: jax.Array) -> jax.Array:
  """Computes U' W' d, without the A4 rule between the two.

  `cotangent` is d at the output, `[..., out_features]`; the result,
  `[..., in_features]`, has its dtype. Products are as in `quantized_products`.
  """
  blocks = rounded_input_gradient(weight, cotangent)
  if weight.input_map is not None:
    # By transposing `apply`, so that a map needs no method for its transpose.
    [blocks] = jax.linear_transpose(weight.input_map.apply, blocks)(blocks)
  x = mxfp4.from_blocks(blocks).astype(cotangent.dtype)
  return x.reshape(*cotangent.shape[:-1], -1)


def rounded_input_gradient(weight: QuantizedLinear, cotangent: jax.Array) -> jax.Array:
  """Computes W' d, the gradient at the rounded inputs, float32 `[blocks, 32, n]`."""
  rows = cotangent.reshape(-1, cotangent.shape[-1])
  dtype = implementations.product_dtype()
  decoded = mxfp4.decode(weight.weight, dtype)
  mapped = float32_sums(_moved(decoded.T), _moved(rows.astype(dtype).T))
  return mapped.reshape(-1, mxfp4.BLOCK_SIZE, mapped.shape[-1])


def element_gradient(
  weight: QuantizedLinear, x: jax.Array, cotangent: jax.Array
) -> jax.Array:
  """Computes the gradient at the weight's elements, in units of their block's scale.

  `x` is `[..., in_features]` and `cotangent` d at the output, `[..., out_features]`;
  the result is float32 `[out_features, in_features]`. Products are as in
  `quantized_products`.
  """
  dtype = implementations.product_dtype()
  inputs = quantized_inputs(x, weight).astype(dtype)
  rows = cotangent.reshape(-1, cotangent.shape[-1]).astype(dtype)
  gradient = float32_sums(_moved(rows.T), _moved(inputs.T))
  exponents = weight.weight.scales.astype(jnp.int32) - mxfp4.SCALE_BIAS
  scale = jnp.repeat(mxfp4.scale_of(exponents), mxfp4.BLOCK_SIZE, axis=-1)
  return gradient * scale


def _moved(transposed: jax.Array) -> jax.Array:
  """Moves a transposed bfloat16 matrix in memory, on a CPU.

  Where a CPU has instructions for bfloat16, XLA (jaxlib 0.10.2) multiplies transposed
  matrices in float32 all the same; `benchmarks/backward_cpu.py` has both sides.
  """
  is_on_cpu = implementations.target_platform() == "cpu"
  if transposed.dtype != jnp.bfloat16 or not is_on_cpu:
    return transposed
  return with_layout_constraint(transposed, Layout((0, 1)))


def _by_xla(
  x: jax.Array, weight: QuantizedLinear, implementation: Implementation | None
) -> jax.Array:
  # Legal values have two significant bits, so they are exact in either dtype. Inputs
  # that are not rounded are not: they take the dtype of `x`. Sums are in float32.
  dtype = implementations.product_dtype() if weight.rounding.is_legal else x.dtype
  operand = quantized_inputs(x, weight, implementation).astype(dtype)
  decoded = mxfp4.decode(weight.weight, dtype)
  return rounded(float32_sums(decoded, operand).T.astype(x.dtype))


def quantized_sum(
  onto: jax.Array,
  x: fused_inputs.Input,
  weight: QuantizedLinear,
  implementation: Implementation | None = None,
) -> jax.Array:
  """Adds a quantized linear's outputs to an array; see `linear_onto`.

  A product that adds in its own launch does so where `choice.product` chooses one. The
  sum is rounded as that of two arrays is.
  """
  plain = lambda onto, x, weight: rounded(
    onto + quantized_products(x, [weight], implementation)[0]
  )
  obstacle = _obstacle(x, weight)
  resolved = implementations.choose(
    "linear", implementation, native=None, pallas=obstacle
  )
  rows = math.prod(x.shape[:-1])
  is_there = weight.float8_scale is not None
  chosen = choice.product(rows, *weight.shape, has_float8=is_there)
  is_alike = onto.dtype == x.dtype
  if resolved not in ("pallas", "interpret") or not (chosen.adds and is_alike):
    return plain(onto, x, weight)

  def by_kernels(
    onto: jax.Array, x: fused_inputs.Input, weight: QuantizedLinear
  ) -> jax.Array:
    flat = onto.reshape(rows, -1)
    [made] = _by_kernels(
      fused_inputs.flat(x), [weight], implementation, resolved, [flat]
    )
    return made.reshape(onto.shape)

  return lowering.with_reference(by_kernels, plain, onto, x, weight)


def _by_kernels(
  rows: fused_inputs.Input,
  weights: Sequence[QuantizedLinear],
  implementation: Implementation | None,
  resolved: Implementation,
  onto: Sequence[jax.Array] | None = None,
) -> list[jax.Array]:
  # Materialized once for all linears, unless the kernel can compute the inputs itself.
  rows = fused_inputs.for_kernel(rows)
  keywords = {"dtype": rows.dtype, "implementation": implementation}
  may_refine = onto is None and _may_refine(rows, weights)
  chosen = [
    choice.product(
      rows.shape[0],
      *weight.shape,
      has_float8=weight.float8_scale is not None,
      may_refine=may_refine,
    )
    for weight in weights
  ]
  if all(each is choice.FLOAT8_FUSED for each in chosen):
    scales = [scale for weight in weights if (scale := weight.float8_scale) is not None]
    return fused.products(
      fused_inputs.as_array(rows),
      [tables_of(weight.input_map, weight.rounding) for weight in weights],
      [weight.weight for weight in weights],
      scales,
      dtype=rows.dtype,
      interpret=resolved == "interpret",
    )
  forms: list[Form] = [each.inputs for each in chosen]
  outputs: dict[int, jax.Array] = {}
  # Linears whose operands have one form share a pass over the inputs and, with few
  # rows, a launch of the product.
  # Sorted, because a set of texts has another order in another process.
  for form in sorted(set(forms)):
    places = [place for place, wanted in enumerate(forms) if wanted == form]
    some = [weights[place] for place in places]
    operators = [(weight.input_map, weight.rounding) for weight in some]
    operands = a4_operands(rows, operators, form, resolved)
    if form.startswith("float8"):
      scales = [scale for weight in some if (scale := weight.float8_scale) is not None]
      made = float8_matmul_each(
        operands, [weight.weight for weight in some], scales, **keywords
      )
    else:
      made = matmul.matmul_each(
        operands, [weight.weight for weight in some], onto=onto, **keywords
      )
    outputs |= zip(places, made, strict=True)
  return [outputs[place] for place in range(len(weights))]


def _may_refine(x: fused_inputs.Input, weights: Sequence[QuantizedLinear]) -> bool:
  """Returns whether a product may refine these inputs for all of the linears."""
  # The fused kernel keeps its inputs in bfloat16 and makes float8 operands.
  if x.dtype != jnp.bfloat16 or any(w.float8_scale is None for w in weights):
    return False
  if any(map_outside(weight.input_map) is not None for weight in weights):
    return False
  tables = [tables_of(weight.input_map, weight.rounding) for weight in weights]
  outputs = [weight.shape[0] for weight in weights]
  takes = [fused.obstacle((x.shape[0], x.shape[1]), each) is None for each in outputs]
  # One launch has one rule for all of its linears.
  return all(takes) and len(set(map(jax.tree.structure, tables))) == 1


def _obstacle(x: fused_inputs.Input, weight: QuantizedLinear) -> str | None:
  """Returns why the Pallas kernels cannot run a linear, or None."""
  if weight.rules != mxfp4.PAPER_RULES:
    return f"kernels know the paper's rules only, got {weight.rules}"
  if weight.rounding.kernel_tables() is None:
    return f"kernels do not know the rounding {type(weight.rounding).__name__}"
  if x.dtype not in (jnp.float32, jnp.bfloat16):
    return f"kernels take float32 or bfloat16 inputs, got {x.dtype}"
  if not math.prod(x.shape):
    return f"there are no inputs in shape {x.shape}"
  return None
