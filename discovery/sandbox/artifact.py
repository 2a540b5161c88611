"""The gate: what a serialized artifact must be before it may run, and its identity.

Deserialization happens only here, and under a jail only in a worker that is thrown
away at the first fault.
"""

import dataclasses
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from mxjax.discovery.sandbox.tracing import avals, tracing_scope

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
CHECK_ROWS = 48
"""Rows of the check that the batched form treats each row by itself."""
UNIT_TOLERANCE = 0.1
"""Share of a row's values that rounding may decide otherwise in the two forms."""
ROW_TOLERANCE = 1 / 3
"""Share of rows in which more may differ: one turned code can turn those after it."""
UNIT_ROWS = range(0, CHECK_ROWS, 3)
"""Rows on which the two forms are compared."""
UNIT_DRAWS = 5
"""Draws on which they are compared; the majority decides."""


class RefusedError(ValueError):
  """An artifact that may not run."""


@dataclasses.dataclass(frozen=True)
class Gated:
  """A hook that passed.

  Attributes:
    name: The hook.
    computation: Hash of its canonical lowered program.
    operations: StableHLO operations.
    constant_bytes: Bytes of constants that are not one repeated value.
  """

  name: str
  computation: str
  operations: int
  constant_bytes: int


def canonical_module(text: str) -> str:
  """StableHLO text without names that the source chose.

  Comments, renamed variables and dead code are gone from it already; what is left to
  remove is the module's name, names of private functions, and argument labels.
  """
  text = re.sub(r"module @[\w.]+", "module", text)
  text = re.sub(r"(?m)^#loc.*$", "", text)
  text = re.sub(r"\s*loc\([^)]*\)", "", text).strip()
  text = re.sub(r'(,\s*)?jax\.(arg|result)_info = "[^"]*"', "", text)
  head, *parts = re.split(r"(?m)^(?=  func\.func )", text)
  named = {}
  for part in parts:
    match = re.search(r"@([\w.]+)", part)
    if match:
      named[match.group(1)] = part
  # Functions are printed in order of name: visit them in order of first use instead.
  order = ["main"] if "main" in named else list(named)[:1]
  for name in order:
    used = re.findall(r"@([\w.]+)", named[name])
    order += [u for u in dict.fromkeys(used) if u in named and u not in order]
  numbers = {name: f"@f{index}" for index, name in enumerate(order)}

  def rename(match: re.Match[str]) -> str:
    return numbers.get(match.group(1), match.group(0))

  bodies = [re.sub(r"@([\w.]+)", rename, named[name]) for name in order]
  return "\n".join([head, *(body.rstrip("} \n") for body in bodies)])


