"""Makes pytrees and kernels of the library survive `jax.export`.

An exported program is saved and called elsewhere: classes of its operands need names
by which they are saved, and no custom call of this process may be left in it.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.export
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from mxjax.numerics import pytree_nodes

Class = TypeVar("Class", bound=type)


def register_dataclass(cls: Class) -> Class:
  """Registers a dataclass as a pytree that exported programs may take and return.

  A static field is JSON-ready, or a dataclass like its default.
  """
  pytree_nodes.register(cls)
  # JSON does not name the class of a nested dataclass, so it is that of the default.
  defaults = [f.default for f in dataclasses.fields(cls) if f.metadata.get("static")]
  is_nested = [dataclasses.is_dataclass(default) for default in defaults]

  def serialize(values: Any) -> bytes:
    pairs = zip(values, is_nested, strict=True)
    plain = [dataclasses.asdict(one) if nested else one for one, nested in pairs]
    return json.dumps(plain).encode()

  def deserialize(text: bytes) -> tuple[Any, ...]:
    pairs = zip(json.loads(text), defaults, is_nested, strict=True)
    return tuple(type(d)(**one) if nested else one for one, d, nested in pairs)

  jax.export.register_pytree_node_serialization(
    cls,
    serialized_name=f"{cls.__module__}.{cls.__qualname__}",
    serialize_auxdata=serialize,
    deserialize_auxdata=deserialize,
  )
  return cls


def kernel_or_reference(
  kernel: Callable[..., jax.Array],
  reference: Callable[..., jax.Array],
  *arrays: jax.Array,
  **static: Any,
) -> jax.Array:
  """Computes `kernel(*arrays, **static)`, but `reference` in exported programs.

  An exported program may run where a custom call of this process does not exist. Both
  are functions of a module, whose results agree in shape and dtype.
  """
  options = tuple(sorted(static.items()))
  return _choice.bind(*arrays, kernel=kernel, reference=reference, options=options)


_choice = Primitive("mxjax_kernel")


@_choice.def_impl
def _run(*arrays: jax.Array, kernel: Any, reference: Any, options: Any) -> jax.Array:
  del reference
  return kernel(*arrays, **dict(options))


@_choice.def_abstract_eval
def _result(*avals: Any, kernel: Any, reference: Any, options: Any) -> Any:
  del kernel
  shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
  # Of the reference, because tracing a kernel compiles it.
  result = jax.eval_shape(functools.partial(reference, **dict(options)), *shapes)
  return jax.core.ShapedArray(result.shape, result.dtype)


def _batch(arrays: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
  """Runs the elements of a batch one after the other."""
  # Kernels read operands of a fixed rank and know no axis of a batch. Operands without
  # that axis are the same for every element.
  mapped = {i: axis for i, axis in enumerate(axes) if axis is not None}
  stacked = {i: jnp.moveaxis(arrays[i], axis, 0) for i, axis in mapped.items()}

  def one(parts: dict[int, jax.Array]) -> jax.Array:
    return _choice.bind(*(parts.get(i, a) for i, a in enumerate(arrays)), **params)

  return jax.lax.map(one, stacked), 0


def _lower(
  context: Any, *operands: Any, kernel: Any, reference: Any, options: Any
) -> Any:
  # Decided where the program is lowered, because a trace does not know what it is for.
  is_export = context.module_context.lowering_parameters.for_export
  run = functools.partial(reference if is_export else kernel, **dict(options))
  return mlir.lower_fun(run, multiple_results=False)(context, *operands)


batching.primitive_batchers[_choice] = _batch
mlir.register_lowering(_choice, _lower)
