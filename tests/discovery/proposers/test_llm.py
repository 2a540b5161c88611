"""A language model as the proposer: repair turns, the free proxy, and what it costs."""

import dataclasses
import functools
import json

import pytest

from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import ProposerError
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.proposers import endpoint, llm
from mxjax.discovery.sandbox.executor import Took
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks import world
from tests.discovery import searching
from tests.discovery.proposers import test_prompt as told_

TASK = world.World(seed=3)
A, B = "attention", "geometry"
MECHANISM = next(op for op, kind in TASK.truth[A].items() if kind == "mechanism")


class Model:
  """A client that answers from a list, and keeps what it was asked."""

  name = "llm:script"

  def __init__(self, *replies):
    self.replies, self.requests = list(replies), []

  def complete(self, request):
    self.requests.append(request)
    if not self.replies:
      raise ProposerError("the script has ended")
    text = self.replies.pop(0)
    text = text if isinstance(text, str) else json.dumps(text)
    return endpoint.Reply(
      text=text, model="m", finish_reason="stop", input_tokens=3, output_tokens=2
    )

  @property
  def told(self):
    """The last message of each request."""
    return [request["messages"][-1]["content"] for request in self.requests]


def code(act, site=A):
  return f"def {site}(x):\n  return {act}\n"


SOME = code(f"x + 0.3 * {world.OPERATIONS[MECHANISM][0]}")
"""Leaves something to extend, where the whole brings the excess to its floor."""
RIGHT = code(f"x + 0.5 * {world.OPERATIONS[MECHANISM][0]}")


def account(name, **rows):
  return {"name": name, "statement": name, "predictions": rows}


def answer(**changes):
  """The right edit with a question that a control decides."""
  return {
    "label": "an edit",
    "code": RIGHT,
    "residual": f"excess_{A}",
    "explanations": [
      account("act", primary={"loss": "down"}, other={"loss": "lost"}),
      account("place", primary={"loss": "down"}, other={"loss": "kept"}),
    ],
    "controls": [{"name": "other", "intervention": {"kind": "permute", "site": A}}],
    **changes,
  }


def run(folder, *replies, ask=None, **config):
  model = Model(*replies)
  proposer = llm.LlmProposer(model, TASK)
  options = {"seed": 3, "budget": 20, "mark_every": 20, **config}
  running = searching.run(folder, TASK, proposer, ask=ask, **options)
  events = store.read_events(folder)
  return (
    running,
    model,
    {
      name: [e for e in events if e["event"] == name]
      for name in (
        "outcome",
        "packet",
        "refused",
        "verdict",
        "demand",
        "check",
        "program",
        "reduced",
      )
    },
  )


def control(**intervention):
  return [{"name": "other", "intervention": intervention}]


REFUSED = {
  "JSON": ("I would rather not.", "expected one JSON object"),
  "admission": (answer(code="import os\n" + RIGHT), "import of os"),
  "tracing": (answer(code=code("x + y")), "trace_failed: NameError"),
  "shape": (answer(code=code("x[:4]")), "refused: "),
  "a sole account": (
    answer(explanations=answer()["explanations"][:1]),
    "'act' alone",
  ),
  "an observable without a margin": (
    answer(
      explanations=[
        account("act", primary={"loss": "down"}, other={"layer_0": "down"}),
        account("place", primary={"loss": "down"}, other={"layer_0": "same"}),
      ]
    ),
    "which no margin is registered for",
  ),
  "accounts that nothing tells apart": (
    answer(
      explanations=[
        account("act", primary={"loss": "down"}),
        account("place", primary={"loss": "down"}),
      ]
    ),
    "nothing allowed separates act / place",
  ),
  "a condition that is no control": (
    answer(controls=[]),
    "which is no control of this proposal",
  ),
  "a fate under primary": (
    answer(
      explanations=[
        account("act", primary={"loss": "lost"}),
        account("place", primary={"loss": "kept"}),
      ]
    ),
    "under primary",
  ),
  "name for kind": (answer(controls=control(name="permute", site=A)), "with `kind`"),
  "a kind without its site": (answer(controls=control(kind="permute")), "values site"),
  "a site that is as before": (
    answer(controls=control(kind="permute", site=B)),
    f"changes nothing at {B}",
  ),
  "a program that is the parent": (
    answer(controls=control(kind="program", without=[A])),
    "executes the same",
  ),
  "a closed question": (answer(residual="excess_mlp"), "is no open question"),
}


