"""How XLA compiles what is jitted, and who is told of it.

XLA:GPU tries many programs for each product, to find the fastest. That pays in a
function that runs a million times, such as a step of decoding. A build calls each of
its functions a few times for each layer, and there the trials cost far more than all
calls: without them the small Qwen3 is built in a minute on an H200, and with them its
first layer is not finished after two.

Trials are decided by a clock. Without them two builds on one kind of GPU choose the
same products, and so have the same bits.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import jax
from jax.extend import core

T = TypeVar("T")

WITHOUT_TRIALS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Compiler options for functions of many products that run for milliseconds in all.

The library's own choice of a product is taken, and a fusion is not compiled to be
compared with it. The paper's stages keep their precision: neither option changes it.
"""


def _state_outside() -> Any:
  """Returns JAX's state where nothing is traced: that of a new thread."""
  found = []
  thread = threading.Thread(target=lambda: found.append(core.get_opaque_trace_state()))
  thread.start()
  thread.join()
  return found[0]


_OUTSIDE = _state_outside()


def is_traced() -> bool:
  """Whether this thread traces a function: for `jit`, `grad`, `vmap`, `eval_shape`."""
  return core.get_opaque_trace_state() != _OUTSIDE


class Jitted(Generic[T]):
  """A function of `jit`: called like the function, with what `jax.jit` offers besides.

  `lower`, `trace` and `clear_cache` are those of the function that a call outside
  traces runs.
  """

  def __init__(
    self,
    function: Callable[..., T],
    then: Callable[[T], T] | None,
    compiler_options: dict[str, Any] | None,
    options: dict[str, Any],
  ) -> None:
    functools.update_wrapper(self, function)
    self._function, self._then = function, then
    self._compiler_options, self._options = compiler_options, options
    # JAX takes compiler options only from the outermost function of a program.
    self._within = jax.jit(function, **options)
    self._making = threading.Lock()

  @property
  def _outermost(self) -> Any:
    # A cached property lets two threads compute since Python 3.12, and each would
    # compile every program for itself.
    with self._making:
      return self._made

  @functools.cached_property
  def _made(self) -> Any:
    # Made at the first call: which device there is must not be asked before.
    trials = WITHOUT_TRIALS if jax.default_backend() == "gpu" else {}
    chosen = {**trials, **(self._compiler_options or {})}
    if not chosen:
      return self._within
    return jax.jit(self._function, compiler_options=chosen, **self._options)

  def __call__(self, *args: Any, **kwargs: Any) -> T:
    """Calls the function, compiled for these arguments or traced with them."""
    if is_traced():
      return self._within(*args, **kwargs)
    result = self._outermost(*args, **kwargs)
    return result if self._then is None else self._then(result)

  def __getattr__(self, name: str) -> Any:
    # `copy`, `inspect` and others ask for such names; to answer, a device would be
    # started.
    if name.startswith("__"):
      raise AttributeError(name)
    return getattr(self._outermost, name)


def jit(
  *,
  then: Callable[[Any], Any] | None = None,
  compiler_options: dict[str, Any] | None = None,
  **options: Any,
) -> Callable[[Callable[..., T]], Jitted[T]]:
  """Decorates as `jax.jit`, and on a GPU compiles `WITHOUT_TRIALS`.

  A call inside a trace is part of the program that is traced, which has the compiler
  options of its own outermost function. On a CPU this is `jax.jit`.

  Args:
    then: What is called with the result of every call outside a trace.
    compiler_options: Further options of XLA for the outermost function.
    options: Those of `jax.jit`, such as `static_argnames` and `donate_argnums`.
  """
  return lambda function: Jitted(function, then, compiler_options, options)


LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""JAX's event for a program that XLA is given next, in the same thread."""
COMPILED = "/jax/core/compile/backend_compile_duration"
"""JAX's event for a compiled program, or one that was read instead."""


def _name_of(details: dict[str, Any]) -> str:
  """Returns the name of the function that an event is about."""
  name = str(details.get("fun_name", "a function"))
  return name.removeprefix("jit(").removesuffix(")")


@contextmanager
def _listening(listen: Callable[..., None]) -> Iterator[None]:
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def on_compile(callback: Callable[[str, float], None]) -> Iterator[None]:
  """Calls `callback(name, seconds)` after each program that XLA compiles in the block.

  `name` is that of the jitted function, such as `_add_chunk`. The callback runs in the
  thread that compiled, and must not raise.
  """

  def listen(event: str, duration_secs: float, **details: Any) -> None:
    if event == COMPILED:
      callback(_name_of(details), duration_secs)

  with _listening(listen):
    yield


@contextmanager
def on_long_compile(
  callback: Callable[[str], None], seconds: float = 5.0
) -> Iterator[None]:
  """Calls `callback(name)` while XLA compiles a program that takes longer than this.

  It is called once for each such program, `seconds` after XLA was given it, in a thread
  of its own. A program that is lowered and never compiled is told too.
  """
  timers: dict[int, threading.Timer] = {}

  def listen(event: str, duration_secs: float, **details: Any) -> None:
    del duration_secs
    if event not in (LOWERED, COMPILED):
      return
    thread = threading.get_ident()
    # A thread compiles one program at a time, so that its next event ends the wait.
    if before := timers.pop(thread, None):
      before.cancel()
    if event == LOWERED:
      timers[thread] = threading.Timer(seconds, callback, [_name_of(details)])
      # It must not keep a process alive that has finished.
      timers[thread].daemon = True
      timers[thread].start()

  with _listening(listen):
    try:
      yield
    finally:
      for timer in timers.values():
        timer.cancel()
