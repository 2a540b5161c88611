"""Every table of a trial, from its plan, logs and recorded successors alone.

Nothing is measured or asked here, so the tables of a packed trial are those of its
folder. A difference is the first condition minus the second: of shares that improve, a
positive one favors the first; of a target, which is to fall, a negative one does.
"""

import math
import pathlib
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mxjax.discovery.core.store import begun_events, read_stored
from mxjax.discovery.core.task import Status
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.results import NONE
from mxjax.discovery.studies.trial import read_plan
from mxjax.discovery.studies.trial_replay import CONDITIONS
from mxjax.evaluation.measures.statistics import compare_seeds, share_interval
from mxjax.evaluation.report.tables import Table

ALPHA = 0.05
PAPER_DISCORDANT = 0.40, 0.13
"""Shares of the paper's 48 pairs in which only the bound, or only the free successor
improves, where the two are independent: .58 (1 - .31) and .31 (1 - .58)."""
COMPARED = (("bound", "free"), ("bound", "shuffled"), ("bound", "text"))
"""Conditions that are compared, as the plan's expectations name them."""
Event = Mapping[str, Any]


class Control(NamedTuple):
  """Controls that ran in a run, and those of them that ended well."""

  valid: int
  ran: int


class Recorded:
  """What the folder of a trial holds.

  Attributes:
    conditions: Those that the plan asks.
    returns: Times that an answer without its response goes back.
    events: The log of each run that has begun.
    transitions: By run, those that were replayed, in the order of calls.
    successors: By packet, condition and sample.
  """

  def __init__(self, path: pathlib.Path) -> None:
    """Reads a folder, or one that an archive was extracted into."""
    self.plan = read_plan(path)
    asked = self.plan["replay"]
    self.conditions: Sequence[str] = asked.get("conditions", CONDITIONS)
    self.returns: int = asked.get("returns", 0)
    has_log = lambda run: (path / "runs" / run / "log.jsonl").exists()
    self.events: dict[str, list[dict[str, Any]]] = {
      run: begun_events(path / "runs" / run)
      for run in self.plan["runs"]
      if has_log(run)
    }
    read = lambda pattern: [read_stored(p) for p in sorted(path.glob(pattern))]
    self.transitions: dict[str, list[dict[str, Any]]] = {}
    self.successors: dict[tuple[str, str, int], dict[str, Any]] = {}
    for run in self.plan["replay"]["runs"]:
      found = read(f"replay/{run}/transitions/*.json")
      if found:
        self.transitions[run] = sorted(found, key=lambda t: (t["call"], t["packet"]))
      for each in read(f"replay/{run}/successors/*.json"):
        self.successors[each["packet"], each["condition"], each["sample"]] = each
      hidden = {
        e["successor"]: e["change"] for e in read(f"replay/{run}/scores/*.json")
      }
      for packet, condition, sample in self.successors:
        key = f"{packet[:16]}-{condition}-{sample}"
        if key in hidden:
          self.successors[packet, condition, sample]["heldout"] = hidden[key]
    self.scores: dict[str, dict[str, Any]] = {
      p.stem: read_stored(p) for p in path.glob("heldout/scores/*.json")
    }

  def controls(self, run: str) -> Control:
    """Counts the controls of a run that were executed."""
    ended = [
      e["status"]
      for e in self.events[run]
      if e["event"] == "outcome" and e["kind"] == "control"
    ]
    return Control(ended.count(Status.OK), len(ended))

  def of(self, packet: str, condition: str) -> list[dict[str, Any]]:
    """Returns the recorded successors of a transition under a condition."""
    samples = range(self.plan["replay"]["samples"])
    keys = ((packet, condition, sample) for sample in samples)
    return [self.successors[key] for key in keys if key in self.successors]

  def pairs(
    self, first: str, second: str, focal: str = ""
  ) -> dict[str, list[tuple[float, float]]]:
    """Returns by run the improving shares of the transitions that have both conditions.

    A share is over the samples of one transition. `focal` takes those whose focal
    account was supported, or refuted.
    """
    found = {}
    for run, transitions in self.transitions.items():
      rows = []
      for each in transitions:
        sides = [self.of(each["packet"], name) for name in (first, second)]
        if all(sides) and focal in ("", each["focal"]):
          one, two = (statistics.fmean(map(improves, side)) for side in sides)
          rows.append((one, two))
      if rows:
        found[run] = rows
    return found


