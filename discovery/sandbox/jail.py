"""Isolation of a worker: namespaces, Landlock, seccomp and limits (Linux, x86-64).

This module imports only the standard library, so that a worker can isolate itself
before anything else runs in it. Threads started later are isolated too. If this system
cannot enforce a level, that is an error, never a weaker jail.
"""

import ctypes
import dataclasses
import os
import platform
import re
import resource
import select
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

LEVELS = ("strict", "standard", "off")
JAILED = LEVELS[:2]
SCRATCH_BYTES = 64 << 20
THREADS = 512 + 8 * (os.cpu_count() or 1)
"""Threads of a jail; libraries start some for each processor."""
WATCH_SECONDS = 0.2
"""Between two counts of a jail's threads from outside.

Each count wakes the process that watches, also beside a worker that waits for its next
call. What starts threads until it is counted is bounded by its address space.
"""

# Numbers of the kernel: flags, options and system calls of Linux on x86-64.
_CLONE = {
  "user": 0x10000000,
  "mount": 0x00020000,
  "pid": 0x20000000,
  "network": 0x40000000,
  "ipc": 0x08000000,
  "uts": 0x04000000,
}
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_MS_REC_PRIVATE, _MS_NOSUID_NODEV = 0x4000 | 0x40000, 0x2 | 0x4
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
# A rule for a file may have only these; the kernel refuses rights of folders in it.
_FILE_RIGHTS = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15
_SYSCALLS = {
  # Files: only ordinary ones in the scratch folder; no links, owners, modes or times.
  **dict(read=0, write=1, close=3, stat=4, fstat=5, lstat=6, lseek=8, pread64=17),
  **dict(pwrite64=18, readv=19, writev=20, access=21, dup=32, dup2=33, dup3=292),
  **dict(fsync=74, fdatasync=75, ftruncate=77, getdents64=217, getcwd=79, chdir=80),
  **dict(rename=82, unlink=87, readlink=89, umask=95, openat=257, newfstatat=262),
  **dict(unlinkat=263, renameat=264, readlinkat=267, faccessat=269, faccessat2=439),
  **dict(fallocate=285, renameat2=316, statx=332, fadvise64=221, fstatfs=138),
  **dict(statfs=137, close_range=436, flock=73, open=2, copy_file_range=326),
  # Memory; shared memory of System V and memfd would escape the limit.
  **dict(mmap=9, mprotect=10, munmap=11, brk=12, mremap=25, msync=26, mincore=27),
  **dict(madvise=28, mbind=237, set_mempolicy=238, get_mempolicy=239, membarrier=324),
  # Threads and time.
  **dict(rt_sigaction=13, rt_sigprocmask=14, rt_sigreturn=15, sched_yield=24),
  **dict(pause=34, nanosleep=35, setitimer=38, getpid=39, exit=60, uname=63),
  **dict(gettimeofday=96, getrlimit=97, getrusage=98, sysinfo=99, times=100),
  **dict(getuid=102, getgid=104, geteuid=107, getegid=108, getppid=110),
  **dict(sigaltstack=131, sched_getparam=143, sched_getscheduler=145, arch_prctl=158),
  **dict(sched_get_priority_max=146, sched_get_priority_min=147, gettid=186),
  **dict(futex=202, sched_getaffinity=204, set_tid_address=218, restart_syscall=219),
  **dict(clock_gettime=228, clock_getres=229, clock_nanosleep=230, exit_group=231),
  **dict(set_robust_list=273, getcpu=309, getrandom=318, rseq=334),
  # Pipes and waiting.
  **dict(poll=7, pipe=22, select=23, epoll_wait=232, epoll_ctl=233, pselect6=270),
  **dict(ppoll=271, epoll_pwait=281, eventfd2=290, epoll_create1=291, pipe2=293),
}
"""Calls that are allowed with any arguments; any other returns EPERM."""
_ARGUMENTS = {
  # Asking about terminals and closing on exec; others change a file's attributes.
  "ioctl": (16, 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
  # Copies, flags and locks; others send signals to processes or lease files.
  "fcntl": (72, 1, (*range(8), 36, 37, 38, 1030)),
  # Names of threads and of memory.
  "prctl": (157, 0, (15, 16, 0x53564D41)),
  # Limits of this process, which may only fall.
  "prlimit64": (302, 0, (0,)),
}
"""Calls allowed for some values of one argument: number, its place, the values."""
_TGKILL, _CLONE_SYSCALL, _CLONE3_SYSCALL, _CLONE_THREAD = 234, 56, 435, 0x10000


class JailError(RuntimeError):
  """Raised for isolation that this system cannot enforce."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """Resource limits of a worker.

  Attributes:
    seconds: Wall clock of one job; the supervisor kills the worker.
    cpu_seconds: CPU time of the whole process; the kernel kills it.
    call_cpu_seconds: CPU time of one call of a run worker, which serves many; all
      phases of the call together.
    memory_bytes: Address space.
    files: Open file descriptors.
    message_bytes: Longest reply.
    stderr_bytes: Length of the end of a worker's output that is kept.
  """

  seconds: float = 30.0
  cpu_seconds: int = 60
  call_cpu_seconds: int = 1 << 20
  memory_bytes: int = 4 << 30
  files: int = 128
  message_bytes: int = 8 << 20
  stderr_bytes: int = 4096


_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> int:
  if result < 0:
    raise JailError(f"jail: {what}: {os.strerror(ctypes.get_errno())}.")
  return result


def die_with_parent() -> None:
  """Asks the kernel to kill this process when its parent dies."""
  _call("pdeathsig", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def enter_namespaces() -> None:
  """Creates user, mount, pid, network, IPC and host-name namespaces for later forks."""
  # Read before the namespace changes them: outside of a mapping they are those of
  # nobody.
  uid, gid = os.geteuid(), os.getegid()
  # The flags are distinct bits, so their sum is their union.
  _call("namespaces", _libc.unshare(sum(_CLONE.values())))
  for name, text in (
    # First, because without it the kernel lets no ordinary user write a map of groups.
    ("setgroups", "deny"),
    ("uid_map", f"65534 {uid} 1"),
    ("gid_map", f"65534 {gid} 1"),
  ):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(text)
  # Otherwise what is mounted later could show outside as well.
  result = _libc.mount(None, b"/", None, _MS_REC_PRIVATE, None)
  _call("private mounts", result)


def mount_scratch(path: str) -> None:
  """Mounts a 64 MB tmpfs that is private to this mount namespace and ends with it."""
  options = f"size={SCRATCH_BYTES},mode=700".encode()
  result = _libc.mount(b"tmpfs", path.encode(), b"tmpfs", _MS_NOSUID_NODEV, options)
  _call("scratch", result)


class _Ruleset(ctypes.Structure):
  _fields_ = [(name, ctypes.c_uint64) for name in ("fs", "net", "scoped")]


class _PathRule(ctypes.Structure):
  # The kernel declares this structure packed.
  _pack_ = 1
  _fields_ = [("access", ctypes.c_uint64), ("fd", ctypes.c_int32)]


def landlock_version() -> int:
  """Returns the kernel's Landlock version, or 0 without Landlock."""
  return max(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1), 0)


