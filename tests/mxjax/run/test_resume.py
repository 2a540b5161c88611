"""Runs that die: at every durable event, by a disk that fails, by damage."""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.methods.hires import stage3
from mxjax.methods.program import Learning, Prepared
from mxjax.models import CausalLM
from mxjax.numerics.shaping import orthogonal
from mxjax.run import folder as run_folder
from mxjax.run import quantize, steps
from mxjax.run.folder import Steps
from mxjax.run.progress import Report, Stopped
from mxjax.run.record import StageClock
from mxjax.storage import atomic_io
from tests import tiny
from tests.mxjax.quantized import damage

# A stream of hidden states for each of three purposes, and little to compile.
PROGRAM = dataclasses.replace(
  methods.RTN, name="light", recover=(stage3.ATTENTION, stage3.MLP)
)


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:2])


def run(params, calib, folder=None, program=PROGRAM, **options):
  return quantize.run(params, calib, program, check=False, run_dir=folder, **options)


def bits(params):
  leaves, structure = jax.tree.flatten(params)
  digest = hashlib.sha256(str(structure).encode())
  for leaf in leaves:
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(tiny_params, calib, tmp_path_factory):
  """The result of a run that nothing happened to, and its folder."""
  folder = tmp_path_factory.mktemp("undisturbed") / "run"
  return run(tiny_params, calib, folder), folder


@pytest.mark.slow
def test_a_resumed_run_leaves_no_gradients(tiny_params, calib, tmp_path):
  program, folder = methods.get("rtn:weighting=fisher"), tmp_path / "run"
  with pytest.raises(Stopped):
    run(tiny_params, calib, folder, program, stop=lambda: True, save_every=1)
  run(tiny_params, calib, folder, program, resume=True)
  assert not [*(folder / "gradients").iterdir()]


def test_a_resume_under_another_environment_is_refused_by_name(
  tiny_params, calib, undisturbed, monkeypatch
):
  folder = undisturbed[1]
  with jax.default_matmul_precision("highest"):
    with pytest.raises(ValueError, match='matmul_precision null, got .*precision "hi'):
      run(tiny_params, calib, folder, resume=True)
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
  with pytest.raises(ValueError, match="--xla_cpu_enable_fast_math null, got"):
    run(tiny_params, calib, folder, resume=True)
  monkeypatch.undo()
  monkeypatch.setattr(
    CausalLM, "attention", {"sequences": "pallas", "branching": "xla"}
  )
  with pytest.raises(ValueError, match='"xla", got attention sequences "pallas"'):
    run(tiny_params, calib, folder, resume=True)


@contextlib.contextmanager
def watched(at_event):
  """Calls back with number and name at every durable event, where a SIGKILL may be."""
  numbers = itertools.count(1)

  def wrap(original, name):
    def wrapped(*arguments, **keywords):
      at_event(next(numbers), f"before {name}")
      result = original(*arguments, **keywords)
      at_event(next(numbers), f"after {name}")
      return result

    return wrapped

  with pytest.MonkeyPatch.context() as patch:
    for place, name in (
      (os, "fsync"),
      (os, "replace"),
      (pathlib.Path, "unlink"),
      (atomic_io, "write_parts"),
      (run_folder.RunFolder, "_save"),
    ):
      patch.setattr(place, name, wrap(getattr(place, name), name))
    yield


def layers_of(place):
  """The layers that the state in a run folder keeps."""
  if not (place / "state.json").is_file():
    return []
  return run_folder.read_state(place)["layers"]


