"""What the Mosaic GPU kernels share: versions, PTX on registers, memory, products.

Mosaic GPU cannot change the width of elements in registers, gather, or read the two
elements of one register. `by_ptx` and `take` add that. Each has its meaning in plain
JAX, which interpret mode runs instead.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu

from mxjax.numerics import implementations, mxfp4
from mxjax.pallas_kernels import codec, pairs

gpu: Any = mosaic_gpu
"""The API, untyped: it differs between versions of jax."""
HOPPER = (9, 0)
"""The compute capability whose matrix instructions, wgmma, these kernels use."""


def obstacle() -> str | None:
  """Returns why no kernel can be made here, or None; no other file knows versions."""
  has_interpreter = hasattr(mosaic_gpu, "InterpretGPUParams")
  if has_interpreter and "out_type" in inspect.signature(gpu.kernel).parameters:
    return None
  return f"Mosaic GPU kernels need jax 0.11 or newer, got {jax.__version__}"


def load(ref: Any, layout: Any) -> jax.Array:
  """Reads a reference in a layout, whatever instructions that takes."""
  index = inspect.signature(gpu.load).parameters["idx"]
  # jax 0.10 demands an index, and 0.11 deprecates it.
  where = ((),) if index.default is inspect.Parameter.empty else ()
  return gpu.load(ref, *where, layout=layout, optimized=False)


def compile_obstacle() -> str | None:
  """Returns why no kernel can be compiled here, or None.

  jax 0.10 compiles what uses `load` of this file, and interprets nothing.
  """
  if "out_type" in inspect.signature(gpu.kernel).parameters:
    return None
  return f"Mosaic GPU kernels need jax 0.10.2 or newer, got {jax.__version__}"


def hopper_obstacle() -> str | None:
  """Returns why no kernel with Hopper's matrix instructions can run, or None."""
  if implementations.target().capability != HOPPER:
    return "its Mosaic form uses matrix instructions that only Hopper, 9.0, has"
  return obstacle()


def mode(interpret: bool) -> Any:
  """Returns the argument `interpret` of a kernel."""
  return gpu.InterpretGPUParams() if interpret else None


def words_layout() -> Any:
  """Returns the layout of words `[64, n]` that belongs to `WGMMA` and `WGMMA_8BIT`.

  A thread has the words whose elements it has in those layouts: two elements a word in
  `WGMMA`, four in `WGMMA_8BIT`. The registers come in the same order.
  """
  tiling = gpu.Tiling(((64, 4), (16, 4), (8, 4), (1,)))
  keywords = {"warp_dims": (-7,), "lane_dims": (-3, -2), "vector_dim": -1}
  return gpu.Layout.TILED(tiling, **keywords)


def by_ptx(
  ptx: str,
  meaning: Callable[..., jax.Array],
  *operands: jax.Array,
  layouts: Sequence[Any],
  layout: Any,
  interpret: bool,
) -> jax.Array:
  """Runs PTX once for every register of the result.

  `ptx` goes from the 32-bit registers `$1`, `$2`, ... of the operands to `$0`: two for
  a register of two 32-bit elements, one extended by zeros for a narrow one; a narrow
  result is cut. `layouts` are those of the operands and `layout` that of the result;
  their registers correspond in order. `meaning` is the same operation in plain JAX.
  """
  if interpret:
    return meaning(*operands)
  like = jax.eval_shape(meaning, *operands)
  result = gpu.ShapeDtypeStruct(like.shape, like.dtype, layout=layout)

  @gpu.inline_mgpu(arg_types=tuple(layouts), return_type=result)
  def emit(context: Any, *arrays: Any) -> Any:
    return _map_registers(ptx, arrays, result)

  return emit(*operands)


