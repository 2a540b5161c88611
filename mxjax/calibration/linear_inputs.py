"""Calibration inputs of one linear: the only data a hook sees.

Linears that read the same tensor (q, k, v; gate, up) share reductions such as the raw
Hessian. Reductions add one sequence at a time in calibration order, so results do not
depend on the chunk size.
"""

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.devices import execution
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.devices.totals import Totals
from mxjax.numerics import implementations, mxfp4, precision
from mxjax.numerics.elementwise import add_to_slice
from mxjax.numerics.shaping import reference_chart

Step = Callable[..., Any]

HESSIAN_TILE = 192
"""Rows of a raw Hessian accumulated at once, starting at the diagonal."""


def _add_sequence(
  carry: Any,
  sequence: tuple[None, jax.Array],
  index: jax.Array,
  static: tuple[Step, mxfp4.Rules, Any],
  params: None,
  *args: Any,
) -> tuple[Any, None]:
  step, rules, dtype = static
  # One sequence at a time: all of a chunk in float32 would take twice the memory of
  # bfloat16.
  blocks = sequence[1] if dtype is None else sequence[1].astype(dtype)
  return step(carry, blocks, index, rules, *args), None


def _hessian_step(
  carry: jax.Array,
  blocks: jax.Array,
  index: jax.Array,
  rules: mxfp4.Rules,
  weights: jax.Array | None = None,
) -> jax.Array:
  """Adds X'X of a sequence, only the tiles on and above the diagonal.

  Blocks in bfloat16 are multiplied as they are, which is exact, with float32 sums: on
  tensor cores, where one product of all tiles is faster than half of them.
  """
  del rules
  blocks = _weighted(blocks, index, weights)
  # `[blocks, 32, T]` to `[d, T]`: features stay in their order.
  flat = blocks.reshape(-1, blocks.shape[-1])
  if flat.dtype == jnp.bfloat16:
    sums = {"preferred_element_type": jnp.float32}
    return carry + jnp.einsum("dn,en->de", flat, flat, **sums)
  for start in range(0, flat.shape[0], HESSIAN_TILE):
    tile = flat[start : start + HESSIAN_TILE], flat[start:]
    product = jnp.einsum("dn,en->de", *tile, precision=precision.HIGHEST)
    place = slice(start, start + HESSIAN_TILE), slice(start, None)
    carry = add_to_slice(carry, place, product)
  return carry


def _weighted(
  blocks: jax.Array, index: jax.Array, weights: jax.Array | None
) -> jax.Array:
  """Multiplies a sequence's tokens by the roots of their weights, if any."""
  if weights is None:
    return blocks
  # The root, because a moment multiplies a token by itself.
  return blocks * jnp.sqrt(weights[index])[None, None]


def mirrored(upper: jax.Array, places: jax.Array) -> jax.Array:
  """Mirrors the upper triangle of a matrix `[d, d]`.

  `places` are 0 to d - 1, int32. Created in here, they would make XLA:CPU compile this
  for minutes, on 400 MB, where d is a power of two.
  """
  return jnp.where(places[:, None] <= places[None, :], upper, upper.T)


@compilation.jit()
def _mirrored_mean(upper: jax.Array, places: jax.Array, tokens: jax.Array) -> jax.Array:
  """Mirrors the upper triangle of a sum into a symmetric mean over tokens `[d, d]`."""
  return mirrored(upper, places) / tokens


@compilation.jit()
def _float32_row(chunk: jax.Array, index: jax.Array) -> jax.Array:
  return chunk[index].astype(jnp.float32)


def _fold_moment_step(
  carry: jax.Array,
  blocks: jax.Array,
  index: jax.Array,
  rules: mxfp4.Rules,
  weights: jax.Array | None = None,
) -> jax.Array:
  del rules
  blocks = _weighted(blocks, index, weights)
  # Reading A6 of the paper's "calibration-sequence parity": folds are the even and the
  # odd sequences.
  return carry.at[index % 2].add(reference_chart.block_moment(blocks))


