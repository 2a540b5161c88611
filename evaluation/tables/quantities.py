"""Quantities of the paper's tables, each read from what was measured of one cell."""

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mxjax.audit import plan
from mxjax.evaluation import results
from mxjax.evaluation.measures import fitness
from mxjax.evaluation.tasks.tasks import PERPLEXITIES, SEVEN

RESAMPLES = 1000
"""Bootstrap samples of a task's items or windows, the same for all methods."""
MIB, GIB = 2**20, 2**30
Tasks = Mapping[str, Mapping[str, Any]]
Scores = Mapping[str, float]


class Measured(NamedTuple):
  """What was measured of one method on one model and calibration draw.

  Attributes:
    tasks: Entries of its results, by task.
    exact: Entries of the float model, by task.
    facts: Its build's row in `build`, and other measures by name.
    failure: Why something of it is missing, or empty.
  """

  tasks: Tasks = {}
  exact: Tasks = {}
  facts: Mapping[str, Any] = {}
  failure: str = ""


@functools.lru_cache(maxsize=16)
def _resampled(task: str, count: int) -> np.ndarray:
  """Draws items with replacement, the same ones for every method: `[1000, count]`."""
  # Python's own hash of a text differs from process to process.
  draws = np.random.default_rng(zlib.crc32(task.encode()))
  return draws.integers(0, count, (RESAMPLES, count), dtype=np.int32)


def _sampled_scores(tasks: Tasks, names: Sequence[str]) -> list[dict[str, float]]:
  """Scores of resampled tasks, none if a task's decisions were not kept."""
  columns: dict[str, np.ndarray] = {}
  for name in names:
    values = results.decisions(name, tasks[name])
    if values is None or len(values) < 2:
      return []
    means = values[_resampled(name, len(values))].mean(1)
    columns[name] = np.exp(means) if name in PERPLEXITIES else means
  rows = zip(*columns.values(), strict=True)
  return [dict(zip(columns, row, strict=True)) for row in rows]


class Quantity(NamedTuple):
  """A column: its head, how it is read, and how it is compared.

  Attributes:
    head: The column's head, with an arrow to the better side.
    form: Format of a value.
    needs: Tasks, or `build`, `local` and `cost`.
    of_scores: Computes it from scores of a method and of the float model.
    of_facts: Computes it from other measures: a value, or one per perturbed replicate.
    least: Smallest difference that counts, the paper's threshold.
    is_relative: Whether `least` is a share of the reference.
  """

  head: str
  form: str
  needs: tuple[str, ...]
  of_scores: Callable[[Scores, Scores], float] | None = None
  of_facts: Callable[[Mapping[str, Any]], Any] | None = None
  least: float = 0.0
  is_relative: bool = False

  @property
  def printed(self) -> str:
    """Its head in `paper.json`."""
    return self.head.rstrip("↓↑").removesuffix(" (%)")

  def values(self, cell: Measured) -> list[float]:
    """Returns the value, or one per replicate; none if something was not measured."""
    try:
      if self.of_facts:
        facts = self.of_facts(cell.facts)
        # NumPy would make nan of None, which a table would show.
        return [] if facts is None else np.atleast_1d(facts).astype(float).tolist()
      assert self.of_scores
      scores = lambda tasks: {name: tasks[name]["score"] for name in tasks}
      return [self.of_scores(scores(cell.tasks), scores(cell.exact))]
    # A task or measure that is not there is a KeyError, an incomplete summary or a
    # build without a time a ValueError, and an agreement that is None a TypeError.
    except (KeyError, ValueError, TypeError):
      return []

  def samples(self, cell: Measured) -> np.ndarray:
    """Returns its values on resampled items, `[1000]`; empty if there are none."""
    if not self.of_scores or not self.values(cell):
      return np.zeros(0)
    sides = (_sampled_scores(side, self.needs) for side in (cell.tasks, cell.exact))
    return np.asarray(
      [
        self.of_scores(*pair)
        # A side whose decisions were not kept is empty: then there are no samples.
        for pair in zip(*sides, strict=False)
        # No damage is told beside a float score of 0, which a resample of few items may
        # have.
        if all(value > 0 for value in pair[1].values())
      ]
    )

  def text(self, cell: Measured, *, percent: bool = True) -> str:
    """Formats the value: with half its range over replicates, or a 95 % interval."""
    values = self.values(cell)
    if not values:
      return ""
    share = 100 if self.head.endswith("(%)↑") and percent else 1
    text = format(share * np.mean(values), self.form)
    if len(values) > 1:
      return f"{text} ± {np.ptp(values) / 2:{self.form}}"
    samples = self.samples(cell) if self.head in INTERVALS else np.zeros(0)
    if not len(samples):
      return text
    low, high = np.quantile(samples, (0.025, 0.975))
    return f"{text} [{low:{self.form}}, {high:{self.form}}]"


def _three(summary: Callable[[Sequence[float]], Any]) -> Callable[..., float]:
  def read(scores: Scores, exact: Scores) -> float:
    values = fitness.damages(scores, exact, fitness.FIT3_TASKS).values()
    return float(summary(list(values)))

  return read


