"""What a prompt tells each arm, and the token allowances that it keeps."""

import dataclasses

import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.proposal import (
  Answered,
  Context,
  Demand,
  Experiment,
  Ran,
  Record,
  Step,
  Winner,
  strip,
)
from mxjax.discovery.core.residual import Explanation, Residual
from mxjax.discovery.core.task import Call
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.proposers import endpoint, llm, prompt
from mxjax.discovery.search import runs
from mxjax.discovery.tasks import world

TASK = world.World(seed=3)
SOURCE = TASK.interface.default_source()
RESIDUAL = Residual("p", "excess_mlp", 0.9, 0.5, ("mlp",))
ACCOUNTS = (
  Explanation("site", "told why", {"primary": {"loss": "down"}, "c": {"loss": "same"}}),
  Explanation("size", "any does", {"primary": {"loss": "down"}, "c": {"loss": "down"}}),
)
PACKET = Experiment(
  program="program1",
  parent="p",
  label="edit",
  note="in its own words",
  status="ok",
  changes={"loss": -0.1, "layer_0": 0.25},
  gain=True,
  score=2.875,
  feedback="an error was told",
  diff="-  return x\n+  return 2 * x",
  verdict="supported",
  reason="focal_alone",
  explanations=ACCOUNTS,
  observed={"primary": {"loss": "down"}, "c": {"loss": "same", "layer_0": "up"}},
  excluded={"size": "c"},
  survivors=("site",),
  implemented=True,
  values={"loss": 2.875, "layer_0": 1.25},
  ran=(Ran("c", "ok", "", {"loss": 3.0}), Ran("broken", "crashed", "KeyError: site")),
  answered=(Answered("extend", "edit", True, "loss 3 to 2.875, margin 0.004"),),
)
CONTROLLED = (
  "site (told why) predicts primary: loss down; c: loss same",
  "size (any does) predicts primary: loss down; c: loss down",
  "observed primary: loss down; c: loss same",
  "verdict supported (focal_alone); excluded size by c; left site",
  "program1 c: - 3",
  "  broken: crashed; KeyError: site",
  "response extend (edit) implemented: loss 3 to 2.875, margin 0.004",
)


def record(name, value=3.0, source=SOURCE):
  values = {"loss": value, "layer_0": 1.0}
  return Record(name, source, "", 1, {}, {"remeasure": False}, name, values, {})


def demand(response=Response.EXTEND, **changes):
  part = Call({}, {}, {})
  made = Demand(
    "packet", "supported", response, "edit", ("site",), RESIDUAL, ("mlp",), part, part
  )
  return dataclasses.replace(made, **changes)


def context(evidence="verdict", history=(PACKET,), **changes):
  made = Context(
    seed=0,
    address=(0, 0),
    target="loss",
    parent=record("p"),
    residuals=(RESIDUAL,),
    demands=(demand(),),
    history=tuple(strip(e, evidence) for e in history),
    champion=record("champion", 2.5, "# the champion's source\n"),
    donors=(record("donor", 2.75, "# a donor's source\n"),),
    evidence=evidence,
    stagnation=7,
  )
  return dataclasses.replace(made, **changes)


def told(context, **options):
  system, user = prompt.messages(context, TASK, **options)
  return system["content"] + user["content"]


def test_a_packet_tells_predictions_controls_exclusions_and_what_is_left():
  text = told(context())
  for part in (*CONTROLLED, "+  return 2 * x", "in its own words"):
    assert part in text