@compilation.jit()
def _means(totals: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Divides sums of two folds by their tokens: the mean by fold, and of all."""
  # A single sequence leaves the odd fold empty: zeros then, and not NaN.
  folds = totals / jnp.maximum(tokens, 1.0)[:, None, None, None]
  return folds, (folds[0] * tokens[0] + folds[1] * tokens[1]) / tokens.sum()


class LinearInputs:
  """Calibration inputs of one linear, feature-major.

  Attributes:
    name: The linear's name, such as `q_proj`; empty for a view that several share.
    learned: What `Program.prepare` learned for this linear, or None.
    group: What `Program.shape_group` returned for the linears on this tensor.
    gradients: bfloat16 chunks `[sequences, n, out_features]` of gradients at this
      linear's output for the first n tokens of each sequence, if `Program.weighting` is
      `fisher`; else empty.
    token_weights: Weights of tokens in `hessian` and `moment`, float32 `[sequences, T]`
      of mean 1; None for equal ones.
    placement: Where the activations lie; hooks get arrays on the primary device.
    sequences, blocks, length: Calibration sequences, blocks of 32 inputs, and tokens of
      a sequence.
  """

  def __init__(
    self,
    chunks: Sequence[jax.Array] | Callable[[], Sequence[jax.Array]],
    rules: mxfp4.Rules = mxfp4.PAPER_RULES,
    *,
    extent: tuple[int, int, int] | None = None,
    cache: dict[str, jax.Array] | None = None,
    placement: Placement = ONE_DEVICE,
  ) -> None:
    """Wraps `[sequences, blocks, 32, tokens]` in calibration order.

    Chunks are in the model's compute dtype; what reads them gets float32.
    On a mesh a chunk has one sequence a device. A function captures `chunks` when a
    hook first needs data that the cache lacks; it requires the (sequences, blocks,
    tokens) of all chunks as `extent`. `cache` is shared by linears on the same tensor.
    """
    self._source = chunks
    self._cache = {} if cache is None else cache
    self.rules, self.placement = rules, placement
    self.name = ""
    self.learned: Any = None
    self.group: Any = None
    self.gradients: Sequence[jax.Array] = ()
    self.token_weights: jax.Array | None = None
    if extent is None:
      arrays = self._chunks
      count = sum(chunk.shape[0] for chunk in arrays)
      extent = count, arrays[0].shape[1], arrays[0].shape[-1]
    self.sequences, self.blocks, self.length = extent

  @property
  def _chunks(self) -> Sequence[jax.Array]:
    return self._source() if callable(self._source) else self._source

  def for_linear(
    self,
    name: str = "",
    *,
    learned: Any = None,
    group: Any = None,
    gradients: Sequence[jax.Array] = (),
  ) -> "LinearInputs":
    """Returns a view for one linear on this tensor, which shares its reductions."""
    # Shallow, so that the cache is the same dict.
    view = copy.copy(self)
    view.name, view.learned, view.group = name, learned, group
    view.gradients = gradients
    return view

  def in_group(self, group: Any) -> "LinearInputs":
    """Returns a view that hooks see with another `group`."""
    view = copy.copy(self)
    view.group = group
    return view

  def weighted(self, token_weights: jax.Array) -> "LinearInputs":
    """Returns a view whose moments weight tokens, with a cache of its own."""
    view = copy.copy(self)
    # Moments under other weights are others.
    view.token_weights, view._cache = token_weights, {}
    return view

  @property
  def tokens(self) -> int:
    """Number of calibration tokens."""
    return self.sequences * self.length

  @property
  def fold_tokens(self) -> tuple[int, int]:
    """Numbers of tokens in the even and in the odd sequences (reading A6)."""
    # From 0: of an odd number of sequences, the even fold has one more.
    odd = self.sequences // 2
    return (self.sequences - odd) * self.length, odd * self.length

  def probe(self, tokens: int) -> jax.Array:
    """Returns the first sequence's first tokens, float32 `[blocks, 32, tokens]`."""
    return self.cached(f"probe_{tokens}", lambda: self.sequence(0)[..., :tokens])

  def sample(self, tokens: int) -> jax.Array:
    """Samples tokens evenly over the calibration set, `[blocks, 32, <= tokens]`."""
    # Rounded up, or there would be more than `tokens` of them.
    stride = max(1, -(-self.tokens // tokens))
    places = np.arange(0, self.tokens, stride, dtype=np.int32)
    rows, positions = np.divmod(places, np.int32(self.length))
    parts, first = [], 0
    for chunk in self._chunks:
      inside = (rows >= first) & (rows < first + chunk.shape[0])
      # Two index arrays with slices between them: as in numpy, their axis comes first,
      # `[n, blocks, 32]`.
      columns = chunk[rows[inside] - first, :, :, positions[inside]]
      parts.append(jnp.moveaxis(self.placement.to_primary(columns), 0, -1))
      first += chunk.shape[0]
    return jnp.concatenate(parts, axis=-1).astype(jnp.float32)

  def sequence(self, index: int) -> jax.Array:
    """Returns one calibration sequence, float32 `[blocks, 32, tokens]`."""
    for chunk in self._chunks:
      if index < chunk.shape[0]:
        # The index is traced, so that one program serves all sequences.
        return self.placement.to_primary(_float32_row(chunk, np.int32(index)))
      index -= chunk.shape[0]
    raise IndexError(f"linear_inputs: no sequence {index} of {self.sequences}")

  def reduce(self, step: Step, init: Any, *args: Any) -> Any:
    """Runs `step` over sequences in calibration order and returns the last carry.

    `step` is a module-level function, jitted once for each shape, that maps
    `(carry, blocks [blocks, 32, T], index, rules, *args)` to the next carry. It must be
    additive in the carry: on a mesh it runs on a zero carry and results are summed. The
    buffers of `init` are donated.
    """
    return self._sum(self._chunks, step, init, args, jnp.float32)

  def reduce_gradients(self, step: Step, init: Any, *args: Any) -> Any:
    """Like `reduce`, over `gradients`: a step gets `[n, out_features]`."""
    return self._sum(self.gradients, step, init, args, None)

  def _sum(
    self,
    chunks: Sequence[jax.Array],
    step: Step,
    init: Any,
    args: tuple[Any, ...],
    dtype: Any,
  ) -> Any:
    """Runs `step` over sequences converted to `dtype`, or as they are if None."""
    # Their computation ends before the reduction begins.
    init, args = execution.block_on_cpu((init, args))
    totals, args = Totals(init, self.placement), self.placement.replicate(args)
    for chunk in chunks:
      totals.add(_add_sequence, chunk, *args, static=(step, self.rules, dtype))
    return totals.value()

  @property
  def _weights(self) -> tuple[jax.Array, ...]:
    return () if self.token_weights is None else (self.token_weights,)

  def cached(self, name: str, compute: Callable[[], jax.Array]) -> jax.Array:
    """Returns a named reduction, computed once for all linears on this tensor."""
    # Not `in`: the cache of a store reads its file when it is asked for a value.
    with contextlib.suppress(KeyError):
      return self._cache[name]
    self._cache[name] = result = compute()
    return result

  def hessian(self) -> jax.Array:
    """Returns the raw Hessian X'X / n, float32 `[d, d]`, cached.

    On a GPU it is multiplied in bfloat16 where the inputs are bfloat16 without weights.
    Those products are exact, and sums are float32 in another order;
    `hessian_products` says which ran.
    """
    width = self.blocks * mxfp4.BLOCK_SIZE

    def compute(dtype: Any = jnp.float32) -> jax.Array:
      start = execution.zeros(jax.ShapeDtypeStruct((width, width), jnp.float32))
      total = self._sum(self._chunks, _hessian_step, start, self._weights, dtype)
      places = np.arange(width, dtype=np.int32)
      return _mirrored_mean(total, places, np.float32(self.tokens))

    is_narrow = (
      # Weighted inputs are no bfloat16 numbers, so that their products would not be
      # exact.
      self.token_weights is None
      and implementations.target_platform() == "gpu"
      and self._chunks[0].dtype == jnp.bfloat16
    )
    if not is_narrow:
      return self.cached("hessian", compute)
    # A name of its own, by which `hessian_products` says what ran, also from a store.
    return self.cached("hessian_bfloat16", lambda: compute(None))

  @property
  def hessian_products(self) -> str | None:
    """Dtype of the operands of the Hessian's products; None if no hook has read it."""
    for name, dtype in (("hessian", "float32"), ("hessian_bfloat16", "bfloat16")):
      if name in self._cache:
        return dtype
    return None

  def _moments(self) -> tuple[jax.Array, jax.Array]:
    """Returns X'X / n of every block by fold, and over all tokens."""
    shape = (2, self.blocks, mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE)
    compute = lambda: self.reduce(
      _fold_moment_step, *execution.float64_zeros(shape), *self._weights
    )
    totals = self.cached("fold_moments", compute)
    return _means(totals, np.asarray(self.fold_tokens, np.float64))

  def fold_moments(self) -> jax.Array:
    """Returns X'X / n of every block by fold, float64 `[2, blocks, 32, 32]`."""
    return self._moments()[0]

  def moment(self) -> jax.Array:
    """Returns X'X / n of every block over all tokens, float64 `[blocks, 32, 32]`."""
    return self._moments()[1]
