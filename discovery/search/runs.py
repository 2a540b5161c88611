"""Starts and resumes runs: options file, workers, proposer and held-out scorer."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import (
  CALL_SECONDS,
  Context,
  Proposal,
  Proposer,
  ProposerError,
  Record,
)
from mxjax.discovery.core.store import Store, begun_events
from mxjax.discovery.proposers import llm
from mxjax.discovery.proposers.embedded import EmbeddedProposer
from mxjax.discovery.proposers.endpoint import HttpClient
from mxjax.discovery.proposers.human import HumanProposer
from mxjax.discovery.sandbox.executor import Executor, Took
from mxjax.discovery.sandbox.jailed_executor import JailedExecutor, RayWorker
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.sandbox.supervisor import RUN_LIMITS
from mxjax.discovery.search.asking import FreeProxy
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.search.frontier import Transfer
from mxjax.discovery.search.history import OnEvent
from mxjax.discovery.search.search import Search, SearchConfig
from mxjax.errors import FileNotFoundRefusal, ValueRefusal
from mxjax.intake import reading
from mxjax.storage import atomic_io


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
  """Contents of `run.json`: everything needed to resume.

  Attributes:
    config: Fields of `SearchConfig`.
    sandbox: `strict`, `standard` or `off`.
    proposer: Settings with their `kind`: `embedded`, `llm`, `cassette` or `human`.
    holdout: When the held-out scorer runs: `after`, `during` or `off`.
  """

  task: Mapping[str, Any]
  config: Mapping[str, Any]
  sandbox: str = "strict"
  proposer: Mapping[str, Any] = dataclasses.field(
    default_factory=lambda: {"kind": "embedded"}
  )
  holdout: str = "after"

  @property
  def search(self) -> SearchConfig:
    """The configuration of the search."""
    return SearchConfig(**self.config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trusted:
  """What a caller lets a run folder execute: a folder is data, and decides none of it.

  Attributes:
    task: The specification of a task with code of its own, or None: built-in ones only.
    sandbox: The level at which the folder's programs run.
    endpoint: The address that may have a key, or None: no address of the folder's.
    key_variable: The environment variable whose value it may have.
  """

  task: Mapping[str, Any] | None = None
  sandbox: str = "strict"
  endpoint: str | None = None
  key_variable: str = HttpClient.key_variable

  @classmethod
  def own(cls, options: RunOptions) -> "Trusted":
    """Returns what a caller trusts who wrote the options itself."""
    settings = options.proposer
    return cls(
      task=dict(options.task),
      sandbox=options.sandbox,
      endpoint=settings.get("base_url"),
      key_variable=settings.get("key_variable") or HttpClient.key_variable,
    )

  def check(self, options: RunOptions) -> None:
    """Refuses a folder that asks for more.

    Raises:
      ValueError: It names a task with code of its own, or another level.
    """
    task_.check_trusted(options.task, self.task)
    if options.sandbox != self.sandbox:
      raise ValueRefusal(
        "discover",
        expected=f"a run at sandbox level {self.sandbox}",
        got=f"one at {options.sandbox!r:.40}",
        mend="name its level by --sandbox, if you trust its programs to run so",
      )

  def check_endpoint(self, options: RunOptions, folder: pathlib.Path) -> None:
    """Refuses to send a key of the caller's to an address that a folder names.

    Without a key nothing is lost but the prompts, which the folder holds already.

    Raises:
      ValueError: The address, or the variable with the key, is not the caller's; or the
        caller names another address than the folder.
    """
    if options.proposer["kind"] != "llm":
      return
    url = options.proposer.get("base_url")
    if self.endpoint not in (None, url):
      raise ValueRefusal(
        f"discover: the endpoint of {folder}",
        expected=f"{url!r:.200}, with which it was begun",
        got=f"--endpoint {self.endpoint!r:.200}",
        mend="serve the model at that address, or begin anew with another one",
      )
    variable = options.proposer.get("key_variable") or HttpClient.key_variable
    if not os.environ.get(variable):
      return
    if self.endpoint is None:
      raise ValueRefusal(
        "discover: the endpoint",
        expected=f"an address that you name, because the key in {variable} goes there",
        got=f"{url!r:.200}, which only {folder} names",
        mend=f"if you trust it, name it yourself by --endpoint, or unset {variable}",
      )
    if variable != self.key_variable:
      raise ValueRefusal(
        "discover: the endpoint's key",
        expected=f"the variable {self.key_variable}, or one that you name",
        got=f"{variable!r:.80}, which only {folder} names",
        mend="if that is the key of this endpoint, name it yourself by --key-variable",
      )


def write_options(folder: pathlib.Path, options: RunOptions) -> None:
  """Writes `run.json` into a new folder.

  Raises:
    FileExistsError: The folder is not empty.
  """
  atomic_io.check_output(folder)
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps(dataclasses.asdict(options), indent=1)
  atomic_io.write_durably(folder / "run.json", text.encode())


def read_options(folder: pathlib.Path) -> RunOptions:
  """Reads `run.json`.

  Raises:
    FileNotFoundError: The folder is not a run folder.
    ValueError: Its options were changed, or are those of another version.
  """
  path = folder / "run.json"
  if not path.exists():
    raise FileNotFoundRefusal(
      folder,
      expected="the folder of a run",
      got="one without run.json",
      mend="name the folder of a run",
    )
  mend = "read it with the version of mxjax that wrote it"
  with reading.refusing(path, "the options of a run", mend):
    options = RunOptions(**reading.parse_json(reading.read_bytes(path), dict[str, Any]))
    # Builds the configuration, so that a field that is not known is refused here.
    options.search.to_dict()
    for name in ("task", "config", "proposer"):
      if not isinstance(getattr(options, name), dict):
        raise TypeError(f"{name} is no object")
    if not isinstance(options.proposer.get("kind"), str):
      raise TypeError("the proposer has no kind")
  return options


def is_closed(folder: pathlib.Path) -> bool:
  """Returns whether a run has ended; a torn last line does not count."""
  path = folder / "log.jsonl"
  # Its last line alone, where checking the whole chain would read every event.
  lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
  if not lines:
    return False
  with reading.refusing(path, "events, an object each", "restore it from a copy"):
    return reading.parse_json(lines[-1], dict[str, Any])["event"] == "closed"


def make_proposer(
  options: RunOptions, task: task_.Task, store: Store | None = None
) -> Proposer:
  """Builds the proposer that the options describe; `store` keeps paid replies.

  Raises:
    ValueError: The kind is unknown, or it is `embedded` and the task has no edit
      templates.
  """
  settings = dict(options.proposer)
  kind = settings.pop("kind")
  is_contested = settings.pop("contested", False)
  if kind == "embedded":
    # Without templates a run would end after the initial program, having tried nothing.
    if not task.edit_templates:
      raise ValueRefusal(
        "discover: --proposer embedded",
        expected="a task with edit templates, which this proposer applies",
        got=f"none in {json.dumps(dict(task.spec))}",
        mend="give the task some (EDITS in a task of two files, edit_templates in a "
        "class), or name --proposer llm",
      )
    templates = [
      each.contested() if is_contested else each for each in task.edit_templates
    ]
    return EmbeddedProposer(templates, task.target)
  if kind == "human":
    seconds = settings.get("seconds", 86_400.0)
    return HumanProposer(settings["folder"], task, seconds=seconds)
  if kind in ("llm", "cassette"):
    metered = options.search.is_metered
    return llm.make(options.proposer, task, store=store, metered=metered)
  raise ValueRefusal(
    "discover: --proposer",
    expected="embedded, llm, cassette or human",
    got=repr(kind),
    mend="use one of these",
  )


def make_executor(
  task: task_.Task,
  store: Store,
  sandbox: str,
  *,
  workers: int = 1,
  ray: bool = False,
  compiled: pathlib.Path | None = None,
  call_seconds: float = CALL_SECONDS,
) -> LocalExecutor | JailedExecutor:
  """Builds the executor of a sandbox level.

  A jailed call ends after `call_seconds` of processor time; level `off` has no limits.

  Raises:
    ValueError: `compiled` is given for workers that cannot share compiled programs.
  """
  if compiled is not None and (ray or sandbox == "off"):
    where = "a Ray cluster" if ray else "sandbox off"
    raise ValueRefusal(
      "discover: --compiled",
      expected="jailed workers of this machine",
      got=where,
      mend="leave it out",
    )
  if sandbox == "off":
    return LocalExecutor(task)
  return JailedExecutor(
    task,
    store,
    level=sandbox,
    workers=workers,
    make_worker=RayWorker if ray else None,
    compiled=compiled,
    run_limits=dataclasses.replace(RUN_LIMITS, call_cpu_seconds=call_seconds),
  )


def run(
  folder: pathlib.Path,
  *,
  workers: int = 1,
  ray: bool = False,
  compiled: pathlib.Path | None = None,
  on_event: OnEvent | None = None,
  closing: bool = False,
  trusted: Trusted | None = None,
) -> Record:
  """Starts or resumes the run of a folder with `run.json`; returns the champion.

  An existing log is replayed first. The trajectory does not depend on `workers`, the
  number of parallel calls, or on `ray`, which makes workers Ray actors. `compiled` is a
  folder in which the workers of this and other runs share compiled programs; neither
  the trajectory nor any identity depends on it. `on_event` receives every event.
  `closing` ends the run where its log ends; see `close`. `trusted` is what the caller
  allows a folder to execute; by default a built-in task, in the strict jail.

  Raises:
    OutageError: The proposer gave no answer; the run can be resumed.
    ValueError: The held-out scorer failed.
  """
  options = read_options(folder)
  allowed = trusted or Trusted()
  allowed.check(options)
  # A run that is to end asks its endpoint for nothing.
  if not closing:
    allowed.check_endpoint(options, folder)
  task = task_.load(options.task)
  store = Store(folder)
  scorer = start_holdout(folder, allowed) if options.holdout == "during" else None
  executors: list[LocalExecutor | JailedExecutor] = []
  proxy = free_proxy(options, task, store)
  try:
    how: dict[str, Any] = {"workers": workers, "ray": ray, "compiled": compiled}
    how["call_seconds"] = options.search.call_seconds
    for each in task_.with_transfer(task):
      executors.append(make_executor(each, store, options.sandbox, **how))
    proposer = _Closing(folder) if closing else None
    search = make_search(options, task, executors, store, ask=proxy, proposer=proposer)
    champion = search.run(on_event)
  except BaseException:
    # The scorer would wait for the end of the log.
    if scorer is not None:
      scorer.terminate()
      scorer.wait()
    raise
  finally:
    for ending in filter(None, (*executors, proxy)):
      ending.close()
    store.close()
  if options.holdout == "after":
    scorer = start_holdout(folder, allowed)
  if scorer is not None and scorer.wait() != 0:
    raise ValueRefusal(
      folder,
      expected="its held-out scorer to end well",
      got=f"exit code {scorer.returncode}",
      mend=f"run `python -m mxjax.discovery.search.heldout {folder}` to see why",
    )
  return champion


class _Closing:
  """Stands in for the proposer of a run that is to end: it proposes nothing more."""

  def __init__(self, folder: pathlib.Path) -> None:
    # The first event has the name of the proposer, and a replay must repeat it.
    self.name: str = begun_events(folder)[0]["proposer"]

  def propose(self, context: Context) -> Proposal:
    del context
    raise ProposerError("the run was closed by hand")


def close(
  folder: pathlib.Path,
  on_event: OnEvent | None = None,
  trusted: Trusted | None = None,
) -> Record:
  """Ends a run early with its held-out score; returns the champion.

  What a killed run had registered is run to its end, and nothing more is proposed. A
  run that is closed already stays as it is.

  Raises:
    ValueError: The run has not begun, or the held-out scorer failed.
  """
  begun_events(folder)
  return run(folder, on_event=on_event, closing=True, trusted=trusted)


def make_search(
  options: RunOptions,
  task: task_.Task,
  executors: Sequence[Executor],
  store: Store,
  archive: Store | None = None,
  ask: FreeProxy | None = None,
  proposer: Proposer | None = None,
) -> Search:
  """Builds the search that the options describe, without executing anything.

  `executors` are of the task and, if it has one, of the task on its transfer model;
  `ask` is the free proxy, and `proposer` stands in for that of the options.
  """
  evaluators = [
    CachedEvaluator(each, executor, store, archive=archive)
    for each, executor in zip(task_.with_transfer(task), executors, strict=True)
  ]
  proposer = proposer or make_proposer(options, task, store)
  transfer = Transfer(evaluators[1]) if len(evaluators) > 1 else None
  return Search(options.search, evaluators[0], proposer, store, transfer, ask)


def free_proxy(options: RunOptions, task: task_.Task, store: Store) -> FreeProxy | None:
  """Returns the free proxy of a run, which starts its workers when it is asked.

  None is a task that has none, or a run in which it may not be asked.
  """
  if not options.search.asks or (proxy := task.proxy()) is None:
    return None

  def make() -> tuple[CachedEvaluator, Callable[[], None]]:
    limit = options.search.call_seconds
    executor = make_executor(proxy, store, options.sandbox, call_seconds=limit)
    return CachedEvaluator(proxy, executor, store), executor.close

  return FreeProxy(make)


def measure_calls(task: task_.Task, sandbox: str) -> list[float]:
  """Runs the default program twice in a scratch folder; returns the seconds of each.

  In the first call workers start and compile, as for every new program; the second
  shares what was compiled.

  Raises:
    ValueError: The task's own default program does not run.
  """
  outcomes: list[task_.Outcome] = []
  seconds: list[float] = []

  def on_done(_: int, outcome: task_.Outcome, took: Took) -> None:
    outcomes.append(outcome)
    seconds.append(took.seconds)

  with tempfile.TemporaryDirectory(prefix="mxjax-plan-") as scratch:
    store = Store(pathlib.Path(scratch))
    executor = make_executor(task, store, sandbox)
    try:
      ended: Any = executor.trace(task.interface.default_source())
      if ended.status == task_.Status.OK:
        call = task_.Call(ended.computation, task.interface.default_plan, {})
        for _ in range(2):
          executor.run([call.active(task.interface)], on_done)
        ended = outcomes[-1]
    finally:
      executor.close()
      store.close()
  if ended.status != task_.Status.OK:
    raise ValueRefusal(
      "discover",
      expected="a task whose default program runs",
      got=f"{ended.status}: {ended.detail}",
      mend=f"mend the task before a run; its options are {dict(task.spec)}",
    )
  return seconds


def start_holdout(folder: pathlib.Path, trusted: Trusted) -> "subprocess.Popen[bytes]":
  """Starts the held-out scorer in another process, which only reads the log."""
  command = [sys.executable, "-m", "mxjax.discovery.search.heldout", str(folder)]
  allowed = json.dumps(dataclasses.asdict(trusted))
  return subprocess.Popen([*command, str(os.getpid()), allowed])
