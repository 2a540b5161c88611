"""Storage options of a loaded model: less memory at a small, stated cost.

The pipeline keeps everything but the decoder linears as it came, and refinement
tables in float32. Neither is needed to run. Nothing here is applied unless asked for,
and evaluation under the contract runs without it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import mxfp4
from mxjax.quantized_linear import OneCode, QuantizedLinear


def compact(
  params: Mapping[str, Any], *, tables: bool = True, embeddings: bool = False
) -> dict[str, Any]:
  """Returns params that take less memory and run through the same calls.

  Args:
    params: A model's params, quantized or not.
    tables: Store the refinement tables G_Q and K_Q in bfloat16. They only rank the
      candidates of a code: every A4 operand stays legal, and at most near-ties are
      decided otherwise. Input maps stay float32, because weights were folded with
      exactly them.
    embeddings: Pack the embedding, and an untied head, as MXFP4 (nearest), used
      without rounding inputs. This changes the model: measure it.

  Returns:
    New params; leaves that do not change are shared with the old ones.
  """
  result = dict(_narrow_tables(params) if tables else params)
  if embeddings:
    for name in ("embed_tokens", "lm_head"):
      if name in result:
        weight = result[name]["weight"]
        if not isinstance(weight, mxfp4.MXTensor):
          result[name] = {**result[name], "weight": mxfp4.encode(weight)}
  return result


def _narrow_tables(node: Any) -> Any:
  if isinstance(node, Mapping):
    return {key: _narrow_tables(value) for key, value in node.items()}
  if isinstance(node, QuantizedLinear) and isinstance(node.rounding, OneCode):
    rounding: OneCode = jax.tree.map(lambda a: a.astype(jnp.bfloat16), node.rounding)
    return dataclasses.replace(node, rounding=rounding)
  return node
