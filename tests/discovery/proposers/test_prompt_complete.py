"""A prompt explains everything that a model needs to act: of every task, all of it."""

import dataclasses
import json
import re

import pytest

from mxjax.discovery.core import candidate_source, interventions, proposal, store
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import Budget, Step
from mxjax.discovery.core.residual import FATES, SYMBOLS, Residual
from mxjax.discovery.core.verdict import Response
from mxjax.discovery.proposers import llm, prompt
from mxjax.discovery.sandbox import artifact, frames, tracing
from mxjax.discovery.search import frontier
from mxjax.discovery.tasks import world
from mxjax.discovery.tasks.ptq import task as ptq
from tests.cases import slow
from tests.discovery import searching
from tests.discovery.proposers import test_llm
from tests.discovery.proposers import test_prompt as told_
from tests.discovery.tasks import test_own_tasks as own

MARGINS = {name: 0.01 for name in ptq.OBSERVABLES if not name.startswith("layer")}
OPTIONS = {"calibration": [8, 32], "windows": [2, 32], "margins": MARGINS}


@pytest.fixture(params=["world", "lucky world", "ptq", "one code", "two files"])
def task(request, tmp_path):
  if request.param in ("ptq", "one code"):
    rule = "program" if request.param == "ptq" else "one_code"
    return ptq.PtqTask(model="random:0", activation_rule=rule, **OPTIONS)
  if request.param == "two files":
    return task_.load({"task": str(own.write(tmp_path / "mine"))})
  return world.World(seed=3, luck=0.5 if "lucky" in request.param else 0.0)


def calibrated(rule):
  """A `ptq` task in which nearly everything moves beyond its margin and is open."""
  initial: dict[str, float] = dict.fromkeys(ptq.RESIDUALS, 1e-9)
  return ptq.PtqTask(
    model="random:0",
    calibration=[8, 32],
    windows=[2, 32],
    activation_rule=rule,
    margins={"log_ppl": 1e-6, "weight_error": 1e-9, "operator_error": 1e-9},
    initial=initial,
  )


def text(task, evidence="verdict", **changes):
  parent = dataclasses.replace(
    told_.record("p"),
    source=task.interface.default_source(),
    plan=task.interface.default_plan,
    values={task.target: 3.0, **dict.fromkeys(task.margins, 0.5)},
  )
  given = {"parent": parent, "target": task.target, "champion": parent}
  given |= {"history": (), "donors": (), "demands": (), **changes}
  asked = told_.context(evidence, **given)
  return "\n".join(m["content"] for m in prompt.messages(asked, task))


def test_every_hook_is_explained(task):
  shown = text(task)
  for hook in task.interface.hooks:
    assert f"- {hook.signature};" in shown, "arguments and results, shapes and dtypes"
    alike = re.search(
      rf"^- {re.escape(hook.signature)}; the same as (\w+)$", shown, re.M
    )
    first = task.interface.hook(alike[1] if alike else hook.name)
    assert f"{first.doc}\nDefault:\n{first.default.strip()}" in shown
    as_first = lambda words, own=hook, one=first: words.replace(own.name, one.name)
    assert as_first(hook.doc) == first.doc
    assert as_first(hook.default) == first.default
    if hook.active_when is not None:
      key, values = hook.active_when
      assert f"called if PLAN {key} is {' or '.join(map(repr, values))}" in shown
    for tree in hook.arguments.values():
      for name in tree if isinstance(tree, dict) else ():
        assert f'"{name}": float64' in shown, "keys of statistics"
  for size in task.interface.sizes:
    assert all(f"{name} {value}" in shown for name, value in size.items())
  assert task.interface.header.strip() in shown, "helpers that defaults use"


def test_every_plan_key_and_its_values_are_explained(task):
  shown = text(task)
  for key, values in task.interface.plan.items():
    assert re.search(
      rf"^- {key}: {re.escape(' | '.join(map(repr, values)))}", shown, re.M
    )
    assert task.interface.plan_docs[key] in shown


