"""Studies: arms over paired seeds, frozen before they start, resumable at any point."""

import dataclasses
import json
import math
import pathlib
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mxjax.discovery.core import edit_templates, identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.store import Store
from mxjax.discovery.sandbox.jailed_executor import JailedExecutor
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import heldout, runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.settings import SearchConfig
from mxjax.discovery.studies import (
  checker_cases,
  regimes,
  run_summary,
  verdict_replay,
)
from mxjax.discovery.studies.arms import ARMS, AS_IN_PAPER, STUDIES
from mxjax.errors import ValueRefusal
from mxjax.storage import atomic_io

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
  """Options that are fixed for a folder of studies.

  Attributes:
    task: Task specification; the synthetic world takes its seed from the run.
    seeds: Paired seeds of the comparison.
    tuning_seeds: Seeds on which edits, margins and the gate were set; disjoint.
    budget: Evaluator calls per run.
    gate: Share of the way from the initial program to the ideal on held-out data that
      counts as success.
    gate_at: Held-out target, perplexity for language models, that counts as success
      beside it, such as the paper's 8.00; None for no such gate.
    is_allocated: Whether the calls of each kind are those of the paper's arm.
    is_sequential: Whether every arm skips controls that no longer tell anything apart
      and repeats executions for free; the paper charges both.
    config: Fields of `SearchConfig` that all arms share, such as `start`.
    expects: What the comparison is expected to show, in the words of its plan.
    sandbox: See `RunOptions`.
    proposer: See `RunOptions`.
  """

  task: Mapping[str, Any]
  seeds: tuple[int, ...]
  tuning_seeds: tuple[int, ...] = ()
  budget: int = 240
  gate: float = 0.7
  gate_at: float | None = None
  is_allocated: bool = False
  is_sequential: bool = False
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  expects: str = ""
  sandbox: str = "off"
  proposer: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {"kind": "embedded"}
  )

  def __post_init__(self) -> None:
    """Rejects seeds that repeat or were tuned on, and runs without a held-out mark."""
    if self.budget < (least := SearchConfig.mark_every):
      raise ValueRefusal(
        "study",
        expected=f"at least {least} calls, after which a champion is first scored on "
        "held-out data",
        got=self.budget,
        mend="raise the budget",
      )
    if self.is_allocated and self.budget != (whole := sum(ARMS["quantforge"].calls)):
      raise ValueRefusal(
        "study: --paper-allocation",
        expected=f"the {whole} calls that the paper divides",
        got=self.budget,
        mend="leave it out, or --budget",
      )
    if len(set(self.seeds)) < len(self.seeds):
      raise ValueRefusal(
        "study",
        expected="distinct seeds",
        got=list(self.seeds),
        mend="a repeated one would count twice in every statistic",
      )
    if shared := sorted(set(self.seeds) & set(self.tuning_seeds)):
      raise ValueRefusal(
        "study",
        expected="seeds that were not tuned on",
        got=shared,
        mend="compare on others",
      )

  def spec(self, seed: int) -> dict[str, Any]:
    """Returns the task specification of a seed."""
    spec = dict(self.task)
    return {**spec, "seed": seed} if spec["task"] in task_.WORLDS else spec

  def absolute_gate(self, target: str) -> float:
    """Returns `gate_at`, which must be set, in the units of the target."""
    assert self.gate_at is not None
    return math.log(self.gate_at) if target == "log_ppl" else self.gate_at

  def run(self, arm: str, seed: int) -> runs.RunOptions:
    """Returns the options of one run."""
    charged = {} if self.is_sequential else AS_IN_PAPER
    config = {"seed": seed, "budget": self.budget, **charged, **self.config}
    config |= ARMS[arm].changes
    if self.is_allocated:
      config["allocation"] = ARMS[arm].allocation
    return runs.RunOptions(
      task=self.spec(seed),
      config=config,
      sandbox=self.sandbox,
      proposer=self.proposer,
      holdout="off",
    )


