"""The trusted side of the jail: starts, times and kills workers; parses strictly."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, TypeVar

import jax

import mxjax
from mxjax.discovery.core.candidate_source import TRACE_SECONDS, WALL_SECONDS
from mxjax.discovery.core.proposal import CALL_SECONDS, OutageError
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox import answers, frames, jail

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = pathlib.Path(mxjax.__file__).resolve().parent.parent
"""Folder that contains the package `mxjax`, from which workers import it."""
START_SECONDS = 600.0
"""Seconds by the wall in which a worker imports JAX, also on a machine that is busy."""
ENDING_SECONDS = 5.0
"""Seconds in which a worker that closed its pipes ends; then it is killed."""
LOG = logging.getLogger(__name__)
MEMORY_SIGNS = ("MemoryError", "RESOURCE_EXHAUSTED", "bad_alloc", "Unable to allocate")
"""What workers print for lack of memory before they die, which is all they leave."""
CPU_SIGNALS = (signal.SIGXCPU, signal.SIGKILL)
"""Signals by which the kernel ends a process that has used up its CPU limit."""
# The CPU limit ends loops; the wall-clock limit ends only processes that sleep, so a
# busy machine changes nothing.
TRACE_LIMITS = jail.Limits(
  seconds=WALL_SECONDS, cpu_seconds=TRACE_SECONDS, memory_bytes=4 << 30
)
RUN_LIMITS = jail.Limits(
  seconds=WALL_SECONDS,
  cpu_seconds=1 << 20,
  call_cpu_seconds=CALL_SECONDS,
  memory_bytes=16 << 30,
  message_bytes=1 << 30,
)

FRAMING = 1 << 16
"""Bytes of a message beside the reply that it carries: lengths, outcome, output."""
GATE_SECONDS = 120
"""Processor seconds allowed for checking one program's artifacts.

Reading a damaged artifact may never end, because MLIR's reader follows its locations as
a tree of any size.
"""

QUICK_TO_COMPILE = (
  "--xla_cpu_parallel_codegen_split_count=1",
  # JAX 0.11 no longer has it, and XLA ends a process that names an unknown flag.
  *(["--xla_cpu_use_fusion_emitters=false"] if jax.__version_info__ < (0, 11) else []),
)
"""Flags of XLA that compile a candidate in less processor time.

