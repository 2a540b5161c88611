"""The stream-K product: its division of work, and its kernel, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.numerics import implementations, mxfp4
from mxjax.pallas_kernels import choice, lowering, mxfp4_decode
from mxjax.pallas_kernels.mosaic import device, stream_k
from mxjax.pallas_kernels.products import float8
from mxjax.pallas_kernels.products.float8_matmul import float8_matmul_each
from tests import targets
from tests.cases import slow
from tests.pallas_kernels.operands import exact, packed

interpreted = pytest.mark.skipif(
  device.obstacle() is not None, reason=str(device.obstacle())
)
ROWS = 5, 8, 17, 32, 64, 65, 200, 255, 257, 511
SHAPES = (
  ((12288,), 4096),
  ((4096,), 12288),
  ((1024,), 4096),
  ((4096, 1024, 1024), 4096),
  ((12288, 12288), 4096),
  ((128,), 512),
)


@pytest.mark.parametrize("multiprocessors", [1, *slow(114), 132])
def test_every_unit_of_every_tile_is_done_once_and_tiles_wait_for_earlier_programs(
  multiprocessors, monkeypatch
):
  monkeypatch.setattr(lowering, "multiprocessors", lambda: multiprocessors)
  for rows in ROWS:
    for outputs, width in SHAPES:
      work = stream_k.Work.of(rows, outputs, width, jnp.bfloat16)
      starts = [int(work.start(p)) for p in range(work.programs + 1)]
      sizes = np.diff(starts)
      assert starts[0] == 0 and starts[-1] == work.total and sizes.min() > 0
      # The longest range is as short as it can be, and the last rows are there.
      assert sizes.max() == -(-work.total // multiprocessors)
      assert work.programs <= multiprocessors
      assert work.row_tiles * work.tile == work.rows >= rows > work.rows - work.tile
      for tile in range(work.tiles):
        units = np.arange(tile * work.units, (tile + 1) * work.units)
        of = np.searchsorted(starts, units, side="right") - 1
        first = int(work.owner(int(units[0])))
        assert first == of[0]
        # A program has a part of one tile only that a later one ends.
        assert set(range(first, of[-1] + 1)) == set(of.tolist())


def test_shared_memory_holds_the_stages():
  for rows in ROWS:
    for dtype in (jnp.bfloat16, jnp.float32):
      work = stream_k.Work.of(rows, (4096,), 4096, dtype)
      scratch = stream_k.scratch_of(work, jnp.zeros((1, 1), float8.FORM), dtype)
      shared = [a for name, a in scratch.items() if name in ("x", "words", "scales")]
      shared.append(scratch["out"])
      nbytes = sum(np.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in shared)
      assert nbytes <= 226 * 1024 and work.stages >= 3
      # When a slot of scales is copied over, all steps that read it are over.
      assert 4 * work.scale_slots >= work.stages + 3


def operands(rows, outputs, width):
  """Inputs of each linear, with a row outside the range, and weights."""
  xs = []
  for seed in range(len(outputs)):
    x = packed(rows, width, float8.LOWEST, float8.HIGHEST, seed=seed)
    outside = x.scales.at[rows - 1, 1].set(float8.HIGHEST + 1 + mxfp4.SCALE_BIAS)
    xs.append(mxfp4.MXTensor(x.codes, outside))
  made = [packed(m, width, -20, -6, seed=9 + i) for i, m in enumerate(outputs)]
  # Zeros, whatever the table of their scale would be.
  weights = [
    mxfp4.MXTensor(w.codes.at[5, 48:64].set(0x2A), w.scales.at[5, 3].set(0))
    for w in made
  ]
  return xs, weights


def run(xs, weights, dtype):
  units = [mxfp4_decode.float8_range(weight)[0] for weight in weights]
  how = {"dtype": dtype, "implementation": "interpret"}
  with choice.trying(choice.FLOAT8_STREAM):
    return float8_matmul_each([float8.of_tensor(x) for x in xs], weights, units, **how)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
  "rows, outputs, width, programs, dtype",
  [
    # Three programs share a tile, two of them nothing but it.
    (5, (128,), 1536, 3, jnp.float32),
    # Linears of their own inputs; ranges begin and end within tiles.
    (17, (128, 256), 1024, 5, jnp.bfloat16),
    # Two tiles of rows, for which one program takes all units of all tiles.
    (130, (128,), 512, 1, jnp.float32),
    (8, (256,), 1024, 3, jnp.float32),
    (32, (128,), 1024, 2, jnp.bfloat16),
    (64, (128, 128), 512, 2, jnp.bfloat16),
    # Tiles of 104 rows, the last of which are no rows of the inputs.
    (200, (128,), 1024, 3, jnp.float32),
    (511, (128,), 1024, 3, jnp.bfloat16),
  ],
)
def test_the_parts_of_all_programs_are_the_product(
  rows, outputs, width, programs, dtype, monkeypatch
):
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  monkeypatch.setattr(lowering, "multiprocessors", lambda: programs)
  xs, weights = operands(rows, outputs, width)
  got = run(xs, weights, dtype)
  rounding = 0.0 if dtype == jnp.float32 else 2.0**-8
  for made, x, weight in zip(got, xs, weights, strict=True):
    want, bound = exact(x, weight)
    error = np.abs(np.asarray(made, np.float64) - want)
    assert made.dtype == dtype and made.shape == want.shape
    assert (error <= bound + rounding * np.abs(want)).all()


@pytest.mark.slow
def test_linears_of_one_input_are_one_launch_and_the_input_is_shifted_once(
  monkeypatch,
):
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  monkeypatch.setattr(device, "obstacle", lambda: None)
  launched = []

  def launch(xs, tensors, units, row_units, *, dtype, interpret):
    assert len(xs) == len(row_units) and {len(unit) for unit in row_units} == {7}
    launched.append(([x.shape for x in xs], [t.shape for t in tensors]))
    return [jnp.zeros((len(xs[0]), t.shape[0]), dtype) for t in tensors]

  monkeypatch.setattr(stream_k, "float8_products", launch)
  [x], weights = operands(7, (128,), 512)[0], operands(7, (128, 256, 130), 512)[1]
  assert len(run([x] * 2, weights[:2], jnp.bfloat16)) == 2
  # The 130 outputs are not the kernel's.
  made = run([x] * 3, weights, jnp.bfloat16)
  assert [each.shape for each in made] == [(7, 128), (7, 256), (7, 130)]
  shapes = [(128, 512), (256, 512)]
  assert launched == [([(7, 512)] * 2, shapes)] * 2
  inputs = float8.of_tensor(x)
  with choice.trying(choice.FLOAT8_STREAM):
    units = [jnp.float32(2.0**-8)] * 2
    how = {"implementation": "interpret"}
    float8_matmul_each([inputs] * 2, weights[:2], units, **how)
  assert launched[2] == ([(7, 512)], shapes)
