"""Python operators that emit LLVM instructions, so that kernels read like formulas.

A `Value` is a number or a vector of numbers in a function under construction. Each
operator emits one instruction. Nothing is reordered, contracted or assumed, so the bits
are those of the formula as written.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from mxjax.numerics.native import LANES

F32, I8, I32, I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
POINTER = ir.PointerType()
FLOATS, INTS, BYTES = (ir.VectorType(kind, LANES) for kind in (F32, I32, I8))
VECTOR_BYTES = 4 * LANES


def _operator(of_floats: str, of_ints: str) -> Callable[["Value", Any], "Value"]:
  def write(self: "Value", other: Any) -> "Value":
    name = of_floats if self.is_float else of_ints
    return self.of(getattr(self.code, name)(self.raw, self.like(other)))

  return write


def _comparison(sign: str) -> Callable[["Value", Any], "Value"]:
  def write(self: "Value", other: Any) -> "Value":
    compare = self.code.fcmp_ordered if self.is_float else self.code.icmp_signed
    return self.of(compare(sign, self.raw, self.like(other)))

  return write


class Value:
  """A value in a function under construction, with the operators of its type.

  Comparisons give truth values for `where`; a comparison with NaN is false.
  """

  def __init__(self, code: ir.IRBuilder, raw: Any) -> None:
    self.code, self.raw = code, raw

  def of(self, raw: Any) -> "Value":
    """Wraps a raw LLVM value of the same function."""
    return Value(self.code, raw)

  @property
  def is_float(self) -> bool:
    """Whether this is a float or a vector of floats."""
    kind = self.raw.type
    return getattr(kind, "element", kind) == F32

  def like(self, other: Any) -> Any:
    """Returns the raw value, converting a Python number to a constant of this type."""
    if isinstance(other, Value):
      return other.raw
    return constant(self.code, self.raw.type, other).raw

  __add__ = _operator("fadd", "add")
  __sub__ = _operator("fsub", "sub")
  __mul__ = _operator("fmul", "mul")
  __truediv__ = _operator("fdiv", "sdiv")
  __mod__ = _operator("frem", "srem")
  __and__ = _operator("and_", "and_")
  __or__ = _operator("or_", "or_")
  __lshift__ = _operator("shl", "shl")
  # Logical: the sign bit comes down as a bit. `signed_shift` keeps the sign.
  __rshift__ = _operator("lshr", "lshr")
  __lt__ = _comparison("<")
  __ge__ = _comparison(">=")
  equals = _comparison("==")

  def call(self, name: str, *others: Any) -> "Value":
    """Calls an LLVM intrinsic whose operands and result have this type."""
    return self._call(name, self.raw.type, others)

  def largest(self) -> "Value":
    """Returns the largest integer of a vector."""
    return self._call("vector.reduce.smax", self.raw.type.element, ())

  def _call(self, name: str, returns: ir.Type, others: Sequence[Any]) -> "Value":
    kind, module = self.raw.type, self.code.module
    element = getattr(kind, "element", kind)
    vector = f"v{kind.count}" if kind is not element else ""
    full = f"llvm.{name}.{vector}{'f32' if self.is_float else element}"
    operands = [self.raw, *(self.like(other) for other in others)]
    function = module.globals.get(full) or ir.Function(
      module, ir.FunctionType(returns, [kind] * len(operands)), full
    )
    return self.of(self.code.call(function, operands))

  def reinterpreted(self, kind: ir.Type) -> "Value":
    """Reinterprets the bits as another type of the same size."""
    return self.of(self.code.bitcast(self.raw, kind))

  def same(self, number: float) -> "Value":
    """Returns a constant of this value's type."""
    return constant(self.code, self.raw.type, number)

  def _vector(self, kind: ir.Type) -> ir.Type:
    return ir.VectorType(kind, self.raw.type.count)

  def bits(self) -> "Value":
    """Returns the bits of a vector of floats."""
    return self.reinterpreted(self._vector(I32))

  def floats(self) -> "Value":
    """Returns the floats with these bits."""
    return self.reinterpreted(self._vector(F32))

  def rounded_to_float(self) -> "Value":
    """Converts a vector of integers to floats."""
    return self.of(self.code.sitofp(self.raw, self._vector(F32)))

  def signed_shift(self, places: int) -> "Value":
    """Shifts integers right, keeping the sign."""
    return self.of(self.code.ashr(self.raw, self.like(places)))

  def spread(self, lanes: int = LANES) -> "Value":
    """Broadcasts a number to every lane."""
    kind, places = ir.VectorType(self.raw.type, lanes), ir.VectorType(I32, lanes)
    none = ir.Constant(kind, ir.Undefined)
    one = self.code.insert_element(none, self.raw, ir.Constant(I32, 0))
    return self.of(
      self.code.shuffle_vector(one, none, ir.Constant(places, [0] * lanes))
    )

  def narrow(self, kind: ir.Type = I32) -> "Value":
    """Truncates integers to a narrower type."""
    return self.of(self.code.trunc(self.raw, kind))

  def after(self, nbytes: "Value | int") -> "Value":
    """Returns the address `nbytes` after this one."""
    count = nbytes.raw if isinstance(nbytes, Value) else ir.Constant(I64, nbytes)
    return self.of(self.code.gep(self.raw, [count], source_etype=ir.IntType(8)))

  def load(self, kind: Any, align: int = 4) -> "Value":
    """Loads a value of type `kind` from this address."""
    return self.of(self.code.load(self.raw, typ=kind, align=align))

  def store(self, value: "Value | int", kind: Any = None, align: int = 4) -> None:
    """Stores a value, or a constant of type `kind`, at this address."""
    raw = value.raw if isinstance(value, Value) else ir.Constant(kind, value)
    self.code.store(raw, self.raw, align=align)


