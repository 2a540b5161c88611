"""Functions of blocks called a few blocks at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import execution


@pytest.mark.parametrize("blocks", [1, 48, 49, 100, 192])
def test_blocks_in_parts_are_the_blocks(blocks):
  seen = []

  def both(x, y):
    seen.append(x.shape[0])
    return x + y, jax.nn.relu(x)

  x = jnp.asarray(np.random.default_rng(0).standard_normal((blocks, 4)), jnp.float32)
  added, positive = execution.by_blocks(both, x, 2 * x)
  assert np.array_equal(added, 3 * x)
  assert np.array_equal(positive, np.maximum(x, 0))
  assert sum(seen) == blocks
  assert max(seen) <= execution.BLOCKS_AT_ONCE
  assert len(seen) == -(-blocks // execution.BLOCKS_AT_ONCE)
