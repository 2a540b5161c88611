"""Placement of arrays and computations on one device or a mesh.

A mesh has two axes. In calibration, every device on either axis takes its own sequences
and gathers weight rows from the other devices of its `model` group. In evaluation,
windows are split over `data`, and each device of a `model` group computes its own
output rows. Small or unsplittable work (a Cholesky factor, a solve, a report) runs on
the primary device of each process, with the same programs as without a mesh.

No sum is ever split, and contributions of sequences are added in calibration order
(`totals`). So results do not depend on the mesh, as far as the backend's products do
not depend on their number of rows.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax import compilation
from mxjax.devices import execution
from mxjax.devices.mesh import AXES, DATA, MODEL, alias, map_weights, normalize
from mxjax.errors import ValueRefusal
from mxjax.layers.linear import RowSharded, map_rows

T = TypeVar("T")


class Sharing(NamedTuple):
  """How sequences are split over mesh `axes`; `gather` is that of `RowSharded`."""

  axes: tuple[str, ...]
  gather: Literal["weights", "outputs"]


CALIBRATION = Sharing(AXES, "weights")
"""One sequence for every device."""
EVALUATION = Sharing((DATA,), "outputs")
"""One window for every `model` group, each device computing its own output rows."""


@dataclasses.dataclass(frozen=True)
class Placement:
  """One device (mesh None), or the devices of a mesh; hashable, so it can be static."""

  mesh: Mesh | None = None

  @classmethod
  def of(cls, mesh: Mesh | None) -> "Placement":
    """Makes the placement on a mesh; see `mesh.normalize`."""
    return cls(normalize(mesh))

  @property
  def primary_device(self) -> Any:
    """The device that runs unsharded work in this process."""
    return self.mesh.local_devices[0] if self.mesh else jax.local_devices()[0]

  def describe(self) -> dict[str, int] | None:
    """Returns the mesh axis sizes and number of processes; None for one device."""
    if self.mesh is None:
      return None
    processes = {device.process_index for device in self.mesh.devices.flat}
    return {**self.mesh.shape, "processes": len(processes)}

  def chunk_size(self, sequences: int, chunk: int) -> int:
    """Returns how many calibration sequences go through a layer together.

    Raises:
      ValueError: On a mesh, the sequences do not divide over the devices, or `chunk`
        was set as well.
    """
    # True would pass for the number 1.
    if isinstance(chunk, bool) or not isinstance(chunk, Integral) or chunk < 1:
      raise ValueRefusal(
        "quantize", expected="a chunk of 1 sequence or more", got=chunk
      )
    if self.mesh is None:
      return chunk
    if chunk != 1:
      raise ValueRefusal(
        "mesh",
        expected="chunk 1 beside a mesh",
        got=chunk,
        mend="every device takes one sequence at a time, so leave chunk out",
      )
    if sequences % self.mesh.size:
      raise ValueRefusal(
        "mesh",
        expected="a number of calibration sequences that divides over "
        f"{self.mesh.size} devices",
        got=sequences,
        mend=f"pass a multiple of {self.mesh.size}, or name a smaller mesh",
      )
    return self.mesh.size

  def put(self, array: Any, spec: P) -> jax.Array:
    """Puts an array that every process has where `spec` says, in a new buffer.

    On one device it is a copy: the buffers of hidden states are donated, and host
    buffers must not be.
    """
    if self.mesh is None:
      return jnp.array(array)
    sharding = NamedSharding(self.mesh, spec)
    is_spread = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1
    # Either JAX moves parts between devices, or this process has all of them.
    if is_spread or sharding.is_fully_addressable:
      return jax.device_put(array, sharding)
    # For a host array `device_put` would first compare the values of all processes.
    return jax.make_array_from_callback(
      array.shape, sharding, lambda index: np.asarray(array[index])
    )

  def put_sequences(self, chunk: Any) -> jax.Array:
    """Puts `[sequences, ...]`, on a mesh with one sequence on each device."""
    return self.put(chunk, P(AXES))

  def replicate(self, tree: T) -> T:
    """Copies a pytree to every device."""
    if self.mesh is None:
      return tree
    return jax.tree.map(lambda a: self.put(a, P()), tree)

  def shard_rows(self, params: T) -> T:
    """Puts params on the mesh, weights by output rows over `model`, the rest whole.

    A weight whose rows do not divide over the axis is whole on every device.
    """
    if self.mesh is None:
      return params
    whole = lambda a: self.put(a, P())
    by_row = lambda a: self.put(a, P(MODEL))
    return map_weights(params, self.mesh, lambda w: map_rows(by_row, whole, w), whole)

  def to_primary(self, tree: T) -> T:
    """Brings the arrays of a pytree to the primary device, whole; host arrays stay."""
    mesh = self.mesh
    if mesh is None:
      return tree

    def one(array: Any) -> Any:
      if not isinstance(array, jax.Array):
        return array
      if array.is_fully_addressable:
        # Through an alias, with which a copy on the host is freed.
        return jax.device_put(alias(array), self.primary_device)
      # Parts lie in other processes: XLA gathers them, in a call that all processes
      # make.
      return _replicated(array, mesh).addressable_data(0)

    return jax.tree.map(one, tree)

  def on_primary(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Wraps params so that reading a key brings its value to the primary device."""
    return params if self.mesh is None else _OnPrimary(params, self)

  def call(
    self,
    run: Callable[..., Any],
    params: Any,
    *arrays: Any,
    sharing: Sharing = CALIBRATION,
    specs: Sequence[P] | None = None,
  ) -> Any:
    """Calls `run(params, *arrays)`, sharded over the mesh if there is one; traced.

    On a mesh `run` sees its device's part of every array and `RowSharded` weights;
    `params` must come from `shard_rows`. `sharing` says how sequences, the leading axis
    of all results, are split; `specs` shard the arrays, by default along sequences.
    """
    if self.mesh is None:
      return run(params, *arrays)
    # On one device of `model` every weight is whole, and stays the array that it is.
    has_rows = self.mesh.shape[MODEL] > 1
    wrap = lambda w: RowSharded(w, MODEL, sharing.gather) if has_rows else w
    whole = lambda _: P()
    spec = lambda w: wrap(map_rows(lambda _: P(MODEL), whole, w))
    return jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=(
        map_weights(params, self.mesh, spec, whole),
        *(specs or [P(sharing.axes)] * len(arrays)),
      ),
      out_specs=P(sharing.axes),
      check_vma=False,
    )(map_weights(params, self.mesh, wrap, lambda a: a), *arrays)

  def call_by_row(
    self, run: Callable[..., T], weight: jax.Array, *others: jax.Array | None
  ) -> T:
    """Calls `run(weight, *others)` with output rows split over all devices.

    `run` is hashable, and its results have rows on their last axis, each depending on
    that row of the weight `[..., rows]` alone. Returns the results of all rows, on the
    primary device.
    """
    if self.mesh is None:
      return run(weight, *others)
    # Whole on every device: the program below cuts out each one's rows.
    weight, others = self.replicate((weight, others))
    return self.to_primary(_by_row(run, self.mesh, weight, *others))


ONE_DEVICE = Placement()


class _OnPrimary(Mapping[str, Any]):
  def __init__(self, params: Mapping[str, Any], placement: Placement) -> None:
    self._params, self._placement = params, placement

  def __getitem__(self, key: str) -> Any:
    return self._placement.to_primary(self._params[key])

  def __iter__(self) -> Iterator[str]:
    return iter(self._params)

  def __len__(self) -> int:
    return len(self._params)


@compilation.jit(static_argnames="mesh")
def _replicated(array: jax.Array, mesh: Mesh) -> jax.Array:
  return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P()))


@execution.jit(static_argnums=(0, 1))
def _by_row(
  run: Callable[..., T], mesh: Mesh, weight: jax.Array, *others: jax.Array | None
) -> T:
  rows = weight.shape[-1]
  by_last = lambda a: P(*[None] * (len(a.shape) - 1), AXES)
  # Pad the last device with rows of zeros; their results are cut off below.
  filled = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, -rows % mesh.size)])
  results = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(by_last(weight), *[P()] * len(others)),
    out_specs=jax.tree.map(by_last, jax.eval_shape(run, weight, *others)),
    check_vma=False,
  )(filled, *others)
  return jax.tree.map(lambda a: a[..., :rows], results)