@pytest.mark.parametrize(("first", "told"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_refused_comes_back_with_the_reason_and_costs_nothing(
  tmp_path, first, told
):
  running, model, events = run(tmp_path, first, answer())
  assert told in model.told[1]
  assert "cost no call" in model.told[1]
  assert not events["refused"]
  assert [e["verdict"] for e in events["verdict"]] == ["supported"]
  assert {e["status"] for e in events["outcome"]} == {"ok"}
  assert running.ledger.spent == 3, "the start, the candidate and its control"


def test_there_are_two_repair_turns_and_then_the_refusal_is_booked(tmp_path):
  bad = answer(controls=control(kind="permute"))
  running, model, events = run(tmp_path, bad, bad, bad, answer())
  (refused,) = events["refused"]
  assert (refused["status"], "values site" in refused["detail"]) == ("question", True)
  assert running.ledger.proposer["calls"] == 4
  # The next prompt says why.
  assert "status question; no gain" in model.told[3]
  assert "values site" in model.told[3]


def test_an_answer_that_is_none_is_booked_as_that_and_not_as_a_program(tmp_path):
  _, model, events = run(tmp_path, *["no."] * 3, answer())
  (refused,) = events["refused"]
  assert refused["status"] == "unusable"
  assert "expected one JSON object" in refused["detail"]
  shown = model.told[3].split("unusable answer")[1]
  assert "duplicate" not in shown
  assert "-def " not in shown, "no diff that deletes the program"


def test_the_last_turn_is_inside_the_budget_of_the_proposer(tmp_path):
  _, model, _ = run(tmp_path, "no.", answer(), max_tokens=5)
  assert len(model.requests) == 1


class Breaking(world.World):
  """A world whose control `dose` fails when it runs, whatever its form."""

  def run(self, call, artifacts, before):
    """See `World.run`."""
    if call.intervention.get("kind") == "dose":
      raise RuntimeError("out of luck")
    return super().run(call, artifacts, before)


def test_a_control_that_fails_is_shown_and_is_no_evidence(tmp_path):
  dose = control(kind="dose", site=A, factor=0.1)
  model = Model(
    answer(controls=dose), answer(controls=dose, code=code("-x", B) + RIGHT)
  )
  proposer = llm.LlmProposer(model, Breaking(seed=3))
  searching.run(tmp_path, Breaking(seed=3), proposer, seed=3, budget=20)
  events = store.read_events(tmp_path)
  first = next(e for e in events if e["event"] == "verdict")
  assert (first["verdict"], first["reason"]) == ("unresolved", "several_left")
  assert "other: crashed; RuntimeError: out of luck" in model.told[1]
  assert "not decided: no new control separates" in model.told[2]
  assert "could not be run, which is no evidence" in model.told[2]
  demands = [e["status"] for e in events if e["event"] == "demand"]
  assert demands[0] == "owed"
  assert not {"met", "failed", "abandoned"} & {*demands}, "it uses up no attempt"


def test_values_of_controls_and_reasons_are_in_the_next_prompt(tmp_path):
  worse = code("x + 0.5 * x", "mlp")
  elsewhere = {"name": "other", "intervention": {"kind": "permute", "site": "mlp"}}
  second = answer(label="elsewhere", code=worse, controls=[elsewhere])
  _, model, events = run(tmp_path, answer(code=SOME), second, "no")
  values = {e["condition"]: e["values"]["loss"] for e in events["outcome"][1:3]}
  head, *rows = model.told[1].partition("What was measured:\n")[2].splitlines()
  columns = head.partition(": ")[2].split()
  assert {*TASK.margins} <= {*columns}
  shown = {
    r.partition(": ")[0].partition(" ")[2]: r.split()[-len(columns) :] for r in rows[:3]
  }
  loss = columns.index("loss")
  assert shown[""][loss] == f"{values['primary']:.4g}"
  assert shown["other"][loss] == f"{values['other']:.4g}"
  sites = [columns.index(f"excess_{site}") for site in world.SITES]
  assert all(float(shown["other"][column]) > 0 for column in sites), "all of a control"
  (check,) = events["check"][:1]
  assert (
    f"response extend (an edit) not implemented: {check['detail']}" in model.told[2]
  )


def test_a_question_that_cannot_be_paid_is_said_to_be_dropped_and_fails_no_demand(
  tmp_path,
):
  # The first question leaves its account to be repaired; for the second no call is
  # left but that of its candidate.
  wrong = answer(
    code=SOME,
    explanations=[
      account("place", primary={"loss": "down"}, other={"loss": "kept"}),
      account("act", primary={"loss": "down"}, other={"loss": "lost"}),
    ],
  )
  again = answer(code=RIGHT)
  _, model, events = run(tmp_path, wrong, again, "no", budget=4)
  assert events["verdict"][0]["response"] == "repair_explanation"
  (reduced,) = events["reduced"]
  told = (
    "its question was dropped: with our controls it needs up to 2 calls, and 1 are left"
  )
  assert (reduced["left_out"], reduced["detail"]) == (["question"], told)
  (check,) = events["check"]
  assert (check["implemented"], check["detail"]) == (None, told)
  assert "failed" not in {e["status"] for e in events["demand"]}


def test_the_next_prompt_says_what_was_dropped():
  dropped = dataclasses.replace(told_.PACKET, dropped="its question was dropped: why")
  assert "its question was dropped: why" in told_.told(
    told_.context(history=(dropped,))
  )


def test_the_free_proxy_answers_before_the_program_is_proposed(tmp_path):
  class Asked:
    def answer(self, source, parent, part):
      assert "0.5" in source and "0.5" not in parent
      return f"The proxy says 7 of {part}."

  asking = answer(ask="q_proj")
  running, model, events = run(tmp_path, asking, asking, answer(), ask=Asked())
  for told in model.told[1:3]:
    assert told.startswith("The proxy says 7 of q_proj. Now answer again")
  # A second question is allowed, and a third is not.
  assert [told.endswith("without `ask`.") for told in model.told[1:3]] == [False, True]
  assert running.ledger.spent == 3
  assert not events["refused"]


def test_a_run_without_the_free_proxy_tells_of_none_and_sends_a_question_back(tmp_path):
  running, model, events = run(tmp_path, answer(ask="q_proj"), answer(), asks=False)
  assert model.told[1].startswith("That was not accepted, and cost no call: ask:")
  assert running.ledger.spent == 3
  assert not events["refused"]


def test_a_model_is_told_the_same_after_a_resume(tmp_path):
  replies = [
    answer(),
    answer(label="again", code=code("x + 0.1", "mlp"), residual=None),
  ]
  run_ = functools.partial(run, policy="none", checker="none")
  first = run_(tmp_path / "whole", *replies)[1]
  second = run_(tmp_path / "again", *replies)[1]
  assert first.requests == second.requests
  third = run_(tmp_path / "whole")[1]
  assert third.requests == first.requests[-1:], "answers are stored"


def test_a_program_without_a_question_is_asked_for_one_where_something_is_open(
  tmp_path,
):
  bare = {"label": "bare", "code": RIGHT}
  _, model, events = run(tmp_path / "rich", bare, answer(), "no", budget=6)
  assert f"residual: this round is about excess_{A}, which is open" in model.told[1]
  assert events["verdict"], "the second answer has a question"
  # After the start two calls are left, fewer than a question needs.
  _, _, events = run(tmp_path / "poor", bare, "no", budget=3)
  assert len(events["outcome"]) == 2 and not events["verdict"]


def test_the_contexts_of_an_arm_without_questions_have_no_rules_for_them():
  asked = told_.context("score")
  proposer = llm.LlmProposer(Model({"code": RIGHT, "label": "bare"}), TASK)
  made = proposer.propose(dataclasses.replace(asked, parent=start()))
  assert made.residual is None
  system = proposer._client.requests[0]["messages"][0]["content"]
  assert "Rules of a question" not in system
  assert '"code"' in system


def start():
  return told_.record("p", source=TASK.interface.default_source())


class Timed(world.World):
  """A world that tells how long its calls took."""

  tells_seconds = True


class Taking(LocalExecutor):
  """Runs calls that are said to have taken a time."""

  def __init__(self, task, seconds):
    super().__init__(task)
    self._seconds = seconds

  def run(self, calls, on_done):
    took = Took(9.0, {"compiling": 1.0, "geometry": self._seconds})
    told = lambda index, outcome, _: on_done(index, outcome, took)
    super().run(calls, told)


def test_a_recorded_run_replays_where_calls_take_another_time(tmp_path):
  """The prompts tell seconds: those of the machine that recorded."""
  task, logs, shown = Timed(seed=3), [], []
  for mode, seconds in (("record", 3.125), ("replay", 71.5)):
    model = Model(answer(code=SOME), "no")
    path = tmp_path / "tape.jsonl"
    if mode == "record":
      tape = endpoint.Cassette(path, mode, model)
    else:
      tape = endpoint.Cassette(path, mode)
    proposer = llm.LlmProposer(tape, task)
    proposer.name = "tape"
    executor = Taking(task, seconds)
    searching.run(tmp_path / mode, task, proposer, executor, budget=3, mark_every=3)
    logs.append(searching.log(tmp_path / mode))
    shown += model.requests
  assert logs[0] == logs[1]
  told = [r["messages"][1]["content"] for r in shown]
  assert told
  took = "4.12 processor seconds: geometry 3.12, compiling 1."
  assert all(f"Its call took {took}" in text for text in told)


FINISHED = {"finished": True, "note": "every site works"}


def test_a_model_may_say_that_it_is_finished_and_is_asked_nothing_more():
  model = Model(FINISHED, "no")
  asked = dataclasses.replace(told_.context(), parent=start())
  refused = dataclasses.replace(asked, review=lambda proposal: "there is no program")
  made = llm.LlmProposer(model, TASK).propose(refused)
  assert (made.finished, made.note, made.source) == (True, "every site works", "")
  assert len(model.requests) == 1, "no repair of a program that is not there"
  assert made.usage["calls"] == 1 and made.models == ("m",)
  assert type(made).from_dict(made.to_dict()) == made


@pytest.mark.parametrize(
  ("changes", "told"),
  [({"code": RIGHT}, "`code` beside it"), ({"note": ""}, "no note")],
)
def test_finished_has_a_reason_and_no_program(changes, told):
  model = Model({**FINISHED, **changes}, FINISHED)
  asked = dataclasses.replace(told_.context(), parent=start())
  assert llm.LlmProposer(model, TASK).propose(asked).finished
  assert told in model.told[1]


def test_a_repeated_edit_is_made_already_and_an_answer_may_add_a_control_alone():
  again = told_.record("again", source=llm.merged(start().source, RIGHT, {}))
  owed = told_.demand(Response.ADD_DISCRIMINATOR, survivors=("act", "place"))
  known = {"parent": start(), "repeated": again, "checked": owed, "demands": (owed,)}
  asked = told_.context(**known)
  model = Model({k: v for k, v in answer().items() if k != "code"})
  made = llm.LlmProposer(model, TASK).propose(asked)
  assert made.source == asked.repeated.source
  assert made.declared == (A,), "beside the parent"
  shown = model.requests[0]["messages"][1]["content"]
  assert "what you answer is merged into again" in shown
  assert f"@@ {A}\n-  return x\n+  return x + 0.5" in shown
