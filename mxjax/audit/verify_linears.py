"""Checks of one quantized linear that need neither the float model nor the data.

Decoding, legality and the nearest code are reimplemented in numpy and float64 from the
format's definition, so the auditor shares no arithmetic with the code it audits.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.layers import quantized_linear
from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import Activations
from mxjax.storage.tree_io import leaves_by_path

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of E2M1."""
BLOCK = mxfp4.BLOCK_SIZE
PROBES = 4
"""Random inputs of each linear."""
MAP_TOLERANCE = 1e-6
"""Relative error of a function that was folded in float64."""
PRODUCT_TOLERANCE = 1e-4
"""Relative error of a float32 product against float64."""
TABLE_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
NEAR_TIE = 1e-4
"""Distance to a threshold, in units of the scale, within which either code is right."""


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Decodes packed codes, low nibble first, to float64 `[rows, width]`."""
  nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
  values = np.where(nibbles & 8, -1.0, 1.0) * GRID[nibbles & 7]
  scale = np.ldexp(1.0, scales.astype(np.int64) - 127)
  return values * np.repeat(scale, BLOCK, axis=1)


def illegal_blocks(operand: np.ndarray) -> int:
  """Counts blocks of `[blocks, 32, n]` that no power-of-two scale makes E2M1."""
  # The scale is not given: every power of two that could hold the largest value is
  # tried. A block of zeros is legal under any.
  largest = np.abs(operand).max(1, keepdims=True)
  top = np.frexp(np.where(largest > 0, largest, 1.0))[1]
  legal = largest[:, 0] == 0
  # The largest value lies between 0.5 and 6 in units of the scale.
  for exponent in range(-4, 2):
    units = np.abs(operand) / np.ldexp(1.0, top + exponent)
    legal |= np.isin(units, GRID).all(1)
  return int((~legal).sum())


def _nearest(x: np.ndarray, *, rounds_up: bool) -> tuple[np.ndarray, np.ndarray]:
  """Rounds blocks `[blocks, 32, n]` to nearest A4 values under the paper's rules.

  Or, if exponents round up, under the scale rule `even`. Also returns where another
  code is equally near within `NEAR_TIE`.
  """
  largest = np.abs(x).max(1, keepdims=True)
  turn = 0.875 if rounds_up else 1.0  # The mantissa, from .5 up, of the next exponent.
  mantissa, exponent = np.frexp(np.where(largest > 0, largest, 1.0))
  exponent += (mantissa >= turn) - 1
  # E2M1 ends in binary order 2; -127 is the smallest exponent of E8M0.
  scale = np.ldexp(1.0, np.maximum(exponent - 2, -127))
  units = np.abs(x) / scale
  middles = (GRID[1:] + GRID[:-1]) / 2
  # To the right of an equal middle: a tie takes the larger magnitude.
  index = np.searchsorted(middles, units, side="right")
  near = np.abs(units[..., None] - middles).min(-1) < NEAR_TIE
  # A largest value near the edge of two exponents may get the other one in float32.
  edge = np.abs(mantissa - turn) < NEAR_TIE
  edge |= (mantissa < 0.5 + NEAR_TIE) & (not rounds_up)
  return np.sign(x) * GRID[index] * scale, near | edge


def _relative_error(computed: np.ndarray, expected: np.ndarray) -> float:
  size = np.linalg.norm(expected)
  return float(np.linalg.norm(computed - expected) / (size if size > 0 else 1.0))


def payload_faults(node: Any) -> Iterator[str]:
  """Checks legality and finite values of a linear or an array."""
  if isinstance(node, QuantizedLinear):
    try:
      mxfp4.check_legal(node.weight, "payload")
    except (TypeError, ValueError) as error:
      yield str(error).rstrip(".")
  for path, array in leaves_by_path(node).items():
    if jnp.issubdtype(array.dtype, jnp.floating):
      if bad := int((~np.isfinite(np.asarray(array, np.float32))).sum()):
        yield f"{path} has {bad} NaN or inf of {array.size} values".lstrip()


def _table_faults(leaf: QuantizedLinear, decoded: np.ndarray) -> Iterator[str]:
  """Checks that G_Q of the A4 rule matches the codes beside it."""
  if (tables := leaf.rounding.tables()) is None:
    return
  blocks = decoded.T.reshape(-1, BLOCK, len(decoded))
  gram = np.asarray(tables[0], np.float64)
  error = _relative_error(gram, np.einsum("bim,bjm->bij", blocks, blocks))
  if error > TABLE_TOLERANCE[str(jax.tree.leaves(leaf.rounding)[0].dtype)]:
    yield f"its table G_Q is not that of its codes, relative error {error:.1e}"


def _map_faults(
  leaf: QuantizedLinear, rng: np.random.Generator, width: int
) -> Iterator[str]:
  """Checks that mapped inputs times folded weights give the unmapped product."""
  if leaf.input_map is None:
    return
  # Random weights, and not the decoded ones: x'T' times the fold of w is x'w for any w.
  x, weight = rng.standard_normal((2, width // BLOCK, BLOCK, PROBES))
  with precision.float64_scope():
    mapped = np.asarray(leaf.input_map.apply(jnp.asarray(x)))
    folded = np.asarray(leaf.input_map.fold(jnp.asarray(weight)))
  product = lambda a, b: np.einsum("bin,bim->nm", a, b)
  error = _relative_error(product(mapped, folded), product(x, weight))
  # So written, NaN is a fault, too.
  if not error <= MAP_TOLERANCE:
    yield f"its map does not reproduce the folded function, relative error {error:.1e}"


def _mapped(leaf: QuantizedLinear, x: np.ndarray) -> np.ndarray:
  """Returns inputs `[n, width]` behind the map, float64 `[blocks, 32, n]`."""
  blocks = x.T.reshape(-1, BLOCK, len(x)).astype(np.float64)
  if leaf.input_map is None:
    return blocks
  with precision.float64_scope():
    return np.asarray(leaf.input_map.apply(jnp.asarray(blocks)), np.float64)


def _float_operand_faults(
  leaf: QuantizedLinear, x: np.ndarray, operand: np.ndarray
) -> Iterator[str]:
  """Checks that the operand is the mapped input itself, not a rounded one."""
  error = _relative_error(operand, _mapped(leaf, x))
  # So written, NaN is a fault, too.
  if not error <= PRODUCT_TOLERANCE:
    yield f"its operand is not its mapped input, relative error {error:.1e}"


def _operand_faults(
  leaf: QuantizedLinear, x: np.ndarray, operand: np.ndarray
) -> Iterator[str]:
  """Checks that the A4 operand is legal and nearest, except for allowed edits."""
  if bad := illegal_blocks(operand):
    yield f"{bad} blocks of its A4 operand are not E2M1 under a power-of-two scale"
    return
  allowed, rules = leaf.rounding.edits, leaf.rounding.scale_rules(leaf.rules)
  if allowed is None or leaf.rules != mxfp4.PAPER_RULES:
    return
  rounds_up = rules.scale_rule == "even"
  nearest, either = _nearest(_mapped(leaf, x), rounds_up=rounds_up)
  edits = ((operand != nearest) & ~either).sum(1)
  if bad := int((edits > allowed).sum()):
    yield (
      f"{bad} blocks of its A4 operand differ from the nearest codes in more than "
      f"{allowed} places"
    )


@compilation.jit()
def _run(x: jax.Array, leaf: QuantizedLinear) -> tuple[jax.Array, jax.Array]:
  """Returns the runtime's A4 operand and its output."""
  operand = quantized_linear.quantized_inputs(x, leaf)
  return operand, linear(x, leaf, implementation="xla")