def test_every_intervention_is_there_with_its_exact_json(task):
  known = interventions.of_task(task.interface, task.interventions)
  shown = text(task)
  for form in known.values():
    assert f"  {json.dumps(form.example)} {form.doc}" in shown
    for name, value in form.values.items():
      if value.one_of == task.interface.names:
        told = "a list of one of the hooks" if value.several else "one of the hooks"
      elif {*value.one_of} == {*task.interface.names, *task.interface.plan}:
        told = "a list of hooks and PLAN keys"
      else:
        told = value.form
      assert f"`{name}` is {told}" in shown
  assert '"kind": "program"' in shown


def test_every_observable_has_a_meaning_and_every_margin_is_told(task):
  shown = text(task)
  for name, margin in task.margins.items():
    meaning = prompt._meaning(name, task)
    assert meaning
    told = rf"^- (.*, )?{name}(, .*)? \(margin {margin:.3g}\): {re.escape(meaning)}"
    assert re.search(told, shown, re.M)


def test_every_limit_is_told(task):
  shown = text(task)
  numbers = (
    candidate_source.MAX_BYTES,
    candidate_source.OPERATIONS,
    candidate_source.CONSTANT_BYTES,
  )
  assert all(f"{number} " in shown for number in numbers)
  assert f"{candidate_source.TRACE_SECONDS:g} s to trace" in shown
  assert f"{proposal.CALL_SECONDS:g} processor seconds (of one core)" in shown
  assert "and 120 processor seconds (of one core)" in text(task, call_seconds=120)


def test_the_free_proxy_is_told_where_it_may_be_asked(task):
  told = '- "ask": "all"' in text(task)
  assert told == (task.proxy() is not None)
  assert '- "ask"' not in text(task, asks=False)


def test_every_floor_and_every_price_is_told(task):
  shown = text(task)
  for name, floors in task.floors.items():
    if name in task.margins:
      told = f"its floor is {' or '.join(f'{floor:g}' for floor in floors)}"
      assert re.search(rf"^- (.*, )?{name}[, ].*; {re.escape(told)}$", shown, re.M)
  known = interventions.of_task(task.interface, task.interventions)
  for form in known.values():
    (line,) = (li for li in shown.splitlines() if json.dumps(form.example) in li)
    assert re.search(r"; \d+ calls?(, the parent's run included.*)?$", line)
  ours = prompt.ANOTHER_PART.format(target=task.target)
  assert all(told in shown for told in (*task.rivals_told, ours))


def test_other_text_is_told_with_its_price_for_both_programs():
  task = ptq.PtqTask(model="random:0", **OPTIONS, other_windows=[8, 32])
  shown = text(task)
  assert task.price({"kind": "other_text"}) == 4
  assert "; 8 calls, the parent's run included" in shown
  assert "`luck of this text` (8 calls" in shown
  assert "but for other_text" in shown
  margins = {name: 0.01 for name in MARGINS if name != "other_text"}
  assert "other_text" not in text(
    ptq.PtqTask(model="random:0", **{**OPTIONS, "margins": margins})
  )


def test_what_may_be_asked_about_is_listed():
  task = world.World(seed=3)
  first = told_.demand(about=("excess_mlp",))
  other = Residual("p", "excess_balance", 0.9, 0.5)
  shown = text(task, demands=(first,), checked=first, residuals=(other,))
  listed = shown.partition('Open to a question now, as "residual":\n')[2]
  assert listed.partition("\n\n")[0].splitlines() == [
    "- excess_mlp = 0.5; a demand is about it",
    "- excess_balance = 0.9 (open above 0.5; seen to be moved by nothing yet)",
  ]
  assert 'leave "residual" null' in text(task, residuals=())


def test_what_is_open_to_a_question_is_defined_once_and_listed_once():
  """A list of open residuals that is empty must not stand beside one that is not."""
  task = world.World(seed=3)
  first = told_.demand(about=("excess_mlp",))
  for demands, residuals in (((first,), ()), ((), ()), ((first,), (told_.RESIDUAL,))):
    shown = text(task, demands=demands, checked=first, residuals=residuals)
    rule = "An observable is open to a question while it is above its threshold on"
    assert " ".join(shown.split()).count(rule) == 1
    assert "Open residuals" not in shown
    assert shown.count("pen to a question now") == 1
    assert shown.count("\n- excess_mlp = ") == bool(demands)


