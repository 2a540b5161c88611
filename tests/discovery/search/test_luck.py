"""Luck of the score's text as an account: its control, and what programs count as."""

import dataclasses
import types

import pytest

from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.edit_templates import MISLED
from mxjax.discovery.core.residual import (
  OTHER_TEXT,
  PRIMARY,
  Control,
  Explanation,
  consistent,
)
from mxjax.discovery.core.task import Status
from mxjax.discovery.core.verdict import resolve
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.search import controls, frontier, resolution, runs
from mxjax.discovery.tasks import noisy_world
from tests.discovery import searching

MARGINS = noisy_world.NoisyWorld.margins
OF_PARENT = f"{OTHER_TEXT} of the parent"


class OtherText(noisy_world.NoisyWorld):
  """The world, and another text, on which its lucky edits gain nothing."""

  tests_luck = True
  margins = {**MARGINS, OTHER_TEXT: MARGINS["loss"]}

  def run(self, call, artifacts, before):
    if call.intervention.get("kind") != OTHER_TEXT:
      return super().run(call, artifacts, before)
    shown, _ = self.holdout().run(call._replace(intervention={}), artifacts, before)
    return {"values": {OTHER_TEXT: shown["values"]["loss"]}, "outputs": {}}, b""


TASK = OtherText(seed=3)


def edit(kind, sites=TASK.sites):
  """Proposes an edit of a kind at the first of these sites that has one."""

  def propose(context):
    for template in TASK.edit_templates:
      site, idea = template.id.split("-")
      effects = TASK.effects[site][int(idea)]
      wanted = [p for p in template.params if effects[p["variant"]] == kind]
      if site in sites and wanted:
        only = dataclasses.replace(template.with_luck("loss"), params=tuple(wanted))
        return EmbeddedProposer([only], "loss").propose(context)
    raise AssertionError(f"no {kind} edit at {sites}")

  return propose


def run(folder, *script, **config):
  options = {"seed": 3, "budget": 20, "mark_every": 10, "checker": "none", **config}
  running = searching.run(folder, TASK, searching.Scripted(*script), **options)
  events = store.read_events(folder)
  return running, {
    name: [e for e in events if e["event"] == name]
    for name in ("outcome", "verdict", "skipped", "program", "mark")
  }


def test_a_lucky_gain_is_found_out_and_counts_for_nothing(tmp_path):
  running, events = run(tmp_path, edit("lucky"))
  (verdict,) = events["verdict"]
  assert verdict["observed"][PRIMARY]["loss"] == "down"
  assert verdict["observed"][OTHER_TEXT] == {OTHER_TEXT: "same"}
  assert verdict["survivors"] == ["luck"]
  assert verdict["verdict"] == "mediator_only", "a gain is one on the other text"
  assert OF_PARENT not in verdict["observed"]
  # Nothing is asked any more of a gain that is none.
  assert [e["condition"] for e in events["outcome"]] == [
    PRIMARY,
    PRIMARY,
    OF_PARENT,
    OTHER_TEXT,
  ]
  assert events["skipped"][-1]["controls"]
  initial, lucky = (e["program"] for e in events["program"])
  shown = [e["values"].get(OTHER_TEXT) for e in events["outcome"]]
  credit = lambda program: running.programs.rank(running.record(program))[0]
  assert [credit(initial), credit(lucky)] == shown[2:]
  best = initial if shown[2] < shown[3] else lucky
  assert {e["champion"] for e in events["mark"]} == {best}


def test_a_gain_that_holds_is_asked_why_and_counts(tmp_path):
  running, events = run(tmp_path, edit("right"))
  (verdict,) = events["verdict"]
  assert verdict["observed"][OTHER_TEXT] == {OTHER_TEXT: "down"}
  assert verdict["verdict"] == "supported"
  assert {"luck", "overfit", "lucky", "drift"} <= verdict["excluded"].keys()
  assert running.programs.best.id == events["program"][-1]["program"]


def test_what_comes_out_as_its_parent_needs_no_other_text(tmp_path):
  code = f"def {TASK.sites[0]}(x):\n  return x + 0 * x\n"

  def again(told):
    source = candidate_source.with_functions(told.parent.source, code)
    return dataclasses.replace(edit("idle")(told), source=source)

  _, events = run(tmp_path, again)
  assert [e["condition"] for e in events["outcome"]] == [PRIMARY, PRIMARY]
  first, second = (e["exec_id"] for e in events["outcome"])
  assert first != second, "they lower to different programs"
  assert [e["verdict"] for e in events["verdict"]] == ["no_effect"]


