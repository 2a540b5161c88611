"""Checks that the batched form of a hook treats every row independently."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mxjax.discovery.core.task import RefusedError
from mxjax.discovery.sandbox.tracing import tracing_scope

CHECK_ROWS = 48
"""Rows used in the check."""
UNIT_TOLERANCE = 0.1
"""Fraction of a row's values in which rounding may make the two forms differ."""
ROW_TOLERANCE = 1 / 3
"""Fraction of rows allowed above `UNIT_TOLERANCE`: one code can change later ones."""
UNIT_ROWS = range(0, CHECK_ROWS, 3)
"""Rows on which the two forms are compared."""
UNIT_DRAWS = 5
"""Draws on which the forms are compared; the majority decides."""


def check_independence(
  unit: Callable[..., Any], batched: Callable[..., Any], spec: Mapping[str, Any]
) -> None:
  """Checks that the batched form treats every row independently, as the unit does.

  Both forms run on random data that is drawn when the check runs.

  Raises:
    RefusedError: A row's result depends on other rows, or the forms compute different
      functions.
  """
  generator = np.random.default_rng(np.random.SeedSequence().entropy)
  draw = functools.partial(_draw, spec, generator)
  _check_rows(batched, spec, draw(), draw())
  # On a nearly singular draw, rounding may decide most rows, so the forms count as
  # different functions only if they differ in most draws.
  differing = sum(_forms_differ(unit, batched, spec, draw()) for _ in range(UNIT_DRAWS))
  if 2 * differing > UNIT_DRAWS:
    raise RefusedError(f"{spec['name']}: the batched form is not the unit's.")


def _draw(spec: Mapping[str, Any], generator: np.random.Generator) -> list[Any]:
  """Draws arguments of the batched form, each array with a random scale."""

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
  """Applies `pick` to every array with rows; takes the others from the first draw."""
  return [
    jax.tree.map(pick, *trees) if name in spec["batched"] else trees[0]
    for (name, _), *trees in zip(spec["arguments"], *draws, strict=True)
  ]


def _mixed(is_mine: np.ndarray, mine: np.ndarray, other: np.ndarray) -> np.ndarray:
  """Takes rows of `mine` where `is_mine`, and of `other` elsewhere."""
  return np.where(is_mine.reshape(-1, *[1] * (mine.ndim - 1)), mine, other)


def _check_rows(
  batched: Callable[..., Any],
  spec: Mapping[str, Any],
  arguments: list[Any],
  others: list[Any],
) -> None:
  """Replaces the neighbours of some rows; raises if those rows' results change."""
  whole = _call(batched, arguments)
  third = np.arange(CHECK_ROWS) % 3 == 0
  # Both ways round, so that every row is once a replaced neighbour.
  for same in (third, ~third):
    mix = functools.partial(_mixed, same)
    again = _call(batched, _by_argument(spec, mix, arguments, others))
    for rows, mixed in zip(whole, again, strict=True):
      # Equal shapes run the same code, so results that do not depend on neighbours are
      # bitwise equal.
      is_float = rows.dtype.kind == "f"
      if not np.array_equal(rows[same], mixed[same], equal_nan=is_float):
        raise RefusedError(
          f"{spec['name']}: a row's result depends on its neighbours in the batch."
        )


def _forms_differ(
  unit: Callable[..., Any],
  batched: Callable[..., Any],
  spec: Mapping[str, Any],
  arguments: list[Any],
) -> bool:
  """Returns whether the forms differ on more rows than rounding explains.

  The unit form runs different code and may differ in the last place. That can change a
  code and, where errors are propagated, the rest of its row.
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
