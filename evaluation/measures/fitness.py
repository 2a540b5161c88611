"""Fit-3, Fit-7 and Robust Fit: damage relative to the float model, and its summaries.

Paper: Eq. fit7, Eq. robust-fit, Eq. fit3 and Eq. alternative-aggregates. Scores are
perplexities, and accuracies as fractions, by task; a summary raises `ValueError` if any
of its results is missing.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.evaluation.tasks.tasks import ACCURACIES, PERPLEXITIES
from mxjax.evaluation.tasks.tasks import SEVEN as TASKS

FIT3_TASKS = ("wikitext2", "c4", "arc_challenge")
"""The tasks of Fit-3."""

Scores = Mapping[str, float]


def damage(task: str, score: float, reference: float) -> float:
  """Computes the relative loss of one task against the float model (negative: gain).

  Paper: Eq. fit7. For a perplexity the damage is `score / reference - 1`, and for an
  accuracy `1 - score / reference`.

  Raises:
    ValueError: The task is unknown, or the reference is not positive.
  """
  # By `not`, so that NaN is refused as well.
  if task not in TASKS or not reference > 0:
    raise ValueRefusal(
      "damage",
      expected=f"a task of {', '.join(TASKS)} with a positive float score",
      got=f"{task} with {reference}",
      mend="check the result of the float model",
    )
  ratio = score / reference
  return ratio - 1.0 if task in PERPLEXITIES else 1.0 - ratio


def _check_complete(place: str, tasks: Sequence[str], *sides: Scores) -> None:
  missing = [task for task in tasks if not all(task in side for side in sides)]
  if missing:
    raise ValueRefusal(
      place,
      expected=f"results of {', '.join(tasks)}",
      got=f"none of {', '.join(missing)}",
      mend="evaluate these tasks first",
    )


def damages(
  scores: Scores, references: Scores, tasks: Sequence[str] = TASKS
) -> dict[str, float]:
  """Computes the damage by task relative to the float model's `references`."""
  _check_complete("damages", tasks, scores, references)
  return {task: damage(task, scores[task], references[task]) for task in tasks}


def mean_and_worst(values: Iterable[float]) -> float:
  """Returns half the mean plus half the maximum of at least one value."""
  array = np.asarray(list(values), np.float64)
  return float(0.5 * array.mean() + 0.5 * array.max())


def fit7(scores: Scores, references: Scores) -> float:
  """Combines mean and worst damage over the seven tasks. Paper: Eq. fit7."""
  return mean_and_worst(damages(scores, references).values())


def fit3(scores: Scores, references: Scores) -> float:
  """Combines mean and worst damage over the tasks of Fit-3. Paper: Eq. fit3."""
  return mean_and_worst(damages(scores, references, FIT3_TASKS).values())


robust_fit = mean_and_worst
"""Combines mean and worst Fit-7 over models. Paper: Eq. robust-fit."""


def mean_damage(scores: Scores, references: Scores) -> float:
  """Averages damage over the seven tasks. Paper: Eq. alternative-aggregates."""
  return float(np.mean(list(damages(scores, references).values())))


def worst_damage(
  scores: Scores, references: Scores, tasks: Sequence[str] = TASKS
) -> tuple[str, float]:
  """Returns the task with the largest damage, and that damage."""
  return max(damages(scores, references, tasks).items(), key=lambda item: item[1])


def acc5(scores: Scores) -> float:
  """Averages the five accuracies, in percent. Paper: Eq. alternative-aggregates."""
  _check_complete("acc5", ACCURACIES, scores)
  return 100.0 * float(np.mean([scores[task] for task in ACCURACIES]))
