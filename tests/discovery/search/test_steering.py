"""What the loop asks next: scopes, responses that matter, parents, prices."""

import ast
import dataclasses

import pytest

from mxjax.discovery.audit import explain
from mxjax.discovery.core import store
from mxjax.discovery.core.candidate_source import with_functions
from mxjax.discovery.core.proposal import Proposal, ProposerError
from mxjax.discovery.core.residual import OTHER_TEXT, Control, Explanation, Residual
from mxjax.discovery.core.task import Call
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.search import frontier, scopes
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import task as ptq
from tests.discovery import searching

TASK = world.World(seed=3)
A, B = "attention", "geometry"
"""The first site of this world, and another one."""


def operation(kind, site=A, amplitude=0.5, task=TASK):
  name = next(op for op, each in task.truth[site].items() if each == kind)
  return f"def {site}(x):\n  return x + {amplitude} * {world.OPERATIONS[name][0]}\n"


def account(name, **rows):
  return Explanation(name, name, rows)


def asking(site=A, **under):
  """A question about a site, which the primary run alone decides, or a control."""
  control = Control("dose", {"kind": "dose", "site": site, "factor": 0.1})
  return {
    "residual": f"excess_{site}",
    "declared": (site,),
    "explanations": (
      account("acts", primary={"loss": "down"}, dose={"loss": "lost"}, **under),
      account("is there", primary={"loss": "down"}, dose={"loss": "kept"}),
    ),
    "controls": (control,),
  }


def proposed(code, **told):
  given = {"label": "edit", **told}
  return lambda context: Proposal(
    source=with_functions(context.parent.source, code), **given
  )


def run(folder, *script, task=TASK, **config):
  proposer = searching.Scripted(*script, at_end=ProposerError)
  options = {"seed": 3, "budget": 30, "mark_every": 30, **config}
  running = searching.run(folder, task, proposer, **options)
  events = store.read_events(folder)
  of = lambda name: [e for e in events if e["event"] == name]
  return running, of, proposer.contexts


# Scopes are measured.


def test_a_scope_is_the_smallest_set_of_parts_that_was_seen_to_move_it():
  known = scopes.Scopes(ptq.INTERFACE, {"kl": 0.1, "operator_error": 0.1})
  hooks = {hook.name: "default" for hook in ptq.INTERFACE.hooks}
  plan = ptq.INTERFACE.default_plan
  parent = Call(hooks, plan, {})
  both = Call({**hooks, "encode_act": "a", "encode_weight": "w"}, plan, {})
  one = Call({**hooks, "encode_act": "a"}, plan, {})
  idle = Call({**hooks, "transform": "t"}, plan, {})
  start = {"kl": 1.0, "operator_error": 1.0}
  known.learn(both, {"kl": 0.5, "operator_error": 0.5}, parent, start)
  assert known.of("kl") == (), "nobody knows which of the two it was"
  together = (("encode_weight", "encode_act"),)
  assert known.joint() == {"kl": together, "operator_error": together}
  known.learn(one, {"kl": 0.95, "operator_error": 0.5}, parent, start)
  assert known.of("operator_error") == ("encode_act",)
  assert known.joint() == {"kl": together}
  known.learn(idle, {"kl": 0.0, "operator_error": 0.0}, parent, start)
  assert known.of("kl") == (), "a hook that is not called"
  keyed = Call({**hooks, "transform": "t"}, {**plan, "transform": "measured"}, {})
  known.learn(keyed, {"kl": 0.0, "operator_error": 1.0}, parent, start)
  assert known.of("kl") == ("transform",), "a hook and the key that switches it on"
  assert known.known()["kl"] == ("transform",)


def test_an_edit_that_moves_the_observable_is_in_its_scope_whatever_the_hook(tmp_path):
  """The next site's excess moves with this one's edit, and no list says so."""
  running, of, contexts = run(tmp_path, proposed(operation("mechanism")), proposed(""))
  (after,) = (s for s, before in TASK.prerequisite.items() if before == A)
  assert contexts[1].scopes[f"excess_{after}"] == (A,)
  assert contexts[1].scopes[f"excess_{A}"] == (A,)
  opened = {r["observable"]: r["computation"] for r in of("program")[-1]["residuals"]}
  assert opened[f"excess_{after}"] == [A]


