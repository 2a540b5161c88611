"""Turns candidate source into serialized StableHLO inside the jail.

This file imports nothing from mxjax: the jailed interpreter that executes candidate
Python has access to JAX, NumPy and the source text only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import partial_eval

PLATFORMS = ("cpu",)


class TracedHook(NamedTuple):
  """The serialized `jax.export` artifacts of one hook, for one unit of each size."""

  name: str
  units: list[bytes]


@contextlib.contextmanager
def tracing_scope() -> Iterator[None]:
  """Enables 64-bit types and NumPy's promotion, whatever the process has set."""
  with (
    jax.enable_x64(True),
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    yield


def _aval(
  entry: list[Any], sizes: dict[str, int], lead: tuple[Any, ...]
) -> jax.ShapeDtypeStruct:
  dtype, shape = entry
  known = [sizes.get(size, size) for size in shape]
  return jax.ShapeDtypeStruct((*lead, *known), jnp.dtype(dtype))


def avals(tree: Any, sizes: dict[str, int], lead: tuple[Any, ...] = ()) -> Any:
  """Builds an argument's abstract arrays from `[dtype, shape]` or a dictionary."""
  if isinstance(tree, dict):
    return {name: _aval(entry, sizes, lead) for name, entry in tree.items()}
  return _aval(tree, sizes, lead)


def _without_dead_code(
  function: Callable[..., Any], arguments: list[Any]
) -> Callable[..., Any]:
  """Removes computations that the function's results do not need.

  Lowering removes dead code too, but with a symbolic batch size it leaves the
  computation of the dead values' shapes.
  """
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  used = [True] * len(closed.jaxpr.outvars)
  jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
  run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(jaxpr, closed.consts))
  tree = jax.tree.structure(shapes)
  return lambda *values: jax.tree.unflatten(tree, run(*jax.tree.leaves(values)))


def _exported(function: Callable[..., Any], arguments: list[Any]) -> bytes:
  live = _without_dead_code(function, arguments)
  exported = jax.export.export(jax.jit(live), platforms=PLATFORMS)(*arguments)
  return bytes(exported.serialize())


def _flat(function: Callable[..., Any], name: str) -> Callable[..., Any]:
  """Returns the hook with its result as a plain tuple of arrays."""

  def call(*arguments: Any) -> tuple[jax.Array, ...]:
    result = function(*arguments)
    leaves = tuple(result) if isinstance(result, tuple | list) else (result,)
    for leaf in leaves:
      if not isinstance(leaf, jax.Array):
        raise TypeError(f"{name} must return arrays, got {type(leaf).__name__}")
    return leaves

  return call


def trace_hook(function: Callable[..., Any], spec: dict[str, Any]) -> TracedHook:
  """Exports one hook, at every size of its unit.

  Raises:
    TypeError: The hook returned something other than arrays.
    ValueError: Two traces of the hook differ.
  """
  units = [_unit(function, spec, sizes) for sizes in spec["sizes"]]
  return TracedHook(spec["name"], units)


def _unit(
  function: Callable[..., Any], spec: dict[str, Any], sizes: dict[str, int]
) -> bytes:
  arguments = [avals(tree, sizes) for _, tree in spec["arguments"]]
  with tracing_scope():
    # A fresh wrapper each time, because JAX's trace cache would return the same
    # function's first trace. One line for both, because the artifact holds the line
    # numbers of its tracing.
    units = [_exported(_flat(function, spec["name"]), arguments) for _ in range(2)]
    if units[0] != units[1]:
      raise ValueError(f"{spec['name']} traces differently each time")
  return units[0]


def trace(source: str, hooks: list[dict[str, Any]]) -> list[TracedHook]:
  """Executes candidate source and exports its hooks, in the order of `hooks`.

  Call this only in a jail or with trusted source. `hooks` is `Interface.to_list()`;
  hooks that the source does not define are left out. Each hook has a module of its own:
  a hook that another one changed by being traced would depend on more than its key
  (`candidate_source.hook_keys`) holds.
  """
  code = compile(source, "<candidate>", "exec", dont_inherit=True)
  traced = []
  for spec in hooks:
    namespace: dict[str, Any] = {"__name__": "candidate"}
    # Imported within the scope too, because constants of the module may be float64.
    with tracing_scope():
      exec(code, namespace)  # noqa: S102
    if callable(hook := namespace.get(spec["name"])):
      traced.append(trace_hook(hook, spec))
  return traced
