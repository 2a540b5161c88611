"""What a terminal is shown of a run."""

import re

import pytest

from mxjax.discovery.audit import explain, programs, report, words
from mxjax.discovery.core import store
from mxjax.discovery.core.residual import Control
from mxjax.discovery.search import runs
from tests.discovery.proposers import test_llm
from tests.discovery.search import test_steering as steering


def test_explain_escapes_what_a_model_wrote():
  evil = "x\x1b[2J\x9b\u202e\nverdict: supported"
  body = {"program": evil, "parent": evil, "residual": None, "response_to": evil}
  account = {"name": evil, "statement": evil, "predictions": {evil: {"loss": "up"}}}
  outcome = {"kind": evil, "condition": evil, "status": "ok", "charged": 1}
  told = explain.Story(
    {"id": evil, "n": 1, "label": evil, "note": evil}
    | {"packet": {**body, "explanations": [account]}},
    ({**outcome, "detail": evil},),
    (evil,),
    {"verdict": "x", "reason": evil, "survivors": [evil], "excluded": {evil: evil}}
    | {"response": evil, "observed": {}, "explicit": ""},
    ({"checker": evil, "response": evil, "implemented": True, "detail": evil},),
    None,
    "+\tx = 1\n-" + evil,
    {evil: explain.Made(evil, evil, None, evil, evil)},
    labels={evil[:12]: evil},
    tried=evil,
  )
  text = explain.text(told, {})
  assert not [c for c in text if not c.isprintable() and c not in "\n\t"]
  assert "\n+\tx = 1\n" in text
  lines = [line for line in text.splitlines() if line.startswith("verdict: supp")]
  assert len(lines) == 2  # of two differences, whose lines are the programs'


def test_explain_tells_all_controls_that_were_skipped(tmp_path):
  """Some go before another text is asked, others after it has answered."""
  body = {"program": "p", "parent": "", "residual": None, "response_to": []}
  events = [
    {"event": "packet", "id": "x", "n": 1, "packet": {**body, "explanations": []}},
    {"event": "skipped", "packet": "x", "controls": ["permute"]},
    {"event": "skipped", "packet": "x", "controls": ["dose"]},
  ]
  (story,) = explain.stories(tmp_path, events)
  assert "run: permute, dose" in explain.text(story, {})


def test_a_run_is_told_whole_to_somebody_who_was_not_there(tmp_path):
  answers = [test_llm.answer(code=test_llm.SOME, note="why it should help")]
  answers += [{"label": "refused", "code": "import os"}] * 3
  test_llm.run(tmp_path, *answers, budget=6)
  told = explain.whole(tmp_path)
  events = store.read_events(tmp_path)
  of = lambda kind: [e for e in events if e["event"] == kind]
  (found,) = of("verdict")
  values = of("outcome")[1]["values"]
  assert "why it should help" in told and "act: act" in told, "what the model said"
  assert f"residual: excess_{test_llm.A} = 0.9, over its threshold of 0.5" in told
  assert f"loss {values['loss']:.6g} (down)" in told, "values beside how they moved"
  assert "(same, gone)" in told, "of a control, what is left of the edit's change"
  assert f"verdict: {found['verdict']} ({found['reason']})" in told
  assert f"response {found['response']} in {test_llm.A}: owed by" in told
  assert told.count("margins: ") == 1 and "loss 0.004" in told, "once for all packets"
  (refused,) = of("refused")
  assert f"refused (unusable): {refused['label']}; {refused['detail']}" in told
  source = explain.source(tmp_path, of("program")[-1]["champion"])
  assert source in told and test_llm.SOME.splitlines()[1] in source
  best, start = of("program")[-1]["champion"], of("program")[0]["program"]
  heads = f"--- start {start[:12]}\n+++ champion {best[:12]}\n"
  assert f"Its change from the start:\n{heads}" in told
  assert "The run has ended: proposer: " in told
  way = told.partition(f"The way to the champion, {best[:12]}. ")[2]
  steps = way.partition("\n\n")[0].splitlines()[1:]
  first, last = (f"{of('program')[i]['value']:.6g}" for i in (0, -1))
  label = of("packet")[1]["label"]
  assert steps[:2] == [f"  {first} the start", f"  {last} {label}"]
  assert words.MEANINGS[found["verdict"]] in steps[2], "the verdict in words"
  assert words.REASONS[found["reason"]] in steps[2]
  assert "\nprogram " in way, "the packets come after it"
  meant = told.partition("\nWhat the words mean:\n")[2].splitlines()
  assert [line.strip().partition(": ")[0] for line in meant] == [*words.WORDS]


