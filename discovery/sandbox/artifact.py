"""The gate: static checks of a serialized artifact before it runs, and its identity.

Artifacts are deserialized only here, and in jailed runs only in a worker that is
discarded at the first fault.
"""

import dataclasses
import hashlib
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.export
import jax.extend.core

from mxjax.discovery.core import candidate_source as limits
from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox import frames
from mxjax.discovery.sandbox.rebuilding.program import Rebuilder
from mxjax.discovery.sandbox.tracing import PLATFORMS, avals, tracing_scope

MAX_ARTIFACT_BYTES = 512 * 1024
MAX_OPERATIONS = limits.OPERATIONS
MAX_CONSTANT_BYTES = limits.CONSTANT_BYTES
MAX_VALUE_BYTES = limits.VALUE_BYTES
TIMES_DECLARED = limits.TIMES_DECLARED
MAX_FLOPS = limits.FLOPS
Sizes = Mapping[str, int]
"""Sizes of one kind of unit, by the names in the shapes of a hook."""


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


def _check_avals(place: str, what: str, got: list[Any], wanted: list[Any]) -> None:
  show = lambda items: [(list(a.shape), str(a.dtype)) for a in items]
  if show(got) != show(wanted):
    raise RefusedError(
      f"{place}: expected {what} {show(wanted)}, got {show(got)}; return exactly the "
      "declared shapes and dtypes."
    )


def _leaves(
  spec: Mapping[str, Any], sizes: Sizes, rows: int = 0
) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays that a hook takes, in order; `rows` gives its batched form."""
  lead = lambda name: (rows,) if rows and name in spec["batched"] else ()
  trees = [avals(tree, dict(sizes), lead(name)) for name, tree in spec["arguments"]]
  return jax.tree.leaves(trees)


def by_size(data: bytes, spec: Mapping[str, Any]) -> list[tuple[Sizes, bytes]]:
  """Returns the artifacts of a hook, packed, with the sizes of the unit of each.

  Raises:
    RefusedError: There is not one for each of the sizes of `spec`.
  """
  try:
    parts, wrong = frames.unpack(data), ""
  except ValueError as error:
    parts, wrong = [], f": {error}"
  if wrong or len(parts) != len(spec["sizes"]):
    raise RefusedError(
      f"{spec['name']}: expected an artifact for each of {spec['sizes']}, got "
      f"{len(parts)}{wrong}."
    )
  return list(zip(spec["sizes"], parts, strict=True))


def _values(jaxpr: Any) -> Iterator[int]:
  """Returns the bytes of every value that a program computes, loops' parts once."""
  for equation in jaxpr.eqns:
    for value in equation.outvars:
      yield math.prod(value.aval.shape) * value.aval.dtype.itemsize
    for part in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _values(part)


def _check_work(closed: Any, lowered: Any) -> None:
  """Refuses a program that needs more memory or arithmetic than one unit may."""
  size = lambda avals: sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)
  declared = size(closed.in_avals) + size(closed.out_avals)
  most = max(MAX_VALUE_BYTES, TIMES_DECLARED * declared)
  if (held := sum(_values(closed.jaxpr))) > most:
    raise RefusedError(
      f"its values have {held} bytes, at most {most}; use smaller arrays, or a loop "
      "over parts of the unit."
    )
  if (flops := int(lowered.cost_analysis().get("flops", 0))) > MAX_FLOPS:
    raise RefusedError(
      f"{flops} floating-point operations, at most {MAX_FLOPS}; compute less for a "
      "unit."
    )


def rebuilt(
  data: bytes, spec: Mapping[str, Any], sizes: Sizes = types.MappingProxyType({})
) -> Callable[..., list[jax.Array]]:
  """Rebuilds a hook of one unit from its artifact, after every static check.

  Returns a function of the arrays of `spec`, which is `Hook.to_dict()`, in flat order.
  It holds nothing of the artifact but the operations that were understood.

  Raises:
    RefusedError: The artifact breaks a rule, which the message names.
  """
  place, wanted = spec["name"], _leaves(spec, sizes)
  exported = load(data, place)
  # The envelope first, then the module, whose operations are rebuilt under a trace; the
  # results last.
  if tuple(exported.platforms) != ("cpu",):
    raise RefusedError(f"{place}: lowered for {exported.platforms}, not for cpu.")
  if exported.ordered_effects or exported.unordered_effects:
    raise RefusedError(f"{place}: has effects; hooks are pure functions.")
  try:
    with tracing_scope():
      module = Rebuilder(exported.mlir_module_serialized)
      if module.operations > MAX_OPERATIONS:
        raise RefusedError(
          f"{module.operations} operations, at most {MAX_OPERATIONS}; use "
          "lax.fori_loop or lax.scan instead of a Python loop."
        )
      if module.constant_bytes > MAX_CONSTANT_BYTES:
        raise RefusedError(
          f"{module.constant_bytes} bytes of constants, at most {MAX_CONSTANT_BYTES}."
        )
      read = exported.module_kept_var_idx
      # An export drops arguments that the program does not read, and says which it
      # kept.
      _check_avals("module", "arguments", module.arguments, [wanted[i] for i in read])
      closed = jax.make_jaxpr(lambda *x: module.main(*(x[i] for i in read)))(*wanted)
  except RefusedError as error:
    raise RefusedError(f"{place}: {error}") from error
  except Exception as error:  # noqa: BLE001
    # Hostile modules fail in MLIR or JAX, each with its own errors.
    detail = f"{type(error).__name__}: {error}"[:300]
    raise RefusedError(f"{place}: its module is damaged: {detail}") from error
  outputs = [avals(entry, dict(sizes)) for entry in spec["outputs"]]
  _check_avals(place, "results", closed.out_avals, outputs)
  return jax.extend.core.jaxpr_as_fun(closed)


