"""Machine code, and custom calls for XLA:CPU, run in parallel on XLA's thread pool.

A kernel is divided into parts that may run concurrently and in any order. The calling
thread asks the pool for helpers and takes parts itself. It waits only for parts that
have started, never for helpers, so a pool whose threads are all busy costs only speed.

The constants below are field offsets in XLA's C interface: `xla/ffi/api/c_api.h`, major
version 0, installed by jaxlib. The order of fields is kept from version to version.
"""

import ctypes
import platform
from collections.abc import Callable, Iterable
from typing import Any

import jax
from llvmlite import binding as llvm
from llvmlite import ir

from mxjax.numerics.native.values import I32, I64, POINTER, Value, constant, room

# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 8, 16, 24, 72, 112
# XLA_FFI_Buffer
_DATA, _DIMENSIONS = 24, 40
# XLA_FFI_Metadata_Extension, and the version inside XLA_FFI_Metadata
_METADATA, _MAJOR, _MINOR, _TRAITS = 24, 24, 28, 32
# XLA_FFI_Api
_ERROR_DESTROY, _POOL_SCHEDULE = 64, 136
_VERSION = 0, 1

# State shared by the threads of one call; the last thread to leave frees it.
_PARTS, _NEXT, _FINISHED, _USERS, _FRAME, _STATE_BYTES = 0, 8, 16, 24, 32, 40

Part = Callable[[Value, Value], None]
"""Emits the code of one part, given the call frame and the index of the part."""

Count = Callable[[Value], Value]
"""Emits the code that returns the number of parts, given the call frame."""


def operand(frame: Value, index: int) -> Value:
  """Returns the address of an operand's values; call it inside a part."""
  return _buffer(frame, _ARGUMENTS, index).after(_DATA).load(POINTER)


def result(frame: Value, index: int) -> Value:
  """Returns the address of a result's values; call it inside a part."""
  return _buffer(frame, _RESULTS, index).after(_DATA).load(POINTER)


def dimension(frame: Value, index: int, axis: int) -> Value:
  """Returns the size of an operand's axis."""
  sizes = _buffer(frame, _ARGUMENTS, index).after(_DIMENSIONS).load(POINTER)
  return sizes.after(8 * axis).load(I64)


def _buffer(frame: Value, which: int, index: int) -> Value:
  return frame.after(which).load(POINTER).after(8 * index).load(POINTER)


def _function(
  module: ir.Module, name: str, returns: ir.Type, *takes: ir.Type
) -> ir.Function:
  known = module.globals.get(name)
  return known or ir.Function(module, ir.FunctionType(returns, takes), name)


def _begin(
  module: ir.Module, name: str, returns: ir.Type, *takes: ir.Type
) -> tuple[ir.IRBuilder, list[Value]]:
  function = _function(module, name, returns, *takes)
  code = ir.IRBuilder(function.append_basic_block("entry"))
  return code, [Value(code, argument) for argument in function.args]


def _add(address: Value, number: int, ordering: str) -> Value:
  """Adds to a shared number atomically and returns its previous value."""
  raw = ir.Constant(I64, number)
  return address.of(address.code.atomic_rmw("add", address.raw, raw, ordering))


def _write_leave(module: ir.Module) -> None:
  code, (state,) = _begin(module, "leave", ir.VoidType(), POINTER)
  # Whoever takes the count to zero frees what the others used before they left.
  users = _add(state.after(_USERS), -1, "acq_rel")
  with code.if_then(users.equals(1).raw):
    _call(state, "free")
  code.ret_void()


def _write_work(module: ir.Module, name: str, part: Part) -> None:
  """Emits a loop that takes parts until none is left."""
  code, (state,) = _begin(module, f"{name}.work", ir.VoidType(), POINTER)
  # A helper may begin after the call has ended. It then finds no part left, and leaves
  # without reading the frame, which is gone.
  parts = state.after(_PARTS).load(I64, 8)
  frame = state.after(_FRAME).load(POINTER, 8)
  take, some, none = (code.append_basic_block(b) for b in ("take", "some", "none"))
  code.branch(take)
  code.position_at_end(take)
  # Each index is given once; nothing is read by way of it, so no order is needed.
  index = _add(state.after(_NEXT), 1, "monotonic")
  code.cbranch((index < parts).raw, some, none)
  code.position_at_end(some)
  part(frame, index)
  # Whoever sees this count, by the acquire in `_wait`, sees the part's results.
  _add(state.after(_FINISHED), 1, "release")
  code.branch(take)
  code.position_at_end(none)
  code.ret_void()


def _write_help(module: ir.Module, name: str) -> None:
  code, (state,) = _begin(module, f"{name}.help", ir.VoidType(), POINTER)
  for step in (f"{name}.work", "leave"):
    _call(state, step)
  code.ret_void()


def _call(state: Value, name: str) -> None:
  """Calls a function that takes the state and returns nothing."""
  function = _function(state.code.module, name, ir.VoidType(), POINTER)
  state.code.call(function, [state.raw])


def _ask(api: Value, place: int, record: Value) -> Value:
  """Calls a function of XLA's interface and returns its error, or null."""
  signature = ir.FunctionType(POINTER, [POINTER])
  function = api.after(place).load(signature.as_pointer(), 8)
  return api.of(api.code.call(function.raw, [record.raw]))


