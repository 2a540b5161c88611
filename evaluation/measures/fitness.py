"""Fit-3, Fit-7 and Robust Fit: damage relative to the float model, and its summaries.

Paper: Eq. fit7, Eq. robust-fit, Eq. fit3 and Eq. alternative-aggregates. A summary
raises if any of its results is missing.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

PERPLEXITIES = ("wikitext2", "c4")
"""Tasks measured by perplexity: lower is better."""
ACCURACIES = ("arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande")
"""Tasks measured by accuracy, as fractions: higher is better."""
TASKS = (*PERPLEXITIES, *ACCURACIES)
"""The seven tasks, in the order of the paper's tables."""
FIT3_TASKS = ("wikitext2", "c4", "arc_challenge")
"""The tasks of Fit-3."""

Scores = Mapping[str, float]
"""Results of one model by task: perplexities, and accuracies as fractions."""


def damage(task: str, score: float, reference: float) -> float:
  """Computes the relative loss of one task against the float model (negative: gain).

  Paper: Eq. fit7. For a perplexity the damage is `score / reference - 1`, and for an
  accuracy `1 - score / reference`. The `reference` is positive, and `task` is one of
  `TASKS`.

  Raises:
    ValueError: The task is unknown, or the reference is not positive.
  """
  if task not in TASKS or not reference > 0:
    raise ValueError(
      f"damage: expected a task of {', '.join(TASKS)} with a positive float score, got "
      f"{task} with {reference}; check the result of the float model."
    )
  ratio = score / reference
  return ratio - 1.0 if task in PERPLEXITIES else 1.0 - ratio


def damages(
  scores: Scores, references: Scores, tasks: Sequence[str] = TASKS
) -> dict[str, float]:
  """Computes the damage by task relative to the float model's `references`.

  Raises:
    ValueError: A task has no result on one side.
  """
  missing = [task for task in tasks if task not in scores or task not in references]
  if missing:
    raise ValueError(
      f"damages: expected results of {', '.join(tasks)} for both models, got none of "
      f"{', '.join(missing)}; evaluate these tasks first."
    )
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


def robust_fit(fits: Iterable[float]) -> float:
  """Combines mean and worst Fit-7 over models. Paper: Eq. robust-fit."""
  return mean_and_worst(fits)


def mean_damage(scores: Scores, references: Scores) -> float:
  """Averages damage over the seven tasks. Paper: Eq. alternative-aggregates."""
  return float(np.mean(list(damages(scores, references).values())))


def worst_damage(
  scores: Scores, references: Scores, tasks: Sequence[str] = TASKS
) -> tuple[str, float]:
  """Returns the task with the largest damage, and that damage."""
  by_task = damages(scores, references, tasks)
  worst = max(by_task, key=lambda task: by_task[task])
  return worst, by_task[worst]


def acc5(scores: Scores) -> float:
  """Averages the five accuracies, in percent. Paper: Eq. alternative-aggregates.

  Raises:
    ValueError: A task has no result.
  """
  missing = [task for task in ACCURACIES if task not in scores]
  if missing:
    raise ValueError(
      f"acc5: expected results of {', '.join(ACCURACIES)}, got none of "
      f"{', '.join(missing)}; evaluate these tasks first."
    )
  return 100.0 * float(np.mean([scores[task] for task in ACCURACIES]))
