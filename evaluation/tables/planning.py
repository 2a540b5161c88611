"""What a reproduction will take: builds, passes, hours and disk, before it starts."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.audit.plan import Plan
from mxjax.evaluation.estimates import expected_seconds, products_a_second
from mxjax.evaluation.report import numbers
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.results import FLOAT
from mxjax.evaluation.tables.declared import MEASURES
from mxjax.evaluation.tables.jobs import BUILD, Build, Job, linears_key
from mxjax.evaluation.tables.settings import Settings
from mxjax.evaluation.tasks.tasks import PERPLEXITIES, TASKS

ITEM_TOKENS = {
  "arc_challenge": 160,
  "arc_easy": 150,
  "hellaswag": 440,
  "piqa": 100,
  "winogrande": 60,
}
"""Tokens of an item with all of its choices, about, by a tokenizer of 50,000."""
TEST_WINDOWS = {"wikitext2": 148, "c4": 256}
"""Windows of 2,048 tokens in a whole test, about."""


def job_tokens(what: str, settings: Settings) -> int:
  """Returns the tokens that pass through a model in a task or measure."""
  tasks, length = settings.tasks, settings.sample.length
  if what in PERPLEXITIES:
    return (tasks.windows or TEST_WINDOWS[what]) * tasks.window_length
  if what in TASKS:
    count = min(tasks.items or TASKS[what].items, TASKS[what].items)
    return count * ITEM_TOKENS[what]
  # Local errors run both models; costs are a few dozen forwards.
  return {"local": 2 * settings.local_sequences, "cost": 40}.get(what, 0) * length


def plan_table(
  todo: Sequence[Job],
  planned: Mapping[str, Plan],
  settings: Settings,
  timed: frozenset[Build] = frozenset(),
) -> tuple[Table, float | None]:
  """Plans the jobs that are left, by model; also returns the expected seconds.

  `planned` are plans by model. Builds that differ only in recovery make their linears
  once; `timed` ones do not.
  """
  rows, total = [], 0.0
  is_known = True
  rate = functools.cache(products_a_second)
  for model, plan in planned.items():
    jobs = [job for job in todo if job.build.model == model]
    builds = [job.build for job in jobs if job.what == BUILD]
    own: dict[Any, Build] = {}
    for build in builds:
      key = None if build in timed else linears_key(build)
      own.setdefault(build if key is None else (key, build.seed), build)
    evaluated = [job for job in jobs if job.what not in (BUILD, *MEASURES)]
    tokens = sum(job_tokens(job.what, settings) for job in jobs)
    seconds = functools.partial(expected_seconds, plan, rate=rate(plan.dtype))
    spent = seconds([build.method for build in builds])
    tested = seconds([], test_tokens=tokens)
    is_known = is_known and spent is not None and tested is not None
    total += (spent or 0.0) + (tested or 0.0)
    disk = len(builds) * (plan.disk["checkpoint"] + plan.disk["run folder"])
    rows.append(
      [
        jobs[0].build.name if jobs else model,
        f"{len(builds)} ({len(own)} with linears of their own)",
        str(plan.model_passes * len(builds)),
        f"{len(evaluated)} ({len({job.what for job in evaluated})} tasks)",
        str(sum(job.what in MEASURES for job in jobs)),
        numbers.about((spent or 0) + (tested or 0)) if is_known else "not known here",
        numbers.size(disk),
      ]
    )
  head = ["model", "builds", "passes", "evaluations", "measures", "time", "disk"]
  floats = sum(job.build.method == FLOAT for job in todo)
  note = (
    f"{len(todo)} jobs are left, {floats} of them on float models. Passes are of the "
    "calibration set through the model, at most; while one draw is in work its hidden "
    "states and Hessians are on disk too, unless --no-store."
  )
  return Table("Plan", head, rows, note), total if is_known else None