def halves_by_ptx(
  ptx: str,
  meaning: Callable[..., jax.Array],
  words: jax.Array,
  *tables: jax.Array,
  interpret: bool,
) -> jax.Array:
  """Runs PTX that makes two registers of bytes from every 32-bit word of a thread.

  A thread has four neighbouring words of each of its rows, int32 `[64, 16]` in
  `WGMMA_8BIT`, and for the four one element of each table, int32 `[64, 4]` in
  `words_layout`. `ptx` goes from a word, `$2`, and its table elements, `$3` and on, to
  `$0` and `$1`, which it writes last. The result has 128 bytes a row in `WGMMA_8BIT`,
  where a thread's bytes are sixteen columns apart: the threads' n-th registers follow
  each other. `meaning` is the same operation in plain JAX.
  """
  if interpret:
    return meaning(words, *tables)
  like = jax.eval_shape(meaning, words, *tables)
  layout = gpu.Layout.WGMMA_8BIT
  result = gpu.ShapeDtypeStruct(like.shape, like.dtype, layout=layout)
  layouts = layout, *[words_layout()] * len(tables)

  @gpu.inline_mgpu(arg_types=layouts, return_type=result)
  def emit(context: Any, wide: Any, *narrow: Any) -> Any:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    word = ir.IntegerType.get_signless(32)
    pair = llvm.StructType.get_literal([word, word])
    kind = layout.to_mgpu().registers_element_type(
      mgpu.utils.dtype_to_ir_type(result.dtype)
    )
    # Without an early clobber a result may share a register with an operand: hence
    # `ptx` writes results last.
    constraints = ",".join(["=r", "=r", *["r"] * (1 + len(narrow))])
    made: list[list[Any]] = []
    sources = [wide, *narrow]
    for registers in zip(*(array.registers.flat for array in sources), strict=True):
      whole, *elements = registers
      elements = [mgpu.utils.bitcast(element, word) for element in elements]
      made.append([])
      for place in range(4):
        operands = [vector.extract(whole, [], [place]), *elements]
        both: Any = llvm.inline_asm(pair, operands, ptx, constraints)
        for half in range(2):
          part = llvm.extractvalue(word, both, [half])
          made[-1].append(mgpu.utils.bitcast(part, kind))
    shape = layout.to_mgpu().registers_shape(result.shape)
    # The thread's rows come last in the order of registers.
    inner = [register for each in zip(*made, strict=True) for register in each]
    registers = np.empty(len(inner), object)
    registers[:] = inner
    return mgpu.FragmentedArray(
      _registers=registers.reshape(shape),
      _layout=layout.to_mgpu(),
      _is_signed=mgpu.utils.is_signed(result.dtype),
    )

  return emit(words, *tables)


def on_pairs(
  ptx: str, meaning: Callable[..., jax.Array], *operands: jax.Array, **keywords: Any
) -> jax.Array:
  """Runs PTX of `pairs.py` by `by_ptx`, on elements `[64, 32]` and words `[64, 16]`."""
  is_whole = [operand.shape[1] == mxfp4.BLOCK_SIZE for operand in operands]
  words = words_layout()
  layouts = [gpu.Layout.WGMMA if whole else words for whole in is_whole]
  return by_ptx(ptx, meaning, *operands, layouts=layouts, **keywords)


def words(x: jax.Array, *, interpret: bool) -> jax.Array:
  """Views bfloat16 `[n, 32]` as words `[n, 16]`; no register changes."""
  cast = lambda x: lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.int32)
  keywords = {"layout": words_layout(), "interpret": interpret}
  return on_pairs("mov.b32 $0, $1;", cast, x, **keywords)


def block_exponents(
  x: jax.Array, *, rounds_up: bool = False, interpret: bool
) -> jax.Array:
  """Returns the exponents of blocks, int32 `[n]`, from bfloat16 `[n, 32]`.

  Two magnitudes are compared at once, and NaN wins.
  """
  keywords = {"layout": gpu.Layout.WGMMA, "interpret": interpret}
  size = on_pairs(pairs.SIZE_PTX, jnp.abs, x, **keywords)
  largest = codec.bits(jnp.max(size, axis=1).astype(jnp.float32))
  return codec.block_exponent(largest, rounds_up=rounds_up)


