"""Checks of what the hooks of a program return, where the pipeline takes it.

Kinds, shapes and dtypes are checked of every program. Values, which must be brought
from the device, and records are checked of hooks that are not of this library. A
refusal names the hook, and the pipeline puts the path of the linear before it.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.errors import FloatingPointRefusal, TypeRefusal, ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer
from mxjax.numerics.shaping.input_maps import InputMap


def is_own(owner: Any, hook: str) -> bool:
  """Whether a hook of a program, or of a recovery fit, is from outside this library."""
  # By the function's module: a class from outside may inherit a hook of the library.
  module = getattr(getattr(type(owner), hook), "__module__", None) or ""
  return module.partition(".")[0] != "mxjax"


def check_parts(hook: str, made: Any, kinds: Mapping[str, tuple[type, ...]]) -> None:
  """Checks the number and the kinds of the parts of a result.

  `kinds` are those of each part by its name; a part that may be None has `NoneType`.

  Raises:
    TypeError: The result is no tuple, or a part is of another kind.
  """
  if not isinstance(made, tuple) or len(made) != len(kinds):
    raise TypeRefusal(
      hook,
      expected=f"a tuple of {', '.join(kinds)}",
      got=_named(made),
      mend=f"return that from {hook}",
    )
  for part, (name, allowed) in zip(made, kinds.items(), strict=True):
    if not isinstance(part, allowed):
      names = " or ".join(_named(kind) for kind in allowed)
      raise TypeRefusal(
        hook,
        expected=f"as its {name} a {names}",
        got=_named(part),
        mend=f"return that from {hook}",
      )


def _named(value: Any) -> str:
  kind = value if isinstance(value, type) else type(value)
  return "None" if kind is type(None) else kind.__name__


def check_array(
  hook: str, name: str, array: Any, shape: tuple[int, ...], dtype: Any
) -> None:
  """Checks shape and dtype of an array; `dtype` may be abstract, as `jnp.floating`.

  Raises:
    TypeError: It is no array, or of another dtype.
    ValueError: It has another shape.
  """
  found = getattr(array, "dtype", None)
  if found is None or not jnp.issubdtype(found, dtype):
    raise TypeRefusal(
      hook,
      expected=f"as its {name} an array of {getattr(dtype, '__name__', dtype)}",
      got=_named(array) if found is None else found,
      mend=f"convert what {hook} returns",
    )
  if tuple(array.shape) != shape:
    raise ValueRefusal(
      hook,
      expected=f"a {name} of shape {list(shape)}",
      got=list(array.shape),
      mend=f"return from {hook} something for every block and every row of the weight",
    )


@compilation.jit()
def _count_not_finite(leaves: list[jax.Array]) -> list[jax.Array]:
  return [(~jnp.isfinite(leaf)).sum(dtype=jnp.int32) for leaf in leaves]


def check_finite(hook: str, tree: Any) -> None:
  """Checks that the float arrays of a result are finite, and its MXFP4 scales.

  Raises:
    FloatingPointError: One has NaN or inf; the message says which.
  """
  leaves = {
    jax.tree_util.keystr(path).lstrip("."): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
  }
  # In one program, so that only numbers are brought from the device.
  counts = _count_not_finite(list(leaves.values()))
  bad = [
    f"{int(count)} of {leaf.size} of {name}"
    for (name, leaf), count in zip(leaves.items(), counts, strict=True)
    if int(count)
  ]
  if bad:
    raise FloatingPointRefusal(
      hook,
      expected="finite numbers",
      got=f"NaN or inf in {', '.join(bad)}",
      mend=f"look in {hook} for a division by zero or a decomposition that failed",
    )


def check_record(hook: str, record: Mapping[str, Any]) -> None:
  """Checks that a record can be written as JSON.

  Raises:
    TypeError: It cannot.
  """
  try:
    json.dumps(dict(record))
  except (TypeError, ValueError) as error:
    raise TypeRefusal(
      hook,
      expected="as its record what JSON has: texts, numbers, lists and dicts of them",
      got=f"what it has not ({error})",
      mend="convert arrays by .tolist() and numpy's numbers by float()",
    ) from error


_NONE = type(None)


def check_shaping(program: Any, made: Any, blocks: jax.Array) -> None:
  """Checks the result of `Program.shape` for weights `[blocks, 32, rows]`."""
  hook = "shape"
  check_parts(hook, made, {"input map": (InputMap, _NONE), "record": (Mapping,)})
  if not is_own(program, hook):
    return
  check_finite(hook, made[0])
  check_record(hook, made[1])
  matrices = None if made[0] is None else made[0].block_matrices()
  if matrices is not None and matrices.shape[0] not in (1, blocks.shape[0]):
    raise ValueRefusal(
      hook,
      expected=f"a map of {blocks.shape[0]} blocks, or one for all",
      got=matrices.shape[0],
      mend="return a matrix for every block of 32 inputs",
    )


def check_realization(program: Any, made: Any, folded: jax.Array) -> None:
  """Checks the result of `Program.quantize_weight` for folded `[blocks, 32, rows]`."""
  hook = "quantize_weight"
  kinds = {
    "weight": (gptq.Reconstruction,),
    "rounding": (ActivationQuantizer,),
    "correction": (jax.Array, np.ndarray, _NONE),
    "record": (Mapping,),
  }
  check_parts(hook, made, kinds)
  weight, _, correction, record = made
  blocks, size, rows = folded.shape
  check_array(hook, "codes", weight.codes, folded.shape, jnp.uint8)
  check_array(hook, "exponent", weight.exponent, (blocks, rows), jnp.integer)
  check_array(hook, "decoded", weight.decoded, folded.shape, jnp.floating)
  if correction is not None:
    check_array(hook, "correction", correction, (blocks, size, size), jnp.floating)
  if is_own(program, hook):
    check_finite(hook, {"correction": correction, "decoded": weight.decoded})
    check_record(hook, record)


def check_linear(
  program: Any, made: Any, weight: jax.Array, rules: mxfp4.Rules
) -> None:
  """Checks the result of `Program.quantize_linear` for `[out_features, in_features]`.

  Raises:
    TypeError: A part is of another kind or dtype.
    ValueError: A shape is another, the rules are not those of the contract, or a code's
      scale is NaN.
    FloatingPointError: A map or a table of the rounding is not finite.
  """
  hook = "quantize_linear"
  kinds = {"leaf": (QuantizedLinear,), "record": (Mapping,)}
  check_parts(hook, made, kinds)
  leaf, record = made
  rows, width = weight.shape[:-1], weight.shape[-1]
  packed = leaf.weight
  check_array(hook, "codes", packed.codes, (*rows, width // 2), jnp.uint8)
  scales = (*rows, width // mxfp4.BLOCK_SIZE)
  check_array(hook, "scales", packed.scales, scales, jnp.uint8)
  check_parts(
    hook,
    (leaf.input_map, leaf.rounding),
    {"input map": (InputMap, _NONE), "rounding": (ActivationQuantizer,)},
  )
  if leaf.rules != rules:
    raise ValueRefusal(
      hook,
      expected=f"a leaf of the contract's {rules}",
      got=leaf.rules,
      mend="pass rules=inputs.rules to QuantizedLinear",
    )
  if is_own(program, hook):
    check_finite(hook, leaf)
    check_record(hook, record)


def check_recovery(fit: Any, made: Any) -> None:
  """Checks the result of `RecoveryFit.solve`: coefficients, and their entries."""
  hook = f"the solve of {fit.name}"
  check_parts(hook, made, {"coefficients": (object,), "record": (Mapping,)})
  if is_own(fit, "solve"):
    check_finite(hook, made[0])
    check_record(hook, made[1])


def arrays_of_step(tree: Any, before: Any = None) -> Any:
  """Returns what a step learns as arrays that a run folder keeps bit for bit.

  Raises:
    TypeError: A leaf is no array of a dtype that files and JAX have, or the tree has
      not the structure, shapes and dtypes of what was learned `before`, if given.
  """

  def array(leaf: Any) -> jax.Array:
    dtype = getattr(leaf, "dtype", None)
    # JAX would narrow 64 bits; and keys, texts and numbers of 4 bits have no file.
    if str(dtype) not in _KEPT_DTYPES:
      raise TypeRefusal(
        "what a step learns",
        expected=f"arrays of {', '.join(_KEPT_DTYPES)}",
        got=_named(leaf) if dtype is None else f"an array of {dtype}",
        mend="convert it, such as by jnp.float32(1), and random keys by "
        "jax.random.key_data",
      )
    found = jnp.asarray(leaf)
    # Without JAX's weak types, which no file has.
    return jnp.asarray(found, dtype=found.dtype)

  learned = jax.tree.map(array, tree)
  if before is not None and _kind(learned) != _kind(before):
    raise TypeRefusal(
      "what a step learns",
      expected=f"what it was before: {_kind(before)}",
      got=_kind(learned),
      mend="return arrays of the same structure, shapes and dtypes",
    )
  return learned


_KEPT_DTYPES = (
  *("float32", "bfloat16", "float16", "bool"),
  *("int8", "int16", "int32", "uint8", "uint16", "uint32"),
)


def _kind(tree: Any) -> tuple[Any, list[str]]:
  """Returns the structure of a tree of arrays, and dtype and shape of its leaves."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, [f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves]