def test_a_gain_is_one_on_the_other_text():
  template = TASK.edit_templates[0].with_luck("loss")

  def verdict(scored, shown):
    seen = {PRIMARY: {"loss": scored, EXCESS: "down"}, OTHER_TEXT: {OTHER_TEXT: shown}}
    told = {"is_safe": True, "is_equivalent": False}
    finding = resolve(template.explanations, seen, "loss", **told)
    return *finding.survivors, finding.verdict

  assert verdict("down", "up") == ("overfit", "mediator_only")
  assert verdict("up", "down") == ("unfit", "target_only")


def test_a_gain_that_only_luck_explains_is_none():
  template = TASK.edit_templates[0].with_luck("loss")
  seen = {PRIMARY: {"loss": "down", EXCESS: "up"}}
  told = {"is_safe": True, "is_equivalent": False}
  finding = resolve(template.explanations, seen, "loss", **told)
  assert finding.survivors == ("luck",)
  assert finding.verdict == "no_effect"


def test_a_change_that_the_score_does_not_show_is_asked_of_the_other_text(tmp_path):
  _, events = run(tmp_path, edit("idle"))
  assert [e["condition"] for e in events["outcome"]][2:] == [OF_PARENT, OTHER_TEXT]


def test_shuffled_verdicts_shuffle_what_another_text_shows(tmp_path):
  script = edit("lucky"), edit("right"), edit("lucky", TASK.sites[6:])
  config = {"parents": "initial", "shuffled_verdicts": True}
  running, events = run(tmp_path, *script, **config)
  shown = [e["values"] for e in events["outcome"] if e["condition"] == OTHER_TEXT]
  before = next(
    e["values"][OTHER_TEXT] for e in events["outcome"] if e["condition"] == OF_PARENT
  )
  changes = [values[OTHER_TEXT] - before for values in shown]
  assert len({round(change, 6) for change in changes}) == len(changes) == 3
  believed = [
    running.programs._tested[e["program"]] - before for e in events["program"][1:]
  ]
  assert believed[0] == pytest.approx(changes[0])
  assert all(min(abs(b - c) for c in changes) < 1e-9 for b in believed)
  assert believed != pytest.approx(changes)


def test_a_parent_is_scored_on_the_other_text_once(tmp_path):
  script = edit("lucky"), edit("right")
  _, events = run(tmp_path, *script, parents="initial")
  charged = [e["charged"] for e in events["outcome"] if e["condition"] == OF_PARENT]
  assert charged == [1, 0]


def record(template, program, parent, loss, call):
  return dataclasses.replace(
    template,
    id=program,
    parent=parent,
    values={"loss": loss},
    exec_id=program,
    call=call,
  )


def test_an_untested_program_counts_as_its_last_tested_ancestor(tmp_path):
  running, _ = run(tmp_path)
  first = running.programs.best
  programs = frontier.ExecutableFrontier("loss", 8)
  for each in (("a", "", 3.0, 1), ("b", "a", 2.0, 2), ("c", "b", 1.0, 3)):
    programs.retain(record(first, *each))
  assert [r.id for r in programs.records] == ["c", "b", "a"], "by score without tests"
  programs.test({"a": 3.5, "b": 3.2})
  assert [r.id for r in programs.records] == ["b", "c", "a"]
  programs.test({"b": 3.9})
  assert [r.id for r in programs.records] == ["a", "b", "c"]
  programs.retain(record(first, "d", "a", 0.5, 4))
  assert [r.id for r in programs.records] == ["a", "d", "b", "c"]


def test_the_accounts_of_every_gain_are_told_apart_from_luck():
  for plain in TASK.edit_templates[:8]:
    template = plain.with_luck("loss")
    added = {e.name for e in template.explanations} - {
      e.name for e in plain.explanations
    }
    assert added == {account[0] for account in MISLED}
    chosen = controls.minimal(template.explanations, template.controls)
    assert OTHER_TEXT in {control.name for control in chosen}
    left = {e.name for e in template.contested().explanations}
    assert added & left == {"luck", "overfit"}


