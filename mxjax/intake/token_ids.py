"""The one way in for token ids: integers that int32 and the vocabulary hold."""

from typing import Any

import numpy as np

from mxjax.errors import TypeRefusal, ValueRefusal

LARGEST = np.iinfo(np.int32).max


def token_ids(ids: Any, place: str, *, vocabulary: int | None = None) -> np.ndarray:
  """Returns ids as contiguous int32 of the same shape; no value ever changes.

  `place` begins the message; `vocabulary` is the number of ids, int32's when None.

  Raises:
    TypeError: The dtype is no integer: floats, complex numbers, dates, booleans, text.
    ValueError: Rows of unequal length, or ids out of range.
  """
  try:
    array = np.asarray(ids)
  except ValueError as error:
    raise ValueRefusal(
      place,
      expected="token ids in rows of equal length",
      got=f"others ({error})",
      mend="cut them to one length",
    ) from error
  # By kind: numpy counts durations among the integers.
  if array.dtype.kind not in "iu":
    raise TypeRefusal(
      place,
      expected="integer token ids",
      got=array.dtype,
      mend="tokenize text, or write the ids as integers",
    )
  limit = vocabulary or LARGEST + 1
  if (bad := (array < 0) | (array >= limit)).any():
    first = tuple(map(int, np.argwhere(bad)[0]))
    raise ValueRefusal(
      place,
      expected=f"token ids from 0 to {limit - 1}",
      got=f"{int(bad.sum())} outside the vocabulary of {limit}, the first is "
      f"{array[first]} at {list(first)}",
      mend="use the model's own tokenizer",
    )
  return np.ascontiguousarray(array, np.int32)
