"""Memory of a model by purpose, in bytes, and a warning where it saves little."""

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from mxjax.layers.linear import Int8Matrix
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery

WARN_ABOVE = 0.5
"""Share of its bfloat16 bytes above which a quantized model is warned of."""
_PARTS = {
  "rounding": "tables that refine activations",
  "maps": "input maps",
  "other": "embeddings, norms, head and biases",
  "codes": "codes",
  "scales": "scales",
  "recovery": "recovery",
}
_NODES = (QuantizedLinear, Int8Matrix, ValueRecovery, MlpRecovery)


def _bytes(tree: Any) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def typed_nodes(params: Mapping[str, Any]) -> Iterator[Any]:
  """Yields typed nodes and arrays, with one top-level key in memory at a time."""
  for key in params:
    yield from jax.tree.leaves(params[key], is_leaf=lambda n: isinstance(n, _NODES))


def size_report(params: Mapping[str, Any]) -> dict[str, Any]:
  """Reports the bytes of a model by purpose, beside the same model in bfloat16.

  `params` are quantized or float, possibly on disk, or their shapes and dtypes.

  Returns:
    JSON-ready: `quantized_linears` (bytes of `codes`, `scales`, `maps`, `rounding`,
    their `total`, the number of `weights` and `bits_per_weight` with every table),
    `recovery`, `other` (embeddings, norms, head, biases), `total`, `bf16_total`, and
    `bf16_over_total`, how many times smaller the whole model is than in bfloat16.
  """
  linears = dict.fromkeys(("codes", "scales", "maps", "rounding"), 0)
  recovery = other = values = weights = 0
  for node in typed_nodes(params):
    if isinstance(node, QuantizedLinear):
      weights += math.prod(node.shape)
      linears["codes"] += _bytes(node.weight.codes)
      linears["scales"] += _bytes(node.weight.scales)
      linears["maps"] += _bytes(node.input_map)
      linears["rounding"] += _bytes((node.rounding, node.float8_scale))
    elif isinstance(node, (ValueRecovery, MlpRecovery)):
      recovery += _bytes(node)
    else:
      other += _bytes(node)
      values += math.prod(node.shape)
  quantized = sum(linears.values())
  # Two bytes for each weight and value; a float model has no recovery.
  total, bf16_total = quantized + recovery + other, 2 * (weights + values)
  return {
    "quantized_linears": {
      **linears,
      "total": quantized,
      "weights": weights,
      "bits_per_weight": 8 * quantized / weights if weights else None,
    },
    "recovery": recovery,
    "other": other,
    "total": total,
    "bf16_total": bf16_total,
    "bf16_over_total": bf16_total / total if total else None,
  }


def warning(report: Mapping[str, Any]) -> str | None:
  """Returns a sentence if a quantized model is large; `report` is a `size_report`.

  It is if all stored bytes are more than `WARN_ABOVE` of the same model in bfloat16.
  The sentence says what takes the bytes, the largest part first.
  """
  total, whole = report["total"], report["bf16_total"]
  if not report["quantized_linears"]["weights"] or total <= WARN_ABOVE * whole:
    return None
  found = {**report, **report["quantized_linears"], "total": None}
  parts = sorted(((found[part], label) for part, label in _PARTS.items()), reverse=True)
  shares = [
    f"{label} {size / total:.0%}" for size, label in parts if size >= total / 100
  ]
  return (
    f"the quantized model takes {total / 2**20:.4g} MiB, {total / whole:.2f} of its "
    f"{whole / 2**20:.4g} MiB in bfloat16: {', '.join(shares)}. Maps and tables weigh "
    "less on wider models; `mxjax plan MODEL --method all` lists every method."
  )


def warn(name: str, report: Mapping[str, Any]) -> str | None:
  """Logs the `warning` of a model made by the method `name`, and returns it."""
  if text := warning(report):
    logging.getLogger("mxjax").warning("%s: %s", name, text)
  return text
