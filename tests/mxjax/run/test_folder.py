"""The run folder by itself: kills, damage, second writers; nothing runs a model."""

import contextlib
import errno
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.devices import environment
from mxjax.devices.placement import ONE_DEVICE
from mxjax.errors import OSRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.run import folder as run_folder
from mxjax.run.folder import LayerWriter, RunFolder
from mxjax.storage import digested_json
from tests.mxjax.quantized import DAMAGES, assert_same, damage

IDENTITY = {"program": {"name": "p", "options": [1, 2]}, "weights": "ab"}
CLOCK = {"seconds": {"calibration": 1.5}, "peak_bytes": {}}
PLACE = {"jax": "1", "XLA_FLAGS": {"--a": "1"}, "platform": "cpu", "mesh": None}


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


def write(folder, index, saved=True, last=False):
  streams = {"float": stream(index), "recovery0-mlp": stream(-index + 9)}
  folder.write_layer(
    f"layers_{index}",
    layer(index),
    {"value": index / 3, "by step": {2: (1, None), 10: "ä"}},
    streams=({} if last else streams) if saved else None,
    clock=CLOCK,
  )


def take(folder, stage, step):
  losses = [1 / n for n in range(1, step + 1)]
  folder.write_step(stage, {"s": jnp.full(3, step)}, losses, 2)


LEARNED = {"layers_0/mlp/up_proj": jnp.float32([1, 2]), "layers_1/a/b": None}
REWRITTEN = {
  "layers_0": {"w": jnp.ones((2, 2), jnp.bfloat16)},
  "norm": {"w": jnp.ones(2)},
}
TUNED = (1, 2, 5)
"""Steps of tuning after which what was learned is written."""
STEPS = (
  lambda folder: folder.begin(IDENTITY, PLACE),
  lambda folder: take(folder, "learning", 1),
  lambda folder: take(folder, "learning", 2),
  lambda folder: folder.write_prepared(REWRITTEN, LEARNED, {"losses": [0.5]}),
  lambda folder: write(folder, 0),
  lambda folder: write(folder, 1, saved=False),
  lambda folder: write(folder, 2, saved=False),
  lambda folder: write(folder, 3),
  lambda folder: write(folder, 4),
  lambda folder: write(folder, 5, saved=False),
  lambda folder: write(folder, 6, last=True),
  *(lambda folder, step=step: take(folder, "tuning", step) for step in TUNED),
  lambda folder: folder.finish({"loss": 1.0}, {"calibration": 1.5, "tuning": 6.5}),
)
"""A run of seven layers that saves its hidden states now and then."""


def next_step(folder):
  """The step of `STEPS` that a resumed run does first."""
  if folder.ended:
    return len(STEPS)
  if tuning := folder.read_steps("tuning"):
    return 12 + TUNED.index(len(tuning.losses))
  if folder.finished:
    return 4 + len(folder.finished)
  if folder.read_prepared():
    return 4
  learning = folder.read_steps("learning")
  return 1 + (len(learning.losses) if learning else 0)


def go_on(path):
  """Resumes a run and does the rest of `STEPS`; returns which it began with."""
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    first = next_step(folder)
    for step in STEPS[first:]:
      step(folder)
  return first


def result(path):
  """All bytes of a folder, but what its state says of resumes."""
  state = run_folder.read_state(path)
  left_out = {"resumes": [], "digest": ""}
  return tree_bytes(path) | {"state.json": json.dumps(state | left_out)}


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


def names(path):
  return [name for name in tree_bytes(path) if name not in ("state.json", "lock")]


