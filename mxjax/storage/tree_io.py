"""Typed trees as JSON and arrays: what checkpoints and run folders are made of.

A params tree is nested dicts whose nodes are arrays or typed leaves. `describe` says
of every node what it is, with its static fields, and hands the arrays out by path;
`rebuild` is the inverse, so a file of arrays and a JSON description are the tree.
"""

import dataclasses
import hashlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import mesh as meshes
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import activation_quantizers
from mxjax.numerics.realization.learned_scales import LearnedScales
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps

_LEAVES = (QuantizedLinear, mxfp4.MXTensor, ValueRecovery, MlpRecovery, LearnedScales)
TYPES: Mapping[str, type] = ChainMap(
  {cls.__name__: cls for cls in _LEAVES}, activation_quantizers.RULES, input_maps.MAPS
)
"""Every typed node a checkpoint may hold, by the name the manifest gives it."""


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Every non-mapping node of nested dicts, and every empty dict, by path."""
  if not isinstance(tree, Mapping) or (path and not tree):
    yield path, tree
    return
  for key, value in tree.items():
    if not isinstance(key, str) or not key or "/" in key:
      raise TypeError(
        f"save_checkpoint: keys of params must be names without a slash, got {key!r} "
        f"under {path or 'the root'}; rename it."
      )
    yield from walk(value, f"{path}/{key}" if path else key)


def _fields(cls: type) -> tuple[list[str], list[str]]:
  """Names of the array fields and of the static fields of a typed node."""
  fields = dataclasses.fields(cls)
  static = [field.name for field in fields if field.metadata.get("static")]
  return [field.name for field in fields if field.name not in static], static


def describe(node: Any, path: str, arrays: dict[str, Any]) -> dict[str, Any]:
  """The manifest entry of a node; its arrays are added to `arrays` by path."""
  if node is None:
    return {"type": "none"}
  if isinstance(node, Mapping):  # `walk` stops only at empty ones.
    return {"type": "dict"}
  if isinstance(node, (jax.Array, np.ndarray)):
    array = jnp.asarray(node)
    if array.dtype != node.dtype:
      raise TypeError(
        f"save_checkpoint: {path} is {node.dtype}, which JAX holds only in 64-bit "
        f"mode; convert it to {array.dtype} first."
      )
    arrays[path] = array
    return {"type": "array"}
  name = type(node).__name__
  if TYPES.get(name) is not type(node):
    raise TypeError(
      f"save_checkpoint: {path} is a {name}, expected an array or one of "
      f"{', '.join(sorted(TYPES))}; convert it to one of these."
    )
  children, static = _fields(type(node))
  values = {field: getattr(node, field) for field in static}
  return {
    "type": name,
    "static": {
      key: dataclasses.asdict(value) if isinstance(value, mxfp4.Rules) else value
      for key, value in values.items()
    },
    "children": {
      field: describe(getattr(node, field), f"{path}/{field}", arrays)
      for field in children
    },
  }


def rebuild(entry: dict[str, Any], path: str, arrays: Mapping[str, Any]) -> Any:
  """The inverse of `describe`."""
  kind = entry["type"]
  if kind == "none":
    return None
  if kind == "dict":
    return {}
  if kind == "array":
    return arrays[path]
  if kind not in TYPES:
    raise ValueError(
      f"restore_checkpoint: {path} has the type {kind!r}, expected one of "
      f"{', '.join(sorted(TYPES))}; use the mxjax version that wrote it."
    )
  static = dict(entry["static"])
  if "rules" in static:
    static["rules"] = mxfp4.Rules(**static["rules"])
  children = {
    field: rebuild(child, f"{path}/{field}", arrays)
    for field, child in entry["children"].items()
  }
  return TYPES[kind](**children, **static)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Slash-separated paths to nested dicts."""
  result: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, name = path.split("/")
    level = result
    for parent in parents:
      level = level.setdefault(parent, {})
    level[name] = value
  return result


def at(tree: Any, path: str) -> Any:
  """The value at a slash-separated path of nested dicts."""
  for key in path.split("/"):
    tree = tree[key]
  return tree


def array_sha256(array: Any) -> str:
  """SHA-256 of an array's values, hex; the host keeps nothing of them."""
  if isinstance(array, jax.Array):
    array = meshes.alias(array)
  data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return hashlib.sha256(data.data).hexdigest()
