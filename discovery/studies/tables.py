"""Formats study results as the paper's tables, beside the paper's numbers."""

import importlib.resources
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.discovery.studies import checker_cases
from mxjax.discovery.studies.results import NONE, Column, Results, title
from mxjax.evaluation.measures.statistics import share_interval
from mxjax.evaluation.report.tables import Table

Rows = Sequence[Sequence[str]]
PAPER: Mapping[str, Rows] = json.loads(
  (importlib.resources.files(__package__) / "paper_tables.json").read_text("utf-8")
)
"""The discovery tables as printed in the paper, by label; the header is first.

Paper: Section "Discovery results" and its appendix.
"""
# Columns of the paper's table of values over the budget.
CALLS = (40, 80, 120, 160, 200, 240)


PAPER_NOTE = "The paper's, with a language model on Qwen3-4B and Llama-3.1-8B."
WHOLE = 240, 8
"""Calls of a run, and paired seeds, in the paper."""
Beside = tuple[Table, Rows]
"""A table of ours, and the rows of the paper's, head first; empty if it has none."""


def tables(values: Mapping[str, Any]) -> list[Table]:
  """Builds all tables of a study's results, each followed by the paper's.

  The title of a table says what the study has less of than the paper's.
  """
  build = {
    "matched": _matched,
    "compilation": _compilation,
    "controls": _controls,
    "checkers": _checkers,
    "replay": _replay,
    "regimes": _regimes,
    "placebos": _placebos,
    "payoff": _placebos,
  }[values["study"]]
  found: list[Table] = []
  for own, printed in build(Results(values)):
    found.append(own._replace(title=own.title + _reduced(values)))
    if printed:
      found.append(Table(f"{own.title}: paper", printed[0], printed[1:], PAPER_NOTE))
  return found


def _reduced(values: Mapping[str, Any]) -> str:
  """Returns what the title says of a study with fewer calls or seeds than the paper."""
  if values["study"].startswith("payoff"):
    return ""
  have = {"calls": values["budget"], "seeds": len(values["seeds"])}
  whole = dict(zip(have, WHOLE, strict=True))
  parts = [
    f"{n} of {whole[what]} {what}" for what, n in have.items() if n < whole[what]
  ]
  return f" (reduced: {', '.join(parts)})" if parts else ""


def _by_arm(
  name: str,
  arms: Sequence[str],
  columns: Mapping[str, Column],
  paper: Rows = (),
  notes: Sequence[str] = (),
) -> Beside:
  rows = [[title(arm), *(read(arm) for read in columns.values())] for arm in arms]
  return Table(name, ["Arm", *columns], rows, "\n\n".join(notes)), paper


def _by_seed(results: Results, paper: str, others: Sequence[str]) -> Beside:
  """Lists held-out targets by seed and compares QuantForge with `others`."""
  rows = [
    [title(arm), *(f"{value:.3f}" for value in results.finals(arm))]
    for arm in results.arms
  ]
  notes = [results.difference("quantforge", other) for other in others]
  header = ["Arm / seed", *map(str, results.seeds)]
  table = Table("Held-out target by seed", header, rows, "\n\n".join(notes))
  return table, PAPER[paper]


def _matched(results: Results) -> list[Beside]:
  columns = {
    "Median": results.median,
    "Gate": results.gate,
    "Generation index": results.generation,
    "Confirmation call": results.confirmation,
    "New programs": results.calls("candidate"),
    "Controls": results.calls("control"),
    "Probes": results.calls("probe"),
  }
  records = [
    [title(arm), str(seed), f"{final:.3f}", *map(str, crossed)]
    for arm in results.arms
    for seed, final in zip(results.seeds, results.finals(arm), strict=True)
    if (crossed := results.crossing(arm, seed))
  ]
  return [
    _by_arm(
      "Held-out outcomes at the end of the budget",
      results.arms,
      columns,
      PAPER["search_endpoints"],
    ),
    (
      Table(
        "Threshold crossings",
        ["Arm", "Seed", "Held-out", "Generation index", "Confirmation call"],
        records,
      ),
      PAPER["threshold_records"],
    ),
    _by_seed(results, "framework_seeds", results.arms[:3]),
    _anytime(results),
  ]