Most programs of a candidate run a few times, so that compiling them is much of a call.
Its hooks have the same bits with these and without; `benchmarks/discovery_evaluator.py`
compares whole calls.
"""


def _clean_environment() -> dict[str, str]:
  """Returns the whole environment of a worker; nothing is inherited."""
  return {
    "PATH": "/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Threads of XLA wait for each other in loops, which costs processor time, and a run
    # has other workers for the other cores.
    "NPROC": "1",
    "XLA_FLAGS": " ".join(QUICK_TO_COMPILE),
  }


class WorkerError(RuntimeError):
  """Raised for a worker that ended, hung or sent invalid data; it is already killed.

  `status` becomes the status of the condition.
  """

  def __init__(self, status: Status, detail: str) -> None:
    """Takes the status and one sentence."""
    super().__init__(detail)
    self.status = status


class UsedUpError(WorkerError):
  """Raised for a worker that ended because its call used up its processor time."""


class KilledError(WorkerError):
  """Raised for a worker that something else ended, such as a machine without memory.

  No candidate is to blame: what it was asked is asked once more, and has no outcome.
  """


T = TypeVar("T")


def twice(ask: Callable[[], T]) -> T:
  """Returns what a worker answers; if it is killed, the next one is asked, once.

  Raises:
    OutageError: That one was killed as well. The run stops, and can be resumed.
  """
  try:
    return ask()
  except KilledError as error:
    LOG.warning("sandbox: %s; the same is asked of a new worker", error)
  try:
    return ask()
  except KilledError as error:
    raise OutageError(
      f"sandbox: two workers in a row were killed by another process, the last one "
      f"with {error}. Free memory on this machine."
    ) from error


class LevelError(WorkerError, ValueError):
  """Raised for a level of the sandbox that this machine cannot provide."""


class Worker:
  """A worker process that answers framed requests."""

  def __init__(
    self, script: str, argument: Any, limits: jail.Limits, files: tuple[int, ...] = ()
  ) -> None:
    """Starts the process, which inherits `files`, and waits until it is ready.

    Raises:
      WorkerError: It did not start; the message holds the end of its error output.
    """
    self._limits = limits
    # A file, because a pipe that nobody reads would fill up and stop the worker.
    self._errors = tempfile.TemporaryFile()
    self._process = subprocess.Popen(
      # Isolated, so that neither the environment nor the current folder decides what is
      # imported.
      [sys.executable, "-I", "-B", str(HERE / script), json.dumps(argument)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      bufsize=0,
      env=_clean_environment(),
      cwd="/",
      start_new_session=True,
      pass_fds=files,
    )
    assert self._process.stdin is not None
    # A worker that does not read must not stall this side beyond its deadline.
    os.set_blocking(self._process.stdin.fileno(), False)
    self._begun = time.monotonic()
    self._cpu_seconds = limits.call_cpu_seconds
    self._receive(time.monotonic() + START_SECONDS)

  @property
  def is_alive(self) -> bool:
    """Whether the process still runs; one that died idle is no candidate's fault."""
    return self._process.poll() is None

  def ask(
    self, request: bytes, seconds: float | None = None, cpu_seconds: int | None = None
  ) -> list[bytes]:
    """Sends one request and waits for the parts of its answer.

    `seconds` are by the clock on the wall. `cpu_seconds` tell what the worker holds
    itself to, by default the limit of a call.

    Raises:
      WorkerError: There was no answer in time; the worker has been killed.
      KilledError: Something else killed it, or it was gone before it was asked.
      ValueError: The lengths of the answer's parts do not add up.
    """
    self._begun = time.monotonic()
    self._cpu_seconds = cpu_seconds or self._limits.call_cpu_seconds
    deadline = self._begun + (seconds or self._limits.seconds)
    try:
      self._write(frames.frame(request), deadline)
    except BrokenPipeError:
      self._fail(Status.CRASHED, "the request reached no worker", is_reached=False)
    return self._receive(deadline)

  def _write(self, data: bytes, deadline: float) -> None:
    assert self._process.stdin is not None
    fd, left = self._process.stdin.fileno(), memoryview(data)
    while left:
      wait = deadline - time.monotonic()
      if wait <= 0 or not select.select([], [fd], [], wait)[1]:
        self._fail(Status.TIMEOUT, "the request was not read before the deadline")
      left = left[os.write(fd, left) :]

  def _receive(self, deadline: float) -> list[bytes]:
    length = frames.length_of(self._read(8, deadline))
    if length > self._limits.message_bytes + FRAMING:
      self._fail(Status.REFUSED, f"a reply of {length} bytes")
    return frames.unpack(self._read(length, deadline))

  def _read(self, length: int, deadline: float) -> bytes:
    assert self._process.stdout is not None
    fd, parts, left = self._process.stdout.fileno(), [], length
    while left:
      wait = deadline - time.monotonic()
      if wait <= 0 or not select.select([fd], [], [], wait)[0]:
        self._fail(Status.TIMEOUT, "no answer before the deadline")
      data = os.read(fd, min(left, 1 << 20))
      if not data:
        self._fail(Status.CRASHED, "the worker ended")
      parts.append(data)
      left -= len(data)
    return b"".join(parts)

  def _end(self) -> None:
    try:
      os.killpg(self._process.pid, signal.SIGKILL)
    except ProcessLookupError:
      # It ended by itself and was waited for.
      pass
    self._process.wait()

  def _fail(self, status: Status, detail: str, *, is_reached: bool = True) -> None:
    if status == Status.CRASHED:
      # It ended by itself: how, is known only if our own signal does not come first.
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(ENDING_SECONDS)
    is_ended = self._process.poll() is not None
    self._end()
    self._errors.seek(0, os.SEEK_END)
    self._errors.seek(max(self._errors.tell() - self._limits.stderr_bytes, 0))
    tail = self._errors.read().decode(errors="replace").strip()
    self.kill()
    if status == Status.CRASHED and any(sign in tail for sign in MEMORY_SIGNS):
      status = Status.MEMORY
    code = self._process.returncode
    if is_ended and code == signal.SIGXCPU:
      detail = f"took more than {self._cpu_seconds} processor seconds"
      raise UsedUpError(Status.TIMEOUT, detail)
    took = time.monotonic() - self._begun
    is_early = took * (os.cpu_count() or 1) < self._limits.cpu_seconds
    # The kernel kills for CPU time by the same signal, but not as early.
    is_killed = is_ended and code == -signal.SIGKILL and is_early
    kind = KilledError if is_killed or not is_reached else WorkerError
    raise kind(status, f"{detail} (exit {code}): {tail[-300:]}")

  def kill(self) -> None:
    """Kills the worker and everything in its jail."""
    self._end()
    for pipe in (self._process.stdin, self._process.stdout):
      if pipe is not None:
        try:
          pipe.close()
        except BrokenPipeError:
          # The worker is dead; data buffered for it is discarded.
          continue
    self._errors.close()


@dataclasses.dataclass(frozen=True)
class RawTrace:
  """Unchecked output of the trace jail.

  `hooks` holds the artifact of each hook.
  """

  status: Status
  detail: str = ""
  hooks: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


