"""A world of lucky gains: what a call shows, what a control shows, what is learned."""

import dataclasses

import numpy as np
import pytest

from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import Experiment
from mxjax.discovery.core.task import load
from mxjax.discovery.core.verdict import Verdict, resolve
from mxjax.discovery.proposers import embedded
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import search
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.resolution import symbols
from mxjax.discovery.studies import study
from mxjax.discovery.tasks.noisy_world import SITES, NoisyWorld

TASK = NoisyWorld(seed=5)


def edits(kind):
  """Templates and parameters of the edits that are right, lucky, idle or a harm."""
  for site in SITES:
    for idea, variant in zip(*np.nonzero(TASK.effects[site] == kind), strict=True):
      yield f"{site}-{idea}", {"variant": int(variant)}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
  """A function from an edit to parent, candidate and controls, in two worlds."""
  templates = {template.id: template for template in TASK.edit_templates}
  folder = tmp_path_factory.mktemp("noisy")

  def measure(task, name, params):
    kept = store.Store(folder / f"{task.spec['transfer']}")
    evaluator = CachedEvaluator(task, LocalExecutor(task), kept)
    template, source = templates[name], task.interface.default_source()
    parent = evaluator.prepare(source).call
    mine = evaluator.prepare(template.edit(source, params)).call
    before = {"computation": dict(parent.computation), "plan": dict(parent.plan)}
    calls = [parent, mine] + [
      dataclasses.replace(mine, intervention={**c.intervention, "parent": before})
      if dataclasses.is_dataclass(mine)
      else mine._replace(intervention={**c.intervention, "parent": before})
      for c in template.controls
    ]
    outcomes = evaluator.measure(*calls)
    kept.close()
    names = ("parent", "primary", *(c.name for c in template.controls))
    return template, dict(zip(names, outcomes, strict=True))

  return measure


@pytest.mark.parametrize(
  ("kind", "verdict"), [("right", "supported"), ("lucky", "target_only")]
)
def test_a_control_tells_a_right_gain_from_a_lucky_one(evaluated, kind, verdict):
  template, outcomes = evaluated(TASK, *next(edits(kind)))
  seen = {
    name: symbols(TASK, outcomes["parent"].values, outcome)
    for name, outcome in outcomes.items()
    if name != "parent"
  }
  assert seen["primary"]["loss"] == seen["primary"][template.residual] == "down"
  accounts = template.explanations
  judge = lambda observed: resolve(
    accounts, observed, "loss", is_safe=True, is_equivalent=False
  )
  alone = judge({"primary": seen["primary"]})
  assert alone.survivors == ("right", "lucky", "drift")
  found = judge(seen)
  assert (found.verdict, found.explicit) == (verdict, "control")


def test_only_a_right_gain_carries_over(evaluated):
  for kind, symbol in (("right", "down"), ("lucky", "same")):
    held = TASK.holdout()
    _, outcomes = evaluated(held, *next(edits(kind)))
    seen = symbols(held, outcomes["parent"].values, outcomes["primary"])
    assert seen["loss"] == symbol, kind


def test_every_site_can_be_put_right_and_the_truth_is_that_of_the_effects():
  assert len({name for name, _ in edits("right")}) >= len(SITES)
  for kind in ("right", "lucky", "harm"):
    for name, params in edits(kind):
      template = next(t for t in TASK.edit_templates if t.id == name)
      assert TASK.focal_is_true(template.label(params)) == (kind == "right")
  assert load(TASK.spec).contract == TASK.contract


def history(verdict, gain=True):
  template = TASK.edit_templates[3]
  changes = {"loss": -0.1 if gain else 0.0}
  return Experiment(
    program="p",
    parent="q",
    label=template.label({"variant": 0}),
    note="",
    status="ok",
    changes=changes,
    gain=gain,
    verdict=verdict,
  )


@pytest.mark.parametrize(
  ("verdict", "family"), [(Verdict.SUPPORTED, 1.0), (Verdict.TARGET_ONLY, -1.0)]
)
def test_an_idea_goes_first_or_last_by_its_verdict(verdict, family, tmp_path):
  """The same gain, with and without a verdict, moves an idea at another site."""
  proposer = embedded.EmbeddedProposer(TASK.edit_templates, "loss")
  seen = []
  kept = store.Store(tmp_path)
  evaluator = CachedEvaluator(TASK, LocalExecutor(TASK), kept)
  config = search.SearchConfig(seed=1, budget=2)
  running = search.Search(config, evaluator, proposer, kept)
  running.begin()
  selection = running.select((0, 0), running.programs.best)
  template = TASK.edit_templates[8 + 3]
  option = embedded._Option(template, {"variant": 1}, "other site", ())
  for told in ("", verdict):
    context = dataclasses.replace(
      running.context(selection, "verdict"), history=(history(told),)
    )
    past = embedded._Past(context.history, "loss", proposer._by_id)
    seen.append(embedded._score(option, context, past))
  kept.close()
  assert seen[1] - seen[0] == pytest.approx(family)


def test_a_study_of_a_world_takes_its_seed_and_its_accounting():
  options = study.StudyOptions(
    task={"task": "noisy-world"}, seeds=(4,), is_sequential=True, expects="more"
  )
  assert options.spec(4)["seed"] == 4
  assert "sequential" not in options.run("quantforge", 4).config
  paper = dataclasses.replace(options, is_sequential=False)
  assert paper.run("quantforge", 4).config["sequential"] is False
  assert study.frozen(options)["options"]["expects"] == "more"
  assert study.frozen(options)["hash"] != study.frozen(paper)["hash"]
