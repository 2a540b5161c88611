"""Backend interface for kernels: Triton on NVIDIA GPUs, or interpret mode.

Only this file knows the backend, besides the folder `mosaic`. Compiler parameters are
always explicit, because the default backend differs between JAX versions.
"""

import importlib
import math
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from mxjax.errors import NotImplementedRefusal
from mxjax.numerics import implementations

T = TypeVar("T")
_MULTIPROCESSORS = 132
"""Of an H200, where the target tells nothing, as in interpret mode."""

BlockSpec = pl.BlockSpec
program_id = pl.program_id
when = pl.when
columns = pl.ds
"""A half-open range of columns: (start, size)."""


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


def multiprocessors() -> int:
  """Returns how many multiprocessors the device has that computations target."""
  return implementations.target().multiprocessors or _MULTIPROCESSORS


def is_before(capability: implementations.Capability) -> bool:
  """Returns whether computations target a GPU that is older than a capability.

  Where a kernel is only interpreted, none is.
  """
  return (implementations.target().capability or capability) < capability


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
    compiler_params=_parameters(num_warps=warps, num_stages=stages),
  )
  return call(*operands)


def _without_warning() -> Any:
  """Returns compiler parameters of Triton whose kernels are lowered without a warning.

  jax 0.11 warns that it will remove Triton whenever a program with a kernel is lowered,
  which is long after `launch`. It finds what lowers a kernel by the type of the
  kernel's parameters, so a type of our own silences that warning for our kernels alone.
  """
  from jax._src.pallas import core

  try:  # Loading it registers the rule.
    importlib.import_module("jax._src.pallas.triton.pallas_call_registration")
  except ImportError:  # A jaxlib that cannot lower for GPUs.
    return triton.CompilerParams
  rule: Any = core.get_lowering_rule(triton.CompilerParams, "gpu")
  # What warnings are shown is a state of the process, not of a thread.
  one_at_a_time = threading.Lock()

  class Parameters(triton.CompilerParams):
    pass

  def lower(*operands: Any, **keywords: Any) -> Any:
    with one_at_a_time, warnings.catch_warnings():
      deprecated = "The Pallas Triton backend is deprecated"
      warnings.filterwarnings("ignore", deprecated, DeprecationWarning)
      return rule(*operands, **keywords)

  core.register_lowering_rule(Parameters, lower, "gpu")
  return Parameters


# Once, because each call makes a type of its own and registers a rule for it.
_parameters = _without_warning()


def with_reference(
  kernel: Callable[..., T], reference: Callable[..., T], *operands: Any
) -> T:
  """Returns `kernel(*operands)`; for a gradient, the reference runs there and back.

  A compiled kernel has no gradient. Neither function may capture traced arrays.
  """
  run = jax.custom_vjp(kernel)
  # `jax.vjp` gives what a forward rule has to: the result, and what goes back, which is
  # a pytree itself.
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
  # Divisors alone, so that every program has as many steps.
  fit = [n for n in range(1, steps + 1) if steps % n == 0]
  fit = [n for n in fit if n * tiles <= at_once * multiprocessors()] or [1]
  # A round is one program on each multiprocessor; the last may be partly empty.
  rounds = lambda n: -(-n * tiles // multiprocessors())
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
    # Elements that fill a 32-bit register.
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
