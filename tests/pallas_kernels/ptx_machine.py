"""A machine for the few PTX instructions of the kernels, on arrays of registers.

It knows 32-bit registers, and registers that hold two bfloat16. Floats follow the PTX
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
    words = re.split(r"[,\s]+", line.strip())
    if words[0] in ("", ".reg"):
      continue
    operation, target, *sources = words
    values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
    registers[target] = np.broadcast_to(
      OPERATIONS[operation](*values), operands[0].shape
    )
  return registers["$0"]


def _floats(function):
  """Two bfloat16 operations from one in float64, rounded once."""

  def operate(*registers):
    registers = np.broadcast_arrays(*registers)
    halves = [np.ascontiguousarray(r).view(ml_dtypes.bfloat16) for r in registers]
    # Every exact result here has fewer bits than a float64 keeps.
    with np.errstate(invalid="ignore", over="ignore"):
      result = function(*(h.astype(np.float64) for h in halves))
      return result.astype(ml_dtypes.bfloat16).view(np.uint32)

  return operate


def _halves(function):
  """Two operations on unsigned 16-bit integers."""

  def operate(*registers):
    registers = np.broadcast_arrays(*registers)
    halves = [np.ascontiguousarray(r).view(np.uint16) for r in registers]
    return function(*halves).view(np.uint32)

  return operate


OPERATIONS = {
  "mov.b32": lambda a: a,
  "and.b32": lambda a, b: a & b,
  "or.b32": lambda a, b: a | b,
  "shl.b32": lambda a, n: a << n,
  "shr.b32": lambda a, n: a >> n,
  "mul.lo.u32": lambda a, b: a * b,
  "add.u16x2": _halves(np.add),
  "min.u16x2": _halves(np.minimum),
  "mul.rn.bf16x2": _floats(np.multiply),
  "max.bf16x2": _floats(np.fmax),
  "fma.rn.bf16x2": _floats(lambda a, b, c: a * b + c),
}