def _constant_bytes(text: str) -> int:
  """Bytes of all constants that are not one value repeated."""
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
    RefusedError: Too long, or not an artifact.
  """
  if not 0 < len(data) <= MAX_ARTIFACT_BYTES:
    raise RefusedError(
      f"{name}: artifacts hold 1 to {MAX_ARTIFACT_BYTES} bytes, got {len(data)}."
    )
  try:
    return jax.export.deserialize(bytearray(data))
  except Exception as error:  # noqa: BLE001
    # Damaged bytes fail in flatbuffers, MLIR or JAX, each with errors of its own.
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
    found = show([(a.shape, a.dtype) for a in got])
    if found != show(expected):
      raise RefusedError(
        f"{place}: expected {what} {show(expected)}, got {found}; return exactly the "
        "declared shapes and dtypes."
      )


def check(data: bytes, spec: Mapping[str, Any], *, batched: bool = False) -> Gated:
  """Applies every static rule to one artifact.

  Args:
    data: Serialized artifact.
    spec: `Hook.to_dict()`.
    batched: Whether it is the batched form.

  Returns:
    Identity and size.

  Raises:
    RefusedError: Naming the rule.
  """
  place = f"{spec['name']}{' (batched)' if batched else ''}"
  exported = load(data, place)
  if tuple(exported.platforms) != ("cpu",):
    raise RefusedError(f"{place}: lowered for {exported.platforms}, not for cpu.")
  if exported.ordered_effects or exported.unordered_effects:
    raise RefusedError(f"{place}: has effects; hooks are pure functions.")
  _check_avals(exported, spec, place, batched)
  text = _module_text(exported, place)
  names = re.findall(r"\bstablehlo\.(\w+)|\bchlo\.(\w+)", text)
  operations = [a or b for a, b in names]
  if bad := FORBIDDEN_OPERATIONS & set(operations):
    raise RefusedError(f"{place}: operations {sorted(bad)} are not allowed.")
  if len(operations) > MAX_OPERATIONS:
    raise RefusedError(
      f"{place}: {len(operations)} operations, at most {MAX_OPERATIONS}; use "
      "lax.fori_loop or lax.scan instead of a Python loop."
    )
  calls = set(re.findall(r"custom_call @([\w.]+)", text))
  if bad := calls - CUSTOM_CALLS:
    raise RefusedError(f"{place}: custom calls {sorted(bad)} are not allowed.")
  constants = _constant_bytes(text)
  if constants > MAX_CONSTANT_BYTES:
    raise RefusedError(
      f"{place}: {constants} bytes of constants, at most {MAX_CONSTANT_BYTES}."
    )
  # The name is part of it: lowering drops arguments that a hook does not read.
  named = f"{spec['name']}\n{canonical_module(text)}"
  digest = hashlib.sha256(named.encode()).hexdigest()
  return Gated(spec["name"], digest, len(operations), constants)


def gate(spec: Mapping[str, Any], unit: bytes, batched: bytes) -> str:
  """Checks both forms of a hook; returns the identity of what they compute together.

  Raises:
    RefusedError: See `check`; or a form is missing.
  """
  identities = [check(unit, spec).computation]
  if bool(spec["batched"]) != bool(batched):
    raise RefusedError(f"{spec['name']}: one of its two forms is missing.")
  if batched:
    identities.append(check(batched, spec, batched=True).computation)
  return hashlib.sha256("".join(identities).encode()).hexdigest()


def check_independence(
  unit: Callable[..., Any], batched: Callable[..., Any], spec: Mapping[str, Any]
) -> None:
  """The batched form must treat every row by itself, as the unit does.

  Both are tried on data drawn when the check runs.

  Raises:
    RefusedError: A row's result depends on other rows, or the forms are two functions.
  """
  generator = np.random.default_rng(np.random.SeedSequence().entropy)
  draw = functools.partial(_draw, spec, generator)
  _check_rows(batched, spec, draw(), draw())
  # Where a drawn matrix is nearly singular rounding may decide most rows: only what
  # differs in most draws is another function.
  differing = sum(_forms_differ(unit, batched, spec, draw()) for _ in range(UNIT_DRAWS))
  if 2 * differing > UNIT_DRAWS:
    raise RefusedError(f"{spec['name']}: the batched form is not the unit's.")


def _draw(spec: Mapping[str, Any], generator: np.random.Generator) -> list[Any]:
  """Arguments of the batched form, each at a scale of its own."""

  def sample(entry: list[Any], rows: tuple[int, ...]) -> np.ndarray:
    dtype, shape = entry
    values = generator.standard_normal((*rows, *shape)) * 2.0 ** generator.integers(
      -6, 6
    )
    return values.astype(dtype)

  def one(name: str, tree: Any) -> Any:
    rows = (CHECK_ROWS,) if name in spec["batched"] else ()
    if isinstance(tree, dict):
      return {key: sample(entry, rows) for key, entry in tree.items()}
    return sample(tree, rows)

  return [one(name, tree) for name, tree in spec["arguments"]]


def _call(function: Callable[..., Any], arguments: list[Any]) -> list[np.ndarray]:
  with tracing_scope():
    return [np.asarray(a) for a in function(*arguments)]


def _by_argument(
  spec: Mapping[str, Any], pick: Callable[..., Any], *draws: list[Any]
) -> list[Any]:
  """`pick` of every array that has rows; the others as the first draw has them."""
  return [
    jax.tree.map(pick, *trees) if name in spec["batched"] else trees[0]
    for (name, _), *trees in zip(spec["arguments"], *draws, strict=True)
  ]


def _chosen(kept: np.ndarray, mine: np.ndarray, other: np.ndarray) -> np.ndarray:
  """Rows of `mine` where `kept`, of `other` elsewhere."""
  return np.where(kept.reshape(-1, *[1] * (mine.ndim - 1)), mine, other)


def _check_rows(
  batched: Callable[..., Any],
  spec: Mapping[str, Any],
  arguments: list[Any],
  others: list[Any],
) -> None:
  """Keeps rows while their neighbours are replaced; raises where they notice."""
  whole = _call(batched, arguments)
  third = np.arange(CHECK_ROWS) % 3 == 0
  # Both ways round, so that every row is once a neighbour that was replaced.
  for kept in (third, ~third):
    choose = functools.partial(_chosen, kept)
    again = _call(batched, _by_argument(spec, choose, arguments, others))
    for rows, turned in zip(whole, again, strict=True):
      # Equal shapes run equal code, so what does not depend on neighbours is equal
      # to the bit.
      is_float = rows.dtype.kind == "f"
      if not np.array_equal(rows[kept], turned[kept], equal_nan=is_float):
        raise RefusedError(
          f"{spec['name']}: a row's result depends on its neighbours in the batch."
        )


def _forms_differ(
  unit: Callable[..., Any],
  batched: Callable[..., Any],
  spec: Mapping[str, Any],
  arguments: list[Any],
) -> bool:
  """Whether the two forms give other values on more than rounding's share of rows.

  The unit runs other code and may differ in the last place. That can turn a code and,
  where errors are carried on, the rest of its row.
  """
  whole = _call(batched, arguments)
  single = [
    _call(unit, _by_argument(spec, operator.itemgetter(index), arguments))
    for index in UNIT_ROWS
  ]
  for rows, units in zip(whole, zip(*single, strict=True), strict=True):
    pairs = zip(rows[UNIT_ROWS].astype(float), np.asarray(units, float), strict=True)
    shares = [(~np.isclose(a, b, 1e-3, 1e-3)).mean() for a, b in pairs]
    if np.mean([share > UNIT_TOLERANCE for share in shares]) > ROW_TOLERANCE:
      return True
  return False


class ArtifactTable:
  """Executable hooks by identity, loaded on first use.

  Attributes:
    specs: `Hook.to_dict()` of every hook by name.
  """

  def __init__(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Starts empty."""
    self.specs = specs
    self._data: dict[str, tuple[str, bytes, bytes]] = {}
    self._unit: dict[str, Callable[..., Any]] = {}
    self._batched: dict[str, Callable[..., Any]] = {}

  def __contains__(self, computation: str) -> bool:
    """Whether the artifact was added."""
    return computation in self._data

  def add(self, computation: str, name: str, unit: bytes, batched: bytes) -> None:
    """Adds the serialized forms of a hook."""
    self._data.setdefault(computation, (name, unit, batched))

  def unit(self, computation: str) -> Callable[..., Any]:
    """The hook on one unit: arrays in declared order to a tuple of arrays."""
    if computation not in self._unit:
      name, data, _ = self._data[computation]
      self._unit[computation] = _Callable(computation, load(data, name))
    return self._unit[computation]

  def batched(self, computation: str) -> Callable[..., Any]:
    """The hook on a batch; checked once against the unit.

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
  """An artifact as a hashable function: equal identity, equal function."""

  computation: str
  exported: jax.export.Exported = dataclasses.field(compare=False, hash=False)

  def __call__(self, *arguments: Any) -> tuple[jax.Array, ...]:
    return tuple(self.exported.call(*arguments))
