"""The replayed verdicts of two trials as one: counts, and exact tests over runs.

  python benchmarks/discovery_verdicts_pooled.py

The plan of the fourth trial (`discovery_trial_verdicts.toml`) fixed this analysis
before any of its answers. Each run of both trials has one value, the difference of the
shares of its successors that improve under two conditions; the sign flips are over
these runs. Once a successor improves if the target of the search falls by more than its
margin, and once, held out, if the target of the other model and text falls at all. A
successor that did not run has not improved.

What is under `afterwards` in the result was not planned. It asks why the conditions
differ so little: after how many verdicts they agree, how improvement depends on the
place in the search, and how often the response that the verdict asks for is found in
the code, asked for or not.
"""

import collections
import math
import pathlib
import statistics
import tempfile

import common

from mxjax.discovery.studies import trial, trial_tables
from mxjax.discovery.studies.trial_replay import CONDITIONS
from mxjax.evaluation.measures.statistics import compare_seeds

TRIALS = "discovery_trial_models", "discovery_trial_verdicts"
OTHERS = "free", "shuffled", "text"
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
      found[run].append({**one, "call": each["call"]})
  return found


def against_others(runs, improves):
  """Counts by condition, and `bound` against each other one."""
  of = {
    run: [{c: improves(row[c]) for c in CONDITIONS} for row in rows]
    for run, rows in runs.items()
  }
  every = [row for rows in of.values() for row in rows]
  share = lambda rows, condition: statistics.fmean(row[condition] for row in rows)
  against = {}
  for other in OTHERS:
    sides = [[share(rows, c) for rows in of.values()] for c in ("bound", other)]
    compared = compare_seeds(*sides)
    wins = sum(row["bound"] > row[other] for row in every)
    losses = sum(row["bound"] < row[other] for row in every)
    against[other] = {
      "by_run": [one - two for one, two in zip(*sides, strict=True)],
      "interval": compared.t_interval,
      "sign_flip_p": compared.sign_flip_p,
      "only_bound": wins,
      "only_other": losses,
      "sign_test_p": trial_tables.sign_test(wins, losses),
    }
  counts = {c: sum(row[c] for row in every) for c in CONDITIONS}
  return {"pairs": len(every), "improve": counts, "bound_against": against}


def afterwards(runs):
  """Agreement of the conditions, improvement by period, responses in the code."""
  rows = [row for each in runs.values() for row in each]
  improving = [{c: trial_tables.improves(row[c]) for c in CONDITIONS} for row in rows]
  agreement = collections.Counter(sum(each.values()) for each in improving)
  shares = [statistics.fmean(each[c] for each in improving) for c in CONDITIONS]
  alike = math.prod(shares) + math.prod(1 - share for share in shares)
  by_period = {}
  for first, last in PERIODS:
    chosen = [
      each
      for each, row in zip(improving, rows, strict=True)
      if first <= row["call"] <= last
    ]
    counts = {c: sum(each[c] for each in chosen) for c in CONDITIONS}
    by_period[f"{first} to {last}"] = {"pairs": len(chosen), **counts}
  assert sum(each["pairs"] for each in by_period.values()) == len(rows)
  return {
    "transitions_by_conditions_that_improve": [agreement[n] for n in range(5)],
    "transitions_alike": agreement[0] + agreement[4],
    "transitions_alike_if_independent": len(rows) * alike,
    "improve_by_period": by_period,
    "response_in_code": {
      c: sum(bool(row[c].get("implemented")) for row in rows) for c in CONDITIONS
    },
  }


def table(result):
  """One table of counts, one of differences, and one of what was seen afterwards."""
  counts, differences = [], []
  one, two = trial_tables.PAPER_DISCORDANT
  for name, measure in result["measures"].items():
    shown = [f"{measure['improve'][c]}/{measure['pairs']}" for c in CONDITIONS]
    counts.append([name, *shown])
    for other, each in measure["bound_against"].items():
      differences.append(
        [
          f"bound - {other}, {name}",
          " ".join(f"{value:+.2f}" for value in each["by_run"]),
          "{:+.3f} ({:+.2f} to {:+.2f})".format(
            statistics.fmean(each["by_run"]), *each["interval"]
          ),
          f"{each['sign_flip_p']:.3f}",
          *(str(each[key]) for key in ("only_bound", "only_other")),
          f"{each['sign_test_p']:.3f}",
        ]
      )
  later = result["afterwards"]
  pairs = sum(later["transitions_by_conditions_that_improve"])
  seen = [
    [
      f"improve, of {each['pairs']} after calls {period}",
      *(each[c] for c in CONDITIONS),
    ]
    for period, each in later["improve_by_period"].items()
  ]
  responses = [later["response_in_code"][c] for c in CONDITIONS]
  seen.append([f"response found in the code, of {pairs}", *responses])
  head = ["Difference", "By run", "Mean over runs (95 %)", "Sign flips over runs, p"]
  head += ["Only bound", "Only the other", "Sign test, p"]
  return "\n".join(
    [
      common.markdown(["Successors that improve", *CONDITIONS], counts),
      common.markdown(head, differences),
      "The paper's bound and free differ by "
      f"{one - two:+.2f}, which a sign test on {pairs} pairs finds in "
      f"{result['power']:.0%} of trials at {trial_tables.ALPHA:g}.\n",
      f"All four improve, or none does, after {later['transitions_alike']} of {pairs} "
      f"verdicts; {later['transitions_alike_if_independent']:.1f} would be expected if "
      "the conditions were independent. By the place in the search:\n",
      common.markdown(["Successors", *CONDITIONS], [[*map(str, row)] for row in seen]),
      f"Runs: {', '.join(result['runs'])}.\n",
    ]
  )


def result():
  """What the archives of both trials give: every part of the result file."""
  runs = {}
  for name in TRIALS:
    found = recorded(common.RESULTS / f"{name}.tar.xz")
    assert not runs.keys() & found.keys(), "a run of both trials"
    runs |= found
  pairs = sum(map(len, runs.values()))
  return {
    "runs": list(runs),
    "measures": {
      name: against_others(runs, improves) for name, improves in MEASURES.items()
    },
    "power": trial_tables.power(pairs, *trial_tables.PAPER_DISCORDANT),
    "afterwards": afterwards(runs),
  }


def main():
  options = common.parser(__doc__).parse_args()
  made = common.stamp()
  found = result()
  common.write(options.out, {**made, **found}, table(found))


if __name__ == "__main__":
  main()