def test_killed_at_every_durable_event(tiny_params, calib, undisturbed, tmp_path):
  """The folder as it was at each event is resumed, to the same bits.

  A killed process leaves exactly the writes that it had made, so a copy of the folder
  at the event is what a SIGKILL there leaves.
  """
  folder, copies = tmp_path / "run", []

  def copy(number, name):
    place = tmp_path / f"{number:03d} {name}"
    if folder.exists():
      shutil.copytree(folder, place)
      copies.append(place)

  with watched(copy):
    result = run(tiny_params, calib, folder, save_every=1)
  expected = bits(result.params)
  assert expected == bits(undisturbed[0].params)
  assert len(copies) > 40
  seen, states = set(), set()
  for place in copies:
    finished = len(layers_of(place))
    files = [p for p in sorted(place.rglob("*")) if p.is_file()]
    state = tuple((p.relative_to(place).as_posix(), p.read_bytes()) for p in files)
    if state in states:
      continue
    states.add(state)
    worked = []
    resumed = run(tiny_params, calib, place, resume=True, on_progress=worked.append)
    assert bits(resumed.params) == expected, place.name
    assert {p.layer for p in worked} == set(range(finished, 2)), place.name
    assert resumed.record.layers == result.record.layers
    for name in ("layers/layers_0.safetensors", "layers/layers_1.safetensors"):
      assert (place / name).read_bytes() == (folder / name).read_bytes()
    assert not list((place / "streams").iterdir())
    seen.add(finished)
  assert seen == {0, 1, 2} and len(states) > 15


def deep_model():
  """A model of four layers, its params, and calibration tokens."""
  model = CausalLM(dataclasses.replace(tiny.config(), num_layers=4))
  tokens = np.random.default_rng(3).integers(0, 61, (2, 16)).astype(np.int32)
  return model, model.init(jax.random.key(5), tokens[:1])["params"], tokens


@pytest.fixture(scope="module")
def deep():
  model, params, tokens = deep_model()
  return params, Calibration(model, tokens)


def saved_files(folder):
  """Bytes of what a finished run is, and what its state says of its layers."""
  layers = run_folder.read_state(folder)["layers"]
  told = [{key: one[key] for key in ("name", "files", "record")} for one in layers]
  files = sorted((folder / "layers").iterdir())
  return {file.name: file.read_bytes() for file in files}, told


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [None, 3])
def test_killed_behind_the_last_hidden_states(deep, tmp_path, save_every):
  """The layers since then are replayed, none is quantized twice: the same bits."""
  folder, copies = tmp_path / "run", []

  def copy(number, name):
    if name in ("before _save", "after _save", "after unlink"):
      place = tmp_path / f"{number:03d} {name}"
      shutil.copytree(folder, place)
      copies.append(place)

  with watched(copy):
    result = run(*deep, folder, save_every=save_every)
  assert result.record.save_every == save_every
  expected, replayed = bits(run(*deep).params), set()
  assert bits(result.params) == expected
  for place in copies:
    kept, worked = len(layers_of(place)), []
    has_streams = bool(list((place / "streams").iterdir()))
    resumed = run(*deep, place, resume=True, on_progress=worked.append)
    assert bits(resumed.params) == expected, place.name
    assert saved_files(place) == saved_files(folder)
    assert {p.layer for p in worked} == set(range(kept, 4)), place.name
    fractions = [p.fraction for p in worked]
    assert fractions == sorted(fractions)
    stages = [p.stage for p in worked if p.stage.startswith("replay")]
    first = 3 if has_streams and kept == 3 else 0
    again = range(first, kept) if kept < 4 else []
    assert stages == [f"replay of layer {i + 1}/{kept}" for i in again]
    replayed.add(len(stages))
  assert replayed == ({0, 1, 2, 3} if save_every is None else {0, 1, 2})


@pytest.mark.slow
def test_a_replay_that_does_not_repeat_its_bits_is_refused(deep, tmp_path, monkeypatch):
  folder, solve = tmp_path / "run", stage3.AttentionFit.solve
  with pytest.raises(Stopped):
    run(*deep, folder, stop=lambda: True)

  def other(self, moments):
    leaf, record = solve(self, moments)
    return jax.tree.map(lambda a: a * 2, leaf), record

  monkeypatch.setattr(stage3.AttentionFit, "solve", other)
  with pytest.raises(ValueError, match="layers_0: expected a replay to find the reco"):
    run(*deep, folder, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  "method",
  [
    "hires",
    "gptq:weighting=fisher",
    pytest.param("hires-descent", marks=pytest.mark.slow),
  ],
)
def test_a_resumed_method_has_the_files_of_an_undisturbed_run(deep, tmp_path, method):
  whole = run(*deep, tmp_path / "whole", method)
  calls = iter([False, False, True])
  with pytest.raises(Stopped, match="after layer 3 of 4"):
    run(*deep, tmp_path / "run", method, stop=lambda: next(calls))
  resumed = run(*deep, tmp_path / "run", method, resume=True)
  assert bits(resumed.params) == bits(whole.params)
  assert saved_files(tmp_path / "run") == saved_files(tmp_path / "whole")
  assert resumed.record.clock.seconds["replay"] > 0


