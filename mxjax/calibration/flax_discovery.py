"""What a trace of one example finds in a Flax module: its linears and its layers."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax import nnx

from mxjax.calibration import flax_calls
from mxjax.errors import ValueRefusal


class DenseCall(NamedTuple):
  """A dense layer that was called, with the identity of each tensor it read."""

  path: str
  tensors: tuple[int, ...]
  kernel: tuple[int, ...]
  axes: int


class Linear(NamedTuple):
  """A linear to quantize: its kernel's shape, input axes, method, and its input."""

  kernel: tuple[int, ...]
  axes: int
  method: Any
  tap: str


class LayerCall(NamedTuple):
  """A call of a layer: the module alone, its arguments and its output."""

  path: str
  module: Any
  args: tuple[Any, ...]
  kwargs: dict[str, Any]
  output: Any


class Plan(NamedTuple):
  """What to quantize.

  Attributes:
    layers: The paths of the layers; one empty path for the whole module.
    template: A layer alone, whose params are those of any; None for the whole module.
    arguments: What its arguments are besides arrays; see `merge_arrays`.
    linears: The linears of every layer by path within it, in forward order.
    left: Paths of the dense layers that stay as they are.
  """

  layers: list[str]
  template: Any
  arguments: Any
  linears: dict[str, Linear]
  left: list[str]


def _trace(
  run: Callable[..., Any],
  is_layer: Callable[[str], Any],
  modules: Mapping[str, Any],
  *args: Any,
) -> tuple[list[DenseCall], list[LayerCall]]:
  """Lists the dense layers and the layers that `run(visit, *args)` calls, in order."""
  found: dict[str, DenseCall] = {}
  layers: list[LayerCall] = []
  kept: list[Any] = []  # An id is that of one tensor while the tensor lives.

  def visit(path: str, module: Any, run: Any, args: Any, kwargs: Any) -> Any:
    if is_layer(path):
      is_linen = isinstance(module, nn.Module)
      alone = module.clone(parent=None, name=None) if is_linen else modules[path]
      output = run(*args, **kwargs)
      layers.append(LayerCall(path, alone, args, kwargs, output))
      return output
    dense = flax_calls.dense_of(module, args, kwargs)
    if dense is not None:
      kept.append(dense.x)
      # A layer that is called several times reads several tensors; taps are equal if
      # all are.
      before = found[path].tensors if path in found else ()
      tensors = (*before, id(dense.x))
      found[path] = DenseCall(path, tensors, dense.kernel.shape, dense.inputs)
    return run(*args, **kwargs)

  # Traced and not computed: the visit sees shapes and the identity of tensors.
  jax.eval_shape(lambda *args: run(visit, *args), *args)
  return list(found.values()), layers


def _check_chain(layers: list[LayerCall], pattern: str, dense: list[DenseCall]) -> None:
  if not layers:
    named = ", ".join(one.path for one in dense) or "none"
    raise ValueRefusal(
      "quantize",
      expected=f"layers whose path matches {pattern!r}",
      got="none",
      mend=f"the dense layers of the module are {named}",
    )
  first = layers[0]
  if not flax_calls.is_array(first.output):
    raise ValueRefusal(
      "quantize",
      expected=f"an array from {first.path}",
      got=type(first.output),
      mend="a layer must return what the next one takes, or leave `layers` out",
    )
  paths = [one.path for one in layers]
  for before, after in zip(layers, layers[1:], strict=False):
    others = lambda call: jax.tree.leaves((call.args[1:], call.kwargs))
    same = zip(others(first), others(after), strict=False)
    wrong = None
    if paths.count(after.path) > 1:
      wrong = "one call", "several"
    # By identity: in a trace, a tensor that passes through any operation is another
    # object.
    elif not after.args or after.args[0] is not before.output:
      wrong = f"the output of {before.path} as its first argument", "another value"
    elif _structure(after) != _structure(first) or not all(
      a is b or (not flax_calls.is_array(a) and a == b) for a, b in same
    ):
      wrong = f"the other arguments of {first.path}", "others"
    elif _has_state(after.module):
      # One template runs all layers, with the state of the first.
      wrong = "params alone", "other state, which differs from layer to layer"
    elif not _alike(first.module, after.module):
      wrong = f"a module that equals {first.path} but for params", "another"
    if wrong:
      raise ValueRefusal(
        "quantize",
        expected=f"layers that form a chain, so for {after.path} {wrong[0]}",
        got=wrong[1],
        mend="use a module without nn.remat around its layers, or leave `layers` out",
      )