def _anytime(results: Results) -> Beside:
  def at(call: int) -> Column:
    def read(arm: str) -> str:
      marks = [m for run in results.runs(arm) for m in run["marks"] if m[0] == call]
      return f"{statistics.median(results.shown(m[2]) for m in marks):.3f}"

    return read

  columns = {str(call): at(call) for call in CALLS if call <= results.values["budget"]}
  name = "Median held-out target over the budget"
  return _by_arm(name, results.arms, columns, PAPER["anytime_values"])


def _compilation(results: Results) -> list[Beside]:
  kinds = {
    "New candidates": results.calls("candidate"),
    "Controls": results.calls("control"),
    "Probes": results.calls("probe"),
    "Total": results.calls("total"),
  }
  metrics = {
    "Median held-out": results.median,
    "Gate": results.gate,
    "Median generation index": results.generation,
    "Median confirmation call": results.confirmation,
    "Invalid-successor fraction": results.invalid_successors,
    "Effective verdicts a run": results.effective_verdicts,
  }
  arms = results.arms
  return [
    _by_arm("Calls by kind, mean over seeds", arms, kinds, PAPER["compilation_budget"]),
    _by_seed(results, "compilation_seeds", arms[1:]),
    (
      Table(
        "Outcomes",
        ["Metric", *map(title, arms)],
        [[name, *map(read, arms)] for name, read in metrics.items()],
      ),
      PAPER["compilation_summary"],
    ),
  ]


def _controls(results: Results) -> list[Beside]:
  explicit = lambda arm: results.mean(arm, lambda run: run["explicit"])
  calls = lambda arm: results.mean(arm, lambda run: run["ledger"]["control"])
  columns = {
    "Control calls": results.calls("control"),
    "New candidates": results.calls("candidate"),
    "Explicit verdicts": lambda arm: f"{explicit(arm):.1f}",
    "Calls per explicit verdict": lambda arm: (
      f"{calls(arm) / explicit(arm):.1f}" if explicit(arm) else NONE
    ),
    "Effective verdicts": lambda arm: (
      f"{results.mean(arm, lambda run: run['effective']):.1f}"
    ),
    "Median": results.median,
    "Gate": results.gate,
  }
  names = [
    "Minimal discriminating" if arm == "quantforge" else title(arm)
    for arm in results.arms
  ]
  rows = [
    [name, *(read(arm) for read in columns.values())]
    for name, arm in zip(names, results.arms, strict=True)
  ]
  header = ["Policy", *columns]
  return [
    (Table("Control selection", header, rows), PAPER["control_selection"]),
    _by_seed(results, "control_selection_seeds", results.arms[1:]),
  ]


def _checkers(results: Results) -> list[Beside]:
  cases = results.values["cases"]
  arms = {"probe": "quantforge", "layer_output": "layer-output"}

  def share(count: int, total: int) -> str:
    low, high = share_interval(count, total)
    return f"{count}/{total} [{low:.2f}, {high:.2f}]"

  def row(checker: str) -> list[str]:
    arm = arms.get(checker, checker)
    errors = checker_cases.errors(cases, checker)
    return [
      "Execution probe" if checker == "probe" else title(arm),
      share(errors["false_accepts"], errors["apparent"]),
      share(errors["false_rejects"], errors["real"]),
      results.calls("probe")(arm),
      results.calls("candidate")(arm),
      results.median(arm),
      results.gate(arm),
    ]

  notes = []
  for checker in checker_cases.CHECKERS:
    wrong = [c["name"] for c in cases if c["accepted"][checker] != c["is_real"]]
    notes.append(f"Misjudged by {checker}: {'; '.join(wrong) or 'none'}.")
  table = Table(
    "Checkers on the injected cases, with exact 95 % intervals, and in the search",
    [
      "Checker",
      "False accepts",
      "False rejects",
      "Extra calls",
      "New candidates",
      "Median",
      "Gate",
    ],
    [row(checker) for checker in checker_cases.CHECKERS],
    "\n\n".join(notes),
  )
  return [(table, PAPER["implementation_checkers"])]


SIDES = {"free": "Free reflection", "constrained": "Verdict-constrained"}
TRANSITION = (
  "A transition is a packet in which at least one control ran and at least one "
  "explanation was excluded; the first six of each trajectory, fewer where a "
  "trajectory has fewer."
)


def _count(transitions: Rows | Sequence[Any], side: str, key: str) -> int:
  return sum(t[side][key] for t in transitions)


