"""Calls of modules of Flax, linen or nnx, with every dense layer seen on the way.

A dense layer is an `nn.Dense`, `nn.DenseGeneral`, `nnx.Linear` or `nnx.LinearGeneral`
whose input axes are the last ones; a module path is its names joined by slashes.
"""

import contextvars
import functools
import math
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from mxjax.errors import ValueRefusal
from mxjax.layers.linear import add_bias, linear

Visit = Callable[[str, Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`(path, module, call, args, kwargs)` to the output of a module's `__call__`."""

_INPUTS = "mxjax_inputs"
_LINEN, _NNX = (nn.Dense, nn.DenseGeneral), (nnx.Linear, nnx.LinearGeneral)


class Dense(NamedTuple):
  """A dense layer at a call.

  Attributes:
    kernel: `[*inputs, *features]`, or what stands in its place; None if not created.
    bias: `[*features]`, or None.
    x: Its input, `[..., *inputs]`.
    inputs: How many axes the input has of its own.
    features: The shape of its output's own axes.
    dtype: The dtype that it computes in.
  """

  kernel: Any
  bias: Any
  x: jax.Array
  inputs: int
  features: tuple[int, ...]
  dtype: Any

  def rows(self) -> jax.Array:
    """Returns the input as `[..., in_features]` in the compute dtype."""
    leading = self.x.shape[: self.x.ndim - self.inputs]
    width = math.prod(self.x.shape[self.x.ndim - self.inputs :])
    return self.x.reshape(*leading, width).astype(self.dtype)

  def output(self) -> jax.Array:
    """Computes the layer by `linear`, its kernel being `[out_features, inputs]`."""
    y = linear(self.rows(), self.kernel)
    bias = None if self.bias is None else self.bias.reshape(-1)
    return add_bias(y, bias).reshape(*y.shape[:-1], *self.features)


def _tuple(value: Any) -> tuple[int, ...]:
  return tuple(value) if isinstance(value, tuple | list) else (value,)


def is_array(value: Any) -> bool:
  """Whether a value is an array or stands for one while tracing."""
  return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def dense_of(module: Any, args: tuple[Any, ...], kwargs: Any) -> Dense | None:
  """Describes a call of a dense layer; None for any other module."""
  # By exact type: a subclass may compute something else.
  is_linen = type(module) in _LINEN
  # An nnx module is seen as its `_watched` subclass; its own class comes next.
  if not is_linen and type(module).__mro__[1] not in _NNX:
    return None
  x = args[0] if args else kwargs["inputs"]
  axes = sorted(axis % x.ndim for axis in _tuple(getattr(module, "axis", -1)))
  batch = getattr(module, "batch_dims", ()) or getattr(module, "batch_axis", ())
  # Otherwise the input is no rows `[..., in_features]` of one matrix.
  if batch or axes != list(range(x.ndim - len(axes), x.ndim)):
    return None
  if is_linen:
    # Not `param`, which rejects what is no array, such as a quantized kernel.
    kernel = module.get_variable("params", "kernel")
    bias = module.get_variable("params", "bias") if module.use_bias else None
    features = _tuple(module.features)
  else:
    value = lambda held: None if held is None else held.get_value()
    kernel, bias = value(module.kernel), value(module.bias)
    features = _tuple(module.out_features)
  # As the layer itself would choose.
  dtype = module.dtype or jnp.promote_types(x.dtype, module.param_dtype)
  return Dense(kernel, bias, x, len(axes), features, dtype)


_WATCHED: contextvars.ContextVar[Any] = contextvars.ContextVar("watched")


@functools.cache
def _watched(cls: type) -> type:
  """Returns a subclass of an nnx module whose calls pass through the visit."""

  def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    visit, paths = _WATCHED.get()
    run = functools.partial(cls.__call__, self)
    if id(self) not in paths:
      return run(*args, **kwargs)
    return visit(paths[id(self)], self, run, args, kwargs)

  return types.new_class(
    cls.__name__, (cls,), {}, lambda body: body.update(__call__=call)
  )


def call(
  module: Any,
  params: Mapping[str, Any],
  method: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: Mapping[str, Any],
  *,
  visit: Visit,
  others: Mapping[str, Any] | None = None,
  also: Collection[str] = (),
) -> Any:
  """Computes `method(module, *args, **kwargs)` with these params.

  `visit` replaces the call of every dense layer and, of nnx, of the modules at the
  paths `also`; of linen, of every module. `others` are linen collections besides
  params; an nnx module brings its own state, and is left as it was.
  """
  if isinstance(module, nn.Module):

    def intercept(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
      # `setup` and methods called inside a module are its own affair.
      if context.method_name != "__call__":
        return run(*args, **kwargs)
      path = "/".join(context.module.path)
      return visit(path, context.module, run, args, kwargs)

    variables = {"params": params, **(others or {})}
    with nn.intercept_methods(intercept):
      return module.apply(variables, *args, method=method, **kwargs)
  # A copy with these params: an nnx module holds its own, and the caller's must stay.
  graph, state, rest = nnx.split(module, nnx.Param, ...)
  nnx.replace_by_pure_dict(state, dict(params))
  merged = nnx.merge(graph, state, rest)
  paths = {}
  # Listed first, because the loop changes the modules.
  for keys, child in list(nnx.iter_modules(merged)):
    path = "/".join(map(str, keys))
    if type(child) in _NNX or path in also:
      # nnx (flax 0.12) has no interceptors as linen has, and a stand-in in a module's
      # place would lack what its parent reads of it. This copy is ours alone.
      child.__class__ = _watched(type(child))
      paths[id(child)] = path
  token = _WATCHED.set((visit, paths))
  try:
    return method(merged, *args, **kwargs)
  finally:
    _WATCHED.reset(token)


def call_with_inputs(
  module: Any,
  params: Mapping[str, Any],
  method: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: Mapping[str, Any],
  others: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, jax.Array]]:
  """Like `call`, and also returns all inputs of each dense layer, `[n, in_features]`.

  Dense layers whose kernel is no array compute as in `quantized`.
  """
  is_linen, seen = isinstance(module, nn.Module), dict[str, list[jax.Array]]()

  def visit(path: str, module: Any, run: Any, args: Any, kwargs: Any) -> Any:
    dense = dense_of(module, args, kwargs)
    if dense is not None:
      rows = dense.rows().reshape(-1, dense.rows().shape[-1])
      if is_linen:  # Lifted transformations, such as remat, let only variables out.
        module.sow(_INPUTS, "x", rows)
      else:
        seen.setdefault(path, []).append(rows)
    return quantized(path, module, run, args, kwargs)

  options = {**kwargs, **({"mutable": [_INPUTS]} if is_linen else {})}
  output = call(module, params, method, args, options, visit=visit, others=others)
  if is_linen:
    output, state = output
    flat: dict[Any, Any] = flatten_dict(state.get(_INPUTS, {}))
    seen = {"/".join(keys[:-1]): list(rows) for keys, rows in flat.items()}
  return output, {path: jnp.concatenate(rows) for path, rows in seen.items()}


def quantized(
  path: str, module: Any, run: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
  """Visits dense layers, computing by `linear` those whose kernel is no array."""
  del path
  dense = dense_of(module, args, kwargs)
  if dense is None or dense.kernel is None or is_array(dense.kernel):
    return run(*args, **kwargs)
  return dense.output()


def apply(module: Any, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
  """Applies a Flax module whose kernels may be quantized.

  Args:
    module: A linen module, or an nnx module, whose own params are not used.
    params: For linen the variables, `{"params": params}`, as for `module.apply`; for
      nnx the params, as `mxjax.quantize` returned them.
    *args: Of the module's `__call__`, as are `kwargs`.
    **kwargs: See `args`; for linen also `rngs`, `mutable` and `method`.

  Returns:
    What the module returns. Jit, grad and the other transformations work as usual.

  Raises:
    ValueError: The variables of a linen module have no params.
  """
  run = lambda module, *args, **kwargs: module(*args, **kwargs)
  if not isinstance(module, nn.Module):
    return call(module, params, run, args, kwargs, visit=quantized)
  if "params" not in params:
    raise ValueRefusal(
      "mxjax.apply",
      expected="the variables of a linen module, {'params': ...}, as for module.apply",
      got=f"a dict of {', '.join(map(str, params)) or 'nothing'}",
    )
  others = {name: tree for name, tree in params.items() if name != "params"}
  method = kwargs.pop("method", "__call__")
  return call(
    module, params["params"], method, args, kwargs, visit=quantized, others=others
  )
