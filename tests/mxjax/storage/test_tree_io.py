"""Typed trees as arrays and JSON, and back."""

import json

import jax.numpy as jnp
import numpy as np

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.shaping import input_maps
from mxjax.storage import layer_store, tree_io
from tests.mxjax.quantized import assert_same


def tree():
  tensor = mxfp4.encode(jnp.asarray(np.linspace(-3, 3, 256).reshape(4, 64)))
  leaf = QuantizedLinear(tensor, input_maps.Hadamard(64), Nearest())
  norm = jnp.asarray([1, 0.5], jnp.bfloat16)
  return {"mlp": {"up_proj": {"weight": leaf}}, "norm": norm, "none": None, "empty": {}}


def test_a_tree_comes_back_from_its_file_and_its_json(tmp_path):
  digest, nodes = tree_io.write_tree(tmp_path / "tree", tree())
  assert len(digest) == 64
  assert_same(
    tree_io.read_tree(tmp_path / "tree", json.loads(json.dumps(nodes))), tree()
  )


def test_a_layer_on_disk_has_the_same_format(tmp_path):
  store = layer_store.LayerStore(tmp_path)
  store["layers_0"] = tree()
  assert_same(store["layers_0"], tree())
  nodes, _ = tree_io.pack(tree())
  assert_same(tree_io.read_tree(tmp_path / "layers_0.safetensors", nodes), tree())


def test_arrays_that_are_absent_or_other_are_named():
  arrays = {"a": np.ones(2), "b": jnp.zeros(3), "c": np.ones(1)}
  entries = tree_io.describe_arrays(arrays)
  assert tree_io.changed_arrays(entries, arrays) == []
  changed = {"a": np.ones(2), "b": jnp.zeros(3).at[0].set(1)}
  assert tree_io.changed_arrays(entries, changed) == ["b", "c"]


def test_leaves_are_named_by_their_path():
  flat = tree_io.leaves_by_path({"a": {"b": jnp.ones(2)}})
  assert list(flat) == ["a/b"]
