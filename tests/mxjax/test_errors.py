"""Errors are objects: their fields survive every way that they travel."""

import copy
import errno
import multiprocessing
import os
import pathlib
import pickle

import pytest

import mxjax
from mxjax import errors
from mxjax.devices import processes
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox import executor
from mxjax.storage import atomic_io

BUILT_IN = {
  errors.ValueRefusal: ValueError,
  errors.TypeRefusal: TypeError,
  errors.NotImplementedRefusal: NotImplementedError,
  errors.FloatingPointRefusal: FloatingPointError,
  errors.ImportRefusal: ImportError,
  errors.OSRefusal: OSError,
  errors.FileNotFoundRefusal: FileNotFoundError,
  errors.FileExistsRefusal: FileExistsError,
  errors.BlockingIORefusal: BlockingIOError,
  errors.ConnectionRefusal: ConnectionError,
}


def fields(error):
  return error.place, error.expected, error.got, error.mend


@pytest.mark.parametrize("kind", BUILT_IN, ids=lambda kind: kind.__name__)
def test_every_kind_has_the_fields_the_sentence_and_its_built_in_kind(kind):
  error = kind("mesh", expected="a size", got=3, mend="choose another")
  assert isinstance(error, BUILT_IN[kind]) and isinstance(error, mxjax.Refusal)
  assert kind.__name__ == BUILT_IN[kind].__name__.replace("Error", "Refusal")
  assert str(error) == "mesh: expected a size, got 3; choose another."
  for other in (
    pickle.loads(pickle.dumps(error)),
    copy.copy(error),
    copy.deepcopy(error),
  ):
    assert type(other) is kind and fields(other) == fields(error)
    assert str(other) == str(error) and repr(other) == repr(error)
  assert "'a size'" in repr(error)


def test_every_kind_is_in_the_table():
  kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
  assert {k for k in kinds if issubclass(k, errors.Refusal)} - {errors.Refusal} == {
    *BUILT_IN
  }


def test_mend_may_be_left_out_and_a_place_may_be_a_path():
  error = errors.ValueRefusal(pathlib.Path("a/b"), "none", got=(1, 2))
  assert fields(error) == ("a/b", "none", "(1, 2)", "")
  assert str(error) == "a/b: expected none, got (1, 2)."
  assert error.complaint == "expected none, got (1, 2)."


def test_the_place_changes_and_nothing_else_does():
  error = errors.OSRefusal("disk", "room", "none", "make room", errno=errno.ENOSPC)
  assert pickle.loads(pickle.dumps(error)).errno == errno.ENOSPC
  there = error.at(pathlib.Path("file.json"))
  assert fields(there) == ("file.json", *fields(error)[1:])
  inside = error.within("layers_3")
  assert fields(inside) == ("layers_3: disk", *fields(error)[1:])
  assert type(there) is type(inside) is errors.OSRefusal
  assert there.errno == inside.errno == errno.ENOSPC and error.place == "disk"


def test_within_prefixes_the_place_and_keeps_the_cause():
  with pytest.raises(errors.FloatingPointRefusal) as caught, errors.within("q_proj"):
    raise errors.FloatingPointRefusal("gptq", "numbers", "NaN")
  assert caught.value.place == "q_proj: gptq"
  assert isinstance(caught.value.__cause__, errors.FloatingPointRefusal)
  with pytest.raises(ValueError, match="^q_proj: no width$"), errors.within("q_proj"):
    raise ValueError("no width")
  with pytest.raises(KeyError), errors.within("q_proj"):
    raise KeyError("a bug")


def _refuse(number):
  raise errors.OSRefusal("here", "room", got=number, errno=number)


def test_another_process_raises_it_here():
  with multiprocessing.get_context("spawn").Pool(1) as pool:
    with pytest.raises(errors.OSRefusal, match="^here: expected room, got 28.$") as e:
      pool.apply(_refuse, (28,))
  assert e.value.errno == 28


@pytest.mark.parametrize(
  "words", ["gloo", os.strerror(errno.ENOSPC), "RESOURCE_EXHAUSTED"]
)
def test_words_by_which_foreign_errors_are_known_mean_nothing_in_a_refusal(words):
  error = errors.ValueRefusal("prompt", expected="text", got=words)
  assert processes.lost_message(error) is None
  assert executor.status_of(error)[0] is Status.CRASHED
  with pytest.raises(errors.ValueRefusal) as caught, atomic_io.explaining("out"):
    raise error
  assert caught.value is error


def test_foreign_errors_without_a_number_are_known_by_their_words():
  assert processes.lost_message(RuntimeError("Gloo: closed")) == processes.LOST_MESSAGE
  error = RuntimeError("RESOURCE_EXHAUSTED: no memory")
  assert executor.status_of(error)[0] is Status.MEMORY