KILLED_IN_FLIGHT = """
import os, signal, sys, threading
import mxjax
from mxjax.run import folder
from tests.mxjax.run import test_resume as t

model, params, tokens = t.deep_model()
next_layer = threading.Event()
original = folder.atomic_io.write_arrays

def write(path, arrays, *more):
  if path.name == "layers_1.safetensors":
    assert next_layer.wait(120)
    path.with_name(path.name + ".partial-0").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
  return original(path, arrays, *more)

folder.atomic_io.write_arrays = write
def told(now):
  if (now.layer, now.stage) == (2, "quantization"):
    next_layer.set()

t.run(params, mxjax.Calibration(model, tokens), sys.argv[1], on_progress=told)
"""


@pytest.mark.slow
def test_killed_while_a_layer_is_written_behind_the_next(deep, tmp_path):
  """SIGKILL in the thread that writes layer 1, while layer 2 is quantized."""
  folder, root = tmp_path / "run", pathlib.Path(__file__).parents[3]
  done = subprocess.run(
    [sys.executable, "-c", KILLED_IN_FLIGHT, folder],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root)},
    check=False,
  )
  assert done.returncode == -signal.SIGKILL
  assert len(layers_of(folder)) == 1
  resumed = run(*deep, folder, resume=True)
  assert bits(resumed.params) == bits(run(*deep).params)


@pytest.mark.slow
def test_a_stopped_run_loses_nothing(deep, tmp_path):
  folder, calls = tmp_path / "run", iter([False, True])
  with pytest.raises(Stopped, match="after layer 2 of 4"):
    run(*deep, folder, save_every=4, stop=lambda: next(calls))
  told = []
  resumed = run(*deep, folder, resume=True, save_every=4, on_progress=told.append)
  assert not [now.stage for now in told if now.stage.startswith("replay")]
  assert [one["layer"] for one in resumed.record.resumed] == [2]
  assert bits(resumed.params) == bits(run(*deep).params)


def test_by_default_no_hidden_states_are_written(deep, tmp_path):
  with pytest.raises(Stopped):
    run(*deep, tmp_path / "run", stop=lambda: True)
  assert not list((tmp_path / "run/streams").iterdir())
  for wrong in (0, -1, 2.5, True, "a"):
    with pytest.raises(ValueError, match="save_every: a whole number"):
      run(*deep, tmp_path / "none", save_every=wrong)
  assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("code", "step"), [(errno.ENOSPC, 13), (errno.EIO, 40)])
def test_a_disk_that_fails_at_any_event(
  tiny_params, calib, undisturbed, tmp_path, code, step
):
  """Events in turn refuse; what is there goes on to the same bits."""
  expected = bits(undisturbed[0].params)
  seen = []
  with watched(lambda *event: seen.append(event)):
    run(tiny_params, calib, tmp_path / "count")
  for at in range(3, len(seen) - 3, step):
    folder = tmp_path / f"run-{at}"

    def refuse(number, name, at=at):
      if number == at:
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)) as caught, watched(refuse):
      run(tiny_params, calib, folder)
    if code == errno.ENOSPC and caught.value.errno is None:
      assert "make room, then go on with --resume" in str(caught.value)
    again = run(tiny_params, calib, folder, resume=True)
    assert bits(again.params) == expected


def test_damage_is_refused_before_any_work(tiny_params, calib, undisturbed, tmp_path):
  folder = tmp_path / "run"
  with pytest.raises(Stopped, match="stopped after layer 1 of 2"):
    run(tiny_params, calib, folder, stop=lambda: True, save_every=1)
  names = [p for p in folder.rglob("*") if p.is_file()]
  assert len(names) == 6
  for file in names:
    if not (data := file.read_bytes()):  # The lock.
      continue
    damage(file, "flip")
    worked = []
    with pytest.raises(ValueError, match=file.name):
      run(tiny_params, calib, folder, resume=True, on_progress=worked.append)
    assert not worked
    file.write_bytes(data)
  again = run(tiny_params, calib, folder, resume=True, chunk=2)
  assert bits(again.params) == bits(undisturbed[0].params)
  assert [one["layer"] for one in again.record.resumed] == [1]


