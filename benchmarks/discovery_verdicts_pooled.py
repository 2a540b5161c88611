"""The replayed verdicts of two trials as one: counts, and exact tests over runs.

  python benchmarks/discovery_verdicts_pooled.py

The plan of the fourth trial (`discovery_trial_verdicts.toml`) fixed this analysis
before any of its answers. Each run of both trials has one value, the difference of the
shares of its successors that improve under two conditions; the sign flips are over
these runs. Once a successor improves if the target of the search falls by more than its
margin, and once, held out, if the target of the other model and text falls at all. A
successor that did not run has not improved.

The plan named the sign flips alone; the interval of Student and the sign tests over
verdicts stand beside them. The plan knew the first of the two trials, which is nearly
half of the verdicts.

What is under `afterwards` in the result was not planned. It asks why the conditions
differ so little: how often the probe finds the response that the verdict asks for, told
or not, and how improvement depends on that and on the place in the search; after how
many verdicts the four conditions agree; and how the other conditions compare.
"""

import collections
import math
import pathlib
import statistics
import tempfile

import common

from mxjax.discovery.core.task import Status
from mxjax.discovery.studies import trial, trial_tables
from mxjax.discovery.studies.trial_replay import CONDITIONS
from mxjax.evaluation.measures.statistics import compare_seeds

TRIALS = "discovery_trial_models", "discovery_trial_verdicts"
OTHERS = ("shuffled", "free"), ("text", "free"), ("shuffled", "text")
"""Pairs of conditions that the plan does not compare."""
PERIODS = (1, 10), (11, 20), (21, 40)
"""Calls of a run, from and to, after which the verdict came."""
MEASURES = {
  "on the text of the search": trial_tables.improves,
  "held out": lambda s: not s["refused"] and (s.get("heldout") or 0.0) < 0,
}


def recorded(archive):
  """By run of an archive and by transition, its successor under each condition."""
  with tempfile.TemporaryDirectory() as folder:
    held = trial_tables.Recorded(trial.unpack(archive, pathlib.Path(folder)))
  found = {}
  for run, transitions in held.transitions.items():
    found[run] = []
    for each in transitions:
      answers = {c: held.of(each["packet"], c) for c in CONDITIONS}
      # One answer each: a second sample would make shares of what counts as one.
      assert all(len(samples) == 1 for samples in answers.values())
      one = {c: samples[0] for c, samples in answers.items()}
      found[run].append({**one, "call": each["call"], "margin": each["margin"]})
  return found


def difference(of, first, second):
  """The shares of two conditions by run, and the verdicts after which one improves."""
  every = [row for rows in of.values() for row in rows]
  share = lambda rows, condition: statistics.fmean(row[condition] for row in rows)
  sides = [[share(rows, c) for rows in of.values()] for c in (first, second)]
  compared = compare_seeds(*sides)
  wins = sum(row[first] > row[second] for row in every)
  losses = sum(row[first] < row[second] for row in every)
  return {
    "by_run": [one - two for one, two in zip(*sides, strict=True)],
    "interval": compared.t_interval,
    "sign_flip_p": compared.sign_flip_p,
    "only_first": wins,
    "only_second": losses,
    "sign_test_p": trial_tables.sign_test(wins, losses),
  }


def measured(runs, improves, pairs):
  """Counts by condition, and the differences of the named pairs of conditions."""
  of = {
    run: [{c: improves(row[c]) for c in CONDITIONS} for row in rows]
    for run, rows in runs.items()
  }
  every = [row for rows in of.values() for row in rows]
  return {
    "pairs": len(every),
    "improve": {c: sum(row[c] for row in every) for c in CONDITIONS},
    "differences": {" - ".join(pair): difference(of, *pair) for pair in pairs},
  }


def alike(improving):
  """Verdicts after which all four would improve, or none, if they were independent."""
  shares = [statistics.fmean(each[c] for each in improving) for c in CONDITIONS]
  chance = math.prod(shares) + math.prod(1 - share for share in shares)
  return len(improving) * chance


def fate(successor, margin):
  """How a successor of a late verdict ended."""
  if successor["status"] != Status.OK:
    return "failed"
  if abs(successor["change"]) <= margin:
    return "within the margin"
  return "improve" if successor["change"] < 0 else "worse"