def test_edits_of_several_parts_credit_none_of_them():
  residual = Residual("p", "excess_mlp", 0.9, 0.5)
  joint = {"excess_mlp": (("geometry", "mlp"),)}
  shown = text(world.World(seed=3), residuals=(residual,), joint_scopes=joint)
  told = "edits of several parts, of which nobody knows which did it: geometry + mlp"
  assert f"seen to be moved by {told})" in shown


def test_the_parent_comes_with_the_reason_why_it_is_revised_and_its_seconds():
  task = world.World(seed=3)
  seconds = {"compiling": 5.25, "geometry": 7.0, "the rest": 0.0951}
  shown = text(task, why="it is the best program", seconds=seconds)
  assert "It is revised now because it is the best program." in shown
  told = "12.3 processor seconds: geometry 7, compiling 5.25, the rest 0.0951."
  assert f"Its call took {told}" in shown
  assert "Its call took" not in text(task)
  assert not task.tells_seconds, "a replay of its prompts would differ"
  assert ptq.PtqTask.tells_seconds


def test_references_stand_beside_the_parents_value():
  known = {"the float model": 2.5, "gptq with only activations rounded": 2.75}
  task = ptq.PtqTask(model="random:0", **OPTIONS, references=known)
  told = "For comparison, log_ppl is 0.5 now; it is 2.5 for the float model, 2.75 for "
  assert told + "gptq with only activations rounded." in text(task)
  assert "For comparison" not in text(task, "score")


def test_a_prompt_of_the_ptq_task_says_how_many_tokens_a_call_scores():
  shown = text(ptq.PtqTask(model="random:0", **OPTIONS))
  assert "fitted on 8 calibration sequences of 32 tokens" in shown
  assert "scores 64 tokens of another text, in 2 windows of 32" in shown
  assert "code 8 is minus zero and decodes like code 0" in shown
  assert "under jax.vmap, however many it maps over" in shown


def test_a_hook_that_a_task_freezes_is_in_no_word_of_its_prompt():
  """A model wrote one all the same, because the example and the documents named it."""
  frozen = ptq.PtqTask(model="random:0", activation_rule="one_code", **OPTIONS)
  assert "encode_act" not in text(frozen)
  assert ptq.ONE_CODE in text(frozen)
  assert "encode_act" in text(ptq.PtqTask(model="random:0", **OPTIONS))


@pytest.mark.slow
@pytest.mark.parametrize("in_control", [False, True])
def test_a_function_named_as_a_frozen_hook_is_sent_back(tmp_path, in_control):
  task = calibrated("one_code")
  own = "\n\ndef encode_act(block, gram, cross):\n  return chosen(block)\n"
  bad = dict(task.example)
  if in_control:
    control = {**bad["controls"][0], "intervention": {"kind": "program", "code": own}}
    bad["controls"] = [control]
  else:
    bad["code"] += own
  model = test_llm.Model(json.dumps(bad), json.dumps(task.example))
  searching.run(tmp_path, task, llm.LlmProposer(model, task), budget=2, mark_every=2)
  (told,) = model.told[1:2]
  assert "encode_act is no hook of this task and would never be called" in told


def test_long_tables_name_their_columns_once():
  layers = range(12)
  parts = {
    f"layers_{i}/mlp/{n}": 0.01 * (i + 1) for i in layers for n in ("up", "down")
  }
  shown = prompt._grid(parts)
  assert shown.splitlines()[0] == "  in units of 0.01: up down"
  assert shown.splitlines()[3] == "  layers_2: 3 3"
  assert shown.splitlines()[-1] == "  layers_11: 12 12", "in the order of the layers"
  values = {**{f"layer_{i}": 0.5 + i for i in layers}, "kl": 0.25}
  assert prompt._measured(values).startswith("kl 0.25, layer_0 to layer_11: 0.5 1.5 ")
  changes = {"kl": -0.25, **{f"layer_{i}": 0.1 * i for i in layers}}
  (told,) = prompt._changes(values, changes)
  assert told == "layer_0 to layer_11 from +0 (layer_0) to +1.1 (layer_11)"


