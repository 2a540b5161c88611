"""Sums over sequences: programs that a sum compiles."""

import jax
import numpy as np
import pytest

from mxjax.devices import totals


def _add(totals, sequence, index, static, params, *args):
  del index, static, params, args
  return totals + sequence[1], None


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_sum_is_compiled_once_and_leaves_its_start_alone(caplog, is_committed):
  totals._add_chunk.clear_cache()
  start = np.ones(3, np.float32)
  device = jax.devices()[0] if is_committed else None
  sequences = jax.device_put(np.ones((2, 3), np.float32), device)
  total = totals.Totals(start)
  with jax.log_compiles():
    for _ in range(3):
      total.add(_add, sequences)
  compiled = [text for text in caplog.messages if "Compiling jit(_add_chunk)" in text]
  assert len(compiled) == 1
  assert total.value().committed == is_committed
  np.testing.assert_array_equal(total.value(), 7)
  np.testing.assert_array_equal(start, 1)
