"""Rebuilds a hook from its StableHLO, operation by operation, in JAX's own.

What a worker executes is therefore what these files understood. The program of one unit
is the only artifact of a hook, and its batched form is that program under `jax.vmap` on
the trusted side: rows are independent by construction. No name or attribute of an
artifact selects code.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox.rebuilding import lapack
from mxjax.discovery.sandbox.rebuilding.operations import (
  ARRAYS,
  ELEMENTWISE,
  WITH_REGIONS,
  Attributes,
  Values,
  aval,
)


class Rebuilder:
  """Reads one module and calls its functions with JAX arrays.

  `operations` and `constant_bytes` are counted with every call expanded; constants of
  one repeated value do not count.
  """

  def __init__(self, serialized: bytes) -> None:
    """Parses a serialized module.

    Raises:
      RefusedError: It calls itself, or something that it does not hold.
    """
    with mlir.make_ir_context() as context:
      self._module = stablehlo.deserialize_portable_artifact(context, serialized)
      self._module.operation.verify()
    self._functions = {f.name.value: f for f in self._module.body.operations}
    self._sizes: dict[str, tuple[int, int]] = {}
    self.operations, self.constant_bytes = self._size("main")

  @property
  def arguments(self) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays of the arguments of `main`."""
    return [aval(value) for value in self._entry("main").arguments]

  def main(self, *arguments: Any) -> list[Any]:
    """Returns the results of `main`; call it while tracing.

    Raises:
      RefusedError: An operation is not supported.
    """
    return self._block(self._entry("main"), arguments, {})

  def _entry(self, name: str) -> ir.Block:
    if name not in self._functions:
      raise RefusedError(f"the function {name[:40]!r} is not in the artifact.")
    return self._functions[name].regions[0].blocks[0]

  def _size(self, name: str) -> tuple[int, int]:
    # The mark of a function that is still being counted; one that was has an operation.
    if self._sizes.get(name) == (0, 0):
      raise RefusedError(f"the function {name[:40]!r} calls itself.")
    if name not in self._sizes:
      self._sizes[name] = (0, 0)
      self._sizes[name] = self._block_size(self._entry(name))
    return self._sizes[name]

  def _block_size(self, block: ir.Block) -> tuple[int, int]:
    count = held = 0
    for op in block.operations:
      parts = [self._block_size(b) for region in op.regions for b in region.blocks]
      if callee := _callee(op.operation):
        parts.append(self._size(callee))
      own = 0
      if op.operation.name == "stablehlo.constant":
        out = aval(op.results[0])
        if out.dtype.kind == "c":
          raise RefusedError("complex constants are not supported.")
        value = ir.DenseElementsAttr(op.attributes["value"])
        own = 0 if value.is_splat else math.prod(out.shape) * out.dtype.itemsize
      count += 1 + sum(n for n, _ in parts)
      held += own + sum(size for _, size in parts)
    return count, held

  def _block(self, block: ir.Block, arguments: Values, outer: dict[Any, Any]) -> Values:
    known = outer | dict(zip(block.arguments, arguments, strict=True))
    for view in block.operations:
      op = view.operation
      operands = [known[value] for value in op.operands]
      if op.name in ("func.return", "stablehlo.return"):
        return operands
      results = self._apply(op, operands, known)
      for value, result in zip(op.results, results, strict=True):
        out = aval(value)
        # Where JAX infers another type, as by promotion, it would not compute what was
        # declared.
        if (result.shape, result.dtype) != (out.shape, out.dtype):
          raise RefusedError(f"{op.name} with operands of mixed types.")
        known[value] = result
    raise RefusedError("a block without a result.")

  def _apply(self, op: ir.Operation, operands: Values, known: dict[Any, Any]) -> Values:
    """Returns the results of one operation."""
    if callee := _callee(op):
      named = str(op.attributes["name"].value) if "composite" in op.name else ""
      if named == "chlo.top_k":
        return lax.top_k(operands[0], aval(op.results[0]).shape[-1])
      if named in ELEMENTWISE:
        return [ELEMENTWISE[named](*operands)]
      # A function sees nothing of its caller, but for its operands.
      return self._block(self._entry(callee), operands, {})
    if op.name in ELEMENTWISE:
      result = ELEMENTWISE[op.name](*operands)
      return result if isinstance(result, list | tuple) else [result]
    if op.name == "stablehlo.custom_call":
      return lapack.call(op, operands, [aval(value) for value in op.results])
    inner = [
      lambda *x, block=region.blocks[0]: tuple(self._block(block, x, known))
      for region in op.regions
    ]
    if op.name in WITH_REGIONS:
      return WITH_REGIONS[op.name](Attributes(op), op, operands, *inner)
    if op.name not in ARRAYS:
      raise RefusedError(f"the operation {op.name} is not allowed.")
    return [ARRAYS[op.name](Attributes(op), aval(op.results[0]), *operands)]


def _callee(op: ir.Operation) -> str:
  """Returns the function that an operation calls, or an empty string."""
  name = {"func.call": "callee", "stablehlo.composite": "decomposition"}.get(op.name)
  return ir.FlatSymbolRefAttr(op.attributes[name]).value if name else ""
