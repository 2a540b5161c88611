"""Arms of the paper's comparisons, its ablations, and our own placebos."""

import dataclasses
from collections.abc import Mapping
from typing import Any

BARE = {"policy": "none", "checker": "none"}
"""Proposes candidates only: no controls, no probes."""
AS_IN_PAPER: Mapping[str, Any] = {"sequential": False, "reuse": False}
"""Runs every registered control, and charges repeated executions."""


@dataclasses.dataclass(frozen=True)
class Arm:
  """A search variant: a title and the fields of `SearchConfig` that it changes.

  A `placebo` is our own, without a counterpart in the paper.
  """

  title: str
  changes: Mapping[str, Any]
  placebo: bool = False


ARMS: Mapping[str, Arm] = {
  "score": Arm("Score-only", {"evidence": "score", **BARE}),
  "text": Arm("TextMem", {"evidence": "text", **BARE}),
  "reflect": Arm("ReflectMem", {"evidence": "reflect", **BARE}),
  "quantforge": Arm("QuantForge", {}),
  "no-compile": Arm(
    "Without compilation", {"compile_verdicts": False, "checker": "none"}
  ),
  "source": Arm("Source diff", {"checker": "source"}),
  "layer-output": Arm("Layer-output comparison", {"checker": "layer_output"}),
  "lowered": Arm("Lowered program", {"checker": "lowered"}, placebo=True),
  "random-controls": Arm("Random legal", {"policy": "random", "sequential": False}),
  "all-controls": Arm("All pre-specified", {"policy": "all", "sequential": False}),
  "uniform": Arm("Uniform random", {"evidence": "none", **BARE}, placebo=True),
  "best-of-n": Arm(
    "Best of N from RTN",
    {"evidence": "none", "parents": "initial", **BARE},
    placebo=True,
  ),
  "shuffled": Arm("Shuffled verdicts", {"shuffled_verdicts": True}, placebo=True),
  "corrupted-20": Arm("Predictions corrupted, 20 %", {"corruption": 0.2}, placebo=True),
  "corrupted-50": Arm("Predictions corrupted, 50 %", {"corruption": 0.5}, placebo=True),
  "thrifty": Arm(
    "QuantForge, our accounting", {"sequential": True, "reuse": True}, placebo=True
  ),
}
"""Arms by the name used in options."""
