"""Runs that die: at every durable event, by a disk that fails, by damage."""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.methods.hires import stage3
from mxjax.methods.program import Prepared
from mxjax.models import CausalLM
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import folder as run_folder
from mxjax.run import quantize
from mxjax.run.capture import Trajectories
from mxjax.run.progress import Report, Stopped
from mxjax.run.record import StageClock
from mxjax.run.setup import Setup
from mxjax.storage import atomic_io
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


def test_a_resumed_run_leaves_no_gradients(tiny_params, calib, tmp_path):
  program, folder = methods.get("rtn:weighting=fisher"), tmp_path / "run"
  with pytest.raises(Stopped):
    run(tiny_params, calib, folder, program, stop=lambda: True)
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
  """The layers that the state in a run folder keeps, and all that were written."""
  if not (place / "state.json").is_file():
    return [], 0
  state = run_folder.read_state(place)
  again = [name for name in state["removable"] if name.startswith("layers/")]
  return state["layers"], len(state["layers"]) + len(again)


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
    result = run(tiny_params, calib, folder)
  expected = bits(result.params)
  assert expected == bits(undisturbed[0].params)
  assert len(copies) > 60
  seen, states = set(), set()
  for place in copies:
    finished = len(layers_of(place)[0])
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


@pytest.fixture(scope="module")
def deep(tiny_config, tiny_tokens):
  """A model of four layers, its params, and calibration tokens."""
  config = dataclasses.replace(tiny_config, num_layers=4)
  model = CausalLM(config)
  params = model.init(jax.random.key(5), tiny_tokens[:1])["params"]
  return params, Calibration(model, tiny_tokens[:2])


def test_killed_with_hidden_states_of_every_third_layer(deep, tmp_path):
  """The layers after the last hidden states are done again, to the same bits."""
  folder, copies = tmp_path / "run", []

  def copy(number, name):
    if name in ("before _save", "after _save", "after unlink"):
      place = tmp_path / f"{number:03d} {name}"
      shutil.copytree(folder, place)
      copies.append(place)

  with watched(copy):
    result = run(*deep, folder, save_every=3)
  assert result.record.save_every == 3
  expected, again = bits(run(*deep).params), set()
  assert bits(result.params) == expected
  for place in copies:
    kept, written = layers_of(place)
    worked = []
    resumed = run(*deep, place, resume=True, save_every=3, on_progress=worked.append)
    assert bits(resumed.params) == expected, place.name
    assert len(kept) == (written if written == 4 else 3 * (written // 3))
    assert {p.layer for p in worked} == set(range(len(kept), 4)), place.name
    again.add(written - len(kept))
  assert again == {0, 1, 2}


def test_a_stopped_run_loses_nothing(deep, tmp_path):
  folder, calls = tmp_path / "run", iter([False, True])
  with pytest.raises(Stopped, match="after layer 2 of 4"):
    run(*deep, folder, save_every=4, stop=lambda: next(calls))
  resumed = run(*deep, folder, resume=True, save_every=4)
  assert [one["layer"] for one in resumed.record.resumed] == [2]
  assert bits(resumed.params) == bits(run(*deep).params)


def test_how_often_hidden_states_are_written_depends_on_their_size(deep, tmp_path):
  sizes = (0, 1, 2**30, 2**30 + 1, 3 * 2**31, 2**40)
  assert [quantize.default_save_every(size) for size in sizes] == [1, 1, 1, 2, 6, 8]
  setup = Setup.of(*deep, PROGRAM, PAPER_CONTRACT, chunk=2)
  trajectories = Trajectories.begin(setup, None, Report(PROGRAM, 4, StageClock()))
  nbytes = trajectories.nbytes()
  assert nbytes == 3 * sum(part.nbytes for part in trajectories.entering())
  assert run(*deep).record.save_every is None
  with pytest.raises(ValueError, match="save_every of at least 1, got 0"):
    run(*deep, tmp_path / "none", save_every=0)


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
    run(tiny_params, calib, folder, stop=lambda: True)
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


def test_a_run_with_a_store_resumes_too(tiny_params, calib, tmp_path):
  program = methods.GPTQ
  undisturbed = run(tiny_params, calib, None, program)
  options = {"store": tmp_path / "shared"}
  for name, more in (("store", options), ("filled store", options)):
    with pytest.raises(Stopped):
      run(tiny_params, calib, tmp_path / name, program, stop=lambda: True, **more)
    again = run(tiny_params, calib, tmp_path / name, program, resume=True, **more)
    assert bits(again.params) == bits(undisturbed.params)
