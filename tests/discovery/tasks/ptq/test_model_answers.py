"""Answers that a language model gave, on a tiny model: they are read, run and
controlled.

The programs are those that it wrote; what failed then was what stood beside them.
"""

import json
import re

import pytest

from mxjax.discovery.core import interventions, store
from mxjax.discovery.core.candidate_source import with_functions, with_plan
from mxjax.discovery.proposers import llm
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import rivals, runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq import task as ptq
from tests.discovery import searching
from tests.discovery.proposers import replies
from tests.discovery.proposers.test_llm import Model

MARGINS = {
  "log_ppl": 1e-4,
  "kl": 1e-6,
  "operator_error": 1e-5,
  "activation_error": 1e-5,
  "weight_error": 1e-5,
  "other_text": 1e-4,
}
INITIAL = dict.fromkeys(("operator_error", "activation_error", "weight_error"), 0.01)
TASK = ptq.PtqTask(
  model="random:0",
  calibration=[8, 32],
  windows=[2, 32],
  other_windows=[2, 32],
  objective="kl",
  margins=MARGINS,
  initial=INITIAL,
)
BALANCE = (
  "\ndef balance(stats):\n  return 0.5 * jnp.arange(8.0, dtype=jnp.float64) / 8\n"
)


@pytest.fixture(scope="module")
def executor():
  return LocalExecutor(TASK)


@pytest.fixture(scope="module")
def evaluator(executor, tmp_path_factory):
  kept = store.Store(tmp_path_factory.mktemp("examples"))
  return CachedEvaluator(TASK, executor, kept)


def edited(code, **plan):
  source = with_functions(TASK.interface.default_source(), code)
  return with_plan(source, plan) if plan else source


@pytest.mark.slow
def test_every_example_of_the_prompt_is_executed(evaluator):
  """And every one of them changes what the candidate would show without it."""
  parent = evaluator.prepare(TASK.interface.default_source()).full_call
  code = replies.balanced() + BALANCE
  source = edited(code, transform="measured", balance="measured", curvature="solved")
  own = evaluator.prepare(source).full_call
  whole = evaluator.measure(own)[0]
  assert whole.status == "ok", whole.detail
  for kind, form in TASK.interventions.items():
    change = interventions.checked(TASK.interventions, form.example)
    assert TASK.refuses(change, own, parent) == ""
    if form.of_parent:
      before = parent.active(TASK.interface)
      change["parent"] = {"computation": dict(before.computation), "plan": before.plan}
    (outcome,) = evaluator.measure(own._replace(intervention=change))
    assert outcome.status == "ok", (kind, outcome.detail)
    if kind != "shuffle_stats":
      assert dict(outcome.values) != dict(whole.values), kind


REFUSED = {
  "shuffle_stats": (
    {"kind": "shuffle_stats", "hooks": ["balance"]},
    "never calls balance",
  ),
  "random_map": ({"kind": "random_map"}, "no map to replace"),
  "scope": ({"kind": "scope", "part": "mlp"}, "cannot divide an edit of encode_act"),
  "dose": ({"kind": "dose", "factor": 0.5}, "balance off"),
  "permute": (
    {"kind": "permute", "part": "mlp", "layers": [0, 9]},
    "there are 2 layers",
  ),
}


@pytest.mark.parametrize(("change", "told"), REFUSED.values(), ids=REFUSED)
def test_a_control_that_would_change_nothing_is_refused_before_any_call(
  evaluator, change, told
):
  parent = evaluator.prepare(TASK.interface.default_source()).full_call
  own = evaluator.prepare(edited(replies.descent())).full_call
  assert told in TASK.refuses(change, own, parent)


def test_other_text_is_offered_only_where_there_is_one(evaluator):
  bare = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
  parent = evaluator.prepare(TASK.interface.default_source()).full_call
  assert "no other windows" in bare.refuses({"kind": "other_text"}, parent, parent)
  names = [rival.name for rival in TASK.rivals(parent, parent)]
  assert names == ["luck of this text"]
  assert bare.rivals(parent, parent) == []


def test_any_map_is_a_rival_of_an_edit_of_the_map(evaluator):
  parent = evaluator.prepare(TASK.interface.default_source()).full_call
  source = edited(replies.balanced(), transform="measured")
  own = evaluator.prepare(source).full_call
  assert [rival.intervention["kind"] for rival in TASK.rivals(own, parent)] == [
    "random_map",
    "other_text",
  ]
  act = evaluator.prepare(edited(replies.descent())).full_call
  assert {r.intervention["kind"] for r in TASK.rivals(act, parent)} == {"other_text"}


@pytest.fixture(scope="module")
def played(executor, tmp_path_factory):
  """A run of four answers: the map, the activations, a null edit, and a mixed one."""
  folder = tmp_path_factory.mktemp("answers") / "run"
  model = Model(
    replies.answer(
      code=replies.balanced(),
      plan={"transform": "measured"},
      label="balanced map",
      controls=[
        {
          "name": "neighbour",
          "intervention": {"kind": "shuffle_stats", "hooks": ["transform"]},
          "cost": 1,
        }
      ],
    ),
    replies.answer(ask="mlp"),
    replies.text() + "\nThat is my answer.",
    replies.answer(label="null", code=replies.descent(5), residual=None),
    "<think>{}</think>```json\n"
    + replies.text(label="scoped", residual=None)
    + "\n```",
  )
  proposer = llm.LlmProposer(model, TASK)
  kept = store.Store(folder)
  options = runs.RunOptions(task=dict(TASK.spec), config={}, sandbox="off")
  proxy = runs.free_proxy(options, TASK, kept)
  kept.close()
  running = searching.run(
    folder, TASK, proposer, executor, ask=proxy, seed=0, budget=14, mark_every=14
  )
  return running, model, store.read_events(folder)


@pytest.mark.slow
def test_no_control_is_lost_to_its_form(played):
  _, _, events = played
  outcomes = [e for e in events if e["event"] == "outcome"]
  assert {e["status"] for e in outcomes} == {"ok"}, [e["detail"] for e in outcomes]
  assert {"neighbour"} < {e["condition"] for e in outcomes}
  verdicts = [e for e in events if e["event"] == "verdict"]
  assert verdicts
  assert any("lost" in json.dumps(e["observed"]) for e in verdicts) or any(
    "kept" in json.dumps(e["observed"]) for e in verdicts
  )


@pytest.mark.slow
def test_the_free_proxy_was_told_by_linear(played):
  _, model, _ = played
  (told,) = [t for t in model.told if t.startswith("The free proxy")]
  assert "self_attn/q_proj" not in told, "it was asked about the MLP"
  assert "mlp/up_proj" in told
  assert "mlp/down_proj" in told
  assert "proxy_weight" in told
  assert "A linear has 2 of its blocks there" in told
  assert "it overrates activation codes that undo weight errors" in told


@pytest.mark.slow
def test_values_come_by_linear_in_the_prompt(played):
  _, model, _ = played
  shown = model.requests[0]["messages"][1]["content"]
  assert re.search(
    r"Its operator_error part by part:\n  layers_0: .*\bq_proj \d", shown
  )
  assert "  layers_1: " in shown


@pytest.mark.slow
def test_rivals_are_ours_and_stand_in_the_packet(played):
  _, _, events = played
  packets = [e["packet"] for e in events if e["event"] == "packet"]
  asked = [p for p in packets if p["explanations"]]
  names = {e["name"] for p in asked for e in p["explanations"] if e["rival"]}
  assert "luck of this text" in names
  controls = {c["name"] for p in asked for c in p["conditions"]}
  assert f"{rivals.PREFIX}luck of this text" in controls
