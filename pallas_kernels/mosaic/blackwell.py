"""Native products of MXFP4 operands on Blackwell (sm_100a), in Mosaic GPU; never run.

The tensor cores take packed codes and E8M0 scales of 32 as they are: nothing is
decoded. A program has one output tile. One warp copies operands by TMA, another copies
their scales on to tensor memory and starts the products; then the whole warp group
stores the sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mxjax.numerics import mxfp4
from mxjax.pallas_kernels.mosaic import device
from mxjax.pallas_kernels.mosaic.device import gpu

SIZE, COLUMNS, STAGES = 128, 256, 4
"""Rows and outputs of a tile, columns of a step, and steps in flight."""
_SCALES = 4
"""Scales of a row that lie together, those of 128 columns."""


def scale_tiles(scales: jax.Array) -> jax.Array:
  """Arranges scale bytes uint8 `[n, d / 32]` as the tensor cores read them.

  Returns `[n / 128, d / 128, 32, 16]`: of 128 rows and four scales each, byte 4 i + j
  of row r is scale j of row r + 32 i (PTX ISA, tcgen05.mma scale factor layout).
  """
  rows, width = scales.shape
  parts = scales.reshape(rows // SIZE, 4, 32, width // _SCALES, _SCALES)
  tiles = parts.transpose(0, 3, 2, 1, 4)
  return tiles.reshape(rows // SIZE, width // _SCALES, 32, 16)


def _copy(refs: dict[str, Any], s: dict[str, Any], steps: int) -> None:
  """Copies both operands' codes and scales, step by step."""
  count = COLUMNS // mxfp4.BLOCK_SIZE // _SCALES

  def step(k: jax.Array, carry: None) -> None:
    slot = lax.rem(k, STAGES)

    @pl.when(k >= STAGES)
    def _() -> None:
      gpu.barrier_wait(s["consumed"].at[slot])

    for name, axis in (("x", "row"), ("w", "output")):
      tile = lax.axis_index(axis)
      rows, columns = pl.ds(tile * SIZE, SIZE), pl.ds(k * COLUMNS, COLUMNS)
      scales = refs[f"{name}_scales"].at[tile, pl.ds(k * count, count)]
      arrived = s["arrived"].at[slot]
      gpu.copy_gmem_to_smem(refs[name].at[rows, columns], s[name].at[slot], arrived)
      gpu.copy_gmem_to_smem(scales, s[f"{name}_scales"].at[slot, 0], arrived)
    return carry

  lax.fori_loop(0, steps, step, None)


def _multiply(s: dict[str, Any], steps: int) -> None:
  """Starts the products of each step, with their scales."""

  def step(k: jax.Array, carry: None) -> None:
    slot = lax.rem(k, STAGES)
    gpu.barrier_wait(s["arrived"].at[slot])
    for name in ("x", "w"):
      scales = s[f"{name}_scales"].at[slot]
      gpu.async_copy_scales_to_tmem(scales, s[f"{name}_scales_tmem"])
    gpu.tcgen05_mma(
      s["acc"],
      s["x"].at[slot],
      s["w"].at[slot].T,
      a_scale=s["x_scales_tmem"],
      b_scale=s["w_scales_tmem"],
      accumulate=k > 0,
      barrier=s["consumed"].at[slot],
    )
    return carry

  lax.fori_loop(0, steps, step, None)
  gpu.tcgen05_commit_arrive(s["done"])


def _kernel(refs: dict[str, Any], s: dict[str, Any], steps: int) -> None:
  @pl.core_map(gpu.WarpMesh(axis_name="warp"))
  def _() -> None:
    warp = lax.axis_index("warp")

    @pl.when(warp == 0)
    def _() -> None:
      _copy(refs, s, steps)

    @pl.when(warp == 1)
    def _() -> None:
      _multiply(s, steps)

  gpu.barrier_wait(s["done"])
  s["out"][...] = gpu.async_load_tmem(s["acc"]).astype(refs["out"].dtype)
  gpu.commit_smem()
  rows, outputs = (
    pl.ds(lax.axis_index(axis) * SIZE, SIZE) for axis in ("row", "output")
  )
  gpu.copy_smem_to_gmem(s["out"], refs["out"].at[rows, outputs])
  gpu.wait_smem_to_gmem(0)


def _scratch(dtype: jax.typing.DTypeLike) -> dict[str, Any]:
  """Returns the memory of a program."""
  blocks = COLUMNS // mxfp4.BLOCK_SIZE
  e8m0 = jnp.float8_e8m0fnu
  ordered = {"orders_tensor_core": True}
  # A row of a step is 128 bytes, twice as many elements.
  swizzled = gpu.TilingTransform((8, COLUMNS)), gpu.SwizzleTransform(128)
  codes = gpu.SMEM((STAGES, SIZE, COLUMNS), jnp.float4_e2m1fn, transforms=swizzled)
  scales = gpu.SMEM((STAGES, 1, blocks // _SCALES, 32, 16), e8m0)
  layout = gpu.TMEMLayout.SCALES_LAYOUT
  return {
    "x": codes,
    "w": codes,
    "x_scales": scales,
    "w_scales": scales,
    "x_scales_tmem": gpu.TMEM((SIZE, blocks), e8m0, layout=layout),
    "w_scales_tmem": gpu.TMEM((SIZE, blocks), e8m0, layout=layout),
    "acc": gpu.TMEM((SIZE, SIZE), jnp.float32),
    "out": device.tile(SIZE, SIZE, dtype),
    "arrived": gpu.Barrier(num_arrivals=4, num_barriers=STAGES),
    "consumed": gpu.Barrier(num_barriers=STAGES, **ordered),
    "done": gpu.Barrier(**ordered),
  }


def obstacle(rows: int, width: int, outputs: int) -> str | None:
  """Returns why the kernel cannot multiply these shapes, or None."""
  if rows % SIZE or outputs % SIZE or width % COLUMNS:
    wanted = f"rows and outputs in multiples of {SIZE} and widths of {COLUMNS}"
    return f"Blackwell's Mosaic form takes {wanted}, got {[rows, width, outputs]}"
  return device.obstacle()


def product(
  x: mxfp4.MXTensor, weight: mxfp4.MXTensor, *, dtype: jax.typing.DTypeLike
) -> jax.Array:
  """Multiplies packed x `[n, d]` by a packed weight `[m, d]` on tensor cores."""
  (rows, width), outputs = x.shape, weight.shape[0]
  inputs = {}
  for name, tensor in (("x", x), ("w", weight)):
    pairs = lax.bitcast_convert_type(tensor.codes, jnp.float4_e2m1fn)
    inputs[name] = pairs.reshape(tensor.shape)
    tiles = scale_tiles(tensor.scales)
    inputs[f"{name}_scales"] = lax.bitcast_convert_type(tiles, jnp.float8_e8m0fnu)
  names = [*inputs, "out"]

  def mxjax_mxfp4_product(*refs: Any, **scratch: Any) -> None:
    _kernel(dict(zip(names, refs, strict=True)), scratch, width // COLUMNS)

  call = gpu.kernel(
    mxjax_mxfp4_product,
    out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
    scratch_types=_scratch(dtype),
    grid=(rows // SIZE, outputs // SIZE),
    grid_names=("row", "output"),
  )
  return call(*inputs.values())
