"""The measured view of one linear's calibration input: the only data a hook sees.

Linears that read the same tensor (q, k, v; gate, up) share one view, so what one of
them has reduced (raw Hessian, moments) is cached for the others. All reductions run
one sequence at a time in the order of the calibration set, whatever the chunk size,
so results do not depend on it.
"""

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mxjax.devices import execution
from mxjax.devices import mesh as meshes
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.shaping import reference_chart

Step = Callable[..., Any]

HESSIAN_TILE = 192
"""Rows of a raw Hessian accumulated at once, from the diagonal on."""


@functools.partial(
  jax.jit,
  static_argnames=("step", "rules"),
  donate_argnames="carry",
  compiler_options=execution.FEW_TEMPORARIES,
)
def _reduce_chunk(
  step: Step,
  rules: mxfp4.Rules,
  carry: Any,
  blocks: jax.Array,
  first: jax.Array,
  args: tuple[Any, ...],
) -> Any:
  def body(carry: Any, item: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
    sequence, index = item
    return step(carry, sequence, index, rules, *args), None

  indices = first + jnp.arange(blocks.shape[0], dtype=jnp.int32)
  return jax.lax.scan(body, carry, (blocks, indices))[0]


@functools.partial(
  jax.jit,
  static_argnames=("step", "rules", "layout", "mesh"),
  donate_argnames="shares",
)
def _add_chunk(
  step: Step,
  rules: mxfp4.Rules,
  layout: meshes.Layout,
  mesh: Mesh,
  shares: list[jax.Array],
  blocks: jax.Array,
  first: jax.Array,
  args: tuple[Any, ...],
) -> list[jax.Array]:
  def run(
    _: None,
    shares: list[jax.Array],
    blocks: jax.Array,
    first: jax.Array,
    args: tuple[Any, ...],
  ) -> list[jax.Array]:
    index = first + jax.lax.axis_index(meshes.AXES)
    new = step(layout.zeros(), blocks[0], index, rules, *args)
    return meshes.add_in_order(shares, new)

  whole, split = P(), P(meshes.AXES)
  specs = split, split, whole, whole
  return meshes.call(run, mesh, None, shares, blocks, first, args, specs=specs)


def _hessian_step(
  carry: jax.Array, blocks: jax.Array, index: jax.Array, rules: mxfp4.Rules
) -> jax.Array:
  """Adds X'X of a sequence, the tiles on and above the diagonal only."""
  del index, rules
  flat = blocks.reshape(-1, blocks.shape[-1])
  for start in range(0, flat.shape[0], HESSIAN_TILE):
    tile = flat[start : start + HESSIAN_TILE], flat[start:]
    product = jnp.einsum("dn,en->de", *tile, precision=precision.HIGHEST)
    carry = carry.at[start : start + HESSIAN_TILE, start:].add(product)
  return carry


@jax.jit
def _mirrored(upper: jax.Array, places: jax.Array) -> jax.Array:
  """The symmetric matrix `[d, d]` that has this upper triangle.

  `places` are 0 to d - 1, int32: were they made in here, XLA:CPU would compile this
  for minutes, on 400 MB, where d is a power of two.
  """
  return jnp.where(places[:, None] <= places[None, :], upper, upper.T)


def _fold_moment_step(
  carry: jax.Array, blocks: jax.Array, index: jax.Array, rules: mxfp4.Rules
) -> jax.Array:
  del rules
  return carry.at[index % 2].add(reference_chart.block_moment(blocks))


@jax.jit
def _mean_of_folds(totals: jax.Array, tokens: jax.Array) -> jax.Array:
  """Sums `[2, blocks, 32, 32]` over their folds' tokens, float64 `[2]`."""
  return totals / jnp.maximum(tokens, 1.0)[:, None, None, None]


@jax.jit
def _mean_of_all(folds: jax.Array, tokens: jax.Array) -> jax.Array:
  """The mean over all tokens from the means of the folds."""
  return (folds[0] * tokens[0] + folds[1] * tokens[1]) / tokens.sum()


class LinearInputs:
  """Calibration inputs of one linear, feature-major.

  Attributes:
    name: The linear's name, such as `q_proj`; empty for a view that several share.
    rules: Codec rules of the contract.
    record: What hooks want the report to show about this linear.
    learned: What `Program.prepare` learned for this linear, or None.
    group: What `Program.shape_group` returned for the linears on this tensor.
    mesh: Where the activations lie, if on several devices; everything that a hook
      gets is on the lead all the same.
    sequences: Calibration sequences.
    blocks: Physical blocks of the input axis.
    length: Tokens of a sequence.
  """

  def __init__(
    self,
    chunks: Sequence[jax.Array] | Callable[[], Sequence[jax.Array]],
    rules: mxfp4.Rules = mxfp4.PAPER_RULES,
    *,
    extent: tuple[int, int, int] | None = None,
    cache: MutableMapping[str, jax.Array] | None = None,
    learned: Any = None,
    mesh: Mesh | None = None,
  ) -> None:
    """Wraps captured activations.

    Args:
      chunks: float32 arrays `[sequences, blocks, 32, tokens]` in calibration order,
        or a function that captures them when a hook first asks for more than the
        cache holds. On a mesh each has one sequence a device.
      rules: Codec rules of the contract.
      extent: `(sequences, blocks, tokens)` over all chunks; needed with a function.
      cache: Reductions shared with other linears that read the same tensor.
      learned: What `Program.prepare` learned for this linear.
      mesh: Where the chunks lie, if on several devices.
    """
    self._source = chunks
    self._cache = {} if cache is None else cache
    self.name = ""
    self.rules = rules
    self.mesh = mesh
    self.learned = learned
    self.group: Any = None
    self.record: dict[str, Any] = {}
    if extent is None:
      arrays = self._chunks
      count = sum(chunk.shape[0] for chunk in arrays)
      extent = count, arrays[0].shape[1], arrays[0].shape[-1]
    self.sequences, self.blocks, self.length = extent

  @property
  def _chunks(self) -> Sequence[jax.Array]:
    if callable(self._source):
      self._source = self._source()
    return self._source

  def for_linear(self, name: str = "", learned: Any = None) -> "LinearInputs":
    """The view of one linear on this tensor: same cache, own record.

    The record begins with what `Program.shape_group` wrote into this one.
    """
    extent = self.sequences, self.blocks, self.length
    view = LinearInputs(
      lambda: self._chunks,
      self.rules,
      extent=extent,
      cache=self._cache,
      learned=learned,
      mesh=self.mesh,
    )
    view.name, view.group, view.record = name, self.group, dict(self.record)
    return view

  @property
  def tokens(self) -> int:
    """Calibration tokens in all."""
    return self.sequences * self.length

  @property
  def fold_tokens(self) -> tuple[int, int]:
    """Tokens of the even and the odd sequences (reading A6)."""
    odd = self.sequences // 2
    return (self.sequences - odd) * self.length, odd * self.length

  def probe(self, tokens: int) -> jax.Array:
    """The first tokens of the first sequence, float32 `[blocks, 32, tokens]`."""
    return self.cached(f"probe_{tokens}", lambda: self.sequence(0)[..., :tokens])

  def sample(self, tokens: int) -> jax.Array:
    """Tokens evenly spaced over the calibration set, `[blocks, 32, <= tokens]`."""
    stride = max(1, -(-self.tokens // tokens))
    places = range(0, self.tokens, stride)
    return self.gather([divmod(place, self.length) for place in places])

  def sequence(self, index: int) -> jax.Array:
    """One calibration sequence, float32 `[blocks, 32, tokens]`."""
    for chunk in self._chunks:
      if index < chunk.shape[0]:
        return meshes.to_primary_device(chunk[index], self.mesh)
      index -= chunk.shape[0]
    raise IndexError(f"linear_inputs: no sequence {index} of {self.sequences}")

  def gather(self, places: Sequence[tuple[int, int]]) -> jax.Array:
    """The tokens at (sequence, position), float32 `[blocks, 32, len(places)]`."""
    parts, first = [], 0
    wanted = np.asarray(places, np.int32).reshape(-1, 2)
    order = []
    for chunk in self._chunks:
      inside = (wanted[:, 0] >= first) & (wanted[:, 0] < first + chunk.shape[0])
      order.append(np.flatnonzero(inside))
      rows, positions = wanted[inside, 0] - first, wanted[inside, 1]
      found = meshes.to_primary_device(chunk[rows, :, :, positions], self.mesh)
      parts.append(jnp.moveaxis(found, 0, -1))
      first += chunk.shape[0]
    back = np.argsort(np.concatenate(order))
    return jnp.concatenate(parts, axis=-1)[..., back]

  def reduce(self, step: Step, init: Any, *args: Any) -> Any:
    """Folds `step` over sequences in calibration order.

    Args:
      step: A module-level function `(carry, blocks [blocks, 32, T], index, rules,
        *args)` to the next carry; it is jitted once for each shape. What it adds to
        the carry must not depend on it: on a mesh it is applied to zeros, and what it
        returns is added.
      init: The first carry; its buffers are donated.
      *args: Arrays passed to every step.

    Returns:
      The last carry.
    """
    carry, args = execution.block_on_cpu((init, args))
    if self.mesh is not None:
      return self._reduce_on_mesh(self.mesh, step, carry, args)
    first = 0
    for chunk in self._chunks:
      carry = execution.block_on_cpu(
        _reduce_chunk(step, self.rules, carry, chunk, np.int32(first), args)
      )
      first += chunk.shape[0]
    return carry

  def _reduce_on_mesh(
    self, mesh: Mesh, step: Step, carry: Any, args: tuple[Any, ...]
  ) -> Any:
    args = meshes.replicate(args, mesh)
    (shares, layout), first = meshes.share(carry, mesh), 0
    for chunk in self._chunks:
      index = np.int32(first)
      shares = execution.block_on_cpu(
        _add_chunk(step, self.rules, layout, mesh, shares, chunk, index, args)
      )
      first += chunk.shape[0]
    return meshes.collect(shares, layout, mesh)

  def cached(self, name: str, compute: Callable[[], jax.Array]) -> jax.Array:
    """A reduction under a name, computed once for all linears on this tensor."""
    if name not in self._cache:
      self._cache[name] = compute()
    return self._cache[name]

  def hessian(self) -> jax.Array:
    """The raw Hessian X'X / n, float32 `[d, d]`, computed once for all siblings."""
    width = self.blocks * mxfp4.BLOCK_SIZE

    def compute() -> jax.Array:
      total = self.reduce(_hessian_step, jnp.zeros((width, width), jnp.float32))
      places = jnp.arange(width, dtype=jnp.int32)
      return _mirrored(total, places) / self.tokens

    return self.cached("hessian", compute)

  def fold_moments(self) -> jax.Array:
    """X'X / n of every block by fold, float64 `[2, blocks, 32, 32]`."""

    def compute() -> jax.Array:
      shape = (2, self.blocks, mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE)
      return self.reduce(_fold_moment_step, jnp.zeros(shape, jnp.float64))

    totals = self.cached("fold_moments", compute)
    return _mean_of_folds(totals, jnp.asarray(self.fold_tokens, jnp.float64))

  def moment(self) -> jax.Array:
    """X'X / n of every block over all tokens, float64 `[blocks, 32, 32]`."""
    tokens = jnp.asarray(self.fold_tokens, jnp.float64)
    return _mean_of_all(self.fold_moments(), tokens)
