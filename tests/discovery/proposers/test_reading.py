"""What a language model sends is read: cheap forms, and whatever stands around them."""

import json

import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.proposers import llm, prompt, reading
from mxjax.discovery.tasks import world
from tests.discovery.proposers import replies

TASK = world.World(seed=3)
SOURCE = TASK.interface.default_source()
FENCE = "`" * 3
EDIT = "def mlp(x):\n  return x + 0.5 * jnp.roll(x, 1)\n"
GOOD = json.dumps({"code": EDIT, "label": "a"})
TICKS = json.dumps(
  {"code": EDIT.replace("return", f"# {FENCE}\n  return"), "label": "a"}
)
DRAFT = json.dumps({"code": "def mlp(x):\n  return 0 * x\n", "label": "draft"})
SHAPES = {
  "bare": GOOD,
  "indented": json.dumps(json.loads(GOOD), indent=2),
  "thinking tags": f"<think>hm {{x}}</think>\n{GOOD}",
  "thinking without its beginning": f"hm {GOOD[:9]}</think>\n{GOOD}",
  "thinking with code": f"<think>{FENCE}python\nx\n{FENCE}</think>\n{FENCE}json\n{GOOD}"
  f"\n{FENCE}",
  "code fence first": f"{FENCE}python\nx\n{FENCE}\n{FENCE}json\n{GOOD}\n{FENCE}",
  "upper case": f"{FENCE}JSON\n{GOOD}\n{FENCE}",
  "code fence without a language": f"{FENCE}\n{GOOD}\n{FENCE}",
  "fence of four": f"{FENCE}`json\n{GOOD}\n{FENCE}`",
  "fence of tildes": f"~~~json\n{GOOD}\n~~~",
  "fence that does not close": f"{FENCE}json\n{GOOD}",
  "fence on one line": f"{FENCE}json {GOOD}{FENCE}",
  "carriage returns": f"Here it is:\r\n{FENCE}json\r\n{GOOD}\r\n{FENCE}\r\n",
  "prose before": f"Here it is:\n{GOOD}",
  "prose after": f"{GOOD}\nHope this helps!",
  "byte order mark": "\ufeff" + GOOD,
  "fence inside the source": f"Answer:\n{FENCE}json\n{TICKS}\n{FENCE}",
  "nulls": json.dumps(
    {"code": EDIT, "label": "a", "explanations": None, "residual": None, "plan": None}
  ),
  "another object first": f'{{"a": 1}} and then {GOOD}',
  "a draft first": f"{DRAFT}\nThis is better:\n{GOOD}",
  "the same twice": f"{GOOD}\n{GOOD}",
  "in a list": f"[{GOOD}]",
  "one brace too many": GOOD + "}",
  "answer tags": f"<answer>{GOOD}</answer>",
  "tags of a tool call": f"<tool_call>{GOOD}</tool_call>",
  "marks of channels": f"<|channel|>analysis<|message|>hm<|end|>"
  f"<|channel|>final<|message|>{GOOD}",
  "mark of the end": f"{GOOD}<|im_end|>",
  "line breaks inside a string": '{"label": "a", "code": "' + EDIT + '"}',
  "code in a fence after it": f'{{"label": "a"}}\n{FENCE}python\n{EDIT}{FENCE}',
  "a trailing comma": GOOD[:-1] + ",}",
  "trailing commas": '{"declared": ["mlp" , ], "label": "a",\n "code": '
  + f"{json.dumps(EDIT)} ,\n}}\nthat is all, }}",
  "a wrapper": f'{{"answer": {GOOD}}}',
  "wrappers, and members beside it": f'{{"sure": 1, "a": {{"b": {GOOD}, "c": {{}}}}}}',
  "a wrapper with a trailing comma": f'{{"answer": {GOOD},}}',
  "code in a fence before it": f'{FENCE}py\n{EDIT}{FENCE}\n{{"label": "a"}}',
}


def proposal(text):
  return llm.read(text).proposal(SOURCE, TASK.interface, {"calls": 1})


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_an_answer_is_read_in_every_shape(text):
  made = proposal(text)
  assert made.label == "a"
  assert admit(made.source, TASK.interface).hooks["mlp"].endswith("jnp.roll(x, 1)")


def test_a_fence_may_hold_constants_alone():
  told = lambda name, body: proposal(
    f'{{"label": "a"}}\n{FENCE}{name}\n{body}\n{FENCE}'
  )
  assert "DEPTH = 3" in told("python", "DEPTH = 3").source
  # What binds nothing, such as an example of a call, is no code, and neither is what
  # may be a formula.
  for fence in (("python", "mlp(x) == 3"), ("", "DEPTH = 3")):
    with pytest.raises(ValueError, match="got none"):
      told(*fence)


WHOLE = (
  "thinking tags",
  "thinking with code",
  "code fence first",
  "upper case",
  "prose before",
  "prose after",
  "byte order mark",
  "fence inside the source",
  "nulls",
)
"""Shapes of which the answer is a part that another one can stand for."""


