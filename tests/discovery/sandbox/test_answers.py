"""What comes back from workers: strict answers, and hooks that know of no other."""

import types

import pytest

from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.sandbox import artifact, frames, jail, supervisor, tracing
from mxjax.discovery.sandbox.jailed_executor import EvaluatorWorker
from mxjax.discovery.tasks import world

TASK = world.World(seed=3)
SPEC = TASK.interface.hook("geometry").to_dict()
HEADER = "import jax\nimport jax.numpy as jnp\n"
SHARED = (
  HEADER
  + """
SEEN = []


def geometry(x):
  return {first}


def mlp(x):
  return x * (1.0 + len(SEEN))
"""
)


def test_a_hook_depends_on_nothing_that_tracing_another_one_left():
  specs = [TASK.interface.hook(name).to_dict() for name in ("geometry", "mlp")]
  leaving, plain = (
    tracing.trace(SHARED.format(first=first), specs)
    for first in ("(SEEN.append(1), x)[1]", "x")
  )
  assert leaving[1].name == "mlp"
  gated = [artifact.gate(specs[1], frames.pack(t[1].units)) for t in (leaving, plain)]
  assert gated[0] == gated[1]


FINE = b'{"status": "ok", "values": {"loss": 1.0}, "outputs": {"x": "d"}}'


NO_ANSWERS = [
  b"[" * 100_000,
  b'"ok"',
  b"[]",
  b"{}",
  b'{"status": "excellent"}',
  b'{"status": ["ok"]}',
  b'{"status": "crashed", "detail": {"x": 1}}',
  b'{"status": "ok", "values": [1.0]}',
  b'{"status": "ok", "values": {"loss": "1"}}',
  b'{"status": "ok", "values": {"loss": 1' + b"0" * 400 + b"}}",
  b'{"status": "ok", "values": {"loss": 1.0}, "outputs": {"x": [1]}}',
  b'{"status": "ok", "values": {"loss": 1.0}, "outputs": "digest"}',
]


def answering(head):
  """Takes the place of every worker process, and answers with what `head` returns."""
  ignores = lambda *given: None
  ask = lambda request, **limits: [head(), b""]
  made = types.SimpleNamespace(ask=ask, kill=ignores, is_alive=True)
  return lambda script, config, limits, files: made


def test_whatever_a_run_worker_answers_costs_its_call(monkeypatch):
  made = EvaluatorWorker(TASK, "standard", jail.Limits())
  monkeypatch.setattr(supervisor, "Worker", answering(lambda: head))
  for head, status in [(FINE, Status.OK)] + [
    (head, Status.NOT_FINITE) for head in NO_ANSWERS
  ]:
    assert made.run(Call({}, {}, {})._asdict(), {})["status"] == status, head[:80]
  made.close()


def test_the_identities_of_a_gate_are_hashes(monkeypatch):
  monkeypatch.setattr(supervisor, "Worker", answering(lambda: head))
  made = supervisor.RunWorker(TASK.spec, "run", (), "standard")
  names = ('["../../elsewhere"]', '"x"', "null", "[7]", "[]", '["' + "A" * 64 + '"]')
  for found in names:
    head = f'{{"status": "ok", "computation": {found}}}'.encode()
    with pytest.raises(supervisor.WorkerError, match="sent identities") as caught:
      made.gate([SPEC], {"geometry": b""})
    assert caught.value.status == Status.REFUSED


def test_a_worker_that_reads_no_more_ends_at_the_deadline(tmp_path, monkeypatch):
  (tmp_path / "deaf.py").write_text(
    "import os, struct, time\nos.write(1, struct.pack('<QQ', 8, 0))\ntime.sleep(60)\n"
  )
  monkeypatch.setattr(supervisor, "HERE", tmp_path)
  worker = supervisor.Worker("deaf.py", {}, jail.Limits(seconds=0.5))
  with pytest.raises(supervisor.WorkerError, match="not read before") as caught:
    worker.ask(bytes(1 << 20))
  assert caught.value.status == Status.TIMEOUT


@pytest.mark.parametrize(
  "parts",
  [
    [],
    {"kl": 1.0},
    {"kl": {"a": "1"}},
    {"kl": {"a": True}},
    {"kl": {"a": 1e999}},
    None,
  ],
)
def test_parts_of_observables_are_finite_numbers_or_nothing(parts):
  good = {"status": "ok", "values": {"kl": 1.0}, "outputs": {}, "detail": ""}
  assert (
    Outcome.from_dict({**good, "parts": {"kl": {"a": 1.0}}}).parts["kl"]["a"] == 1.0
  )
  with pytest.raises(ValueError, match="by observable and part"):
    Outcome.from_dict({**good, "parts": parts})
