"""Features of a quantized model beyond codes and scales, and how to drop them."""

import dataclasses
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.devices import execution
from mxjax.errors import ValueRefusal
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
  },
  activation_quantizers.FEATURES,
  {"maps": "online input maps"},
)
"""Features that some format cannot hold, with their descriptions."""
DEQUANT = ", or dequant, a float folder that any loader reads, its inputs not rounded"
"""What a refusal of the other formats offers, too."""
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
    raise ValueRefusal(
      "export",
      expected=f"--drop of {', '.join([*FEATURES, *GROUPS])}",
      got=", ".join(unknown),
      mend="use these names",
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
  ways = [
    "use --format transformers, which runs the strict model in torch, or safetensors, "
    f"which holds everything{'' if form.startswith('dequant') else DEQUANT}; or leave "
    f"them out by --drop {','.join(features)}, which changes the model and measures it "
    "again"
  ]

  ways += [mends[name] for name in features if mends and name in mends]
  raise ValueRefusal(
    "export", expected=f"what {form} can hold", got=listed, mend="; ".join(ways)
  )


@compilation.jit()
def _effective(weight: mxfp4.MXTensor, input_map: InputMap | None) -> jax.Array:
  """Computes decode(W) T, float64: the matrix that multiplies native inputs."""
  decoded = mxfp4.decode(weight, jnp.float32).astype(jnp.float64)
  if input_map is None:
    return decoded
  blocks = mxfp4.to_blocks(decoded)
  # T multiplies feature-major inputs from the left; weights need its transpose.
  (native,) = jax.linear_transpose(input_map.apply, blocks)(blocks)
  return mxfp4.from_blocks(native)


def effective_weight(leaf: QuantizedLinear) -> jax.Array:
  """Computes W~ T, which acts on unrounded native inputs like map and codes.

  It is float64 `[out_features, in_features]`.
  """
  with precision.float64_scope():
    return execution.block_on_cpu(_effective(leaf.weight, leaf.input_map))


def _without(leaf: QuantizedLinear, names: Collection[str]) -> QuantizedLinear:
  feature = leaf.rounding.feature
  if feature is not None and feature[0] in names:
    leaf = dataclasses.replace(leaf, rounding=Nearest())
  if leaf.input_map is None or "maps" not in names:
    return leaf
  # W~ T acts on native inputs; it is off the grid, so that it is rounded anew.
  native = encode(effective_weight(leaf).astype(jnp.float32), leaf.rules)
  return dataclasses.replace(leaf, weight=native, input_map=None)


def drop(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
  """Returns new params without the given features, which are names of `FEATURES`.

  Codes change only where necessary: weights that lose their map are brought to native
  coordinates and rounded to nearest, which undoes what a reconstruction gained.

  Raises:
    ValueError: Tables or clipping shares stay without the maps whose coordinates they
      use.
  """
  present = features_of(params)
  # Tables and shares are measured in the coordinates of the map and mean nothing in
  # native ones.
  bound = [name for name in activation_quantizers.FEATURES if name in present]
  if "maps" in names and (staying := [name for name in bound if name not in names]):
    raise ValueRefusal(
      "export",
      expected=f"maps to be dropped with {', '.join(staying)}, measured in their "
      "coordinates",
      got="maps alone",
      mend=f"drop {','.join(['maps', *staying])} together",
    )
  kept: dict[str, Any] = {}
  for path, node in walk(params):
    if isinstance(node, QuantizedLinear):
      kept[path] = _without(node, names)
    elif not set(_features(node)) & set(names):
      kept[path] = node
  return nested(kept)