def _over_rows(
  function: Callable[..., Any], spec: Mapping[str, Any]
) -> Callable[..., Any]:
  """Returns the batched form: the program for one unit, for every row by itself."""
  is_row = [
    0 if name in spec["batched"] else None
    for name, tree in spec["arguments"]
    for _ in (tree if isinstance(tree, dict) else [tree])
  ]
  return jax.vmap(function, in_axes=tuple(is_row))


WITHOUT_RULE = (
  "JAX has no rule for one of its operations. It has none for a sum, or another "
  "reduction, inside a loop in a branch that is chosen by a value of the unit; compute "
  "both branches and choose by jnp.where."
)
"""What is told of a refusal that JAX does not explain."""


def gate(spec: Mapping[str, Any], data: bytes) -> str:
  """Checks the artifacts of a hook; returns the identity of its computation.

  The identity is the hash of the hook's name and of the rebuilt programs as JAX lowers
  them, which hold no name from the source and no dead code.

  Raises:
    RefusedError: `rebuilt` refuses one, it needs too much, or JAX cannot batch it.
  """
  texts = [_gated(part, spec, sizes) for sizes, part in by_size(data, spec)]
  return hashlib.sha256("\n".join([spec["name"], *texts]).encode()).hexdigest()


def _gated(data: bytes, spec: Mapping[str, Any], sizes: Sizes) -> str:
  """Returns the text of the program of one size, after every check."""
  function = rebuilt(data, spec, sizes)
  with tracing_scope():
    if spec["batched"]:
      try:
        # Any number of rows would do: this only tells whether JAX has a rule for each
        # operation.
        jax.eval_shape(_over_rows(function, spec), *_leaves(spec, sizes, 2))
      except NotImplementedError as error:
        # JAX's own error often has no text.
        reason = str(error) or WITHOUT_RULE
        raise RefusedError(f"{spec['name']}: cannot be batched: {reason}") from error
    leaves = _leaves(spec, sizes)
    # With arguments that it does not read, so that the identity has the whole
    # signature.
    lowered = jax.jit(function, keep_unused=True).lower(*leaves)
    try:
      _check_work(jax.make_jaxpr(function)(*leaves), lowered)
    except RefusedError as error:
      raise RefusedError(f"{spec['name']}: {error}") from error
  return lowered.as_text()


class ArtifactTable:
  """Executable hooks by identity, rebuilt on first use.

  `specs` holds `Hook.to_dict()` of every hook, by name.
  """

  def __init__(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Starts empty."""
    self.specs = specs
    self._data: dict[str, tuple[str, bytes]] = {}
    self._rebuilt: dict[str, list[Callable[..., Any]]] = {}
    self._exported: dict[tuple[str, int, int], jax.export.Exported] = {}

  def add(self, computation: str, name: str, data: bytes) -> None:
    """Adds the artifacts of a hook, packed."""
    self._data.setdefault(computation, (name, data))

  def unit(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for one unit: arrays in declared order to a tuple of arrays."""
    return self._callable(computation, batched=False)

  def batched(self, computation: str) -> Callable[..., Any]:
    """Returns the hook for a batch, built from the program for one unit."""
    return self._callable(computation, batched=True)

  def _callable(self, computation: str, *, batched: bool) -> "_Callable":
    name, data = self._data[computation]
    spec = self.specs[name]
    if computation not in self._rebuilt:
      self._rebuilt[computation] = [
        rebuilt(part, spec, sizes) for sizes, part in by_size(data, spec)
      ]
    functions = self._rebuilt[computation]
    return _Callable(computation, batched, functions, spec, self._exported)


@dataclasses.dataclass(frozen=True)
class _Callable:
  """A hook as a hashable function; equal identities compare equal."""

  computation: str
  batched: bool
  # Not compared: as a static argument of `jax.jit` a hook is its computation, which is
  # then compiled once.
  functions: list[Callable[..., Any]] = dataclasses.field(compare=False)
  spec: Mapping[str, Any] = dataclasses.field(compare=False)
  exported: dict[tuple[str, int, int], jax.export.Exported] = dataclasses.field(
    compare=False
  )

  @property
  def hook(self) -> str:
    """Name of the hook."""
    return self.spec["name"]

  def __call__(self, *arguments: Any) -> tuple[jax.Array, ...]:
    names = [name for name, _ in self.spec["arguments"]]
    rows = (
      next(
        jax.tree.leaves(argument)[0].shape[0]
        for name, argument in zip(names, arguments, strict=True)
        if name in self.spec["batched"]
      )
      if self.batched
      else 0
    )
    leaves = jax.tree.leaves(arguments)
    index = self._size(leaves, rows)
    key = self.computation, index, rows
    if key not in self.exported:
      function = self.functions[index]
      function = _over_rows(function, self.spec) if rows else function
      # Exported, because 64-bit types must hold whatever the caller's setting is.
      with tracing_scope():
        export = jax.export.export(jax.jit(function), platforms=PLATFORMS)
        self.exported[key] = export(
          *_leaves(self.spec, self.spec["sizes"][index], rows)
        )
    return tuple(self.exported[key].call(*leaves))

  def _size(self, leaves: list[Any], rows: int) -> int:
    """Returns the place of the sizes that arrays have, among those of the hook."""
    got = [tuple(leaf.shape) for leaf in leaves]
    for index, sizes in enumerate(self.spec["sizes"]):
      if got == [leaf.shape for leaf in _leaves(self.spec, sizes, rows)]:
        return index
    raise ValueError(
      f"{self.spec['name']}: expected arrays of one of {self.spec['sizes']}, got "
      f"{got}; the task's interface must have the sizes of all units of its data."
    )
