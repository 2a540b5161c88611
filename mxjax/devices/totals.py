"""Sums over the calibration sequences, independent of the device layout.

One device scans the sequences of a chunk. On a mesh, each device computes the
contribution of one sequence, and adds its share of the elements of all contributions in
calibration order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from mxjax.devices import execution
from mxjax.devices.mesh import AXES
from mxjax.devices.placement import ONE_DEVICE, Placement

Step = Callable[..., tuple[Any, Any]]
"""`(totals, sequence, index, static, params, *args)` to (totals, output): adds the
contribution of one sequence, an int32 `index` in the set. It must be additive in the
totals: on a mesh it is applied to zeros and the results are added."""


def _add_in_order(shares: Sequence[jax.Array], tree: Any) -> list[jax.Array]:
  """Adds one contribution of each device to the totals, in device order; traced.

  Each device receives its share of every contribution and adds them one by one: the
  traffic of a reduce-scatter, with the sum that one device would form.
  """
  totals = []
  for total, part in zip(shares, jax.tree.leaves(tree), strict=True):
    count = jax.lax.axis_size(AXES)
    # Every device gets an equal share of the elements; `Totals` pads the totals in the
    # same way.
    flat = jnp.pad(part.reshape(-1), (0, total.size * count - part.size))
    # `arrived[i]` is this device's share of what device i contributes.
    arrived = jax.lax.all_to_all(flat.reshape(count, -1), AXES, 0, 0)
    # A loop and not `sum`, whose order XLA may choose: the bits would depend on the
    # mesh.
    for row in range(count):
      total = total + arrived[row]
    totals.append(total)
  return totals


@execution.jit(
  static_argnames=("step", "static", "placement", "layout"),
  donate_argnames=("totals", "consumed"),
  compiler_options=execution.FEW_TEMPORARIES,
)
def _add_chunk(
  step: Step,
  static: tuple[Any, ...],
  placement: Placement,
  layout: tuple[Any, tuple[jax.ShapeDtypeStruct, ...]],
  params: Any,
  totals: Any,
  consumed: Any,
  sequences: Any,
  first: jax.Array,
  args: tuple[Any, ...],
) -> tuple[Any, Any]:
  if placement.mesh is None:

    def body(totals: Any, item: Any) -> tuple[Any, Any]:
      sequence, index = item
      return step(totals, sequence, index, static, params, *args)

    count = jax.tree.leaves((consumed, sequences))[0].shape[0]
    # By name, because inside a float64 scope they would be int64.
    indices = first + jnp.arange(count, dtype=jnp.int32)
    return jax.lax.scan(body, totals, ((consumed, sequences), indices))

  def run(
    params: Any, shares: Any, consumed: Any, sequences: Any, first: Any, args: Any
  ) -> tuple[list[jax.Array], Any]:
    # Row by row over (data, model), the order in which `P(AXES)` lays out the
    # sequences.
    index = first + jax.lax.axis_index(AXES)
    # A device has one sequence of the chunk.
    sequence = jax.tree.map(lambda a: a[0], (consumed, sequences))
    structure, leaves = layout
    zeros = jax.tree.unflatten(structure, [jnp.zeros(a.shape, a.dtype) for a in leaves])
    new, output = step(zeros, sequence, index, static, params, *args)
    return _add_in_order(shares, new), jax.tree.map(lambda a: a[None], output)

  whole, split = P(), P(AXES)
  arrays = totals, consumed, sequences, first, args
  specs = split, split, split, whole, whole
  return placement.call(run, params, *arrays, specs=specs)


def _beside(totals: Any, arrays: Any) -> Any:
  """Commits new totals to the device that an array of a call is committed to.

  Its results are, so totals that start uncommitted would compile every step twice.
  """
  committed = (
    array.sharding
    for array in jax.tree.leaves(arrays)
    if isinstance(array, jax.Array) and array.committed
  )
  place = next(committed, None)
  if not isinstance(place, SingleDeviceSharding):
    return totals
  # Totals are donated, and host buffers must not be.
  own = lambda a: a if isinstance(a, jax.Array) else jnp.array(a)
  return jax.device_put(jax.tree.map(own, totals), place)


class Totals:
  """Running totals, a pytree of donated arrays whose elements a mesh shares."""

  def __init__(self, initial: Any, placement: Placement = ONE_DEVICE) -> None:
    self._placement, self._first = placement, 0
    leaves, structure = jax.tree.flatten(initial)
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)
    self._layout = structure, shapes
    self._totals = initial
    if placement.mesh:
      count = placement.mesh.size
      flat = [jnp.pad(leaf.reshape(-1), (0, -leaf.size % count)) for leaf in leaves]
      self._totals = [placement.put(a, P(AXES)) for a in flat]

  def add(
    self,
    step: Step,
    sequences: Any = None,
    *args: Any,
    static: tuple[Any, ...] = (),
    params: Any = None,
    consumed: Any = None,
  ) -> Any:
    """Adds the contributions of the next sequences.

    `step` is a module-level function, compiled once for each shape. `sequences` and
    `consumed` are `[sequences, ...]`, on a mesh one sequence a device; a step gets
    `(consumed, sequences)`, and `consumed` is donated. `args` are pytrees for every
    step, already replicated on a mesh; `static` arguments are hashable; `params` come
    from `Placement.shard_rows`. Returns the outputs of the steps, `[sequences, ...]`.
    """
    # Of 32 bits by name: inside a float64 scope a Python int would be an int64, and
    # this another program.
    first = np.int32(self._first)
    # Only at first: later totals are results, which are committed already.
    if not first and self._placement.mesh is None:
      self._totals = _beside(self._totals, (params, consumed, sequences, args))
    self._totals, outputs = _add_chunk(
      step,
      static,
      self._placement,
      self._layout,
      params,
      self._totals,
      consumed,
      sequences,
      first,
      args,
    )
    self._first += jax.tree.leaves((consumed, sequences))[0].shape[0]
    return outputs

  def value(self) -> Any:
    """Returns the totals so far, on the primary device."""
    if self._placement.mesh is None:
      return self._totals
    structure, shapes = self._layout
    whole = self._placement.to_primary(self._totals)
    leaves = [
      flat[: like.size].reshape(like.shape)
      for flat, like in zip(whole, shapes, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)