def restrict_files(
  readable: Iterable[str], writable: Iterable[str], listable: Iterable[str] = ()
) -> int:
  """Restricts file access to these paths and their contents by Landlock.

  Newer Landlock versions also forbid TCP and signals to processes outside. Returns the
  version in force.

  Raises:
    JailError: The kernel has no Landlock, or a system call failed.
  """
  version = landlock_version()
  if version < 1:
    raise JailError("jail: this kernel has no Landlock; use a newer one or level off.")
  # A kernel refuses what its version does not know: moving files between folders came
  # with 2, truncating with 3, TCP with 4, control of devices with 5, and scopes of
  # signals and sockets with 6.
  rights = (1 << 13) - 1
  rights |= (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
  rights |= 1 << 15 if version >= 5 else 0
  ruleset = _Ruleset(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
  size = 24 if version >= 6 else (16 if version >= 4 else 8)
  fd = _libc.syscall(_LANDLOCK_CREATE, ctypes.byref(ruleset), size, 0)
  _call("landlock", fd)
  read = _READ_FILE | _READ_DIR
  grants = [(path, read) for path in readable]
  grants += [(path, _READ_DIR) for path in listable]
  grants += [(path, rights & ~_EXECUTE) for path in writable]
  for path, access in filter(lambda grant: os.path.exists(grant[0]), grants):
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
      access &= _FILE_RIGHTS & rights
    rule = _PathRule(access, handle)
    result = _libc.syscall(_LANDLOCK_ADD, fd, 1, ctypes.byref(rule), 0) if access else 0
    _call(f"landlock rule for {path}", result)
    os.close(handle)
  # Without it, only root may restrict itself.
  _call("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
  _call("landlock", _libc.syscall(_LANDLOCK_RESTRICT, fd, 0))
  os.close(fd)
  return version


def restrict_syscalls() -> None:
  """Allows what JAX needs for files, memory and threads, and nothing else (seccomp)."""
  if platform.machine() != "x86_64" or sys.maxsize < 2**32:
    raise JailError(
      f"jail: the syscall filter knows x86_64 only, this is {platform.machine()}; use "
      "level off for trusted programs."
    )
  step = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
  # Opcodes of classic BPF: load a word, three conditional jumps, return. A jump counts
  # the steps that it leaves out.
  load, equal, at_least, is_set, leave = 0x20, 0x15, 0x35, 0x45, 0x06
  # EPERM, ENOSYS, allow, and kill the process.
  deny, missing, allow, kill = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000
  # The architecture first, since numbers mean other calls elsewhere: 0xC000003E is
  # x86-64. From 0x40000000 on they are those of x32, a second table of the same kernel.
  program = [
    step(load, 0, 0, 4),
    step(equal, 1, 0, 0xC000003E),
    step(leave, 0, 0, kill),
    step(load, 0, 0, 0),
    step(at_least, 0, 1, 0x40000000),
    step(leave, 0, 0, kill),
  ]
  for number in _SYSCALLS.values():
    program += [step(equal, 0, 1, number), step(leave, 0, 0, allow)]
  # A process may signal itself, as abort does.
  for number, place, values in (*_ARGUMENTS.values(), (_TGKILL, 0, (os.getpid(),))):
    program += [
      step(equal, 0, 2 * len(values) + 2, number),
      # The lower half of an argument; the number of the call is no longer loaded after
      # it, so every list ends by denying.
      step(load, 0, 0, 16 + 8 * place),
    ]
    for value in values:
      program += [step(equal, 0, 1, value), step(leave, 0, 0, allow)]
    program += [step(leave, 0, 0, deny)]
  # glibc falls back from clone3 to clone, whose flags a filter can read.
  program += [step(equal, 0, 1, _CLONE3_SYSCALL), step(leave, 0, 0, missing)]
  program += [
    # Threads may be started, processes not. Any other call ends at the last step.
    step(equal, 0, 3, _CLONE_SYSCALL),
    step(load, 0, 0, 16),
    step(is_set, 0, 1, _CLONE_THREAD),
    step(leave, 0, 0, allow),
    step(leave, 0, 0, deny),
  ]
  code = b"".join(program)
  buffer = ctypes.create_string_buffer(code, len(code))

  class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("address", ctypes.c_void_p)]

  wrapped = Filter(len(program), ctypes.addressof(buffer))
  _call("no_new_privs", _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
  _call("seccomp", _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(wrapped), 0, 0))


def drop_capabilities() -> None:
  """Drops the capabilities of root, or of the first process in a user namespace."""
  # Version 3 of the interface, for this process; the three sets in two words each are
  # zero.
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)
  _call("capset", _libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()))


