"""The target with only one of the two operands rounded, and with none.

A proposer reads from them where a loss is made: in the weights, in the activations, or
where both meet. The programs of the references are no candidates, because one of their
operands is not MXFP4.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from mxjax.discovery.tasks.ptq import payload, phases
from mxjax.discovery.tasks.ptq.options import PtqOptions
from mxjax.evaluation.measures.agreement import agreement
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.linear import StraightThrough
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision, pytree_nodes
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping.input_maps import InputMap


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Unrounded(ActivationQuantizer):
  """Leaves mapped inputs as they are."""

  is_legal = False

  @override
  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    del rules
    return blocks


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class RoundedInputs(StraightThrough):
  """A linear that rounds its mapped inputs by any A4 rule, with its weight in float.

  Attributes:
    weight: Float, `[out_features, in_features]`, in native coordinates.
  """

  input_map: InputMap | None = None
  rounding: ActivationQuantizer = dataclasses.field(default_factory=Unrounded)

  @override
  def linear(self, x: jax.Array) -> jax.Array:
    blocks = mxfp4.to_blocks(x.astype(jnp.float32).reshape(-1, x.shape[-1]))
    mapped = blocks if self.input_map is None else self.input_map.apply(blocks)
    folded = phases.fold_weight(self.weight, self.input_map)
    inputs = self.rounding.round(mapped, self.rules)
    y = jnp.einsum("bin,bim->nm", inputs, folded, precision=precision.HIGHEST)
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)


def measured(
  options: PtqOptions,
  operands: bytes,
  rounding: Callable[[Any, Any], ActivationQuantizer],
  name: str,
) -> dict[str, float]:
  """Returns the objective of the float model and of a program with one side rounded.

  `operands` and `rounding` are those of the program `name`; see `payload.to_params`.
  Empty for `fit3`, whose scale is that of no single text.
  """
  if options.objective == "fit3":
    return {}
  model, params = options.load()
  quantized = payload.to_params(payload.from_bytes(operands), params, model, rounding)
  tokens = options.tokens("measure")

  def objective(tried: Mapping[str, Any]) -> float:
    if options.objective == "kl":
      return float(agreement(model, params, tried, tokens).divergence.mean())
    values = np.asarray(perplexity(model, tried, tokens).values)
    return float(np.log(values).mean())

  def with_leaves(of: Callable[[Any, QuantizedLinear], Any]) -> dict[str, Any]:
    tried = {key: dict(layer) for key, layer in quantized.items()}
    for index in range(model.num_layers):
      layer = model.layer_name(index)
      for block, linear in model.projection_taps:
        exact = params[layer][block][linear]["weight"]
        leaf = of(exact, quantized[layer][block][linear]["weight"])
        rest = tried[layer][block][linear]
        tried[layer][block] = {
          **tried[layer][block],
          linear: {**rest, "weight": leaf},
        }
    return tried

  return {
    "the float model": objective(params),
    f"{name} with only its weights rounded": objective(
      with_leaves(lambda _, leaf: dataclasses.replace(leaf, rounding=Unrounded()))
    ),
    f"{name} with only activations rounded": objective(
      with_leaves(
        lambda exact, leaf: RoundedInputs(
          exact, leaf.rules, leaf.input_map, leaf.rounding
        )
      )
    ),
  }
