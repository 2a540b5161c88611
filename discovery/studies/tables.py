"""Study results in the form of the paper's tables, the printed numbers beside ours."""

import statistics
from collections.abc import Sequence

from mxjax.discovery.studies import checker_cases, paired
from mxjax.discovery.studies.paper_numbers import PAPER
from mxjax.discovery.studies.reading import (
  NONE,
  Results,
  Table,
  by_seed,
  crossing,
  difference,
  finals,
  gate,
  generation,
  ledger,
  mean,
  median,
  shown,
  title,
)

CALLS = (40, 80, 120, 160, 200, 240)


def tables(results: Results) -> list[Table]:
  """All tables of a study."""
  made = {
    "matched": _matched,
    "compilation": _compilation,
    "controls": _controls,
    "checkers": _checkers,
    "replay": _replay,
    "regimes": _regimes,
    "placebos": _placebos,
  }[results["study"]](results)
  return made


def _matched(results: Results) -> list[Table]:
  arms = list(results["runs"])
  endpoints = tuple(
    (
      title(arm),
      median(results, arm),
      gate(results, arm),
      generation(results, arm, 0),
      generation(results, arm, 1),
      ledger(results, arm, "candidate"),
      ledger(results, arm, "control"),
      ledger(results, arm, "probe"),
    )
    for arm in arms
  )
  records = tuple(
    (title(arm), str(seed), f"{final:.3f}", str(crossed[0]), str(crossed[1]))
    for arm in arms
    for seed, final in zip(results["seeds"], finals(results, arm), strict=True)
    if (crossed := crossing(results, arm, seed))
  )
  return [
    Table(
      "Held-out outcomes at the end of the budget",
      (
        "Arm",
        "Median",
        "Gate",
        "Generation index",
        "Confirmation call",
        "New programs",
        "Controls",
        "Probes",
      ),
      endpoints,
      PAPER["search_endpoints"],
    ),
    Table(
      "Threshold crossings",
      ("Arm", "Seed", "Held-out", "Generation index", "Confirmation call"),
      records,
      PAPER["threshold_records"],
    ),
    by_seed(results, "framework_seeds", arms[:3]),
    _anytime(results, arms),
  ]


def _anytime(results: Results, arms: Sequence[str]) -> Table:
  calls = [c for c in CALLS if c <= results["budget"]]

  def at(arm: str, call: int) -> str:
    runs = results["runs"][arm].values()
    found = [m[2] for r in runs for m in r["marks"] if m[0] == call]
    return f"{statistics.median(shown(results, v) for v in found):.3f}"

  return Table(
    "Median held-out target over the budget",
    ("Arm", *map(str, calls)),
    tuple((title(arm), *(at(arm, call) for call in calls)) for arm in arms),
    PAPER["anytime_values"],
  )


def _invalid(results: Results, arm: str) -> str:
  runs = results["runs"][arm].values()
  followed = sum(r["followed"] for r in runs)
  effective = sum(r["effective"] for r in runs)
  return f"{1 - effective / followed:.2f}" if followed else NONE


def _compilation(results: Results) -> list[Table]:
  arms = list(results["runs"])
  kinds = ("candidate", "control", "probe", "total")
  spread = lambda arm: [r["effective"] for r in results["runs"][arm].values()]
  closures = [
    f"{statistics.fmean(spread(a)):.1f} ± {statistics.stdev(spread(a)):.1f}"
    if len(spread(a)) > 1
    else f"{spread(a)[0]}"
    for a in arms
  ]
  column = lambda name, read: (name, *(read(results, arm) for arm in arms))
  return [
    Table(
      "Calls by kind, mean over seeds",
      ("Arm", "New candidates", "Controls", "Probes", "Total"),
      tuple((title(a), *(ledger(results, a, kind) for kind in kinds)) for a in arms),
      PAPER["compilation_budget"],
    ),
    by_seed(results, "compilation_seeds", arms[1:]),
    Table(
      "Outcomes",
      ("Metric", *map(title, arms)),
      (
        column("Median held-out", median),
        column("Gate", gate),
        column("Median generation index", lambda r, a: generation(r, a, 0)),
        column("Median confirmation call", lambda r, a: generation(r, a, 1)),
        column("Invalid-successor fraction", _invalid),
        ("Effective verdicts a run", *closures),
      ),
      PAPER["compilation_summary"],
    ),
  ]


