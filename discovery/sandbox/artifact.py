"""The gate: static checks of a serialized artifact before it runs, and its identity.

Artifacts are deserialized only here, and in jailed runs only in a worker that is
discarded at the first fault.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.extend.core
import jax.numpy as jnp

from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox.rebuilding.program import Rebuilder
from mxjax.discovery.sandbox.tracing import PLATFORMS, avals, tracing_scope

MAX_ARTIFACT_BYTES = 512 * 1024
MAX_OPERATIONS = 4_000
MAX_CONSTANT_BYTES = 40 * 1024
"""Five 32 x 32 matrices in float64: enough for structure, too little for weights."""


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


def _leaves(spec: Mapping[str, Any], rows: int = 0) -> list[jax.ShapeDtypeStruct]:
  """Returns the arrays that a hook takes, in order; `rows` gives its batched form."""
  lead = lambda name: (rows,) if rows and name in spec["batched"] else ()
  return jax.tree.leaves([avals(tree, lead(name)) for name, tree in spec["arguments"]])


def rebuilt(data: bytes, spec: Mapping[str, Any]) -> Callable[..., list[jax.Array]]:
  """Rebuilds a hook of one unit from its artifact, after every static check.

  Returns a function of the arrays of `spec`, which is `Hook.to_dict()`, in flat order.
  It holds nothing of the artifact but the operations that were understood.

  Raises:
    RefusedError: The artifact breaks a rule, which the message names.
  """
  place, wanted = spec["name"], _leaves(spec)
  exported = load(data, place)
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
      _check_avals("module", "arguments", module.arguments, [wanted[i] for i in read])
      closed = jax.make_jaxpr(lambda *x: module.main(*(x[i] for i in read)))(*wanted)
  except RefusedError as error:
    raise RefusedError(f"{place}: {error}") from error
  except Exception as error:  # noqa: BLE001
    # Hostile modules fail in MLIR or JAX, each with its own errors.
    detail = f"{type(error).__name__}: {error}"[:300]
    raise RefusedError(f"{place}: its module is damaged: {detail}") from error
  outputs = [
    jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for dtype, shape in spec["outputs"]
  ]
  _check_avals(place, "results", closed.out_avals, outputs)
  return jax.extend.core.jaxpr_as_fun(closed)


def _over_rows(
  function: Callable[..., Any], spec: Mapping[str, Any]
) -> Callable[..., Any]:
  """Returns the batched form: the program for one unit, for every row by itself."""
  is_row = [
    0 if name in spec["batched"] else None
    for name, tree in spec["arguments"]
    for _ in jax.tree.leaves(avals(tree))
  ]
  return jax.vmap(function, in_axes=tuple(is_row))


def gate(spec: Mapping[str, Any], data: bytes) -> str:
  """Checks the artifact of a hook; returns the identity of its computation.

  The identity is the hash of the hook's name and of the rebuilt program as JAX lowers
  it, which holds no name from the source and no dead code.

  Raises:
    RefusedError: `rebuilt` refuses it, or JAX cannot batch it.
  """
  function = rebuilt(data, spec)
  with tracing_scope():
    if spec["batched"]:
      try:
        jax.eval_shape(_over_rows(function, spec), *_leaves(spec, 2))
      except NotImplementedError as error:
        raise RefusedError(f"{spec['name']}: cannot be batched: {error}") from error
    lowered = jax.jit(function, keep_unused=True).lower(*_leaves(spec)).as_text()
  return hashlib.sha256(f"{spec['name']}\n{lowered}".encode()).hexdigest()


class ArtifactTable:
  """Executable hooks by identity, rebuilt on first use.

  `specs` holds `Hook.to_dict()` of every hook, by name.
  """

  def __init__(self, specs: Mapping[str, Mapping[str, Any]]) -> None:
    """Starts empty."""
    self.specs = specs
    self._data: dict[str, tuple[str, bytes]] = {}
    self._rebuilt: dict[str, Callable[..., Any]] = {}
    self._exported: dict[tuple[str, int], jax.export.Exported] = {}

  def add(self, computation: str, name: str, data: bytes) -> None:
    """Adds the artifact of a hook."""
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
      self._rebuilt[computation] = rebuilt(data, spec)
    function = self._rebuilt[computation]
    return _Callable(computation, batched, function, spec, self._exported)


@dataclasses.dataclass(frozen=True)
class _Callable:
  """A hook as a hashable function; equal identities compare equal."""

  computation: str
  batched: bool
  function: Callable[..., Any] = dataclasses.field(compare=False)
  spec: Mapping[str, Any] = dataclasses.field(compare=False)
  exported: dict[tuple[str, int], jax.export.Exported] = dataclasses.field(
    compare=False
  )

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
    key = self.computation, rows
    if key not in self.exported:
      function = _over_rows(self.function, self.spec) if rows else self.function
      # Exported, because 64-bit types must hold whatever the caller's setting is.
      with tracing_scope():
        export = jax.export.export(jax.jit(function), platforms=PLATFORMS)
        self.exported[key] = export(*_leaves(self.spec, rows))
    return tuple(self.exported[key].call(*jax.tree.leaves(arguments)))
