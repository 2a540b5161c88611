"""Quantized models by hand, and comparisons of bits, for the tests of several rooms."""

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps


def leaf(rng, weight, kind):
  """A leaf as the methods make them: map, tables and codes that belong together."""
  blocks = mxfp4.to_blocks(jnp.asarray(weight, jnp.float32))
  if kind == "hadamard":
    rotation = input_maps.Hadamard(64 if weight.shape[1] % 64 == 0 else 32)
    folded = mxfp4.from_blocks(rotation.fold(blocks))
    return QuantizedLinear(mxfp4.encode(folded), rotation, Nearest())
  tensor = mxfp4.encode(weight)
  if kind == "rtn":
    return QuantizedLinear(tensor, None, Nearest())
  noise = jnp.asarray(rng.standard_normal((len(blocks), 32, 32)), jnp.float32)
  near_identity = input_maps.BlockDense(jnp.eye(32)[None] + 0.1 * noise)
  decoded = mxfp4.to_blocks(mxfp4.decode(tensor, jnp.float32))
  gram, cross = one_code.tables(blocks, decoded)
  rounding = OneCode(one_code.pack_symmetric(gram), cross)
  return QuantizedLinear(tensor, near_identity, rounding)


MIXED = {"self_attn": ("hires", "hires"), "mlp": ("hadamard", "rtn")}


def model(params, kinds, recovery=False):
  """Params with leaves of one kind, or of `kinds[block][layer]`, and their recovery."""
  rng, new = np.random.default_rng(0), dict(params)
  scalars = [jnp.float32(value) for value in (0.05, -0.05, 0.025, 1.5)]
  values = ValueRecovery(jnp.float32([1.3, 0.8]), jnp.float32([0.05, -0.2]))
  recoveries = {
    "self_attn": {"value_recovery": values},
    "mlp": {"mlp_recovery": MlpRecovery(*scalars)},
  }
  for index in range(2):
    layer = dict(params[f"layers_{index}"])
    for block, leaves in recoveries.items():
      kind = kinds if isinstance(kinds, str) else kinds[block][index]
      linears = {
        name: {**part, "weight": leaf(rng, part["weight"], kind)}
        for name, part in layer[block].items()
      }
      layer[block] = {**linears, **(leaves if recovery else {})}
    new[f"layers_{index}"] = layer
  return new


def at(tree, path):
  for key in path.split("/"):
    tree = tree[key]
  return tree


def replaced(tree, path, value):
  """The tree with another value at a path; None takes the key away."""
  key, _, rest = path.partition("/")
  if rest:
    return {**tree, key: replaced(tree[key], rest, value)}
  others = {k: v for k, v in tree.items() if k != key}
  return others if value is None else {**others, key: value}


def without(params, recovery):
  """The params with one kind of recovery leaf removed from both layers."""
  for index in range(2):
    params = replaced(params, f"layers_{index}/{recovery}", None)
  return params


DAMAGES = ("flip", "truncate", "remove")


def damage(file, how):
  """Flips a bit in the middle of a file, cuts its last byte off, or removes it."""
  data, middle = file.read_bytes(), file.stat().st_size // 2
  if how == "flip":
    file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
  elif how == "truncate":
    file.write_bytes(data[:-1])
  else:
    file.unlink()


def assert_same(left, right):
  """Two trees have the same types, dtypes, shapes and bits."""
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
