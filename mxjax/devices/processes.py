"""Jobs of several processes with `jax.distributed`, and the loss of one of them.

Every process runs the same program on the same inputs, and their devices form one mesh.
Each repeats the unsharded work, `check_same` compares the results, and process 0
writes. If process 0 dies, JAX aborts the others from C++, which Python cannot catch. A
command therefore runs its work in a child process, and `supervise` explains the abort.
"""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh

from mxjax.errors import Refusal, ValueRefusal

LOST = 3
"""Exit code of a process whose job lost another process."""
_PIPE = "MXJAX_SUPERVISOR_PIPE"
"""Environment variable with the pipe that closes when a child's parent ends."""
_SIGNS = ("gloo", "nccl", "coordination service", "heartbeat", "connection closed")
LOST_MESSAGE = (
  "another process of this job was lost or has ended, so this one cannot go on; find "
  "out why in its output, then start all processes again with --resume: finished "
  "layers are on disk"
)


def supervise(command: Sequence[str]) -> int:
  """Runs a command in a child process, waits, and explains an abort.

  SIGINT and SIGTERM are passed on, and the child ends when this process does. Returns
  the child's exit code, or `LOST` if it was aborted.
  """
  reading, writing = os.pipe()
  # Give the child the same import path, wherever it was started.
  path = os.pathsep.join(place or os.getcwd() for place in sys.path)
  environment = {**os.environ, _PIPE: str(reading), "PYTHONPATH": path}
  # The child holds the reading end alone; the writing one closes with this process,
  # whatever ends it.
  child = subprocess.Popen(command, env=environment, pass_fds=(reading,))
  os.close(reading)

  def forward(number: int, frame: FrameType | None) -> None:
    del frame
    child.send_signal(number)

  before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    code = child.wait()
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
    os.close(writing)
  # JAX aborts in C++ when process 0 is lost; see the module.
  if code == -signal.SIGABRT:
    print(f"mxjax: {LOST_MESSAGE}", file=sys.stderr, flush=True)
    return LOST
  # As shells count a child that a signal ended.
  return code if code >= 0 else 128 - code


def is_supervised() -> bool:
  """Whether this process is the child of `supervise`."""
  return _PIPE in os.environ


def _end_with_parent() -> None:
  # Reading returns when the parent's end closes, however the parent died.
  os.read(int(os.environ[_PIPE]), 1)
  os._exit(128 + signal.SIGKILL)


def connect(
  coordinator: str | None = None,
  processes: int | None = None,
  process: int | None = None,
) -> None:
  """Joins the job; must be called before any other use of JAX.

  `coordinator` is `host:port` of process 0. Values that are None come from the
  cluster's environment (Slurm, Kubernetes, Open MPI and others that JAX knows).

  Raises:
    ValueError: A value is missing here and in the environment, or joining fails.
  """
  # Before joining, which may wait long for the other processes.
  if is_supervised():
    threading.Thread(target=_end_with_parent, daemon=True).start()
  try:
    jax.distributed.initialize(coordinator, processes, process)
  except (RuntimeError, ValueError) as error:
    raise ValueRefusal(
      "distributed",
      expected=f"to join {processes or 'the'} processes at "
      f"{coordinator or 'the coordinator of the cluster'}",
      got=f"an error: {error}",
      mend="pass --coordinator HOST:PORT, --processes N and --process I on every one",
    ) from error


def is_leader() -> bool:
  """Whether this process is the one that writes."""
  return jax.process_index() == 0


def _spans_processes(mesh: Mesh | None) -> bool:
  return mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1


def _gathered(value: np.ndarray) -> np.ndarray:
  from jax.experimental import multihost_utils

  # 32-bit types are enough for all the values compared here.
  with jax.enable_x64(False):
    return np.asarray(multihost_utils.process_allgather(value))


def any_of(flag: bool, mesh: Mesh | None) -> bool:
  """Whether the flag is set in any process of a mesh; all of them must call this."""
  if not _spans_processes(mesh):
    return flag
  return bool(_gathered(np.asarray(flag, np.int32)).any())


def from_leader(number: int) -> int:
  """Returns process 0's value of a number below 2^31; all processes must call this."""
  if jax.process_count() == 1:
    return number
  return int(_gathered(np.asarray(number, np.int32))[0])


def wait_for_all(mesh: Mesh | None) -> None:
  """Waits until every process of a mesh has called this."""
  any_of(False, mesh)


def check_same(what: str, tree: Any, mesh: Mesh | None) -> None:
  """Checks that all processes of a mesh have the same arrays, numbers and texts.

  Raises:
    ValueError: Some process differs in `tree`, which the message calls `what`.
  """
  if not _spans_processes(mesh):
    return
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    digest.update(jax.tree_util.keystr(path).encode())
    is_array = isinstance(leaf, (jax.Array, np.ndarray))
    data = np.ascontiguousarray(leaf).tobytes() if is_array else repr(leaf).encode()
    digest.update(data)
  mine = np.frombuffer(digest.digest(), np.uint8).astype(np.int32)
  all_digests = _gathered(mine)
  # All processes see the same digests, so that all of them raise together.
  differing = [i for i, one in enumerate(all_digests) if (one != all_digests[0]).any()]
  if differing:
    raise ValueRefusal(
      "distributed",
      expected=f"the same {what} in every process",
      got=f"others in {', '.join(map(str, differing))} than in process 0",
      mend="start all processes with the same arguments, files, versions and kind of "
      "machine",
    )


def lost_message(error: BaseException) -> str | None:
  """Returns the message for an error caused by another process's end, else None."""
  # A refusal of ours may quote one of these words, as in the name of a file.
  if isinstance(error, Refusal):
    return None
  # Gloo, NCCL and XLA's coordination service raise RuntimeErrors without a number.
  text = str(error).lower()
  return LOST_MESSAGE if any(sign in text for sign in _SIGNS) else None


def leave(code: int) -> NoReturn:
  """Exits at once, without waiting for the other processes, which notice it."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