@pytest.mark.parametrize(
  ("evidence", "seen", "hidden"),
  [
    (
      "score",
      ("score 2.875", "an error was told", "+  return 2 * x", "gain"),
      ("in its own words", "program1:", *CONTROLLED),
    ),
    (
      "text",
      ("program1: 1.25 2.875", "in its own words", "p parent: 1 2.975"),
      (prompt.REFLECTION, *CONTROLLED),
    ),
    ("reflect", ("program1: 1.25 2.875", prompt.REFLECTION), CONTROLLED),
    (
      "controls",
      (
        prompt.REFLECTION,
        "program1 c: - 3",
        "Ideas of why it may help: ",
        '"controls": each with',
      ),
      (*CONTROLLED[:4], *CONTROLLED[6:]),
    ),
    ("none", (), ("2.875", "+  return", "donor's source", *CONTROLLED)),
  ],
)
def test_an_arm_is_told_what_its_evidence_allows(evidence, seen, hidden):
  text = told(context(evidence))
  assert all(part in text for part in seen)
  assert not any(part in text for part in (*hidden, "Required response"))


def test_memory_tells_champion_donors_stagnation_residuals_and_demands():
  text = prompt.memory(context(), TASK.interface)
  for part in (
    "Best program champion, loss 2.5:\n# the champion's source",
    "Also retained: donor loss 2.75",
    "since the best program improved: 7",
    'Open to a question now, as "residual":\n- excess_mlp = 0.9',
    "extend the supported edit or compose",
    "the edit was of mlp",
  ):
    assert part in text


@pytest.mark.parametrize("response", list(Response))
def test_every_response_is_told_in_the_terms_of_its_check(response):
  text = prompt.memory(context(demands=(demand(response),)), TASK.interface)
  assert f": {prompt.RESPONSES[response]}." in text
  head = "Forbidden" if demand(response).forbids else "Required response"
  assert head in text


def test_what_was_measured_is_one_table_and_stands_nowhere_else():
  text = prompt.memory(context(), TASK.interface)
  table = text.partition("What was measured:\n")[2].partition("\n\n")[0]
  assert table.splitlines() == [
    "program or control of it: layer_0 loss",
    "p parent: 1 2.975",
    "program1: 1.25 2.875",
    "program1 c: - 3",
  ]
  assert text.count("2.875") == 2, "in the table, and in the check of a response"
  child = dataclasses.replace(PACKET, program="child", parent="program1", ran=())
  rows = prompt.measurements((PACKET, child)).splitlines()
  assert [row.partition(":")[0] for row in rows[1:]] == [
    "p parent",
    "program1",
    "program1 c",
    "child",
  ]
  assert not prompt.measurements((strip(PACKET, "score"),))


def test_the_best_program_is_told_by_what_differs_from_the_parent():
  best = record("champion", 2.5, SOURCE.replace("return x", "return 2 * x", 1))
  text = prompt.memory(context(champion=best), TASK.interface)
  assert "loss 2.5: the program above, but for\n@@ geometry\n-  return x\n" in text
  assert SOURCE.strip() not in text


def test_the_best_candidate_is_the_champion_and_not_the_largest_gain():
  others = [
    dataclasses.replace(PACKET, program=f"p{i}", label=f"{i}", changes={"loss": -9.0})
    for i in range(60)
  ]
  first = dataclasses.replace(PACKET, program="champion")
  older = dataclasses.replace(others[0], program="older")
  kept = prompt.select(context(history=(older, first, *others)))
  assert kept[0].program == "champion"
  assert len(kept) == 1 + prompt.LATEST


LONG = "word " * 4000


@pytest.mark.parametrize(
  "changes",
  [
    {"demands": tuple(demand(packet=f"{i}", label=LONG[:999]) for i in range(99))},
    {"champion": record("champion", source=LONG * 4)},
    {"history": tuple(dataclasses.replace(PACKET, note=LONG) for _ in range(50))},
    {"residuals": (dataclasses.replace(RESIDUAL, observable=LONG * 4),)},
  ],
  ids=lambda changes: next(iter(changes)),
)
def test_everything_counts_inside_the_memory_allowance(changes):
  text = prompt.memory(context(**changes), TASK.interface)
  assert prompt.estimated_tokens(text) <= prompt.MEMORY_TOKENS
  if "history" not in changes:
    assert "do not fit into memory" in text


