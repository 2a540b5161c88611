"""Any Flax module as a model that the pipeline can quantize.

The module is one layer, or the chain of layers that its author names. For the pipeline
its params are rearranged to `layer / linears / name / weight`, with weights
`[out, in]`, and back at the end.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from mxjax.calibration import flax_calls, flax_discovery
from mxjax.calibration.calibration import Params
from mxjax.errors import NotImplementedRefusal, ValueRefusal

LINEARS, REST, WHOLE = "linears", "rest", "module"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FlaxModel:
  r"""A linen or nnx module of your own, with what to quantize in it and how.

  Attributes:
    module: The module. An nnx module keeps its state besides params, which are given.
    rules: Regular expressions over whole module paths, such as `layer_\d+/mlp/.*`, each
      with a method, True for the one given to `quantize`, or None to leave the linear.
      The first that matches decides; a linear without a match is left. What they take
      replaces `Contract.targets`.
    layers: A regular expression over the paths of layers that are alike but for their
      params, each called on the output of the one before. They are then quantized one
      by one, in the memory of one layer's inputs. None takes the module as a whole.
    call: Runs the module on a batch of the calibration inputs.
    state: Collections of a linen module besides its params, such as `batch_stats`.
  """

  module: Any
  rules: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {".*": True})
  layers: str | None = None
  call: Callable[[Any, Any], Any] = lambda module, batch: module(batch)
  state: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def takes_any_inputs(self) -> bool:
    """Calibration inputs are any pytree of arrays `[examples, ...]`."""
    return True

  @property
  def params(self) -> dict[str, Any]:
    """The params of an nnx module as nested dicts with names for keys."""
    flat = flatten_dict(nnx.to_pure_dict(nnx.state(self.module, nnx.Param)))
    return unflatten_dict({tuple(map(str, keys)): leaf for keys, leaf in flat.items()})

  def run(self, visit: flax_calls.Visit, params: Params, batch: Any) -> Any:
    """Runs the module with a visit to its dense layers, and to its layers if any."""
    also = self._modules() if self.layers else {}
    arguments = self.module, params, self.call, (batch,), {}
    return flax_calls.call(*arguments, visit=visit, others=self.state, also=also)

  def apply(self, params: Params, batch: Any) -> Any:
    """Runs the module on a batch, with float or quantized params."""
    return self.run(flax_calls.quantized, params, batch)

  def bound_to(self, params: Params, inputs: Any) -> "BoundModule":
    """Finds linears and layers by tracing one example.

    Raises:
      ValueError: See `flax_discovery.plan`; or layers have state besides params.
    """
    example = jax.tree.map(lambda a: a[:1], inputs)
    params = unfreeze(meta.unbox(params))
    if self.layers and self.state:
      raise ValueRefusal(
        "FlaxModel",
        expected="no state beside layers",
        got=f"the collections {', '.join(self.state)}",
        mend="leave `layers` out to take the module as a whole",
      )
    plan = flax_discovery.plan(
      self.run, params, example, self.rules, self.layers, self._modules()
    )
    return BoundModule(self, plan)

  def _modules(self) -> dict[str, Any]:
    """Returns the modules in an nnx module by path."""
    if isinstance(self.module, nn.Module):
      return {}
    return {"/".join(map(str, keys)): m for keys, m in nnx.iter_modules(self.module)}


def _dotted(keys: tuple[Any, ...]) -> str:
  return ".".join(map(str, keys))


class _ReachedError(Exception):
  """Ends a call at the first layer, whose arguments it holds."""

  def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    super().__init__()
    self.call = args, kwargs


class BoundModule:
  """A `FlaxModel` with its linears and layers, by the names of `CausalLanguageModel`.

  Hidden states are the module's inputs `[examples, ...]` and a mark; in a chain, the
  arguments of a layer for each example. There are no logits but `outputs`.
  """

  takes_any_inputs = True

  def __init__(self, model: FlaxModel, plan: flax_discovery.Plan) -> None:
    self.model, self.plan = model, plan
    dotted = lambda path: path.replace("/", ".")
    self._names = {dotted(path): path for path in plan.linears}
    self.projection_taps = {
      (LINEARS, name): dotted(plan.linears[path].tap)
      for name, path in self._names.items()
    }
    self._keys: dict[str, tuple[Any, ...]] = {}

  @property
  def methods(self) -> dict[str, Any]:
    """The method that its rule gives each linear."""
    return {name: self.plan.linears[path].method for name, path in self._names.items()}

  @property
  def num_layers(self) -> int:
    """The number of layers; 1 for a whole module."""
    return len(self.plan.layers)

  def layer_name(self, index: int) -> str:
    """Returns the key of a layer in the rearranged params."""
    return self.plan.layers[index].replace("/", ".") or WHOLE

  def split(self, params: Params) -> dict[str, Any]:
    """Rearranges the module's params for the pipeline.

    Raises:
      ValueError: The kernel of a linear is not in the params as its call saw it.
    """
    flat: dict[Any, Any] = flatten_dict(unfreeze(meta.unbox(params)))
    self._keys = {_dotted(keys): keys for keys in flat}
    left = {_dotted(keys): leaf for keys, leaf in flat.items()}
    result: dict[str, Any] = {}
    for index in range(self.num_layers):
      start, linears = self._start(index), {}
      for name, path in self._names.items():
        kernel = left.pop(f"{start}{name}.kernel", None)
        wanted = self.plan.linears[path].kernel
        if kernel is None or kernel.shape != wanted:
          got = "none" if kernel is None else f"one of shape {kernel.shape}"
          raise ValueRefusal(
            "quantize",
            expected=f"a kernel {wanted} for {start}{name} in the params",
            got=got,
            mend="unroll layers whose params nn.scan or nn.vmap stacks",
          )
        rows = kernel.shape[: self.plan.linears[path].axes]
        # From `[*inputs, *features]` to `[out, in]`, in the order in which `Dense.rows`
        # flattens inputs.
        linears[name] = {"weight": kernel.reshape(math.prod(rows), -1).T}
      # What is left of the layer: biases, norms, and linears that no rule takes.
      own = [key for key in left if key.startswith(start)]
      rest = {key.removeprefix(start): left.pop(key) for key in own}
      result[self.layer_name(index)] = {LINEARS: linears, REST: rest}
    return result | ({REST: left} if left else {})

  def join(self, params: Params) -> dict[str, Any]:
    """Rearranges params of the pipeline for the module; the inverse of `split`."""
    flat = dict(params.get(REST, {}))
    for index in range(self.num_layers):
      layer = self._flat_layer(params[self.layer_name(index)])
      flat |= {self._start(index) + key: leaf for key, leaf in layer.items()}
    return unflatten_dict({self._keys[key]: leaf for key, leaf in flat.items()})

  def _start(self, index: int) -> str:
    path = self.plan.layers[index]
    return f"{self.layer_name(index)}." if path else ""

  def _flat_layer(self, layer: Params) -> dict[str, Any]:
    """Returns a layer's params by dotted path, with kernels in their own shape."""
    flat = dict(layer[REST])
    for name, path in self._names.items():
      weight = layer[LINEARS][name]["weight"]
      if flax_calls.is_array(weight):
        weight = weight.T.reshape(self.plan.linears[path].kernel)
      flat[f"{name}.kernel"] = weight
    return flat

  def _layer_tree(self, layer: Params) -> dict[str, Any]:
    """Returns a layer's params in the form of its module."""
    start, path = self._start(0), self.plan.layers[0]
    depth = len(path.split("/")) if path else 0
    flat = self._flat_layer(layer).items()
    # By the keys of the first layer: all layers have the same below their own path.
    return unflatten_dict({self._keys[start + key][depth:]: leaf for key, leaf in flat})

  def embed(self, params: Params, tokens: Any) -> Any:
    """Returns what enters the first layer for inputs `[examples, ...]`."""
    if self.plan.template is None:
      # The inputs and the mark, one for each example.
      return tokens, jnp.zeros(jax.tree.leaves(tokens)[0].shape[0])
    flat = {self._keys[key]: leaf for key, leaf in params.get(REST, {}).items()}
    tree = unflatten_dict(flat)

    def visit(path: str, module: Any, run: Any, args: Any, kwargs: Any) -> Any:
      if path == self.plan.layers[0]:
        # Raised, because the module would go on to run its layers with whatever is
        # returned.
        raise _ReachedError(args, kwargs)
      return flax_calls.quantized(path, module, run, args, kwargs)

    def one(example: Any) -> Any:
      try:
        self.model.run(visit, tree, jax.tree.map(lambda a: a[None], example))
      except _ReachedError as reached:
        arrays, _ = flax_discovery.split_arrays(reached.call)
        return [jnp.asarray(array) for array in arrays]
      raise AssertionError("The first layer was called when the module was traced.")

    return jax.lax.map(one, tokens)

  def layer(self, layer_params: Params, hidden: Any) -> Any:
    """Runs one layer on one example."""
    return self.layer_with_taps(layer_params, hidden)[0]

  def layer_with_taps(
    self, layer_params: Params, hidden: Any
  ) -> tuple[Any, dict[str, jax.Array]]:
    """Runs one layer on one example and returns the inputs of its linears by name."""
    tree, template = self._layer_tree(layer_params), self.plan.template
    if template is None:
      arguments = self.model.module, tree, self.model.call, (hidden[0],), {}
      output, inputs = flax_calls.call_with_inputs(*arguments, self.model.state)
      sums = [jnp.asarray(leaf, "float32").sum() for leaf in jax.tree.leaves(output)]
      # What leaves a layer must be finite: zero if the outputs are, else NaN.
      hidden = hidden[0], 0 * jnp.stack(sums).sum()[None]
    else:
      entering = [array[0] for array in hidden]
      rest = self.plan.arguments
      args, kwargs = flax_discovery.merge_arrays(entering, rest)
      run = lambda module, *args, **kwargs: module(*args, **kwargs)
      output, inputs = flax_calls.call_with_inputs(template, tree, run, args, kwargs)
      # The output is the next layer's first argument; the others, such as a mask, stay.
      hidden = [array[None] for array in (output, *entering[1:])]
    taps = set(self.projection_taps.values())
    rows = {path.replace("/", "."): array[None] for path, array in inputs.items()}
    if missing := sorted(taps - set(rows)):
      raise ValueRefusal(
        "quantize",
        expected=f"the inputs of {', '.join(missing)} outside of transformations "
        "such as nn.scan",
        got="none",
        mend="unroll it, or leave them by a rule with None",
      )
    return hidden, {name: rows[name] for name in taps}

  def logits(self, params: Params, hidden: Any) -> jax.Array:
    """Is not defined: what the module returns are `outputs`, of any kind."""
    raise NotImplementedRefusal(
      "FlaxModel",
      expected="a model with logits of tokens",
      got="one with outputs of any kind",
      mend="call its outputs",
    )

  def outputs(self, params: Params, inputs: Any) -> Any:
    """Runs the module on a batch with rearranged params."""
    return self.model.apply(self.join(params), inputs)
