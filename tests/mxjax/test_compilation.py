"""Which options XLA compiles a build's functions with."""

import ast
import pathlib
import threading
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import compilation
from mxjax.devices import execution

ROOT = pathlib.Path(mxjax.__file__).parent
OF_A_BUILD = (
  *("audit", "calibration", "devices", "methods", "numerics", "run", "storage"),
  *("evaluation/measures", "evaluation/tasks"),
)
"""Folders whose functions run a few times for each layer."""
WITH_TRIALS = {"evaluation/measures/cost.py": "times the model as it is served"}
UNKNOWN = {"xla_there_is_no_such_option": True}


def bare(tree):
  """Lines that name `jax.jit`, or import it."""
  for node in ast.walk(tree):
    match node:
      case ast.Attribute(ast.Name("jax"), "jit" | "pjit"):
        yield node.lineno
      case ast.ImportFrom(module=str(module), names=names):
        if module.split(".")[0] == "jax" and {"jit", "pjit"} & {n.name for n in names}:
          yield node.lineno


@pytest.mark.parametrize("folder", OF_A_BUILD)
def test_no_function_of_a_build_is_compiled_with_trials(folder):
  paths = sorted((ROOT / folder).rglob("*.py"))
  assert paths
  found = [
    f"{path.relative_to(ROOT)}:{line}"
    for path in paths
    if path.relative_to(ROOT).as_posix() not in WITH_TRIALS
    for line in bare(ast.parse(path.read_text()))
  ]
  assert not found, "use compilation.jit or execution.jit"


@pytest.mark.parametrize(
  "text",
  [
    "f = jax.jit(g)",
    "@functools.partial(jax.jit)\ndef f(): ...",
    "from jax import jit",
  ],
)
def test_a_bare_jit_is_found(text):
  assert list(bare(ast.parse(text)))


def scaled(x, by=2):
  return x * by


@pytest.fixture
def refused_by_xla(monkeypatch):
  """A function of ours on what says it is a GPU, with an option that XLA refuses."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(compilation, "WITHOUT_TRIALS", UNKNOWN)
  return compilation.jit(static_argnames="by")(scaled)


def test_the_outermost_function_has_the_options(refused_by_xla):
  for call in (
    lambda x: refused_by_xla(x),
    lambda x: refused_by_xla.lower(x, by=3).compile(),
  ):
    with pytest.raises(Exception, match="xla_there_is_no_such_option"):
      call(jnp.ones(3))


WITHIN = {
  "jit": lambda f, x: jax.jit(lambda x: f(x, by=3))(x),
  "jit of constants": lambda f, x: jax.jit(lambda: f(np.ones(3, np.float32), by=3))(),
  "vmap": lambda f, x: jax.vmap(lambda x: f(x, by=3))(x[None])[0],
  "grad": lambda f, x: jax.grad(lambda x: jnp.sum(f(x, by=3)))(x),
  "scan": lambda f, x: jax.lax.scan(lambda c, x: (c, f(x, by=3)), 0, x)[1],
  "linearize": lambda f, x: jax.linearize(lambda x: f(x, by=3), x)[1](x),
}


@pytest.mark.parametrize("name", WITHIN)
def test_within_a_trace_there_are_no_options(refused_by_xla, name):
  assert np.array_equal(WITHIN[name](refused_by_xla, jnp.ones(3)), [3, 3, 3])


def test_a_function_of_ours_within_one_of_ours(refused_by_xla, monkeypatch):
  monkeypatch.setattr(compilation, "WITHOUT_TRIALS", {"xla_gpu_autotune_level": 0})
  outer = compilation.jit()(lambda x: refused_by_xla(x) + 1)
  assert np.array_equal(outer(jnp.ones(3)), [3, 3, 3])
  shape = jax.eval_shape(refused_by_xla, jnp.ones(3))
  assert shape.shape == (3,)


def test_a_cpu_compiles_as_jax_does(monkeypatch):
  monkeypatch.setattr(compilation, "WITHOUT_TRIALS", UNKNOWN)
  jitted = compilation.jit(static_argnames="by", donate_argnums=0)(scaled)
  assert jitted.__name__ == "scaled" and jitted.__wrapped__ is scaled
  x = jnp.ones(3)
  lowered = jitted.lower(x, by=5)
  assert lowered.as_text() == (
    jax.jit(scaled, static_argnames="by", donate_argnums=0).lower(x, by=5).as_text()
  )
  assert np.array_equal(jitted(x, by=5), [5, 5, 5])
  jitted.clear_cache()
  with pytest.raises(Exception, match="no_such_option"):
    compilation.jit(compiler_options=UNKNOWN)(scaled)(x)


def test_threads_that_call_first_share_one_function(monkeypatch):
  """From Python 3.12 on a cached property alone would make one for each."""
  start, asked = threading.Barrier(4), []

  def default_backend():
    asked.append("gpu")
    # Other threads run meanwhile.
    time.sleep(0.05)
    return "gpu"

  monkeypatch.setattr(jax, "default_backend", default_backend)
  jitted = compilation.jit()(scaled)

  def work(_):
    start.wait()
    return jitted._outermost

  with futures.ThreadPoolExecutor(4) as pool:
    found = list(pool.map(work, range(4)))
  assert len(set(map(id, found))) == len(asked) == 1


def test_a_call_outside_traces_waits_and_one_within_does_not():
  seen = []
  jitted = compilation.jit(then=lambda x: seen.append(x) or x)(scaled)
  jax.jit(jitted)(1.0)
  assert seen == []
  assert jitted(1.0) == seen[0] == 2


def test_every_thread_knows_whether_it_traces():
  found = {}

  @jax.jit
  def traced(x):
    thread = threading.Thread(target=lambda: found.update(new=compilation.is_traced()))
    thread.start()
    thread.join()
    found["here"] = compilation.is_traced()
    return x

  traced(1.0)
  assert found == {"new": False, "here": True}
  assert not compilation.is_traced()


def test_who_listens_is_told_what_was_compiled():
  told = []
  listened = execution.jit()(lambda x: jnp.tanh(x) @ x)
  listened.__wrapped__.__name__ = "listened"
  with compilation.on_compile(lambda name, seconds: told.append((name, seconds))):
    execution.jit()(listened.__wrapped__)(jnp.ones((3, 3)))
  before = len(told)
  assert [seconds > 0 for name, seconds in told if name == "listened"] == [True]
  jax.jit(lambda x: x - 7)(jnp.ones(3))
  assert len(told) == before


def test_a_program_that_takes_long_is_named_while_it_is_compiled():
  told, waited = [], threading.Event()

  def slow(x):
    return jnp.tanh(x) @ x - 3

  with compilation.on_long_compile(
    lambda name: (told.append(name), waited.set()), seconds=0.05
  ):
    lowered = jax.jit(slow).lower(jnp.ones((3, 3)))
    assert waited.wait(20)  # Stands for XLA's work.
    lowered.compile()
  assert told == ["slow"]


def test_what_is_compiled_soon_is_not_named():
  told = []
  with compilation.on_long_compile(told.append, seconds=60):
    jax.jit(lambda x: x @ x + 11)(jnp.ones((3, 3)))
    for timer in threading.enumerate():
      if isinstance(timer, threading.Timer):
        timer.join(20)
        assert not timer.is_alive()
  assert told == []
