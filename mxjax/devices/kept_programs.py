"""Compiled programs that later processes use: one file each, verified before use.

JAX can keep what XLA compiled and runs what it finds as machine code, without a check:
of 150 entries with one flipped bit 30 killed the process and 7 gave wrong numbers in
silence. Therefore every entry of ours has a digest, over its name too, and

- is written beside its place and renamed, so that nobody reads half of one;
- is used only if the digest is right; otherwise a line is logged, the file is removed
  and XLA compiles again;
- lies in a folder, and is a file, of this user that nobody else may write.

JAX opens a folder whose name begins with a scheme of ours through `_Folder`, which
etils makes for it: both hooks are public, and a JAX that used the files in another way
would find none. XLA's own caches in that folder, of autotuning results and of kernels,
have no digest and stay off; a program that is kept has its tuned choices inside.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import secrets
import stat
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

from mxjax.errors import OSRefusal

LOG = logging.getLogger(__name__)
ANYWHERE, ON_A_GPU = "mxjax-programs://", "mxjax-programs-of-a-gpu://"
"""What the name of a folder begins with in `jax_compilation_cache_dir`."""
MAGIC = b"mxjax compiled program 1\n"
"""The first bytes of an entry; a SHA-256 digest and JAX's own bytes follow."""
SUFFIX, UNFINISHED = ".program", ".unfinished"
MOST_BYTES = 4 << 30
"""Bytes of a folder from which the programs that were used least recently go."""
A_DAY = 86400.0
"""Seconds after which an unfinished file belongs to a process that was killed."""
_FOREIGN = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> pathlib.Path:
  """Returns the folder in this user's cache: `$XDG_CACHE_HOME` or `~/.cache`.

  Raises:
    RuntimeError: The user has no home folder.
  """
  # The specification says that a relative path is to be ignored.
  named = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
  home = named if named.is_absolute() else pathlib.Path.home() / ".cache"
  return home / "mxjax" / "compiled"


def keep_compiled(folder: str | os.PathLike[str] | None = None) -> pathlib.Path:
  """Keeps what XLA compiles from now on, and uses what an earlier process kept.

  That changes the JAX of the whole process, so the library never does it unasked; the
  command line does, on a GPU. Results do not depend on it. Programs for other versions,
  devices and options lie side by side, under names that JAX makes of all of them.
  The folder may be removed at any time; above `MOST_BYTES` the programs that were used
  least recently are removed.

  Args:
    folder: Where, by default `default_folder()`. It is made, for this user alone.

  Returns:
    The folder.

  Raises:
    OSError: The folder belongs to another user, others may write to it, or it cannot be
      made. What lies there would run as this user.
  """
  path = default_folder() if folder is None else pathlib.Path(folder)
  path = pathlib.Path(os.path.abspath(path))
  # Refused here, where the caller can see it: JAX opens the folder again later, and
  # there a fault is only logged.
  os.close(_open_folder(path))
  _use(ANYWHERE, path)
  return path


def keep_compiled_on_gpu() -> None:
  """Keeps programs as `keep_compiled` does, if what compiles turns out to be a GPU.

  For programs, before JAX has started its devices: a CPU compiles a build in seconds.
  Nothing happens where the user named a folder of JAX's own, as with the environment
  variable `JAX_COMPILATION_CACHE_DIR`. A folder that cannot be used is logged.
  """
  config: Any = jax.config
  if config.jax_compilation_cache_dir is not None:
    return
  try:
    _use(ON_A_GPU, default_folder())
  except RuntimeError as error:
    LOG.warning("compiled programs are not kept: %s", error)


def keep_none() -> None:
  """Neither keeps compiled programs in this process nor uses any."""
  compilation_cache.reset_cache()
  jax.config.update("jax_compilation_cache_dir", None)


def _use(scheme: str, folder: pathlib.Path) -> None:
  # JAX opens its cache once, at the first program that it compiles.
  compilation_cache.reset_cache()
  settings = {
    "jax_compilation_cache_dir": scheme + os.fspath(folder),
    # JAX's default leaves out what compiles in less than a second; a build is made of
    # many such programs.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",
    # JAX's own way of removing old entries writes further files.
    "jax_compilation_cache_max_size": -1,
  }
  for name, value in settings.items():
    jax.config.update(name, value)


def _own(found: os.stat_result) -> bool:
  """Whether a file or folder is this user's, and nobody else may write it."""
  return found.st_uid == os.geteuid() and not found.st_mode & _FOREIGN


def _open_folder(path: pathlib.Path) -> int:
  """Makes a folder if it is missing, and returns it opened."""
  flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
  try:
    opened = os.open(path, flags)
  except FileNotFoundError:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
      path.mkdir(mode=0o700)
    opened = os.open(path, flags)
  # Of what was opened: behind its path there could be another folder by then.
  found = os.fstat(opened)
  if _own(found):
    return opened
  os.close(opened)
  mode = stat.S_IMODE(found.st_mode)
  raise OSRefusal(
    path,
    expected="a folder of this user that nobody else may write, because compiled "
    "programs in it are run",
    got=f"one of user {found.st_uid} with mode {mode:04o}",
    mend="chmod go-w it if it is yours, or name another (--compiled DIR) or none "
    "(--no-compiled)",
  )


