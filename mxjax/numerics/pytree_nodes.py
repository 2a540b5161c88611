"""Dataclasses as pytree nodes whose structure tells their class.

In jaxlib 0.10.2 and 0.11.2 `jax.tree_util.register_dataclass` makes nodes that are
equal whatever their class is, if they have as many fields and the same static values.
Their hashes differ, but JAX's cache of compiled functions asks for equality where a few
bits of two hashes agree, and these bits differ from process to process. Then it runs
the program that was compiled for the other class: now and then the inputs of a
weight-only linear were rounded. So nothing here is registered by that function. Nodes
of `register_pytree_with_keys` differ by class. `benchmarks/pytree_nodes.py` counts
wrong calls and measures what the other registration costs.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax

Class = TypeVar("Class", bound=type)


def register(cls: Class, *, dropped: Sequence[str] = ()) -> Class:
  """Registers a dataclass as a pytree node, as a decorator.

  Fields with the metadata `static` are part of the structure, and so hashable; the
  others are children. `dropped` are fields that no copy of a node takes over: it has
  their defaults.
  """
  fields = [f for f in dataclasses.fields(cls) if f.init and f.name not in dropped]
  static = [f.name for f in fields if f.metadata.get("static")]
  data = [f.name for f in fields if f.name not in static]
  names = [*data, *static]
  keys = [jax.tree_util.GetAttrKey(name) for name in data]
  children, statics = _getter(data), _getter(static)

  def with_keys(node: Any) -> tuple[Iterable[Any], tuple[Any, ...]]:
    return zip(keys, children(node), strict=True), statics(node)

  def without_keys(node: Any) -> tuple[Iterable[Any], tuple[Any, ...]]:
    return children(node), statics(node)

  def build(values: tuple[Any, ...], parts: Iterable[Any]) -> Any:
    return cls(**dict(zip(names, (*parts, *values), strict=True)))

  # Flattening without keys is given apart: every call needs it, keys only names in
  # messages and paths.
  jax.tree_util.register_pytree_with_keys(cls, with_keys, build, without_keys)
  return cls


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
  """Returns what reads attributes as a tuple; every call of a model does, so in C."""
  if not names:
    return lambda node: ()
  if len(names) == 1:
    return functools.partial(_only, operator.attrgetter(names[0]))
  return operator.attrgetter(*names)


def _only(get: Callable[[Any], Any], node: Any) -> tuple[Any, ...]:
  return (get(node),)
