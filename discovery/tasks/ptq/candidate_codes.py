"""Trusted code around a candidate's hooks: provides statistics and checks payloads."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.discovery.core.task import ContractError
from mxjax.discovery.sandbox.processor import spent_on
from mxjax.discovery.tasks.ptq.interface import EXPONENT_SLACK
from mxjax.numerics import float_bits, mxfp4
from mxjax.numerics.shaping import input_maps, reference_chart

Function = Callable[..., tuple[jax.Array, ...]]


UNITS, ROWS = 16, 128
"""Units that a program of a hook takes at once, and rows of a unit of an encoder.

These are fixed, so that each hook is compiled once, for linears of every shape and
sequences of every length: compiling is most of what a candidate costs.
"""
KEPT_UNITS = 1 << 15
"""Keys of `EncodedUnits`, two for each unit of 5 KB: 80 MB."""


@functools.partial(jax.jit, static_argnames="function")
def _run_units(
  function: Function, count: jax.Array, items: tuple[Any, ...]
) -> list[jax.Array]:
  """Runs a hook on the first `count` of `UNITS` units; the other results are zero.

  One unit after another, so that small LAPACK calls never run in parallel.
  """

  def one(index: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(function(*jax.tree.map(lambda a: a[index], items)))

  def put(index: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
    return [a.at[index].set(r) for a, r in zip(results, one(index), strict=True)]

  like = jax.eval_shape(one, count)
  results = [jnp.zeros((UNITS, *each.shape), each.dtype) for each in like]
  return jax.lax.fori_loop(0, count, put, results)


def _filled(array: np.ndarray, size: int, axis: int) -> np.ndarray:
  """Appends zeros along an axis up to a multiple of `size`."""
  if not array.shape[axis] % size:
    return array
  widths = [(0, 0)] * array.ndim
  widths[axis] = 0, -array.shape[axis] % size
  return np.pad(array, widths)


def map_units(function: Function, *items: Any) -> list[np.ndarray]:
  """Returns the hook's results on stacked units, as host arrays."""
  arrays = jax.tree.map(np.asarray, items)
  total, parts = len(jax.tree.leaves(arrays)[0]), []
  for start in range(0, total, UNITS):
    some = jax.tree.map(lambda a: a[start : start + UNITS], arrays)  # noqa: B023
    count = min(UNITS, total - start)
    # Zeros will do, because only the first `count` units are run.
    filled = jax.tree.map(lambda a: _filled(a, UNITS, 0), some)
    with spent_on(function):
      # One computation at a time on the CPU: rule 1 of `mxjax.devices.execution`.
      results = execution.block_on_cpu(_run_units(function, np.int32(count), filled))
    parts.append([np.asarray(result)[:count] for result in results])
  return [np.concatenate(each) for each in zip(*parts, strict=True)]


class EncodedUnits:
  """What an encoder made of its units, so that equal units are encoded once.

  A call of the evaluator scores a text twice, for perplexity and for the divergence,
  which needs all tokens of a window but the last. Most inputs of linears are then the
  same bits, but not all of them: XLA multiplies other shapes in another order.

  A row of a unit is encoded independently of the other rows, so a unit whose tables and
  rows are those of an earlier one has its results, bit for bit. So has a unit that
  lacks the last of those rows. Use one instance for one call: it holds results of a
  candidate's hook.
  """

  def __init__(self) -> None:
    """Starts empty; from `KEPT_UNITS` keys on nothing more is kept."""
    self._results: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

  def encode(
    self,
    function: Function,
    rows: np.ndarray,
    lengths: Sequence[int],
    tables: Sequence[np.ndarray],
  ) -> tuple[np.ndarray, np.ndarray]:
    """Encodes units `[units, ROWS, 32]`, whose first `lengths` rows are not filling.

    Returns codes `[units, ROWS, 32]` and exponents `[units, ROWS]`; those of filling
    have no meaning.
    """
    keys = [
      _unit_keys(function, unit[:length], told)
      for unit, length, *told in zip(rows, lengths, *tables, strict=True)
    ]
    missing = [i for i, (whole, _) in enumerate(keys) if whole not in self._results]
    made: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    if missing:
      fresh = map_units(function, rows[missing], *(table[missing] for table in tables))
      # Copies, because a view would keep the results of all units alive.
      for i, codes, exponent in zip(missing, *fresh, strict=True):
        made[i] = codes.copy(), exponent.copy()
    found = [made.get(i) or self._results[keys[i][0]] for i in range(len(keys))]
    for i, result in made.items():
      if len(self._results) < KEPT_UNITS:
        self._results |= dict.fromkeys(keys[i], result)
    codes, exponent = zip(*found, strict=True)
    return np.stack(codes), np.stack(exponent)


