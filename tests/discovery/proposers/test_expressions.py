"""Typed trees: how many there are, what they become, and runs that propose them."""

import dataclasses
import itertools
import tomllib
import types

import pytest

from mxjax.discovery.audit import verify
from mxjax.discovery.core import candidate_source, store
from mxjax.discovery.core.proposal import Experiment, Proposal, strip
from mxjax.discovery.core.residual import OTHER_TEXT, PRIMARY, Control, Explanation
from mxjax.discovery.core.task import Status
from mxjax.discovery.proposers.expressions import experiment, source, variation
from mxjax.discovery.proposers.expressions import proposer as proposer_
from mxjax.discovery.proposers.expressions.grammar import Grammar, Node
from mxjax.discovery.proposers.expressions.proposer import PREFIX, ExpressionProposer
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import controls, runs
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq.edit_templates import GRAMMAR
from mxjax.discovery.tasks.ptq.interface import INTERFACE
from mxjax.discovery.tasks.ptq.task import PtqTask
from tests.discovery import searching

INITIAL = INTERFACE.default_source()
ROWS = """
depth = 4
productions = [
  { name = "geometry", type = "geometry", hooks = ["geometry"], takes = ["Row"], code = "x + {0}" },
  { name = "weights", type = "weights", hooks = ["weights"], takes = ["Row"], code = "x + {0}" },
  { name = "row", type = "Row", hooks = ["geometry", "weights"], code = "x" },
  { name = "moved", type = "Row", hooks = ["geometry", "weights"], takes = ["Row"], params = { by = [1, 3, 5] }, code = "jnp.roll({0}, {by})" },
  { name = "sized", type = "Row", hooks = ["geometry", "weights"], takes = ["Row"], params = { times = [0.25, 0.5] }, code = "{times} * {0}" },
  { name = "bent", type = "Row", hooks = ["geometry", "weights"], takes = ["Row"], code = "jnp.tanh(3 * {0})" },
]
[controls.Row]
far = "row"
[defaults]
[residuals]
geometry = "excess_geometry"
weights = "excess_weights"
[helpers]
"""  # noqa: E501
SMALL = Grammar.from_dict(tomllib.loads(ROWS), {})


def enumerated(grammar, kind, depth):
  """Every tree of a type by brute force."""
  for rule in grammar.options(kind, depth):
    parts = [list(enumerated(grammar, child, depth - 1)) for child in rule.takes]
    for params, children in itertools.product(rule.settings, itertools.product(*parts)):
      yield Node(rule, params, children)


def drawn(hook, *address, depth=GRAMMAR.depth):
  return variation.sampled(GRAMMAR, hook, depth, variation.Draws(hook, *address))


@pytest.mark.parametrize(
  ("hook", "depth"),
  [("transform", 3), ("balance", 3), ("encode_weight", 3), ("encode_act", 4)],
)
def test_the_count_is_that_of_all_trees(hook, depth):
  trees = list(enumerated(GRAMMAR, hook, depth))
  assert len(trees) == len(set(trees)) == GRAMMAR.count(hook, depth) > 0
  assert GRAMMAR.count(hook) > 10**6


@pytest.mark.parametrize("hook", GRAMMAR.hooks)
def test_different_trees_are_different_programs(hook):
  trees = {drawn(hook, index) for index in range(80)}
  assert len(trees) > 40
  admitted = (
    candidate_source.admit(source.applied(INITIAL, GRAMMAR, INTERFACE, t), INTERFACE)
    for t in trees
  )
  # The identity of a source does not depend on its docstrings.
  assert len({program.id for program in admitted}) == len(trees)


def test_trees_lower_to_different_programs():
  executor = LocalExecutor(PtqTask(model="random:0"))
  seen = []
  for hook, index in itertools.product(GRAMMAR.hooks, range(3)):
    tree = drawn(hook, "lowered", index, depth=4)
    traced = executor.trace(source.applied(INITIAL, GRAMMAR, INTERFACE, tree))
    assert traced.status == Status.OK, (tree.text, traced.detail)
    seen.append(traced.computation[hook])
  assert len(set(seen)) >= 10


def test_an_invalid_tree_cannot_be_built():
  gram = GRAMMAR.parse("gram", "encode_act.Form")
  nearest = GRAMMAR.parse("nearest(floor)", "encode_act.Codes").production
  with pytest.raises(ValueError, match="expected children"):
    Node(nearest, (), (gram,))
  with pytest.raises(ValueError, match="expected children"):
    Node(gram.production, (), (gram,))
  damped = GRAMMAR.parse("damped(gram, share=0.1)", "encode_act.Form")
  for wrong in ((("share", 0.11),), (("share", True),), ()):
    with pytest.raises(ValueError, match="expected parameters"):
      Node(damped.production, wrong, damped.children)