@pytest.mark.parametrize("name", ["world", "lucky world", *slow("ptq", "one code")])
def test_the_example_answer_is_a_whole_experiment(name, tmp_path):
  """Sent back as the first answer, it is accepted, runs, and has a verdict."""
  task = world.World(seed=3, luck=0.5 if name == "lucky world" else 0.0)
  if "world" not in name:
    task = calibrated("program" if name == "ptq" else "one_code")
  example = json.dumps(task.example)
  assert example in text(task)
  model = test_llm.Model(example)
  proposer = llm.LlmProposer(model, task)
  searching.run(tmp_path, task, proposer, budget=6, mark_every=6)
  events = store.read_events(tmp_path)
  of = lambda kind: [e for e in events if e["event"] == kind]
  assert not of("refused") and not of("reduced")
  assert {e["status"] for e in of("outcome")} == {"ok"}
  assert len(of("verdict")) == 1


def test_the_contract_and_the_rules_of_a_question_are_told(task):
  shown = text(task)
  assert task.description in shown
  assert all(word in shown for word in (*SYMBOLS, *FATES))
  for rule in (
    "two accounts or more",
    "agree about `primary`",
    "Only observables with a margin",
    "one failed prediction removes",
  ):
    assert rule in " ".join(shown.split())
  assert "residual" not in text(task, "score").split("Target to lower")[0]


def test_lost_gone_and_reversed_are_told_as_shares_of_the_edit(task):
  shown = " ".join(text(task).split())
  for rule in (
    "lost - it is worse under the control than in your program by more than its margin",
    "gone - at most a margin of your change from the parent is left (lost, too)",
    "reversed - it is worse than in the PARENT by more than its margin (gone and lost",
    "Two parts may each have a share",
  ):
    assert rule in shown
  again = [kind for kind, each in task.interventions.items() if each.elsewhere]
  told = f"{' and '.join(again)} takes nothing away and measures your change a second"
  assert (told in shown) == bool(again)
  assert "more than half of it; half or less" not in shown


def test_an_answer_may_be_that_no_edit_is_left(task):
  for evidence in ("verdict", "score"):
    shown = " ".join(text(task, evidence).split())
    assert '- "finished": true, with a "note" that says why' in shown


def test_a_control_of_kind_program_takes_away_or_puts_in(task):
  shown = " ".join(text(task).split())
  assert "A control of kind `program` has either `without`, or else `code`" in shown
  assert "may replace a helper alone" in shown


def test_a_repair_may_bring_a_new_account_and_ask_about_another_residual(task):
  one = told_.demand(Response.REPAIR_EXPLANATION)
  shown = " ".join(text(task, demands=(one,), checked=one).split())
  assert "one that it left standing, or a new one" in shown
  told = "question of the same answer may be about any observable that is open to one"
  assert told in shown


def test_the_contract_names_format_scales_and_blocks():
  shown = ptq.DESCRIPTION
  assert all(word in shown for word in ("E2M1", "E8M0", "32", "x' = T x"))
  assert "Weights are rounded once" in shown
  assert "activations are rounded at run time" in shown


def test_what_is_left_is_told_exactly_and_only_where_there_is_a_limit():
  task = world.World(seed=3)
  budget = Budget(calls_left=18, calls=30)
  assert "18 of 30 evaluator calls are left." in text(task, budget=budget)
  metered = dataclasses.replace(budget, tokens_left=1200, dollars_left=1.5)
  assert "left, 1200 of your tokens, 1.50 dollars." in text(task, budget=metered)


def test_a_single_successor_is_told_its_one_call_and_what_becomes_of_its_question():
  task = world.World(seed=3)
  budget = Budget(calls_left=1, calls=1, is_single=True)
  told = "1 evaluator call is left, for your program as it is."
  asked = "A question is asked all the same, although so few are left,"
  assert f"{told} {asked}" in text(task, budget=budget)
  plain = text(task, "text", budget=budget)
  assert told in plain and asked not in plain


