"""The free proxy: what it reads, what it refuses, and that it costs no call."""

import dataclasses

import numpy as np
import pytest

from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import Proposal, strip
from mxjax.discovery.core.task import Status
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.expressions.proposer import ExpressionProposer
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.studies import study
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import programs, proxy
from mxjax.discovery.tasks.ptq.edit_templates import EDIT_TEMPLATES, GRAMMAR
from mxjax.discovery.tasks.ptq.interface import INTERFACE
from mxjax.discovery.tasks.ptq.task import PtqTask
from tests.discovery import searching

PTQ = {"model": "random:0", "calibration": [8, 32], "windows": [2, 32]}
INITIAL = world.INTERFACE.default_source()


class Screened(world.World):
  """A world whose proxy is the loss of its held-out twin."""

  def proxy(self):
    return Screened(self._seed, self._transfer + 1)


def changed(code):
  """Proposes another site of the parent."""
  text = f"def attention(x):\n  return {code}\n"
  source = candidate_source.with_functions
  return lambda told: Proposal(source=source(told.parent.source, text), label=code)


CODES = ("x * 9", "x + 0.001 * x[::-1]", "x / (x - x)", "x * 9 + 0")


class Blind(Screened):
  """A world whose proxy is coarse, and does not see one site."""

  def proxy(self):
    return Blind(self._seed, self._transfer + 1)

  def run(self, call, artifacts, before):
    shown, after = super().run(call, artifacts, before)
    if self._transfer:
      shown["values"] = {name: round(v, 1) for name, v in shown["values"].items()}
    return shown, after

  def unseen(self, call):
    return call.part(["mlp"])


def run(folder, codes=CODES, world_=Screened, **config):
  task, proposer = world_(seed=5), searching.Scripted(*map(changed, codes))
  executor, measuring = LocalExecutor(task), searching.Counting(task.proxy())
  measuring.artifacts, measuring._hooks = executor.artifacts, executor._hooks
  config |= {"budget": 9, "parents": "initial"}
  running = searching.run(folder, task, proposer, executor, measuring, **config)
  found = {name: [] for name in ("proxy", "refused", "outcome")}
  for event in store.read_events(folder):
    found.setdefault(event["event"], []).append(event)
  return running, proposer, found, measuring.executed


@pytest.fixture(scope="module")
def screened(tmp_path_factory):
  folder = tmp_path_factory.mktemp("screened")
  return folder, *run(folder, screen=1.0)


def test_what_the_proxy_finds_worse_costs_no_call(screened):
  _, running, _, events, ran = screened
  initial, big, _, broken, _ = events["proxy"]
  assert initial["ratio"] == 1.0
  assert big["ratio"] > 1.0
  assert broken["status"] == Status.NOT_FINITE
  assert broken["ratio"] is None
  refused = {e["label"]: e for e in events["refused"]}
  assert refused["x * 9"]["status"] == "screened"
  assert "not_finite" in refused["x / (x - x)"]["detail"]
  assert running.ledger.spent == len(events["outcome"]) < ran == 5


def test_what_the_proxy_cannot_tell_from_a_program_that_ran_costs_no_call(
  tmp_path, monkeypatch
):
  small = "x * 9"
  codes = (small, f"{small} + 0", "x + 0", small)
  running, _, events, _ = run(tmp_path / "a", codes, Blind, screen=9.0)
  ran = [event["program"] for event in events["program"]]
  assert [e["label"] for e in events["refused"]] == [f"{small} + 0", "x + 0", small]
  told = [e["detail"] for e in events["refused"]]
  assert told[:2] == [
    f"its proxy cannot tell it from {program[:12]}, which ran"
    for program in (ran[1], ran[0])
  ]
  assert "cannot tell" not in told[2], "the same program is no other one"
  assert running.ledger.spent == 2
  # A task that does not say what its proxy misses has no such programs.
  monkeypatch.delattr(Blind, "unseen")
  running, _, events, _ = run(tmp_path / "b", codes, Blind, screen=9.0)
  assert running.ledger.spent == 4


def test_what_the_proxy_does_not_see_makes_another_program(tmp_path):
  code = "def mlp(x):\n  return x + 0\n"
  other = lambda told: Proposal(
    source=candidate_source.with_functions(told.parent.source, code), label="unseen"
  )
  task, proposer = Blind(seed=5), searching.Scripted(other)
  executor, measuring = LocalExecutor(task), LocalExecutor(task.proxy())
  measuring.artifacts, measuring._hooks = executor.artifacts, executor._hooks
  config = {"budget": 9, "screen": 1.5}
  running = searching.run(tmp_path, task, proposer, executor, measuring, **config)
  assert running.ledger.spent == 2