def limit_threads() -> bool:
  """Limits the threads of this pid namespace; returns whether the kernel can.

  The kernel has had the limit per namespace since 6.14, and before for all processes.
  RLIMIT_NPROC does not bind root. `_watch` is the limit everywhere else.
  """
  release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
  if release < (6, 14) or os.getpid() != 1:
    return False
  try:
    with open("/proc/sys/kernel/pid_max", "w") as file:
      file.write(str(THREADS))
  except OSError:
    return False
  return True


def set_limits(limits: Limits) -> None:
  """Sets hard resource limits for this process."""
  for kind, value in (
    (resource.RLIMIT_AS, limits.memory_bytes),
    (resource.RLIMIT_CPU, limits.cpu_seconds),
    (resource.RLIMIT_FSIZE, SCRATCH_BYTES),
    (resource.RLIMIT_NOFILE, limits.files),
    (resource.RLIMIT_CORE, 0),
  ):
    resource.setrlimit(kind, (value, value))


def interpreter_paths(packages: Iterable[str]) -> tuple[list[str], list[str]]:
  """Returns the readable paths and listable folders needed to import some packages.

  They cover the standard library and the named packages with their metadata, not all of
  site-packages, because data wheels are there too.
  """
  stdlib = sysconfig.get_paths()["stdlib"]
  readable = [
    os.path.join(stdlib, name)
    for name in os.listdir(stdlib)
    if name not in ("site-packages", "dist-packages")
  ]
  readable += [os.path.realpath(sys.executable), sys.prefix + "/pyvenv.cfg"]
  sites = [p for p in sys.path if p.endswith("-packages") and os.path.isdir(p)]
  for site in sites:
    for name in os.listdir(site):
      top = name.split("-")[0].split(".")[0]
      if top in packages or name.endswith((".dist-info", ".egg-info")):
        readable.append(os.path.join(site, name))
  return [*readable, *_system_paths()], [stdlib, *sites]


