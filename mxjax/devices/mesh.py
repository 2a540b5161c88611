"""Device meshes: construction, axes, and which weights are sharded by rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mxjax.errors import ValueRefusal

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


def make(data: int | None = None, model: int = 1) -> Mesh:
  """Makes a mesh of the devices of all processes with these axis sizes.

  `data` is by default the number of devices over `model`.

  Raises:
    ValueError: The product of the sizes does not fit the number of devices, or `model`
      alone does not divide it.
  """
  devices = jax.devices()
  if data is None and model > 0:
    data, idle = divmod(len(devices), model)
    if data and idle:
      raise ValueRefusal(
        "mesh",
        expected=f"a size of model that divides {len(devices)} devices",
        got=model,
        mend=f"also name data, as in data={data}, to leave {idle} of them idle",
      )
  wanted = (data or 0) * model
  # One process may use a subset of the devices; several processes must use all.
  possible = wanted == len(devices) or jax.process_count() == 1
  if not (0 < wanted <= len(devices) and possible and model > 0):
    asked = max(1, data or 1) * max(1, model)
    raise ValueRefusal(
      "mesh",
      expected=f"data x model devices out of {len(devices)}",
      got=f"data={data}, model={model}",
      mend="name sizes whose product is the number of devices, or on CPU set "
      f"XLA_FLAGS=--xla_force_host_platform_device_count={asked}",
    )
  return Mesh(np.asarray(devices[:wanted]).reshape(data or 0, model), AXES)


def sizes(text: str) -> dict[str, int]:
  """Parses sizes such as `data=4,model=2`; an axis left out has size 1.

  Raises:
    ValueError: The text names other axes, one of them twice, or no sizes.
  """
  axes: dict[str, int] = {}
  for part in text.split(","):
    name, number = (side.strip() for side in part.partition("=")[::2])
    is_new = name in AXES and name not in axes
    if not (is_new and number.isdecimal() and int(number) > 0):
      raise ValueRefusal(
        "mesh",
        expected="sizes such as data=4,model=2",
        got=repr(text),
        mend="name each of the axes data and model once at most",
      )
    axes[name] = int(number)
  return {**dict.fromkeys(AXES, 1), **axes}


def normalize(mesh: Mesh | None) -> Mesh | None:
  """Gives a mesh both axes, `data` first; None stays None.

  Raises:
    ValueError: The mesh has other axes.
  """
  if mesh is None:
    return None
  if not mesh.axis_names or set(mesh.axis_names) - set(AXES):
    raise ValueRefusal(
      "mesh",
      expected="the axes data and model, or one of them",
      got=mesh.axis_names,
      mend="rename them: jax.sharding.Mesh(devices, ('data', 'model'))",
    )
  names = list(mesh.axis_names)
  devices = mesh.devices
  for axis in AXES:
    if axis not in names:
      # An axis of one device changes nothing and spares all others the question whether
      # it is there.
      devices, names = devices[..., None], [*names, axis]
  devices = np.transpose(devices, [names.index(axis) for axis in AXES])
  return Mesh(devices, AXES)


def alias(array: jax.Array) -> jax.Array:
  """Wraps an array's buffers in a new array object.

  JAX caches host copies on the array object; they are freed with this alias.
  """
  # The same buffers: nothing is copied on the device.
  shards = [shard.data for shard in array.addressable_shards]
  return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def map_weights(
  tree: Any, mesh: Mesh, shared: Callable[[Any], Any], whole: Callable[[Any], Any]
) -> Any:
  """Maps nested dicts of params, or of other leaves with shapes.

  `shared` maps weights whose rows divide over the model axis, `whole` all other leaves.
  """
  if not isinstance(tree, Mapping):
    return jax.tree.map(whole, tree)

  def one(key: str, value: Any) -> Any:
    if key == "weight" and not isinstance(value, Mapping):
      shape = value.shape
      if len(shape) == 2 and shape[0] % mesh.shape[MODEL] == 0:
        return shared(value)
    return map_weights(value, mesh, shared, whole)

  return {key: one(key, value) for key, value in tree.items()}
