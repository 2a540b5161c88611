"""Admission by syntax, source edits, and identities of lowered programs."""

import functools

import pytest

from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.interface import Aval, Hook, Interface
from mxjax.discovery.core.task import Status
from mxjax.discovery.sandbox import artifact, frames, jail, supervisor, tracing
from mxjax.discovery.tasks import world
from tests import refusals

ROW = Aval("float32", (32,))
RTN = """
GRID = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)


def encode(x):
  peak = jnp.max(jnp.abs(x))
  exponent = jnp.floor(jnp.log2(jnp.where(peak > 0, peak, 1.0))) - 2
  scaled = jnp.abs(x) / jnp.exp2(exponent)
  middle = (GRID[1:] + GRID[:-1]) / 2
  code = jnp.sum(scaled[:, None] >= middle[None], -1).astype(jnp.uint8)
  return code, (exponent + 127).astype(jnp.uint8)
"""
INTERFACE = Interface(
  hooks=(
    Hook(
      name="encode",
      arguments={"x": ROW},
      outputs=(Aval("uint8", (32,)), Aval("uint8", ())),
      batched=("x",),
      default=RTN,
    ),
  ),
  plan={"stage": ("off", "on"), "count": (1, 2)},
)
BASE = INTERFACE.default_source()
HEADER = "import jax\nimport jax.numpy as jnp\nimport numpy as np\n"


def lowered(source):
  (traced,) = tracing.trace(HEADER + source, INTERFACE.to_list())
  return artifact.gate(INTERFACE.hook("encode").to_dict(), frames.pack(traced.units))


RENAMED = (
  RTN.replace("peak", "largest")
  .replace("middle", "edge")
  .replace("  scaled", "  # a comment\n  scaled")
)
DEAD = RTN.replace("  scaled =", "  unused = jnp.linalg.norm(x) * 3\n  scaled =")
OFF_FLAG = RTN.replace("encode(x)", "encode(x, use_new=False)").replace(
  "  peak", "  if use_new:\n    x = x * 1.1\n  peak"
)
TIMES_ONE = RTN.replace("  peak =", "  x = x * 1.0\n  peak =")
PERMUTED = RTN.replace("  peak =", "  p = np.arange(32)[::-1]\n  x = x[p][p]\n  peak =")
PLUS_ZERO = RTN.replace("  peak =", "  x = x + 0.0 * jnp.sum(x)\n  peak =")
GENUINE = RTN.replace("  scaled = jnp.abs(x)", "  scaled = 0.9 * jnp.abs(x)")


@pytest.mark.parametrize(
  ("edit", "is_same"),
  [
    (RENAMED, True),
    (DEAD, True),
    (OFF_FLAG, True),
    (TIMES_ONE, False),
    (PERMUTED, False),
    (PLUS_ZERO, False),
    (GENUINE, False),
  ],
  ids=["renamed", "dead", "off-flag", "times-one", "permuted", "plus-zero", "genuine"],
)
def test_the_lowered_identity_sees_through_edits_without_effect(edit, is_same):
  assert edit != RTN
  assert (lowered(edit) == lowered(RTN)) == is_same


def test_helper_names_do_not_enter_the_identity():
  helper = "@jax.jit\ndef {name}(x):\n  return x * 2\n"
  use = RTN.replace("jnp.abs(x) / ", "{name}(jnp.abs(x)) / ")
  sources = [(helper + use).replace("{name}", name) for name in ("double", "twice")]
  assert lowered(sources[0]) == lowered(sources[1]) != lowered(RTN)


def test_comments_layout_and_docstrings_do_not_enter_the_source_identity():
  one = candidate_source.admit(BASE, INTERFACE)
  doc = BASE.replace("def encode(x):", 'def encode(x):\n  """Text."""  # note')
  assert candidate_source.admit(doc, INTERFACE).id == one.id
  other = candidate_source.admit(BASE.replace("- 2", "- 3"), INTERFACE)
  assert other.id != one.id


OUTSIDE = [
  "import os",
  "from jax import ffi",
  "from jax.numpy import *",
  "import jax.experimental.io_callback",
  "x = __import__('os')",
  "x = getattr(jax, 'ffi')",
  "x = ().__class__.__base__.__subclasses__()",
  "jnp.sum = None",
  "def f(x):\n  global y\n  y = x",
  "class A:\n  pass",
  "x = open('/etc/passwd')",
  "def f(x):\n  return jax.pure_callback(f, x, x)",
  "def f(x):\n  jax.debug.print('x')",
  "def f(x):\n  return jax.config.update('jax_enable_x64', False)",
  "print('hello')",
  "while True:\n  pass",
  "def f(x):\n  try:\n    return x\n  except ValueError:\n    return x",
  "def f(x):\n  return jnp.load('weights.npy')",
  "def encode(y):\n  return y",
  "PLAN = {'stage': 'sideways'}",
  "PLAN = {'count': True}",
  "PLAN = dict(stage='on')",
  "def broken(:",
  "x = 1" + " + 1" * 40_000,
]


