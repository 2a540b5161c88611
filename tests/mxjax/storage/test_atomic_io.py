"""Files and folders that are whole or absent, and their checksums."""

import errno
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from mxjax.errors import OSRefusal
from mxjax.storage import atomic_io


def test_files_are_safetensors_with_the_checksum_that_is_returned(tmp_path):
  arrays = {"b": np.arange(3, dtype=np.int8), "a": np.float32([[1, 2]])}
  arrays |= {"empty": np.zeros((0, 4), np.float32), "scalar": np.float64(3)}
  arrays |= {"short": np.arange(4, dtype=np.int16), "half": jnp.ones(3, jnp.bfloat16)}
  digest = atomic_io.write_arrays(tmp_path / "x.safetensors", arrays)
  assert digest == atomic_io.file_sha256(tmp_path / "x.safetensors")
  back = load_file(tmp_path / "x.safetensors")
  assert set(back) == set(arrays)
  for name, array in arrays.items():
    assert back[name].dtype == array.dtype and back[name].shape == array.shape
    np.testing.assert_array_equal(back[name], array)
  with pytest.raises(TypeError, match="got c of complex64"):
    atomic_io.write_arrays(tmp_path / "y", {"c": np.complex64([1])})


def test_metadata_goes_into_the_header(tmp_path):
  atomic_io.write_arrays(tmp_path / "x", {"a": np.ones(2)}, {"format": "pt"})
  with safe_open(tmp_path / "x", framework="numpy") as file:
    assert file.metadata() == {"format": "pt"}


def test_a_staged_folder_appears_whole_or_not_at_all(tmp_path):
  with atomic_io.staged(tmp_path / "deep" / "out") as folder:
    (folder / "file").write_text("x")
    assert not (tmp_path / "deep" / "out").exists()
  assert (tmp_path / "deep" / "out" / "file").read_text() == "x"
  with pytest.raises(OSError, match="disk full"):
    with atomic_io.staged(tmp_path / "other"):
      raise OSError("disk full")
  with pytest.raises(FileExistsError, match="never overwritten"):
    with atomic_io.staged(tmp_path / "deep" / "out"):
      pass
  assert [path.name for path in tmp_path.iterdir()] == ["deep"]
  assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


@pytest.mark.parametrize(
  ("error", "message"),
  [
    (OSError(errno.ENOSPC, "x"), r"No space left on device\); make room, then"),
    (
      ValueError("RESOURCE: No space left on device [many\nlines]"),
      "; make room, then",
    ),
    (OSError(errno.EROFS, "x"), r"Read-only file system\); mount it for writing, then"),
    (PermissionError(errno.EACCES, "x"), "; allow writing there, then"),
  ],
)
def test_what_cannot_be_written_is_one_sentence(tmp_path, error, message):
  with pytest.raises(OSRefusal, match=message) as caught:
    with atomic_io.explaining(tmp_path / "out"), atomic_io.staged(tmp_path / "out"):
      raise error
  assert caught.value.place == f"output: {tmp_path / 'out'}"
  assert caught.value.errno == getattr(error, "errno", errno.ENOSPC)
  assert len(str(caught.value).splitlines()) == 1
  with pytest.raises(ValueError, match="^another$"), atomic_io.explaining(tmp_path):
    raise ValueError("another")


def test_too_little_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
  usage = type("Usage", (), {"free": 3 * 4096 + 10})
  monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
  atomic_io.check_room(tmp_path, [np.zeros(10, np.int8)], files=3)
  with pytest.raises(OSError, match="expected 12299 bytes free, got 12298; make room"):
    atomic_io.check_room(tmp_path, [np.zeros(11, np.int8)], files=3)


def test_two_that_write_one_file_do_not_meet(tmp_path):
  def parts():
    yield b"first "
    atomic_io.write_durably(tmp_path / "x", b"second")
    assert (tmp_path / "x").read_bytes() == b"second"
    yield b"whole"

  atomic_io.write_parts(tmp_path / "x", parts())
  assert (tmp_path / "x").read_bytes() == b"first whole"
  assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_every_damaged_file_is_told_apart(tmp_path):
  for name in ("same", "cut", "other", "absent"):
    (tmp_path / name).write_bytes(b"content")
  entries = atomic_io.list_files(tmp_path)
  (tmp_path / "cut").write_bytes(b"conten")
  (tmp_path / "other").write_bytes(b"contenT")
  (tmp_path / "absent").unlink()
  size = "cut has 6 bytes, not 7"
  sizes_only = atomic_io.damaged_files(tmp_path, entries, verify=False)
  assert sizes_only == ["absent is missing", size]
  read = atomic_io.damaged_files(tmp_path, entries)
  assert read == ["absent is missing", size, "other has another SHA-256"]
