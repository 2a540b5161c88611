"""Builds again, in chunks of other sizes, compiled as users compile them."""

import pytest

import mxjax
from tests.mxjax.quantized import assert_same


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "chunk"),
  [
    pytest.param("hires", 1, marks=pytest.mark.slow),
    pytest.param("hires", 2, marks=pytest.mark.slow),
    ("gptq", 5),
  ],
)
def test_another_run_or_chunk_size_does_not_change_a_bit(
  tiny_params, tiny_calib, method, chunk
):
  """Chunks of which the last is smaller, and all sequences in one."""
  first, again = (
    mxjax.quantize(tiny_params, tiny_calib, method, check=False, probe=False, **options)
    for options in ({}, {"chunk": chunk})
  )
  assert_same(first, again)