def afterwards(runs):
  """Found responses, the place in the search, agreement, and the other pairs."""
  rows = [row for each in runs.values() for row in each]
  improving = [{c: trial_tables.improves(row[c]) for c in CONDITIONS} for row in rows]
  agreement = collections.Counter(sum(each.values()) for each in improving)
  periods = {}
  for first, last in PERIODS:
    chosen = [n for n, row in enumerate(rows) if first <= row["call"] <= last]
    periods[f"{first} to {last}"] = [improving[n] for n in chosen]
  assert sum(map(len, periods.values())) == len(rows)
  late = [row for row in rows if row["call"] >= PERIODS[-1][0]]
  fates = collections.Counter(
    fate(row[c], row["margin"]) for row in late for c in CONDITIONS
  )
  is_found = [{c: bool(row[c].get("implemented")) for c in CONDITIONS} for row in rows]

  def improve_where(found, condition):
    pairs = zip(is_found, improving, strict=True)
    chosen = [one[condition] for each, one in pairs if each[condition] is found]
    return [sum(chosen), len(chosen)]

  return {
    "response_found": {c: sum(each[c] for each in is_found) for c in CONDITIONS},
    "improve_if_found": {c: improve_where(True, c) for c in CONDITIONS},
    "improve_if_not": {c: improve_where(False, c) for c in CONDITIONS},
    "improve_by_period": {
      name: {"pairs": len(each)} | {c: sum(one[c] for one in each) for c in CONDITIONS}
      for name, each in periods.items()
    },
    "late_successors": dict(sorted(fates.items())),
    "transitions_by_conditions_that_improve": [agreement[n] for n in range(5)],
    "transitions_alike": agreement[0] + agreement[4],
    "alike_if_independent": alike(improving),
    "alike_if_independent_within_periods": sum(map(alike, periods.values())),
    "others": {
      name: measured(runs, improves, OTHERS)["differences"]
      for name, improves in MEASURES.items()
    },
  }


def rows_of(measures):
  """The lines of a table of differences."""
  return [
    [
      f"{pair}, {name}",
      " ".join(f"{value:+.2f}" for value in each["by_run"]),
      "{:+.3f} ({:+.2f} to {:+.2f})".format(
        statistics.fmean(each["by_run"]), *each["interval"]
      ),
      f"{each['sign_flip_p']:.3f}",
      *(str(each[key]) for key in ("only_first", "only_second")),
      f"{each['sign_test_p']:.3f}",
    ]
    for name, differences in measures.items()
    for pair, each in differences.items()
  ]


def table(result):
  """Counts and planned differences, then what was seen afterwards."""
  later, measures = result["afterwards"], result["measures"]
  counts = [
    [name, *(f"{each['improve'][c]}/{each['pairs']}" for c in CONDITIONS)]
    for name, each in measures.items()
  ]
  shown = lambda counts: [f"{n}/{of}" for n, of in (counts[c] for c in CONDITIONS)]
  seen = [["the probe finds the response", *map(str, later["response_found"].values())]]
  seen.append(["improve, of those", *shown(later["improve_if_found"])])
  seen.append(["improve, of the rest", *shown(later["improve_if_not"])])
  for period, each in later["improve_by_period"].items():
    cells = (f"{each[c]}/{each['pairs']}" for c in CONDITIONS)
    seen.append([f"improve, calls {period}", *cells])
  pairs = sum(later["transitions_by_conditions_that_improve"])
  fates = ", ".join(f"{name} {n}" for name, n in later["late_successors"].items())
  head = ["Difference", "By run", "Mean over runs (95 %)", "Sign flips over runs, p"]
  head += ["Only the first", "Only the second", "Sign test, p"]
  planned = {name: each["differences"] for name, each in measures.items()}
  return "\n".join(
    [
      common.markdown(["Successors that improve", *CONDITIONS], counts),
      common.markdown(head, rows_of(planned)),
      f"Runs: {', '.join(result['runs'])}.\n",
      "Seen afterwards:\n",
      common.markdown([f"Successors of {pairs} verdicts", *CONDITIONS], seen),
      f"After {later['transitions_alike']} verdicts all four improve, or none does; "
      f"{later['alike_if_independent']:.1f} would be expected if the conditions were "
      f"independent, {later['alike_if_independent_within_periods']:.1f} if they were "
      f"so within each of these periods. After call {PERIODS[-1][0] - 1}: {fates}.\n",
      common.markdown(head, rows_of(later["others"])),
    ]
  )


def result():
  """What the archives of both trials give: every part of the result file."""
  runs = {}
  for name in TRIALS:
    found = recorded(common.RESULTS / f"{name}.tar.xz")
    assert not runs.keys() & found.keys(), "a run of both trials"
    runs |= found
  return {
    "runs": list(runs),
    "measures": {
      name: measured(runs, improves, trial_tables.COMPARED)
      for name, improves in MEASURES.items()
    },
    "afterwards": afterwards(runs),
  }


def main():
  options = common.parser(__doc__).parse_args()
  made = common.stamp()
  found = result()
  common.write(options.out, {**made, **found}, table(found))


if __name__ == "__main__":
  main()
