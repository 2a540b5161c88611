"""Whole methods as programs: HiRes and WUSH in passes, equal to the library's own."""

import functools
import json
import os
import pathlib

import numpy as np
import pytest

import mxjax
from mxjax.discovery.core import candidate_source, identity, store
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox.jailed_executor import JailedExecutor
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import edit_templates, interface, payload, programs
from mxjax.discovery.tasks.ptq import task as ptq
from tests import tiny
from tests.cases import slow

SIZES = {"calibration": [8, 32], "windows": [2, 32]}
RANDOM = {"model": "random:0", **SIZES}
TRAINED = {"model": "models/trained/qwen3", "layers": 1, "windows": [2, 64]}
INTERFACE = interface.INTERFACE


def traced(executor, source):
  """The call of a source, completed as a search completes it."""
  program = candidate_source.admit(source, INTERFACE)
  defaults = INTERFACE.default_source()
  whole = candidate_source.with_functions(source, defaults, replace=False)
  result = executor.trace(whole)
  assert result.status == Status.OK, result.detail
  return Call(result.computation, program.plan, {}).active(INTERFACE)


def in_jail(task, source, folder):
  """The operands and observables of a program that ran behind all walls."""
  # Most of the time goes to compiling, much of it what the library compiles too.
  compiled = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
  executor = JailedExecutor(task, store.Store(folder), compiled=compiled)
  try:
    call = traced(executor, source)
    plain = json.loads(identity.canonical(call._asdict()))
    fit, measure = executor._workers[0]._workers
    _, operands = fit.run(plain, executor.artifacts(call), b"")
    result, _ = measure.run(plain, executor.artifacts(call), operands)
  finally:
    executor.close()
  return payload.from_bytes(operands), result["values"]


def in_process(task, source, folder):
  """The same without walls."""
  del folder
  executor = LocalExecutor(task)
  call = traced(executor, source)
  phase = lambda name, data: task.open(name).run(call, executor.artifacts, data)
  _, operands = phase("fit", b"")
  return payload.from_bytes(operands), phase("measure", operands)[0]["values"]


def nibbles(packed):
  packed = np.asarray(packed)
  return np.stack([packed & 15, packed >> 4])


@functools.cache
def executor():
  return LocalExecutor(ptq.PtqTask(**RANDOM))


def run(source, **intervention):
  call = traced(executor(), source)._replace(intervention=intervention)
  outcomes = []
  executor().run([call], lambda index, outcome, seconds: outcomes.append(outcome))
  return outcomes[0]


@pytest.mark.slow
def test_a_program_can_measure_its_own_tables():
  template = next(t for t in edit_templates.USEFUL if t.id == "one-code")
  realized = template.edit(INTERFACE.default_source(), {"rounds": 1})
  measured = candidate_source.with_plan(realized, {"tables": "measured"})
  expected, got = run(realized).values, run(measured).values
  for name in ("activation_error", "operator_error"):
    assert got[name] == pytest.approx(expected[name], abs=1e-6)
  wrong = candidate_source.with_functions(
    measured,
    "def tables(weight, decoded):\n"
    "  nan = jnp.full((32, 32), jnp.nan)\n"
    "  return nan, nan\n",
  )
  outcome = run(wrong)
  assert outcome.status == Status.CONTRACT
  assert "tables: returned NaN" in outcome.detail


@pytest.mark.parametrize(
  ("plan", "intervention", "message"),
  [
    *slow(({"curvature": "solved"}, {}, "balance off and curvature none")),
    *slow(({"balance": "measured"}, {}, "balance off and curvature none")),
    *slow(({}, {"kind": "random_map"}, "use the control scope")),
    ({}, {"kind": "shuffle_stats", "hooks": ["solve"]}, "use the control scope"),
  ],
)
def test_what_cannot_be_reached_is_a_contract_error(plan, intervention, message):
  source = candidate_source.with_plan(programs.source("wush"), plan)
  outcome = run(source, **intervention)
  assert outcome.status == Status.CONTRACT
  assert message in outcome.detail


def test_programs_are_admitted_and_start_from_nothing_of_ours():
  for name in programs.NAMES:
    source = programs.source(name)
    assert "mxjax" not in source
    candidate_source.admit(source, INTERFACE)


@pytest.fixture(scope="module")
def square(tmp_path_factory):
  """Options of a model whose linears have one shape: a fourth of the programs."""
  folder = tmp_path_factory.mktemp("square")
  tiny.save_folder(folder, num_layers=1, num_kv_heads=4, intermediate_size=64)
  text = str(folder / "text.txt")
  return {"model": str(folder), "text": text, **SIZES}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "where"),
  [
    pytest.param(name, where, marks=[pytest.mark.slow] * (name != "gptq"))
    for where in (in_process, in_jail)
    for name in ("wush", "gptq", "hires")
  ],
)
def test_a_method_as_a_program_is_the_librarys(
  name, where, square, tmp_path, record_property
):
  task = ptq.PtqTask(**(square if where is in_jail else TRAINED))
  got, values = where(task, programs.source(name), tmp_path)
  model, params = task.options.load()
  calib = mxjax.Calibration(model, task.options.tokens("fit"))
  library = mxjax.quantize(params, calib, name, check=False, probe=False)
  expected = payload.of_params(library, model)
  assert got.keys() == expected.keys()
  codes = differ = 0
  for place, arrays in expected.items():
    for field, array in arrays.items():
      if field == "codes":
        codes += 2 * array.size
        differ += int((nibbles(array) != nibbles(got[place][field])).sum())
      elif field != "scales":
        np.testing.assert_allclose(
          np.asarray(got[place][field]), np.asarray(array, np.float32), atol=1e-6
        )
  record_property("codes", codes)
  record_property("codes that differ", differ)
  assert differ <= codes // 10_000, f"{differ} of {codes} codes differ"
  errors, _ = task.open("measure")._operator_errors(library, params)
  exact = np.mean([error["total"] for error in errors.values()])
  assert values["operator_error"] == pytest.approx(exact, abs=1e-6)
