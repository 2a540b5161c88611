"""The on-disk format of a params tree: named arrays and a JSON description.

A params tree is nested dicts whose nodes are arrays or typed leaves. Checkpoints, run
folders and exports differ only in where the arrays and the description go.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from mxjax.devices import mesh as meshes
from mxjax.errors import TypeRefusal, ValueRefusal
from mxjax.intake.reading import refusing
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import activation_quantizers
from mxjax.numerics.realization.learned_scales import LearnedScales
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from mxjax.storage.atomic_io import read_arrays, write_arrays

_LEAVES = (QuantizedLinear, mxfp4.MXTensor, ValueRecovery, MlpRecovery, LearnedScales)
TYPES: Mapping[str, type] = ChainMap(
  {cls.__name__: cls for cls in _LEAVES}, activation_quantizers.RULES, input_maps.MAPS
)
"""The typed nodes that a checkpoint may hold, by their name in the manifest."""


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
  """Yields every non-mapping node and every empty dict of nested dicts, by path."""
  if not isinstance(tree, Mapping) or (path and not tree):
    yield path, tree
    return
  for key, value in tree.items():
    if not isinstance(key, str) or not key or "/" in key:
      raise TypeRefusal(
        f"save_checkpoint: {path or 'the root'}",
        expected="keys that are names without a slash",
        got=repr(key),
        mend="rename it",
      )
    yield from walk(value, f"{path}/{key}" if path else key)


def _describe(node: Any, path: str, arrays: dict[str, Any]) -> dict[str, Any]:
  """Describes a node for the manifest and adds its arrays to `arrays` by path."""
  if node is None:
    return {"type": "none"}
  if isinstance(node, Mapping):  # `walk` stops only at empty ones.
    return {"type": "dict"}
  if isinstance(node, (jax.Array, np.ndarray)):
    # JAX narrows 64-bit numbers here, so that other values would come back.
    array = jnp.asarray(node)
    if array.dtype != node.dtype:
      raise TypeRefusal(
        f"save_checkpoint: {path}",
        expected="a dtype that JAX holds without 64-bit mode",
        got=node.dtype,
        mend=f"convert it to {array.dtype} first",
      )
    arrays[path] = array
    return {"type": "array"}
  name = type(node).__name__
  # By identity: a class of the same name from elsewhere would come back as ours.
  if TYPES.get(name) is not type(node):
    raise TypeRefusal(
      f"save_checkpoint: {path}",
      expected=f"an array or one of {', '.join(sorted(TYPES))}",
      got=f"a {name}",
      mend="convert it to one of these",
    )
  static, children = {}, {}
  for field in dataclasses.fields(node):
    key, value = field.name, getattr(node, field.name)
    if not field.metadata.get("static"):
      children[key] = _describe(value, f"{path}/{key}", arrays)
    # The one static value that JSON does not have.
    elif isinstance(value, mxfp4.Rules):
      static[key] = dataclasses.asdict(value)
    else:
      static[key] = value
  return {"type": name, "static": static, "children": children}


def _rebuild(entry: dict[str, Any], path: str, arrays: Mapping[str, Any]) -> Any:
  """Rebuilds a node; the inverse of `_describe`."""
  kind = entry["type"]
  if kind == "none":
    return None
  if kind == "dict":
    return {}
  if kind == "array":
    return arrays[path]
  if kind not in TYPES:
    raise ValueRefusal(
      "restore_checkpoint",
      expected=f"{path} of a type of {', '.join(sorted(TYPES))}",
      got=repr(kind),
      mend="use the mxjax version that wrote it",
    )
  static = dict(entry["static"])
  if "rules" in static:
    static["rules"] = mxfp4.Rules(**static["rules"])
  children = {
    field: _rebuild(child, f"{path}/{field}", arrays)
    for field, child in entry["children"].items()
  }
  return TYPES[kind](**children, **static)


Description = dict[str, Any]
"""JSON of all nodes of a tree by path: type, static fields and children of each."""


class Node(pydantic.BaseModel):
  """The structure of one node in a `Description`."""

  type: str
  static: dict[str, Any] = {}
  children: "dict[str, Node]" = {}


Nodes = dict[str, Node]


def pack(tree: Any) -> tuple[Description, dict[str, Any]]:
  """Splits a tree into its description and its arrays, both by path.

  Raises:
    TypeError: The format has no place for a key or a leaf.
  """
  arrays: dict[str, Any] = {}
  nodes = {path: _describe(node, path, arrays) for path, node in walk(tree)}
  # Tuples become lists, as when read from a JSON file.
  return json.loads(json.dumps(nodes)), arrays


def unpack(nodes: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Rebuilds a tree; the inverse of `pack`.

  Raises:
    KeyError: An array is absent.
    ValueError: This version does not know a type.
  """
  # Paths inside a typed node never reach `nested`: its arrays are read by `_rebuild`.
  return nested({path: _rebuild(node, path, arrays) for path, node in nodes.items()})


def write_tree(path: pathlib.Path, tree: Any) -> tuple[str, Description]:
  """Durably writes a tree's arrays to a file; returns its SHA-256 and the nodes."""
  nodes, arrays = pack(tree)
  return write_arrays(path, arrays), nodes


def read_tree(path: pathlib.Path, nodes: Mapping[str, Any]) -> dict[str, Any]:
  """Reads a tree written by `write_tree`, bit for bit."""
  arrays = {name: jnp.asarray(array) for name, array in read_arrays(path).items()}
  with refusing(path, "the arrays of the nodes beside it"):
    return unpack(nodes, arrays)


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Converts slash-separated paths to nested dicts."""
  result: dict[str, Any] = {}
  for path, value in flat.items():
    *parents, name = path.split("/")
    level = result
    for parent in parents:
      level = level.setdefault(parent, {})
    level[name] = value
  return result


def at(tree: Any, path: str) -> Any:
  """Returns the value at a slash-separated path of nested dicts."""
  for key in path.split("/"):
    tree = tree[key]
  return tree


def array_sha256(array: Any) -> str:
  """Computes the SHA-256 of an array's values, hex; frees the host copy."""
  if isinstance(array, jax.Array):
    array = meshes.alias(array)
  # Viewed as bytes, because numpy's buffers do not support bfloat16.
  data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return hashlib.sha256(data.data).hexdigest()


def describe_arrays(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Describes arrays by path: shape, dtype and SHA-256, JSON-ready."""
  return {
    path: {
      "shape": list(array.shape),
      "dtype": str(array.dtype),
      "sha256": array_sha256(array),
    }
    for path, array in arrays.items()
  }


def changed_arrays(entries: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
  """Lists paths of `describe_arrays` whose array is absent or another.

  The shape counts, because other shapes can have the same bytes.
  """
  return [
    path
    for path, entry in entries.items()
    if path not in arrays
    or list(arrays[path].shape) != entry["shape"]
    or array_sha256(arrays[path]) != entry["sha256"]
  ]


def leaves_by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves of any pytree by slash-separated path."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }
