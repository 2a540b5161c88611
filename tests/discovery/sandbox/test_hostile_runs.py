"""Whatever a candidate is, it costs at most its own call: random and chosen faults."""

import functools
import importlib.util
import math
import os
import pathlib

import pytest

from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.proposal import Proposal
from mxjax.discovery.core.residual import Control
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox import jail, supervisor, trace_worker
from mxjax.discovery.sandbox.jailed_executor import JailedExecutor
from mxjax.discovery.tasks import world
from tests import refusals

SCRIPT = pathlib.Path(__file__).parents[3] / "benchmarks" / "hostile_programs.py"
TASK = world.World(seed=3)
SPEC = TASK.interface.hook("geometry").to_dict()
HEADER = "import jax\nimport jax.numpy as jnp\n"
GOOD = HEADER + "def geometry(x):\n  return x + 1\n"
pytestmark = pytest.mark.skipif(
  not os.path.exists("/proc/self/ns/user"), reason="this kernel has no user namespaces"
)


@pytest.fixture(scope="module")
def script():
  spec = importlib.util.spec_from_file_location("hostile_programs", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def policy_open(script, monkeypatch):
  for name in ("NAMES", "ATTRIBUTES", "NODES"):
    kept = getattr(candidate_source, f"FORBIDDEN_{name}")
    monkeypatch.setattr(candidate_source, f"FORBIDDEN_{name}", kept)
  monkeypatch.setattr(candidate_source, "IMPORTS", candidate_source.IMPORTS)
  monkeypatch.setattr(script.llm, "UNUSABLE_IN_A_ROW", 0)
  script.open_policy()


@pytest.mark.slow
def test_random_programs_end_a_run_in_order(script, policy_open, tmp_path):
  seen = script.conduct(tmp_path / "run", programs=40, seed=0, level="strict")
  assert seen["ends"]["ok"] > 1
  assert len(seen["ends"]) > 1


@pytest.fixture(scope="module")
def tracer():
  limits = jail.Limits(seconds=60.0, cpu_seconds=3, memory_bytes=3 << 30)
  made = supervisor.Tracer("standard", limits)
  yield made
  made.close()


@pytest.mark.parametrize("size", [(8 << 20) - 1, (8 << 20), 9 << 20])
@pytest.mark.parametrize("kind", ["A", "E"])
def test_a_reply_of_any_size_costs_only_its_candidate(tracer, kind, size):
  attack = f"import os\nos.write(3, b'{kind}')\nx, n = bytes(1 << 16), {size - 1}\n"
  attack += "while n > 0: n -= os.write(3, x[:n])\nos._exit(0)\n"
  ended = tracer.trace(GOOD + attack, [SPEC])
  assert ended.status in (Status.REFUSED, Status.TRACE_FAILED)
  assert len(ended.detail) < 5000
  assert tracer.trace(GOOD, [SPEC]).status == Status.OK


@pytest.mark.slow
def test_a_trace_worker_that_died_idle_is_no_fault_of_the_next_candidate(tracer):
  worker = tracer._worker
  worker._process.kill()
  worker._process.wait()
  assert tracer.trace(GOOD, [SPEC]).status == Status.OK


def test_scratch_that_stays_is_reported_and_does_not_end_the_supervisor(
  tmp_path, monkeypatch
):
  deep = tmp_path / "scratch"
  for _ in range(2):
    deep.mkdir()
    deep = deep / "d"
  assert trace_worker._removed(str(tmp_path / "scratch"))
  (tmp_path / "link").symlink_to(tmp_path)
  assert not trace_worker._removed(str(tmp_path / "link"))

  def too_deep(*arguments, **options):
    raise RecursionError

  monkeypatch.setattr(trace_worker.shutil, "rmtree", too_deep)
  assert not trace_worker._removed(str(tmp_path / "link"))
  outcome = {"verdict": "stuck", "output": "", "signal": 0, "code": 0}
  assert supervisor._classify(outcome, b"A", jail.Limits())[0] == Status.REFUSED


BINDINGS = [
  "geometry = lambda x: x",
  "geometry, y = abs, 1",
  "y = geometry = abs",
  "y = (geometry := abs)",
  "from math import floor as geometry",
  "import math as geometry",
]
CHOKING = [
  "x = " + "+".join(["1"] * 800),
  "x = 0x" + "f" * 50_000,
  "x = '\ud800'",
  "x = '\0'",
]


def test_odd_text_is_rejected_in_a_sentence():
  refusals.check(
    [
      (
        functools.partial(candidate_source.admit, HEADER + code, TASK.interface),
        "program: ",
      )
      for code in (*BINDINGS, *CHOKING)
    ],
    candidate_source.RejectedError,
  )


def test_what_is_admitted_can_be_printed_and_identified():
  code = "x = " + "+".join(["1"] * 90) + "\nweights_of = 2 ** 64"
  admitted = candidate_source.admit(GOOD + code, TASK.interface)
  assert len(admitted.id) == 64
  local = "def mlp(x):\n  geometry = x\n  return geometry\n"
  candidate_source.admit(GOOD + local, TASK.interface)


def test_a_hook_that_is_no_function_is_no_error_of_the_executor():
  specs = dict.fromkeys(("geometry", "mlp"), SPEC)
  keys = candidate_source.hook_keys(GOOD + "mlp = 3\n", specs)
  other = candidate_source.hook_keys(GOOD + "mlp = 4\n", specs)
  assert keys.keys() == {"geometry", "mlp"}
  assert keys["mlp"] != other["mlp"]


def test_a_proposal_holds_only_what_the_log_can():
  wrong = [
    {"controls": (Control("c", {"factor": math.nan}),)},
    {"controls": (Control("c", {"deep": [{"x": -math.inf}]}),)},
    {"label": "\ud800"},
    {"note": "\udfff"},
  ]
  # The names of other conditions are not a control's.
  names = ("primary", "probe", "probe 0123456789ab")
  refusals.check(
    [
      *(
        (functools.partial(Proposal, **{"source": "", "label": "", **fields}),)
        for fields in wrong
      ),
      *((functools.partial(Control, name, {}), "name other than") for name in names),
    ]
  )


@pytest.mark.slow
def test_a_control_without_a_parent_is_an_outcome_not_an_error(tmp_path):
  executor = JailedExecutor.__new__(JailedExecutor)
  executor._store = store.Store(tmp_path)
  for parent in ({}, None, False, 0, ""):
    assert executor.artifacts(Call({}, {}, {"parent": parent})) == {}