A, B = steering.A, steering.B


def run(folder, *script, **config):
  """A run of the world with the options that its report reads."""
  options = runs.RunOptions(task=dict(steering.TASK.spec), config=config, sandbox="off")
  runs.write_options(folder, options)
  return steering.run(folder, *script, **config)


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
  """A run whose champion is a control: the harmful half of an edit taken away."""
  folder = tmp_path_factory.mktemp("adopted") / "run"
  both = steering.operation("mechanism") + steering.operation("harmful", B)
  asked = {
    **steering.asking(),
    "explanations": (
      steering.account("all", primary={f"excess_{A}": "down"}, w={"loss": "up"}),
      steering.account("a", primary={f"excess_{A}": "down"}, w={"loss": "down"}),
    ),
    "controls": (Control("w", {"kind": "program", "without": [B]}),),
  }
  running, of, _ = run(folder, steering.proposed(both, **asked))
  (event,) = [e for e in of("program") if "origin" in e]
  assert event["program"] == running.programs.best.id
  return folder, event, running.programs.best


def changes(diff):
  """The lines that differ, without the heads."""
  return [line for line in diff.splitlines()[2:] if line[:1] in "+-"]


def test_a_champion_that_was_a_control_is_told_by_its_own_diff_and_value(adopted):
  folder, event, best = adopted
  told = explain.stories(folder, store.read_events(folder))
  (_, start), (story, made) = explain.lineage(told, best.id)
  assert (start.label, start.program) == ("the initial program", made.parent)
  assert (made.program, made.label) == (best.id, "edit, as in w")
  assert made.value == f"{best.values['loss']:.6g}" == f"{event['value']:.6g}"
  assert story.candidate.value != made.value
  # The half that was taken away is in the packet's edit alone. The lines of the program
  # have the form of a syntax tree, and so has what they are compared with.
  lines = changes(made.diff)
  assert [line[:1] for line in lines] == ["-", "+"], "one site, and no spacing"
  assert lines[1][1:] in best.source.splitlines()
  assert len(changes(story.diff)) > len(lines)
  whole = explain.whole(folder)
  way = whole.partition("The way to the champion")[2].partition("\n\n")[0]
  assert f"  {made.value} control w, kept as a program of its own\n" in way
  assert f'    of the edit "edit", {explain.verdict(story)}' in way
  assert whole.count(made.diff) == 1, "under its packet, beside that of the edit"
  last = whole.partition("Its change from the start:\n")[2].partition("\n\nWhat ")[0]
  assert changes(last.strip()) == lines


def test_explaining_an_adopted_program_tells_that_program(adopted):
  folder, event, best = adopted
  (story,) = explain.find(folder, best.id[:10])
  text = explain.text(story, {"loss": 0.004})
  heads = text.splitlines()[:3]
  assert heads[0] == (
    f"program {best.id[:12]}, from {event['parent'][:12]}: edit, as in w"
  )
  assert heads[1] == f"its value is {event['value']:.6g}, at call {event['call']}"
  assert heads[2].startswith("it is w of the packet below, kept as a program")
  assert story.adopted[best.id].diff in text
  assert story.diff not in text
  (other,) = explain.find(folder, story.candidate.program[:10])
  text = explain.text(other, {})
  assert text.startswith(f"program {other.candidate.program[:12]}")
  assert other.diff in text


def test_the_report_shows_an_adopted_champion_and_puts_it_into_the_tree(adopted):
  folder, event, best = adopted
  page = report.page(folder)
  name = f"{programs.code(best.id)} edit, as in w: {event['value']:.6g}"
  section = page.partition("<h2>Champion</h2>")[2].partition("<h2>")[0]
  opened = section.partition("<details open>")[2].partition("</details>")[0]
  told = explain.stories(folder, store.read_events(folder))
  story, made = explain.lineage(told, best.id)[-1]
  assert name in opened
  assert all(programs.shown(line) in opened for line in changes(made.diff))
  assert not all(programs.shown(line) in opened for line in changes(story.diff))
  tree = page.partition('<div class="tree">')[2].partition("</div>")[0]
  assert f"<b>{name}</b>" in tree
  candidate = story.candidate
  assert f"<b>{programs.code(candidate.program)}" not in tree
  assert f"{programs.code(candidate.program)} edit: {candidate.value}" in tree
  events = store.read_events(folder)
  ran = {e["program"] for e in events if e["event"] == "program"}
  assert tree.count("<li>") == len(ran)


