"""The gate: static checks of a serialized artifact before it runs, and its identity.

Artifacts are deserialized only here, and in jailed runs only in a worker that is
discarded at the first fault.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox.independence import check_independence
from mxjax.discovery.sandbox.tracing import avals

MAX_ARTIFACT_BYTES = 512 * 1024
MAX_OPERATIONS = 4_000
MAX_CONSTANT_BYTES = 40 * 1024
"""Five 32 x 32 matrices in float64: enough for structure, too little for weights."""
CUSTOM_CALLS = frozenset(
  """Qr ProductOfElementaryHouseholderReflectors LuDecomposition cu_threefry2x32
  lapack_sgeqrf_ffi lapack_dgeqrf_ffi lapack_sorgqr_ffi lapack_dorgqr_ffi
  lapack_spotrf_ffi lapack_dpotrf_ffi lapack_sgetrf_ffi lapack_dgetrf_ffi
  lapack_ssyevd_ffi lapack_dsyevd_ffi lapack_sgesdd_ffi lapack_dgesdd_ffi
  lapack_strsm_ffi lapack_dtrsm_ffi stablehlo.dynamic_top_k shape_assertion""".split()
)
FORBIDDEN_OPERATIONS = frozenset(
  """all_gather all_reduce create_token infeed outfeed recv rng rng_bit_generator
  send""".split()
)


def canonical_module(text: str) -> str:
  """Returns StableHLO text without names that come from the source.

  Tracing already removed comments, variable names and dead code. This removes the name
  of the module, names of private functions, and argument labels.
  """
  text = re.sub(r"module @[\w.]+", "module", text)
  text = re.sub(r"(?m)^#loc.*$", "", text)
  text = re.sub(r"\s*loc\([^)]*\)", "", text).strip()
  text = re.sub(r'(,\s*)?jax\.(arg|result)_info = "[^"]*"', "", text)
  head, *parts = re.split(r"(?m)^(?=  func\.func )", text)
  named = {m.group(1): part for part in parts if (m := re.search(r"@([\w.]+)", part))}
  # Functions are printed in order of name; visit them in order of first use instead.
  order = ["main"] if "main" in named else list(named)[:1]
  for name in order:
    used = re.findall(r"@([\w.]+)", named[name])
    order += [u for u in dict.fromkeys(used) if u in named and u not in order]
  numbers = {name: f"@f{index}" for index, name in enumerate(order)}
  rename = lambda match: numbers.get(match.group(1), match.group(0))
  bodies = [re.sub(r"@([\w.]+)", rename, named[name]) for name in order]
  return "\n".join([head, *(body.rstrip("} \n") for body in bodies)])


def _constant_bytes(text: str) -> int:
  """Counts the bytes of all constants that are not one repeated value."""
  total = 0
  for kind in re.findall(
    r'constant(?:\(\{[^}]*\}\))? dense<(?:"0x|\[)[^>]*> : tensor<([^>]*)>', text
  ):
    *shape, dtype = kind.split("x")
    bits = int(re.sub(r"\D", "", dtype) or 8)
    total += int(np.prod([int(n) for n in shape] or [1])) * max(bits, 8) // 8
  return total


def load(data: bytes, name: str) -> jax.export.Exported:
  """Deserializes an artifact.

  Raises:
    RefusedError: The data is too long or not an artifact.
  """
  if not 0 < len(data) <= MAX_ARTIFACT_BYTES:
    raise RefusedError(
      f"{name}: artifacts hold 1 to {MAX_ARTIFACT_BYTES} bytes, got {len(data)}."
    )
  try:
    return jax.export.deserialize(bytearray(data))
  except Exception as error:  # noqa: BLE001
    # Damaged bytes fail in flatbuffers, MLIR or JAX, each with its own errors.
    raise RefusedError(f"{name}: not an artifact: {type(error).__name__}.") from error


def _module_text(exported: jax.export.Exported, place: str) -> str:
  try:
    return str(exported.mlir_module())
  except RuntimeError as error:
    raise RefusedError(f"{place}: its module is damaged.") from error


def _check_avals(
  exported: jax.export.Exported, spec: Mapping[str, Any], place: str, lead: bool
) -> None:
  batched = spec["batched"] if lead else ()
  arguments = [
    avals(tree, ("n",) if name in batched else ()) for name, tree in spec["arguments"]
  ]
  wanted = [(tuple(a.shape), a.dtype) for a in jax.tree.leaves(arguments)]
  axis = ("n",) if lead else ()
  outputs = [((*axis, *shape), jnp.dtype(dtype)) for dtype, shape in spec["outputs"]]
  show = lambda items: [(tuple(map(str, s)), str(d)) for s, d in items]
  for what, got, expected in (
    ("arguments", exported.in_avals, wanted),
    ("results", exported.out_avals, outputs),
  ):
    shown = show([(a.shape, a.dtype) for a in got])
    if shown != show(expected):
      raise RefusedError(
        f"{place}: expected {what} {show(expected)}, got {shown}; return exactly the "
        "declared shapes and dtypes."
      )


def check(data: bytes, spec: Mapping[str, Any], *, batched: bool = False) -> str:
  """Applies every static rule to one artifact; returns its identity.

  The identity is the hash of the hook's name and canonical lowered program. `spec` is
  `Hook.to_dict()`.

  Raises:
    RefusedError: The artifact breaks a rule, which the message names.
  """
  place = f"{spec['name']}{' (batched)' if batched else ''}"
  exported = load(data, place)
  if tuple(exported.platforms) != ("cpu",):
    raise RefusedError(f"{place}: lowered for {exported.platforms}, not for cpu.")
  if exported.ordered_effects or exported.unordered_effects:
    raise RefusedError(f"{place}: has effects; hooks are pure functions.")
  _check_avals(exported, spec, place, batched)
  text = _module_text(exported, place)
  operations = re.findall(r"\b(?:stablehlo|chlo)\.(\w+)", text)
  if bad := FORBIDDEN_OPERATIONS & set(operations):
    raise RefusedError(f"{place}: operations {sorted(bad)} are not allowed.")
  if len(operations) > MAX_OPERATIONS:
    raise RefusedError(
      f"{place}: {len(operations)} operations, at most {MAX_OPERATIONS}; use "
      "lax.fori_loop or lax.scan instead of a Python loop."
    )
  if bad := set(re.findall(r"custom_call @([\w.]+)", text)) - CUSTOM_CALLS:
    raise RefusedError(f"{place}: custom calls {sorted(bad)} are not allowed.")
  if (constants := _constant_bytes(text)) > MAX_CONSTANT_BYTES:
    raise RefusedError(
      f"{place}: {constants} bytes of constants, at most {MAX_CONSTANT_BYTES}."
    )
  # The hash includes the name because lowering drops arguments that a hook does not
  # read.
  return _sha256(f"{spec['name']}\n{canonical_module(text)}")


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def gate(spec: Mapping[str, Any], unit: bytes, batched: bytes) -> str:
  """Checks both forms of a hook; returns the identity of their joint computation.

  Raises:
    RefusedError: A form is missing, or `check` refuses one.
  """
  computation = check(unit, spec)
  if bool(spec["batched"]) != bool(batched):
    raise RefusedError(f"{spec['name']}: one of its two forms is missing.")
  if batched:
    computation += check(batched, spec, batched=True)
  return _sha256(computation)


class ArtifactTable:
  """Executable hooks by identity, loaded on first use.

  `specs` holds `Hook.to_dict()` of every hook, by name.
  """

  def __init__(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Starts empty."""
    self.specs = specs
    self._data: dict[str, tuple[str, bytes, bytes]] = {}
    self._unit: dict[str, Callable[..., Any]] = {}
    self._batched: dict[str, Callable[..., Any]] = {}

  def add(self, computation: str, name: str, unit: bytes, batched: bytes) -> None:
    """Adds the serialized forms of a hook."""
    self._data.setdefault(computation, (name, unit, batched))

  def unit(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for one unit: arrays in declared order to a tuple of arrays."""
    if computation not in self._unit:
      name, data, _ = self._data[computation]
      self._unit[computation] = _Callable(computation, load(data, name))
    return self._unit[computation]

  def batched(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for a batch, after one check against the unit form.

    Raises:
      RefusedError: Rows are not independent.
    """
    if computation not in self._batched:
      name, _, data = self._data[computation]
      function = _Callable(computation, load(data, name))
      check_independence(
        jax.jit(self.unit(computation)), jax.jit(function), self.specs[name]
      )
      self._batched[computation] = function
    return self._batched[computation]


@dataclasses.dataclass(frozen=True)
class _Callable:
  """An artifact as a hashable function; equal identities compare equal."""

  computation: str
  exported: jax.export.Exported = dataclasses.field(compare=False, hash=False)

  def __call__(self, *arguments: Any) -> tuple[jax.Array, ...]:
    return tuple(self.exported.call(*arguments))
