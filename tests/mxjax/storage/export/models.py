"""What the export tests share: changed params, and comparisons of bits."""

import dataclasses

import jax
import numpy as np
from safetensors import safe_open

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.storage import export


def replaced(params, make):
  """Params whose target linears are `make(block, name, weight)`."""
  new = {}
  for key, value in params.items():
    if not key.startswith("layers_"):
      new[key] = value
      continue
    new[key] = dict(value)
    for block in ("self_attn", "mlp"):
      new[key][block] = {
        name: {**part, "weight": make(block, name, part["weight"])}
        for name, part in value[block].items()
      }
  return new


def with_leaf(params, leaf):
  """The params with one linear replaced."""
  layer = params["layers_0"]
  mlp = {**layer["mlp"], "down_proj": {"weight": leaf}}
  return {**params, "layers_0": {**layer, "mlp": mlp}}


def unrounded(params):
  make = lambda leaf: (
    dataclasses.replace(leaf, rounding=Unrounded())
    if isinstance(leaf, QuantizedLinear)
    else leaf
  )
  return jax.tree.map(make, params, is_leaf=lambda n: isinstance(n, QuantizedLinear))


def source(params, config):
  return export.Source(params, config, facts={"digest": "ab"})


def same(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def tensors_in(folder):
  found = {}
  for path in sorted(folder.glob("*.safetensors")):
    with safe_open(path, framework="flax") as file:
      found |= {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
  return found