def improves(successor: Mapping[str, Any]) -> bool:
  """Whether a successor lowers the visible target by more than its margin.

  One whose answer stayed refused after its repair turns would not have run.
  """
  return bool(successor.get("improves")) and not successor["refused"]


def met(outcome: Mapping[str, Any]) -> bool:
  """Whether the probe finds in an answer the response that it was asked for.

  Whoever is told another verdict's demand is asked for that; who is told none, for the
  response that the verdict demands.
  """
  return bool(outcome.get("obeyed", outcome.get("implemented")))


def validity(recorded: Recorded) -> tuple[Control, bool]:
  """Returns the controls of all runs, and whether the plan lets the trial stand."""
  every = [recorded.controls(run) for run in recorded.events]
  total = Control(sum(c.valid for c in every), sum(c.ran for c in every))
  is_valid = bool(total.ran) and total.valid / total.ran > recorded.plan["validity"]
  return total, is_valid


def power(pairs: int, first: float, second: float) -> float:
  """Returns the power of the exact sign test on a number of pairs.

  `first` and `second` are the probabilities that only the first, or only the second of
  a pair improves. The test is two-sided at `ALPHA`.
  """
  found = 0.0
  for wins in range(pairs + 1):
    for losses in range(pairs - wins + 1):
      if sign_test(wins, losses) <= ALPHA:
        rest = pairs - wins - losses
        # A trinomial: wins, losses and ties, of which the test uses the first two.
        ways = math.comb(pairs, wins) * math.comb(pairs - wins, losses)
        chance = first**wins * second**losses * (1 - first - second) ** rest
        found += ways * chance
  return found


def sign_test(wins: int, losses: int) -> float:
  """Returns the exact two-sided p value of a sign test, in 0..1.

  Ties are left out; without any win or loss it is 1.
  """
  total, least = wins + losses, min(wins, losses)
  tail = sum(math.comb(total, k) for k in range(least + 1)) / 2**total
  return min(1.0, 2 * tail)


def tables(path: pathlib.Path) -> list[Table]:
  """Returns every table of a trial's folder, from its records alone.

  Those about replays are left out where nothing was replayed.

  Raises:
    ValueError: The folder has no plan, or the plan was changed.
  """
  recorded = Recorded(path)
  found = [_runs(recorded), _validity(recorded)]
  if recorded.transitions:
    found += [_conditions(recorded), _by_focal(recorded), _by_run(recorded)]
    found += [_compared(recorded), _transitions(recorded)]
  return [*found, *_arms(recorded)]


def _tokens(counts: Mapping[str, int]) -> str:
  read = lambda name: counts.get(f"{name}_tokens", 0)
  return f"{read('input'):,} / {read('output'):,}"


def _of(events: Sequence[Event], name: str) -> list[Event]:
  return [e for e in events if e["event"] == name]


