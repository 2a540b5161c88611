"""Programs of a layer's linears compiled side by side: fewer in turn, the same bits."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from mxjax import compilation, methods
from mxjax.methods.hires.hires import HiRes
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import compiling
from mxjax.run.quantize import run
from mxjax.run.setup import Setup
from tests.mxjax.quantized import assert_same


@pytest.fixture
def built(tiny_params, tiny_calib):
  """Builds, and counts the programs that this thread compiles and that others do."""

  def build(method="hires"):
    counts = {True: 0, False: 0}

    def count(*_):
      counts[threading.current_thread() is threading.main_thread()] += 1

    jax.clear_caches()
    with compilation.on_compile(count):
      result = run(tiny_params, tiny_calib, method, check=False)
    return result, counts[True], counts[False]

  return build


def one_at_a_time(workers):
  """A CPU may hang on two computations at once, so here the pool has one thread."""
  del workers
  return ThreadPoolExecutor(1)


@pytest.mark.slow
def test_linears_of_each_shape_are_compiled_in_other_threads(built, monkeypatch):
  plain, here, elsewhere = built()
  assert elsewhere == 0
  monkeypatch.setattr(compiling, "_gains", lambda *_: True)
  monkeypatch.setattr(compiling, "ThreadPoolExecutor", one_at_a_time)
  together, left, moved = built()
  assert_same(plain.params, together.params)
  assert plain.record.layers == together.record.layers
  # What is left is of capturing, of the recovery fits and of setting up.
  assert moved > 60
  assert left < here / 2
  assert left + moved <= here + 5


@pytest.mark.slow
def test_what_a_linear_raises_it_raises_in_its_turn(built, monkeypatch):
  told = []

  def refuses(self, weight, inputs):
    told.append(threading.current_thread() is threading.main_thread())
    raise ValueError("not this one")

  monkeypatch.setattr(HiRes, "quantize_linear", refuses)
  monkeypatch.setattr(compiling, "_gains", lambda *_: True)
  monkeypatch.setattr(compiling, "ThreadPoolExecutor", one_at_a_time)
  with pytest.raises(ValueError, match="not this one"):
    built()
  assert told[-1] and not any(told[:-1]) and len(told) > 2


def test_jax_compiles_a_program_once_for_threads_that_call_it_at_once():
  names = []

  def shared(x):
    time.sleep(0.2)  # All threads are here before the first has traced it.
    return x + 1

  with compilation.on_compile(lambda name, _: names.append(name)):
    jitted = jax.jit(shared)
    with ThreadPoolExecutor(3) as pool:
      list(pool.map(lambda _: jitted(np.float32(1)), range(3)))
  assert names.count("shared") == 1


class Device:
  def __init__(self, free):
    self._free = free

  def memory_stats(self):
    return {"bytes_limit": 2 * self._free, "bytes_in_use": self._free}


class Counting(HiRes):
  """A user's program, which does not promise anything."""


SHAPES = {(64, 64): ("self_attn", "q_proj"), (128, 64): ("mlp", "up_proj")}


def test_where_it_gains_nothing_or_may_fail_nothing_runs(
  tiny_params, tiny_calib, monkeypatch, tmp_path
):
  setup = Setup.of(tiny_params, tiny_calib, "hires", PAPER_CONTRACT)
  assert not compiling._gains(setup, SHAPES)  # A CPU.
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax, "local_devices", lambda: [Device(1 << 30)])
  assert compiling._gains(setup, SHAPES)
  assert not compiling._gains(setup, {(64, 64): ("self_attn", "q_proj")})
  other = lambda **changes: dataclasses.replace(setup, **changes)
  assert not compiling._gains(other(program=Counting()), SHAPES)
  assert not compiling._gains(other(program=methods.get("rtn")), SHAPES)
  assert not compiling._gains(other(store=tmp_path), SHAPES)
  monkeypatch.setattr(jax, "local_devices", lambda: [Device(1 << 16)])
  assert not compiling._gains(setup, SHAPES)
