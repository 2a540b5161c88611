"""What a recovery fit is: an affine correction, measured on the realized layer.

A fit's result for a layer depends only on that layer and those before it, so all fits
of a program run in one pass over the layers, each on a trajectory of its own, with the
results of separate passes. The fits of the paper are in `methods.hires.stage3`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import Params, replace_weights
from mxjax.devices import execution
from mxjax.layers.linear import Transformed
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.numerics.shaping.input_maps import InputMap

Taps = Mapping[str, jax.Array]
State = Literal["current", "parent", "unrounded", "unencoded"]


class Sample(NamedTuple):
  """What `measure` reads: one sequence's taps, with leading axis 1, and its `index`.

  `float_taps` come from the float trajectory, `constants` from `prepare`.
  """

  constants: Any
  float_layer: Params
  taps: Taps
  float_taps: Taps
  index: jax.Array


def is_quantized(node: Any) -> bool:
  """Whether a node of a layer's params is a quantized linear."""
  return isinstance(node, QuantizedLinear)


def unrounded(layer: Params) -> Params:
  """Returns a quantized layer whose inputs are no longer rounded to A4."""
  change = lambda node: (
    dataclasses.replace(node, rounding=Unrounded()) if is_quantized(node) else node
  )
  return jax.tree.map(change, layer, is_leaf=is_quantized)


def unencoded(layer: Params, float_layer: Params) -> Params:
  """Returns a quantized layer before both of its encodings.

  Its linears have the float weights in the coordinates of their maps, or as they are
  where there is no map, and its inputs are not rounded. What fits have installed stays.

  Args:
    layer: Params of the quantized layer.
    float_layer: Those of the same layer before quantization.

  Returns:
    Params like `layer`, whose mapped weights are float32 `[out_features, in_features]`
    and the others in the dtype of `float_layer`.
  """
  weights: dict[tuple[str, str], Any] = {}
  for sublayer, projections in layer.items():
    for name, leaves in projections.items():
      leaf = leaves.get("weight") if isinstance(leaves, Mapping) else None
      if isinstance(leaf, QuantizedLinear):
        weight, input_map = float_layer[sublayer][name]["weight"], leaf.input_map
        if input_map is not None:
          # Folded as the encoded weights were, in float64.
          with precision.float64_scope():
            weight = Transformed(_folded(weight, input_map), input_map)
        weights[sublayer, name] = weight
  return replace_weights(layer, weights)


@execution.jit()
def _folded(weight: jax.Array, input_map: InputMap) -> jax.Array:
  """Folds a float weight `[out_features, in_features]`; returns float32."""
  blocks = mxfp4.to_blocks(weight).astype(jnp.float64)
  return mxfp4.from_blocks(input_map.fold(blocks)).astype(jnp.float32)


class RecoveryFit:
  """One recovery fit; hashable by identity, so that it can be a static argument.

  `name` is the name in results; `measure` needs `taps` of the layer and `float_taps` of
  the float trajectory; the coefficients are installed as `leaf` beside the projections
  of `sublayer`.

  Paper: Eq. conditional-stage.
  """

  name: str = ""
  taps: tuple[str, ...] = ()
  float_taps: tuple[str, ...] = ()
  sublayer: str = ""
  leaf: str = ""
  on: State = "current"

  def __init__(self, on: State = "current") -> None:
    """Sets the state of the layer that the fit is measured on.

    It is the layer with every earlier fit installed, `current`, the paper's conditional
    order; the `parent`, without any fit; `unrounded`: the current one without A4; or
    `unencoded`: the current one before both encodings, with float weights in the
    coordinates of the maps and without A4.
    """
    self.on = on

  @property
  def label(self) -> str:
    """The name, with the state if it is not the paper's; see `stage3.named`."""
    return self.name if self.on == "current" else f"{self.name}-{self.on}"

  def state(self, layer: Params, parent: Params, float_layer: Params) -> Params:
    """Returns the layer to measure on, from the current one, its parent and float."""
    if self.on == "unencoded":
      return unencoded(layer, float_layer)
    if self.on == "unrounded":
      return unrounded(layer)
    return parent if self.on == "parent" else layer

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns constants of the layer and zero moments; call it in a float64 scope."""
    raise NotImplementedError

  def measure(self, moments: Any, sample: Sample) -> Any:
    """Adds one sequence to the moments; traced."""
    raise NotImplementedError

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """Solves for the coefficients and returns them with their report entries."""
    raise NotImplementedError

  def install(self, layer: Params, leaf: Any) -> dict[str, Any]:
    """Returns the layer's params with the coefficients beside its projections."""
    # A new dict, because the parent's layer is still measured by other fits.
    return {**layer, self.sublayer: {**layer[self.sublayer], self.leaf: leaf}}
