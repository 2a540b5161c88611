import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import block_batches


@pytest.mark.parametrize(
  ("blocks", "nbytes", "size"),
  [
    (18, 2**18, 6),
    (48, 2**18, 6),
    (16, 2**18, 4),
    # No block alone: of one block at a time XLA makes more than it saves.
    (18, 2**30, 2),
    (17, 2**18, 17),
    (1, 2**18, 1),
    (18, 128, 18),
  ],
)
def test_groups_divide_the_blocks_and_fit(blocks, nbytes, size):
  assert block_batches.batch_size(blocks, nbytes) == size


def test_a_grouped_function_has_the_bits_of_the_whole(monkeypatch):
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((12, 32, 64)), jnp.float32)
  matrices = jnp.asarray(rng.standard_normal((12, 32, 32)), jnp.float32)
  seen = []

  def function(blocks, matrix):
    seen.append(blocks.shape[0])
    mapped = jnp.einsum("bij,bjn->bin", matrix, blocks, precision="highest")
    return {"mapped": mapped, "norm": jnp.abs(mapped).max((-2, -1))}

  whole = jax.jit(function)(x, matrices)
  monkeypatch.setattr(block_batches, "BATCH_BYTES", 3 * 32 * 64 * 4)
  grouped = jax.jit(lambda *args: block_batches.map_block_batches(function, *args))
  got = grouped(x, matrices)
  assert seen == [12, 3]
  jax.tree.map(np.testing.assert_array_equal, got, whole)
