"""The results that the paper prints, as strings, and the tasks of its columns."""

from mxjax.evaluation.measures import fitness
from mxjax.evaluation.tables.paper import PAPER as PAPER

COLUMNS = dict(
  zip(("WT2", "C4", "ARC-C", "ARC-E", "HS", "PIQA", "Wino"), fitness.TASKS, strict=True)
)