def _system_paths() -> Iterator[str]:
  """Yields the paths that JAX's CPU backend and the C library read."""
  yield from ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/etc/ld.so.cache")
  yield from ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/self")
  yield from ("/sys/devices/system", "/dev/urandom", "/dev/null")


def lock(
  *,
  level: str,
  readable: Iterable[str],
  listable: Iterable[str],
  scratch: str,
  limits: Limits,
  writable: Iterable[str] = (),
) -> dict[str, Any]:
  """Isolates the calling process permanently.

  For `strict`, the caller must have called `enter_namespaces` and forked before.

  Args:
    level: `strict` or `standard`.
    readable: Paths that may be read.
    listable: Folders whose entries may be listed.
    scratch: Scratch folder; `strict` mounts a tmpfs there, `standard` uses it as it is.
    limits: Resource limits.
    writable: Folders other than the scratch folder that may be written.

  Returns:
    The features in force, for the execution identity.
  """
  limited = False
  if level == "strict":
    # Both before the walls that would deny them.
    limited = limit_threads()
    mount_scratch(scratch)
  os.chdir(scratch)
  set_limits(limits)
  # The filter of calls comes last, because it allows neither those of Landlock nor
  # `capset`.
  version = restrict_files(readable, [scratch, "/dev/null", *writable], listable)
  drop_capabilities()
  restrict_syscalls()
  return {
    "level": level,
    "namespaces": sorted(_CLONE) if level == "strict" else [],
    "landlock": version,
    "seccomp": len(_SYSCALLS),
    "threads": "refused by the kernel" if limited else "watched",
    "memory_bytes": limits.memory_bytes,
  }


def fork_into_jail(level: str) -> None:
  """Forks; the parent waits and mirrors the child's exit, and the child returns.

  In `strict`, the child is the first process of its own pid namespace. When it ends, or
  the waiting parent is killed, the kernel ends everything that it started.

  Raises:
    JailError: No such level; or, in the parent, the child had too many threads.
  """
  if level not in JAILED:
    raise JailError(f"jail: level {level!r} is not one of {', '.join(JAILED)}.")
  if level == "strict":
    enter_namespaces()
  child = os.fork()
  if child:
    status = _watch(child)
    if os.WIFSIGNALED(status):
      # With a core limit of zero and default handling, end as the child ended.
      resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
      number = os.WTERMSIG(status)
      if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
  # A child does not inherit this setting of its parent.
  die_with_parent()


def _watch(child: int) -> int:
  """Waits for a child, which cannot fork, and returns its exit status.

  Raises:
    JailError: The child had more than `THREADS` threads; it has been killed.
  """
  handle = os.pidfd_open(child)
  while not select.select([handle], [], [], WATCH_SECONDS)[0]:
    with open(f"/proc/{child}/stat") as file:
      # Field 20, num_threads; field 2 is a name in brackets that may hold anything.
      threads = int(file.read().rpartition(")")[2].split()[17])
    if threads > THREADS:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      raise JailError(
        f"jail: killed with {threads} threads; a candidate may have {THREADS}."
      )
  os.close(handle)
  return os.waitpid(child, 0)[1]