@pytest.mark.parametrize(
  ("text", "kind"),
  [
    ("gram", "encode_weight.Form"),
    ("level(gram)", "encode_act.Codes"),
    ("damped(gram, share=2.0)", "encode_act.Form"),
    ("damped(gram, gram, share=0.1)", "encode_act.Form"),
    ("damped(share=0.1)", "encode_act.Form"),
    ("gram.T", "encode_act.Form"),
    ("diagonal(" * 6 + "gram" + ")" * 6, "encode_act.Form"),
    ("nearest(", "encode_act.Codes"),
  ],
)
def test_what_is_no_tree_is_refused(text, kind):
  with pytest.raises(ValueError):
    GRAMMAR.parse(text, kind)


def test_variations_stay_within_the_grammar_and_depend_on_their_address():
  for hook, index in itertools.product(GRAMMAR.hooks, range(60)):
    tree, donor = drawn(hook, index), drawn(hook, "donor", index)
    vary = lambda change, *parts, i=index: change(GRAMMAR, *parts, variation.Draws(i))
    for change, parts in (
      (variation.mutated, (tree,)),
      (variation.crossed, (tree, donor)),
    ):
      result = vary(change, *parts)
      assert GRAMMAR.parse(result.text, hook) == result == vary(change, *parts)
      assert not any(node.production.is_control for _, node in result.walk())


def test_the_changed_part_is_the_smallest_that_holds_the_change():
  parse = lambda text: GRAMMAR.parse(
    f"transform({text}, transform='measured', gradients=False)", "transform"
  )
  before = parse(
    "after(hadamard, root(mixed(activation, weight, share=0.5), exponent=0.5))"
  )
  after = before.replaced(
    (0, 1, 0, 1), GRAMMAR.parse("weight_error", "transform.Moment")
  )
  assert variation.changed(before, after) == (0, 1, 0, 1)
  assert variation.changed(before, parse("hadamard")) == (0,)
  assert variation.changed(None, after) == variation.changed(after, after) == (0,)


def test_a_program_gives_its_trees_back():
  trees = {hook: drawn(hook, "back", depth=5) for hook in GRAMMAR.hooks}
  program = INITIAL
  for tree in trees.values():
    program = source.applied(program, GRAMMAR, INTERFACE, tree)
  assert source.trees(program, GRAMMAR, INTERFACE) == trees
  plan = candidate_source.admit(program, INTERFACE).plan
  told = dict(trees["encode_weight"].params)
  assert plan["curvature"] == told["curvature"]
  # What someone else has written is no tree, whatever its docstring says.
  foreign = f'def balance(stats):\n  """{trees["balance"].text}"""\n  return 0 * stats'
  other = candidate_source.with_functions(program, foreign)
  assert {*trees} - {*source.trees(other, GRAMMAR, INTERFACE)} == {"balance"}
  begun = source.trees(INITIAL, GRAMMAR, INTERFACE)
  assert {hook: tree.text for hook, tree in begun.items()} == GRAMMAR.defaults


@pytest.mark.parametrize(
  ("hook", "path", "names"),
  [
    ("transform", (0, 0), {"near", "far"}),
    ("transform", (0,), {"near"}),
    ("encode_act", (0, 1), {"near", "far"}),
    ("encode_act", (0,), {"near"}),
    ("encode_weight", (0, 0), {"near"}),
  ],
)
def test_an_edit_has_accounts_that_its_cheapest_controls_tell_apart(hook, path, names):
  tree = {
    "transform": "transform(root(activation, exponent=-0.25), transform='measured', "
    "gradients=False)",
    "encode_act": "encode_act(swapped(nearest(floor), gram, rounds=1, drift=1.0), "
    "tables='realized')",
    "encode_weight": "encode_weight(nearest(moved(by=1)), curvature='none')",
  }[hook]
  after = GRAMMAR.parse(tree, hook)
  before = source.trees(INITIAL, GRAMMAR, INTERFACE)[hook]
  edit = experiment.register(GRAMMAR, INTERFACE, "kl", before, after, path)
  assert {control.name for control in edit.controls} == names
  chosen = controls.minimal(edit.contested().explanations, edit.controls)
  assert {control.name for control in chosen} == names
  assert edit.explanations[0].predicts(PRIMARY) == {
    "kl": "down",
    edit.residual: "down",
  }
  programs = {source.applied(INITIAL, GRAMMAR, INTERFACE, after)}
  for control in edit.controls:
    if control.intervention["kind"] == "program":
      code = control.intervention["code"]
      programs.add(candidate_source.with_functions(INITIAL, code))
  told = [c for c in edit.controls if c.intervention["kind"] == "program"]
  assert len(programs) == 1 + len(told)
  executor = LocalExecutor(PtqTask(model="random:0"))
  assert all(executor.trace(program).status == Status.OK for program in programs)


def run(folder, task, proposer, executor=None, **config):
  return searching.run(folder, task, proposer, executor, **{"seed": 5, **config})


def trees_of_rows(task):
  cards = task.edit_templates
  return ExpressionProposer(SMALL, task.interface, cards, task.target)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder, task = tmp_path_factory.mktemp("rows"), world.World(seed=5)
  executor = searching.Counting(task)
  return run(folder, task, trees_of_rows(task), executor, budget=40), folder, executor


