"""Arms of the paper's comparisons, its ablations, our own placebos; and the studies.

Nothing here imports an array library, so that the command line's help is instant.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core.ledger import KINDS

BARE = {"policy": "none", "checker": "none"}
"""Proposes candidates only: no controls, no probes."""
AS_IN_PAPER: Mapping[str, Any] = {"sequential": False, "reuse": False}
"""Runs every registered control, and charges repeated executions."""


@dataclasses.dataclass(frozen=True)
class Arm:
  """A search variant: a title and the fields of `SearchConfig` that it changes.

  A `placebo` is our own, without a counterpart in the paper. `calls` is the paper's
  allocation of 240 calls to candidates, controls and probes, by which a search can be
  bound.
  """

  title: str
  changes: Mapping[str, Any]
  placebo: bool = False
  calls: tuple[int, int, int] = (141, 69, 30)

  @property
  def allocation(self) -> dict[str, int]:
    """The paper's calls by kind."""
    return dict(zip(KINDS, self.calls, strict=True))


ARMS: Mapping[str, Arm] = {
  "score": Arm("Score-only", {"evidence": "score", **BARE}, calls=(240, 0, 0)),
  "text": Arm("TextMem", {"evidence": "text", **BARE}, calls=(240, 0, 0)),
  "reflect": Arm("ReflectMem", {"evidence": "reflect", **BARE}, calls=(240, 0, 0)),
  "controls-as-text": Arm(
    "ReflectMem with the same controls as text",
    {"evidence": "controls", "compile_verdicts": False, "checker": "none"},
    placebo=True,
    calls=(171, 69, 0),
  ),
  "quantforge": Arm("QuantForge", {}),
  "no-compile": Arm(
    "Without compilation",
    {"compile_verdicts": False, "checker": "none"},
    calls=(171, 69, 0),
  ),
  "source": Arm("Source diff", {"checker": "source"}, calls=(171, 69, 0)),
  "layer-output": Arm(
    "Layer-output comparison", {"checker": "layer_output"}, calls=(97, 69, 74)
  ),
  "lowered": Arm(
    "Lowered program", {"checker": "lowered"}, placebo=True, calls=(171, 69, 0)
  ),
  "random-controls": Arm("Random legal", {"policy": "random", "sequential": False}),
  "all-controls": Arm(
    "All pre-specified", {"policy": "all", "sequential": False}, calls=(92, 118, 30)
  ),
  "uniform": Arm(
    "Uniform random", {"evidence": "none", **BARE}, placebo=True, calls=(240, 0, 0)
  ),
  "best-of-n": Arm(
    "Best of N from RTN",
    {"evidence": "none", "parents": "initial", **BARE},
    placebo=True,
    calls=(240, 0, 0),
  ),
  "shuffled": Arm("Shuffled verdicts", {"shuffled_verdicts": True}, placebo=True),
  "corrupted-20": Arm("Predictions corrupted, 20 %", {"corruption": 0.2}, placebo=True),
  "corrupted-50": Arm("Predictions corrupted, 50 %", {"corruption": 0.5}, placebo=True),
  "thrifty": Arm(
    "QuantForge, our accounting", {"sequential": True, "reuse": True}, placebo=True
  ),
}
"""Arms by the name used in options."""

MATCHED = ("score", "text", "reflect", "quantforge")


@dataclasses.dataclass(frozen=True)
class Study:
  """A research question: the arms to run over all seeds, and an extra measurement.

  Studies in one folder share runs. `extra` is `replay`, `cases`, `regimes` or empty.
  """

  title: str
  arms: tuple[str, ...]
  extra: str = ""


STUDIES: Mapping[str, Study] = {
  "matched": Study("Matched-budget comparison", MATCHED),
  "compilation": Study("Residual compilation", ("quantforge", "no-compile")),
  "controls": Study(
    "Control selection", ("quantforge", "random-controls", "all-controls")
  ),
  "checkers": Study(
    "Implementation checkers",
    ("no-compile", "source", "quantforge", "layer-output", "lowered"),
    "cases",
  ),
  "replay": Study("Verdict replay", ("quantforge",), "replay"),
  "regimes": Study("Regime audit", MATCHED, "regimes"),
  "payoff": Study(
    "Where experiments pay",
    ("quantforge", "score", "text", "reflect", "uniform", "shuffled", "no-compile"),
  ),
  "placebos": Study(
    "Placebos",
    (
      "quantforge",
      "thrifty",
      "uniform",
      "best-of-n",
      "shuffled",
      "corrupted-20",
      "corrupted-50",
    ),
  ),
}
"""Studies by the name that `mxjax discover study` takes."""
PAPER_STUDIES = tuple(sorted(name for name in STUDIES if not name.startswith("payoff")))
"""Those whose tables are in the paper."""
PAPER_CALLS = 240
"""Evaluator calls of a run in the paper."""