def test_an_edit_of_another_hook_answers_where_it_moves_the_observable(tmp_path):
  """A demand about the site after this one is met from here, since it moves there."""
  (after,) = (s for s, before in TASK.prerequisite.items() if before == A)
  first = proposed(operation("mechanism", amplitude=0.3))
  second = proposed(operation("mechanism", after, 0.25), **asking(after))
  third = proposed(operation("harmful"), declared=(A,))
  running, of, _ = run(tmp_path, first, second, third, frontier=1)
  (check,) = of("check")
  assert (check["response"], check["implemented"]) == ("extend", True)
  assert check["detail"].startswith(f"excess_{after} ")


# A response is a change that matters.


@pytest.mark.parametrize(
  ("amplitude", "is_met"),
  [(0.3, None), (0.3000001, False), (0.305, False), (0.5, True)],
)
def test_a_null_edit_meets_no_demand_and_costs_no_probe(tmp_path, amplitude, is_met):
  first = proposed(operation("mechanism", amplitude=0.3), **asking())
  again = proposed(operation("mechanism", amplitude=amplitude), declared=(A,))
  _, of, _ = run(tmp_path, first, again, frontier=1)
  expected = [] if is_met is None else [is_met]
  assert [e["implemented"] for e in of("check")] == expected
  assert "probe" not in {e["kind"] for e in of("outcome")}


def test_a_probe_is_paid_for_only_if_a_part_is_to_answer_beside_another(tmp_path):
  first = proposed(operation("mechanism", amplitude=0.3), **asking())
  both = operation("mechanism") + operation("inert", B)
  running, of, _ = run(
    tmp_path, first, proposed(both, declared=(A,)), frontier=1, proposals_per_call=6
  )
  ran = [(e["kind"], e["charged"]) for e in of("outcome")]
  assert ran.count(("probe", 1)) == 1
  assert [e["implemented"] for e in of("check")] == [True]


# The loop steers.


def test_owed_demands_choose_the_parent_and_the_best_holder_comes_first():
  record = lambda program, loss: dataclasses.replace(
    RECORD, id=program, exec_id=program, values={"loss": loss}
  )
  programs = frontier.ExecutableFrontier("loss", 8)
  for each in (record("a", 3.0), record("b", 2.0), record("c", 1.0), record("d", 4.0)):
    programs.retain(each)
  first = lambda address, *holders: programs.parents([], 3, address, holders)[0][0].id
  assert {first((n, 0)) for n in range(40)} == {"c", "b"}, "the better half"
  assert [first((n, 0)) for n in range(40)].count("c") > 20
  assert {first((n, 0), "d") for n in range(9)} == {"d"}
  assert {first((n, 0), "d", "a") for n in range(9)} == {"a"}
  assert "gone" not in {first((n, 0), "gone") for n in range(9)}


def ranked(*rows):
  """A frontier of programs, given as name, loss, call, parent and `control_of`."""
  programs = frontier.ExecutableFrontier("loss", 8)
  for program, loss, call, parent, control_of in rows:
    programs.retain(
      dataclasses.replace(
        RECORD,
        id=program,
        exec_id=program,
        values={"loss": loss},
        call=call,
        parent=parent,
        control_of=control_of,
      )
    )
  return programs


def turns(programs, **told):
  """The first parents of forty rounds, without those that revise another half."""
  firsts = [programs.parents([], 3, (n, 0), margin=0.004, **told)[0] for n in range(40)]
  return {(r.id, why) for r, why in firsts if "a round in four" not in why}


