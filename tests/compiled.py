"""The programs that XLA compiles inside a `with` block, by the names of functions."""

import contextlib

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""What JAX records for each program, also for one that a folder of programs holds."""

_open = []


def _record(event, seconds, **about):
  for names in _open if event == EVENT else ():
    names.append(about.get("fun_name", "unnamed").removeprefix("jit(").rstrip(")"))


# JAX has no public way to take a listener back, so there is one for good.
jax.monitoring.register_event_duration_secs_listener(_record)


@contextlib.contextmanager
def compiled_programs():
  """Gives a list that receives the names; what is in memory is not compiled again."""
  names = []
  _open.append(names)
  try:
    yield names
  finally:
    _open.remove(names)
