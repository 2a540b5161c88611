"""How much of an evaluation runs in one call of a device, and in which shapes.

XLA compiles a program for every shape. Compilation is what a GPU user waits for, and a
GPU is slow on few tokens: there all calls have the same number of tokens, in two widths
at most, filled up with padding. A CPU computes in proportion to the tokens and compiles
quickly: calls are smaller, and cut to what they hold.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mxjax.numerics import implementations


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallShapes:
  """Sizes of the calls; the numbers of a model depend on them by rounding alone.

  Attributes:
    tokens: Tokens of a call, padding included; of one longer row alone.
    row: Tokens of a row into which short requests are packed. Longer requests have rows
      of twice, four times, ... as many.
    is_fixed: Whether calls are filled up to `tokens`, in two widths at most. Otherwise
      they have as many rows as there are, without columns of padding alone.
    head: Most tokens predicted by a call of the output head.
    head_step: The last call's tokens are padded to a multiple of this.
  """

  tokens: int
  row: int
  is_fixed: bool
  head: int
  head_step: int

  def windows(self, length: int) -> int:
    """Returns how many windows of `length` tokens, of a plain text, a call has."""
    return max(1, self.tokens // length) if self.is_fixed else 1


CPU = CallShapes(tokens=1024, row=256, is_fixed=False, head=512, head_step=128)
GPU = CallShapes(tokens=4096, row=512, is_fixed=True, head=512, head_step=512)
"""Rows of 512 hold three requests of 150 tokens where rows of 256 hold one, and masks
of branching rows are still small beside the products of a layer."""


def of_device() -> CallShapes:
  """Returns the shapes for the device that computations target."""
  return GPU if implementations.target_platform() == "gpu" else CPU


def filled_calls(windows: np.ndarray, count: int) -> Sequence[np.ndarray]:
  """Cuts windows `[n, ...]` into calls of `count`; copies of the last fill up the last.

  A caller drops the results beyond n.
  """
  filled = np.concatenate([windows, np.repeat(windows[-1:], -len(windows) % count, 0)])
  return [filled[start : start + count] for start in range(0, len(filled), count)]