def test_of_equal_programs_the_newest_that_descends_from_the_best_is_revised():
  """A step smaller than the margin is built upon, and by noise no line is left."""
  rows = [("a", 2.0, 1, "", ""), ("c", 2.5, 2, "a", ""), ("d", 3.0, 3, "c", "")]
  assert turns(ranked(*rows)) == {("a", "it is the best program")}
  rows.append(("b", 2.003, 4, "a", ""))
  told = "it is the newest that descends from the best program: a is better by 0.003 "
  told += "only, within the margin 0.004"
  assert turns(ranked(*rows)) == {("b", told)}
  # A smaller gain on it, and then an equal program of another line, which is newer.
  rows += [("e", 1.999, 5, "b", ""), ("f", 2.001, 6, "c", "")]
  assert turns(ranked(*rows)) == {("e", "it is the best program")}
  rows.append(("g", 1.9, 7, "c", ""))
  assert turns(ranked(*rows)) == {("g", "it is the best program")}
  owed = ranked(*rows).parents([], 3, (0, 0), ["d"], margin=0.004)[0]
  assert owed[1] == "it owes the response that is checked below"
  assert ranked(*rows).parents([], 3, (0, 0))[0][1] == "it is the best program", (
    "without a margin nothing is equal"
  )


def test_a_program_goes_before_its_control_that_is_better_by_noise():
  rows = [("a", 2.5, 1, "", ""), ("b", 2.003, 2, "a", ""), ("k", 2.0, 3, "a", "b")]
  told = "it is the best program of those that were proposed: its control k is better "
  told += "by 0.003 only, within the margin 0.004"
  assert turns(ranked(*rows)) == {("b", told)}
  better = [*rows[:2], ("k", 1.9, 3, "a", "b")]
  assert turns(ranked(*better)) == {("k", "it is the best program")}
  # And a program before the control of a later one that is no better.
  rows = [("a", 2.0, 1, "", ""), ("b", 2.002, 2, "a", ""), ("k", 2.001, 3, "a", "b")]
  assert {program for program, _ in turns(ranked(*rows))} == {"b"}


def test_what_is_demanded_goes_on_from_the_program_and_not_from_an_equal_control(
  tmp_path,
):
  """The half that does nothing taken away: noise decides which of them is better."""
  both = operation("mechanism") + operation("inert", B)
  asked = {
    **asking(),
    "explanations": (
      account("all", primary={"excess_attention": "down"}, w={"loss": "lost"}),
      account("a", primary={"excess_attention": "down"}, w={"loss": "kept"}),
    ),
    "controls": (Control("w", {"kind": "program", "without": [B]}),),
  }
  running, of, contexts = run(tmp_path, proposed(both, **asked), proposed(""))
  program = of("packet")[1]["packet"]["program"]
  (control,) = [e["program"] for e in of("program") if "origin" in e]
  values = [running.record(each).values["loss"] for each in (program, control)]
  assert 0 < values[0] - values[1] <= TASK.margins["loss"]
  assert {e["program"] for e in of("demand") if e["status"] == "owed"} == {program}
  assert contexts[1].parent.id == program


RECORD = searching.RECORD


def test_the_question_with_the_largest_excess_goes_first_and_has_its_turns():
  questions = frontier.ResidualFrontier({"x": 0.1, "y": 0.1})
  large, small = Residual("p", "x", 3.0, 1.0), Residual("p", "y", 2.0, 1.0)
  questions.open([small, large])
  assert questions.actionable("p") == (large, small)
  for _ in range(frontier.PATIENCE):
    questions.ask(large)
  assert questions.actionable("p") == (small, large)
  assert questions.actionable("another") == ()


def test_a_question_closes_by_verdict_by_measurement_and_with_its_program():
  questions = frontier.ResidualFrontier({"x": 0.1, "y": 0.1})
  x, y = Residual("p", "x", 3.0, 1.0), Residual("p", "y", 2.0, 1.0)
  questions.open([x, y])
  child = dataclasses.replace(RECORD, id="child", parent="p")
  assert questions.closed_by(child, [Residual("child", "x", 2.0, 1.0)]) == [y]
  assert questions.move(y, "measured", "packet")
  assert not questions.move(y, "left", ""), "it stays as it is"
  assert questions.dropped([child]) == [x]
  assert questions.move(x, "closed", "packet")
  # What was resolved is asked again only of a program that has more of it.
  assert questions.open([Residual("child", "x", 3.05, 1.0)]) == []
  assert questions.open([Residual("worse", "x", 3.2, 1.0)]) != []