def _runs(recorded: Recorded) -> Table:
  head = ["Run", "Arm", "Calls: candidates, controls, probes", "Refused"]
  head += ["Verdicts", "Start", "Best", "Held out: start", "Best", "Tokens in / out"]
  rows = []
  for run, events in recorded.events.items():
    calls = Counter[str]()
    for event in _of(events, "outcome"):
      calls[event["kind"]] += event["charged"]
    verdicts = Counter(e["verdict"] for e in _of(events, "verdict"))
    values = [e["value"] for e in _of(events, "program")]
    hidden = recorded.scores.get(run, {})
    marks = hidden.get("marks") or [[0, None]]
    shown = lambda value: NONE if value is None else f"{value:.4f}"
    last = events[-1]
    is_closed = last["event"] == "closed"
    rows.append(
      [
        run if is_closed else f"{run} (open)",
        ARMS[recorded.plan["runs"][run]["arm"]].title,
        ", ".join(str(calls[kind]) for kind in ("candidate", "control", "probe")),
        str(len(_of(events, "refused"))),
        ", ".join(f"{name} {n}" for name, n in sorted(verdicts.items())) or NONE,
        shown(values[0] if values else None),
        shown(min(values) if values else None),
        shown(hidden.get("initial")),
        shown(marks[-1][1]),
        _tokens(last["ledger"]["proposer"] if is_closed else {}),
      ]
    )
  hidden = "; ".join(
    f"{name} by {', '.join(f'{key} {value}' for key, value in spec['heldout'].items())}"
    for name, spec in recorded.plan["tasks"].items()
    if spec.get("heldout")
  )
  told = f"Plan {recorded.plan['hash'][:16]}."
  told += f" What differs of a task held out: {hidden}." if hidden else ""
  return Table("Runs", head, rows, told)


def _validity(recorded: Recorded) -> Table:
  rows = [
    [run, str(found.ran), str(found.valid)]
    for run in recorded.events
    if (found := recorded.controls(run)).ran
  ]
  total, is_valid = validity(recorded)
  share = f"{total.valid / total.ran:.3f}" if total.ran else NONE
  rule = f"more than {recorded.plan['validity']:g} of all controls must end well"
  told = "The trial stands" if is_valid else "THE TRIAL IS VOID"
  last = [events[-1]["event"] for events in recorded.events.values()]
  is_over = len(last) == len(recorded.plan["runs"]) and {*last} == {"closed"}
  if not (total.ran or is_over):
    told = "No control has ended yet"
  return Table(
    "Valid controls",
    ["Run", "Ran", "Valid"],
    [*rows, ["all", str(total.ran), str(total.valid)]],
    f"{told}: the share is {share}, and {rule}.",
  )


