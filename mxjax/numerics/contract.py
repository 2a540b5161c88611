"""Frozen contract: the conditions under which every quantizer runs and is judged."""

import dataclasses
import hashlib
import json
from typing import Any, Literal, get_args

from mxjax.errors import TypeRefusal, ValueRefusal
from mxjax.numerics import mxfp4

Activations = Literal["mxfp4", "float"]
"""What a quantized linear does to its inputs: rounds them to strict A4, or nothing."""

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven decoder projections; embeddings, norms and the head are not quantized."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
  """Conditions of a result; only results with equal contracts are comparable.

  They are the scale and tie rules of both operands, the quantized projections, the
  values on the input axis that share a scale, the formats of elements and scales,
  whether evaluation may use a KV cache, and whether inputs are rounded at all. Paper:
  Frozen contract (Preliminaries) and Quantization Setup (Appendix).

  With `activations="float"` only weights are quantized, W4A16. The paper has no such
  contract; programs choose it, see `Program.activations`.

  Raises:
    TypeError: `targets` are no tuple of names.
    ValueError: `activations` is not a known name.
  """

  rules: mxfp4.Rules = mxfp4.PAPER_RULES
  targets: tuple[str, ...] = TARGETS
  block_size: int = mxfp4.BLOCK_SIZE
  element: str = "E2M1"
  scale: str = "E8M0"
  kv_cache: bool = False
  activations: Activations = "mxfp4"

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
    if self.activations not in (known := get_args(Activations)):
      raise ValueRefusal(
        "Contract",
        expected=f"activations of {' or '.join(known)}",
        got=repr(self.activations),
        mend="leave it out for the paper's contract",
      )

  @property
  def form(self) -> str:
    """The field's name of the form: W4A4, or W4A16 where only weights are quantized."""
    return "W4A4" if self.activations == "mxfp4" else "W4A16"

  def marked(self, name: str) -> str:
    """Returns the name of a method, marked unless both operands are quantized."""
    return name if self.form == "W4A4" else f"{name} [{self.form}]"

  def to_dict(self) -> dict[str, Any]:
    """Returns a JSON-ready dict, with `activations` only where they stay float.

    A contract that quantizes both operands so keeps the hash of every earlier result.
    """
    values = dataclasses.asdict(self)
    if self.form == "W4A4":
      del values["activations"]
    return values

  @classmethod
  def from_dict(cls, values: dict[str, Any]) -> "Contract":
    """Builds a contract from the result of `to_dict`."""
    # From JSON the targets are a list, which the check refuses. A dict without
    # `activations` is of W4A4, the default.
    rules = mxfp4.Rules(**values["rules"])
    return cls(**{**values, "rules": rules, "targets": tuple(values["targets"])})

  @property
  def hash(self) -> str:
    """SHA-256 of the canonical JSON form, as hex."""
    # Keys sorted and separators given, so that neither the order of the fields nor a
    # default of `json` is part of the hash.
    text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


PAPER_CONTRACT = Contract()