def _has_state(module: Any) -> bool:
  """Whether an nnx module has state besides params and random keys."""
  if isinstance(module, nn.Module):
    return False
  *_, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
  return bool(jax.tree.leaves(others))


def _structure(call: LayerCall) -> Any:
  return jax.tree.structure((call.args[1:], call.kwargs))


def _alike(one: Any, other: Any) -> bool:
  if isinstance(one, nn.Module):
    return one == other
  return nnx.split(one)[0] == nnx.split(other)[0]


def plan(
  run: Callable[..., Any],
  params: Any,
  example: Any,
  rules: Mapping[str, Any],
  layers: str | None,
  modules: Mapping[str, Any],
) -> Plan:
  """Finds the linears to quantize; see `flax_model.FlaxModel` for rules and layers.

  `run(visit, params, example)` calls the module; `modules` are those of an nnx module
  by path.

  Raises:
    ValueError: A rule takes no linear, none is taken, the layers are no chain, or the
      rules differ from layer to layer. The message lists what the module has.
  """
  is_layer = re.compile(layers).fullmatch if layers else lambda _: None
  dense, calls = _trace(run, is_layer, modules, params, example)
  if layers:
    _check_chain(calls, layers, dense)
  # The first rule that matches a path decides on it.
  rule_of = {
    one.path: next((rule for rule in rules if re.fullmatch(rule, one.path)), None)
    for one in dense
  }
  # One plan for all layers, by paths inside a layer: so they must be taken alike.
  prefixes = [f"{call.path}/" for call in calls] or [""]
  parts = [_inside(prefix, dense, rules, rule_of) for prefix in prefixes]
  for prefix, part in zip(prefixes, parts, strict=True):
    if _methods(part) != _methods(parts[0]):
      raise ValueRefusal(
        "quantize",
        expected="the rules to take the same linears in every layer",
        got=f"{sorted(parts[0])} in {prefixes[0]} and {sorted(part)} in {prefix}, or "
        "other methods for them",
        mend="write one rule for all, or leave `layers` out",
      )
  taken = {prefix + name for prefix in prefixes for name in parts[0]}
  useless = [
    rule
    for rule, method in rules.items()
    # A rule with None takes nothing on purpose; any other that does is a slip of its
    # author.
    if method and not any(rule_of[path] == rule for path in taken)
  ]
  if useless or not taken:
    named = ", ".join(one.path for one in dense) or "none"
    inside = f", and only what lies in its {len(calls)} layers counts" if layers else ""
    raise ValueRefusal(
      "quantize",
      expected="every rule to take a dense layer",
      got=f"none for {', '.join(map(repr, useless)) or 'any'}",
      mend=f"the module calls {named}{inside}, and rules are regular expressions over "
      "whole paths",
    )
  left = [one.path for one in dense if one.path not in taken]
  if not calls:
    return Plan([""], None, None, parts[0], left)
  _, arguments = split_arrays((calls[0].args, calls[0].kwargs))
  paths = [call.path for call in calls]
  return Plan(paths, calls[0].module, arguments, parts[0], left)


def split_arrays(tree: Any) -> tuple[list[Any], Any]:
  """Splits arguments into their arrays and what `merge_arrays` needs besides them."""
  leaves, structure = jax.tree.flatten(tree)
  arrays = [leaf for leaf in leaves if flax_calls.is_array(leaf)]
  # In a tuple of its own, because an argument may be None itself.
  holes = [None if flax_calls.is_array(leaf) else (leaf,) for leaf in leaves]
  return arrays, (structure, holes)


def merge_arrays(arrays: list[Any], rest: Any) -> Any:
  """Puts arrays back into arguments; the inverse of `split_arrays`."""
  structure, holes = rest
  left = iter(arrays)
  leaves = [next(left) if hole is None else hole[0] for hole in holes]
  return jax.tree.unflatten(structure, leaves)


def _inside(
  prefix: str,
  dense: list[DenseCall],
  rules: Mapping[str, Any],
  rule_of: Mapping[str, str | None],
) -> dict[str, Linear]:
  """Returns the linears to quantize whose path begins with a prefix."""
  taps: dict[tuple[int, ...], str] = {}
  linears = {}
  for one in dense:
    rule = rule_of[one.path]
    method = rules[rule] if rule is not None else None
    if method and one.path.startswith(prefix):
      name = one.path.removeprefix(prefix)
      # Named after the first linear that reads these tensors; the others share its
      # reductions.
      tap = taps.setdefault(one.tensors, name)
      linears[name] = Linear(one.kernel, one.axes, method, tap)
  return linears


def _methods(part: Mapping[str, Linear]) -> dict[str, Any]:
  return {name: (one.kernel, one.method, one.tap) for name, one in part.items()}
