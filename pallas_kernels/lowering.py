"""Backend interface for kernels: Triton on NVIDIA GPUs, or interpret mode.

Only this file knows the backend, besides the folder `mosaic`. Compiler parameters are
always explicit, because the default backend differs between JAX versions.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from mxjax.errors import NotImplementedRefusal, ValueRefusal

T = TypeVar("T")
MULTIPROCESSORS = 132
"""Multiprocessors of an H200."""

BlockSpec = pl.BlockSpec
program_id = pl.program_id
when = pl.when
columns = pl.ds
"""A half-open range of columns: (start, size)."""


def backend() -> str:
  """Returns what compiles kernels: `triton` or `mosaic`.

  The environment variable MXJAX_PALLAS_BACKEND says it, read when a kernel is traced;
  `triton` is the default.

  Raises:
    ValueError: It names another.
  """
  name = os.environ.get("MXJAX_PALLAS_BACKEND", "triton")
  if name not in ("triton", "mosaic"):
    raise ValueRefusal(
      "MXJAX_PALLAS_BACKEND", expected="triton or mosaic", got=repr(name)
    )
  return name


def obstacle(mosaic: str | None = "it has no Mosaic form") -> str | None:
  """Returns why the chosen backend cannot make a kernel, or None.

  `mosaic` says why its Mosaic form cannot take the arguments, or None. The Triton forms
  ask for themselves.
  """
  return mosaic if backend() == "mosaic" else None


def unaddressed(*arrays: Any) -> str | None:
  """Returns why a kernel of Triton cannot address arrays of these shapes, or None.

  On an axis, places of blocks are 32-bit. So are those of elements in arrays of up to 4
  GiB, and jax (0.10, 0.11) extends them by their sign: bytes from 2 GiB on would be
  looked for before the array.
  """
  for a in arrays:
    size = math.prod(a.shape)
    is_signed = a.dtype.itemsize == 1 and 2**31 < size <= 2**32
    if is_signed or max(a.shape, default=0) >= 2**31:
      return f"places in {a.dtype}{list(a.shape)} do not fit its 32 bits"
  return None


def device_kind() -> str:
  """Returns the name of the device that computations target, such as `NVIDIA H200`."""
  device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  return (jax.devices()[0] if device is None else device).device_kind


def launch(
  kernel: Callable[..., None],
  *operands: jax.Array,
  name: str,
  grid: tuple[int, ...],
  in_specs: Sequence[BlockSpec],
  out_specs: Any,
  out_shape: Any,
  warps: int,
  stages: int = 1,
  in_place: Mapping[int, int] | None = None,
  interpret: bool = False,
) -> Any:
  """Runs a kernel over a grid; see `pl.pallas_call` for specs and shapes.

  `in_place` maps operand numbers, counted over all arrays, to outputs that reuse the
  operand's memory.

  Raises:
    NotImplementedError: An array has the sizes that `unaddressed` names.
  """
  if obstacle := unaddressed(*jax.tree.leaves((operands, out_shape))):
    raise NotImplementedRefusal(
      f"pallas_kernels.{name}",
      expected="arrays that its kernel can address",
      got=f"larger ones: {obstacle}",
      mend="pass fewer rows at once, or implementation='xla'",
    )
  call = pl.pallas_call(
    kernel,
    grid=grid,
    in_specs=in_specs,
    out_specs=out_specs,
    out_shape=out_shape,
    name=f"mxjax_{name}",
    input_output_aliases=dict(in_place or {}),
    interpret=interpret,
    compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
  )
  return call(*operands)


def with_reference(
  kernel: Callable[..., T], reference: Callable[..., T], *operands: Any
) -> T:
  """Returns `kernel(*operands)`; for a gradient, the reference runs there and back.

  A compiled kernel has no gradient. Neither function may capture traced arrays.
  """
  run = jax.custom_vjp(kernel)
  run.defvjp(lambda *given: jax.vjp(reference, *given), lambda back, given: back(given))
  result: Any = run(*operands)
  return result


def tail_mask(rows: int, tile: int, index: jax.Array) -> jax.Array | None:
  """Returns which of the `tile` rows of a tile exist; None if all tiles are full.

  `rows` counts the rows of the whole array; the result is bool `[tile]`.
  """
  if rows % tile == 0:
    return None
  return index * tile + lax.iota(jnp.int32, tile) < rows


def shares(tiles: int, steps: int, *, at_once: int = 4) -> int:
  """Returns how many programs best share the steps of each of `tiles` output tiles.

  Up to `at_once` programs a multiprocessor, as many as possible. An equal number for
  each matters first, because the launch waits for the last program.
  """
  fit = [n for n in range(1, steps + 1) if steps % n == 0]
  fit = [n for n in fit if n * tiles <= at_once * MULTIPROCESSORS] or [1]
  rounds = lambda n: -(-n * tiles // MULTIPROCESSORS)
  return max(fit, key=lambda n: (n * tiles / rounds(n), n))


def switch(index: jax.Array, branches: Sequence[Callable[[], Any]]) -> Any:
  """Runs the branch at `index`; a single branch runs without a runtime choice."""
  return branches[0]() if len(branches) == 1 else lax.switch(index, branches)


def load(ref: Any, *masks: jax.Array | None) -> jax.Array:
  """Reads a block; zeros where a mask, one for each leading axis, is False."""
  mask = _combine(masks, ref.shape)
  return ref[...] if mask is None else triton.load(ref, mask=mask, other=0)


def store(ref: Any, value: jax.Array, *masks: jax.Array | None) -> None:
  """Writes a block; nothing where a mask, one for each leading axis, is False."""
  mask = _combine(masks, value.shape)
  if mask is None:
    ref[...] = value
  else:
    triton.store(ref, value, mask=mask)


def _combine(
  masks: Sequence[jax.Array | None], shape: tuple[int, ...]
) -> jax.Array | None:
  """Combines masks of single axes into one mask of the full shape, or None."""
  result = None
  for axis, mask in enumerate(masks):
    if mask is not None:
      ones = [1] * len(shape)
      ones[axis] = -1
      wide = jnp.broadcast_to(mask.reshape(ones), shape)
      result = wide if result is None else result & wide
  return result


def by_ptx(
  ptx: str,
  meaning: Callable[..., jax.Array],
  *operands: jax.Array,
  interpret: bool,
) -> jax.Array:
  """Runs an elementwise operation written in PTX.

  `ptx` goes from the 32-bit registers `$1`, `$2`, ... to `$0`; a register holds one
  32-bit element or any two 16-bit elements, as the compiler chooses. `meaning` is the
  same operation in plain JAX, which `interpret` runs instead; a test compares the two.
  The operands and the result have one shape and width, 32 or 16 bits.
  """
  if interpret:
    return meaning(*operands)
  [result] = triton.elementwise_inline_asm(
    ptx,
    args=operands,
    constraints=",".join(["=r", *("r" for _ in operands)]),
    pack=4 // operands[0].dtype.itemsize,
    result_shape_dtypes=[jax.eval_shape(meaning, *operands)],
  )
  return result


def computed_once(x: jax.Array) -> jax.Array:
  """Returns x, an operand of several products, so that Triton computes it once.

  Triton moves the change to an operand's layout up to the loads for the first product
  only, and so computes all between twice; a maximum over one value stops it.
  """
  return jnp.max(x[..., None], axis=x.ndim)


def dot_float32(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
  """Multiplies float32 tiles on FP32 units: the default would round to TF32."""
  precision = lax.DotAlgorithmPreset.F32_F32_F32
  return triton.dot(a, b, trans_b=transpose_b, precision=precision)


def dot_bfloat16(a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
  """Multiplies bfloat16 tiles on tensor cores: exact products, float32 sums."""
  return triton.dot(a, b, trans_b=transpose_b)