def test_other_tokens_options_and_weights_are_refused(
  tiny_params, calib, undisturbed, tiny_model, tiny_tokens
):
  folder = undisturbed[1]
  other = Calibration(tiny_model, tiny_tokens[1:3])
  with pytest.raises(ValueError, match="a run of calibration .*fingerprint"):
    run(tiny_params, other, folder, resume=True)
  program = dataclasses.replace(PROGRAM, recover=(stage3.MLP,))
  with pytest.raises(ValueError, match=r'a run of program recover .*got .*\["mlp"\]'):
    run(tiny_params, calib, folder, program, resume=True)
  norm = tiny_params["norm"]["weight"]
  weights = {**tiny_params, "norm": {"weight": norm.at[0].add(norm.dtype.type(1))}}
  with pytest.raises(ValueError, match="a run of weights"):
    run(weights, calib, folder, resume=True)


def test_what_was_prepared_is_not_prepared_again(tiny_params, calib, tmp_path):
  calls = []

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class Rewrites(mxjax.Program):
    def prepare(self, params, calib, contract):
      calls.append(1)
      new = {**params, "norm": {"weight": params["norm"]["weight"] * 2}}
      return Prepared(new, {}, {"losses": [1.0]})

  program = Rewrites(name="rewrites")
  undisturbed = run(tiny_params, calib, None, program)
  with pytest.raises(Stopped):
    run(tiny_params, calib, tmp_path / "run", program, stop=lambda: True)
  again = run(tiny_params, calib, tmp_path / "run", program, resume=True)
  assert len(calls) == 2
  assert bits(again.params) == bits(undisturbed.params)
  assert again.record.preparation == {"losses": [1.0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Louder(mxjax.Program):
  """Learns in three steps by what the last norm is multiplied, from a weak type on."""

  name: str = "louder"
  diverges: bool = False

  def prepare(self, params, calib, contract):
    def step(gain, losses):
      loss = math.nan if self.diverges else 2 / (1 + len(losses))
      return gain + 1 / (3 + len(losses)), loss

    def finish(gain, losses):
      weight = params["norm"]["weight"]
      norm = {"weight": weight * gain.astype(weight.dtype)}
      return Prepared({**params, "norm": norm}, record={"losses": losses})

    return Learning(
      start=lambda: jnp.asarray(1.0), steps=3, step=step, finish=finish, sequences=2
    )


def test_learning_killed_at_every_durable_event(tiny_params, calib, tmp_path):
  """A resumed run takes the steps that are left, to the same bits."""
  folder, copies, told = tmp_path / "run", [], []

  def copy(number, name):
    place = tmp_path / f"{number:03d} {name}"
    if (folder / "state.json").is_file():
      copies.append(shutil.copytree(folder, place))

  with watched(copy):
    whole = run(tiny_params, calib, folder, Louder(), on_progress=told.append)
  expected, seen = bits(whole.params), set()
  assert expected == bits(run(tiny_params, calib, None, Louder()).params)
  assert whole.record.preparation == {"losses": [2.0, 1.0, 2.0 / 3]}
  fractions = [now.fraction for now in told]
  assert fractions == sorted(fractions) and fractions[-1] < 1
  # Each of six sequences counts as much as eight of the two of the layers.
  assert [(now.stage, round(now.fraction, 9)) for now in told][:5] == [
    ("learning 0/3", 0.0),
    ("learning 1/3, loss 2.0000", 0.32),
    ("learning 2/3, loss 1.0000", 0.64),
    ("learning 3/3, loss 0.6667", 0.96),
    ("calibration", 0.96),
  ]
  for place in copies:
    state = run_folder.read_state(place)
    done = (
      3 if state["prepared"] else len((state["learning"] or {"losses": []})["losses"])
    )
    again = []
    resumed = run(
      tiny_params, calib, place, Louder(), resume=True, on_progress=again.append
    )
    assert bits(resumed.params) == expected, place.name
    assert resumed.record.preparation == whole.record.preparation
    before = sum((state["learning"] or {"seconds": []})["seconds"])
    assert resumed.record.clock.seconds["preparation"] > before
    # A resumed run is as far as what it does not do again.
    fractions = [now.fraction for now in again]
    assert fractions == sorted(fractions)
    assert not fractions or fractions[0] >= 0.319 * done, place.name
    stages = [now.stage for now in again if now.stage.startswith("learning")]
    is_left = done < 3
    assert len(stages) == (4 - done if is_left else 0), place.name
    if is_left:
      assert stages[0] == f"learning {done}/3"
    assert not [*(place / "learning").iterdir()]
    seen.add((done, state["prepared"] is not None))
  assert seen == {(0, False), (1, False), (2, False), (3, False), (3, True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idle(mxjax.Program):
  """Learns in a step, and leaves the model as it was."""

  def prepare(self, params, calib, contract):
    return Learning(
      start=lambda: jnp.ones(2),
      steps=1,
      step=lambda now, losses: (now, 1.0),
      finish=lambda now, losses: Prepared(params),
    )


def test_steps_that_lead_to_nothing_leave_no_file(tiny_params, calib, tmp_path):
  program, folder = Idle(name="idle"), tmp_path / "run"
  with pytest.raises(Stopped):
    run(tiny_params, calib, folder, program, stop=lambda: True)
  assert not [*(folder / "learning").iterdir()]
  told = []
  options = {"resume": True, "on_progress": told.append}
  resumed = run(tiny_params, calib, folder, program, **options)
  assert bits(resumed.params) == bits(run(tiny_params, calib, None, program).params)
  assert not [now for now in told if now.stage.startswith("learning")]


@pytest.mark.parametrize(
  ("numbers", "written"), [(2**24, [*range(1, 13)]), (2**24 + 1, [1, 4, 7, 10, 12])]
)
def test_writes_of_what_is_large_take_a_tenth_of_the_time(
  numbers, written, monkeypatch
):
  """A step takes a second and a write .31, after which 2.79 are to pass."""
  now, found = [0.0], []

  def taking(seconds, result=None):
    now[0] += seconds
    return result

  class Folder:
    has_steps = staticmethod(lambda stage: False)

    def write_step(self, stage, arrays, losses, seconds, sequences):
      found.append((len(losses), seconds))
      taking(0.31)

  monkeypatch.setattr(steps, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
  learning = Learning(
    # Of float32, so that the larger one has a number more than 64 MiB.
    start=lambda: np.zeros(numbers, np.float32),
    steps=12,
    step=lambda learned, losses: taking(1, (learned, 1.0)),
    finish=lambda learned, losses: losses,
  )
  report = Report(Idle(name="idle"), 2, StageClock())
  assert len(steps.take(learning, "tuning", Folder(), report)) == 12
  assert [number for number, _ in found] == written
  # All of the time is told, but for that of the last write.
  assert sum(seconds for _, seconds in found) == pytest.approx(now[0] - 0.31)


@pytest.mark.parametrize("is_given_away", [False, True])
def test_an_interrupt_writes_the_steps_that_waited(is_given_away, monkeypatch, caplog):
  """But not what the step in work has given away; either is told."""
  monkeypatch.setattr(steps, "SMALL_BYTES", 0)
  monkeypatch.setattr(steps, "PATIENCE", 1e9)
  found = []

  class Folder:
    has_steps = staticmethod(lambda stage: False)

    def write_step(self, stage, arrays, losses, seconds, sequences):
      found.append((losses, [float(array[0]) for array in arrays.values()]))

  def step(learned, losses):
    if len(losses) == 3:
      if is_given_away:
        learned.delete()
      raise KeyboardInterrupt
    return learned + 1, float(len(losses))

  learning = Learning(
    start=lambda: jnp.zeros(3), steps=12, step=step, finish=lambda *_: None
  )
  report = Report(Idle(name="idle"), 2, StageClock())
  with pytest.raises(KeyboardInterrupt):
    steps.take(learning, "tuning", Folder(), report)
  last = [] if is_given_away else [([0.0, 1.0, 2.0], [3.0])]
  assert found == [([0.0], [1.0]), *last]
  [line] = caplog.messages
  assert line.startswith("scale distillation, step 3 of 12, is ")
  assert ("lost" in line) == is_given_away


def test_an_interrupted_write_of_steps_is_made_again(monkeypatch):
  """With the seconds of all steps since the write before."""
  now, told = [0.0], []

  class Folder:
    has_steps = staticmethod(lambda stage: False)

    def write_step(self, stage, arrays, losses, seconds, sequences):
      told.append((len(losses), seconds))
      now[0] += 0.5
      if len(told) == 2:
        raise KeyboardInterrupt

  def step(learned, losses):
    now[0] += 1
    return learned + 1, 0.0

  monkeypatch.setattr(steps, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
  learning = Learning(
    start=lambda: jnp.zeros(3), steps=12, step=step, finish=lambda *_: None
  )
  report = Report(Idle(name="idle"), 2, StageClock())
  with pytest.raises(KeyboardInterrupt):
    steps.take(learning, "tuning", Folder(), report)
  # A write's time belongs to the steps after it; the third write is the second's.
  assert told == [(1, 1.0), (2, 1.5), (2, 2.0)]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_steps_began_with_leaves_memory(is_resumed):
  """A second copy of what is learned may not fit."""
  began, saved = [], []

  class Folder:
    has_steps = staticmethod(lambda stage: is_resumed)

    def read_steps(self, stage):
      assert began[0]() is None
      arrays = {key: np.full(8, 2.0, np.float32) for key in "ab"}
      saved.extend(weakref.ref(array) for array in arrays.values())
      return Steps(arrays, [1.0])

    def write_step(self, *_):
      pass

  def start():
    arrays = [jnp.zeros(8), jnp.ones(8)]
    began.append(weakref.ref(arrays[0]))
    return arrays

  def step(learned, losses):
    if len(losses) >= 2:
      assert not [ref for ref in (*began, *saved) if ref() is not None]
    return [leaf + 1 for leaf in learned], 0.5

  learning = Learning(start=start, steps=4, step=step, finish=lambda now, _: now)
  report = Report(Idle(name="idle"), 2, StageClock())
  found = steps.take(learning, "tuning", Folder(), report)
  expected = [5.0, 5.0] if is_resumed else [4.0, 5.0]
  assert [float(leaf[0]) for leaf in found] == expected


def test_a_loss_that_is_not_finite_is_refused_at_its_step(tiny_params, calib):
  program = Louder(diverges=True)
  with pytest.raises(
    FloatingPointError, match=r"prepare: learning: .*nan at step 1 of"
  ):
    run(tiny_params, calib, None, program)


@pytest.mark.slow
@pytest.mark.parametrize(
  "method", ["spinquant:steps=4:batch=1", "focus:batch=1:epochs=2"]
)
def test_a_baseline_that_was_stopped_in_learning_goes_on_there(
  tiny_params, calib, tmp_path, monkeypatch, method
):
  # So often that some matrices are renewed before the stop and some after it.
  monkeypatch.setattr(orthogonal, "RENEWAL", 2)
  whole = run(tiny_params, calib, None, method)

  def stop_at(label):
    def follow(now):
      if now.stage.startswith(label):
        raise KeyboardInterrupt

    return follow

  with pytest.raises(KeyboardInterrupt):
    run(
      tiny_params, calib, tmp_path / "run", method, on_progress=stop_at("learning 2/")
    )
  told = []
  options = {"resume": True, "on_progress": told.append}
  resumed = run(tiny_params, calib, tmp_path / "run", method, **options)
  assert bits(resumed.params) == bits(whole.params)
  assert resumed.record.preparation == whole.record.preparation
  assert not [now for now in told if now.stage.startswith("learning 1/")]


def test_a_run_with_a_store_resumes_too(tiny_params, calib, tmp_path):
  program = methods.GPTQ
  undisturbed = run(tiny_params, calib, None, program)
  options = {"store": tmp_path / "shared"}
  for name, more in (("store", options), ("filled store", options)):
    with pytest.raises(Stopped):
      run(tiny_params, calib, tmp_path / name, program, stop=lambda: True, **more)
    again = run(tiny_params, calib, tmp_path / name, program, resume=True, **more)
    assert bits(again.params) == bits(undisturbed.params)