def faults(
  leaf: QuantizedLinear,
  rng: np.random.Generator,
  activations: Activations = "mxfp4",
) -> Iterator[str]:
  """Yields everything wrong with one linear, a phrase each.

  `rng` draws the inputs, and `activations` is what the contract says of them.
  """
  # Nothing below makes sense on illegal or infinite payloads.
  fatal = list(payload_faults(leaf))
  is_float = activations == "float"
  if not leaf.rounding.is_legal and not is_float:
    fatal.append("its inputs are not rounded to A4")
  if leaf.rounding.is_legal and is_float:
    fatal.append("its inputs are rounded to A4, and its contract leaves them float")
  yield from fatal
  if fatal:
    return
  decoded = decode(np.asarray(leaf.weight.codes), np.asarray(leaf.weight.scales))
  width = decoded.shape[1]
  yield from _table_faults(leaf, decoded)
  yield from _map_faults(leaf, rng, width)
  x = rng.standard_normal((PROBES, width)).astype(np.float32)
  flat, output = map(np.asarray, _run(jnp.asarray(x), leaf))
  # `[d, probes]`, features first, as the runtime has them.
  operand = flat.astype(np.float64).reshape(-1, BLOCK, PROBES)
  if is_float:
    yield from _float_operand_faults(leaf, x, operand)
  else:
    yield from _operand_faults(leaf, x, operand)
  expected = flat.astype(np.float64).T @ decoded.T
  error = _relative_error(output.astype(np.float64), expected)
  if not error <= PRODUCT_TOLERANCE:
    yield f"its output is not operand times codes, relative error {error:.1e}"