def where(condition: Value, yes: Value, no: Any) -> Value:
  """Selects one value or the other, lane by lane."""
  return yes.of(yes.code.select(condition.raw, yes.raw, yes.like(no)))


def constant(code: ir.IRBuilder, kind: Any, number: float) -> Value:
  """Returns a constant of type `kind`; a vector repeats the number."""
  is_vector = isinstance(kind, ir.VectorType)
  return Value(code, ir.Constant(kind, [number] * kind.count if is_vector else number))


def either(condition: Value, yes: Callable[[], Value], no: Value) -> Value:
  """Emits a branch that computes `yes` if the condition holds and else returns `no`."""
  code = condition.code
  before = code.block
  with code.if_then(condition.raw):
    # The block where `yes` ends need not be the one where it began.
    value, inside = yes(), code.block
  joined = code.phi(no.raw.type)
  for raw, block in ((no.raw, before), (value.raw, inside)):
    joined.add_incoming(raw, block)
  return no.of(joined)


def room(code: ir.IRBuilder, nbytes: int) -> Value:
  """Allocates 64-byte aligned stack memory and returns its address."""
  # In the entry block, because in a loop every turn would take more of the stack.
  with code.goto_entry_block():
    place: Any = code.alloca(ir.ArrayType(ir.IntType(8), nbytes))
    place.align = 64
  # llvmlite gives the address a typed pointer; LLVM itself has only opaque ones.
  place.type = POINTER
  return Value(code, place)


def repeat(
  start: Value,
  stop: Value | int,
  body: Callable[..., Sequence[Value]],
  *carried: Value,
  step: int = 1,
) -> list[Value]:
  """Emits a loop from `start` to `stop` that runs at least once.

  `body` maps the index and the `carried` values to the next carried values. Returns the
  carried values after the last iteration.
  """
  code = start.code
  before = code.block
  turn, done = code.append_basic_block("turn"), code.append_basic_block("done")
  code.branch(turn)
  code.position_at_end(turn)
  index, *phis = (code.phi(value.raw.type) for value in (start, *carried))
  results = body(Value(code, index), *(Value(code, phi) for phi in phis))
  next_index = Value(code, index) + step
  for phi, first, last in zip(
    (index, *phis), (start, *carried), (next_index, *results), strict=True
  ):
    phi.add_incoming(first.raw, before)
    # The body may have ended in a block of its own.
    phi.add_incoming(last.raw, code.block)
  code.cbranch((next_index < stop).raw, turn, done)
  code.position_at_end(done)
  return list(results)
