"""The trace worker: a clean interpreter that forks one jailed child for each source.

Run as a script with `-I -B` and an empty environment. The parent of the children
never executes candidate code: it imports JAX once, so that a child starts in
milliseconds, and supervises. A child puts the walls up, executes the source, and sends
back serialized artifacts; then it is gone.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import select
import signal
import struct
import sys
import tempfile
import time
from typing import Any

PACKAGES = ("jax", "jaxlib", "numpy", "ml_dtypes", "flatbuffers", "opt_einsum", "scipy")
ARTIFACTS, ERROR, FEATURES = b"A", b"E", b"F"


def _load(name: str) -> Any:
  """A file beside this one, without its package: mxjax stays outside the jail."""
  path = pathlib.Path(__file__).resolve().parent / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def read_frame(file: Any) -> bytes:
  """One length-prefixed frame; empty at the end of the file."""
  head = file.read(8)
  return file.read(struct.unpack("<Q", head)[0]) if len(head) == 8 else b""


def write_frame(file: Any, data: bytes) -> None:
  """Writes one length-prefixed frame."""
  file.write(struct.pack("<Q", len(data)) + data)
  file.flush()


def pack(parts: list[bytes]) -> bytes:
  """Several byte strings in one."""
  return b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def unpack(data: bytes, limit: int = 4096) -> list[bytes]:
  """The inverse of `pack`, for bytes that nobody vouches for.

  Raises:
    ValueError: Lengths that do not add up, or too many parts.
  """
  parts, position = [], 0
  while position < len(data):
    if len(data) - position < 8 or len(parts) >= limit:
      raise ValueError("a message whose lengths do not add up")
    (length,) = struct.unpack_from("<Q", data, position)
    position += 8
    if length > len(data) - position:
      raise ValueError("a message whose lengths do not add up")
    parts.append(data[position : position + length])
    position += length
  return parts


def _child(job: dict[str, Any], result: int, output: int, scratch: str) -> None:
  """Becomes the jailed process of one source and never returns."""
  jail, tracing = sys.modules["jail"], sys.modules["tracing"]
  os.setsid()
  jail.die_with_parent()
  jail.fork_into_jail(job["level"])
  null = os.open("/dev/null", os.O_RDWR)
  for target, source in ((0, null), (1, output), (2, output), (3, result)):
    os.dup2(source, target)
  os.closerange(4, 4096)
  readable, listable = jail.interpreter_paths(PACKAGES)
  features = jail.lock(
    level=job["level"],
    readable=readable,
    listable=listable,
    scratch=scratch,
    limits=jail.Limits(**job["limits"]),
  )
  if job.get("probe"):
    reply = FEATURES + json.dumps(features).encode()
  else:
    reply = _trace(tracing, job)
  while reply:
    reply = reply[os.write(3, reply) :]
  os._exit(0)


def _trace(tracing: Any, job: dict[str, Any]) -> bytes:
  try:
    hooks = tracing.trace(job["source"], job["hooks"])
  except BaseException as error:  # noqa: BLE001
    # Whatever candidate code raises, SystemExit included, is its result.
    return ERROR + f"{type(error).__name__}: {error}".encode(errors="replace")[:2000]
  parts = [p for hook in hooks for p in (hook.name.encode(), hook.unit, hook.batched)]
  return ARTIFACTS + pack(parts)


def _supervise(job: dict[str, Any]) -> dict[str, Any]:
  """Runs one job; whatever it does, nothing of it is left when this returns."""
  limits = sys.modules["jail"].Limits(**job["limits"])
  scratch = tempfile.mkdtemp(prefix="mxjax-trace-", dir=job["scratch"])
  result_read, result_write = os.pipe()
  output_read, output_write = os.pipe()
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
  reply, output, verdict = b"", b"", ""
  deadline = time.monotonic() + limits.seconds
  pending = {result_read, output_read}
  while pending and not verdict:
    left = deadline - time.monotonic()
    ready = select.select(list(pending), [], [], max(left, 0))[0] if left > 0 else []
    if not ready:
      verdict = "timeout"
    for fd in ready:
      data = os.read(fd, 1 << 16)
      if not data:
        pending.discard(fd)
      elif fd == result_read:
        reply += data
        verdict = "oversize" if len(reply) > limits.message_bytes else ""
      else:
        output = (output + data)[-limits.stderr_bytes :]
  # The child waits for its jail: killing it ends the jail's pid namespace.
  if not verdict:
    verdict = _reap(child, deadline)
  if verdict != "ended":
    _kill(child)
  status = os.waitpid(child, 0)[1] if verdict != "ended" else _STATUS.pop(child)
  for fd in (result_read, output_read):
    os.close(fd)
  _remove(scratch)
  return {
    "verdict": verdict,
    "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
    "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0,
    "output": output.decode(errors="replace"),
    "reply": reply if verdict == "ended" else b"",
  }


_STATUS: dict[int, int] = {}


def _reap(child: int, deadline: float) -> str:
  """Waits for a child whose pipes are closed; `timeout` if it lingers."""
  while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
      _STATUS[child] = status
      return "ended"
    time.sleep(0.002)
  return "timeout"


def _kill(child: int) -> None:
  """Kills a job's whole session: it made one, and cannot make another."""
  for kill, target in ((os.killpg, child), (os.kill, child)):
    try:
      kill(target, signal.SIGKILL)
    except ProcessLookupError:
      continue


def _remove(folder: str) -> None:
  for root, folders, files in os.walk(folder, topdown=False):
    for name in files:
      os.unlink(os.path.join(root, name))
    for name in folders:
      os.rmdir(os.path.join(root, name))
  os.rmdir(folder)


def main() -> None:
  """Serves jobs from stdin until it closes."""
  sys.path[:0] = json.loads(sys.argv[1])
  _load("jail").die_with_parent()
  _load("tracing")
  # JAX imports it when it first lowers a decomposition, and it imports whatever else
  # is installed: behind the walls that would be too late.
  importlib.import_module("scipy.linalg")
  # Replies go to a private copy of stdout: nothing printed can get between them.
  replies = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  jobs = sys.stdin.buffer
  write_frame(replies, b"ready")
  while data := read_frame(jobs):
    outcome = _supervise(json.loads(data))
    reply = outcome.pop("reply")
    write_frame(replies, pack([json.dumps(outcome).encode(), reply]))


if __name__ == "__main__":
  main()