def _task(name: str, head: str) -> Quantity:
  form = ".4f" if name in PERPLEXITIES else ".2f"
  return Quantity(head, form, (name,), lambda scores, exact: scores[name])


def _fact(
  head: str, form: str, need: str, read: str | Callable[[Any], Any], **options: Any
) -> Quantity:
  """Reads an entry of a measure, or computes it from the measure."""
  of_measure = (lambda measure: measure[read]) if isinstance(read, str) else read
  of_facts = lambda facts: of_measure(facts[need])
  return Quantity(head, form, (need,), of_facts=of_facts, **options)


def _perplexity(row: Any) -> list[float]:
  (found,) = row["perplexity"].values()
  return found["values"]


def _minutes(row: Any) -> float:
  """Returns the time of a build; one that took over another's work has none."""
  if row["shared_with"]:
    raise ValueError(f"its seconds leave out the work of {row['shared_with']}")
  return row["seconds"] / 60


def _storage(head: str, form: str, read: Callable[[float, float, float], float]) -> Any:
  """Reads bytes of maps, of all auxiliary tensors, and of the model in bfloat16."""

  def of_build(row: Any) -> float:
    linears, size = row["size"]["quantized_linears"], row["size"]
    auxiliary = linears["maps"] + linears["rounding"] + size["recovery"]
    return read(linears["maps"], auxiliary, size["bf16_total"])

  return _fact(head, form, "build", of_build)


_THREE, _SEVEN = fitness.FIT3_TASKS, tuple(SEVEN)
_FEW = {"least": 1e-3, "is_relative": True}
"""Differences of noiseless errors up to a thousandth are ties."""
QUANTITIES: Mapping[str, Quantity] = {
  "wikitext2": _task("wikitext2", "WT2↓"),
  "c4": _task("c4", "C4↓"),
  "arc_challenge": _task("arc_challenge", "ARC-C (%)↑"),
  "arc_easy": _task("arc_easy", "ARC-E (%)↑"),
  "hellaswag": _task("hellaswag", "HS (%)↑"),
  "piqa": _task("piqa", "PIQA (%)↑"),
  "winogrande": _task("winogrande", "Wino (%)↑"),
  # Paper: the least differences that were named before the runs, 0.003 for Fit-3 and
  # 0.002 for Fit-7 (Appendix, Calibration and Evaluation Sensitivity).
  "fit3": Quantity("Fit-3↓", ".5f", _THREE, fitness.fit3, least=0.003),
  "fit7": Quantity("Fit-7↓", ".6f", _SEVEN, fitness.fit7, least=0.002),
  "mean_damage3": Quantity("Mean dmg↓", ".5f", _THREE, _three(np.mean)),
  "worst3": Quantity("Worst dmg↓", ".5f", _THREE, _three(np.max)),
  "mean_damage": Quantity("MeanDamage↓", ".6f", _SEVEN, fitness.mean_damage),
  "worst": Quantity(
    "Worst damage↓", ".5f", _SEVEN, lambda *pair: fitness.worst_damage(*pair)[1]
  ),
  # Perplexities are the first two of the seven.
  "acc5": Quantity("Acc5↑", ".4f", _SEVEN[2:], lambda ours, _: fitness.acc5(ours)),
  "operator_error": _fact("operator error↓", ".6f", "build", "operator_error", **_FEW),
  "kl": _fact(
    "KL, nats↓", ".4f", "build", lambda row: row["agreement"]["kl_mean"], **_FEW
  ),
  "perplexity": _fact("perplexity↓", ".3f", "build", _perplexity),
  "local_sensitivity": _fact("Sensitivity↓", ".3f", "local", "local_sensitivity"),
  "local_mismatch": _fact("Mismatch↓", ".3f", "local", "local_mismatch"),
  "layer_mse": _fact("Local MSE↓", ".8g", "local", "layer_mse"),
  "codes_per_block": _fact("Codes per block", ".2f", "local", "codes_per_block"),
  "edited_elements": _fact("Edited A4 elements", ".2%", "local", "edited_elements"),
  "build_minutes": _fact("Quantization, min↓", ".1f", "build", _minutes),
  "tokens_per_second": _fact("tok/s↑", ".1f", "cost", "tokens_per_second"),
  "forward_ms": _fact("Forward, ms↓", ".0f", "cost", "forward_ms"),
  # HiRes has one map for each block of 32 inputs.
  "blocks": _storage("Input blocks", ",.0f", lambda maps, *_: maps / plan.MAP_BYTES),
  "bf16_gib": _storage("BF16 GiB", ".3f", lambda _, more, bf16: bf16 / GIB),
  "auxiliary_mib": _storage("Auxiliary MiB", ".3f", lambda _, more, bf16: more / MIB),
  "total_gib": _storage("Total GiB", ".3f", lambda _, more, bf16: (more + bf16) / GIB),
  "increase": _storage("Increase", ".2%", lambda _, more, bf16: more / bf16),
}
"""The columns of all tables by name."""
INTERVALS = ("Fit-3↓", "Fit-7↓")
"""Heads of columns that show a 95 % bootstrap interval over items and windows."""
