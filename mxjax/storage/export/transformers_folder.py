"""A Hugging Face folder that transformers runs strictly, with code of ours inside.

It holds everything: packed weights, input maps, the tables of the one-code rule,
clipping and recovery, and `modeling_mxfp4.py`, plain torch that needs nothing of mxjax.
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` computes the
strict model, one activation rounding after the other, and decodes weights in every
call: it is for checking and for tools that expect a torch module, not for speed.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.errors import ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.families import FAMILIES
from mxjax.models.loading.weights import tensor_name
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import (
  Clipped,
  FewCodes,
  Nearest,
  OneCode,
  Unrounded,
)
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import Hadamard, InputMap, TwoLevel
from mxjax.storage.export import features, folder

FORMAT = "mxjax-transformers"
MODULE = "modeling_mxfp4"


def _hadamard_tensors(hadamard: Hadamard, blocks: int) -> dict[str, jax.Array]:
  """Splits H of a group, over blocks and inside them: H_64 = H_2 (x) H_32."""
  inside = min(hadamard.size, mxfp4.BLOCK_SIZE)
  # Above 32 the group spans blocks: first a mix of blocks, then the map inside each.
  across = hadamard.size // inside

  def repeated(size: int, copies: int) -> jax.Array:
    identity = jnp.eye(copies, dtype=jnp.float32)
    return jnp.kron(identity, input_maps.hadamard(size))

  tensors = {"input_blocks": repeated(inside, mxfp4.BLOCK_SIZE // inside)[None]}
  if across > 1:
    tensors["input_mix"] = repeated(across, blocks // across)
  if hadamard.signs is not None:
    tensors["input_signs"] = hadamard.signs
  return tensors


def _unheld(place: str, what: object) -> ValueRefusal:
  return ValueRefusal(
    f"export: {place}",
    expected=f"what {FORMAT} can hold",
    got=what,
    mend="use --format safetensors, which holds everything",
  )


def _map_tensors(
  input_map: InputMap | None, blocks: int, place: str
) -> dict[str, jax.Array]:
  """Returns a map as signs, a mix of blocks, and a matrix for each block."""
  match input_map:
    case None:
      return {}
    case Hadamard():
      return _hadamard_tensors(input_map, blocks)
    case TwoLevel(inter=inter, intra=intra):
      # `TwoLevel` multiplies by R_intra from the right; the module multiplies its
      # matrix from the left.
      return {"input_mix": inter, "input_blocks": intra.T[None]}
  matrix = input_map.dense_blocks()
  if matrix is None:
    raise _unheld(place, f"the input map {type(input_map).__name__}")
  return {"input_blocks": matrix}


def _rule_tensors(leaf: QuantizedLinear, place: str) -> dict[str, jax.Array]:
  match leaf.rounding:
    case Nearest():
      return {}
    case Unrounded():
      return {"inputs_float": jnp.ones(1)}
    case OneCode(gram=gram, cross=cross):
      return {"refine_gram": gram, "refine_cross": cross}
    case FewCodes(gram=gram, changes=changes, rounds_up=rounds_up):
      return {"refine_gram": gram, "refine_how": jnp.array([changes, int(rounds_up)])}
    case Clipped(low=low, high=high):
      return {"clip_low": low, "clip_high": high}
  raise _unheld(place, f"the A4 rule {type(leaf.rounding).__name__}")


def linear_tensors(leaf: QuantizedLinear, place: str) -> dict[str, jax.Array]:
  """Returns the buffers of one strict linear by name; `place` is for messages.

  Raises:
    ValueError: The linear has a map or rules that the module does not know.
  """
  # The module's `nearest` has the floor rule, or `even` of a refinement, and no other.
  if leaf.rules != mxfp4.PAPER_RULES:
    raise _unheld(place, leaf.rules)
  blocks = leaf.shape[1] // mxfp4.BLOCK_SIZE
  operator = _map_tensors(leaf.input_map, blocks, place)
  operator |= _rule_tensors(leaf, place)
  mxfp4.check_legal(leaf.weight, f"export: {place}")
  return {
    "weight_packed": leaf.weight.codes,
    "weight_scale": leaf.weight.scales,
    **{name: array.astype(jnp.float32) for name, array in operator.items()},
  }


def _at(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _corrections(
  params: Mapping[str, Any],
) -> Iterator[tuple[tuple[str, ...], dict[str, jax.Array]]]:
  """Yields scale and shift of the outputs that recovery corrects, by their linear."""
  for path, node in features.nodes(params):
    of = lambda name, path=path: (*path[:-1], name)
    match node:
      case ValueRecovery():
        # Rows are ordered by head, so that each coefficient is repeated `head_dim`
        # times.
        rows = _at(params, of("v_proj"))["weight"].shape[0] // node.scale.shape[0]
        scale, shift = (jnp.repeat(a, rows) for a in (node.scale, node.offset))
        yield of("v_proj"), {"output_scale": scale, "output_shift": shift}
      case MlpRecovery():
        shift = node.gate_shift * node.gate_deviation
        scale = 1 + node.gate_scale
        yield of("gate_proj"), {"output_scale": scale, "output_shift": shift}
        yield of("up_proj"), {"output_scale": 1 + node.up_scale}


def to_tensors(
  params: Mapping[str, Any],
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
  """Returns all tensors by name, and shape and dtype of each linear's buffers.

  Raises:
    ValueError: The module does not know a map or rule, or recovery has no place.
  """
  tensors: dict[str, Any] = {}
  linears: dict[str, dict[str, Any]] = {}
  corrected = dict(_corrections(params))
  for path, node in features.nodes(params):
    name = tensor_name(path)
    match node:
      case QuantizedLinear():
        module = name.removesuffix(".weight")
        buffers = linear_tensors(node, module)
        if (bias := _at(params, path[:-1]).get("bias")) is not None:
          buffers["bias"] = bias
        # Taken out: a correction that stays belongs to no quantized linear.
        for key, value in corrected.pop(path[:-1], {}).items():
          buffers[key] = jnp.broadcast_to(value, (node.shape[0],))
        linears[module] = {k: [list(a.shape), str(a.dtype)] for k, a in buffers.items()}
        tensors |= {f"{module}.{key}": array for key, array in buffers.items()}
      case jax.Array():
        tensors[name] = node
  if corrected:
    raise ValueRefusal(
      "export",
      expected=f"only quantized linears to be recovered, since {FORMAT} holds no "
      "others",
      got=tensor_name(min(corrected)),
      mend="use --format safetensors, or --drop recovery",
    )
  return tensors, linears


def write_transformers(
  out: str | os.PathLike[str],
  source: folder.Source,
  companions: folder.Companions = folder.NO_COMPANIONS,
  *,
  shard_bytes: int = folder.SHARD_BYTES,
) -> pathlib.Path:
  """Writes a folder that transformers runs strictly; see `write_folder`.

  Raises:
    FileExistsError: The folder is not empty.
    NotImplementedError: The family's config cannot describe the model.
    ValueError: The module lacks features of the model; the first is named.
  """
  tensors, linears = to_tensors(source.params)
  is_float = any("inputs_float" in buffers for buffers in linears.values())
  values = folder.hf_values(source, companions)
  model_class = f"MXFP4{FAMILIES[source.config.family].architecture}"
  values |= {
    "architectures": [model_class],
    "auto_map": {"AutoModelForCausalLM": f"{MODULE}.{model_class}"},
    "mxfp4": {"linears": linears},
  }
  return folder.write_folder(
    out,
    FORMAT,
    source,
    companions,
    tensors,
    json_files={"config.json": values},
    copies=[pathlib.Path(__file__).parent / f"{MODULE}.py"],
    details={
      "activations": "not rounded (W4A16)" if is_float else "as in the checkpoint",
      "quantized_linears": len(linears),
    },
    shard_bytes=shard_bytes,
  )
