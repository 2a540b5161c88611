"""Processor time of a call: what it was spent on, and where it ends."""

import os
import tempfile
import threading
from concurrent import futures

import jax
import jax.numpy as jnp
import pytest

from mxjax.compilation import COMPILED, LOWERED
from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.task import Call, Status
from mxjax.discovery.sandbox import answers, jailed_executor, processor, supervisor
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import runs
from mxjax.discovery.tasks import world
from tests.cases import slow

TASK = world.World(seed=3)
ENDLESS = """
def geometry(x):
  return jax.lax.while_loop(lambda y: y[0] < jnp.inf, lambda y: y * 0.5, x)
"""


class Clock:
  """Processor seconds that pass when a test says so."""

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now

  def passes(self, seconds):
    self.now += seconds


@pytest.fixture
def clock():
  return Clock()


@pytest.fixture
def meter(clock):
  made = processor.Meter(clock)
  yield made
  jax.monitoring.unregister_event_duration_listener(made._listen)


def test_a_part_within_another_one_interrupts_it(meter, clock):
  with meter.measured() as spent:
    clock.passes(1)
    with meter.on("outer"):
      clock.passes(2)
      with meter.on("inner"):
        clock.passes(4)
      clock.passes(8)
    clock.passes(16)
  assert spent == {processor.REST: 17, "outer": 10, "inner": 4}
  clock.passes(32)
  with meter.on("outer"):
    clock.passes(64)
  assert sum(spent.values()) == 31, "nothing is charged outside of a measurement"


@pytest.mark.parametrize("begun", [processor.TRACED, LOWERED])
def test_what_jax_compiles_is_no_part_of_a_hook(meter, clock, begun):
  with meter.measured() as spent, meter.on("hook"):
    clock.passes(1)
    meter._listen(begun, 0.0)
    clock.passes(2)
    meter._listen(LOWERED, 0.0)
    clock.passes(4)
    meter._listen(COMPILED, 0.0)
    clock.passes(8)
  lowering = 2 if begun == processor.TRACED else 0
  expected = {"hook": 11 - lowering, processor.COMPILING: 4 + lowering}
  assert begun == LOWERED or spent == expected | {processor.REST: 0}
  assert sum(spent.values()) == 15


def test_other_threads_are_charged_to_what_the_first_one_does(meter, clock):
  def elsewhere():
    with meter.on("other"):
      clock.passes(2)
      meter._listen(COMPILED, 0.0)

  with meter.measured() as spent, meter.on("hook"):
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
  assert spent == {processor.REST: 0, "hook": 2}


def test_a_failure_leaves_a_meter_as_it_was(meter, clock):
  with pytest.raises(KeyError), meter.measured(), meter.on("hook"):
    raise KeyError
  with meter.measured() as spent:
    clock.passes(1)
  assert spent == {processor.REST: 1}


def test_the_parts_of_a_measurement_are_its_whole_processor_time():
  with processor.METER.measured() as spent, processor.METER.on("hook"):
    jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((64, 64))))
  assert spent[processor.COMPILING] > 0
  assert {*spent} == {processor.COMPILING, processor.REST, "hook"}


def test_what_a_call_had_spent_can_be_read_when_it_did_not_end(meter, clock):
  with tempfile.TemporaryFile() as file:
    assert answers.unfinished(file.fileno(), 60) == ""
    meter.tell(file.fileno())
    with meter.measured():
      with meter.on("encode"):
        clock.passes(7.0)
      clock.passes(1.0)
      with meter.on("recover"):
        clock.passes(2.0)
        # It was killed here, at 20 seconds: what is left is of the part within.
        found = answers.unfinished(file.fileno(), 20)
    assert found == "recover 12, encode 7, the rest 1; recover had not ended"
    # A new call has nothing of the one before.
    with meter.measured():
      found = answers.unfinished(file.fileno(), 20)
    assert found == "the rest 20; the rest had not ended"
    # A worker may have written anything.
    for forged in (
      *(b'["encode", {"encode": "7"}]', b'["encode", {"encode": NaN}]', b"[5, {}]"),
      *(b'[["encode"], {}]', b"7", b"[" * 4096),
    ):
      os.pwrite(file.fileno(), forged.ljust(4096), 0)
      assert answers.unfinished(file.fileno(), 20) == ""