def _map_registers(ptx: str, arrays: Sequence[Any], result: Any) -> Any:
  """Emits the inline assembly of `by_ptx`."""
  from jax.experimental.mosaic import gpu as mgpu
  from jaxlib.mlir import ir
  from jaxlib.mlir.dialects import arith, llvm, vector

  integer, utils = ir.IntegerType.get_signless, mgpu.utils

  def parts(register: Any) -> list[Any]:
    bits = utils.bitwidth(register.type)
    if bits < 32:
      return [arith.extui(integer(32), utils.bitcast(register, integer(bits)))]
    pair = utils.bitcast(register, ir.VectorType.get((bits // 32,), integer(32)))
    return [vector.extract(pair, [], [i]) for i in range(bits // 32)]

  layout = result.layout.to_mgpu()
  kind = layout.registers_element_type(utils.dtype_to_ir_type(result.dtype))
  bits = utils.bitwidth(kind)
  registers = np.empty(layout.registers_shape(result.shape), object)
  sources = zip(*(array.registers.flat for array in arrays), strict=True)
  for place, source in zip(np.ndindex(registers.shape), sources, strict=True):
    operands = [word for register in source for word in parts(register)]
    constraints = ",".join(["=r", *("r" for _ in operands)])
    word: Any = llvm.inline_asm(integer(32), operands, ptx, constraints)
    word = word if bits == 32 else arith.trunci(integer(bits), word)
    registers[place] = utils.bitcast(word, kind)
  signed = utils.is_signed(result.dtype)
  return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def take(ref: Any, index: jax.Array, *, layout: Any, interpret: bool) -> jax.Array:
  """Reads `ref[index]` from a vector in global memory, in the shape of the index."""
  if interpret:
    return ref[...][index]
  result = gpu.ShapeDtypeStruct(index.shape, ref.dtype, layout=layout)

  @gpu.inline_mgpu(arg_types=(gpu.RefType(), layout), return_type=result)
  def emit(context: Any, memory: Any, places: Any) -> Any:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref

    def read(place: Any, _: Any) -> Any:
      return memref.load(memory, [arith.index_cast(ir.IndexType.get(), place)])

    signed = mgpu.utils.is_signed(result.dtype)
    return places.foreach(read, create_array=True, is_signed=signed)

  return emit(ref, index)


def take_bytes(
  ref: Any, place: jax.Array, *, layout: Any, interpret: bool
) -> jax.Array:
  """Reads elements of one byte of an array in global memory, in the shape of `place`.

  `place` counts elements over all of the array. Integers come as int32, and float8,
  which is E5M2, as float32.
  """
  is_float = jnp.issubdtype(ref.dtype, jnp.floating)
  wide = jnp.float32 if is_float else jnp.int32
  if interpret:
    return ref[...].reshape(-1)[place].astype(wide)
  result = gpu.ShapeDtypeStruct(place.shape, wide, layout=layout)

  @gpu.inline_mgpu(arg_types=(gpu.RefType(), layout), return_type=result)
  def emit(context: Any, memory: Any, places: Any) -> Any:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    byte, half, word = (ir.IntegerType.get_signless(n) for n in (8, 16, 32))
    base = mgpu.utils.memref_ptr(memory)

    def read(place: Any, _: Any) -> Any:
      made = llvm.load(byte, mgpu.utils.getelementptr(base, [place], byte))
      if not is_float:
        return arith.extui(word, made)
      # The byte is the upper half of a float16.
      upper = arith.shli(arith.extui(half, made), mgpu.utils.c(8, half))
      narrow = arith.bitcast(ir.F16Type.get(), upper)
      return arith.extf(ir.F32Type.get(), narrow)

    signed = mgpu.utils.is_signed(result.dtype)
    return places.foreach(read, create_array=True, is_signed=signed)

  return emit(ref, place)


def put(
  ref: Any, place: jax.Array, value: jax.Array, *, layout: Any, interpret: bool
) -> None:
  """Writes elements of an array in memory without transforms, where `place` is not < 0.

  `place` counts elements over all of the array; both arrays are in `layout`.
  """
  if interpret:
    flat = ref[...].reshape(-1)
    # What is beyond the end is dropped.
    where = jnp.where(place < 0, len(flat), place)
    ref[...] = flat.at[where].set(value, mode="drop").reshape(ref.shape)
    return

  @gpu.inline_mgpu(arg_types=(gpu.RefType(), layout, layout))
  def emit(context: Any, memory: Any, places: Any, values: Any) -> None:
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    word = ir.IntegerType.get_signless(32)
    base, zero = mgpu.utils.memref_ptr(memory), mgpu.utils.c(0, word)
    bits = ir.IntegerType.get_signless(mgpu.utils.bitwidth(values.mlir_dtype))
    registers = zip(places.registers.flat, values.registers.flat, strict=True)
    for at, made in registers:
      shape = ir.VectorType(at.type).shape if "vector" in str(at.type) else [1]
      wide = ir.VectorType.get(shape, word)
      narrow = ir.VectorType.get(shape, bits)
      at, made = mgpu.utils.bitcast(at, wide), mgpu.utils.bitcast(made, narrow)
      for i in range(shape[0]):
        place = vector.extract(at, [], [i])
        target = mgpu.utils.getelementptr(base, [place], bits)
        exists = arith.cmpi(arith.CmpIPredicate.sge, place, zero)
        with mgpu.utils.when(exists):
          llvm.store(vector.extract(made, [], [i]), target)

  emit(ref, place, value)


def fence(*, interpret: bool) -> None:
  """Orders a thread's stores to global memory and copies by TMA, its own or others'.

  A copy belongs to another proxy, which a signal between programs does not order.
  """
  if interpret:
    return

  @gpu.inline_mgpu()
  def emit(context: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    nothing = ir.Type.parse("!llvm.void")
    # Without side effects the compiler would drop what gives no result.
    llvm.inline_asm(nothing, [], "fence.proxy.async.global;", "", has_side_effects=True)

  emit()


def tile(
  rows: int, columns: int, dtype: jax.typing.DTypeLike, *leading: int, swizzle: int = 0
) -> Any:
  """Returns shared memory `[*leading, rows, columns]` for copies and products.

  `swizzle` is the bytes of a row that stay together, 32, 64 or 128; by default as many
  as a row has.
  """
  size = jnp.dtype(dtype).itemsize
  swizzle = swizzle or min(128, columns * size)
  # Eight rows of a swizzle's bytes are what copies and matrix instructions address.
  transforms = gpu.TilingTransform((8, swizzle // size)), gpu.SwizzleTransform(swizzle)
  return gpu.SMEM((*leading, rows, columns), dtype, transforms=transforms)


def in_eights(x: jax.Array) -> jax.Array:
  """Appends rows of zeros to `[..., n, d]` up to a multiple of 8.

  The copy engine addresses tiles of 8 rows, so that every start must be a multiple.
  """
  extra = -x.shape[-2] % 8
  none = ((0, 0, 0),)
  return lax.pad(
    x, jnp.zeros((), x.dtype), none * (x.ndim - 2) + ((0, extra, 0), *none)
  )


def multiply(acc: Any, a: jax.Array, b: Any, stage: Any) -> None:
  """Starts `acc += a @ b` with a in registers and b in shared memory.

  Interpret mode takes no operand from registers: it goes through the memory `stage`,
  which is None otherwise.
  """
  if stage is None:
    gpu.wgmma(acc, a, b)
  else:
    stage[...] = a
    gpu.wgmma(acc, stage, b)