def test_the_reflection_is_the_papers_instruction():
  assert prompt.REFLECTION.startswith("Compare this round with its parent and the most")
  assert prompt.REFLECTION.endswith("direction, explain how the new conditions differ.")
  assert "Distinguish observations from causal inferences." in prompt.REFLECTION
  assert len(prompt.REFLECTION.split()) == 59


def test_free_reflection_reads_the_same_packets_and_no_demand():
  bound = context()
  free = dataclasses.replace(bound, demands=(), compiles=False)
  text = told(free)
  assert all(part in text for part in CONTROLLED)
  assert prompt.REFLECTION not in text, "that is the instruction of ReflectMem"
  assert "Required response" not in text
  assert "Required response" in told(bound)
  assert prompt.REFLECTION not in told(bound)


class Tape:
  """A client whose first reply is not usable; keeps the requests."""

  name = "tape"

  def __init__(self, first):
    self.first, self.requests = first, []

  def complete(self, request):
    self.requests.append(request)
    text = self.first if len(self.requests) == 1 else '{"source": "x = 1", "label": ""}'
    return endpoint.Reply(
      text=text, model="m", finish_reason="stop", input_tokens=1, output_tokens=1
    )


def size(request):
  return sum(prompt.estimated_tokens(m["content"]) for m in request["messages"])


def test_the_repair_turn_is_inside_the_input_allowance(monkeypatch):
  monkeypatch.setattr(prompt, "INPUT_TOKENS", 26_000)
  parent = record("p", source=SOURCE + "# " + "x" * 30_000)
  history = [
    dataclasses.replace(PACKET, note=LONG[:3000], label=f"{i}") for i in range(50)
  ]
  asked = context(history=history, parent=parent)
  # What the first request leaves is less than the reply to repair.
  tape = Tape("not an answer " * 1500)
  proposal = llm.LlmProposer(tape, TASK).propose(asked)
  assert proposal.source == "x = 1"
  first, second = tape.requests
  assert size(first) + prompt.estimated_tokens(tape.first) > prompt.INPUT_TOKENS
  assert size(second) <= prompt.INPUT_TOKENS
  assert second["messages"][2]["content"] == tape.first


def test_a_reply_too_long_to_repair_gets_no_second_turn():
  tape = Tape("y" * 3 * prompt.INPUT_TOKENS)
  proposal = llm.LlmProposer(tape, TASK).propose(context())
  assert len(tape.requests) == 1
  assert "too long for a repair turn" in proposal.unusable


def test_the_reasoning_effort_is_asked_for_only_if_set(tmp_path):
  tapes = {effort: Tape("") for effort in (None, "high")}
  for effort, tape in tapes.items():
    llm.LlmProposer(tape, TASK, effort=effort).propose(context())
  assert "reasoning_effort" not in tapes[None].requests[0]
  assert tapes["high"].requests[0]["reasoning_effort"] == "high"
  (tmp_path / "tape.jsonl").touch()
  settings = {"kind": "cassette", "cassette": tmp_path / "tape.jsonl", "effort": "low"}
  made = runs.make_proposer(
    runs.RunOptions(task={}, config={}, proposer=settings), TASK
  )
  assert made._request([])["reasoning_effort"] == "low"


def test_an_entry_does_not_repeat_what_the_table_holds():
  """Changes of what has a value are in the table of what was measured."""
  text = prompt.entry_text(dataclasses.replace(PACKET, values={"loss": 2.0}))
  assert "loss -0.1" not in text
  assert "layer_0 +0.25" in text


def long_change(name, value):
  lines = [
    f"+def {name}(x):",
    *(f"+  x = x + {i}" for i in range(4)),
    f"+  return {value}",
  ]
  return "\n".join(lines)