@epath.register_path_cls([ANYWHERE, ON_A_GPU])
class _Folder:
  """The folder of programs as JAX's cache uses it: made, and joined with a name."""

  def __init__(self, uri: str) -> None:
    scheme, path = uri.split("://", maxsplit=1)
    self._path = pathlib.Path(path)
    self._for_gpus = f"{scheme}://" == ON_A_GPU
    self._opened: int | None = None

  def joinpath(self, *names: str) -> "_Folder":
    """Returns itself: etils joins what it opened with no names."""
    assert not names
    return self

  def mkdir(self, **_: Any) -> None:
    """Opens the folder, unless it is for GPUs alone and there is none."""
    # Asked only here: JAX opens its cache at the first program, when devices have been
    # started.
    if self._for_gpus and jax.default_backend() != "gpu":
      return
    try:
      self._opened = _open_folder(self._path)
    except OSError as error:
      LOG.warning("compiled programs are not kept: %s", error)
      return
    # JAX drops the folder without telling it.
    weakref.finalize(self, os.close, self._opened)
    _remove_old(self._path)

  def __truediv__(self, name: str) -> "_Entry":
    if self._opened is None:
      # Or JAX would go on to pack every program for a file that is never written.
      keep_none()
    return _Entry(self, name)

  def __str__(self) -> str:
    return os.fspath(self._path)


class _Entry:
  """One program: there only if it is whole, and then read once."""

  def __init__(self, folder: _Folder, name: str) -> None:
    # Kept, because the folder is closed with the last reference to it.
    self._folder, self._opened, self._name = folder, folder._opened, name
    self._value: bytes | None = None

  def exists(self) -> bool:
    """Reads and verifies the file; one that is not whole is removed, with a line."""
    if self._opened is None:
      return False
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
      with open(os.open(self._file, flags, dir_fd=self._opened), "rb") as file:
        if not _own(os.fstat(file.fileno())):
          return self._refuse("others may write it")
        data = file.read()
        # Removing what was used least recently goes by this; a jail may forbid it.
        with contextlib.suppress(PermissionError):
          os.utime(file.fileno())
    except FileNotFoundError:
      return False
    except OSError as error:
      return self._refuse(str(error))
    # Kept as bytes: what was verified is what is run, whatever becomes of the file.
    value = data[len(MAGIC) + hashlib.sha256().digest_size :]
    # `or None`, because a slice that ends at -0 is empty.
    if data[: -len(value) or None] != self._head(value):
      return self._refuse("its digest is not that of its bytes")
    self._value = value
    return True

  def read_bytes(self) -> bytes:
    """Returns the bytes that `exists` verified.

    Raises:
      FileNotFoundError: `exists` did not find the program whole.
    """
    if self._value is None:
      raise FileNotFoundError(self._file)
    return self._value

  def write_bytes(self, data: bytes) -> None:
    """Writes the file as a whole; without room a line is logged, and nothing more."""
    if self._opened is None:
      return
    partial = f"{secrets.token_hex(8)}{UNFINISHED}"
    # Never into a file that is there already, which could be someone's link.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
      try:
        with open(os.open(partial, flags, 0o600, dir_fd=self._opened), "wb") as file:
          file.write(self._head(data))
          file.write(data)
        places = {"src_dir_fd": self._opened, "dst_dir_fd": self._opened}
        os.replace(partial, self._file, **places)
      except BaseException:
        with contextlib.suppress(OSError):
          os.unlink(partial, dir_fd=self._opened)
        raise
    except OSError as error:
      LOG.warning("a compiled program is not kept in %s: %s", self._folder, error)

  @property
  def _file(self) -> str:
    return self._name + SUFFIX

  def _head(self, value: bytes) -> bytes:
    # With its name, or one program could be renamed to another.
    return MAGIC + hashlib.sha256(self._name.encode() + b"\0" + value).digest()

  def _refuse(self, why: str) -> bool:
    LOG.warning("%s in %s is compiled again: %s", self._file, self._folder, why)
    with contextlib.suppress(OSError):
      os.unlink(self._file, dir_fd=self._opened)
    return False


def _remove_old(folder: pathlib.Path) -> None:
  """Removes what killed processes left, and old programs above `MOST_BYTES`."""
  removable: Callable[[pathlib.Path], bool] = lambda path: (
    path.suffix in (SUFFIX, UNFINISHED) and path.is_file() and not path.is_symlink()
  )
  now, files = time.time(), []
  for path in filter(removable, folder.iterdir()):
    with contextlib.suppress(OSError):
      found = path.stat()
      if path.suffix == UNFINISHED and now - found.st_mtime > A_DAY:
        path.unlink()
      else:
        files.append((found.st_mtime, found.st_size, path))
  total = sum(size for _, size, _ in files)
  # By the time of the last use, which `exists` notes.
  for _, size, path in sorted(files):
    if total <= MOST_BYTES:
      return
    with contextlib.suppress(OSError):
      path.unlink()
      total -= size
