"""The fast proxy: operator error of a few blocks of one layer, from calibration alone.

The middle layer's linears are cut to a few blocks of inputs and a few rows, and the
candidate quantizes these as it would a whole model. It sees no evaluation text, no
recovery, no arrangement of channels and no gradients, so it only tells which shapes and
encoders are hopeless.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.discovery.core.task import Artifacts, Call
from mxjax.discovery.tasks.ptq import candidate, phases
from mxjax.discovery.tasks.ptq.options import PROXY_BLOCKS, PtqOptions
from mxjax.numerics import mxfp4, precision

PROXY = "proxy_error"
LINEARS = ("q_proj", "o_proj", "up_proj", "down_proj")
ROWS = 64


def _spread(size: int, count: int) -> np.ndarray:
  """Returns `count` places, or all, evenly over `size`."""
  return np.unique(np.linspace(0, size - 1, min(count, size)).astype(int))


class Proxy:
  """A phase with float weights and calibration tokens, cut down to a few blocks.

  Three of four calibration sequences give statistics; the others measure the error.
  """

  def __init__(self, options: PtqOptions) -> None:
    """Runs the float model up to its middle layer and keeps what is measured."""
    model, params = options.load()
    tokens = jnp.asarray(options.tokens("proxy"), jnp.int32)
    self._layer = model.num_layers // 2
    hidden = model.embed(streams.outer_params(model, params), tokens)
    for index in range(self._layer + 1):
      layer = params[model.layer_name(index)]
      hidden, taps = jax.block_until_ready(
        jax.jit(model.layer_with_taps)(layer, hidden)
      )
    self._defaults = phases.default_identities()
    self._parts = dict(self._cut(model, layer, taps))

  def _cut(
    self, model: Any, layer: Any, taps: Mapping[str, jax.Array]
  ) -> Iterator[tuple[tuple[str, str], tuple[jax.Array, LinearInputs, jax.Array]]]:
    """Returns the weight, the inputs for statistics and those that are measured."""
    for (block, name), tap in model.projection_taps.items():
      if name in LINEARS:
        weight = jnp.asarray(layer[block][name]["weight"], jnp.float32)
        weight = weight[_spread(weight.shape[0], ROWS)]
        places = _spread(weight.shape[1] // mxfp4.BLOCK_SIZE, PROXY_BLOCKS)
        each = jax.vmap(mxfp4.to_blocks)(taps[tap].astype(jnp.float32))[:, places]
        # Blocks of the chosen places by sequence: the first three quarters are given.
        given = 3 * len(each) // 4
        measured = jnp.concatenate([*each[given:]], axis=-1)
        inputs = LinearInputs([each[:given]])
        cut = mxfp4.from_blocks(mxfp4.to_blocks(weight)[places])
        yield (block, name), (cut, inputs, measured)

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Returns the mean relative operator error of the cut linears.

    Raises:
      FloatingPointError: It is not finite.
    """
    del before
    paths = [(self._layer, *path) for path in self._parts]
    program = candidate.CandidateProgram(call, artifacts, paths, self._defaults)
    errors = {}
    with precision.float64_scope():
      for (block, name), (weight, inputs, measured) in self._parts.items():
        leaf = program.quantize_linear(weight, inputs).leaf
        at = leaf.input_map
        folded = execution.block_on_cpu(phases.fold_weight(weight, at))
        mapped = measured if at is None else at.apply(measured)
        # One name for all linears, so that those of one shape share what is compiled.
        operands = (leaf.weight, folded, mapped, phases.rounded(leaf, mapped))
        found = phases.operator_errors(*({"cut": each} for each in operands))
        errors[f"{block}/{name}"] = execution.block_on_cpu(found)["cut"]
    kinds = {"error": "total", "act": "activation", "weight": "weight"}
    parts = {
      f"proxy_{kind}": {path: float(e[key]) for path, e in errors.items()}
      for kind, key in kinds.items()
    }
    values = {kind: float(np.mean([*rows.values()])) for kind, rows in parts.items()}
    if not np.isfinite([*values.values()]).all():
      raise FloatingPointError(f"ptq: the proxy is not finite: {values}.")
    return {"values": values, "parts": parts}, b""
