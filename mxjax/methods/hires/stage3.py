"""Stage III of HiRes: structural recovery of attention values and gated MLPs.

Paper: Section HiRes, "Structural Recovery", and the third part of Algorithm hiresmx.
Attention is fitted first (Eq. hires-vo-fit), installed, and the MLP is then
measured on the layer that results (Eq. conditional-stage). Moments are summed over the
calibration sequences; the solves are in `value_recovery` and `mlp_recovery` of the
numerics.
"""

import functools
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from mxjax import compilation
from mxjax.calibration.calibration import Params
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
from mxjax.layers.linear import add_bias, linear
from mxjax.methods.recovery import RecoveryFit, Sample, State, Taps
from mxjax.numerics.recovery import mlp_recovery, value_recovery


@compilation.jit()
def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda a: a.astype(jnp.float32), tree)


class AttentionFit(RecoveryFit):
  """Fits scale and offset of each key-value head to the float trajectory."""

  name, sublayer, leaf = "attention", "self_attn", "value_recovery"
  taps = float_taps = ("value",)

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns no constants, and zero moments for every head."""
    del float_layer, sequences
    heads = float_taps["value"].shape[-2]
    zeros = execution.float64_zeros(*[(heads,)] * 6)
    return (), value_recovery.ValueMoments(*zeros)

  @override
  def measure(self, moments: Any, sample: Sample) -> Any:
    """Pairs realized with float value outputs."""
    new = value_recovery.moments(sample.taps["value"], sample.float_taps["value"])
    return jax.tree.map(lambda a, b: a + b, moments, new)

  @override
  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    fit = value_recovery.solve(moments)
    before, after = value_recovery.errors(moments, fit)
    # Sums and solution are float64, and the correction runs in float32 (Quantization
    # Setup).
    return _float32(fit), {
      "scale": fit.scale.tolist(),
      "offset": fit.offset.tolist(),
      "error_before": float(before),
      "error_after": float(after),
    }


class MlpFit(RecoveryFit):
  """Fits three scalars of each gated MLP to float weights on the realized input."""

  name, sublayer, leaf = "mlp", "mlp", "mlp_recovery"
  taps = ("gate_up_input", "gate", "up")

  def prepare(
    self, float_layer: Params, float_taps: Taps, sequences: int
  ) -> tuple[Any, Any]:
    """Returns the coordinate weights omega as constants, and zero moments by cell."""
    del float_taps
    weights = mlp_recovery.column_weights(float_layer["mlp"]["down_proj"]["weight"])
    # Fewer sequences than residue classes would leave cells empty, with means of NaN.
    residues = min(mlp_recovery.CELL_RESIDUES, sequences)
    cells = residues, mlp_recovery.CELL_QUARTERS
    shapes = cells, (*cells, 3, 3), (*cells, 3), cells, cells
    sums = execution.float64_zeros((), (), (), *shapes)
    gate_sums, cell_sums = sums[:3], sums[3:]
    return weights, (
      mlp_recovery.GateMoments(*gate_sums),
      mlp_recovery.CellMoments(*cell_sums),
    )

  @override
  def measure(self, moments: Any, sample: Sample) -> Any:
    """Adds a sequence to its four cells: its residue, by quarter of positions."""
    gate_sums, cells = moments
    taps, float_mlp = sample.taps, sample.float_layer["mlp"]
    # g* and u*: the float weights on what the quantized model feeds them (A16).
    targets = [
      add_bias(linear(taps["gate_up_input"], params["weight"]), params.get("bias"))
      for params in (float_mlp["gate_proj"], float_mlp["up_proj"])
    ]
    # Cells are classes of sequences by quarters of positions, so a sequence adds to the
    # four of its class.
    new = _quarter_moments((taps["gate"], taps["up"], *targets), sample.constants)
    residue = sample.index % cells.count.shape[0]
    add = jax.tree.map(lambda total, part: total.at[residue].add(part), cells, new)
    sums = mlp_recovery.gate_moments(taps["gate"])
    return jax.tree.map(lambda a, b: a + b, gate_sums, sums), add

  @override
  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    gate_sums, by_cell = moments
    cells = _flat(by_cell)
    deviation = mlp_recovery.gate_deviation(gate_sums)
    solved = mlp_recovery.aggregate(mlp_recovery.solve_cells(cells, deviation))
    before, after = mlp_recovery.linearized_errors(cells, deviation, solved)
    theta = np.asarray(solved)
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


@compilation.jit()
def _flat(by_cell: mlp_recovery.CellMoments) -> mlp_recovery.CellMoments:
  """Joins the two axes of the cells, residue and quarter."""
  return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), by_cell)


def _quarter_moments(
  arrays: Sequence[jax.Array], weights: jax.Array
) -> mlp_recovery.CellMoments:
  """Computes the moments of a sequence's four quarters from arrays `[1, T, hidden]`.

  The last quarter also takes the remainder.
  """
  length, quarters = arrays[0].shape[1], mlp_recovery.CELL_QUARTERS
  whole = length - length % quarters
  # As [hidden, T], because `cell_moments` sums along tokens and batches coordinates.
  rows = [a[0].T for a in arrays]

  def of_cells(part: slice, count: int) -> mlp_recovery.CellMoments:
    cells = [a[:, part].reshape(a.shape[0], count, -1) for a in rows]
    return mlp_recovery.cell_moments(*cells, weights=weights)

  moments = of_cells(slice(whole), quarters)
  if whole == length:
    return moments
  rest = of_cells(slice(whole, None), 1)
  return jax.tree.map(lambda a, b: a.at[-1].add(b[0]), moments, rest)


_FITS = {fit.name: fit for fit in (AttentionFit, MlpFit)}


@functools.cache
def named(label: str) -> RecoveryFit:
  """Returns the fit of a label, `attention` or `mlp`, such as `mlp-parent`.

  Equal labels give one object, because a fit is a static argument by identity.

  Raises:
    ValueError: The label is unknown.
  """
  name, _, on = label.partition("-")
  states = get_args(State)
  if name not in _FITS or (on or "current") not in states:
    raise ValueRefusal(
      "methods: recover",
      expected=f"none, or {' and '.join(_FITS)} joined by +, each with "
      f"-{' or -'.join(states[1:])} behind it if you like",
      got=repr(label),
    )
  return _FITS[name](on or "current")  # pyright: ignore[reportArgumentType]


def parse(text: str) -> tuple[RecoveryFit, ...]:
  """Returns the fits of labels joined by `+`, in this order; `none` is no fit."""
  return () if text == "none" else tuple(map(named, text.split("+")))


ATTENTION, MLP = named("attention"), named("mlp")