def _controls(results: Results) -> list[Table]:
  arms = list(results["runs"])

  def row(arm: str) -> tuple[str, ...]:
    explicit = mean(results, arm, lambda r: r["explicit"])
    calls = mean(results, arm, lambda r: r["ledger"]["control"])
    return (
      "Minimal discriminating" if arm == "quantforge" else title(arm),
      f"{calls:.0f}",
      ledger(results, arm, "candidate"),
      f"{explicit:.1f}",
      f"{calls / explicit:.1f}" if explicit else NONE,
      f"{mean(results, arm, lambda r: r['effective']):.1f}",
      median(results, arm),
      gate(results, arm),
    )

  return [
    Table(
      "Control selection",
      (
        "Policy",
        "Control calls",
        "New candidates",
        "Explicit verdicts",
        "Calls per explicit verdict",
        "Effective verdicts",
        "Median",
        "Gate",
      ),
      tuple(map(row, arms)),
      PAPER["control_selection"],
    ),
    by_seed(results, "control_selection_seeds", arms[1:]),
  ]


def _checkers(results: Results) -> list[Table]:
  searched = {
    "source": "source",
    "lowered": "lowered",
    "probe": "quantforge",
    "layer_output": "layer-output",
  }

  def row(checker: str) -> tuple[str, ...]:
    arm = searched[checker]
    found = checker_cases.errors(results["cases"], checker)
    share = lambda count, total: (
      f"{count}/{total} [{paired.share_interval(count, total)[0]:.2f}, "
      f"{paired.share_interval(count, total)[1]:.2f}]"
    )
    return (
      {"probe": "Execution probe"}.get(checker, title(arm)),
      share(found["false_accepts"], found["apparent"]),
      share(found["false_rejects"], found["real"]),
      ledger(results, arm, "probe"),
      ledger(results, arm, "candidate"),
      median(results, arm),
      gate(results, arm),
    )

  missed = {
    checker: [
      r["name"] for r in results["cases"] if r["accepted"][checker] != r["is_real"]
    ]
    for checker in checker_cases.CHECKERS
  }
  return [
    Table(
      "Checkers on the injected cases, with exact 95 % intervals, and in the search",
      (
        "Checker",
        "False accepts",
        "False rejects",
        "Extra calls",
        "New candidates",
        "Median",
        "Gate",
      ),
      tuple(map(row, checker_cases.CHECKERS)),
      PAPER["implementation_checkers"],
      tuple(f"Misjudged by {k}: {'; '.join(v) or 'none'}." for k, v in missed.items()),
    )
  ]


