"""Studies: arms over paired seeds, frozen before they start, resumable at any point."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import edit_templates, identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.packet import condition
from mxjax.discovery.core.residual import PRIMARY
from mxjax.discovery.core.store import Store, read_events
from mxjax.discovery.sandbox.laboratory import Laboratory
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.studies import checker_cases, log, regimes, verdict_replay
from mxjax.discovery.studies.arms import ARMS, AS_IN_PAPER
from mxjax.storage import atomic_io

Told = Callable[[str], None]
MATCHED = ("score", "text", "reflect", "quantforge")


@dataclasses.dataclass(frozen=True)
class Study:
  """One question.

  Attributes:
    title: For people.
    arms: What it runs over all seeds; studies in one folder share runs.
    extra: What it measures beside the runs: `replay`, `cases`, `regimes` or nothing.
  """

  title: str
  arms: tuple[str, ...]
  extra: str = ""


STUDIES: Mapping[str, Study] = {
  "matched": Study("Matched-budget comparison", MATCHED),
  "compilation": Study("Residual compilation", ("quantforge", "no-compile")),
  "controls": Study(
    "Control selection", ("quantforge", "random-controls", "all-controls")
  ),
  "checkers": Study(
    "Implementation checkers",
    ("no-compile", "source", "quantforge", "layer-output", "lowered"),
    "cases",
  ),
  "replay": Study("Verdict replay", ("quantforge",), "replay"),
  "regimes": Study("Regime audit", MATCHED, "regimes"),
  "placebos": Study(
    "Placebos",
    (
      "quantforge",
      "thrifty",
      "uniform",
      "best-of-n",
      "shuffled",
      "corrupted-20",
      "corrupted-50",
    ),
  ),
}
"""By the name that `mxjax discover study` takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
  """What a folder of studies fixes.

  Attributes:
    task: Task specification; the synthetic world takes its seed from the run.
    seeds: Paired seeds of the comparison.
    tuning_seeds: Seeds on which cards, margins and the gate were set; disjoint.
    budget: Evaluator calls a run.
    gate: Share of the way from the initial program to the ideal on held-out data
      that counts as success.
    sandbox: See `RunOptions`.
    proposer: See `RunOptions`.
  """

  task: Mapping[str, Any]
  seeds: tuple[int, ...]
  tuning_seeds: tuple[int, ...] = ()
  budget: int = 240
  gate: float = 0.7
  sandbox: str = "off"
  proposer: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {"kind": "embedded"}
  )

  def __post_init__(self) -> None:
    """Refuses to compare on seeds that were tuned on."""
    if shared := sorted(set(self.seeds) & set(self.tuning_seeds)):
      raise ValueError(f"study: seeds {shared} were tuned on; compare on others.")

  def spec(self, seed: int) -> dict[str, Any]:
    """The task of a seed."""
    spec = dict(self.task)
    return {**spec, "seed": seed} if spec["task"] == "world" else spec

  def run(self, arm: str, seed: int) -> runs.RunOptions:
    """The options of one run."""
    config = {"seed": seed, "budget": self.budget, **AS_IN_PAPER, **ARMS[arm].changes}
    return runs.RunOptions(
      task=self.spec(seed),
      config=config,
      sandbox=self.sandbox,
      proposer=self.proposer,
      holdout="off",
    )


def frozen(options: StudyOptions) -> dict[str, Any]:
  """Everything a comparison could be tuned by, with its hash."""
  task = task_.load(options.spec(options.seeds[0]))
  held = {
    "options": json.loads(json.dumps(dataclasses.asdict(options))),
    "cards": edit_templates.fingerprint(task.cards),
    "margins": dict(task.margins),
    "arms": {name: dict(arm.changes) for name, arm in ARMS.items()},
    "as_in_paper": dict(AS_IN_PAPER),
    "sources": identity.source_digest("mxjax.discovery"),
  }
  return {**held, "hash": identity.digest(held)}