def test_the_proxy_does_not_see_recovery_arrangements_and_gradients():
  task = PtqTask(**PTQ)
  plan = {**INTERFACE.default_plan, "transform": "measured", "attention": True}
  call = task_.Call({hook.name: hook.name for hook in INTERFACE.hooks}, plan, {})
  unseen = task.unseen(call)
  assert {"measure_value", "recover_value"} <= unseen.computation.keys()
  assert not {"transform", "encode_weight", "encode_act"} & unseen.computation.keys()
  assert {"arrange", "attention", "mlp"} <= unseen.plan.keys()
  assert "curvature" not in unseen.plan
  with_gradients = call._replace(plan={**plan, "gradients": True})
  assert "transform" in task.unseen(with_gradients).computation


def test_every_arm_but_a_blind_one_reads_the_proxy(screened):
  _, running, proposer, events, _ = screened
  told = proposer.contexts[-1].history
  assert [e.proxy for e in told] == [e["ratio"] for e in events["proxy"][1:]]
  assert strip(told[0], "score").proxy == told[0].proxy is not None
  assert f"proxy {told[0].proxy:.4g} of its" in prompt.entry_text(told[0])
  assert strip(told[0], "none").proxy is None
  del running


def test_a_resumed_run_measures_no_proxy_again(screened):
  folder, *_ = screened
  before = (folder / "log.jsonl").read_bytes()
  *_, ran = run(folder, screen=1.0)
  assert ran == 0
  assert (folder / "log.jsonl").read_bytes() == before


def test_without_a_screen_nothing_is_measured(tmp_path):
  _, _, events, ran = run(tmp_path)
  assert ran == 0
  assert not events["proxy"]


def test_a_task_without_a_proxy_says_so(tmp_path):
  options = runs.RunOptions(
    task={"task": "world"}, config={"screen": 1.0}, sandbox="off", holdout="off"
  )
  runs.write_options(tmp_path / "run", options)
  with pytest.raises(ValueError, match="has no proxy"):
    runs.run(tmp_path / "run")


def test_every_arm_of_a_study_is_screened(tmp_path):
  spec = {"task": "tests.discovery.search.test_screen:Screened", "seed": 5}
  options = study.StudyOptions(
    task=spec, seeds=(4,), budget=20, config={"screen": 1.0, "proposals_per_call": 2}
  )
  held = study.Folder(tmp_path / "study", options)
  for arm in ("quantforge", "uniform"):
    held.run(arm, 4)
    events = store.read_events(held.run_folder(arm, 4))
    refused = [e["status"] for e in events if e["event"] == "refused"]
    assert "screened" in refused
    assert len([e for e in events if e["event"] == "proxy"]) > len(refused)
  held.close()


def test_the_proxy_reads_calibration_only():
  task = PtqTask(**PTQ).proxy()
  options = task.options
  assert list(task.phases) == ["proxy"]
  np.testing.assert_array_equal(options.tokens("proxy"), options.tokens("fit"))
  assert task.readable("proxy") == PtqTask(**PTQ).readable("fit")
  texts = {**PTQ, "model": None, "text": __file__, "test_text": proxy.__file__}
  told = PtqTask(**texts).proxy()
  assert __file__ in told.readable("proxy")
  assert proxy.__file__ not in told.readable("proxy")


def test_the_proxy_tells_good_edits_from_bad_ones(tmp_path):
  task = PtqTask(**PTQ).proxy()
  evaluator = CachedEvaluator(task, LocalExecutor(task), store.Store(tmp_path))

  def measured(text):
    (outcome,) = evaluator.measure(evaluator.prepare(text).full_call)
    return outcome.values["proxy_error"]

  initial = INTERFACE.default_source()
  edit = {t.id: t.edit(initial, t.params[0]) for t in EDIT_TEMPLATES}
  rtn = measured(initial)
  assert measured(edit["chart"]) < 0.95 * rtn
  assert measured(edit["gptq"]) < 0.98 * rtn
  assert measured(edit["wrong-chart"]) > 1.5 * rtn
  assert measured(edit["value-affine"]) == rtn
  assert measured(programs.source("gptq")) == pytest.approx(measured(edit["gptq"]))


def test_a_short_run_finds_what_no_card_offers(tmp_path):
  task = PtqTask(
    model="random:0", calibration=[8, 32], proxy=True, margins={"proxy_error": 1e-4}
  )
  initial = INTERFACE.default_source()
  only = dataclasses.replace(GRAMMAR, residuals={"encode_act": "proxy_act"})
  proposer = ExpressionProposer(only, INTERFACE, (), task.target)
  executor = LocalExecutor(task)
  running = searching.run(tmp_path / "run", task, proposer, executor, seed=6, budget=7)
  evaluator = CachedEvaluator(task, executor, store.Store(tmp_path / "cards"))
  cards = [
    evaluator.prepare(card.edit(initial, params)).full_call
    for card in task.edit_templates
    if card.hooks == ("encode_act",)
    for params in card.params
  ]
  best = min(o.values["proxy_error"] for o in evaluator.measure(*cards))
  assert running.programs.best.values["proxy_error"] < 0.97 * best