def test_an_edit_of_two_parts_is_asked_by_an_ablation(task):
  shown = " ".join(text(task).split())
  assert "An edit of two parts is asked by an ablation: a control of kind" in shown
  known = interventions.of_task(task.interface, task.interventions)
  assert known["program"].tells
  for form in known.values():
    assert (f"; it tells {form.tells}; " in shown) == bool(form.tells)


def test_every_control_of_the_ptq_task_says_what_it_tells_apart():
  assert all(form.tells for form in ptq.interventions.INTERVENTIONS.values())
  example = ptq.EXAMPLE
  (control,) = example["controls"]
  assert control["intervention"] == {"kind": "program", "without": ["encode_act"]}
  assert example["declared"] == ["encode_weight", "encode_act"], "an edit of two parts"
  fates = [e["predictions"][control["name"]] for e in example["explanations"]]
  assert fates == [{"operator_error": "lost"}, {"operator_error": "kept"}]


def test_values_come_by_layer_and_by_linear_where_an_arm_may_see_them():
  task = world.World(seed=3)
  parts = {"operator_error": {"layer_0/mlp/up": 0.125, "layer_0/mlp/down": 0.25}}
  parent = dataclasses.replace(told_.record("p"), parts=parts)
  rows = "operator_error part by part:\n  layer_0: up 0.125, down 0.25"
  assert rows in text(task, parent=parent)
  assert "part by part" not in text(task, "score", parent=parent)


def test_residuals_come_with_what_has_moved_them_and_the_focus_is_named():
  task = world.World(seed=3)
  residual = Residual("p", "excess_mlp", 0.9, 0.5)
  scopes = {"excess_mlp": ("mlp", "weights")}
  shown = text(task, residuals=(residual,), scopes=scopes, focus=residual)
  told = "excess_mlp = 0.9 (open above 0.5; seen to be moved by mlp, weights)"
  assert f"This round is about {told}." in shown
  assert f"- {told}" in shown


def test_one_demand_is_checked_and_says_where_and_by_how_much():
  first = told_.demand(about=("excess_mlp",), packet="1")
  later = told_.demand(about=("loss",), packet="2", label="another")
  task = world.World(seed=3)
  shown = text(task, demands=(later, first), checked=first)
  assert "Required response, checked on this answer: extend" in shown
  assert "must move excess_mlp beyond its margin" in shown
  assert "Owed later: extend, because another was supported on excess_mlp." in shown
  assert shown.count(prompt.RESPONSES[Response.EXTEND]) == 1, "one is told in full"
  assert shown.index("checked on this answer") < shown.index("Owed later")


def test_the_lineage_is_short_and_no_donor_brings_its_source():
  task = world.World(seed=3)
  donors = (told_.record("donor", 2.75, "# a donor's source\n"),)
  steps = (
    Step("start", "the start", 3.0),
    Step("champion", "a roll at mlp", 2.5, ("mlp",)),
  )
  best = told_.record("champion", 2.5, "# the champion's source\n")
  asked = told_.context(donors=donors, lineage=steps, champion=best)
  shown = prompt.messages(asked, task)[1]["content"]
  assert "champion loss 2.5: a roll at mlp (changed mlp)" in shown
  assert "# the champion's source" in shown
  assert "Also retained: donor loss 2.75" in shown
  assert "# a donor's source" not in shown


def test_a_task_without_words_is_refused_by_name(tmp_path):
  folder = own.write(tmp_path / "mine")
  path = folder / "evaluate.py"
  path.write_text(
    path.read_text().replace('"doc"', '"dock"').replace("DESCRIPTION", "D")
  )
  with pytest.raises(ValueError) as caught:
    prompt.check_described(task_.load({"task": str(folder)}))
  for part in (
    "a description",
    "the doc of the hook clean",
    "DESCRIPTION, OBSERVABLES",
  ):
    assert part in str(caught.value)


def test_a_first_round_of_the_ptq_task_is_about_the_error_of_both_operands():
  """At the start every observable is as much as the initial program has of it."""
  initial = dict.fromkeys(ptq.RESIDUALS, 0.5)
  task = ptq.PtqTask(model="random:0", **OPTIONS, initial=initial)
  opened = frontier.ResidualFrontier(task.margins)
  opened.open(task.residuals("p", initial))
  first, *others = opened.actionable("p")
  assert first.observable == "operator_error"
  assert {r.observable for r in others} == {*ptq.RESIDUALS} - {"operator_error"}
  # A part that stays behind comes first.
  values = {**initial, "operator_error": 0.3}
  opened.open(task.residuals("q", values))
  assert opened.actionable("q")[0].observable != "operator_error"


