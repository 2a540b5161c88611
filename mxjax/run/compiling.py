"""Compiles the programs of a layer's linears side by side, on a GPU.

A program is compiled by the thread that calls it first, and one after the other that
was most of a build of a small model. So before its first layer is quantized, one linear
of each shape is quantized in a thread of its own. The results are dropped: what is kept
of these runs is what XLA compiled, and no bit depends on them. A program that several
of them call is traced and compiled once: JAX lets the others wait.

On a CPU this would be no gain, and two computations in flight may hang; see
`mxjax.devices.execution`.
"""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.calibration.calibration import Params
from mxjax.numerics import precision
from mxjax.run.capture import Captured
from mxjax.run.record import linear_record
from mxjax.run.setup import Setup

LOG = logging.getLogger(__name__)
BYTES_A_WEIGHT = 64
"""Device memory that quantizing a linear may take, for each weight: the float64 copies
of its three trials, and its Hessian."""


def compile_together(
  setup: Setup,
  captured: Captured,
  groups: Mapping[str, Any],
  layer: Params,
) -> None:
  """Quantizes a linear of each shape at once and drops the results.

  Nothing happens where that gains nothing or may fail: off a GPU, over several devices,
  with a store, whose statistics are written in order, and for programs that do not
  promise `compiles_together`. `groups` are what `shape_group` returned, by tap. What a
  linear raises here it raises again in its turn.
  """
  # The first linear of each shape: a program is compiled for shapes, not for names.
  weights: dict[tuple[int, ...], tuple[str, str]] = {}
  for block, linear in setup.targets:
    weights.setdefault(layer[block][linear]["weight"].shape, (block, linear))
  if not _gains(setup, weights):
    return
  # The float layer runs once, in this thread, for whoever needs what it captures.
  _ = captured.taps

  def run(block: str, linear: str) -> None:
    # Entered here, because JAX has this setting for each thread by itself.
    with precision.float64_scope():
      weight = jnp.asarray(layer[block][linear]["weight"])
      group = groups[setup.model.projection_taps[block, linear]]
      inputs = captured.inputs(block, linear, group)
      leaf, hook_record = setup.program.quantize_linear(weight, inputs)
      # Its probe is a program of this shape, too.
      linear_record(weight, leaf, inputs, hook_record, probe=setup.probe)

  with ThreadPoolExecutor(min(len(weights), os.cpu_count() or 1)) as pool:
    started = {target: pool.submit(run, *target) for target in weights.values()}
  for target, done in started.items():
    if error := done.exception():
      LOG.info("%s was not compiled beforehand: %s", "/".join(target), error)


def _gains(setup: Setup, weights: Mapping[tuple[int, ...], tuple[str, str]]) -> bool:
  """Whether these linears can be quantized at once, and sooner than in turn."""
  # A subclass may keep what its parent does not: it makes the promise itself.
  promises = vars(type(setup.program)).get("compiles_together", False)
  if jax.default_backend() != "gpu" or not promises:
    return False
  if setup.placement.mesh is not None or setup.store is not None:
    return False
  # Where the backend tells nothing, no memory counts as free, and nothing is done.
  memory = jax.local_devices()[0].memory_stats() or {}
  free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
  needed = sum(BYTES_A_WEIGHT * rows * columns for rows, columns in weights)
  return len(weights) > 1 and needed < free