def reseal(path, **changes):
  """Changes the state, with a digest that fits."""
  state = json.loads((path / "state.json").read_bytes()) | changes
  digested_json.write(path / "state.json", state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """The folder of a run that nothing happened to, and one after each of `STEPS`."""
  root = tmp_path_factory.mktemp("undisturbed")
  with RunFolder(root / "run") as folder:
    for number, step in enumerate(STEPS):
      step(folder)
      shutil.copytree(root / "run", root / f"after-{number}")
  return root / "run", [root / f"after-{number}" for number in range(len(STEPS))]


class Killed(BaseException):
  """Ends a process: nothing in the library catches it."""


@contextlib.contextmanager
def watched(at_event):
  """Calls `at_event` before and after all that a disk sees, where a SIGKILL may be."""

  def wrap(original):
    def wrapped(*arguments, **keywords):
      at_event()
      original(*arguments, **keywords)
      at_event()

    return wrapped

  with pytest.MonkeyPatch.context() as patch:
    for place, name in (
      (os, "fsync"),
      (os, "replace"),
      (pathlib.Path, "unlink"),
      (pathlib.Path, "mkdir"),
    ):
      patch.setattr(place, name, wrap(getattr(place, name)))
    yield


@pytest.mark.slow
def test_a_kill_between_any_two_writes_costs_its_step_alone(undisturbed, tmp_path):
  """A copy of the folder at an event is what a SIGKILL there leaves."""
  path, copies, seen = tmp_path / "run", [], set()

  def copy():
    if path.exists():
      copies.append(shutil.copytree(path, tmp_path / f"copy-{len(copies)}"))

  with RunFolder(path) as folder:
    for number, step in enumerate(STEPS):
      before, first = next_step(folder), len(copies)
      with watched(copy):
        step(folder)
      expected = {before, next_step(folder)}
      for place in copies[first:]:
        if (state := str(tree_bytes(place))) not in seen:
          seen.add(state)
          assert go_on(place) in expected, (number, place.name)
          assert result(place) == result(undisturbed[0]), (number, place.name)
  assert len(copies) > 150 and len(seen) > 50


def test_a_kill_while_a_folder_is_opened_costs_nothing(undisturbed, tmp_path):
  """From an empty place, and while leftovers are removed."""
  left = shutil.copytree(undisturbed[1][9], tmp_path / "left")
  (left / "layers/layers_6.safetensors").write_bytes(b"x")
  (left / "streams/9-float.safetensors.partial-0").write_bytes(b"x")
  for source in (None, left):
    at, was_killed = 0, True
    while was_killed:
      path, countdown, at = tmp_path / f"{source is None}-{at}", iter(range(at)), at + 1
      if source:
        shutil.copytree(source, path)

      def kill(countdown=countdown):
        if next(countdown, None) is None:
          raise Killed

      was_killed = False
      try:
        with watched(kill), RunFolder(path, resume=True) as folder:
          folder.begin(IDENTITY, PLACE)
      except Killed:
        was_killed = True
      assert go_on(path) == (1 if source is None else 10)
      assert result(path) == result(undisturbed[0])
    assert at > 20


def test_an_older_state_beside_newer_files_loses_no_finished_work(
  undisturbed, tmp_path
):
  """It is refused, unless a kill just then would have cost as much."""
  after = undisturbed[1]
  states = [run_folder.read_state(path) for path in after]
  steps = lambda one: len(one["losses"]) if one else 0
  work = [
    (
      steps(one["learning"]),
      one["prepared"] is None,
      len(one["layers"]),
      steps(one["tuning"]),
    )
    for one in states
  ]
  for newer in range(len(after)):
    for older in range(newer):
      path = shutil.copytree(after[newer], tmp_path / f"{older}-{newer}")
      shutil.copyfile(after[older] / "state.json", path / "state.json")
      if newer == older + 1 or work[older] == work[newer]:
        continue
      before = tree_bytes(path)
      with pytest.raises(ValueError, match="got damage"):
        RunFolder(path, resume=True)
      assert tree_bytes(path) == before


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
  assert [name for name in names(tmp_path / "run") if "streams" in name] == [
    "streams/2-float.safetensors",
    "streams/2-recovery0-mlp.safetensors",
  ]


def test_what_was_prepared_comes_back(undisturbed):
  with RunFolder(undisturbed[1][3], resume=True) as folder:
    back = folder.read_prepared()
  assert_same(back[:2], (REWRITTEN, LEARNED))
  assert back[2] == {"losses": [0.5]}


def test_the_clock_is_that_of_what_is_not_done_again(undisturbed):
  seconds = []
  for path in undisturbed[1]:
    with RunFolder(path, resume=True, read_only=True) as folder:
      seconds.append(folder.clock["seconds"])
  calibration = {"calibration": 1.5}
  learned = [{"preparation": total} for total in (2, 4, 4)]
  assert seconds[:4] == [{}, *learned] and seconds[4:11] == [calibration] * 7
  tuned = [calibration | {"tuning": total} for total in (2, 4, 6, 6.5)]
  assert seconds[11:] == tuned


def test_a_folder_of_before_there_was_learning_is_resumed(tmp_path):
  path = make(tmp_path / "run")
  state = json.loads((path / "state.json").read_bytes())
  del state["learning"]
  digested_json.write(path / "state.json", state)
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    assert folder.read_steps("learning") is None and folder.learned_sequences == 0
    write(folder, 2)
  assert len(run_folder.read_state(path)["layers"]) == 3


def test_layers_after_the_last_hidden_states_are_kept(tmp_path):
  path = make(tmp_path / "run", layers=1)
  saved = names(path)
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    for index in (1, 2):
      write(folder, index, saved=False)
  # What the first layer left is there until other hidden states are.
  behind = ["layers/layers_1.safetensors", "layers/layers_2.safetensors"]
  assert names(path) == sorted([*saved, *behind])
  with RunFolder(path, resume=True) as folder:
    assert len(folder.finished) == 3 and folder.saved_index == 1
    assert folder.discarded == []
    folder.begin(IDENTITY, PLACE)
    write(folder, 3)
    assert folder.saved_index == 4
  assert [name for name in names(path) if "streams" in name] == [
    "streams/4-float.safetensors",
    "streams/4-recovery0-mlp.safetensors",
  ]


@pytest.mark.parametrize("number", ["4", "x"])
def test_hidden_states_of_no_finished_layer_are_refused(tmp_path, number):
  path = make(tmp_path / "run", layers=3)
  streams = run_folder.read_state(path)["streams"]
  moved = {}
  for name, entry in streams.items():
    other = name.replace("/3-", f"/{number}-")
    (path / name).rename(path / other)
    moved[other] = entry
  reseal(path, streams=moved)
  with RunFolder(path, resume=True) as folder:
    with pytest.raises(ValueError, match="hidden states of one of 3 layers"):
      _ = folder.saved_index


def test_a_new_run_waits_for_its_identity_when_it_first_writes(tmp_path):
  asked, path = [], tmp_path / "run"

  def identity():
    asked.append(1)
    return IDENTITY

  with RunFolder(path) as folder:
    assert folder.begin(identity, PLACE) == []
    assert not asked and not (path / "state.json").exists()
    write(folder, 0)
    assert asked == [1]
  with RunFolder(path, resume=True) as folder:
    folder.begin(identity, PLACE)
  assert asked == [1, 1]
  other = IDENTITY | {"weights": "cd"}
  with RunFolder(path, resume=True) as folder, pytest.raises(ValueError, match='"cd"'):
    folder.begin(lambda: other, PLACE)


def test_one_layer_is_written_behind_the_next_and_its_error_comes_then(
  tmp_path, monkeypatch
):
  """The second write waits for the first; what went wrong is raised there."""
  may_write, started = threading.Event(), []
  original = run_folder.atomic_io.write_arrays

  def slow(path, arrays, *more):
    started.append(path.name)
    assert may_write.wait(60)
    return original(path, arrays, *more)

  give = lambda writer, index: writer.write(
    f"layers_{index}", layer(index), {}, streams=None, clock=CLOCK
  )
  monkeypatch.setattr(run_folder.atomic_io, "write_arrays", slow)
  with RunFolder(tmp_path / "run") as folder, LayerWriter(folder) as writer:
    folder.begin(IDENTITY, PLACE)
    give(writer, 0)
    assert not folder.finished, "the caller goes on before the layer is on the disk"
    threading.Timer(0.2, may_write.set).start()
    give(writer, 1)
    assert len(folder.finished) == 1
    writer.wait()
    assert len(folder.finished) == 2
  assert started == ["layers_0.safetensors", "layers_1.safetensors"]

  def fails(path, arrays, *more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(run_folder.atomic_io, "write_arrays", fails)
  for end in (lambda writer: give(writer, 1), lambda writer: None):
    path = make(tmp_path / f"full-{len(list(tmp_path.iterdir()))}", layers=0)
    with pytest.raises(OSError, match="make room, then go on"):
      with RunFolder(path, resume=True) as folder, LayerWriter(folder) as writer:
        folder.begin(IDENTITY, PLACE)
        give(writer, 0)
        end(writer)
  with pytest.raises(KeyError) as caught:
    with RunFolder(path, resume=True) as folder, LayerWriter(folder) as writer:
      folder.begin(IDENTITY, PLACE)
      give(writer, 0)
      raise KeyError("of the next layer")
  assert "could not be written" in caught.value.__notes__[0]


def test_a_folder_below_a_file_and_a_lock_that_is_a_folder_are_refused(tmp_path):
  (tmp_path / "file").write_text("mine")
  with pytest.raises(OSRefusal, match="got .*file, which is a file; name another"):
    RunFolder(tmp_path / "file/run")
  path = make(tmp_path / "run", layers=1)
  (path / "lock").unlink()
  (path / "lock").mkdir()
  with pytest.raises(ValueError, match="a file lock, got a folder of that name; if"):
    RunFolder(path, resume=True)


@pytest.mark.parametrize("how", DAMAGES)
def test_every_damaged_file_is_named_and_none_is_used(undisturbed, tmp_path, how):
  path = shutil.copytree(undisturbed[1][11], tmp_path / "run")
  before = tree_bytes(path)
  assert len(before) == 13
  for name, data in before.items():
    if name == "lock" and how != "remove":
      (path / name).write_bytes(b"x")
    elif name == "state.json" and how == "truncate":
      (path / name).write_bytes(data[:-2])
    else:
      damage(path / name, how)
    damaged = tree_bytes(path)
    with pytest.raises(ValueError, match=name):
      RunFolder(path, resume=True)
    assert tree_bytes(path) == damaged
    (path / name).write_bytes(data)
  RunFolder(path, resume=True).close()


def test_a_state_flipped_or_cut_anywhere_is_refused_and_nothing_is_deleted(tmp_path):
  path = make(tmp_path / "run", layers=3)
  state, before = path / "state.json", tree_bytes(path)
  data = before.pop("state.json")
  for at in (*range(0, len(data), 7), len(data) - 1):
    for wrong in (data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], data[:at]):
      # All is there without the last line break.
      if wrong == data[:-1]:
        continue
      state.write_bytes(wrong)
      with pytest.raises(ValueError, match="state.json"):
        RunFolder(path, resume=True)
      assert tree_bytes(path) == before | {"state.json": wrong}


UNEXPECTED = (
  "notes.txt",
  "layers/a/b",
  "layers/a",
  "streams/7-float.safetensors",
  "streams/1-float.safetensors",
  "tuning/9.safetensors",
  "prepared/2-learned.safetensors",
)


def test_files_that_no_kill_leaves_are_not_deleted(tmp_path):
  path = make(tmp_path / "run", layers=3)
  for name in UNEXPECTED:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    with pytest.raises(ValueError, match=f"used: {name} is not in it"):
      RunFolder(path, resume=True)
    (path / name).unlink()
    if name == "layers/a/b":
      (path / "layers/a").rmdir()
  for name in ("layers_3", "layers_4"):
    (path / f"layers/{name}.safetensors").write_bytes(b"x")
  with pytest.raises(ValueError, match="layers_3.safetensors is not in.*layers_4"):
    RunFolder(path, resume=True)


def test_a_lost_state_is_refused(tmp_path):
  path = make(tmp_path / "run")
  (path / "state.json").unlink()
  before = tree_bytes(path)
  with pytest.raises(ValueError, match="layers_0.safetensors is not in it"):
    RunFolder(path, resume=True)
  assert tree_bytes(path) == before


@pytest.mark.parametrize("name", ["../precious", "/etc/passwd", "layers/../../x", "x"])
@pytest.mark.parametrize("part", ["streams", "removable", "layers"])
def test_a_state_lists_no_file_outside_its_folder(tmp_path, name, part):
  """Whoever writes a whole state anew could else have a resume delete any file."""
  path = make(tmp_path / "run", layers=1)
  (tmp_path / "precious").write_text("kept")
  files = {name: {"bytes": 4, "sha256": "ab" * 32}}
  (made,) = run_folder.read_state(path)["layers"]
  value = {"streams": files, "removable": [name], "layers": [made | {"files": files}]}
  reseal(path, **{part: value[part]})
  with pytest.raises(ValueError, match="expected the state of a run"):
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


GPU = PLACE | {"platform": "gpu"}


@pytest.mark.parametrize(
  ("identity", "before", "now", "says"),
  [
    (
      {"weights": "cd"},
      PLACE,
      PLACE,
      'of weights "ab", got .* "cd"; resume',
    ),
    (
      {"program": {"name": "q"}},
      PLACE,
      PLACE,
      'name "p", .*got .*name "q", program op',
    ),
    ({"more": 1}, PLACE, PLACE, "of more null, got one of more 1; resume"),
    ({}, PLACE, PLACE | {"jax": "2"}, 'under jax "1", got jax "2", under which the l'),
    (
      {},
      PLACE,
      PLACE | {"XLA_FLAGS": {}},
      'XLA_FLAGS --a "1", .*null, .*; go back',
    ),
    ({}, PLACE | {"old": 1}, PLACE, "go on under old 1, got old null, "),
    ({}, PLACE, GPU, 'platform "cpu", got platform "gpu"'),
    ({}, GPU, GPU | {"mesh": {"data": 2}}, 'mesh null, got mesh {"data": 2}'),
  ],
)
def test_a_run_goes_on_only_as_it_began(tmp_path, identity, before, now, says):
  with RunFolder(tmp_path / "run") as folder:
    folder.begin(IDENTITY, before)
    write(folder, 0)
  before = tree_bytes(tmp_path)
  with RunFolder(tmp_path / "run", resume=True) as folder:
    with pytest.raises(ValueError, match=says):
      folder.begin(IDENTITY | identity, now)
  assert tree_bytes(tmp_path) == before


def test_another_mesh_of_a_cpu_is_recorded(tmp_path):
  path, mesh = make(tmp_path / "run"), {"data": 2, "model": 1, "processes": 1}
  with RunFolder(path, resume=True) as folder:
    (entry,) = folder.begin(IDENTITY, PLACE | {"mesh": mesh})
  assert entry["changed"] == {"mesh": [None, mesh]}


def test_the_environment_is_all_that_may_change_bits(monkeypatch, tmp_path):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  here = environment.environment(ONE_DEVICE, None)
  json.dumps(here)
  assert here["jax"] == jax.__version__ and here["XLA_FLAGS"] == {}
  assert here["platform"] == "cpu" and here["mesh"] is None

  def changed():
    now = environment.environment(ONE_DEVICE, None)
    return {key: now[key] for key in now if now[key] != here[key]}

  real = environment.metadata.version
  for package in ("mxjax", "jax", "jaxlib", "numpy", "scipy"):
    with monkeypatch.context() as patch:
      other = lambda name, package=package: "0" if name == package else real(name)
      patch.setattr(environment.metadata, "version", other)
      assert changed() == {package: "0"}
  with jax.default_matmul_precision("highest"):
    assert changed() == {"jax_default_matmul_precision": "highest"}
  with jax.enable_x64(True):
    assert changed() == {"jax_enable_x64": True}
  monkeypatch.setattr(environment.platform, "machine", lambda: "abacus")
  assert changed() == {"machine": "abacus"}
  monkeypatch.undo()
  flags = "--xla_a=1 --xla_dump_to=x --xla_force_host_platform_device_count=8 --xla_a=2"
  (tmp_path / "flags").write_text(flags)
  for text in (flags, str(tmp_path / "flags")):
    monkeypatch.setenv("XLA_FLAGS", text)
    assert changed() == {"XLA_FLAGS": {"--xla_a": "2"}}


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


@pytest.mark.slow
def test_a_second_process_is_refused(tmp_path):
  path = tmp_path / "run"
  program = (
    "import sys\nfrom mxjax.run.folder import RunFolder\n"
    "try:\n  RunFolder(sys.argv[1], resume=True)\n"
    "except BlockingIOError as error:\n  print(error)\n"
  )
  command = [sys.executable, "-c", program, str(path)]
  run = lambda: subprocess.run(command, capture_output=True, text=True, check=True)
  with RunFolder(path) as folder:
    folder.begin(IDENTITY, PLACE)
    with pytest.raises(BlockingIOError, match="got another process; wait"):
      RunFolder(path, resume=True)
    assert "got another process; wait" in run().stdout
    # A lock made anew would not be the one that is held.
    (path / "lock").unlink()
    with pytest.raises(ValueError, match="expected a file lock, got none"):
      RunFolder(path, resume=True)
    (path / "lock").touch()
  assert run().stdout == ""


def test_other_processes_of_a_job_read_and_never_write(undisturbed, tmp_path):
  with pytest.raises(FileNotFoundError, match="name an --out that all processes see"):
    RunFolder(tmp_path / "none", read_only=True)
  path = shutil.copytree(undisturbed[1][11], tmp_path / "run")
  before = tree_bytes(path)
  with RunFolder(path, resume=True), RunFolder(path, read_only=True) as reader:
    assert reader.begin({}, {}) == [] and len(reader.finished) == 7
    for step in STEPS:
      step(reader)
    assert reader.read_steps("tuning").losses == [1.0] and reader.ended is None
  assert tree_bytes(path) == before


def test_a_write_after_an_interrupted_one_leaves_a_folder_that_resumes(
  tmp_path, monkeypatch
):
  """The file that was not removed is removable still, and so is its successor's."""
  path = make(tmp_path / "run", layers=0)
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    take(folder, "learning", 1)
    with monkeypatch.context() as patch:
      patch.setattr(folder, "_remove", lambda: 1 / 0)
      for step in (2, 3):
        with pytest.raises(ZeroDivisionError):
          take(folder, "learning", step)
  assert len([*(path / "learning").iterdir()]) == 3
  with RunFolder(path, resume=True) as folder:
    folder.begin(IDENTITY, PLACE)
    assert len(folder.read_steps("learning").losses) == 3
  assert len([*(path / "learning").iterdir()]) == 1


def test_a_file_larger_than_the_system_takes_leaves_the_state_before(tmp_path):
  path = make(tmp_path / "run", layers=1)
  before = tree_bytes(path)
  says = "^run folder: .* cannot take more .*make room, then go on with --resume[^.]*.$"
  for size in (200, len(before["state.json"]) + 90):
    with RunFolder(path, resume=True) as folder:
      with pytest.raises(OSError, match=says), no_file_larger_than(size):
        write(folder, 1)
    with RunFolder(path, resume=True) as folder:
      # The first file is taken back; those before a state are leftovers.
      assert bool(folder.discarded) == (size > 200)
    assert tree_bytes(path) == before
  with RunFolder(path, resume=True) as folder:
    write(folder, 1)
  assert tree_bytes(path) == tree_bytes(make(tmp_path / "undisturbed"))


def test_a_folder_of_another_layout_is_refused(tmp_path, monkeypatch):
  path, now = make(tmp_path / "run"), run_folder.VERSION
  monkeypatch.setattr(run_folder, "VERSION", now + 1)
  with pytest.raises(ValueError, match=f"version {now + 1}, got {now}; use the mxjax"):
    RunFolder(path, resume=True)