class Tracer:
  """Traces each source in its own jailed process.

  `features` describes the isolation in force.
  """

  def __init__(self, level: str, limits: jail.Limits = TRACE_LIMITS) -> None:
    """Starts the supervisor and tests the jail.

    Raises:
      LevelError: This machine cannot provide the level.
    """
    self._level, self._limits = level, limits
    self._worker: Worker | None = None
    outcome, reply = self._job({"probe": True})
    if reply[:1] != b"F":
      self.close()
      raise LevelError(
        Status.CRASHED,
        f"sandbox: level {level} cannot be had here: "
        f"{reply[1:].decode(errors='replace')} {outcome['output'][-300:]} Install or "
        "enable what is missing, or choose another level explicitly.",
      )
    self.features = json.loads(reply[1:])

  def _job(self, job: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    request = {
      "level": self._level,
      "limits": dataclasses.asdict(self._limits),
      "scratch": tempfile.gettempdir(),
      **job,
    }
    # The trace worker ends a trace at its limit itself; the rest is for one that hangs.
    seconds = self._limits.seconds + 30
    if self._worker is not None and not self._worker.is_alive:
      self.close()
    if self._worker is None:
      self._worker = Worker("trace_worker.py", _import_path(), self._limits)
    try:
      head, reply = self._worker.ask(json.dumps(request).encode(), seconds)
    except WorkerError:
      self.close()
      raise
    return json.loads(head), reply

  def trace(self, source: str, hooks: Sequence[Mapping[str, Any]]) -> RawTrace:
    """Executes a source in its own jail and returns unchecked bytes.

    A jail that was killed long before its own limits was killed by somebody else, such
    as a machine without memory. That is not the candidate's fault, so it is traced
    once more.

    Raises:
      OutageError: That was killed as well; see `twice`.
    """
    job = {"source": source, "hooks": [dict(hook) for hook in hooks]}

    def traced() -> tuple[dict[str, Any], bytes]:
      begun = time.monotonic()
      outcome, reply = self._job(job)
      took = time.monotonic() - begun
      is_early = took * (os.cpu_count() or 1) < self._limits.cpu_seconds
      # The worker kills a jail that sends too much, or that takes too long, itself.
      is_ours = outcome["verdict"] in ("oversize", "timeout", "stuck")
      if outcome["signal"] == signal.SIGKILL and is_early and not is_ours:
        raise KilledError(Status.CRASHED, f"a trace that ended after {took:.1f} s")
      return outcome, reply

    try:
      outcome, reply = twice(traced)
    except WorkerError as error:
      return RawTrace(error.status, f"the trace worker failed: {error}")
    status, detail = _classify(outcome, reply, self._limits)
    if status != Status.OK:
      return RawTrace(status, detail)
    try:
      parts = frames.unpack(reply[1:])
      if len(parts) % 2:
        raise ValueError("a message whose lengths do not add up")
      names = [name.decode() for name in parts[0::2]]
    except (ValueError, UnicodeDecodeError) as error:
      return RawTrace(Status.REFUSED, f"the trace worker sent {error}")
    if sorted(names) != sorted(h["name"] for h in hooks):
      return RawTrace(Status.REFUSED, f"the trace worker sent hooks {names}"[:300])
    return RawTrace(Status.OK, "", dict(zip(names, parts[1::2], strict=True)))

  def close(self) -> None:
    """Ends the supervisor."""
    if self._worker is not None:
      self._worker.kill()
      self._worker = None


def _classify(
  outcome: Mapping[str, Any], reply: bytes, limits: jail.Limits
) -> tuple[Status, str]:
  tail = outcome["output"].strip()[-300:]
  if outcome["verdict"] == "oversize":
    return Status.REFUSED, "the trace worker sent more than it may"
  if outcome["verdict"] == "stuck":
    return Status.REFUSED, "the trace left a scratch folder that cannot be removed"
  if outcome["verdict"] == "timeout":
    message = (
      f"tracing did not end within {limits.seconds:g} s by the clock on the wall"
    )
    return Status.TIMEOUT, f"{message}: {tail}"
  if outcome["signal"] in CPU_SIGNALS:
    message = f"tracing took more than {limits.cpu_seconds} processor seconds"
    return Status.TIMEOUT, f"{message}: {tail}"
  text = reply[1:2001].decode(errors="replace") if reply[:1] == b"E" else tail
  if reply[:1] != b"A" and any(sign in text for sign in MEMORY_SIGNS):
    return Status.MEMORY, text
  if reply[:1] == b"E":
    return Status.TRACE_FAILED, text
  if outcome["signal"] or reply[:1] != b"A":
    return Status.CRASHED, f"signal {outcome['signal']}, exit {outcome['code']}: {tail}"
  return Status.OK, ""


def _import_path() -> list[str]:
  """Returns this process's import path without the current folder."""
  return [path for path in sys.path if path and os.path.isdir(path)]


class RunWorker:
  """A jailed evaluator phase that is restarted after a fault."""

  def __init__(
    self,
    task: Mapping[str, Any],
    phase: str,
    readable: Sequence[str],
    level: str,
    limits: jail.Limits = RUN_LIMITS,
    compiled: str = "",
  ) -> None:
    """Configures the worker, which starts with the first request.

    `compiled` is a folder that it may write, for programs that it compiled.
    """
    self._config = {
      "task": dict(task),
      "phase": phase,
      "level": level,
      "path": [str(LIBRARY), *_import_path()],
      "readable": [str(LIBRARY), *readable],
      "limits": dataclasses.asdict(limits),
      "compiled": compiled,
    }
    self._limits = limits
    self._worker: Worker | None = None
    self._scratch = ""
    self._sent: set[str] = set()
    self._progress: IO[bytes] | None = None

  def _start(self) -> Worker:
    if self._worker is not None and not self._worker.is_alive:
      self.close()
    if self._worker is None:
      self._scratch = tempfile.mkdtemp(prefix="mxjax-run-")
      # What a call had spent its time on, where it is ended and cannot answer.
      self._progress = self._progress or tempfile.TemporaryFile()
      progress = self._progress.fileno()
      config = {**self._config, "scratch": self._scratch, "progress": progress}
      self._worker = Worker("run_worker.py", config, self._limits, (progress,))
      self._sent = set()
    return self._worker

  def _ask(
    self, parts: list[bytes], left: float, cpu_seconds: int | None = None
  ) -> tuple[dict[str, Any], bytes]:
    """Asks the worker, which may use `left` processor seconds."""
    worker = self._start()
    assert self._progress is not None
    self._progress.truncate(0)
    try:
      head, payload = worker.ask(frames.pack(parts), cpu_seconds=cpu_seconds)
      answer = answers.parse(head)
    except UsedUpError as error:
      told = answers.unfinished(self._progress.fileno(), left)
      self.close()
      if not told:
        raise
      told = f"{error}: in its phase {self._config['phase']} {told}"
      raise UsedUpError(error.status, told) from error
    except WorkerError:
      self.close()
      raise
    except (ValueError, RecursionError) as error:
      self.close()
      raise WorkerError(Status.NOT_FINITE, f"the evaluator sent {error}") from error
    if answer["status"] != Status.OK:
      raise WorkerError(answer["status"], answer["detail"])
    return answer, payload

  def gate(
    self, specs: Sequence[Mapping[str, Any]], hooks: Mapping[str, bytes]
  ) -> dict[str, str]:
    """Checks artifacts and returns their identities by hook.

    Raises:
      WorkerError: An artifact was refused, or the gate itself ended.
      OutageError: Something else ended it twice; see `twice`.
    """
    seconds = min(GATE_SECONDS, self._limits.call_cpu_seconds)
    request = {
      "kind": "gate",
      "cpu_seconds": seconds,
      "specs": [dict(spec) for spec in specs],
    }
    parts = [json.dumps(request).encode(), *(hooks[spec["name"]] for spec in specs)]
    answer, _ = twice(lambda: self._ask(parts, seconds, seconds))
    names, found = [spec["name"] for spec in specs], answer.get("computation")
    # The identities become names of files.
    if not isinstance(found, list) or [*map(answers.is_identity, found)] != [
      True
    ] * len(names):
      self.close()
      raise WorkerError(Status.REFUSED, f"the gate sent identities {found!r:.200}")
    return dict(zip(names, found, strict=True))

  def run(
    self,
    call: Mapping[str, Any],
    artifacts: Mapping[str, tuple[str, bytes]],
    before: bytes,
    spent: float = 0.0,
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the phase on a call, given as `Call._asdict()`.

    `artifacts` holds hook name and artifact by identity, for everything that the call
    may execute; each is sent to a worker once. `before` comes from the previous phase,
    and `spent` are the processor seconds that the call has used before this one.

    Raises:
      WorkerError: The call failed.
    """
    self._start()
    # After the start, which forgets what an earlier worker was sent.
    fresh = {key: art for key, art in artifacts.items() if key not in self._sent}
    request = {
      "kind": "run",
      "cpu_seconds": max(self._limits.call_cpu_seconds - spent, 0.0),
      "call": dict(call),
      "artifacts": [[key, art[0]] for key, art in fresh.items()],
    }
    blobs = [data for _, data in fresh.values()]
    head = json.dumps(request).encode()
    self._sent |= fresh.keys()
    return self._ask([head, *blobs, before], request["cpu_seconds"])

  def close(self) -> None:
    """Kills the worker, if there is one."""
    if self._worker is not None:
      self._worker.kill()
      self._worker = None
      shutil.rmtree(self._scratch, ignore_errors=True)
    if self._progress is not None:
      self._progress.close()
      self._progress = None
