"""Storage options of a loaded model: less memory at a small, stated cost.

The pipeline keeps everything but the decoder linears as it came, and refinement
tables in float32. Neither is needed to run. Nothing here is applied unless asked for,
and evaluation under the contract runs without it.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mxjax.layers.quantized_linear import Int8Matrix, QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.pallas_kernels import mxfp4_decode

Embeddings = Literal["int8", "mxfp4"]
Products = Literal["bfloat16", "float8"]


def pack_for_inference(
  params: Mapping[str, Any],
  *,
  tables: bool = True,
  embeddings: Embeddings | None = None,
  products: Products | None = None,
) -> dict[str, Any]:
  """Returns params that take less memory or time and run through the same calls.

  Args:
    params: A model's params, quantized or not.
    tables: Store the refinement tables G_Q and K_Q in bfloat16. They only rank the
      candidates of a code: every A4 operand stays legal, and at most near-ties are
      decided otherwise. Input maps stay float32, because weights were folded with
      exactly them.
    embeddings: Store the embedding, and an untied head, as `int8` (symmetric, one
      scale a row) or `mxfp4` (nearest), used without rounding inputs. This changes
      the model: docs/guides/quantize.md has what it costs.
    products: The type in which a GPU multiplies many rows of a quantized linear. None
      leaves what is chosen, which at first is bfloat16. `float8` has exact products
      too, and sums as the GPU rounds them (docs/concepts/kernels.md). A linear whose
      weight has too wide a range for it stays with bfloat16, and a warning names it.

  Returns:
    New params; leaves that do not change are shared with the old ones.

  Raises:
    ValueError: `embeddings` or `products` is not a known name.
  """
  if embeddings not in (None, "int8", "mxfp4"):
    raise ValueError(
      "pack_for_inference: embeddings must be None, 'int8' or 'mxfp4', got "
      f"{embeddings!r}."
    )
  if products not in (None, "bfloat16", "float8"):
    raise ValueError(
      "pack_for_inference: products must be None, 'bfloat16' or 'float8', got "
      f"{products!r}."
    )
  result = dict(_map_linears(_narrow_tables, params) if tables else params)
  if products is not None:
    misfits: list[str] = []
    choose = functools.partial(_choose_products, products, misfits)
    result = _map_linears(choose, result)
    if misfits:
      warnings.warn(
        f"pack_for_inference: {len(misfits)} linears stay with bfloat16 products "
        "because the scales of their weights do not fit float8: "
        f"{', '.join(misfits)}.",
        stacklevel=2,
      )
  for name in ("embed_tokens", "lm_head") if embeddings else ():
    weight = result[name]["weight"] if name in result else None
    if isinstance(weight, jax.Array):
      narrow = byte_table(weight) if embeddings == "int8" else mxfp4.encode(weight)
      result[name] = {**result[name], "weight": narrow}
  return result


@jax.jit
def byte_table(weight: jax.Array) -> Int8Matrix:
  """Rounds each row `[rows, d]` to int8 with its largest magnitude at 127."""
  wide = weight.astype(jnp.float32)
  largest = jnp.abs(wide).max(axis=1)
  scales = jnp.where(largest > 0, largest, 1.0) / 127.0
  codes = jnp.round(wide / scales[:, None]).astype(jnp.int8)
  return Int8Matrix(codes, scales)


def _map_linears(
  change: Callable[[str, QuantizedLinear], Any], node: Any, path: str = ""
) -> Any:
  """Changes the quantized linears of a tree; their names go by slashes."""
  if isinstance(node, Mapping):
    inside = f"{path}/" if path else ""
    return {
      key: _map_linears(change, value, f"{inside}{key}") for key, value in node.items()
    }
  return change(path, node) if isinstance(node, QuantizedLinear) else node


def _choose_products(
  products: Products, misfits: list[str], path: str, leaf: QuantizedLinear
) -> QuantizedLinear:
  unit = None
  if products == "float8":
    unit, fits = mxfp4_decode.float8_range(leaf.weight)
    if not fits:
      misfits.append(path)
      unit = None
  return dataclasses.replace(leaf, float8_scale=unit)


def _narrow_tables(path: str, leaf: QuantizedLinear) -> QuantizedLinear:
  del path
  if not isinstance(leaf.rounding, OneCode):
    return leaf
  rounding: OneCode = jax.tree.map(lambda a: a.astype(jnp.bfloat16), leaf.rounding)
  return dataclasses.replace(leaf, rounding=rounding)