def _replay(results: Results) -> list[Table]:
  found = [t for each in results["replay"].values() for t in each]
  both = ("free", "constrained")
  count = lambda side, key, rows: sum(t[side][key] for t in rows)
  share = lambda n, rows: f"{n}/{len(rows)} = {n / len(rows):.2f}" if rows else NONE

  def change(side: str) -> str:
    values = [t[side]["change"] for t in found if t[side]["change"] is not None]
    return f"{statistics.fmean(values):+.4f}" if values else NONE

  line = lambda name, key: (
    name,
    *(share(count(side, key, found), found) for side in both),
  )
  kinds = {
    kind: [t for t in found if t["focal"] == kind]
    for kind in ("supported", "refuted", "open")
  }
  per_seed = lambda side: [
    count(side, "improves", ts) for ts in results["replay"].values()
  ]
  free, bound = per_seed("free"), per_seed("constrained")
  gain = [b - f for b, f in zip(bound, free, strict=True)]
  header = ("Metric", "Free reflection", "Verdict-constrained")
  return [
    Table(
      f"Successors of {len(found)} replayed transitions",
      header,
      (
        line("Improving successors", "improves"),
        ("Mean visible change", change("free"), change("constrained")),
        line("Probe-confirmed implementation", "implemented"),
        line("Repeated refuted mechanism", "repeats"),
      ),
      PAPER["verdict_replay"],
      (
        "A transition is a packet in which at least one control ran and at least one "
        "explanation was excluded; the first six of each trajectory, fewer where a "
        "trajectory has fewer.",
      ),
    ),
    Table(
      "Improving successors by what became of the focal explanation",
      ("Focal explanation", "Count", *header[1:]),
      tuple(
        (
          kind,
          str(len(rows)),
          *(share(count(side, "improves", rows), rows) for side in both),
        )
        for kind, rows in kinds.items()
      ),
      PAPER["verdict_replay_types"],
    ),
    Table(
      "Improving successors by trajectory",
      ("Condition / seed", *results["replay"]),
      (
        ("Free reflection", *map(str, free)),
        ("Verdict-constrained", *map(str, bound)),
        ("Paired difference", *(f"{g:+d}" for g in gain)),
      ),
      PAPER["verdict_replay_seeds"],
    ),
  ]


def _regimes(results: Results) -> list[Table]:
  arms = list(results["runs"])
  names = list(next(iter(results["audit"][arms[0]].values()))["executed"])
  total = len(results["seeds"])
  audits = {arm: list(results["audit"][arm].values()) for arm in arms}
  of = lambda read: tuple(f"{sum(map(read, audits[a]))}/{total}" for a in arms)
  rows = [(n, *of(lambda a, n=n: a["executed"][n])) for n in names]
  rows += [("Full ordered hierarchy", *of(lambda a: a["hierarchy"]))]
  rows += [(f"{n}, and it pays", *of(lambda a, n=n: a["pays"][n])) for n in names]
  rows += [("Each stage pays on those before it", *of(lambda a: a["ordered"]))]
  return [
    Table(
      "Regimes that final champions execute",
      ("Regime", *map(title, arms)),
      tuple(rows),
      PAPER["regime_audit"],
    )
  ]


def _placebos(results: Results) -> list[Table]:
  arms = list(results["runs"])
  rows = tuple(
    (
      title(arm),
      median(results, arm),
      gate(results, arm),
      *(ledger(results, arm, kind) for kind in ("candidate", "control", "probe")),
      f"{mean(results, arm, lambda r: r['ledger']['proposer']['calls']):.0f}",
    )
    for arm in arms
  )
  header = ("Arm", "Median", "Gate", "Candidates", "Controls", "Probes", "Proposals")
  made = Table(
    "QuantForge and placebos",
    header,
    rows,
    notes=tuple(difference(results, "quantforge", other) for other in arms[1:]),
  )
  return [made, *_truth(results)]


def _truth(results: Results) -> list[Table]:
  """Verdicts against the truth, in a world that has one."""

  def row(arm: str) -> tuple[str, ...]:
    runs = results["runs"][arm].values()
    counts = [r["against_truth"] for r in runs if r["against_truth"]]
    right = lambda kind: sum(c[kind][0] for c in counts)
    total = lambda kind: sum(sum(c[kind]) for c in counts)
    kinds = ("supported", "excluded")
    return (title(arm), *(f"{right(k)}/{total(k)}" for k in kinds))

  arms = [
    arm
    for arm, runs in results["runs"].items()
    if any(sum(map(sum, r["against_truth"].values())) for r in runs.values())
  ]
  if not arms:
    return []
  header = ("Arm", "Focal account supported, rightly", "Excluded, rightly")
  return [Table("Verdicts against the truth", header, tuple(map(row, arms)))]
