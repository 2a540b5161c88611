"""Journal, lock and run folder by themselves: nothing here runs a model."""

import contextlib
import os
import resource
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.storage.journal import Journal
from mxjax.storage.run_folder import RunFolder
from tests.mxjax.quantized import DAMAGES, assert_same, damage

IDENTITY = {"program": {"name": "p", "options": [1, 2]}, "weights": "ab"}
PLACE = {"jax": "1", "device": "cpu"}


def layer(seed):
  rng = np.random.default_rng(seed)
  tensor = mxfp4.MXTensor(
    jnp.asarray(rng.integers(0, 255, (4, 32)), jnp.uint8),
    jnp.asarray(rng.integers(100, 130, (4, 2)), jnp.uint8),
  )
  leaf = QuantizedLinear(tensor, None, Nearest())
  norm = jnp.asarray(rng.standard_normal(8), jnp.bfloat16)
  return {"mlp": {"up_proj": {"weight": leaf}}, "norm": {"weight": norm}}


def stream(seed):
  rng = np.random.default_rng(seed)
  rows = rng.standard_normal((5, 3, 4)).astype(np.float32)
  return [jnp.asarray(rows[:2]), jnp.asarray(rows[2:4]), jnp.asarray(rows[4:])]


def write(folder, index, saved=True):
  streams = {"float": stream(index), "recovery0-mlp": stream(-index + 9)}
  folder.write_layer(
    f"layers_{index}",
    layer(index),
    {"value": index / 3},
    streams=streams if saved else None,
    clock={"seconds": {"calibration": 1.5}, "peak_bytes": {}},
  )


def make(path, layers=2):
  with RunFolder(path) as folder:
    folder.begin(IDENTITY, PLACE)
    for index in range(layers):
      write(folder, index)
  return path


