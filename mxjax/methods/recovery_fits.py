"""Recovery fits as the pipeline runs them: prepare, measure, solve, install.

The numerics are in `value_recovery` and `mlp_recovery`; this module reads the taps of a
layer and installs the coefficients. A fit's result for a layer depends only on that
layer and those before it, so all fits can run in one pass over the layers, each on its
own trajectory, with the results of separate passes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import Params
from mxjax.layers.linear import linear
from mxjax.numerics.recovery import mlp_recovery, value_recovery

Taps = Mapping[str, jax.Array]


class RecoveryFit:
  """One recovery fit; hashable by identity, so that it can be a static argument.

  `name` is the name in results; `measure` needs `float_taps` of the float trajectory.
  """

  name: str = ""
  float_taps: tuple[str, ...] = ()

  def state(self, layer: Params, parent: Params) -> Params:
    """Returns the layer that the fit is measured on.

    `layer` has every earlier fit installed and is the default, the paper's conditional
    order; `parent` is the quantized layer without any fit.
    """
    del parent
    return layer

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns constants of the layer and zero moments; call it in a float64 scope."""
    raise NotImplementedError

  def measure(
    self,
    moments: Any,
    constants: Any,
    float_layer: Params,
    taps: Taps,
    float_taps: Taps,
    index: jax.Array,
  ) -> Any:
    """Adds one sequence's taps (leading axis 1) to the moments; traced."""
    raise NotImplementedError

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """Solves for the coefficients and returns them with their report entries."""
    raise NotImplementedError

  def install(self, layer: Params, leaf: Any) -> dict[str, Any]:
    """Returns the layer's params with the coefficients beside its projections."""
    raise NotImplementedError


def _with_leaf(layer: Params, block: str, name: str, leaf: Any) -> dict[str, Any]:
  return {**layer, block: {**layer[block], name: leaf}}


def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


class AttentionFit(RecoveryFit):
  """Fits scale and offset of each key-value head to the float trajectory."""

  name = "attention"
  float_taps = ("value",)

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns no constants, and zero moments for every head."""
    del float_layer, sequences
    heads = float_taps["value"].shape[-2]
    zeros = [jnp.zeros(heads, jnp.float64) for _ in range(6)]
    return (), value_recovery.ValueMoments(*zeros)

  def measure(
    self,
    moments: Any,
    constants: Any,
    float_layer: Params,
    taps: Taps,
    float_taps: Taps,
    index: jax.Array,
  ) -> Any:
    """See `RecoveryFit.measure`; pairs realized with float value outputs."""
    del constants, float_layer, index
    new = value_recovery.moments(taps["value"], float_taps["value"])
    return jax.tree.map(lambda a, b: a + b, moments, new)

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    fit = value_recovery.solve(moments)
    before, after = value_recovery.errors(moments, fit)
    return _float32(fit), {
      "scale": fit.scale.tolist(),
      "offset": fit.offset.tolist(),
      "error_before": float(before),
      "error_after": float(after),
    }

  def install(self, layer: Params, leaf: Any) -> dict[str, Any]:
    """See `RecoveryFit.install`."""
    return _with_leaf(layer, "self_attn", "value_recovery", leaf)


class MlpFit(RecoveryFit):
  """Fits three scalars of each gated MLP to float weights on the realized input."""

  name = "mlp"
  float_taps = ()

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns the coordinate weights omega as constants, and zero moments by cell."""
    del float_taps
    weights = mlp_recovery.column_weights(float_layer["mlp"]["down_proj"]["weight"])
    zeros = lambda *shape: jnp.zeros(shape, jnp.float64)
    residues = min(mlp_recovery.CELL_RESIDUES, sequences)
    cells = residues, mlp_recovery.CELL_QUARTERS
    gate = mlp_recovery.GateMoments(zeros(), zeros(), zeros())
    return weights, (
      gate,
      mlp_recovery.CellMoments(
        count=zeros(*cells),
        gram=zeros(*cells, 3, 3),
        target=zeros(*cells, 3),
        product_square=zeros(*cells),
        error_square=zeros(*cells),
      ),
    )

  def measure(
    self,
    moments: Any,
    constants: Any,
    float_layer: Params,
    taps: Taps,
    float_taps: Taps,
    index: jax.Array,
  ) -> Any:
    """See `RecoveryFit.measure`; a cell is (sequence residue, quarter of positions)."""
    del float_taps
    gate_sums, cells = moments
    x = taps["gate_up_input"]
    float_mlp = float_layer["mlp"]
    targets = [_float_linear(x, float_mlp[name]) for name in ("gate_proj", "up_proj")]
    new = _quarter_moments((taps["gate"], taps["up"], *targets), constants)
    residue = index % cells.count.shape[0]
    add = jax.tree.map(lambda total, part: total.at[residue].add(part), cells, new)
    sums = mlp_recovery.gate_moments(taps["gate"])
    return jax.tree.map(lambda a, b: a + b, gate_sums, sums), add

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    gate_sums, by_cell = moments
    cells = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), by_cell)
    deviation = mlp_recovery.gate_deviation(gate_sums)
    theta = mlp_recovery.aggregate(mlp_recovery.solve_cells(cells, deviation))
    before, after = mlp_recovery.linearized_errors(cells, deviation, theta)
    leaf = mlp_recovery.MlpRecovery(theta[0], theta[1], theta[2], deviation)
    return _float32(leaf), {
      "alpha": float(theta[0]),
      "beta": float(theta[1]),
      "eta": float(theta[2]),
      "gate_deviation": float(deviation),
      "cells": int(cells.count.shape[0]),
      "error_before": float(before),
      "error_after_linearized": float(after),
    }

  def install(self, layer: Params, leaf: Any) -> dict[str, Any]:
    """See `RecoveryFit.install`."""
    return _with_leaf(layer, "mlp", "mlp_recovery", leaf)


def _quarter_moments(
  arrays: Sequence[jax.Array], weights: jax.Array
) -> mlp_recovery.CellMoments:
  """Computes the moments of a sequence's four quarters from arrays `[1, T, hidden]`.

  The last quarter also takes the remainder.
  """
  length, quarters = arrays[0].shape[1], mlp_recovery.CELL_QUARTERS
  whole = length - length % quarters
  rows = [a[0].T for a in arrays]
  cells = lambda a, count: a.reshape(a.shape[0], count, a.shape[1] // count)
  moments = mlp_recovery.cell_moments(
    *(cells(a[:, :whole], quarters) for a in rows), weights=weights
  )
  if whole == length:
    return moments
  rest = mlp_recovery.cell_moments(
    *(cells(a[:, whole:], 1) for a in rows), weights=weights
  )
  return jax.tree.map(lambda a, b: a.at[-1].add(b[0]), moments, rest)


def _float_linear(x: jax.Array, params: Params) -> jax.Array:
  y = linear(x, params["weight"])
  if "bias" not in params:
    return y
  bias = params["bias"].astype(y.dtype)
  return y + bias.reshape((1,) * (y.ndim - 1) + bias.shape)


ATTENTION = AttentionFit()
MLP = MlpFit()
