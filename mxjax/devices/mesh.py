"""Work shared out over the devices of a mesh, and arrays that lie on it.

A mesh has two axes. While the float model is measured, every device takes sequences
of its own, whichever axis it is on, and fetches the rows of a weight that lie on the
other devices of its `model` group. While a model is evaluated, windows are shared out
over `data` and each device of a `model` group computes its own output rows. What is
small or whole by nature (a Cholesky factor, a solve, a report) runs on the first
device of each process, the lead: the same programs as without a mesh.

No sum is ever split: products run over the whole input axis on one device, and the
contributions of sequences are added in calibration order (`add_in_order`). So results
do not depend on the mesh, as far as the backend's products do not depend on how many
rows they have.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mxjax.layers.linear import RowSharded, map_rows

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)
T = TypeVar("T")


class Sharing(NamedTuple):
  """How sequences, and weights that lie by rows, are used.

  Attributes:
    axes: Mesh axes that the sequences are shared out over.
    gather: See `RowSharded`.
  """

  axes: tuple[str, ...]
  gather: Literal["weights", "outputs"]


CALIBRATION = Sharing(AXES, "weights")
"""A sequence of its own for every device."""
EVALUATION = Sharing((DATA,), "outputs")
"""A window for every `model` group, each device making its own output rows."""


def make(data: int | None = None, model: int = 1) -> Mesh:
  """A mesh of the devices of all processes.

  Args:
    data: Devices along `data`; as many as there are when None.
    model: Devices along `model`.

  Raises:
    ValueError: The sizes do not make up a number of devices that there are.
  """
  devices = jax.devices()
  if data is None and model > 0:
    data = len(devices) // model
  wanted = (data or 0) * model
  # Part of the devices may be taken in one process; a process without any is lost.
  possible = wanted == len(devices) or jax.process_count() == 1
  if not (0 < wanted <= len(devices) and possible and model > 0):
    raise ValueError(
      f"mesh: expected data x model devices out of {len(devices)}, got "
      f"data={data}, model={model}; name sizes whose product is the number of devices, "
      "or on CPU set XLA_FLAGS=--xla_force_host_platform_device_count."
    )
  return Mesh(np.asarray(devices[:wanted]).reshape(data or 0, model), AXES)


def sizes(text: str) -> dict[str, int]:
  """The sizes in a word such as `data=4,model=2`; an axis left out has size 1.

  Raises:
    ValueError: The word names other axes, or no sizes.
  """
  found: dict[str, int] = dict.fromkeys(AXES, 1)
  for part in text.split(","):
    name, _, number = part.partition("=")
    if name.strip() not in found or not number.strip().isdecimal() or int(number) < 1:
      raise ValueError(
        f"mesh: expected sizes such as data=4,model=2, got {text!r}; the axes are "
        "data and model."
      )
    found[name.strip()] = int(number)
  return found


def normalize(mesh: Mesh | None) -> Mesh | None:
  """The same devices with both axes, `data` first; None stays None.

  Raises:
    ValueError: The mesh has other axes.
  """
  if mesh is None:
    return None
  if not mesh.axis_names or set(mesh.axis_names) - set(AXES):
    raise ValueError(
      f"mesh: expected the axes data and model, or one of them, got "
      f"{mesh.axis_names}; rename them: jax.sharding.Mesh(devices, ('data', 'model'))."
    )
  names = list(mesh.axis_names)
  devices = mesh.devices
  for axis in AXES:
    if axis not in names:
      devices, names = devices[..., None], [*names, axis]
  devices = np.transpose(devices, [names.index(axis) for axis in AXES])
  return Mesh(devices, AXES)


def describe(mesh: Mesh | None) -> dict[str, int] | None:
  """Sizes of the axes, and processes; None without a mesh."""
  if mesh is None:
    return None
  return {**mesh.shape, "processes": len({d.process_index for d in mesh.devices.flat})}


def check_sequences(mesh: Mesh | None, sequences: int, chunk: int) -> int:
  """Checks that sequences divide over the devices; returns how many go together.

  Raises:
    ValueError: They do not, or a chunk size was asked for as well.
  """
  if mesh is None:
    return chunk
  if chunk != 1:
    raise ValueError(
      f"mesh: expected chunk 1 beside a mesh, got {chunk}; every device takes one "
      "sequence at a time, so leave chunk out."
    )
  if sequences % mesh.size:
    raise ValueError(
      f"mesh: expected a number of calibration sequences that divides over "
      f"{mesh.size} devices, got {sequences}; pass a multiple of {mesh.size}, or name "
      "a smaller mesh."
    )
  return mesh.size


def primary_device(mesh: Mesh) -> Any:
  """The device of this process that does what is not shared out."""
  return mesh.local_devices[0]


def place(array: Any, mesh: Mesh, spec: P) -> jax.Array:
  """Puts an array that every process has on the mesh."""
  sharding = NamedSharding(mesh, spec)
  is_spread = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1
  if is_spread or sharding.is_fully_addressable:
    return jax.device_put(array, sharding)
  # Of a host's own array `device_put` would first compare what all processes have.
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: np.asarray(array[index])
  )


def replicate(tree: T, mesh: Mesh) -> T:
  """Puts a pytree on every device."""
  return jax.tree.map(lambda a: place(a, mesh, P()), tree)


@functools.partial(jax.jit, static_argnames="mesh")
def _replicated(array: jax.Array, mesh: Mesh) -> jax.Array:
  return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P()))


def alias(array: jax.Array) -> jax.Array:
  """The same buffers as an array of their own.

  What JAX copies to the host to answer for an array stays with it as long as it lives;
  asked through this one, it goes with this one.
  """
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def to_primary_device(tree: T, mesh: Mesh | None) -> T:
  """Brings the arrays of a pytree to the lead, whole; host arrays stay."""
  if mesh is None:
    return tree

  def one(array: Any) -> Any:
    if not isinstance(array, jax.Array):
      return array
    if array.is_fully_addressable:
      return jax.device_put(alias(array), primary_device(mesh))
    return _replicated(array, mesh).addressable_data(0)

  return jax.tree.map(one, tree)


class OnLead(Mapping[str, Any]):
  """Params whose keys come to the lead, one at a time, when they are read."""

  def __init__(self, params: Mapping[str, Any], mesh: Mesh) -> None:
    """Wraps params that lie anywhere."""
    self._params, self._mesh = params, mesh

  def __getitem__(self, key: str) -> Any:
    return to_primary_device(self._params[key], self._mesh)

  def __iter__(self) -> Iterator[str]:
    return iter(self._params)

  def __len__(self) -> int:
    return len(self._params)


def on_primary_device(
  params: Mapping[str, Any], mesh: Mesh | None
) -> Mapping[str, Any]:
  """`OnLead` where there is a mesh, else the params themselves."""
  return params if mesh is None else OnLead(params, mesh)


def _is_shared(weight: Any, mesh: Mesh) -> bool:
  """Whether a weight has rows that divide over the model axis."""
  return len(weight.shape) == 2 and weight.shape[0] % mesh.shape[MODEL] == 0


def map_weights(
  tree: Any, mesh: Mesh, shared: Callable[[Any], Any], whole: Callable[[Any], Any]
) -> Any:
  """Maps nested dicts: weights with rows to share out, and the leaves of all else.

  Args:
    tree: Params, or nested dicts with anything that has shapes in their place.
    mesh: The mesh.
    shared: Applied to weights whose rows divide over the model axis.
    whole: Applied to every other leaf.
  """
  if not isinstance(tree, Mapping):
    return jax.tree.map(whole, tree)
  result = {}
  for key, value in tree.items():
    is_weight = key == "weight" and not isinstance(value, Mapping)
    if is_weight and _is_shared(value, mesh):
      result[key] = shared(value)
    else:
      result[key] = map_weights(value, mesh, shared, whole)
  return result


def shard_rows(params: T, mesh: Mesh | None) -> T:
  """Puts params on a mesh, weights by output rows over `model`, all else whole.

  A weight whose rows do not divide over the axis is whole on every device.

  Args:
    params: Nested dicts of arrays and typed leaves, float or quantized.
    mesh: The mesh; without one the params are returned as they are.
  """
  if mesh is None:
    return params
  whole = lambda a: place(a, mesh, P())
  by_row = lambda a: place(a, mesh, P(MODEL))
  return map_weights(params, mesh, lambda w: map_rows(by_row, whole, w), whole)


def call(
  run: Callable[..., Any],
  mesh: Mesh | None,
  params: Any,
  *arrays: Any,
  sharing: Sharing = CALIBRATION,
  specs: Sequence[P] | None = None,
) -> Any:
  """Calls `run(params, *arrays)`, shared out where there is a mesh; traced.

  Args:
    run: The function; on a mesh it sees its device's part of every array.
    mesh: The mesh, or None.
    params: Params that `shard_rows` has put there; `run` gets `RowSharded` weights.
    *arrays: Pytrees of arrays.
    sharing: How sequences, which all results have in front, are shared out.
    specs: How each of the arrays lies; with sequences in front when None.
  """
  if mesh is None:
    return run(params, *arrays)
  has_rows = mesh.shape[MODEL] > 1
  wrap = lambda w: RowSharded(w, MODEL, sharing.gather) if has_rows else w
  whole = lambda _: P()
  spec = lambda w: wrap(map_rows(lambda _: P(MODEL), whole, w))
  return jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(
      map_weights(params, mesh, spec, whole),
      *(specs or [P(sharing.axes)] * len(arrays)),
    ),
    out_specs=P(sharing.axes),
    check_vma=False,
  )(map_weights(params, mesh, wrap, lambda a: a), *arrays)


def by_row(
  run: Callable[..., T], mesh: Mesh, weight: jax.Array, *others: jax.Array | None
) -> T:
  """Calls `run(weight, *others)` with output rows shared out over all devices; traced.

  Args:
    run: A function whose arrays all have rows on their last axis, each row's part
      depending on that row of the weight alone.
    mesh: The mesh.
    weight: `[..., rows]`.
    *others: Arrays that every device needs whole.
  """
  rows = weight.shape[-1]
  by_last = lambda a: P(*[None] * (len(a.shape) - 1), AXES)
  # Rows of zeros fill the last device up; what is made of them is cut off below.
  filled = jnp.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(0, -rows % mesh.size)])
  results = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(by_last(weight), *[P()] * len(others)),
    out_specs=jax.tree.map(by_last, jax.eval_shape(run, weight, *others)),
    check_vma=False,
  )(filled, *others)
  return jax.tree.map(lambda a: a[..., :rows], results)


class Layout(NamedTuple):
  """A pytree of arrays without their values; hashable.

  Attributes:
    structure: The tree.
    shapes: Shape of each leaf.
    dtypes: Dtype of each leaf.
  """

  structure: Any
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[np.dtype, ...]

  def zeros(self) -> Any:
    """The tree with zeros everywhere."""
    leaves = map(jnp.zeros, self.shapes, self.dtypes)
    return jax.tree.unflatten(self.structure, leaves)


def share(tree: Any, mesh: Mesh) -> tuple[list[jax.Array], Layout]:
  """Shares out the elements of running totals over all devices.

  Returns:
    One flat array a leaf, filled up with zeros, sharded; and what `collect` needs.
  """
  leaves, structure = jax.tree.flatten(tree)
  flat = [jnp.pad(leaf.reshape(-1), (0, -leaf.size % mesh.size)) for leaf in leaves]
  layout = Layout(
    structure, tuple(a.shape for a in leaves), tuple(a.dtype for a in leaves)
  )
  return [place(a, mesh, P(AXES)) for a in flat], layout


def collect(shares: Sequence[jax.Array], layout: Layout, mesh: Mesh) -> Any:
  """The totals on the lead: the inverse of `share`."""
  whole = to_primary_device(list(shares), mesh)
  leaves = [
    flat[: math.prod(shape)].reshape(shape)
    for flat, shape in zip(whole, layout.shapes, strict=True)
  ]
  return jax.tree.unflatten(layout.structure, leaves)


def add_in_order(shares: Sequence[jax.Array], tree: Any) -> list[jax.Array]:
  """Adds one contribution a device to the totals, in the order of the devices; traced.

  Each device receives its share of every contribution and adds them one by one: as
  many bytes as a reduce-scatter moves, and the sum that one device would form.

  Args:
    shares: This device's share of each total.
    tree: This device's contribution to all of them, whole.
  """
  totals = []
  for total, part in zip(shares, jax.tree.leaves(tree), strict=True):
    count = jax.lax.axis_size(AXES)
    flat = jnp.pad(part.reshape(-1), (0, total.size * count - part.size))
    arrived = jax.lax.all_to_all(flat.reshape(count, -1), AXES, 0, 0)
    for row in range(count):
      total = total + arrived[row]
    totals.append(total)
  return totals