@contextlib.contextmanager
def no_file_larger_than(size):
  """The kernel itself refuses the bytes, as a full disk does."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def tree_bytes(path):
  files = sorted(p for p in path.rglob("*") if p.is_file())
  return {p.relative_to(path).as_posix(): p.read_bytes() for p in files}


def test_layers_and_streams_come_back_bit_for_bit(tmp_path):
  make(tmp_path / "run")
  with RunFolder(tmp_path / "run", resume=True) as folder:
    assert [one["record"]["value"] for one in folder.finished] == [0.0, 1 / 3]
    assert_same(folder.read_layer(folder.finished[1]), layer(1))
    held = folder.read_streams(4)
    assert [len(part) for part in held["float"]] == [4, 1]
    np.testing.assert_array_equal(
      np.concatenate(held["recovery0-mlp"]), np.concatenate(stream(8))
    )
  # Only the hidden states that the next layer needs are kept.
  assert sorted(p.name for p in (tmp_path / "run/streams").iterdir()) == [
    "2-float.safetensors",
    "2-recovery0-mlp.safetensors",
  ]


def names(path):
  files = [p for p in path.rglob("*") if p.is_file() and p.name != "journal.jsonl"]
  return sorted(p.relative_to(path).as_posix() for p in files)


def test_layers_after_the_last_hidden_states_are_done_again(tmp_path):
  path = make(tmp_path / "run", layers=1)
  saved = names(path)
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    for index in (1, 2):
      write(folder, index, saved=False)
    # What the first layer left is there until other hidden states are.
    lost = ["layers/layers_1.safetensors", "layers/layers_2.safetensors"]
    assert names(path) == sorted([*saved, *lost])
  for again in range(2):
    with RunFolder(path, resume=True) as folder:
      assert len(folder.finished) == 1
      assert names(path) == saved
      assert folder.discarded == ([] if again else lost)
      if again:
        folder.begin(IDENTITY, PLACE)
        for index in (1, 2, 3):
          write(folder, index, saved=index == 2)
        assert [one["name"] for one in folder.finished] == [
          *("layers_0", "layers_1", "layers_2")
        ]
  with RunFolder(path, resume=True) as folder:
    assert folder.discarded == ["layers/layers_3.safetensors"]
    assert [str(len(s)) for s in folder.read_streams(4)["float"]] == ["4", "1"]
  assert [n for n in names(path) if "streams" in n] == [
    *("streams/3-float.safetensors", "streams/3-recovery0-mlp.safetensors")
  ]


def test_more_unlisted_layers_than_were_journaled_are_refused(tmp_path):
  path = make(tmp_path / "run", layers=1)
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    write(folder, 1, saved=False)
  for name in ("layers_2", "layers_3"):
    (path / f"layers/{name}.safetensors").write_bytes(b"x")
  with pytest.raises(ValueError, match="layers_2.safetensors is in no line.*layers_3"):
    RunFolder(path, resume=True)


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damaged_file_is_named_and_none_is_used(tmp_path, how):
  path = make(tmp_path / "run")
  before = tree_bytes(path)
  assert len(before) == 5
  for name, data in before.items():
    says = f"{name} "
    if name == "journal.jsonl":
      if how != "flip":
        continue
      says = "journal: line . of .*journal.jsonl"
    damage(path / name, how)
    with pytest.raises(ValueError, match=says):
      RunFolder(path, resume=True)
    (path / name).write_bytes(data)
    assert tree_bytes(path) == before
  RunFolder(path, resume=True).close()


def test_each_flipped_byte_of_the_journal_is_noticed(tmp_path):
  """All but the last line break are of a complete line, whose chain then fails."""
  path = make(tmp_path / "run", layers=1) / "journal.jsonl"
  data = path.read_bytes()
  for position in range(0, len(data) - 1, 7):
    flipped = bytes([data[position] ^ 4])
    path.write_bytes(data[:position] + flipped + data[position + 1 :])
    with pytest.raises(ValueError, match="journal: line"):
      Journal(path)


def test_lines_taken_out_or_exchanged_are_noticed(tmp_path):
  path = make(tmp_path / "run") / "journal.jsonl"
  lines = path.read_bytes().splitlines(keepends=True)
  for wrong in ([lines[0], lines[2]], [lines[1], lines[0], lines[2]], lines[1:]):
    path.write_bytes(b"".join(wrong))
    with pytest.raises(ValueError, match="journal: line"):
      Journal(path)


def test_a_torn_last_line_is_dropped_and_said(tmp_path):
  path = make(tmp_path / "run", layers=1)
  whole = (path / "journal.jsonl").read_bytes()
  for kept in (1, 40, 90, 300):
    with RunFolder(path, resume=True) as folder:
      write(folder, 1)
    line = (path / "journal.jsonl").read_bytes()[len(whole) :]
    # The state before the line: its streams were removed only after it was written.
    make(tmp_path / str(kept), layers=1)
    for file in (tmp_path / str(kept) / "streams").iterdir():
      os.replace(file, path / "streams" / file.name)
    (path / "journal.jsonl").write_bytes(whole + line[:kept])
    with RunFolder(path, resume=True) as folder:
      assert len(folder.finished) == 1
      assert f"journal.jsonl: {kept} bytes of a last line" in folder.discarded
      assert "layers/layers_1.safetensors" in folder.discarded
      assert "streams/2-float.safetensors" in folder.discarded
    assert (path / "journal.jsonl").read_bytes() == whole


def test_a_journal_cut_anywhere_is_refused_and_nothing_is_deleted(tmp_path):
  """A kill tears the last line only, while what the line before needs is there."""
  path = make(tmp_path / "run", layers=3)
  whole = (path / "journal.jsonl").read_bytes()
  for kept in (*range(0, len(whole) - 1, 97), 1, whole.index(b"\n"), len(whole) - 1):
    (path / "journal.jsonl").write_bytes(whole[:kept])
    before = tree_bytes(path)
    with pytest.raises(ValueError, match="got damage"):
      RunFolder(path, resume=True)
    assert tree_bytes(path) == before


def test_files_that_no_kill_leaves_are_not_deleted(tmp_path):
  path = make(tmp_path / "run")
  for name in ("notes.txt", "layers/a/b", "streams/7-float.safetensors", "tuning/9"):
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"damage: {name} is in no line"):
      RunFolder(path, resume=True)
    (path / name).unlink()
  RunFolder(path, resume=True).close()


@pytest.mark.parametrize("name", ["../precious", "/etc/passwd", "layers/../../x", "x"])
def test_a_journal_lists_no_file_outside_its_folder(tmp_path, name):
  """Whoever writes a whole journal anew could else have a resume delete any file."""
  path = make(tmp_path / "run", layers=1)
  (tmp_path / "precious").write_text("kept")
  with RunFolder(path, resume=True) as folder:
    events = folder.events
  events[-1]["streams"] = {name: "ab" * 32}
  (path / "journal.jsonl").unlink()
  journal = Journal(path / "journal.jsonl")
  for event in events:
    journal.append(**event)
  journal.close()
  with pytest.raises(ValueError, match="an event of a run in line 2"):
    RunFolder(path, resume=True)


def test_leftovers_are_removed_and_said(tmp_path):
  path = make(tmp_path / "run", layers=1)
  (path / "layers/layers_1.safetensors.partial").write_bytes(b"half")
  (path / "scratch-x").mkdir()
  (path / "scratch-x/file").write_bytes(b"x")
  with RunFolder(path, resume=True) as folder:
    resumed = folder.begin(IDENTITY, PLACE)
  left = ["scratch-x/", "layers/layers_1.safetensors.partial"]
  assert resumed == [{"layer": 1, "discarded": left, "changed": {}}]
  assert not (path / "scratch-x").exists()


def test_another_run_is_refused_with_what_differs(tmp_path):
  path = make(tmp_path / "run")
  other = IDENTITY | {"weights": "cd", "program": {"name": "q"}}
  with RunFolder(path, resume=True) as folder:
    with pytest.raises(ValueError) as caught:
      folder.begin(other, PLACE)
  assert 'weights "ab", not "cd"' in str(caught.value)
  assert 'program name "p", not "q"' in str(caught.value)


def test_a_changed_environment_is_shown(tmp_path):
  path = make(tmp_path / "run")
  with RunFolder(path, resume=True) as folder:
    (entry,) = folder.begin(IDENTITY, PLACE | {"jax": "2"})
  assert entry["changed"] == {"jax": ["1", "2"]}


def test_a_run_without_resume_and_another_folder_with_it_are_left_alone(tmp_path):
  path, other = make(tmp_path / "run"), tmp_path / "other"
  other.mkdir()
  (other / "mine").write_text("x")
  for place, resume in ((path, False), (other, True)):
    before = tree_bytes(place)
    with pytest.raises(FileExistsError, match="never overwritten"):
      RunFolder(place, resume=resume)
    assert tree_bytes(place) == before


def test_resume_of_nothing_starts(tmp_path):
  with RunFolder(tmp_path / "new", resume=True) as folder:
    assert folder.begin(IDENTITY, PLACE) == []


def test_what_was_prepared_comes_back(tmp_path):
  learned = {"layers_0/mlp/up_proj": jnp.float32([1, 2]), "layers_1/a/b": None}
  params = {
    "layers_0": {"w": jnp.ones((2, 2), jnp.bfloat16)},
    "norm": {"w": jnp.ones(2)},
  }
  with RunFolder(tmp_path / "run") as folder:
    folder.begin(IDENTITY, PLACE)
    assert folder.read_prepared() is None
    folder.write_prepared(params, learned, {"losses": [0.5]})
  with RunFolder(tmp_path / "run", resume=True) as folder:
    back = folder.read_prepared()
  assert_same(back[:2], (params, learned))
  assert back[2] == {"losses": [0.5]}


def test_a_second_process_is_refused(tmp_path):
  path = tmp_path / "run"
  program = (
    "import sys, fcntl\n"
    "file = open(sys.argv[1], 'ab')\n"
    "try:\n  fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except BlockingIOError:\n  print('refused')\n"
  )
  command = [sys.executable, "-c", program, str(path / "journal.jsonl")]
  with RunFolder(path) as folder:
    folder.begin(IDENTITY, PLACE)
    with pytest.raises(BlockingIOError, match="another process is at work in"):
      RunFolder(path, resume=True)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout == ""


def test_a_file_larger_than_the_system_takes_leaves_the_state_before(tmp_path):
  path = make(tmp_path / "run", layers=1)
  before = tree_bytes(path)
  says = "cannot take more .*make room.*--resume"
  for size in (200, len(before["journal.jsonl"]) + 90):
    with RunFolder(path, resume=True) as folder:
      with pytest.raises(OSError, match=says), no_file_larger_than(size):
        write(folder, 1)
    with RunFolder(path, resume=True) as folder:
      # The first file is taken back; those before a journal line are leftovers.
      assert bool(folder.discarded) == (size > 200)
    assert tree_bytes(path) == before
  with RunFolder(path, resume=True) as folder:
    write(folder, 1)
  assert tree_bytes(path) == tree_bytes(make(tmp_path / "undisturbed"))


def test_a_journal_line_that_finds_no_room_is_taken_back(tmp_path):
  journal = Journal(tmp_path / "journal.jsonl")
  journal.append("start")
  size = (tmp_path / "journal.jsonl").stat().st_size
  with pytest.raises(OSError), no_file_larger_than(size + 60):
    journal.append("layer", text="x" * 100)
  journal.append("layer", text="y")
  journal.close()
  again = Journal(tmp_path / "journal.jsonl")
  again.close()
  assert again.events == [{"event": "start"}, {"event": "layer", "text": "y"}]