@pytest.mark.slow
def test_questions_of_a_run_are_those_of_its_retained_programs(tmp_path):
  proposer = EmbeddedProposer(TASK.edit_templates, "loss")
  running = searching.run(
    tmp_path, TASK, proposer, seed=3, budget=25, mark_every=25, frontier=3
  )
  kept = {record.id for record in running.programs.records}
  open_ = [q for q in running.residuals.questions.values() if q.status == "open"]
  assert open_
  assert {q.residual.program for q in open_} <= kept
  assert len(running.residuals.questions) > len(open_)


def test_a_question_that_was_resolved_is_not_asked_again(tmp_path):
  accounts = (
    account("excess", primary={"loss": "same", "excess_attention": "down"}),
    account("loss", primary={"loss": "down"}),
  )
  told = {**asking(), "explanations": accounts, "controls": ()}
  edit = proposed(operation("mediator", amplitude=0.2), **told)
  running, of, _ = run(tmp_path, edit, edit, parents="initial", frontier=8)
  assert [e["verdict"] for e in of("verdict")] == ["mediator_only"]
  (refused,) = of("refused")
  assert refused["status"] == "resolved"
  assert "was asked about excess_attention and found" in refused["detail"]


class Breaking(world.World):
  """A world whose control `elsewhere` fails when it runs, and a large dose."""

  def run(self, call, artifacts, before):
    """See `World.run`."""
    change = call.intervention
    if change.get("kind") == "elsewhere" or change.get("factor") == 3:
      raise RuntimeError("this control cannot be run")
    return super().run(call, artifacts, before)


def unresolved(*names, kind="elsewhere", **more):
  control = Control("c", {"kind": kind, "site": A, **more})
  symbols = ("lost", "kept")
  return {
    "residual": f"excess_{A}",
    "declared": (A,),
    "explanations": tuple(
      account(name, primary={"loss": "down"}, c={"loss": symbol})
      for name, symbol in zip(names, symbols, strict=True)
    ),
    "controls": (control,),
  }


def test_a_control_that_resolves_the_question_settles_the_demand_by_any_name(tmp_path):
  """Its accounts have other names than those left standing; it decided all the same."""
  edit = operation("mechanism")
  more = {"parents": "initial", "task": Breaking(seed=3)}
  other = unresolved("first half", "second half", kind="dose", factor=0.1)
  _, of, _ = run(
    tmp_path, proposed(edit, **unresolved("a", "b")), proposed(edit, **other), **more
  )
  assert [e["verdict"] for e in of("verdict")] == ["unresolved", "supported"]
  (check,) = of("check")
  assert check["implemented"]
  assert check["detail"].startswith("a control resolved the question")


def test_a_question_that_stays_open_is_owed_once(tmp_path):
  edit = operation("mechanism")
  more = {"parents": "initial", "task": Breaking(seed=3)}
  again = proposed(edit, **unresolved("a", "b", kind="dose", factor=3))
  running, of, contexts = run(
    tmp_path, proposed(edit, **unresolved("a", "b")), again, proposed(""), **more
  )
  assert [e["verdict"] for e in of("verdict")] == ["unresolved"] * 2
  (asked,) = [d for d in contexts[2].demands if d.response == "add_discriminator"]
  assert asked.packet == of("packet")[2]["id"], "what is left of it is asked"
  statuses = [e["status"] for e in of("demand")]
  assert statuses == ["owed", "superseded", "owed"]
  # The edit is made already: an answer adds a control to it, and need not repeat it.
  edited = of("packet")[1]["packet"]["program"]
  start = contexts[0].parent.id
  assert [c.base.id for c in contexts[:3]] == [start, edited, edited]
  assert [c.parent.id for c in contexts[:3]] == [start] * 3


# Retention and prices.