class Folder:
  """A folder of studies that share their runs.

  Attributes:
    options: What it fixes.
    frozen: What was frozen before its first run.
  """

  def __init__(self, path: pathlib.Path, options: StudyOptions) -> None:
    """Opens a folder, new or begun.

    Raises:
      ValueError: It was begun with other cards, priors, margins or options.
    """
    self.path, self.options = path, options
    self.frozen = frozen(options)
    kept = path / "frozen.json"
    if kept.exists():
      before = json.loads(kept.read_text())
      changed = [
        key for key in before if key != "hash" and before[key] != self.frozen.get(key)
      ]
      if changed:
        raise ValueError(
          f"study: {path} was frozen with other {', '.join(changed)}; use a new folder."
        )
    else:
      atomic_io.check_output(path)
      path.mkdir(parents=True, exist_ok=True)
      atomic_io.write_durably(kept, json.dumps(self.frozen, indent=1).encode())
    self._archive = Store(path / "archive")
    self._benches: dict[str, Any] = {}
    self._local: LocalExecutor | None = None

  def close(self) -> None:
    """Stops the workers."""
    for bench in self._benches.values():
      bench.close()

  def bench(self, task: task_.Task) -> Any:
    """Workers for a task: one bench for all runs of one specification."""
    key = identity.canonical(dict(task.spec))
    if key not in self._benches:
      if self.options.sandbox != "off":
        made: Any = runs.make_bench(
          task,
          self._archive,
          self.options.sandbox,
          compiled=self.path / "compiled",
        )
      elif self._local is not None:
        made = self._local.sibling(task)
      else:
        made = self._local = LocalExecutor(task)
      self._benches[key] = made
    return self._benches[key]

  def laboratory(self, task: task_.Task, name: str) -> Laboratory:
    """A laboratory for calls outside any run's budget."""
    store = Store(self.path / name)
    return Laboratory(task, self.bench(task), store, archive=self._archive)

  def run_folder(self, arm: str, seed: int) -> pathlib.Path:
    """Where a run lies."""
    return self.path / "runs" / f"{arm}-{seed}"

  def run(self, arm: str, seed: int) -> dict[str, Any]:
    """Runs, resumes or reads one run; returns its summary."""
    folder, made = self.run_folder(arm, seed), self.options.run(arm, seed)
    task = task_.load(made.task)
    if not (folder / "run.json").exists():
      runs.write_options(folder, made)
    if not _is_closed(folder):
      store = Store(folder)
      search = runs.make_search(made, task, self.bench(task), store, self._archive)
      search.run()
    hidden = task.holdout()
    if hidden is not None:
      heldout.score_closed(folder, hidden, self.bench(hidden), self._archive)
    return log.summarize(folder, task)

  def landmarks(self, seed: int) -> dict[str, float]:
    """Held-out target of the initial program and of the ideal, and the gate between."""
    task = task_.load(self.options.spec(seed)).holdout()
    if task is None:
      raise ValueError("study: the task has no held-out data; name a held-out model.")
    lab = self.laboratory(task, "landmarks")
    call = lab.prepare(task.interface.default_source()).call
    assert call is not None
    outcome = lab.run([condition(PRIMARY, "heldout", call, lab.evaluator)])[0]
    initial, ideal = outcome.values[task.target], task.ideal()
    gate = initial - self.options.gate * (initial - ideal)
    return {"initial": initial, "ideal": ideal, "gate": gate}


def _is_closed(folder: pathlib.Path) -> bool:
  path = folder / "log.jsonl"
  return path.exists() and read_events(folder)[-1]["event"] == "closed"


def conduct(
  folder: Folder, name: str, tell: Told, *, seeds: Sequence[int] = ()
) -> dict[str, Any]:
  """Runs or resumes a study; returns its results, JSON-ready.

  Args:
    folder: Where its runs lie.
    name: One of `STUDIES`.
    tell: Told a line for each finished part.
    seeds: Only these of the folder's seeds, where time demands it; all if empty.

  Raises:
    ValueError: A seed is not among those that the folder was frozen with.
  """
  study, seeds = STUDIES[name], tuple(seeds) or folder.options.seeds
  if unknown := set(seeds) - set(folder.options.seeds):
    raise ValueError(
      f"study: seeds {sorted(unknown)} are not among the frozen "
      f"{list(folder.options.seeds)} of {folder.path}; name some of those."
    )
  task = task_.load(folder.options.spec(seeds[0]))
  results: dict[str, Any] = {
    "study": name,
    "frozen": folder.frozen["hash"],
    "target": task.target,
    "seeds": list(seeds),
    "tuning_seeds": list(folder.options.tuning_seeds),
    "budget": folder.options.budget,
    "gate_share": folder.options.gate,
    "sandbox": folder.options.sandbox,
    "landmarks": {str(seed): folder.landmarks(seed) for seed in seeds},
    "runs": {arm: {} for arm in study.arms},
  }
  for seed in seeds:
    for arm in study.arms:
      found = results["runs"][arm][str(seed)] = folder.run(arm, seed)
      last = found["marks"][-1:]
      tell(f"{arm}, seed {seed}: {last}, closed: {found['closed']}")
  if study.extra == "replay":
    results["replay"] = {}
    for seed in seeds:
      made = folder.options.run("quantforge", seed)
      problem = task_.load(made.task)
      replayed = verdict_replay.replay(
        folder.run_folder("quantforge", seed),
        made,
        problem,
        folder.bench(problem),
        folder.laboratory(problem, "replay"),
      )
      results["replay"][str(seed)] = [dataclasses.asdict(t) for t in replayed]
      tell(f"replay, seed {seed}: {len(replayed)} transitions")
  if study.extra == "cases":
    lab = folder.laboratory(task, "cases")
    results["cases"] = checker_cases.judge_all(lab)
    tell(f"cases: {len(results['cases'])}")
  if study.extra == "regimes":
    results["audit"] = {}
    for arm in study.arms:
      audits = results["audit"][arm] = {}
      for seed in seeds:
        problem = task_.load(folder.options.spec(seed))
        source = regimes.champion_source(folder.run_folder(arm, seed))
        audits[str(seed)] = regimes.audit(folder.laboratory(problem, "regimes"), source)
    tell("regimes audited")
  text = json.dumps(results, indent=1)
  atomic_io.write_durably(folder.path / f"{name}.json", text.encode())
  return results