def test_the_ptq_task_says_what_codes_an_activation_error_is_measured_with():
  shown = text(ptq.PtqTask(model="random:0", **OPTIONS))
  assert "the program's activation codes beside the FLOAT weights" in shown
  assert "may raise this, so it is no goal of its own" in shown
  assert "before any error is carried into them" in shown


def test_the_ptq_task_says_what_either_cross_holds_and_leaves_out():
  shown = text(ptq.PtqTask(model="random:0", **OPTIONS))
  for told in (
    "Plan realized: gram = W^'W^ and cross = W^'(W - W^), summed over rows: the term "
    "c = b alone. It leaves out that later weights have made up for the errors",
    "Plan expected: the same gram, and cross = W^' (sum over c of D_c H_cb) inv(H_bb)",
    "A linear has 2 of its blocks there, so hardly any weight error is made good by",
  ):
    assert told in shown
  assert "'realized' | 'float' | 'measured' | 'expected'" in shown


def test_the_units_of_a_call_are_those_of_the_models_weights():
  task = ptq.PtqTask(model="random:0", **OPTIONS)
  model, params = task.options.load()
  weights = [
    params[model.layer_name(index)][block][name]["weight"].shape
    for index in range(model.num_layers)
    for block, name in model.projection_taps
  ]
  plan = {**task.interface.default_plan, "passes": 3, "arrange": "mlp"}
  counted = task.units(plan)
  assert {*counted} == {*task.interface.names}
  assert counted["encode_weight"] == sum(rows * width // 32 for rows, width in weights)
  assert counted["encode_linear"] == sum(rows for rows, _ in weights)
  blocks = sum(width // 32 for _, width in weights)
  assert counted["transform"] == blocks
  assert counted["solve"] == 3 * blocks
  assert counted["measure_inputs"] == 3 * blocks * 8 * 32 // 32
  assert counted["encode_act"] == blocks * (2 * 32 + 32)
  shown = text(task)
  told = "Units on which a call of the parent runs each hook: encode_weight "
  assert (
    f"{told}{counted['encode_weight']}, encode_act {counted['encode_act']}." in shown
  )
  assert "down_proj 64" in task.description and "gate_proj 96" in task.description
  assert "Units on which" not in text(world.World(seed=3))


LINEAR_ALGEBRA = {
  "eigh": "jnp.linalg.eigh(A)[1]",
  "qr": "jnp.linalg.qr(A)[0]",
  "cholesky": "jnp.linalg.cholesky(A)",
  "svd": "jnp.linalg.svd(A)[0]",
  "inv": "jnp.linalg.inv(A)",
  "solve": "jnp.linalg.solve(A, A)",
  "pinv": "jnp.linalg.pinv(A)",
  "jax.scipy.linalg": "jax.scipy.linalg.solve_triangular(A, A)",
  "triangular_solve": "jax.lax.linalg.triangular_solve(A, A, left_side=True)",
}


def traced(expression):
  hook = ptq.INTERFACE.hook("transform").to_dict()
  body = "\n\ndef transform(stats):\n  A = stats['activation'] + jnp.eye(32)\n"
  source = f"{ptq.INTERFACE.header}{body}  return {expression}\n"
  candidate_source.admit(source, ptq.INTERFACE)
  (unit,) = tracing.trace(source, [hook])
  return artifact.gate(hook, frames.pack(unit.units))


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_what_is_told_to_work_is_admitted(name):
  assert traced(LINEAR_ALGEBRA[name])
  assert name in prompt.INTRODUCTION


def test_what_is_told_to_be_refused_is():
  with pytest.raises(ValueError, match="complex"):
    traced("jnp.linalg.eig(A)[0].real * A")
  with pytest.raises(ValueError, match=r"import of jax\.scipy"):
    candidate_source.admit("import jax.scipy\n", ptq.INTERFACE)