def check_step(made: Any, before: Any) -> tuple[Any, float]:
  """Checks the result of `Learning.step`; returns its arrays, and the loss.

  Raises:
    TypeError: It is no pair with a number, or not as what was learned `before`.
  """
  if not isinstance(made, tuple) or len(made) != 2:
    raise TypeRefusal(
      "a step of learning",
      expected="a tuple of what is learned now, and the loss",
      got=_named(made),
      mend="return both",
    )
  try:
    loss = float(made[1])
  except (TypeError, ValueError) as error:
    raise TypeRefusal(
      "a step of learning",
      expected="as its loss a number",
      got=_named(made[1]),
      mend="return the loss as a float or as an array without axes",
    ) from error
  return arrays_of_step(made[0], before), loss


def check_learning(learning: Any) -> None:
  """Checks the numbers and functions of a `Learning`.

  Raises:
    TypeError: One is of another kind.
  """
  for name, least in (("steps", 0), ("sequences", 1)):
    value = getattr(learning, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
      raise TypeRefusal(
        "Learning",
        expected=f"as its {name} a whole number of at least {least}",
        got=repr(value),
        mend=f"give its {name} as an int",
      )
  for name in ("start", "step", "finish"):
    if not callable(getattr(learning, name)):
      raise TypeRefusal(
        "Learning",
        expected=f"as its {name} a function",
        got=_named(getattr(learning, name)),
        mend=f"give its {name} as a function",
      )


def check_prepared(program: Any, made: Any) -> None:
  """Checks the kinds of the result of `Program.prepare`, or of its steps."""
  hook = "prepare"
  kinds = {"params": (Mapping,), "learned": (Mapping,), "record": (Mapping,)}
  check_parts(hook, made, kinds)
  if is_own(program, hook):
    check_record(hook, made.record)
