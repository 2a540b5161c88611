"""The refit of the maps to rounded weights, on a linear's calibration inputs."""

import jax
import jax.numpy as jnp

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.methods.gptq import conjugated
from mxjax.numerics.realization import gptq, map_refit
from mxjax.numerics.shaping import reference_chart
from mxjax.numerics.shaping.input_maps import InputMap


@execution.jit()
def _gram(decoded: jax.Array) -> jax.Array:
  return reference_chart.block_moment(decoded).astype(decoded.dtype)


@execution.jit()
def _losses(
  weight: jax.Array, decoded: jax.Array, correction: jax.Array, hessian: jax.Array
) -> jax.Array:
  """Computes the relative errors of the outputs without and with the correction."""
  after = map_refit.effective(decoded, correction)
  loss = lambda weights: gptq.reconstruction_loss(weight, weights, hessian)
  signal = loss(jnp.zeros_like(weight))
  found = jnp.stack([loss(decoded), loss(after)])
  return jnp.where(signal > 0, found / signal, 0)


def refitted(
  weight: jax.Array,
  decoded: jax.Array,
  inputs: LinearInputs,
  input_map: InputMap | None,
) -> map_refit.Refit:
  """Refits the map of a linear whose weights are rounded.

  `weight` is folded and `decoded` its W4 values, float32 `[blocks, 32, rows]`.
  `inputs.record` gets `refit_errors`: the error of the outputs that the rounded weights
  make of exact inputs, over the outputs, before and after.
  """
  hessian = conjugated(inputs.hessian(), input_map)
  moments = _gram(decoded), execution.block_on_cpu(map_refit.own_moments(hessian))
  inverses = [
    execution.call_in_batches(map_refit.damped_inverses, one) for one in moments
  ]
  found = execution.block_on_cpu(map_refit.refit(weight, decoded, hessian, *inverses))
  errors = _losses(weight, decoded, found.correction, hessian)
  inputs.record["refit_errors"] = errors.tolist()
  return found