def test_source_outside_the_policy_is_rejected_with_a_reason():
  refusals.check(
    [
      (
        functools.partial(candidate_source.admit, f"{HEADER}\n{code}\n", INTERFACE),
        "program: ",
      )
      for code in OUTSIDE
    ],
    candidate_source.RejectedError,
  )


def test_edits_replace_functions_and_plan_values_and_nothing_else():
  edited = candidate_source.with_functions(
    BASE, "import math\ndef encode(x):\n  return x\n"
  )
  edited = candidate_source.with_plan(edited, {"stage": "on"})
  admitted = candidate_source.admit(edited, INTERFACE)
  assert admitted.plan == {"stage": "on", "count": 1}
  assert admitted.hooks["encode"] == "def encode(x):\n    return x"
  assert "GRID" in edited
  assert "import math" in edited


@pytest.mark.parametrize(
  ("code", "complaint"),
  [
    ("def encode(x):\n  return x.astype(jnp.bfloat16), jnp.uint8(0)", "results"),
    ("def encode(x):\n  return x", "results"),
    (
      "BIG = np.random.RandomState(0).randn(900, 32).astype(np.float32)\n"
      "def encode(x):\n  c = (BIG @ x)[:32]\n"
      "  return c.astype(jnp.uint8), c[0].astype(jnp.uint8)",
      "constants",
    ),
    (
      "def encode(x):\n  for _ in range(500):\n    x = jnp.sin(x) + 1\n"
      "  return x.astype(jnp.uint8), x[0].astype(jnp.uint8)",
      "operations",
    ),
  ],
  ids=["dtype", "one-output", "constants", "unrolled"],
)
def test_the_gate_names_the_rule(code, complaint, monkeypatch):
  (traced,) = tracing.trace(
    f"{HEADER}\n{code}", [INTERFACE.hook("encode").to_dict() | {"batched": []}]
  )
  monkeypatch.setattr(artifact, "MAX_OPERATIONS", 400)
  with pytest.raises(artifact.RefusedError, match=complaint):
    artifact.gate(INTERFACE.hook("encode").to_dict(), frames.pack(traced.units))


def test_a_hook_that_traces_differently_each_time_fails():
  code = (
    "STATE = [0]\ndef encode(x):\n  STATE[0] += 1\n"
    "  return (x * STATE[0]).astype(jnp.uint8), jnp.uint8(0)"
  )
  with pytest.raises(ValueError, match="differently"):
    tracing.trace(f"{HEADER}\n{code}", INTERFACE.to_list())


