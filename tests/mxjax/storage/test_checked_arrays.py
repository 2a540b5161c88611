"""Files of statistics say when a byte of theirs has changed."""

import ml_dtypes
import numpy as np
import pytest

from mxjax.storage import atomic_io

ARRAYS = {
  "hessian": np.arange(12, dtype=np.float32).reshape(3, 4),
  "stream": np.arange(5).astype(ml_dtypes.bfloat16),
}


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "folder" / "layer.safetensors"
  atomic_io.write_checked(path, ARRAYS)
  return path


def test_what_was_written_is_read(file):
  read = atomic_io.read_checked(file)
  assert {name: array.dtype for name, array in read.items()} == {
    name: array.dtype for name, array in ARRAYS.items()
  }
  for name, array in ARRAYS.items():
    np.testing.assert_array_equal(read[name], array)


def test_every_changed_byte_is_noticed_or_changes_nothing(file):
  whole = file.read_bytes()
  noticed = 0
  for place in range(len(whole)):
    damaged = bytearray(whole)
    damaged[place] ^= 1 << place % 8
    file.write_bytes(damaged)
    try:
      read = atomic_io.read_checked(file)
    except ValueError as error:
      assert str(file) in str(error) and "delete it" in str(error)
      noticed += 1
    else:
      for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array)
  assert noticed > 0.9 * len(whole)


@pytest.mark.parametrize(
  "change", [lambda b: b[:-1], lambda b: b"", lambda b: b + b"0"]
)
def test_a_cut_or_longer_file_is_refused(file, change):
  file.write_bytes(change(file.read_bytes()))
  with pytest.raises(ValueError, match="delete it"):
    atomic_io.read_checked(file)


def test_a_file_without_a_checksum_is_refused(file):
  atomic_io.write_arrays(file, ARRAYS)
  with pytest.raises(ValueError, match="expected the checksum None"):
    atomic_io.read_checked(file)