def _unit_keys(
  function: Function, rows: np.ndarray, tables: Sequence[np.ndarray]
) -> tuple[Any, Any]:
  """Returns what decides the results of all rows, and of all rows but the last."""
  content = hashlib.blake2b(digest_size=32)
  for array in (*tables, rows[:-1]):
    content.update(np.ascontiguousarray(array).tobytes())
  without = function, len(rows) - 1, content.digest()
  content.update(np.ascontiguousarray(rows[-1:]).tobytes())
  return (function, len(rows), content.digest()), without


def encoded(
  function: Function,
  blocks: jax.Array,
  *tables: jax.Array,
  known: EncodedUnits | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """Runs a batched encoder on the columns of float32 blocks `[blocks, 32, n]`.

  `tables` are what the encoder is told of each block, `[blocks, 32, 32]`. Returns codes
  uint8 `[blocks, 32, n]` and exponents int32 `[blocks, n]`, as host arrays. Units that
  `known` has, if given, are not encoded again.
  """
  count, size, columns = blocks.shape
  # Rows of a block, `[blocks, n, 32]`, filled up and cut into units of `ROWS`; the
  # tables of a block go with each of its units.
  rows = _filled(np.asarray(blocks).swapaxes(1, 2), ROWS, 1)
  each = rows.shape[1] // ROWS
  told = [np.repeat(np.asarray(table), each, axis=0) for table in tables]
  units = rows.reshape(-1, ROWS, size)
  if known is None:
    codes, exponent = map_units(function, units, *told)
  else:
    lengths = [min(ROWS, columns - start) for start in range(0, columns, ROWS)]
    codes, exponent = known.encode(function, units, lengths * count, told)
  codes = codes.reshape(count, -1, size)[:, :columns].swapaxes(1, 2)
  return codes, exponent.reshape(count, -1)[:, :columns]


def neighbours(place: str, stats: Any) -> Any:
  """Returns stacked statistics of units with each unit's replaced by its neighbour's.

  Raises:
    ContractError: There is one unit only; the message names the hook.
  """
  if (units := len(jax.tree.leaves(stats)[0])) < 2:
    raise ContractError(
      f"{place}: shuffle_stats tells a unit its neighbour's statistics, got {units} "
      "unit; use another control."
    )
  return jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), stats)


def require_finite(place: str, *arrays: np.ndarray) -> None:
  """Rejects NaN and infinity in the results of a hook.

  Raises:
    ContractError: An array is not finite; the message names the hook.
  """
  for array in arrays:
    if not np.isfinite(array).all():
      raise ContractError(f"{place}: returned NaN or inf.")


def legal(codes: jax.Array, exponent: jax.Array, blocks: jax.Array) -> jax.Array:
  """Returns whether codes `[..., 32, n]` and exponents `[..., n]` are legal payloads.

  Codes are uint8 and exponents int32; `blocks` are the encoded float values. The result
  is `[..., n]`.
  """
  own = mxfp4.block_exponent(blocks)
  # A block with inf or NaN has the exponent 128, which is none of E8M0.
  near = jnp.abs(exponent - jnp.minimum(own, 127)) <= EXPONENT_SLACK
  is_byte = (exponent >= -mxfp4.SCALE_BIAS) & (exponent <= mxfp4.SCALE_BIAS)
  return near & is_byte & (codes <= 15).all(-2)


def decoded(codes: jax.Array, exponent: jax.Array) -> jax.Array:
  """Decodes codes `[..., 32, n]` and exponents `[..., n]` to float32."""
  value = mxfp4.magnitude((codes & 7).astype(jnp.int32))
  sign = jnp.where(codes >= 8, jnp.float32(-1), jnp.float32(1))
  return sign * value * float_bits.power_of_two(exponent)[..., None, :]