def _conditions(recorded: Recorded) -> Table:
  count = lambda test: lambda rows: f"{sum(map(test, rows))}/{len(rows)}"

  def mean(read: Callable[[dict[str, Any], float], float | None]) -> Callable[..., str]:
    def shown(rows: Sequence[dict[str, Any]], margins: Sequence[float]) -> str:
      pairs = zip(rows, margins, strict=True)
      values = [v for row, margin in pairs if (v := read(row, margin)) is not None]
      return f"{statistics.fmean(values):+.3f} ({len(values)})" if values else NONE

    return shown

  # In units of the margin of its own task, so that several tasks can be averaged.
  def scaled(key: str) -> Callable[[dict[str, Any], float], float | None]:
    return lambda row, margin: (
      None if row["refused"] or row.get(key) is None else row[key] / margin
    )

  metrics: dict[str, Callable[..., str]] = {
    "Successors that improve": lambda rows, _: count(improves)(rows),
    "Mean change of the target, in its margins": mean(scaled("change")),
    "Held out: mean change of the target, in those margins": mean(scaled("heldout")),
    "Held out: the target falls": lambda rows, _: count(
      lambda s: not s["refused"] and (s.get("heldout") or 0.0) < 0
    )(rows),
    "Response implemented": lambda rows, _: count(lambda s: bool(s.get("implemented")))(
      rows
    ),
    "Its own, shuffled response implemented": lambda rows, _: count(
      lambda s: s["obeyed"]
    )([s for s in rows if "obeyed" in s]),
    "A refuted edit again": lambda rows, _: count(lambda s: bool(s.get("repeats")))(
      rows
    ),
    "Refused after repairs": lambda rows, _: count(lambda s: bool(s["refused"]))(rows),
    "Program failed": lambda rows, _: count(
      lambda s: not s["refused"] and s["status"] != Status.OK
    )(rows),
    "Requests an answer": lambda rows, _: (
      f"{statistics.fmean(s['usage'].get('calls', 0) for s in rows):.2f}"
      if rows
      else NONE
    ),
    "Tokens in / out": lambda rows, _: _tokens(
      sum((Counter(s["usage"]) for s in rows), Counter())
    ),
  }
  first = lambda s: {**s, **s["tries"][0]} if s.get("tries") else s
  if recorded.returns:
    metrics |= {
      "What is asked for is found in the first answer": lambda rows, _: count(
        lambda s: met(first(s))
      )(rows),
      "What is asked for is found in the last": lambda rows, _: count(met)(rows),
      "First answers that improve": lambda rows, _: count(lambda s: improves(first(s)))(
        rows
      ),
      "Answers returned with what was measured": lambda rows, _: str(
        sum(len(s["tries"]) - 1 for s in rows if s.get("tries"))
      ),
    }
  every = [each for found in recorded.transitions.values() for each in found]
  columns = {
    # The successors of a condition, each with the margin of its target.
    name: [(s, t["margin"]) for t in every for s in recorded.of(t["packet"], name)]
    for name in recorded.conditions
  }
  split = {
    name: ([s for s, _ in rows], [m for _, m in rows]) for name, rows in columns.items()
  }
  samples = recorded.plan["replay"]["samples"]
  absent = len(every) * len(columns) * samples - sum(map(len, columns.values()))
  return Table(
    "Successors by condition",
    ["Metric", *recorded.conditions],
    [
      [metric, *(read(*split[name]) for name in recorded.conditions)]
      for metric, read in metrics.items()
    ],
    f"{len(every)} transitions of {len(recorded.transitions)} runs, {samples} answers "
    "to each. A count in brackets is the number of successors behind a mean."
    + (f" Not recorded yet: {absent} successors." if absent else ""),
  )


def _share(successors: Sequence[dict[str, Any]]) -> str:
  if not successors:
    return NONE
  count, total = sum(map(improves, successors)), len(successors)
  low, high = share_interval(count, total)
  return f"{count}/{total} = {count / total:.2f} [{low:.2f}, {high:.2f}]"


def _by_focal(recorded: Recorded) -> Table:
  rows = []
  for focal in ("supported", "refuted"):
    chosen = [
      each["packet"]
      for transitions in recorded.transitions.values()
      for each in transitions
      if each["focal"] == focal
    ]
    cells = [
      _share([s for packet in chosen for s in recorded.of(packet, condition)])
      for condition in recorded.conditions
    ]
    rows.append([focal, str(len(chosen)), *cells])
  return Table(
    "Successors that improve by what became of the focal account",
    ["Focal account", "Transitions", *recorded.conditions],
    rows,
    "Intervals are exact, of successors as if they were independent. The paper has "
    "11/26 and 18/26 after support, 4/22 and 10/22 after refutation, free and bound.",
  )


def _by_run(recorded: Recorded) -> Table:
  rows = []
  for run, transitions in recorded.transitions.items():
    cells = [
      _share([s for each in transitions for s in recorded.of(each["packet"], name)])
      for name in recorded.conditions
    ]
    rows.append([run, str(len(transitions)), *cells])
  return Table(
    "Successors that improve by run", ["Run", "Transitions", *recorded.conditions], rows
  )


