"""What PTX instructions without memory compute, on arrays of registers.

Of the instructions that our kernels are made of; one that is not known is an error.
Floats follow the PTX manual: rounded once, to nearest with ties to even, subnormals
kept, NaN dropped by maxima. Approximate functions are exact to rounding, where a GPU's
may be off by two units.
"""

import re

import ml_dtypes
import numpy as np

BF16, F16 = ml_dtypes.bfloat16, np.float16
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def run(ptx, *operands, results=1):
  """Runs straight-line PTX, the text of an inline instruction.

  Args:
    ptx: Instructions, `$0` the result and `$1`, ... the operands.
    operands: uint32 arrays of one shape.
    results: How many results there are, before the operands.

  Returns:
    uint32, that shape; of several results, the list.
  """
  registers = {f"${i + results}": operand for i, operand in enumerate(operands)}
  value = lambda text: int(re.sub("^0f", "0x", text), 0)
  number = lambda text: np.full(operands[0].shape, value(text), np.uint32)
  for line in ptx.strip().removeprefix("{").removesuffix("}").split(";"):
    words = re.split(r"[,\s{}]+", line.strip().removesuffix("}"))
    if words[0] in ("", ".reg"):
      continue
    operation, target, *sources = words
    values = [registers[s] if s in registers else number(s) for s in sources]
    registers[target] = evaluate(operation, values)
  made = [registers[f"${i}"] for i in range(results)]
  return made if results > 1 else made[0]


def floats(bits, dtype):
  """Registers as floats of a type."""
  return np.ascontiguousarray(bits).view(dtype)


def _halves(function, dtype):
  """An operation on both halves of registers, in float64, rounded once."""

  def operate(*registers):
    wide = [floats(np.broadcast_to(r, registers[0].shape), dtype) for r in registers]
    with np.errstate(all="ignore"):
      result = function(*(w.astype(np.float64) for w in wide)).astype(dtype)
    return result.view(registers[0].dtype)

  return operate


def _float32(function):
  """An operation on float32 in float64, rounded once."""

  def operate(*registers):
    with np.errstate(all="ignore"):
      wide = [floats(r, np.float32).astype(np.float64) for r in registers]
      return function(*wide).astype(np.float32).view(np.uint32)

  return operate


def _down(a, b, c):
  """A fused multiply and add that rounds down."""
  wide = [floats(r, np.float32).astype(np.float64) for r in (a, b, c)]
  exact = wide[0] * wide[1] + wide[2]
  near = exact.astype(np.float32)
  below = np.nextafter(near, np.float32(-np.inf))
  return np.where(near > exact, below, near).view(np.uint32)


def _permute(a, b, selector):
  table = np.stack([a, b], -1).view(np.uint8).reshape(len(a), 8)
  result = np.zeros_like(a)
  for i in range(4):
    digit = (selector >> np.uint32(4 * i)) & np.uint32(15)
    byte = np.take_along_axis(table, (digit & np.uint32(7))[:, None], 1)[:, 0]
    sign = np.where(byte >> 7, 0xFF, 0).astype(np.uint8)
    byte = np.where(digit & np.uint32(8), sign, byte)
    result |= byte.astype(np.uint32) << np.uint32(8 * i)
  return result


def _byte_products(a, b, total):
  signed = lambda x: x.view(np.int8).reshape(len(x), 4).astype(np.int32)
  sums = (signed(a) * signed(b)).sum(-1, dtype=np.int32)
  return (sums + total.view(np.int32)).view(np.uint32)


def _shift(a, n, left, signed=False):
  size = a.dtype.itemsize * 8
  amount = np.minimum(n.astype(np.uint64), np.uint64(size))
  wide = a.view(_SIGNED[size]).astype(np.int64) if signed else a.astype(np.uint64)
  if size == 64 and not signed:
    safe = np.minimum(amount, np.uint64(63))
    moved = wide << safe if left else wide >> safe
    return np.where(amount > np.uint64(63), np.uint64(0), moved)
  amount = amount.astype(wide.dtype)
  return (wide << amount if left else wide >> amount).astype(a.dtype)


def _pack_float8(dtype):
  """Two float32 to two bytes; finite values saturate."""

  def operate(high, low):
    largest = float(ml_dtypes.finfo(dtype).max)
    both = [
      np.clip(floats(r, np.float32), -largest, largest).astype(dtype).view(np.uint8)
      for r in (low, high)
    ]
    return both[0].astype(np.uint16) | both[1].astype(np.uint16) << np.uint16(8)

  return operate


def _float8_of_halves(a):
  wide = np.clip(floats(a, F16).astype(np.float32), -448, 448)
  byte = wide.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
  return byte.view(np.uint16)


def _narrow(dtype):
  return lambda a: floats(a, np.float32).astype(dtype).view(np.uint16)


