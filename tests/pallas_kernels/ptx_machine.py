"""A machine for the few PTX instructions of the kernels, on arrays of registers.

It knows 32-bit registers, and what is in them: integers, two floats of 16 bits, four of
8. Floats follow the PTX
manual: rounded once, to nearest with ties to even, subnormals kept. An instruction that
it does not know is an error.
"""

import re

import ml_dtypes
import numpy as np


def run(ptx, *operands):
  """Runs straight-line PTX.

  Args:
    ptx: Instructions, `$0` the result and `$1`, ... the operands.
    operands: uint32 arrays of one shape.

  Returns:
    uint32, that shape.
  """
  registers = {f"${i + 1}": operand for i, operand in enumerate(operands)}
  for line in ptx.strip().removeprefix("{").removesuffix("}").split(";"):
    words = re.split(r"[,\s{}]+", line.strip().removesuffix("}"))
    if words[0] in ("", ".reg"):
      continue
    operation, target, *sources = words
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    registers[target] = np.broadcast_to(
      OPERATIONS[operation](*values), operands[0].shape
    )
  return registers["$0"]


def _floats(function, dtype=ml_dtypes.bfloat16):
  """Two 16-bit operations from one in float64, rounded once."""

  def operate(*registers):
    registers = np.broadcast_arrays(*registers)
    halves = [np.ascontiguousarray(r).view(dtype) for r in registers]
    # Every exact result here has fewer bits than a float64 keeps.
    with np.errstate(invalid="ignore", over="ignore"):
      result = function(*(h.astype(np.float64) for h in halves))
      return result.astype(dtype).view(np.uint32)

  return operate


def _permute(low, high, selector):
  """Bytes of two registers by the selector's four digits."""
  table = np.stack(np.broadcast_arrays(low, high), axis=-1).view(np.uint8)
  digits = [(int(selector) >> (4 * i)) & 15 for i in range(4)]
  return np.ascontiguousarray(table[..., digits]).view(np.uint32)[..., 0]


def _to_e4m3(register):
  """Two float16 to two bytes; the values of the kernels are in range."""
  halves = np.ascontiguousarray(register).view(np.float16)
  narrow = halves.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  return np.ascontiguousarray(narrow).view(np.uint16).astype(np.uint32)


def _halves(function):
  """Two operations on unsigned 16-bit integers."""

  def operate(*registers):
    registers = np.broadcast_arrays(*registers)
    halves = [np.ascontiguousarray(r).view(np.uint16) for r in registers]
    return function(*halves).view(np.uint32)

  return operate


OPERATIONS = {
  "mov.b32": lambda a, upper=None: a if upper is None else a | (upper << 16),
  "prmt.b32": _permute,
  "and.b32": lambda a, b: a & b,
  "or.b32": lambda a, b: a | b,
  "shl.b32": lambda a, n: a << n,
  "shr.b32": lambda a, n: a >> n,
  "mul.lo.u32": lambda a, b: a * b,
  "add.u16x2": _halves(np.add),
  "min.u16x2": _halves(np.minimum),
  "mul.rn.bf16x2": _floats(np.multiply),
  "mul.rn.f16x2": _floats(np.multiply, np.float16),
  "cvt.rn.satfinite.e4m3x2.f16x2": _to_e4m3,
  "max.bf16x2": _floats(np.fmax),
  "fma.rn.bf16x2": _floats(lambda a, b, c: a * b + c),
}