def _compared(recorded: Recorded) -> Table:
  head = ["Difference", "Pairs", "Of shares, by run", "Mean over runs"]
  head += ["Exact sign flips over runs, p", "Only first", "Only second", "Sign test, p"]
  rows, most = [], 0
  for first, second in COMPARED:
    if not {first, second} <= {*recorded.conditions}:
      continue
    for focal in ("", "supported", "refuted"):
      by_run = recorded.pairs(first, second, focal)
      pairs = [pair for each in by_run.values() for pair in each]
      if not pairs:
        continue
      most = max(most, len(pairs))
      means = [
        [statistics.fmean(pair[side] for pair in each) for each in by_run.values()]
        for side in (0, 1)
      ]
      gains = [one - two for one, two in zip(*means, strict=True)]
      # Fewer than two runs have no pattern of signs.
      p = f"{compare_seeds(*means).sign_flip_p:.3f}" if len(gains) > 1 else NONE
      wins = sum(one > two for one, two in pairs)
      losses = sum(one < two for one, two in pairs)
      rows.append(
        [
          f"{first} - {second}" + (f", {focal}" if focal else ""),
          str(len(pairs)),
          " ".join(f"{gain:+.2f}" for gain in gains),
          f"{statistics.fmean(gains):+.3f}",
          p,
          str(wins),
          str(losses),
          f"{sign_test(wins, losses):.3f}",
        ]
      )
  one, two = PAPER_DISCORDANT
  told = f"The sign test on {most} pairs finds the paper's effect, where {one:.0%} of "
  told += f"the pairs favor the first and {two:.0%} the second, in "
  told += f"{power(most, one, two):.0%} of trials at {ALPHA:g}; on its 48 pairs, in "
  told += f"{power(48, one, two):.0%}."
  return Table("Paired differences", head, rows, told)


def _transitions(recorded: Recorded) -> Table:
  head = ["Run", "Call", "Edit", "Verdict, response", "Shuffled to"]
  head += recorded.conditions
  rows = [
    [
      run,
      str(each["call"]),
      each["label"],
      f"{each['verdict']}, {each['response']} {each['observable']}",
      " ".join(each["shuffled"]),
      *(_change(recorded.of(each["packet"], name)) for name in recorded.conditions),
    ]
    for run, transitions in recorded.transitions.items()
    for each in transitions
  ]
  note = "Cells are changes of the visible target, or how a successor ended. "
  note += "A star is a fall beyond the margin."
  return Table("Replayed transitions", head, rows, note)


def _change(successors: Sequence[Mapping[str, Any]]) -> str:
  return " ".join(
    "refused"
    if each["refused"]
    else each["status"]
    if each["change"] is None
    else f"{each['change']:+.4f}{'*' * improves(each)}"
    for each in successors
  )


def _arms(recorded: Recorded) -> list[Table]:
  """Compares arms on the tasks and seeds that they share, by the held-out champion.

  A row is an arm at a mark, a number of calls at which champions were scored: where all
  come to the same program in the end, the way there still tells them apart.
  """
  champions: dict[str, dict[tuple[str, int, int], float]] = {}
  for name, run in recorded.plan["runs"].items():
    for calls, value in recorded.scores.get(name, {}).get("marks", ()):
      if value is not None:
        place = run["task"], run["seed"], calls
        champions.setdefault(run["arm"], {})[place] = value
  ours, rows = champions.pop("quantforge", {}), []
  for arm, theirs in champions.items():
    shared = [place for place in ours if place in theirs]
    for calls in sorted({calls for _, _, calls in shared}):
      places = [place for place in shared if place[-1] == calls]
      sides = [[side[place] for place in places] for side in (ours, theirs)]
      differences = [one - two for one, two in zip(*sides, strict=True)]
      p = f"{compare_seeds(*sides).sign_flip_p:.3f}" if len(places) > 1 else NONE
      wins = sum(d < 0 for d in differences)
      rows.append(
        [
          ARMS[arm].title,
          str(calls),
          str(len(places)),
          " ".join(f"{d:+.4f}" for d in differences),
          f"{statistics.fmean(differences):+.4f}",
          f"{wins} of {len(places)}",
          p,
        ]
      )
  if not rows:
    return []
  head = ["Other arm", "Calls", "Pairs", "QuantForge minus it, held out", "Mean"]
  head += ["QuantForge lower", "Exact sign flips, p"]
  return [Table("Arms", head, rows, "A pair is a task and a seed.")]