@pytest.mark.skipif(jail.landlock_version() < 1, reason="no Landlock")
def test_34_damaged_artifacts_are_refused_and_the_gate_goes_on():
  """In a worker, as always: a damaged one may crash its reader or keep it for ever."""
  (traced,) = tracing.trace(HEADER + RTN, INTERFACE.to_list())
  spec, unit = INTERFACE.hook("encode").to_dict(), frames.pack(traced.units)
  limits = jail.Limits(seconds=10.0, memory_bytes=4 << 30, cpu_seconds=1 << 20)
  task = world.World(seed=3)
  worker = supervisor.RunWorker(task.spec, task.phases[0], [], "standard", limits)

  def gated(unit):
    return worker.gate([spec], {"encode": unit})

  whole = gated(unit)
  refusals = {Status.REFUSED, Status.CRASHED, Status.TIMEOUT, Status.MEMORY}
  seen = []
  try:
    for position in range(0, len(unit), len(unit) // 7):
      broken = bytearray(unit)
      broken[position] ^= 0x5A
      try:
        gated(bytes(broken))
      except supervisor.WorkerError as error:
        seen.append(error.status)
    assert seen
    assert set(seen) <= refusals
    for cut in (1, 100, len(unit) // 2):
      with pytest.raises(supervisor.WorkerError) as caught:
        gated(unit[:cut])
      assert caught.value.status == Status.REFUSED
    assert gated(unit) == whole
  finally:
    worker.close()
  with pytest.raises(artifact.RefusedError):
    artifact.load(b"", "encode")


def test_a_hook_is_traced_again_only_for_what_it_reaches():
  text = """
SIZE = {size}

def far(x):
  return x + {far}

def near(x):
  return far(x)

def other(x):
  return x + {other}

def geometry(x):
  return near(x)

def mlp(x):
  return other(x)
"""
  keys = lambda n=1, **changed: candidate_source.hook_keys(
    text.format(**{"size": 1, "far": 1, "other": 1, **changed}),
    dict.fromkeys(("geometry", "mlp"), {"sizes": [{"n": n}]}),
  )
  first, same = (
    keys(),
    lambda **changed: [
      name for name, key in keys(**changed).items() if key == keys()[name]
    ],
  )
  assert first["geometry"] != first["mlp"]
  assert same(far=2) == ["mlp"]
  assert same(other=2) == ["geometry"]
  assert same(size=2) == []
  assert same(n=2) == []


@pytest.mark.parametrize(
  "code",
  [
    "def mlp(x):\n  # why\n  return 2 * x\n",
    "import math\nHALF = 0.5\ndef helper(x):\n  return HALF * x\ndef mlp(x):\n"
    "  return helper(x)\n",
    "import functools\n@functools.cache\ndef helper():\n  return 2\n\n\ndef "
    "weights(x):\n  return helper() * x\ndef mlp(x): return x",
    "",
  ],
)
@pytest.mark.parametrize("plan", [{}, {"remeasure": True}])
@pytest.mark.parametrize("has_plan", [True, False])
def test_a_merged_text_executes_as_the_merged_tree(code, plan, has_plan):
  task = world.World(seed=3)
  source = "# a comment\n" + task.interface.default_source()
  if not has_plan:
    source = source.replace("PLAN = {\n  'remeasure': False,\n}\n", "")
  text = candidate_source.merged(source, code, plan)
  tree = candidate_source.with_functions(source, code)
  tree = candidate_source.with_plan(tree, plan) if plan else tree
  one, two = (candidate_source.admit(each, task.interface) for each in (text, tree))
  assert (one.plan, one.hooks) == (two.plan, two.hooks)
  assert text.startswith("# a comment\n")
  assert ("# why" in text) == ("# why" in code)


def test_functions_may_use_the_usual_modules_without_importing_them():
  task = world.World(seed=3)
  source = task.interface.default_source()
  code = "def mlp(x):\n  return math.sqrt(4) * np.float32(1) * lax.abs(x)\n"
  for whole in (
    candidate_source.merged(source, code, {}),
    candidate_source.with_functions(source, code),
  ):
    for line in ("import math", "import numpy as np", "from jax import lax"):
      assert line in whole.splitlines()
    assert "functools" not in whole, "nobody uses it"
    traced = tracing.trace(whole, task.interface.to_list())
    assert "mlp" in [hook.name for hook in traced]
    # What is bound already stays: nothing is imported twice, or over a helper.
    again = candidate_source.with_functions(whole, code.replace("4", "9"))
    assert again.count("import math") == 1
  own = candidate_source.merged("def np(x):\n  return x\n" + source, code, {})
  assert "numpy" not in own.replace("jax.numpy", "")


PLANS = {
  "in a tuple": "PLAN, X = {'remeasure': True}, 1\n",
  "by another name too": "X = PLAN = {'remeasure': True}\n",
  "changed": "PLAN = {'remeasure': False}\nX = [0]\nPLAN['remeasure'] = True\n",
  "twice": "PLAN = {'remeasure': False}\nPLAN = {'remeasure': True}\n",
  "in a hook": "PLAN = {'remeasure': False}\ndef mlp(x):\n  PLAN['remeasure'] = True\n"
  "  return x\n",
}


@pytest.mark.parametrize("source", PLANS.values(), ids=PLANS)
def test_a_plan_that_would_be_read_otherwise_is_refused(source):
  with pytest.raises(candidate_source.RejectedError, match="PLAN is"):
    candidate_source.admit(source, world.World(seed=3).interface)


@pytest.mark.parametrize("space", ["\u200b", "\xa0"])
def test_what_python_cannot_print_again_is_refused(space):
  source = f"X = f\"{{'a{space}b'}}\"\n"
  try:
    candidate_source.admit(source, world.World(seed=3).interface)
  except candidate_source.RejectedError as error:
    assert "does not parse" in str(error)
  else:
    candidate_source.with_functions(source, "def mlp(x):\n  return x\n")


def test_a_short_difference_names_the_place_and_repeats_nothing():
  before = "A = 1\n\ndef f(x):\n  y = x\n  return y\n\ndef g(x):\n  return x\n"
  after = before.replace("return y", "return 2 * y") + "\ndef h(x):\n  return x\n"
  assert candidate_source.diff(before, after) == (
    "@@ f\n-  return y\n+  return 2 * y\n@@ h\n+\n+def h(x):\n+  return x"
  )
  assert (
    candidate_source.diff(before, before.replace("  y = x\n", "")) == "@@ f\n-  y = x"
  )
  assert candidate_source.diff(before, before) == ""
  whole = candidate_source.diff(before, before.replace("= x", "= -x"), ("a", "b"))
  assert "@@ -2,5 +2,5 @@" in whole
