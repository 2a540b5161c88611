"""Nodes of different classes are different, for JAX's cache of compiled functions."""

import ast
import dataclasses
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.generation import Decoding
from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.numerics.realization.activation_quantizers import (
  RULES,
  FewCodes,
  Nearest,
  Unrounded,
)
from mxjax.numerics.shaping import input_maps

ROOT = pathlib.Path(__file__).parents[3]


def test_no_two_classes_of_rules_or_maps_have_one_structure():
  """Of equal children each, as if the fields of both had the same arrays."""
  classes = [*RULES.values(), *input_maps.MAPS.values()]
  assert {Nearest, Unrounded} <= {*classes}
  made = []
  for cls in classes:
    node = object.__new__(cls)
    for field in dataclasses.fields(cls):
      value = 1 if field.metadata.get("static") else jnp.zeros(1)
      object.__setattr__(node, field.name, value)
    made.append(jax.tree.structure({"rounding": node}))
  for index, structure in enumerate(made):
    assert [index] == [i for i, other in enumerate(made) if other == structure]


@pytest.mark.slow
def test_each_of_a_hundred_classes_runs_its_own_program():
  """Where nodes of different classes were equal, ten or more ran that of another."""

  def numbered(number):
    cls = dataclasses.make_dataclass(f"Node{number}", [], frozen=True)
    cls.number = number
    return pytree_nodes.register(cls)

  add = jax.jit(lambda node, x: x + node.number)
  classes = [numbered(number) for number in range(100)]
  got = [int(add(cls(), jnp.int32(0))) for cls in classes]
  assert got == list(range(100))


def test_a_linear_that_rounds_and_one_that_does_not_never_compare_equal():
  weight = mxfp4.encode(jnp.ones((4, 32), jnp.float32))
  structures = [
    jax.tree.structure(QuantizedLinear(weight, None, rule))
    for rule in (Nearest(), Unrounded())
  ]
  assert structures[0] != structures[1]
  # So a map over both fails in place of taking one for the other.
  with pytest.raises(ValueError, match="structure|Mismatch"):
    jax.tree.map(lambda a, b: a, *({"a": rule} for rule in (Nearest(), Unrounded())))


def test_nothing_is_registered_so_that_its_class_is_forgotten():
  folders = "mxjax", "models", "evaluation", "discovery", "pallas_kernels", "examples"
  files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
  assert len(files) > 200
  found = [
    f"{file.relative_to(ROOT)}:{node.lineno}"
    for file in files
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Attribute)
    and node.attr == "register_dataclass"
    and ast.unparse(node.value) in ("jax.tree_util", "tree_util")
  ]
  assert not found, f"use mxjax.numerics.pytree_nodes.register: {found}"


def test_a_node_is_taken_apart_by_name_and_made_again():
  gram = jnp.arange(528.0)[None]
  node = FewCodes(gram, changes=2, rounds_up=True)
  [(path, leaf)], structure = jax.tree_util.tree_flatten_with_path(node)
  assert jax.tree_util.keystr(path) == ".gram" and leaf is gram
  again = jax.tree.unflatten(structure, [leaf])
  assert (again.gram is gram, again.changes, again.rounds_up) == (True, 2, True)
  assert jax.tree.structure(FewCodes(gram, changes=1)) != structure
  assert jax.tree.structure(pickle.loads(pickle.dumps(node))) == structure
  np.testing.assert_array_equal(jax.jit(lambda n: 2 * n.gram)(node), 2 * gram)
  assert jax.tree.leaves(Nearest()) == []
  # What is dropped is not taken over.
  state = Decoding({}, jnp.zeros(1), jnp.zeros(1), longest=3)
  assert jax.tree.map(lambda leaf: leaf, state).longest is None