def frozen(options: StudyOptions) -> dict[str, Any]:
  """Returns everything by which a comparison could be tuned, with its hash.

  This is what scores (the evaluator's contract and sources, the task's own module),
  what selects, registers, resolves, compiles and prompts (all of discovery), what the
  prompt is cut with (the tokenizer), and what proposes: its name holds the hash of a
  grammar or of a cassette.
  """
  task = task_.load(options.spec(options.seeds[0]))
  tokenizer = options.proposer.get("tokenizer")
  proposer = runs.make_proposer(options.run("quantforge", options.seeds[0]), task)
  content = {
    "options": json.loads(json.dumps(dataclasses.asdict(options))),
    "cards": edit_templates.fingerprint(task.edit_templates),
    "margins": dict(task.margins),
    "arms": {name: [dict(arm.changes), arm.calls] for name, arm in ARMS.items()},
    "as_in_paper": dict(AS_IN_PAPER),
    "sources": identity.source_digest("mxjax.discovery", "mxjax.evaluation.measures"),
    "contract": identity.digest(dict(task.contract)),
    "task": identity.digest(pathlib.Path(task_.module_file(task)).read_bytes()),
    "tokenizer": identity.digest(pathlib.Path(tokenizer).read_bytes())
    if tokenizer
    else None,
    "proposer": proposer.name,
    "versions": {"jax": jax.__version__, "python": platform.python_version()},
  }
  # As it will be read from its file, so that no tuple differs from a list.
  content = json.loads(json.dumps(content))
  return {**content, "hash": identity.digest(content)}


class Folder:
  """A folder of studies that share their runs.

  `options` are fixed; `frozen` holds the settings frozen before the first run.
  """

  def __init__(self, path: pathlib.Path, options: StudyOptions) -> None:
    """Opens a new or existing folder.

    Raises:
      ValueError: The folder was begun with other edits, margins or options.
    """
    self.path, self.options = path, options
    self.frozen = frozen(options)
    file = path / "frozen.json"
    if file.exists():
      before = json.loads(file.read_text())
      changed = [
        key for key in before if key != "hash" and before[key] != self.frozen.get(key)
      ]
      if changed:
        raise ValueRefusal(
          path,
          expected="what it was frozen with",
          got=f"other {', '.join(changed)}",
          mend="use a new folder",
        )
    else:
      atomic_io.check_output(path)
      path.mkdir(parents=True, exist_ok=True)
      atomic_io.write_durably(file, json.dumps(self.frozen, indent=1).encode())
    self._archive = Store(path / "archive")
    self._executors: dict[str, JailedExecutor | LocalExecutor] = {}

  def close(self) -> None:
    """Stops the workers."""
    for executor in self._executors.values():
      executor.close()

  def executor(self, task: task_.Task) -> JailedExecutor | LocalExecutor:
    """Returns the executor of a task, shared by all runs of one specification."""
    key = identity.canonical(dict(task.spec))
    if key not in self._executors:
      self._executors[key] = self._make_executor(task)
    return self._executors[key]

  def _make_executor(self, task: task_.Task) -> JailedExecutor | LocalExecutor:
    other = next(iter(self._executors.values()), None)
    # Without walls, tasks of one interface share what was traced.
    if isinstance(other, LocalExecutor):
      return other.sibling(task)
    sandbox = self.options.sandbox
    compiled = self.path / "compiled" if sandbox != "off" else None
    return runs.make_executor(task, self._archive, sandbox, compiled=compiled)

  def evaluator(self, task: task_.Task, name: str) -> CachedEvaluator:
    """Returns an evaluator for calls outside any run's budget."""
    store = Store(self.path / name)
    return CachedEvaluator(task, self.executor(task), store, archive=self._archive)

  def run_folder(self, arm: str, seed: int) -> pathlib.Path:
    """Returns the folder of a run."""
    return self.path / "runs" / f"{arm}-{seed}"

  def run(self, arm: str, seed: int) -> dict[str, Any]:
    """Runs, resumes or reads one run; returns its summary."""
    folder, options = self.run_folder(arm, seed), self.options.run(arm, seed)
    task = task_.load(options.task)
    if not (folder / "run.json").exists():
      runs.write_options(folder, options)
    if not runs.is_closed(folder):
      executors = [self.executor(each) for each in task_.with_transfer(task)]
      store = Store(folder)
      runs.make_search(options, task, executors, store, self._archive).run()
    hidden = task.holdout()
    if hidden is not None:
      heldout.score_closed(folder, hidden, self.executor(hidden), self._archive)
    return run_summary.summarize(folder, task)

  def landmarks(self, seed: int) -> dict[str, float]:
    """Returns held-out targets: the initial program, the ideal and the gates.

    `gate` lies between the two; `absolute` is there if the options have `gate_at`.

    Raises:
      ValueError: The task has no held-out data.
    """
    task = task_.load(self.options.spec(seed)).holdout()
    if task is None:
      raise ValueRefusal(
        "study",
        expected="a task with held-out data",
        got="one without",
        mend="name a held-out model",
      )
    evaluator = self.evaluator(task, "landmarks")
    call = evaluator.prepare(task.interface.default_source()).call
    assert call is not None
    (outcome,) = evaluator.measure(call)
    initial, ideal = outcome.values[task.target], task.ideal()
    gate = initial - self.options.gate * (initial - ideal)
    found = {"initial": initial, "ideal": ideal, "gate": gate}
    if self.options.gate_at is not None:
      found["absolute"] = self.options.absolute_gate(task.target)
    return found

  def replay(self, seed: int) -> list[dict[str, Any]]:
    """Replays the verdicts of the QuantForge run of a seed."""
    options = self.options.run("quantforge", seed)
    task = task_.load(options.task)
    transitions = verdict_replay.replay(
      self.run_folder("quantforge", seed),
      options,
      task,
      [self.executor(each) for each in task_.with_transfer(task)],
      self.evaluator(task, "replay"),
    )
    return [dataclasses.asdict(transition) for transition in transitions]

  def cases(self, seed: int) -> list[dict[str, Any]]:
    """Judges the injected implementation cases on a seed's initial program."""
    task = task_.load(self.options.spec(seed))
    return checker_cases.judge_all(self.evaluator(task, "cases"))

  def audit(self, arm: str, seed: int) -> dict[str, Any]:
    """Audits the regimes of a run's champion."""
    task = task_.load(self.options.spec(seed))
    source = regimes.champion_source(self.run_folder(arm, seed))
    return regimes.audit(self.evaluator(task, "regimes"), source)