@jax.jit
def checked(
  codes: jax.Array, exponent: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns decoded values `[..., 32, n]` and legality `[..., n]` of encoded blocks."""
  return decoded(codes, exponent), legal(codes, exponent, blocks)


def neighbours_in_linear(sums: jax.Array) -> jax.Array:
  """Returns the sums of a linear, `[2, width, width]`, each block with its neighbour's.

  Raises:
    ContractError: The linear has one block only.
  """
  if (blocks := sums.shape[1] // mxfp4.BLOCK_SIZE) < 2:
    raise ContractError(
      "solve_linear: shuffle_stats tells a block its neighbour's sums, got a linear of "
      f"{blocks} block; use another control."
    )
  return jnp.roll(sums, mxfp4.BLOCK_SIZE, axis=(1, 2))


def _error_step(
  carry: dict[str, jax.Array],
  blocks: jax.Array,
  index: jax.Array,
  rules: mxfp4.Rules,
  transform: jax.Array,
) -> dict[str, jax.Array]:
  """Adds a sequence's error moments in the coordinates of a map."""
  del index
  # Errors as at run time, in float32; moments in float64, as the paper's transform
  # statistics.
  mapped = input_maps.BlockDense(transform).apply(blocks)
  error = mxfp4.round_blocks(mapped, rules) - mapped
  wide, signal = error.astype(jnp.float64), mapped.astype(jnp.float64)
  return {
    "error": carry["error"] + jnp.einsum("bin,bjn->bij", wide, wide),
    "cross": carry["cross"] + jnp.einsum("bin,bjn->bij", wide, signal),
    "signal": carry["signal"] + jnp.einsum("bin,bjn->bij", signal, signal),
  }


@jax.jit
def _folded(transform: jax.Array, weight: jax.Array) -> jax.Array:
  return input_maps.BlockDense(transform).fold(weight)


@jax.jit
def _fisher_stats(
  transform: jax.Array, activation: jax.Array, weight: jax.Array
) -> dict[str, jax.Array]:
  """Maps moments weighted by output gradients to the coordinates of a map."""
  # Activations are mapped by T and weights by T^-T, and so are their moments on both
  # sides.
  inverse = jnp.linalg.inv(transform)
  return {
    "activation_fisher": transform @ activation @ transform.mT,
    "weight_fisher": inverse.mT @ weight @ inverse,
  }


@functools.partial(jax.jit, static_argnames="rules")
def _weight_stats(folded: jax.Array, rules: mxfp4.Rules) -> dict[str, jax.Array]:
  narrow = folded.astype(jnp.float32)
  error = (mxfp4.round_blocks(narrow, rules) - narrow).astype(jnp.float64)
  rows = folded.shape[-1]
  product = lambda a, b: jnp.einsum("bim,bjm->bij", a, b) / rows
  return {
    "weight": reference_chart.block_moment(folded) / rows,
    "weight_error": product(error, error),
    "weight_cross": product(error, narrow.astype(jnp.float64)),
  }


def measure_stats(
  weight: jax.Array, inputs: LinearInputs, transform: jax.Array
) -> dict[str, jax.Array]:
  """Returns float64 second moments and nearest-code error moments of every block.

  Args:
    weight: `[blocks, 32, rows]`, in native coordinates.
    inputs: The linear's inputs.
    transform: Map that defines the coordinates of the moments, `[blocks, 32, 32]`.
  """
  wide = transform.astype(jnp.float64)
  # Three separate buffers, because the reduction donates them.
  start = {
    name: jnp.zeros(transform.shape, jnp.float64)
    for name in ("error", "cross", "signal")
  }
  moments = inputs.reduce(_error_step, start, transform.astype(jnp.float32))
  folded = execution.block_on_cpu(_folded(wide, weight.astype(jnp.float64)))
  signal = moments["signal"] / inputs.tokens
  weights = execution.block_on_cpu(_weight_stats(folded, inputs.rules))
  by_gradients = {"activation_fisher": signal, "weight_fisher": weights["weight"]}
  if inputs.token_weights is not None:
    native = inputs.moment(), fisher.output_moment(weight, inputs)
    by_gradients = execution.block_on_cpu(_fisher_stats(wide, *native))
  return {
    "activation": signal,
    "activation_error": moments["error"] / inputs.tokens,
    "activation_cross": moments["cross"] / inputs.tokens,
    **weights,
    **by_gradients,
  }
