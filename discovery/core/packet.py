"""A packet: the experiment, frozen and hashed before its first evaluator call."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core import identity
from mxjax.discovery.core.residual import Explanation, Residual
from mxjax.discovery.core.task import Call


@dataclasses.dataclass(frozen=True)
class Condition:
  """One evaluator call of a packet.

  Attributes:
    name: `primary`, `probe` or the name of the control.
    kind: Ledger category: `candidate`, `control` or `probe`.
    cost: Calls charged.
  """

  name: str
  kind: str
  call: Call
  cost: int
  exec_id: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packet:
  """Everything that is registered before execution.

  Attributes:
    program: Identity of the candidate's source.
    parent: Identity of the parent's source.
    conditions: The calls, the primary first.
    evaluator: Hash of everything that determines an outcome, except the program.
    residual: The question, or None for a candidate without one.
    explanations: The focal explanation first; empty without a residual.
    allowed: Names of all allowed controls.
    response_to: Hashes of the packets whose demands are checked on this one.
    declared: Hooks and plan keys that the proposer says it changed.
  """

  program: str
  parent: str
  conditions: tuple[Condition, ...]
  margins: Mapping[str, float]
  evaluator: str
  residual: Residual | None = None
  explanations: tuple[Explanation, ...] = ()
  allowed: tuple[str, ...] = ()
  policy: str = "none"
  response_to: tuple[str, ...] = ()
  declared: tuple[str, ...] = ()
  checker: str = "none"

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready form."""
    values = dataclasses.asdict(self)
    # `asdict` leaves a named tuple one, which JSON would write as a list without names.
    for shown, condition in zip(values["conditions"], self.conditions, strict=True):
      shown["call"] = condition.call._asdict()
    return values

  @functools.cached_property
  def hash(self) -> str:
    """SHA-256 of the canonical form; it registers the packet before its first call.

    It is asked for with every event about the packet, and no field changes after.
    """
    return identity.digest(self.to_dict())
