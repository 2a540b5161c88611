"""What result files say of a discovery run, read off its log."""

import collections
import hashlib

from mxjax.discovery.audit import explain
from mxjax.discovery.core import store
from mxjax.discovery.search import heldout


def digest(folder):
  """SHA-256 of a run's log: its trajectory."""
  return hashlib.sha256((folder / "log.jsonl").read_bytes()).hexdigest()


def summary(folder):
  """Ledger, curves, verdicts and responses of a closed run."""
  events = store.read_events(folder)
  of = lambda name: [e for e in events if e["event"] == name]
  return {
    "log_sha256": digest(folder),
    "ledger": events[-1]["ledger"],
    "closed": events[-1]["reason"],
    "proposer": events[0]["proposer"],
    "lineage": [
      [s.packet.get("label", "the initial program"), s.program["value"]]
      for s in explain.lineage(
        explain.stories(folder, events),
        of("program")[-1]["champion"],
      )
    ],
    "visible": [[e["call"], e["value"]] for e in of("mark")],
    "heldout": [[e["call"], e["value"]] for e in heldout.unsealed(folder)],
    "verdicts": collections.Counter(e["verdict"] for e in of("verdict")),
    "explicit": collections.Counter(e["explicit"] for e in of("verdict")),
    "responses_implemented": [
      sum(e["implemented"] for e in of("check")),
      len(of("check")),
    ],
    "closures": sum(e["status"] == "closed" for e in of("residual")),
  }
