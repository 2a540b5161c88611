"""The run worker: executes artifacts on a phase's data; never sees candidate Python.

Run as a script with `-I -B` and an empty environment: `run_worker.py CONFIG`, JSON.
The walls go up before JAX is imported, so every thread has them. A worker serves many
calls, because an artifact is a pure function and leaves nothing behind; its supervisor
kills it at the first fault and starts another.
"""

import importlib.util
import json
import os
import pathlib
import resource
import sys
from typing import Any

CACHES_UP_TO = 2 << 30
"""Peak bytes of resident memory after which compiled programs are dropped."""


def _load(name: str) -> Any:
  path = pathlib.Path(__file__).resolve().parent / f"{name}.py"
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  spec.loader.exec_module(module)
  return module


def _enter(config: dict[str, Any]) -> dict[str, Any]:
  """Puts the walls up and returns their features."""
  jail = _load("jail")
  jail.die_with_parent()
  jail.fork_into_jail(config["level"])
  sites = [path for path in sys.path if path]
  return jail.lock(
    level=config["level"],
    readable=[*jail.interpreter_paths(())[0], *sites, *config["readable"]],
    listable=[],
    scratch=config["scratch"],
    limits=jail.Limits(**config["limits"]),
    writable=[config["compiled"]] if config["compiled"] else [],
  )


class _Caches:
  """Drops compiled programs when they have filled much memory.

  Every candidate leaves its own; only the peak can be read behind the walls, so the
  limit moves with it.
  """

  def __init__(self) -> None:
    self._limit = CACHES_UP_TO

  def bound(self) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak > self._limit:
      import jax

      jax.clear_caches()
      self._limit = peak + CACHES_UP_TO // 2


def _gate(request: dict[str, Any], blobs: list[bytes]) -> dict[str, Any]:
  """Checks artifacts: `[unit, batched]` for every spec."""
  from mxjax.discovery.sandbox import artifact

  gated = [
    artifact.gate(spec, unit, batched)
    for spec, unit, batched in zip(
      request["specs"], blobs[0::2], blobs[1::2], strict=True
    )
  ]
  return {"computation": gated}


def main() -> None:
  """Serves requests from stdin until it closes."""
  config = json.loads(sys.argv[1])
  sys.path[:0] = config["path"]
  frames = _load("trace_worker")
  replies = os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)
  features = _enter(config)
  from mxjax.devices import execution
  from mxjax.discovery.core import task
  from mxjax.discovery.sandbox import artifact, faults

  if config["compiled"]:
    execution.keep_compiled(config["compiled"])

  problem = task.load(config["task"])
  specs = {spec["name"]: spec for spec in problem.interface.to_list()}
  table = artifact.ArtifactTable(specs)
  session: Any = None
  caches = _Caches()
  frames.write_frame(replies, json.dumps(features).encode())
  while data := frames.read_frame(sys.stdin.buffer):
    head, *blobs = frames.unpack(data)
    request = json.loads(head)
    payload = b""
    try:
      if request["kind"] == "gate":
        answer = {"status": "ok", **_gate(request, blobs)}
      else:
        for index, (computation, name) in enumerate(request["artifacts"]):
          table.add(computation, name, blobs[2 * index], blobs[2 * index + 1])
        if session is None:
          session = problem.open(config["phase"])
        call = task.Call(**request["call"])
        result, payload = session.run(call, table, blobs[-1])
        answer = {"status": "ok", **result}
    except Exception as error:  # noqa: BLE001
      # The supervisor turns it into a status; the message is its detail.
      status, detail = faults.status_of(error)
      if request["kind"] == "gate" and status == task.Status.CONTRACT:
        status = task.Status.REFUSED
      answer = {"status": status, "detail": detail}
    reply = json.dumps(answer, allow_nan=True).encode()
    frames.write_frame(replies, frames.pack([reply, payload]))
    caches.bound()


if __name__ == "__main__":
  main()