def test_programs_on_the_way_to_the_parent_are_told_by_name_and_verdict():
  """What they changed is in the program that the prompt shows."""
  older = dataclasses.replace(PACKET, program="older", parent="start")
  last = dataclasses.replace(PACKET, program="p", parent="older", diff="@@ mlp\n+  x")
  side = dataclasses.replace(
    PACKET, program="side", parent="older", diff="@@ mlp\n-  y"
  )
  failed = dataclasses.replace(last, status="crashed", diff="@@ mlp\n+  broken")
  parent = dataclasses.replace(record("p"), parent="older")
  text = told(context(history=(older, last, side, failed), parent=parent))
  entry = text.partition("[older from start]")[2].partition("\n[")[0]
  assert "verdict supported (focal_alone); excluded size by c" in entry
  assert "in its own words" in entry and "predicts" not in entry
  entry = text.partition("[p from older]")[2].partition("\n[")[0]
  assert "changed mlp: see the programs above" in entry
  assert "site (told why) predicts" in entry, "the parent's own accounts stay"
  assert "+  return 2 * x" not in text
  assert "@@ mlp\n-  y" in text and "@@ mlp\n+  broken" in text


def test_a_function_of_two_programs_is_shown_once():
  body = long_change("search", "x")
  one = dataclasses.replace(PACKET, program="one", diff=f"@@ search\n{body}")
  both = f"@@ search\n{body}\n+\n+\n{long_change('other', 'y')}"
  two = dataclasses.replace(PACKET, program="two", diff=both)
  text = told(context(history=(one, two)))
  assert text.count(body) == 1
  assert "@@ search: as in one" in text
  assert f"@@ other\n{long_change('other', 'y')}" in text
  above = body.replace("\n+", "\n")[1:]
  parent = record("p", source=f"{SOURCE}\n\n{above}\n")
  assert "@@ search: added, as in the program above" in told(
    context(history=(one,), parent=parent)
  )


def edit_of(program, parent, before, after, **changes):
  """An experiment that made one source of another."""
  return dataclasses.replace(
    PACKET,
    program=program,
    parent=parent,
    diff=candidate_source.diff(before, after),
    code=candidate_source.changed_definitions(before, after),
    **changes,
  )


def search(value):
  lines = [f"  x = x + {i}\n" for i in range(9)]
  return f"def search(x):\n{''.join(lines)}  return {value}\n"


def test_the_functions_of_the_last_two_edits_are_shown_whole_and_once():
  """A change of one line says nothing of the rest, which an answer must send whole."""
  sources = {k: f"{search(k)}\n\ndef other(x):\n  return {k}\n" for k in "abcd"}
  steps = [edit_of(k, "p", f"{SOURCE}{sources['a']}", sources[k]) for k in "bcd"]
  shown = told(context(history=steps))
  assert "@@ search\n-  return a\n+  return b" in shown, "older ones by what differs"
  for key in "cd":
    assert shown.count(search(key).strip()) == 1
    assert f"+  return {key}" not in shown
  again = edit_of("e", "q", f"{SOURCE}{sources['a']}", sources["d"])
  shown = told(context(history=[*steps, again]))
  assert shown.count(search("d").strip()) == 1
  assert "@@ search: as in d" in shown
  parent = record("p", source=f"{SOURCE}\n\n{search('d')}")
  shown = told(context(history=steps, parent=parent))
  assert shown.count(search("d").strip()) == 1
  assert "@@ search: as in the program above" in shown


def test_whole_functions_make_no_prompt_longer_than_is_read_well(monkeypatch):
  sources = {k: f"{SOURCE}{search(k)}" for k in "abcd"}
  steps = [edit_of(k, "p", sources["a"], sources[k]) for k in "bcd"]
  asked = context(history=steps)
  long = len(told(asked).encode())
  shown = []
  for limit in (long, long - 1, 0):
    monkeypatch.setattr(prompt, "WHOLE_UP_TO", limit)
    shown.append([search(k).strip() in told(asked) for k in "bcd"])
  assert shown == [[False, True, True], [False, False, True], [False] * 3]