@pytest.mark.parametrize("shape", WHOLE)
def test_a_whole_module_is_read_in_every_shape(shape):
  answer = {"source": f"{SOURCE}# {FENCE}\nA = 1\n", "label": "a", "explanations": None}
  text = SHAPES[shape]
  inside = next(one for one in (TICKS, GOOD, text) if one in text)
  made = proposal(text.replace(inside, json.dumps(answer)))
  assert (made.source, made.label) == (answer["source"], "a")


def test_changed_hooks_and_plan_entries_are_merged_into_the_parent():
  parent = SOURCE.replace(
    "def weights(x):\n  return x", "def weights(x):\n  return 2 * x"
  )
  answer = llm.read(json.dumps({"code": EDIT, "plan": {"remeasure": True}}))
  made = answer.proposal(parent, TASK.interface, {"calls": 1})
  program = admit(made.source, TASK.interface)
  assert program.plan == {"remeasure": True}
  assert "2 * x" in program.hooks["weights"]
  assert "jnp.roll" in program.hooks["mlp"]
  assert made.declared == ("mlp", "remeasure"), "what differs is declared"
  assert "-  return x\n+  return x + 0.5" in candidate_source.diff(parent, made.source)
  assert "weights" not in candidate_source.diff(parent, made.source), "the rest stays"
  whole = llm.read(json.dumps({"source": SOURCE + "A = 1\n", "declared": ["mlp"]}))
  assert whole.proposal(SOURCE, TASK.interface, {}).declared == ("mlp",)


USING = SOURCE.replace("def mlp(x):\n  return x", "def mlp(x):\n  return inner(x)")
HELPERS = "\n\nSIZE = 2.0\n\n\ndef inner(x):\n  return outer(x)\n\n\n"
HELPERS += "def outer(x):\n  return SIZE * x\n"


@pytest.mark.parametrize("declared", [[], ["outer"], ["inner", "mlp"]])
@pytest.mark.parametrize("code", ["def outer(x):\n  return x\n", "SIZE = 3.0\n"])
def test_a_helper_stands_for_the_hooks_that_use_it(code, declared):
  """A demand is answered by hooks, and what a helper changes are those that call it."""
  answer = llm.read(json.dumps({"code": code, "declared": declared}))
  made = answer.proposal(USING + HELPERS, TASK.interface, {})
  assert made.declared == ("mlp",)
  unused = llm.read(json.dumps({"code": "def idle(x):\n  return x\n"}))
  assert unused.proposal(USING + HELPERS, TASK.interface, {}).declared == ()
  assert (
    "Where you change a helper or a\n  constant alone, write its name" in prompt.ANSWER
  )


WRONG = {
  "no JSON": ("Sorry, I cannot.", "expected one JSON object"),
  "torn": (GOOD[:-5], "got text that is no JSON"),
  "a comma, and no field of ours": ('{"answer": 1,}', "got one with answer"),
  "no field of ours": ('{"answer": 1}', "got one with answer"),
  "two inside one": (f'{{"one": {GOOD}, "two": {GOOD}}}', "got 2 inside of others"),
  "two inside two": (f'{{"one": {GOOD}}} {{"one": {GOOD}}}', "got 2 inside of others"),
  "two commas": (GOOD[:-1] + ",,}", "got text that is no JSON"),
  "a comma alone": ('{"label": "a", "code": "", "plan": {,}}', "that is no JSON"),
  "an unknown field": ('{"code": "x", "colour": 1}', "colour: Extra inputs"),
  "a wrong symbol": (
    json.dumps(
      {"code": EDIT, "explanations": [replies.account("a", primary={"loss": "less"})]}
    ),
    "explanations.0.predictions.primary.loss",
  ),
  "no change": ('{"label": "a"}', "expected `code`"),
  "both forms": (json.dumps({"code": EDIT, "source": SOURCE}), "got both"),
  "an unknown plan key": ('{"plan": {"colour": 1}}', "got colour"),
  "code that does not parse": ('{"code": "def mlp(x:"}', "does not parse"),
  "too deep": ('{"label": ' + "[" * 9999, "nested too deep"),
  "too long": ("x" * (reading.MAX_ANSWER + 1), "at most"),
  "a long label": (json.dumps({"code": EDIT, "label": "x" * 999}), "label: "),
  "many names": (json.dumps({"code": EDIT, "declared": ["x"] * 99}), "declared: "),
}


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG)
def test_what_is_no_answer_is_said_in_a_sentence(text, told):
  with pytest.raises(ValueError) as caught:
    proposal(text)
  assert told in str(caught.value)
  assert "pydantic" not in str(caught.value)
  assert len(str(caught.value)) < 1000


def test_what_a_model_says_of_the_cost_of_a_control_is_not_kept():
  control = {"name": "c", "intervention": {"kind": "permute"}, "cost": 99}
  made = proposal(json.dumps({"code": EDIT, "controls": [control]}))
  assert made.controls[0].cost == 1