def test_a_control_that_is_a_better_program_is_a_candidate(tmp_path):
  """The harmful half of an edit taken away: better than the edit and its parent."""
  both = operation("mechanism") + operation("harmful", B)
  asked = {
    **asking(),
    "explanations": (
      account("all", primary={"excess_attention": "down"}, w={"loss": "up"}),
      account("a", primary={"excess_attention": "down"}, w={"loss": "down"}),
    ),
    "controls": (Control("w", {"kind": "program", "without": [B]}),),
  }
  running, of, _ = run(tmp_path, proposed(both, **asked))
  best = running.programs.best
  (adopted,) = [e for e in of("program") if "origin" in e]
  assert (adopted["origin"], adopted["program"]) == ("w", best.id)
  values = {e["condition"]: e["values"]["loss"] for e in of("outcome")[1:]}
  assert best.values["loss"] == values["w"] < values["primary"]
  assert "mechanism" not in best.source
  assert (tmp_path / "programs" / f"{best.id}.py").read_text() == best.source
  assert running.ledger.totals()["control"] == 1, "it was paid for once"
  (owed,) = [e for e in of("demand") if e["status"] == "owed"]
  assert owed["program"] == best.id, "what is demanded goes on from the better version"
  (made,) = running.history.experiments
  bare = lambda text: ast.unparse(ast.parse(text))
  assert {*made.code} == {A, B}
  assert bare(made.code[B]) == bare(operation("harmful", B))
  program, condition, code, plan = made.winner
  assert (program, condition, plan) == (best.id, "w", {})
  # What the edit's program has not.
  assert {name: bare(text) for name, text in code.items()} == {
    B: bare(f"def {B}(x):\n  return x")
  }
  evaluator = running._evaluator
  call = evaluator.prepare(best.source).call
  assert evaluator.condition("", "", call).exec_id == best.exec_id


def test_a_probe_that_is_a_better_program_is_a_candidate(tmp_path):
  first = proposed(operation("mechanism", amplitude=0.3), **asking())
  both = operation("mechanism", amplitude=0.2) + operation("mechanism", B)
  running, of, _ = run(tmp_path, first, proposed(both, declared=(A,)), frontier=1)
  adopted = [e for e in of("program") if "origin" in e]
  assert [e["origin"].split()[0] for e in adopted] == ["probe"]
  assert running.programs.best.id == adopted[0]["program"]


def test_programs_rank_by_their_primary_score_alone():
  programs = frontier.ExecutableFrontier("loss", 8)
  record = dataclasses.replace(RECORD, values={"loss": 2.0, OTHER_TEXT: 9.0})
  assert programs.rank(record) == (2.0, record.call)


def test_a_condition_is_charged_by_the_tokens_that_it_scores():
  options = {"model": "random:0", "calibration": [8, 32]}
  task = ptq.PtqTask(**options, windows=[1, 64], other_windows=[8, 2048])
  assert task.price({"kind": OTHER_TEXT}) == 256
  assert task.price({"kind": "random_map"}) == task.price({}) == 1
  even = ptq.PtqTask(**options, windows=[4, 128], other_windows=[5, 128])
  assert even.price({"kind": OTHER_TEXT}) == 2


def test_the_price_of_a_control_is_set_by_the_task_and_paid(tmp_path):
  class Costly(world.World):
    """A world in which a dose costs three calls."""

    def price(self, intervention):
      """See `Task`."""
      return 3 if intervention.get("kind") == "dose" else 1

  cheap = asking()
  cheap["controls"] = tuple(dataclasses.replace(c, cost=1) for c in cheap["controls"])
  edit = proposed(operation("mechanism"), **cheap)
  running, of, _ = run(tmp_path, edit, task=Costly(seed=3))
  charged = {e["condition"]: e["charged"] for e in of("outcome")[1:]}
  assert charged["dose"] == 3


def test_the_story_of_a_program_that_was_a_control_is_that_of_its_packet(tmp_path):
  both = operation("mechanism") + operation("harmful", B)
  asked = {
    **asking(),
    "explanations": (
      account("all", primary={"excess_attention": "down"}, w={"loss": "up"}),
      account("a", primary={"excess_attention": "down"}, w={"loss": "down"}),
    ),
    "controls": (Control("w", {"kind": "program", "without": [B]}),),
  }
  running, _, _ = run(tmp_path, proposed(both, **asked))
  best = running.programs.best.id
  (story,) = explain.find(tmp_path, best[:10])
  assert [*story.adopted] == [best]
  kept = f"kept as a program of its own: {best[:12]}, edit, as in w: "
  assert kept in explain.text(story, {})
  told = explain.stories(tmp_path, store.read_events(tmp_path))
  assert [m.program for _, m in explain.lineage(told, best)][1:] == [best]