EXCESS = TASK.edit_templates[0].residual


def needed(account, *more, **seen):
  """Names the controls that what a primary run shows leaves worth running."""
  plain = TASK.edit_templates[0]
  every = (*plain.explanations, *more)
  template = dataclasses.replace(plain, explanations=every).with_luck("loss")
  names = {"loss": "loss", "residual": plain.residual}
  observed = {names[name]: moves for name, moves in seen.items()}
  left = [e for e in template.explanations if consistent(e.predicts(PRIMARY), observed)]
  assert account in {e.name for e in left}
  return {c.name for c in controls.minimal(left, template.controls)}


def test_a_gain_that_some_account_but_luck_expects_is_tested():
  elsewhere = Explanation("aside", "", {PRIMARY: {"loss": "down", EXCESS: "same"}})
  assert OTHER_TEXT in needed("luck", loss="down", residual="down")
  assert needed("luck", elsewhere, loss="down", residual="same") == {OTHER_TEXT}
  assert not needed("luck", elsewhere, loss="down", residual="up")


def test_a_score_that_did_not_follow_its_residual_is_tested():
  assert needed("unfit", loss="up", residual="down") == {OTHER_TEXT}
  assert needed("unfit aside", loss="up", residual="same") == {OTHER_TEXT}
  assert not needed("harm", loss="up", residual="up")


def test_other_text_contradicts_an_account_that_believes_the_score():
  template = TASK.edit_templates[0].with_luck("loss")
  shows = {e.name: e.predicts(OTHER_TEXT) for e in template.explanations}
  told = {name: row.get(OTHER_TEXT) for name, row in shows.items()}
  assert told["unlucky"] == told["unfit"] == told["unfit aside"] == "down"
  assert (told["luck"], told["overfit"]) == ("same", "up")
  assert told["right"] == told["lucky"] == told["drift"] == "down"


@pytest.mark.parametrize("task", [TASK, noisy_world.NoisyWorld(seed=3)])
def test_proposals_hold_luck_if_the_task_can_test_it(task):
  proposer = {"kind": "embedded"}
  options = runs.RunOptions(task=dict(task.spec), config={}, proposer=proposer)
  made = runs.make_proposer(options, task)
  templates = task.edit_templates
  if task is TASK:
    templates = [template.with_luck("loss") for template in templates]
  assert made.name == EmbeddedProposer(templates, "loss").name


def test_a_skipped_control_is_not_what_a_later_stage_counts_on():
  down, same = {"loss": "down"}, {"loss": "same"}
  moves = {
    "x": {PRIMARY: down, "a": down, "c": down},
    "y": {PRIMARY: down, "a": same, "b": down, "c": same},
    "z": {PRIMARY: down, "b": same, "c": same},
    "w": {
      PRIMARY: {"other": "up"},
      "a": same,
      "b": {"loss": "up"},
      "c": {"loss": "up"},
    },
  }
  accounts = [Explanation(name, name, rows) for name, rows in moves.items()]
  every = [Control(name, {"kind": name}) for name in "abc"]
  condition = lambda name, kind: types.SimpleNamespace(
    name=name, kind=kind, exec_id=name
  )
  packet = types.SimpleNamespace(
    policy="minimal",
    hash="",
    explanations=accounts,
    conditions=[
      condition(PRIMARY, "candidate"),
      *(condition(n, "control") for n in "abc"),
    ],
  )
  primary = types.SimpleNamespace(
    status=Status.OK, values={"loss": 0.0, "other": 1.0}, outputs={}
  )
  attempt = types.SimpleNamespace(
    packet=packet,
    outcome=primary,
    proposal=types.SimpleNamespace(controls=every),
    parent=types.SimpleNamespace(
      exec_id="", values={"loss": 1.0, "other": 1.0}, outputs={}
    ),
    of_parents=set(),
    outcomes={PRIMARY: primary},
    skipped=frozenset(),
  )
  task = types.SimpleNamespace(margins={"loss": 0.1, "other": 0.1})
  history = types.SimpleNamespace(emit=lambda name, **fields: None)
  resolution.skip_pointless(task, history, attempt)
  assert attempt.skipped == {"a"}
  attempt.outcomes["b"] = primary
  resolution.skip_pointless(task, history, attempt)
  assert attempt.skipped == {"a"}, "only c is left to tell x from y"
