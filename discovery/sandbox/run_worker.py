"""The run worker: executes artifacts on a phase's data; never sees candidate Python.

It runs as a script with `-I -B` and an empty environment: `run_worker.py CONFIG`, where
CONFIG is JSON. It isolates itself before it imports JAX, so every thread is isolated. A
worker serves many calls, because an artifact is a pure function and leaves nothing
behind; its supervisor kills it at the first fault and starts another.
"""

import ctypes
import functools
import importlib.util
import json
import math
import os
import pathlib
import resource
import signal
import sys
import time
from typing import Any

CACHES_UP_TO = 2 << 30
"""Peak bytes of resident memory above which compiled programs are dropped."""
PROGRAMS_UP_TO = 2000
"""Compiled programs above which they are dropped.

One takes 3 to 15 of the 65,530 memory maps that Linux allows a process, by the version
of jaxlib. Where none is left LLVM ends the worker with a segmentation fault: on jaxlib
0.11.2 after some 4,400 programs.
"""


def _load(name: str) -> Any:
  """Loads a sibling file without its package, because the package would import JAX."""
  path = pathlib.Path(__file__).resolve().parent / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _exit_at_limit() -> None:
  """Lets the kernel end this process when a call has used up its processor time.

  The number of the signal becomes the exit code. By default the signal would do nothing
  to the first process of a pid namespace, and a handler in Python would wait until the
  program that runs has ended; the C library's `_exit` ends all threads at once.
  """
  libc = ctypes.CDLL(None, use_errno=True)
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
  libc.signal.restype = ctypes.c_void_p
  libc.signal(signal.SIGXCPU, ctypes.cast(libc._exit, ctypes.c_void_p))


def _limit_call(seconds: float) -> None:
  """Lets this process use so many more processor seconds, rounded up."""
  _, most = resource.getrlimit(resource.RLIMIT_CPU)
  until = math.ceil(time.process_time() + seconds)
  resource.setrlimit(resource.RLIMIT_CPU, (min(until, most), most))


def _enter(config: dict[str, Any]) -> dict[str, Any]:
  jail = _load("jail")
  jail.die_with_parent()
  jail.fork_into_jail(config["level"])
  sites = [path for path in sys.path if path]
  return jail.lock(
    level=config["level"],
    readable=[*jail.interpreter_paths(())[0], *sites, *config["readable"]],
    listable=[],
    scratch=config["scratch"],
    limits=jail.Limits(**config["limits"]),
    writable=[config["compiled"]] if config["compiled"] else [],
  )


class _Caches:
  """Drops compiled programs when they use much memory, or many of its maps.

  Every candidate leaves compiled programs behind. An isolated process can read only its
  peak memory, so that limit rises with the peak; and it cannot read its maps, so it
  counts programs.
  """

  def __init__(self) -> None:
    import jax

    from mxjax.compilation import COMPILED

    self._limit, self._programs, self._event = CACHES_UP_TO, 0, COMPILED
    jax.monitoring.register_event_duration_secs_listener(self.count)

  def count(self, event: str, seconds: float, **about: Any) -> None:
    """Counts the programs among JAX's events; those read from a folder are some."""
    del seconds, about
    self._programs += event == self._event

  def bound(self) -> None:
    """Drops all programs if one of the two limits was passed."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > self._limit or self._programs > PROGRAMS_UP_TO:
      import jax

      jax.clear_caches()
      self._programs = 0
      if peak > self._limit:
        self._limit = peak + CACHES_UP_TO // 2


class _Phase:
  """One phase of a task: gates artifacts, and runs calls on the phase's data."""

  def __init__(self, config: dict[str, Any]) -> None:
    from mxjax.discovery.core import task
    from mxjax.discovery.sandbox import artifact, executor

    self._artifact, self._name = artifact, config["phase"]
    self._metered = executor.metered
    self._make_call = task.Call
    self._task = task.load(config["task"])
    specs = {spec["name"]: spec for spec in self._task.interface.to_list()}
    self._artifacts = artifact.ArtifactTable(specs)
    self._session: Any = None

  def open(self) -> None:
    """Opens the task's session of this phase, unless it is open."""
    if self._session is None:
      self._session = self._task.open(self._name)

  def gate(self, request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
    pairs = zip(request["specs"], blobs, strict=True)
    return {"computation": [self._artifact.gate(*pair) for pair in pairs]}

  def run(
    self, request: dict[str, Any], blobs: list[bytes]
  ) -> tuple[dict[str, Any], bytes]:
    """Runs a call; the last blob comes from the previous phase, the others are new."""
    *new, before = blobs
    for (computation, name), data in zip(request["artifacts"], new, strict=True):
      self._artifacts.add(computation, name, data)
    self.open()
    call = self._make_call(**request["call"])
    session = functools.partial(self._session.run, call, self._artifacts)
    return self._metered(session)(before)


def main() -> None:
  """Serves requests from stdin until it closes."""
  config = json.loads(sys.argv[1])
  sys.path[:0] = config["path"]
  frames = _load("frames")
  # Replies go to a private copy of stdout, so printed text cannot mix with them.
  replies = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  features = _enter(config)
  # Import JAX only now, so that the threads it starts are isolated.
  from mxjax.devices import kept_programs
  from mxjax.discovery.core.task import Status
  from mxjax.discovery.sandbox.executor import status_of
  from mxjax.discovery.sandbox.processor import METER

  if config["compiled"]:
    kept_programs.keep_compiled(config["compiled"])
  METER.tell(config["progress"])
  _exit_at_limit()
  most = config["limits"]["call_cpu_seconds"]
  phase, caches = _Phase(config), _Caches()
  frames.write(replies, [json.dumps(features).encode()])
  while data := frames.read(sys.stdin.buffer):
    head, *blobs = frames.unpack(data)
    request = json.loads(head)
    result, payload = {}, b""
    try:
      if request["kind"] != "gate":
        # What the task itself takes to open is no part of the first call.
        phase.open()
      # A call has what its earlier phases left of its time; a gate has a whole call's.
      _limit_call(request.get("cpu_seconds", most))
      if request["kind"] == "gate":
        result = phase.gate(request, blobs)
      else:
        result, payload = phase.run(request, blobs)
      answer = {"status": Status.OK, **result}
    except Exception as error:  # noqa: BLE001
      # The supervisor turns this into a status; the message becomes its detail.
      status, detail = status_of(error)
      if request["kind"] == "gate" and status == Status.CONTRACT:
        # A model may be told why: no class of ours is a reason.
        status, detail = Status.REFUSED, str(error)[:1000]
      answer = {"status": status, "detail": detail}
    # NaN may pass here: the strict parser of the supervisor gives it its status.
    frames.write(replies, [json.dumps(answer, allow_nan=True).encode(), payload])
    # What comes between two calls is charged to neither.
    _limit_call(float(1 << 20))
    caches.bound()


if __name__ == "__main__":
  main()