def test_a_probe_is_named_with_the_edit_that_it_is_about(tmp_path):
  first = steering.proposed(
    steering.operation("mechanism", amplitude=0.3),
    **{**steering.asking(), "label": "a third of it"},
  )
  both = steering.operation("mechanism", amplitude=0.2)
  both += steering.operation("mechanism", B)
  second = steering.proposed(both, declared=(A,), label="more")
  _, of, _ = run(tmp_path, first, second, frontier=1)
  (probe,) = {e["condition"] for e in of("outcome") if e["kind"] == "probe"}
  name = f'{probe} (for the verdict on "a third of it")'
  told = explain.whole(tmp_path)
  assert f"probe {name}: ok" in told
  assert f"more, as in {name}" in told, "it was kept as a program"
  assert told.count(probe) == told.count(name)
  packet = of("packet")[1]["id"]
  assert f'answers the verdict of packet {packet[:12]} ("a third of it")' in told
  page = report.page(tmp_path)
  assert f"<p>{programs.shown(name)}: " in page
  assert page.count(probe) == page.count(programs.shown(name))


def test_what_was_tried_of_a_question_is_a_sentence(tmp_path):
  """The edits before it that moved its observable, by the parts that they changed."""
  both = steering.operation("mechanism") + steering.operation("mechanism", B)
  first = steering.proposed(both, **steering.asking())
  (after,) = (s for s, before in steering.TASK.prerequisite.items() if before == A)
  asked = {**steering.asking(after), "label": "second"}
  second = steering.proposed(steering.operation("mechanism", after), **asked)
  _, of, _ = run(tmp_path, first, second)
  one, two = (
    s
    for s in explain.stories(tmp_path, store.read_events(tmp_path))
    if s.packet["packet"]["residual"]
  )
  alone = "When it was opened, no part of a program had moved it alone. "
  begun = "No change of a program had been measured before this packet."
  assert alone + begun in explain.text(one, {})
  # The edit, and our control, which leaves the claimed part out: that changes the other
  # part of the parent, which moves nothing, and the claimed one of the edit.
  assert two.tried == (
    "Of 3 measured changes before this packet, 2 moved it; they changed "
    f"{A}; {A} + {B}."
  )
  assert two.packet["packet"]["residual"]["computation"] == []
  assert alone + two.tried in explain.text(two, {})


def test_the_first_time_that_a_program_ran_counts():
  """A candidate that failed in one packet is told by the one in which it ran."""
  body = {"program": "p", "parent": "", "residual": None, "response_to": []}
  events = [
    {"event": "packet", "id": "x", "n": 1, "packet": {**body, "explanations": []}},
    {"event": "rejected", "program": "p", "packet": "x"},
    {"event": "packet", "id": "y", "n": 3, "packet": {**body, "explanations": []}},
    {"event": "program", "program": "p", "parent": "", "value": 1.0, "call": 2},
  ]
  one, two = explain.stories(explain.pathlib.Path("absent"), events)
  assert one.program is None and two.program is not None
  ((story, made),) = explain.lineage([one, two], "p")
  assert story is two
  assert made.value == "1"


@pytest.mark.parametrize(
  ("reason", "told"),
  [
    ("within_margin", "Excluded, if so small a change told anything: ours by primary."),
    ("none_left", "Excluded: ours by primary."),
  ],
)
def test_a_change_within_the_margin_excludes_nothing(reason, told):
  asks = {"verdict": "unresolved", "response": "add_discriminator", "reason": reason}
  found = {"excluded": {"ours": "primary"}, "survivors": [], "explicit": ""}
  assert told in explain.concluded(asks | found)


def test_every_word_of_a_verdict_has_a_meaning():
  assert {*words.MEANINGS} == {*words.Verdict}
  assert {*words.ASKS} == {*words.Response}
  assert not [w for w in words.WORDS.values() if not re.fullmatch(r"[A-Z].*\.", w)]
