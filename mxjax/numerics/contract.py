"""Frozen contract: the conditions under which every quantizer runs and is judged."""

import dataclasses
import hashlib
import json
from typing import Any

from mxjax.errors import TypeRefusal
from mxjax.numerics import mxfp4

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven decoder projections; embeddings, norms and the head are not quantized."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
  """Conditions of a result; only results with equal contracts are comparable.

  They are the scale and tie rules of both operands, the quantized projections, the
  values on the input axis that share a scale, the formats of elements and scales, and
  whether evaluation may use a KV cache. Paper: Frozen contract (Preliminaries) and
  Quantization Setup (Appendix).

  Raises:
    TypeError: `targets` are no tuple of names.
  """

  rules: mxfp4.Rules = mxfp4.PAPER_RULES
  targets: tuple[str, ...] = TARGETS
  block_size: int = mxfp4.BLOCK_SIZE
  element: str = "E2M1"
  scale: str = "E8M0"
  kv_cache: bool = False

  def __post_init__(self) -> None:
    given = self.targets
    # A text is a sequence of its letters, and a list could not be hashed.
    is_names = isinstance(given, tuple) and all(isinstance(n, str) for n in given)
    if not is_names:
      names = (given,) if isinstance(given, str) else TARGETS[:2]
      raise TypeRefusal(
        "Contract",
        expected="targets: a tuple of names of projections",
        got=repr(given),
        mend=f"pass a tuple, such as targets={names!r}",
      )

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready dict."""
    return dataclasses.asdict(self)

  @classmethod
  def from_dict(cls, values: dict[str, Any]) -> "Contract":
    """Builds a contract from the result of `to_dict`."""
    rules = mxfp4.Rules(**values["rules"])
    return cls(**{**values, "rules": rules, "targets": tuple(values["targets"])})

  @property
  def hash(self) -> str:
    """SHA-256 of the canonical JSON form, as hex."""
    text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


PAPER_CONTRACT = Contract()