@pytest.mark.parametrize(
  "sent", [None, [], {"a": "1"}, {"a": True}, {"a": -1.0}, {"a": 1e999}, {1: 1.0}]
)
def test_seconds_of_a_worker_are_numbers_from_zero(sent):
  assert processor.checked({"a": 1}) == {"a": 1.0}
  with pytest.raises(ValueError, match="processor seconds that are none"):
    processor.checked(sent)


def call_of(executor, source):
  made = executor.trace(source)
  assert made.status == Status.OK, made.detail
  call = Call(made.computation, TASK.interface.default_plan, {})
  return call.active(TASK.interface)


def ended(executor, call):
  found = []
  executor.run([call], lambda _, *told: found.append(told))
  return found[0]


@pytest.mark.slow
def test_a_call_tells_its_processor_seconds_wherever_it_runs(tmp_path):
  jailed = jailed_executor.JailedExecutor(TASK, store.Store(tmp_path), level="standard")
  try:
    for executor in (LocalExecutor(TASK), jailed):
      call = call_of(executor, TASK.interface.default_source())
      outcome, took = ended(executor, call)
      assert outcome.status == Status.OK
      assert sum(took.processor.values()) > 0
      assert processor.REST in took.processor
  finally:
    jailed.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["standard", *slow("strict")])
def test_a_call_ends_by_its_processor_time_and_not_by_a_clock(tmp_path, level):
  """At both levels: the first process of a pid namespace has signals of its own."""
  source = TASK.interface.default_source()
  endless = candidate_source.with_functions(source, ENDLESS)
  executor = runs.make_executor(TASK, store.Store(tmp_path), level, call_seconds=2)
  try:
    outcome, took = ended(executor, call_of(executor, endless))
    assert outcome.status == Status.TIMEOUT
    told = outcome.detail
    assert told.startswith("took more than 2 processor seconds: in its phase ")
    # This task runs its hooks without names.
    assert told.endswith("; the rest had not ended")
    assert took.processor == {}
    # Of the next worker, and of as many calls as there are.
    for _ in range(3):
      assert ended(executor, call_of(executor, source))[0].status == Status.OK
  finally:
    executor.close()


def test_a_phase_has_what_the_phases_before_it_left(monkeypatch):
  asked = []

  def run(self, call, artifacts, before, spent):
    asked.append(spent)
    values = {"values": {"loss": 1.0}, "outputs": {}}
    return {**values, "processor": {"compiling": 2.0, "hook": 3.0}}, b""

  monkeypatch.setattr(supervisor.RunWorker, "run", run)
  monkeypatch.setattr(world.World, "phases", ("first", "second"), raising=False)
  made = jailed_executor.EvaluatorWorker(
    world.World(seed=3), "standard", supervisor.RUN_LIMITS
  )
  answer = made.run(Call({}, {}, {})._asdict(), {})
  assert asked == [0.0, 5.0]
  assert answer["processor"] == {"compiling": 4.0, "hook": 6.0}


def test_workers_have_one_thread_and_flags_of_a_quick_compiler():
  given = supervisor._clean_environment()
  assert given["NPROC"] == "1"
  assert "codegen_split_count=1" in given["XLA_FLAGS"]
  is_old = jax.__version_info__ < (0, 11)
  assert ("use_fusion_emitters=false" in given["XLA_FLAGS"]) == is_old


def test_threads_measure_beside_each_other():
  """As calls without walls do; one that ends leaves the others' parts alone."""
  meter = processor.Meter()

  def whole():
    with meter.measured() as spent, meter.on("hook"):
      pass
    return spent

  with meter.measured() as mine, meter.on("outer"):
    with futures.ThreadPoolExecutor(1) as pool:
      other = pool.submit(whole).result()
  assert {*other} == {"hook", processor.REST}
  assert {*mine} == {"outer", processor.REST}
