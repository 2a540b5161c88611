"""The LAPACK calls that a hook may make: exact names, shapes, dtypes and options."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

from mxjax.discovery.core.task import RefusedError

# As in `einsum`, but that no sum is meant: one letter is one size in a whole call.
SHAPES = {
  "geqrf": "mn->mn,k",
  "gesdd": "mn->mn,k,mu,vn,",
  "getrf": "mn->mn,K,",
  "orgqr": "mn,k->mn",
  "potrf": "nn->nn,",
  "syevd": "nn->nn,n,",
  "trsm": "ss,mn->mn",
}
"""Axes of operands and results; the last of several results, and `K`, are integers."""
OPTIONS = {
  "gesdd": {"mode": "ANS"},
  "potrf": {"uplo": "LU"},
  "syevd": {"mode": "NV", "uplo": "LU"},
  "trsm": {"side": "LR", "uplo": "LU", "trans_x": "CNT", "diag": "NU"},
}
NAME = re.compile(r"lapack_([sd])(\w+)_ffi")


def call(
  op: ir.Operation, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]
) -> Sequence[jax.Array]:
  """Makes the LAPACK call of a `stablehlo.custom_call`.

  Leading axes are a batch. Every dtype and shape must follow from the routine.

  Raises:
    RefusedError: It is another call, or has other shapes, dtypes or options.
  """
  target = ir.StringAttr(op.attributes["call_target_name"]).value
  # The whole name, because it selects the native code that is called.
  match = NAME.fullmatch(target)
  if match is None or match.group(2) not in SHAPES:
    raise RefusedError(f"the custom call {target[:60]!r} is not allowed.")
  options = _options(op, target, match.group(2))
  routine = match.group(2), {name: chr(value) for name, value in options.items()}
  _check(target, *routine, operands, results, jnp.dtype(_FLOATS[match.group(1)]))
  taken, given = (side.split(",") for side in SHAPES[match.group(2)].split("->"))
  function = jax.ffi.ffi_call(
    target,
    list(results),
    # JAX's LAPACK kernels take leading axes as a batch.
    vmap_method="broadcast_all",
    input_layouts=[_layout(x, axes) for x, axes in zip(operands, taken, strict=True)],
    output_layouts=[_layout(x, axes) for x, axes in zip(results, given, strict=True)],
  )
  return function(*operands, **options)


_FLOATS = {"s": "float32", "d": "float64"}


def _layout(array: Any, axes: str) -> tuple[int, ...]:
  """Returns the order of an array's axes, major to minor, with matrices by column."""
  order = list(range(len(array.shape)))
  return (*order[:-2], order[-1], order[-2]) if len(axes) == 2 else tuple(order)


def _options(op: ir.Operation, target: str, routine: str) -> dict[str, np.uint8]:
  given = {}
  for name in ("mhlo.backend_config", "backend_config"):
    if name in op.attributes and isinstance(op.attributes[name], ir.DictAttr):
      given = {a.name: a.attr for a in ir.DictAttr(op.attributes[name])}
  allowed = OPTIONS.get(routine, {})
  values = {name: int(ir.IntegerAttr(attr).value) for name, attr in given.items()}
  if values.keys() != allowed.keys() or any(
    values[name] not in allowed[name].encode() for name in values
  ):
    raise RefusedError(f"{target}: expected options of {allowed}, got {values}.")
  return {name: np.uint8(value) for name, value in values.items()}


def _check(
  target: str,
  routine: str,
  options: dict[str, str],
  operands: Sequence[Any],
  results: Sequence[Any],
  dtype: Any,
) -> None:
  """Refuses operands and results of shapes or dtypes that do not fit together."""
  axes = [side.split(",") for side in SHAPES[routine].split("->")]
  letters, arrays = [*axes[0], *axes[1]], [*operands, *results]
  first = len(operands[0].shape) - len(letters[0]) if operands else -1
  sizes: dict[str, int] = {}
  fits = len(operands) == len(axes[0]) and len(results) == len(axes[1]) and first >= 0
  for place, (names, array) in enumerate(zip(letters, arrays, strict=False)):
    shape = tuple(array.shape)
    fits &= shape[:first] == tuple(operands[0].shape[:first])
    fits &= len(shape) == first + len(names)
    for name, size in zip(names.lower(), shape[first:], strict=False):
      fits &= sizes.setdefault(name, size) == size
    is_integer = names in ("K", "") and place >= len(axes[0])
    # An unnamed result is the `info` of the routine; pivots are integers as well.
    fits &= array.dtype == (jnp.dtype("int32") if is_integer else dtype)
  if fits:
    fits = _related(routine, options, sizes)
  if not fits:
    shown = [f"{x.dtype}{list(x.shape)}" for x in arrays]
    raise RefusedError(f"{target}: expected {SHAPES[routine]}, got {shown}.")


def _related(routine: str, options: dict[str, str], sizes: dict[str, int]) -> bool:
  """Returns whether sizes that only the routine relates fit together."""
  get = sizes.get
  m, n, k = get("m", 0), get("n", 0), get("k", 0)
  if routine == "trsm":
    return get("s") == (m if options["side"] == "L" else n)
  if routine == "orgqr":
    return m >= n >= k
  thin, full = (min(m, n), min(m, n)), (m, n)
  vectors = {"A": (full,), "S": (thin,), "N": (thin, full)}
  if routine == "gesdd" and (get("u"), get("v")) not in vectors[options["mode"]]:
    return False
  return "k" not in sizes or k == min(m, n)