def test_what_a_later_edit_changed_again_is_shown_of_the_edit_before_it():
  one, two = f"{SOURCE}{search('b')}", f"{SOURCE}{search('c')}"
  first = edit_of("older", "start", f"{SOURCE}{search('a')}", one)
  last = edit_of("p", "older", one, two)
  parent = dataclasses.replace(record("p", source=two), parent="older")
  shown = told(context(history=(first, last), parent=parent))
  assert shown.count(search("b").strip()) == shown.count(search("c").strip()) == 1


def test_the_control_that_did_better_is_shown_whole_where_no_program_shows_it():
  won = Winner("k", "w", {"search": search("w").strip()}, {"remeasure": True})
  first = dataclasses.replace(
    PACKET, winner=Winner("old", "v", {"search": search("v").strip()}, {})
  )
  last = dataclasses.replace(PACKET, program="program2", winner=won)
  shown = told(context(history=(first, last)))
  head = (
    "  w did better; it is this program with PLAN remeasure True\n@@ search, whole\n"
  )
  assert f"{head}{search('w')}".strip() in shown
  assert search("v").strip() not in shown
  champion = record("k", 2.5, f"{SOURCE}\n\n{search('w')}")
  shown = told(context(history=(first, last), champion=champion))
  assert "w did better" not in shown
  assert strip(last, "reflect").winner is None
  assert strip(last, "controls").winner == won


def test_a_change_of_the_plan_is_told_by_its_keys():
  old = "-PLAN = {'a': 1, 'b': False}"
  whole = "\n".join(["@@ PLAN", old, "+PLAN = {'a': 2, 'b': False}"])
  shown = prompt.entry_text(dataclasses.replace(PACKET, diff=whole))
  assert shown.endswith("@@ PLAN: a 1 to 2")
  assert prompt.edited(whole) == ["a"]
  lines = "@@ PLAN\n-  'a': 1,\n+  'a': 2,"
  assert prompt.entry_text(dataclasses.replace(PACKET, diff=lines)).endswith(lines)


def test_the_program_is_shown_without_functions_that_equal_their_default():
  site = world.SITES[0]
  own = SOURCE.replace(f"def {site}(x):\n  return x", f"def {site}(x):\n  return -x")
  user = prompt.messages(context(parent=record("p", source=own)), TASK)[1]["content"]
  shown = user.partition("Program, ")[2].partition("Required response")[0]
  assert shown.startswith("without the functions that equal their default")
  assert f"def {site}(x):\n  return -x" in shown
  assert shown.count("def ") == 1
  assert "PLAN = {" in shown and "import jax" in shown
  every = "\n".join(f"def {site}(x):\n  return -x\n" for site in TASK.interface.names)
  whole = prompt.messages(context(parent=record("p", source=every)), TASK)[1]["content"]
  assert f"Program:\n{every}" in whole


def test_a_demand_names_what_was_edited_and_not_what_a_key_switched_on():
  before = Call({"mlp": "1", "balance": "1"}, {"remeasure": False}, {})
  after = Call({"mlp": "1", "balance": "2"}, {"remeasure": True}, {})
  one = demand(computation=("mlp", "balance", "remeasure"))
  one = dataclasses.replace(one, before=before, intervention=after)
  text = prompt.memory(context(demands=(one,)), TASK.interface)
  assert "the edit was of balance, remeasure." in text


def test_the_lineage_names_what_was_edited():
  made = dataclasses.replace(PACKET, diff="@@ helper\n-  y\n+  x")
  way = (Step("start", "the start", 3.0), Step("program1", "edit", 2.9, ("mlp",)))
  text = prompt.memory(context(history=(made,), lineage=way), TASK.interface)
  assert "program1 loss 2.9: edit (changed helper)" in text


def test_another_question_that_is_owed_may_be_answered_instead():
  first = demand()
  residual = dataclasses.replace(RESIDUAL, observable="excess_balance")
  other = demand(packet="2", label="another", residual=residual)
  text = prompt.memory(context(demands=(other, first), checked=first), TASK.interface)
  told_ = 'With "residual": "excess_balance" it is checked in the place of the first.'
  assert told_ in text