def _share(transitions: Sequence[Any], side: str, key: str) -> str:
  if not transitions:
    return NONE
  count, total = _count(transitions, side, key), len(transitions)
  return f"{count}/{total} = {count / total:.2f}"


def _mean_change(transitions: Sequence[Any], side: str) -> str:
  values = [t[side]["change"] for t in transitions if t[side]["change"] is not None]
  return f"{statistics.fmean(values):+.4f}" if values else NONE


def _replay(results: Results) -> list[Beside]:
  by_seed = results.values["replay"]
  every = [t for transitions in by_seed.values() for t in transitions]
  shares = lambda transitions, key: [_share(transitions, s, key) for s in SIDES]
  by_focal = [
    (focal, [t for t in every if t["focal"] == focal])
    for focal in ("supported", "refuted", "open")
  ]
  free, constrained = (
    [_count(transitions, side, "improves") for transitions in by_seed.values()]
    for side in SIDES
  )
  gains = [c - f for c, f in zip(constrained, free, strict=True)]
  return [
    (
      Table(
        f"Successors of {len(every)} replayed transitions",
        ["Metric", *SIDES.values()],
        [
          ["Improving successors", *shares(every, "improves")],
          ["Mean visible change", *(_mean_change(every, side) for side in SIDES)],
          ["Probe-confirmed implementation", *shares(every, "implemented")],
          ["Repeated refuted mechanism", *shares(every, "repeats")],
        ],
        TRANSITION,
      ),
      PAPER["verdict_replay"],
    ),
    (
      Table(
        "Improving successors by what became of the focal explanation",
        ["Focal explanation", "Count", *SIDES.values()],
        [[focal, str(len(ts)), *shares(ts, "improves")] for focal, ts in by_focal],
      ),
      PAPER["verdict_replay_types"],
    ),
    (
      Table(
        "Improving successors by trajectory",
        ["Condition / seed", *by_seed],
        [
          ["Free reflection", *map(str, free)],
          ["Verdict-constrained", *map(str, constrained)],
          ["Paired difference", *(f"{gain:+d}" for gain in gains)],
        ],
      ),
      PAPER["verdict_replay_seeds"],
    ),
  ]


def _regimes(results: Results) -> list[Beside]:
  audits = [list(results.values["audit"][arm].values()) for arm in results.arms]
  regimes = list(audits[0][0]["executed"])
  count = lambda read: [f"{sum(map(read, a))}/{len(results.seeds)}" for a in audits]
  rows = [[n, *count(lambda a, n=n: a["executed"][n])] for n in regimes]
  rows += [["Full ordered hierarchy", *count(lambda a: a["hierarchy"])]]
  rows += [[f"{n}, and it pays", *count(lambda a, n=n: a["pays"][n])] for n in regimes]
  rows += [["Each stage pays on those before it", *count(lambda a: a["ordered"])]]
  header = ["Regime", *map(title, results.arms)]
  name = "Regimes that final champions execute"
  return [(Table(name, header, rows), PAPER["regime_audit"])]


def _placebos(results: Results) -> list[Beside]:
  proposals = lambda run: run["ledger"]["proposer"]["calls"]
  columns = {
    "Median": results.median,
    "Gate": results.gate,
    "Candidates": results.calls("candidate"),
    "Controls": results.calls("control"),
    "Probes": results.calls("probe"),
    "Proposals": lambda arm: f"{results.mean(arm, proposals):.0f}",
  }
  notes = [results.difference("quantforge", other) for other in results.arms[1:]]
  if expects := results.values.get("expects"):
    notes.insert(0, f"Expected before the first run: {expects}")
  name = "QuantForge beside arms without its verdicts"
  table = _by_arm(name, results.arms, columns, notes=notes)
  return [table, *_truth(results)]


def _truth(results: Results) -> list[Beside]:
  """Compares verdicts with the truth, if the task has a known truth."""

  def rightly(kind: str) -> Column:
    def read(arm: str) -> str:
      counts = [run["against_truth"][kind] for run in results.runs(arm)]
      return f"{sum(right for right, _ in counts)}/{sum(map(sum, counts))}"

    return read

  judged = lambda run: any(map(sum, run["against_truth"].values()))
  arms = [arm for arm in results.arms if any(map(judged, results.runs(arm)))]
  columns = {
    "Focal account supported, rightly": rightly("supported"),
    "Excluded, rightly": rightly("excluded"),
  }
  return [_by_arm("Verdicts against the truth", arms, columns)] if arms else []