def _fill(record: Value, *fields: Value) -> None:
  """Fills an argument struct of XLA's interface: size, null extension, then fields."""
  record.store(16 + 8 * len(fields), I64, 8)
  record.after(8).store(0, I64, 8)
  for i, field in enumerate(fields):
    record.after(16 + 8 * i).store(field, align=8)


def _hire(api: Value, frame: Value, state: Value, task: Value) -> None:
  """Asks the pool for one helper; without a pool, the call goes on without one."""
  code = api.code
  # Counted before it is asked for: it may leave before the request returns.
  _add(state.after(_USERS), 1, "monotonic")
  # Size, extension and three fields of eight bytes.
  record = room(code, 40)
  _fill(record, frame.after(_CONTEXT).load(POINTER, 8), task, state)
  error = _ask(api, _POOL_SCHEDULE, record)
  with code.if_then(code.icmp_unsigned("!=", error.raw, ir.Constant(POINTER, None))):
    _fill(record, error)
    _ask(api, _ERROR_DESTROY, record)
    _call(state, "leave")


def _write_entry(module: ir.Module, name: str, count: Count, helpers: int) -> None:
  """Emits the entry point, which reports its version on request or runs the kernel."""
  code, (frame,) = _begin(module, name, POINTER, POINTER)
  null = ir.Constant(POINTER, None)
  # XLA first calls a kernel for its version, with an extension and without operands.
  extension = frame.after(_EXTENSION).load(POINTER, 8)
  with code.if_then(code.icmp_unsigned("!=", extension.raw, null)):
    metadata = extension.after(_METADATA).load(POINTER, 8)
    for place, number in zip((_MAJOR, _MINOR, _TRAITS), (*_VERSION, 0), strict=True):
      metadata.after(place).store(number, I32)
    code.ret(null)
  parts = count(frame)
  state = _new_state(frame, parts)
  api = frame.after(_API).load(POINTER, 8)
  task = frame.of(_function(module, f"{name}.help", ir.VoidType(), POINTER))
  for helper in range(helpers):
    # The caller takes a part, so helpers beyond the other parts would find none.
    with code.if_then((constant(code, I64, helper + 1) < parts).raw):
      _hire(api, frame, state, task)
  _call(state, f"{name}.work")
  _wait(state, parts)
  _call(state, "leave")
  code.ret(null)


def _new_state(frame: Value, parts: Value) -> Value:
  """Allocates the shared state of one call, with one user and no part taken."""
  # Not on the stack, because a late helper reads it after the call has returned.
  allocate = _function(frame.code.module, "malloc", POINTER, I64)
  size = ir.Constant(I64, _STATE_BYTES)
  state = frame.of(frame.code.call(allocate, [size]))
  for place, value in ((_PARTS, parts), (_FRAME, frame)):
    state.after(place).store(value, align=8)
  for place, number in ((_NEXT, 0), (_FINISHED, 0), (_USERS, 1)):
    state.after(place).store(number, I64, 8)
  return state


def _wait(state: Value, parts: Value) -> None:
  """Yields the processor until all parts are finished."""
  code = state.code
  wait, check, done = (code.append_basic_block(b) for b in ("wait", "check", "done"))
  code.branch(check)
  code.position_at_end(wait)
  code.call(_function(code.module, "sched_yield", I32), [])
  code.branch(check)
  code.position_at_end(check)
  address = state.after(_FINISHED).raw
  finished = state.of(code.load_atomic(address, "acquire", 8, typ=I64))
  code.cbranch((finished < parts).raw, wait, done)
  code.position_at_end(done)


def multiplies_and_adds_at_once() -> bool:
  """Returns whether the processor has fused multiply-add, which old x86 ones lack."""
  # Without the instruction, LLVM calls a function of the C library for each one.
  features = llvm.get_host_cpu_features()
  return platform.machine() not in ("x86_64", "AMD64") or bool(features.get("fma"))


def compile_module(source: str, names: Iterable[str]) -> dict[str, int]:
  """Compiles LLVM IR text into this process and returns the addresses of functions.

  The code is never freed, because XLA's threads may still run it at process exit.
  """
  llvm.initialize_native_target()
  llvm.initialize_native_asmprinter()
  machine: Any = llvm.Target.from_default_triple().create_target_machine(
    cpu=llvm.get_host_cpu_name(),
    features=llvm.get_host_cpu_features().flatten(),
    opt=3,
  )
  module = llvm.parse_assembly(source)
  module.verify()
  engine: Any = llvm.create_mcjit_compiler(module, machine)
  engine.finalize_object()
  addresses = {name: engine.get_function_address(name) for name in names}
  # Otherwise the code is freed together with the engine.
  engine.detach()
  return addresses


def register(
  module: ir.Module, kernels: dict[str, tuple[Count, Part]], helpers: int
) -> None:
  """Compiles kernels and registers them with XLA:CPU by name.

  `module` contains the functions that parts call; `kernels` maps a name to the emitters
  of its part count and of one part; `helpers` is the number of threads besides the
  caller's.
  """
  _write_leave(module)
  for name, (count, part) in kernels.items():
    _write_work(module, name, part)
    _write_help(module, name)
    _write_entry(module, name, count, helpers)
  addresses = compile_module(str(module), kernels)
  signature = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
  for name, address in addresses.items():
    capsule = jax.ffi.pycapsule(signature(address))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
