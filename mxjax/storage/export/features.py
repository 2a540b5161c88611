"""Features of a quantized model beyond codes and scales, and how to drop them."""

import dataclasses
import functools
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.realization import activation_quantizers
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping.input_maps import InputMap
from mxjax.pallas_kernels.mxfp4_encode import encode
from mxjax.storage.tree_io import nested, walk

FEATURES = ChainMap(
  {
    "value-recovery": "scale and offset of the value heads",
    "mlp-recovery": "scalars of the gated MLPs",
    "gains": "output gains of single linears",
    "rules": "a scale with a factor of 1/3",
  },
  activation_quantizers.FEATURES,
  {"maps": "online input maps"},
)
"""Features that some format cannot hold, with their descriptions."""
GROUPS = {"recovery": ("value-recovery", "mlp-recovery")}
"""Names that stand for several features."""


def nodes(params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
  """Yields typed nodes and arrays of nested dicts, each with its path."""
  for path, node in walk(params):
    yield tuple(path.split("/")), node


def _features(node: Any) -> Iterator[str]:
  match node:
    case ValueRecovery():
      yield "value-recovery"
    case MlpRecovery():
      yield "mlp-recovery"
    case QuantizedLinear():
      if node.input_map is not None:
        yield "maps"
      if node.rounding.feature is not None:
        yield node.rounding.feature[0]
      if node.gain is not None:
        yield "gains"
      if node.rules.scale_rule == "mx43":
        yield "rules"


def features_of(params: Mapping[str, Any]) -> dict[str, list[str]]:
  """Lists the features of quantized params with the dotted paths that have them."""
  paths_of: dict[str, list[str]] = {}
  for path, node in nodes(params):
    for name in _features(node):
      paths_of.setdefault(name, []).append(".".join(path))
  return paths_of


def parse(text: str | None) -> tuple[str, ...]:
  """Parses a comma-separated list of features; groups expand to their members."""
  names = [name.strip() for name in (text or "").split(",") if name.strip()]
  members = [one for name in names for one in GROUPS.get(name, (name,))]
  if unknown := [name for name in members if name not in FEATURES]:
    raise ValueError(
      f"export: expected --drop of {', '.join([*FEATURES, *GROUPS])}, got "
      f"{', '.join(unknown)}; use these names."
    )
  return tuple(dict.fromkeys(members))


def refuse(
  form: str,
  features: Mapping[str, Collection[str]],
  mends: Mapping[str, str] | None = None,
) -> None:
  """Raises a ValueError that names all features that the format `form` cannot hold.

  `features` has paths by feature; `mends` may offer an alternative to dropping one.
  """
  if not features:
    return
  listed = "; ".join(
    f"{name} ({FEATURES[name]}) in {len(paths)} places, first {min(paths)}"
    for name, paths in features.items()
  )
  others = "".join(f" {mends[name]}" for name in features if mends and name in mends)
  raise ValueError(
    f"export: {form} cannot hold {listed}; use --format safetensors, which holds "
    f"everything, or leave them out by --drop {','.join(features)}, which changes the "
    f"model and measures it again.{others}"
  )


@functools.partial(jax.jit, static_argnames="rules")
def _effective(
  weight: mxfp4.MXTensor, input_map: InputMap | None, rules: mxfp4.Rules
) -> jax.Array:
  """Computes decode(W) T, float64: the matrix that multiplies native inputs."""
  decoded = mxfp4.decode(weight, jnp.float32, rules).astype(jnp.float64)
  if input_map is None:
    return decoded
  blocks = mxfp4.to_blocks(decoded)
  # T multiplies feature-major inputs from the left; weights need its transpose.
  (native,) = jax.linear_transpose(input_map.apply, blocks)(blocks)
  return mxfp4.from_blocks(native)


def effective_weight(leaf: QuantizedLinear) -> jax.Array:
  """Computes W~ T, which acts on unrounded native inputs like map and codes.

  It is float64 `[out_features, in_features]` and contains the gain, if there is one.
  """
  with precision.float64_scope():
    weight = execution.block_on_cpu(_effective(leaf.weight, leaf.input_map, leaf.rules))
    return weight if leaf.gain is None else weight * leaf.gain.astype(jnp.float64)


def _without(leaf: QuantizedLinear, names: Collection[str]) -> QuantizedLinear:
  rounding, rules, weight = leaf.rounding, leaf.rules, leaf.weight
  if rounding.feature is not None and rounding.feature[0] in names:
    rounding = Nearest()
  if "rules" in names and rules.scale_rule == "mx43":
    rules = mxfp4.PAPER_RULES
  input_map = None if "maps" in names else leaf.input_map
  is_unmapped = input_map is not leaf.input_map
  if is_unmapped or rules != leaf.rules:
    # The gain stays separate and is not encoded with the weight.
    mapped = leaf.input_map if is_unmapped else None
    native = effective_weight(dataclasses.replace(leaf, gain=None, input_map=mapped))
    weight = encode(native.astype(jnp.float32), rules)
  gain = None if "gains" in names else leaf.gain
  return dataclasses.replace(
    leaf, weight=weight, input_map=input_map, rounding=rounding, gain=gain, rules=rules
  )


def drop(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
  """Returns new params without the given features, which are names of `FEATURES`.

  Codes change only where necessary: weights that lose their map are brought to native
  coordinates and rounded to nearest, which undoes what a reconstruction gained; so are
  weights whose scale had a factor.

  Raises:
    ValueError: Tables or clipping shares stay without the maps whose coordinates they
      use.
  """
  present = features_of(params)
  bound = [name for name in activation_quantizers.FEATURES if name in present]
  if "maps" in names and (staying := [name for name in bound if name not in names]):
    raise ValueError(
      f"export: {', '.join(staying)} is measured in the coordinates of the maps, so "
      f"maps cannot be dropped alone; drop {','.join(['maps', *staying])} together."
    )
  kept: dict[str, Any] = {}
  for path, node in walk(params):
    if isinstance(node, QuantizedLinear):
      kept[path] = _without(node, names)
    elif not set(_features(node)) & set(names):
      kept[path] = node
  return nested(kept)
