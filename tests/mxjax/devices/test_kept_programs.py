"""Compiled programs of earlier processes: whole, this user's, or compiled again."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import pytest

from mxjax.devices import kept_programs
from mxjax.errors import Refusal

PROCESS = """
import collections, json, logging, sys
import jax, jax.numpy as jnp
from jax import monitoring
from mxjax.devices import kept_programs
logging.basicConfig(format="%(message)s", stream=sys.stderr)
found = collections.Counter()
monitoring.register_event_listener(
  lambda name, **_: found.update([name.rpartition("/")[2]])
)
{start}
x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
value = float(jax.jit(lambda x: (jnp.exp(x) @ x.T).sum())(x))
counts = found["cache_hits"], found["cache_misses"]
print(json.dumps([value, *counts, jax.config.jax_compilation_cache_dir]))
"""


def told(start, **environment):
  """What a new process computed, how many programs it found, and what it logged."""
  text = PROCESS.replace("{start}", start)
  inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
  done = subprocess.run(
    [sys.executable, "-c", text],
    capture_output=True,
    text=True,
    check=True,
    env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
  )
  return *json.loads(done.stdout.splitlines()[-1]), done.stderr


def keeping(folder):
  return f"kept_programs.keep_compiled({str(folder)!r})"


def programs(folder):
  return sorted(folder.rglob("*" + kept_programs.SUFFIX))


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
  folder = tmp_path / "made" / "here"
  value, hits, misses, config, _ = told(keeping(folder))
  assert hits == 0 and misses > 0
  assert config.endswith(str(folder)) and "://" in config
  assert folder.stat().st_mode & 0o777 == 0o700
  kept = programs(folder)
  assert len(kept) == misses
  assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
  assert told(keeping(folder))[:3] == (value, misses, 0)


@pytest.mark.slow
def test_a_damaged_program_is_compiled_again_with_a_line(tmp_path):
  value, _, misses, _, _ = told(keeping(tmp_path))
  for path in programs(tmp_path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
  again, hits, compiled, _, log = told(keeping(tmp_path))
  assert (again, hits, compiled) == (value, 0, misses)
  assert log.count("is compiled again: its digest") == misses
  assert told(keeping(tmp_path))[:3] == (value, misses, 0)


@pytest.fixture
def folder(tmp_path):
  """A folder of programs opened as JAX opens it."""
  opened = kept_programs._Folder(kept_programs.ANYWHERE + str(tmp_path))
  opened.mkdir(parents=True, exist_ok=True)
  return opened


def file_of(folder, name):
  (path,) = (p for p in programs(folder._path) if p.name.startswith(name))
  return path


VALUE = bytes(range(200)) + b"the program"


def test_no_flipped_bit_is_ever_used(folder, caplog):
  (folder / "a").write_bytes(VALUE)
  path = file_of(folder, "a")
  whole = path.read_bytes()
  assert len(whole) == len(kept_programs.MAGIC) + 32 + len(VALUE)
  for position in range(len(whole)):
    for bit in range(8):
      broken = bytearray(whole)
      broken[position] ^= 1 << bit
      path.write_bytes(broken)
      caplog.clear()
      assert not (folder / "a").exists()
      assert "is compiled again" in caplog.text
      assert not path.exists()
  path.write_bytes(whole)
  entry = folder / "a"
  assert entry.exists() and entry.read_bytes() == VALUE


@pytest.mark.parametrize("kept", [0, 1, 20, 25, 56, 57, 58, -1])
def test_no_part_of_a_program_is_used(folder, caplog, kept):
  (folder / "a").write_bytes(VALUE)
  path = file_of(folder, "a")
  path.write_bytes(path.read_bytes()[:kept])
  assert not (folder / "a").exists()
  assert "is compiled again" in caplog.text


def test_a_program_under_another_name_is_not_used(folder, caplog):
  (folder / "a").write_bytes(VALUE)
  path = file_of(folder, "a")
  path.rename(path.with_name("b" + kept_programs.SUFFIX))
  assert not (folder / "b").exists()
  assert "its digest" in caplog.text


def test_what_was_verified_is_what_is_read(folder):
  (folder / "a").write_bytes(VALUE)
  entry = folder / "a"
  with pytest.raises(FileNotFoundError):
    entry.read_bytes()
  assert entry.exists()
  file_of(folder, "a").write_bytes(b"changed in between")
  assert entry.read_bytes() == VALUE


def test_a_program_that_others_may_write_is_not_used(folder, caplog):
  for mode in (0o620, 0o602, 0o666):
    (folder / "a").write_bytes(VALUE)
    file_of(folder, "a").chmod(mode)
    assert not (folder / "a").exists()
    assert "others may write it" in caplog.text


def test_a_link_is_not_followed(folder, tmp_path):
  (folder / "a").write_bytes(VALUE)
  path = file_of(folder, "a")
  elsewhere = tmp_path / "elsewhere"
  path.rename(elsewhere)
  path.symlink_to(elsewhere)
  assert not (folder / "a").exists()
  assert elsewhere.exists()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_refused(tmp_path, mode, caplog):
  before = jax.config.jax_compilation_cache_dir
  folder = tmp_path / "shared"
  folder.mkdir()
  folder.chmod(mode)
  with pytest.raises(Refusal, match=f"mode {mode:04o}; chmod go-w") as refused:
    kept_programs.keep_compiled(folder)
  assert isinstance(refused.value, OSError)
  assert jax.config.jax_compilation_cache_dir == before
  # And if that changes before the first program is compiled:
  opened = kept_programs._Folder(kept_programs.ANYWHERE + str(folder))
  opened.mkdir()
  assert opened._opened is None
  assert "compiled programs are not kept" in caplog.text


def test_a_folder_and_a_program_of_another_user_are_refused(
  folder, tmp_path, monkeypatch, caplog
):
  (folder / "a").write_bytes(VALUE)
  assert (folder / "a").exists()
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  assert not (folder / "a").exists()
  with pytest.raises(Refusal, match=f"one of user {os.getuid()}"):
    kept_programs.keep_compiled(tmp_path)


def test_a_killed_write_leaves_nothing_that_is_read(tmp_path):
  text = (
    "import os, signal\n"
    "from mxjax.devices import kept_programs\n"
    f"folder = kept_programs._Folder(kept_programs.ANYWHERE + {str(tmp_path)!r})\n"
    "folder.mkdir()\n"
    "os.replace = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
    "(folder / 'a').write_bytes(bytes(9999))\n"
  )
  done = subprocess.run([sys.executable, "-c", text], check=False)
  assert done.returncode == -signal.SIGKILL
  folder = kept_programs._Folder(kept_programs.ANYWHERE + str(tmp_path))
  folder.mkdir()
  assert not (folder / "a").exists()
  (left,) = tmp_path.rglob("*" + kept_programs.UNFINISHED)
  yesterday = time.time() - kept_programs.A_DAY - 1
  os.utime(left, (yesterday, yesterday))
  folder.mkdir()
  assert not left.exists()


def test_a_full_disk_costs_a_line(folder, monkeypatch, caplog):
  def full(*_, **__):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "replace", full)
  (folder / "a").write_bytes(VALUE)
  assert "No space left" in caplog.text
  assert not list(folder._path.rglob("*" + kept_programs.UNFINISHED))


def test_the_programs_used_least_recently_go(folder, monkeypatch):
  for age, name in enumerate("abcd"):
    (folder / name).write_bytes(VALUE)
    stamp = time.time() - 1000 + age
    os.utime(file_of(folder, name), (stamp, stamp))
  assert (folder / "a").exists()  # Used now.
  monkeypatch.setattr(kept_programs, "MOST_BYTES", 2 * (len(VALUE) + 57))
  folder.mkdir()
  assert [path.name[0] for path in programs(folder._path)] == ["a", "d"]


@pytest.mark.parametrize("cache", ["relative", "/tmp/of/xdg", ""])
def test_the_folder_is_in_the_users_cache(monkeypatch, cache):
  monkeypatch.setenv("XDG_CACHE_HOME", cache)
  monkeypatch.setenv("HOME", "/home/someone")
  within = "/tmp/of/xdg" if cache.startswith("/") else "/home/someone/.cache"
  assert kept_programs.default_folder() == pathlib.Path(within, "mxjax", "compiled")


def test_a_cpu_keeps_nothing_unasked(tmp_path):
  start = "kept_programs.keep_compiled_on_gpu()"
  value, hits, misses, config, _ = told(start, HOME=str(tmp_path), XDG_CACHE_HOME="")
  assert (hits, config) == (0, None)
  assert not list(tmp_path.iterdir())


ON_A_GPU = "jax.default_backend = lambda: 'gpu'\nkept_programs.keep_compiled_on_gpu()"
"""The library asks what it runs on; what compiles is a CPU all the same."""


@pytest.mark.slow
def test_a_gpu_keeps_programs_for_a_command(tmp_path):
  where = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
  value, _, misses, _, _ = told(ON_A_GPU, **where)
  assert len(programs(tmp_path / ".cache" / "mxjax" / "compiled")) == misses
  assert told(ON_A_GPU, **where)[:3] == (value, misses, 0)
  kept = programs(tmp_path)
  none = ON_A_GPU + "\nkept_programs.keep_none()"
  assert told(none, **where)[1] == 0
  assert programs(tmp_path) == kept


def test_a_folder_that_a_command_cannot_use_costs_a_line(tmp_path):
  folder = tmp_path / "mxjax" / "compiled"
  folder.mkdir(parents=True)
  folder.chmod(0o777)
  value, hits, _, config, log = told(ON_A_GPU, XDG_CACHE_HOME=str(tmp_path))
  assert (hits, config) == (0, None)
  assert log.count("compiled programs are not kept") == 1
  assert not list(folder.iterdir())


def test_a_folder_that_the_user_named_stays(tmp_path):
  own = tmp_path / "own"
  *_, config, _ = told(ON_A_GPU, JAX_COMPILATION_CACHE_DIR=str(own))
  assert config == str(own)


@pytest.mark.slow
def test_xla_keeps_nothing_beside_unverified(tmp_path):
  start = keeping(tmp_path) + (
    "\nassert jax.config.jax_persistent_cache_enable_xla_caches == 'none'"
  )
  told(start)
  assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {
    kept_programs.SUFFIX
  }
