import jax.numpy as jnp
import numpy as np

from mxjax.pallas_kernels.mosaic import blackwell


def test_scales_lie_where_the_tensor_cores_read_them():
  rows, blocks = 256, 8
  scales = np.random.default_rng(0).integers(0, 256, (rows, blocks)).astype(np.uint8)
  flat = np.asarray(blackwell.scale_tiles(jnp.asarray(scales))).reshape(-1)
  row, block = np.indices(scales.shape)
  # Tiles of 128 rows by 4 scales, 512 bytes each, row by row of tiles; in a tile 16
  # bytes for each of 32 rows, the four scales of rows r, r + 32, r + 64 and r + 96.
  tile = row // 128 * (blocks // 4) + block // 4
  offset = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
  np.testing.assert_array_equal(flat[tile * 512 + offset], scales)
