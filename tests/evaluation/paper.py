"""The results that the paper prints, as strings, and the tasks of its columns."""

import json
import pathlib

from mxjax.evaluation.measures import fitness

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PAPER = json.loads((GOLDEN / "paper_results.json").read_text())
COLUMNS = dict(
  zip(("WT2", "C4", "ARC-C", "ARC-E", "HS", "PIQA", "Wino"), fitness.TASKS, strict=True)
)
