"""The trace worker: a clean interpreter that forks one jailed child per source.

It runs as a script with `-I -B` and an empty environment. The parent never executes
candidate code: it imports JAX once, so that children start in milliseconds, and
supervises them. A child isolates itself, executes the source, sends back serialized
artifacts and exits.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import select
import shutil
import signal
import sys
import tempfile
import time
from typing import Any

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "flatbuffers", "opt_einsum", "scipy")
ARTIFACTS, ERROR, FEATURES = b"A", b"E", b"F"


def _load(name: str) -> Any:
  """Loads a sibling file without its package, because mxjax stays outside the jail."""
  path = pathlib.Path(__file__).resolve().parent / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _child(job: dict[str, Any], result: int, output: int, scratch: str) -> None:
  """Becomes the jailed process of one source; never returns."""
  jail = sys.modules["jail"]
  # A session of its own, by which the whole job can be killed.
  os.setsid()
  jail.die_with_parent()
  jail.fork_into_jail(job["level"])
  null = os.open("/dev/null", os.O_RDWR)
  for target, source in ((0, null), (1, output), (2, output), (3, result)):
    os.dup2(source, target)
  # What the parent has open is out of reach for a candidate.
  os.closerange(4, 4096)
  readable, listable = jail.interpreter_paths(PACKAGES)
  features = jail.lock(
    level=job["level"],
    readable=readable,
    listable=listable,
    scratch=scratch,
    limits=jail.Limits(**job["limits"]),
  )
  reply = FEATURES + json.dumps(features).encode() if job.get("probe") else _trace(job)
  while reply:
    reply = reply[os.write(3, reply) :]
  # No handlers run, which candidate code might have registered.
  os._exit(0)


def _trace(job: dict[str, Any]) -> bytes:
  try:
    hooks = sys.modules["tracing"].trace(job["source"], job["hooks"])
  except BaseException as error:  # noqa: BLE001
    # Anything that candidate code raises, including SystemExit, is its result.
    return ERROR + f"{type(error).__name__}: {error}".encode(errors="replace")[:2000]
  pack = sys.modules["frames"].pack
  parts = [p for hook in hooks for p in (hook.name.encode(), pack(hook.units))]
  return ARTIFACTS + pack(parts)


def _start(job: dict[str, Any], scratch: str) -> tuple[int, int, int]:
  """Forks the job's child; returns its pid and the read ends of result and output."""
  result, result_write = os.pipe()
  output, output_write = os.pipe()
  child = os.fork()
  if child == 0:
    try:
      _child(job, result_write, output_write, scratch)
    except BaseException as error:  # noqa: BLE001
      message = f"{ERROR.decode()}jail: {type(error).__name__}: {error}"
      os.write(result_write, message.encode()[:2000])
    finally:
      os._exit(70)
  os.close(result_write)
  os.close(output_write)
  return child, result, output


def _collect(
  result: int, output: int, limits: Any, deadline: float
) -> tuple[str, bytes, bytes]:
  """Reads both pipes until they close.

  Returns `ended`, `timeout` or `oversize`; the reply; and the end of the output.
  """
  reply, tail, pending = b"", b"", {result, output}
  while pending:
    left = max(deadline - time.monotonic(), 0)
    # Both at once: a child that fills one pipe would wait while only the other is read.
    ready = select.select(list(pending), [], [], left)[0] if left else []
    if not ready:
      return "timeout", reply, tail
    for fd in ready:
      data = os.read(fd, 1 << 16)
      if not data:
        pending.discard(fd)
      elif fd == output:
        tail = (tail + data)[-limits.stderr_bytes :]
      else:
        reply += data
        if len(reply) > limits.message_bytes:
          return "oversize", reply, tail
  return "ended", reply, tail


def _wait(child: int, deadline: float) -> int | None:
  """Returns the exit status of a child with closed pipes, or None if it lingers."""
  while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
      return status
    time.sleep(0.002)
  return None


def _kill(child: int) -> int:
  """Kills the session of a job, which the job created and cannot leave.

  The child waits for its jail, so killing the child ends the jail's pid namespace.
  """
  for kill in (os.killpg, os.kill):
    try:
      kill(child, signal.SIGKILL)
    except ProcessLookupError:
      continue
  return os.waitpid(child, 0)[1]


def _removed(scratch: str) -> bool:
  """Removes a scratch folder; returns whether nothing of it remains."""
  try:
    shutil.rmtree(scratch, ignore_errors=True)
  except RecursionError:
    # Folders nested deeper than Python recurses stay, and are reported.
    pass
  return not os.path.lexists(scratch)


def _supervise(job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
  """Runs one job; nothing of the job remains when this returns."""
  limits = sys.modules["jail"].Limits(**job["limits"])
  scratch = tempfile.mkdtemp(prefix="mxjax-trace-", dir=job["scratch"])
  child, result, output = _start(job, scratch)
  deadline = time.monotonic() + limits.seconds
  verdict, reply, tail = _collect(result, output, limits, deadline)
  status = _wait(child, deadline) if verdict == "ended" else None
  if status is None:
    verdict = "timeout" if verdict == "ended" else verdict
    status = _kill(child)
  os.close(result)
  os.close(output)
  outcome = {
    "verdict": verdict if _removed(scratch) else "stuck",
    "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
    "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0,
    "output": tail.decode(errors="replace"),
  }
  return outcome, reply if outcome["verdict"] == "ended" else b""


def main() -> None:
  """Serves jobs from stdin until it closes."""
  sys.path[:0] = json.loads(sys.argv[1])
  _load("jail").die_with_parent()
  frames = _load("frames")
  _load("tracing")
  # JAX imports scipy when it first lowers a decomposition, and scipy imports other
  # installed packages; inside the jail that would be too late.
  importlib.import_module("scipy.linalg")
  # Replies go to a private copy of stdout, so printed text cannot mix with them.
  replies = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  frames.write(replies, [b"ready"])
  while data := frames.read(sys.stdin.buffer):
    outcome, reply = _supervise(json.loads(data))
    frames.write(replies, [json.dumps(outcome).encode(), reply])


if __name__ == "__main__":
  main()