FUNCTIONS = {
  "add.rn.f32": _float32(np.add),
  "sub.rn.f32": _float32(np.subtract),
  "mul.rn.f32": _float32(np.multiply),
  "div.full.f32": _float32(np.divide),
  "fma.rn.f32": _float32(lambda a, b, c: a * b + c),
  "fma.rm.f32": _down,
  # NaN is dropped.
  "max.f32": _float32(np.fmax),
  "min.f32": _float32(np.fmin),
  "max.bf16x2": _halves(np.fmax, BF16),
  "min.bf16x2": _halves(np.fmin, BF16),
  "mul.rn.bf16x2": _halves(np.multiply, BF16),
  "mul.rn.bf16": _halves(np.multiply, BF16),
  "fma.rn.bf16x2": _halves(lambda a, b, c: a * b + c, BF16),
  "mul.rn.f16x2": _halves(np.multiply, F16),
  "mul.rn.f16": _halves(np.multiply, F16),
  "neg.f32": lambda a: a ^ np.uint32(1 << 31),
  # The sign of the first and the magnitude of the second.
  "copysign.f32": lambda a, b: a & np.uint32(1 << 31) | b & np.uint32((1 << 31) - 1),
  "abs.f32": lambda a: a & np.uint32((1 << 31) - 1),
  "ex2.approx.ftz.f32": _float32(
    lambda a: np.where(np.exp2(a) < 2.0**-126, 0, np.exp2(a))
  ),
  "rcp.approx.ftz.f32": _float32(
    lambda a: np.where(abs(a) > 2.0**126, np.copysign(0, a), 1 / a)
  ),
  "rsqrt.approx.f32": _float32(lambda a: 1 / np.sqrt(a)),
  "cvt.sat.f32.f32": _float32(lambda a: np.fmin(np.fmax(a, 0), 1)),
  "cvt.rzi.s16.f32": lambda a: a.view(np.float32).astype(np.int16).view(np.uint16),
  "cvt.f32.bf16": lambda a: a.astype(np.uint32) << np.uint32(16),
  "cvt.f32.f16": lambda a: floats(a, F16).astype(np.float32).view(np.uint32),
  "cvt.rn.bf16.f32": _narrow(BF16),
  "cvt.rn.f16.f32": _narrow(F16),
  "cvt.rn.bf16x2.f32": lambda a, b: (
    _narrow(BF16)(a).astype(np.uint32) << np.uint32(16) | _narrow(BF16)(b)
  ),
  "cvt.rn.satfinite.e5m2x2.f32": _pack_float8(ml_dtypes.float8_e5m2),
  "cvt.rn.satfinite.e4m3x2.f16x2": _float8_of_halves,
  "prmt.b32": _permute,
  "dp4a.s32.s32": _byte_products,
  "add.u16x2": lambda a, b: (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32),
  "min.u16x2": lambda a, b: np.minimum(a.view(np.uint16), b.view(np.uint16)).view(
    np.uint32
  ),
  "mad.lo.s32": lambda a, b, c: a * b + c,
}
_COMPARE = {
  "eq": np.equal,
  "ne": np.not_equal,
  "lt": np.less,
  "le": np.less_equal,
  "gt": np.greater,
  "ge": np.greater_equal,
  # Unordered: true of NaN, too.
  "ltu": lambda a, b: ~np.greater_equal(a, b),
  "leu": lambda a, b: ~np.greater(a, b),
  "gtu": lambda a, b: ~np.less_equal(a, b),
  "geu": lambda a, b: ~np.less(a, b),
}
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def typed(a, kind):
  """A register as `s32`, `u16`, `f32` and so on."""
  size = int(kind[1:])
  if kind[0] == "f":
    return floats(a, {16: F16, 32: np.float32}[size])
  return np.ascontiguousarray(a).view(_SIGNED[size] if kind[0] == "s" else a.dtype)


def evaluate(operation, sources):
  """An operation without memory or other threads."""
  if operation in FUNCTIONS:
    return FUNCTIONS[operation](*sources)
  name, *rest = operation.split(".")
  kind = rest[-1] if rest else ""
  match name:
    case "mov" if len(sources) == 2:
      low, high = (s.astype(np.uint32) for s in sources)
      return low | high << np.uint32(16)
    case "mov":
      return sources[0]
    case "add" | "sub":
      return sources[0] + sources[1] if name == "add" else sources[0] - sources[1]
    case "neg":
      return (~sources[0]) + sources[0].dtype.type(1)
    case "mul" if rest[0] == "lo":
      return sources[0] * sources[1]
    case "mul" if rest[0] == "hi" and kind in ("u16", "u32"):
      size = int(kind[1:])
      a, b = (s.astype(UNSIGNED[2 * size]) for s in sources)
      return (a * b >> UNSIGNED[2 * size](size)).astype(UNSIGNED[size])
    case "mul" if rest[0] == "wide":
      size = 2 * int(kind[1:])
      wide = _SIGNED[size] if kind[0] == "s" else UNSIGNED[size]
      a, b = (typed(s, kind).astype(wide) for s in sources)
      return (a * b).view(UNSIGNED[size])
    case "and" | "or" | "xor":
      return _BITS[name](*sources)
    case "shl" | "shr":
      return _shift(*sources, left=name == "shl", signed=kind[0] == "s")
    case "min" | "max":
      a, b = (typed(s, kind) for s in sources)
      return (np.minimum if name == "min" else np.maximum)(a, b).view(sources[0].dtype)
    case "setp":
      a, b = (typed(s, kind.replace("b", "u")) for s in sources)
      return _COMPARE[rest[0]](a, b)
    case "selp":
      return np.where(sources[2], sources[0], sources[1])
    case "bfe":
      a, first, count = (s.astype(np.int64) for s in sources)
      field = (a >> first) & ((1 << count) - 1)
      if kind == "s32":
        field -= np.where(field >> (count - 1), 1 << count, 0)
      return field.astype(np.uint32)
    case "cvt" if kind[0] in "su":
      # A wider register holds an operand in its lower bits.
      number = typed(sources[0].astype(UNSIGNED[int(kind[1:])]), kind)
      if rest[:-1] == ["rn", "f32"]:
        return number.astype(np.float32).view(np.uint32)
      if rest[0][0] in "su":
        size = int(rest[0][1:])
        return number.astype(_SIGNED[size]).view(UNSIGNED[size])
  raise KeyError(f"no meaning is known of {operation}")