def test_a_run_proposes_trees_and_cards_and_pays_for_nothing_twice(finished):
  running, folder, _ = finished
  events = store.read_events(folder)
  labels = [e["label"] for e in events if e["event"] == "packet" and e.get("label")]
  assert {label.startswith(PREFIX) for label in labels} == {True, False}
  charged = [e["exec_id"] for e in events if e["event"] == "outcome" and e["charged"]]
  assert len(charged) == len(set(charged)) == running.ledger.spent == 40


@pytest.mark.parametrize("stop_after", [3, 21])
def test_a_killed_run_of_trees_resumes_to_the_same_bytes(
  finished, tmp_path, stop_after
):
  _, folder, whole = finished
  task = world.World(seed=5)
  executor = searching.Counting(task)
  executor.stop_after = stop_after
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, task, trees_of_rows(task), executor, budget=40)
  executor.stop_after = None
  run(tmp_path, task, trees_of_rows(task), executor, budget=40)
  assert executor.executed == whole.executed
  assert searching.log(tmp_path) == searching.log(folder)


def asked(text, control, **more):
  """A proposal with a question that only its control answers."""
  better = {PRIMARY: {"loss": "down"}}
  accounts = (
    Explanation("a", "", {**better, control.name: {"loss": "up"}}),
    Explanation("b", "", {**better, control.name: {"loss": "down"}}),
  )
  return Proposal(
    source=text,
    label=more.pop("label", "edit"),
    residual="excess_attention",
    explanations=accounts,
    controls=(control,),
    declared=("attention",),
  )


def edited(code, before=None):
  before = before or world.INTERFACE.default_source()
  return candidate_source.with_functions(
    before, f"def attention(x):\n  return {code}\n"
  )


def test_a_program_is_a_control_and_has_its_own_identity(tmp_path):
  task = world.World(seed=5)
  control = Control(
    "other", {"kind": "program", "code": "def attention(x):\n  return x + 2\n"}
  )
  proposals = [
    asked(edited("x + 1"), control),
    # The control as a candidate, under another text, has run.
    dataclasses.replace(asked(edited("(x) + 2"), control), residual=None),
    # A control that is the candidate tells nothing.
    asked(edited("x + 2.0"), control),
  ]
  config = {"budget": 9, "sequential": False, "parents": "initial"}
  run(tmp_path, task, searching.Scripted(*proposals), **config)
  events = store.read_events(tmp_path)
  outcomes = [e for e in events if e["event"] == "outcome"]
  assert [(e["condition"], e["charged"]) for e in outcomes] == [
    ("primary", 1),
    ("primary", 1),
    ("other", 1),
  ]
  refused = [e for e in events if e["event"] == "refused"]
  assert [e["status"] for e in refused] == ["duplicate", "indistinguishable"]
  assert "control other" in refused[1]["detail"]


def test_what_lowers_to_a_program_that_ran_costs_nothing(tmp_path):
  task = world.World(seed=5)
  control = Control(
    "other", {"kind": "program", "code": "def attention(x):\n  return x * 3\n"}
  )
  again = "def helped(y):\n  return y\n\ndef attention(x):\n  return helped(x) + 1\n"
  text = candidate_source.with_functions(world.INTERFACE.default_source(), again)
  proposals = [
    dataclasses.replace(asked(edited("x + 1"), control), residual=None),
    asked(text, control, label="the same"),
  ]
  config = {"budget": 9, "parents": "initial"}
  running = run(tmp_path, task, searching.Scripted(*proposals), **config)
  refused = [e for e in store.read_events(tmp_path) if e["event"] == "refused"]
  assert [(e["label"], e["status"]) for e in refused] == [("the same", "duplicate")]
  assert running.ledger.spent == 2


def test_a_control_that_is_a_program_is_verified_like_any_other(tmp_path):
  task = world.World(seed=5)
  code = "def attention(x):\n  return x + 2\n"
  control = Control("other", {"kind": "program", "code": code})
  proposer = searching.Scripted(asked(edited("x + 1"), control))
  folder = tmp_path / "run"
  config = {"budget": 3, "sequential": False}
  options = runs.RunOptions(task=task.spec, config=config, sandbox="off", holdout="off")
  runs.write_options(folder, options)
  run(folder, task, proposer, **config)
  audit = verify.verify(folder, 9)
  assert (audit.executed, audit.complaints) == (3, ())


def test_what_another_text_shows_stands_in_the_place_of_the_score():
  def worth(shown, evidence):
    told = {OTHER_TEXT: {OTHER_TEXT: shown}}
    past = Experiment("a", "b", "tree:x", "", "ok", {}, gain=True, observed=told)
    past = strip(past, evidence)
    return proposer_._worth(past, types.SimpleNamespace(evidence=evidence))

  symbols = ("down", "same", "up")
  assert [worth(shown, "verdict") for shown in symbols] == [1.0, 0.0, -1.0]
  assert {worth(shown, "reflect") for shown in symbols} == {1.0}
