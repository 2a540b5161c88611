"""Which number formats a quantized model was built with and computes in."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.layers.sizes import typed_nodes
from mxjax.numerics.recovery import mlp_recovery, value_recovery

BUILD, ATTENTION = "hessian_products", "attention"
"""The entries that the stored model alone does not tell."""


def _rounded_to(node: Any, dtype: str) -> str:
  """Returns the dtype in which a recovery correction leaves values of a dtype."""
  if isinstance(node, mlp_recovery.MlpRecovery):
    # Traced and not computed: only the dtype of the result is asked for.
    rows = jax.ShapeDtypeStruct((1, 1), dtype)
    return str(jax.eval_shape(mlp_recovery.apply, rows, rows, node).dtype)
  values = jax.ShapeDtypeStruct((*node.scale.shape, 1), dtype)
  return str(jax.eval_shape(value_recovery.apply, values, node).dtype)


def arithmetic(
  params: Mapping[str, Any],
  dtype: str,
  layers: Sequence[Mapping[str, Any]] = (),
  attention: Mapping[str, str] | None = None,
) -> dict[str, Any]:
  """Names the dtypes that the paper's section on arithmetic names; JSON-ready.

  Args:
    params: Quantized params, possibly on disk.
    dtype: The model's compute dtype.
    layers: Those of the run's record, if it is at hand.
    attention: What computed it in the run, `CausalLM.attention`; None if unknown.

  Returns:
    `model`; `maps`, `tables` (of activation rounding), `recovery` (coefficients) and
    `unquantized`,
    lists of the dtypes stored, without those that the model lacks; `products`, float8
    if a GPU multiplies many rows of any linear so; `recovery_rounded`,
    by kind of correction that the model has, the dtype its float32 result is rounded
    to; with `layers` `hessian_products`; and `attention`.
  """
  stored, rounded = collections.defaultdict(set), {}
  for node in typed_nodes(params):
    if isinstance(node, QuantizedLinear):
      parts = {"maps": node.input_map, "tables": node.rounding}
      if node.float8_scale is not None:
        stored["products"].add("float8")
    elif isinstance(node, (value_recovery.ValueRecovery, mlp_recovery.MlpRecovery)):
      is_mlp = isinstance(node, mlp_recovery.MlpRecovery)
      rounded["mlp" if is_mlp else "attention"] = _rounded_to(node, dtype)
      parts = {"recovery": node}
    else:
      parts = {"unquantized": node}
    for name, part in parts.items():
      stored[name] |= {str(leaf.dtype) for leaf in jax.tree.leaves(part)}
  linears = [linear for layer in layers for linear in layer["linears"].values()]
  stored[BUILD] = {linear[BUILD] for linear in linears if BUILD in linear}
  return {
    "model": str(jnp.dtype(dtype)),
    **{name: sorted(found) for name, found in sorted(stored.items()) if found},
    **({"recovery_rounded": rounded} if rounded else {}),
    **({ATTENTION: dict(attention)} if attention else {}),
  }
