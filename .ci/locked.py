"""Runs a command while no other process has the same lock, and waits for it.

  python .ci/locked.py LOCK COMMAND [WORD ...]

The lock is `flock` on the file LOCK, which the kernel releases when the command and
all that it started have ended, however they end. It is for `make`, and so needs only
Python's own library.
"""

import fcntl
import os
import sys


def main() -> None:
  """Becomes the command, which inherits the lock."""
  path, *command = sys.argv[1:]
  lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    print(f"another make has {path}; waiting until it has ended", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
  os.set_inheritable(lock, True)
  os.execvp(command[0], command)


if __name__ == "__main__":
  main()