def conduct(
  folder: Folder, name: str, tell: Tell, *, seeds: Sequence[int] = ()
) -> dict[str, Any]:
  """Runs or resumes one of `STUDIES`; returns its results, JSON-ready.

  `tell` is called with a line for each finished part. `seeds` limits the run to a
  subset of the folder's seeds, to save time; empty means all.

  Raises:
    ValueError: A seed is not among those that the folder was frozen with.
  """
  study, seeds = STUDIES[name], tuple(seeds) or folder.options.seeds
  if unknown := set(seeds) - set(folder.options.seeds):
    raise ValueRefusal(
      "study: --seeds",
      expected=f"some of the seeds {list(folder.options.seeds)} frozen in "
      f"{folder.path}",
      got=sorted(unknown),
      mend="name some of those",
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
    "gate_at": folder.options.gate_at,
    "expects": folder.options.expects,
    "sandbox": folder.options.sandbox,
    "landmarks": {str(seed): folder.landmarks(seed) for seed in seeds},
    "runs": {arm: {} for arm in study.arms},
  }
  # Seed by seed, so that what a study has so far are whole pairs.
  for seed in seeds:
    for arm in study.arms:
      summary = results["runs"][arm][str(seed)] = folder.run(arm, seed)
      last = summary["marks"][-1:]
      tell(f"{arm}, seed {seed}: {last}, closed: {summary['closed']}")
  if study.extra == "replay":
    results["replay"] = {str(seed): folder.replay(seed) for seed in seeds}
    counts = {seed: len(each) for seed, each in results["replay"].items()}
    tell(f"replayed transitions by seed: {counts}")
  if study.extra == "cases":
    results["cases"] = folder.cases(seeds[0])
    tell(f"cases: {len(results['cases'])}")
  if study.extra == "regimes":
    results["audit"] = {
      arm: {str(seed): folder.audit(arm, seed) for seed in seeds} for arm in study.arms
    }
    tell("regimes audited")
  text = json.dumps(results, indent=1)
  atomic_io.write_durably(folder.path / f"{name}.json", text.encode())
  return results
