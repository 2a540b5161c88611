"""Equal keys mean equal programs: what a hook may see is all in its key."""

import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks import world
from tests.cases import slow

TASK = world.World(seed=3)
SPECS = {spec["name"]: spec for spec in TASK.interface.to_list()}
HEAD = "import jax\nimport jax.numpy as jnp\n"
HOOK = "def mlp(x):\n  return x + {}\n"
PLANNED = HEAD + "PLAN = {'remeasure': %s}\n" + HOOK.format("0.1 * PLAN['remeasure']")
BEFORE = HEAD + "f = lambda: 0.1\ndef f():\n  return 0.2\n" + HOOK.format("f()")
AFTER = HEAD + "def f():\n  return 0.2\nf = lambda: 0.1\n" + HOOK.format("f()")
NOTED = (
  HEAD
  + "SEEN = []\ndef note(f):\n  SEEN.append(1)\n  return f\n{}"
  + HOOK.format("0.1 * len(SEEN)")
)
DECORATED = "@note\ndef other():\n  return 1\n"
DEFAULT = "def other(a=SEEN.append(1)):\n  return 1\n"
PAIRS = {
  "the value of PLAN": (PLANNED % "True", PLANNED % "False"),
  "the order of statement and function": (BEFORE, AFTER),
  "a decorator of a function beside it": (NOTED.format(""), NOTED.format(DECORATED)),
  "a default of a function beside it": (NOTED.format(""), NOTED.format(DEFAULT)),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["the value of PLAN", *slow(*[*PAIRS][1:])])
def test_what_changes_a_hook_changes_its_key(pair):
  pair = PAIRS[pair]
  keys = [candidate_source.hook_keys(source, SPECS)["mlp"] for source in pair]
  assert keys[0] != keys[1]
  # The same in one executor, which traces a known key only once.
  executor = LocalExecutor(TASK)
  default = TASK.interface.default_source()
  whole = [
    candidate_source.with_functions(source, default, replace=False) for source in pair
  ]
  both = [executor.trace(source).computation["mlp"] for source in whole]
  alone = [LocalExecutor(TASK).trace(source).computation["mlp"] for source in whole]
  assert both == alone
  assert both[0] != both[1]


def test_what_a_hook_cannot_see_is_not_in_its_key():
  plan = HEAD + "PLAN = {'remeasure': %s}\n" + HOOK.format("1")
  other = "def weights(x):\n  return 2 * x\n"
  base = candidate_source.hook_keys(plan % "True", SPECS)["mlp"]
  assert candidate_source.hook_keys(plan % "False", SPECS)["mlp"] == base
  assert candidate_source.hook_keys(plan % "True" + other, SPECS)["mlp"] == base
