"""What a reproduction will take: builds, passes, hours and disk, before it starts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mxjax.audit.plan import Plan
from mxjax.evaluation.report import numbers
from mxjax.evaluation.report.tables import Table
from mxjax.evaluation.reproduce.cells import BUILD, MEASURES, Build, Job, linears_key
from mxjax.evaluation.results import FLOAT
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


class Sizes(NamedTuple):
  """Options that decide how much is measured; None is all."""

  items: int | None
  windows: int | None
  window_length: int
  local_sequences: int
  length: int

  def tokens(self, what: str) -> int:
    """Returns the tokens that pass through a model in a task or measure."""
    if what in PERPLEXITIES:
      return (self.windows or TEST_WINDOWS[what]) * self.window_length
    if what in TASKS:
      count = min(self.items or TASKS[what].items, TASKS[what].items)
      return count * ITEM_TOKENS[what]
    # Local errors run both models; costs are a few dozen forwards.
    return {"local": 2 * self.local_sequences, "cost": 40}.get(what, 0) * self.length


Seconds = Callable[[Plan, Sequence[str], int], float | None]
"""Estimates the time of methods and of test tokens; None where nothing tells."""


def plan_table(
  todo: Sequence[Job],
  planned: Mapping[str, Plan],
  sizes: Sizes,
  seconds: Seconds,
  timed: frozenset[Build] = frozenset(),
) -> tuple[Table, float | None]:
  """Plans the jobs that are left, by model; also returns the expected seconds.

  `planned` are plans by model. Builds that differ only in recovery make their linears
  once; `timed` ones do not.
  """
  rows, total = [], 0.0
  is_known = True
  for model, plan in planned.items():
    jobs = [job for job in todo if job.build.model == model]
    builds = [job.build for job in jobs if job.what == BUILD]
    own: dict[Any, Build] = {}
    for build in builds:
      key = None if build in timed else linears_key(build)
      own.setdefault(build if key is None else (key, build.seed), build)
    evaluated = [job for job in jobs if job.what not in (BUILD, *MEASURES)]
    tokens = sum(sizes.tokens(job.what) for job in jobs)
    spent = seconds(plan, [build.method for build in builds], 0)
    tested = seconds(plan, [], tokens)
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
