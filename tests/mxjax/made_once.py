"""Results that the workers of a run of the tests share: each is made once."""

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made_once(path: Path, make: Callable[[], Any]) -> Any:
  """Returns what `make` returns, from the file at `path` if a worker has made it.

  The others wait for a worker that makes it. A file of this name is whole: it is
  written beside its place and renamed. If a worker is killed, the kernel releases its
  lock, and the next one makes the result again.
  """
  with open(path.with_suffix(".lock"), "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if path.exists():
      return pickle.loads(path.read_bytes())
    result = make()
    # One name is enough, as nobody else writes it while this process has the lock.
    part = path.with_suffix(".part")
    with part.open("wb") as file:
      pickle.dump(result, file)
    os.replace(part, path)
    return result
