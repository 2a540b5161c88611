"""A trial: the paper's question asked of a language model, frozen before it answers.

A trial has runs, each of one arm on one task with a seed and a budget, and a replay of
the verdicts of some of them; see `trial_replay`. Its plan, a TOML file, is completed
with measured margins, and frozen with the hash of everything that could tune it. Every
reply of the model is kept, so that all of it can be computed again without the model.
"""

import concurrent.futures
import contextlib
import hashlib
import io
import json
import pathlib
import platform
import shutil
import tarfile
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from mxjax.discovery.core import identity
from mxjax.discovery.core import task as task_
from mxjax.discovery.core.proposal import OutageError
from mxjax.discovery.core.store import Store, begun_events
from mxjax.discovery.core.task import Status
from mxjax.discovery.proposers import llm
from mxjax.discovery.search import runs
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.studies.arms import ARMS
from mxjax.discovery.studies.trial_plan import FROZEN, RUNS_OF, check
from mxjax.discovery.studies.trial_replay import CONDITIONS, Replay
from mxjax.discovery.tasks.ptq import margins
from mxjax.errors import FileExistsRefusal, ValueRefusal
from mxjax.intake import reading
from mxjax.models.loading import embedded
from mxjax.storage import atomic_io

Tell = Callable[[str], Any]
BATCH = 8
"""Successors of a run that are scored on held-out data together, by workers that hold
another model only meanwhile."""
TRAINED, DATA = "trained:", "data:"
"""Begin the names of a model of the source tree, and of a file in the data folder."""


def frozen(plan: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a complete plan with its hash, the sources and the versions it stands for.

  The sources are all of discovery, the prompts and the mechanism among them, and what
  scores.
  """
  content = {
    **plan,
    "arms": {
      run["arm"]: dict(ARMS[run["arm"]].changes) for run in plan["runs"].values()
    },
    "sources": identity.source_digest("mxjax.discovery", "mxjax.evaluation.measures"),
    "versions": {"jax": jax.__version__, "python": platform.python_version()},
  }
  # As it will be read from its file, so that no tuple differs from a list.
  content = json.loads(json.dumps(content))
  return {**content, "hash": identity.digest(content)}


def freeze(
  path: pathlib.Path, file: pathlib.Path, data: str = "", *, tell: Tell
) -> "Trial":
  """Measures the margins of a plan's tasks and freezes it in a new folder.

  A plan with `runs_of`, the archive of an earlier trial beside the plan, has no tasks
  and runs of its own. Those of its replay are then taken from the archive with their
  margins, and so are the answers that a replay of them has: a request that is the same
  to the letter is not asked again.

  Args:
    path: The folder, which is made.
    file: The plan as TOML, with the tables and keys of `trial_plan.Plan`.
    data: The folder of the texts that the plan names with `data:`.
    tell: Told what is measured.

  Raises:
    ValueError: The plan lacks something, or names what there is not.
    FileExistsError: The folder is not empty.
  """
  mend = "mend it, or name another plan"
  with reading.refusing(file, "the plan of a trial in TOML", mend):
    plan = tomllib.loads(reading.read_bytes(file, mend=mend).decode())
  atomic_io.check_output(path)
  with tempfile.TemporaryDirectory(prefix="mxjax-trial-") as scratch:
    earlier = pathlib.Path(scratch, "earlier")
    if RUNS_OF in plan:
      if own := sorted({"tasks", "runs"} & {*plan}):
        raise ValueRefusal(
          f"{file}: {RUNS_OF}",
          expected="no tasks and runs of the plan's own beside it",
          got=", ".join(own),
          mend="leave them out, or leave it out",
        )
      archive = file.parent / plan[RUNS_OF]
      restore(archive, earlier, path)
      plan |= _taken(plan, earlier, archive)
    check(plan, file)
    for name, spec in plan["tasks"].items():
      _check_task(spec, data, f"{file}: tasks.{name}")
    path.mkdir(parents=True, exist_ok=True)
    if RUNS_OF in plan:
      _copy(plan["runs"], earlier, path)
    else:
      for name, spec in plan["tasks"].items():
        plan["tasks"][name] = _completed(spec, data, tell)
  text = json.dumps(frozen(plan), indent=1)
  atomic_io.write_durably(path / "plan.json", text.encode())
  return Trial(path, data, tell=tell)


def _taken(
  plan: Mapping[str, Any], earlier: pathlib.Path, archive: pathlib.Path
) -> dict[str, Any]:
  """Returns tasks and runs of an earlier trial, as far as a plan replays them."""
  found = read_plan(earlier)
  names = plan.get("replay", {}).get("runs", [])
  taken = {name: found["runs"][name] for name in names if name in found["runs"]}
  tasks = {run["task"] for run in taken.values()}
  return {
    "runs": taken,
    "tasks": {name: spec for name, spec in found["tasks"].items() if name in tasks},
    RUNS_OF: {"archive": archive.name, "plan": found["hash"]},
  }


def _check_task(spec: Mapping[str, Any], data: str, place: str) -> None:
  """Refuses a built-in task that cannot be loaded, as it is and held out.

  Code of a plan's own is executed by a run that trusts it, and not here.
  """
  hidden = {**spec, **spec.get("heldout", {})}
  for each in (spec, hidden):
    name = each["task"]
    if "path" in each or ":" in name or pathlib.Path(name).is_dir():
      continue
    with reading.refusing(place, "a task that can be loaded", "mend its options"):
      task_.load(placed(each, data))


def _copy(runs_: Iterable[str], earlier: pathlib.Path, path: pathlib.Path) -> None:
  """Copies runs of an earlier trial with their scores, replies and replayed answers."""
  for name in runs_:
    folders = f"runs/{name}", f"replay/{name}/cassettes"
    files = f"cassettes/{name}.jsonl", f"heldout/scores/{name}.json"
    for part in (*folders, *files):
      source, target = earlier / part, path / part
      target.parent.mkdir(parents=True, exist_ok=True)
      if source.is_dir():
        shutil.copytree(source, target)
      elif source.is_file():
        shutil.copyfile(source, target)


def _completed(spec: dict[str, Any], data: str, tell: Tell) -> dict[str, Any]:
  """Returns the specification of a task with what is measured of it."""
  visible = {key: value for key, value in spec.items() if key != "heldout"}
  if spec["task"] != "ptq":
    return spec
  measured = margins.completed(placed(visible, data), tell=tell)
  added = {key: measured[key] for key in ("margins", "initial", "references")}
  return {**spec, **added}


def placed(spec: Mapping[str, Any], data: str) -> dict[str, Any]:
  """Returns a specification with the places of models and texts on this machine."""

  def place(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(TRAINED):
      return str(embedded.trained_folder(value.removeprefix(TRAINED)))
    if isinstance(value, str) and value.startswith(DATA):
      return str(pathlib.Path(data, value.removeprefix(DATA)).resolve())
    return value

  return {key: place(value) for key, value in spec.items() if key != "heldout"}


class Trial:
  """The folder of a trial; `plan` is what it was frozen with."""

  def __init__(self, path: pathlib.Path, data: str = "", *, tell: Tell = print) -> None:
    """Opens a frozen trial; `data` is the folder of the texts that its plan names.

    Raises:
      ValueError: The folder has no plan, or the plan was changed.
    """
    self.path, self._data, self._tell = path, data, tell
    self.plan: dict[str, Any] = read_plan(path)
    self._tasks: dict[str, task_.Task] = {}

  def check_sources(self) -> None:
    """Refuses to add answers to a trial that another mechanism began.

    Raises:
      ValueError: Sources, arms or versions are not those that the plan was frozen with.
    """
    now = frozen({k: v for k, v in self.plan.items() if k not in FROZEN})
    if changed := sorted(k for k in now if k != "hash" and now[k] != self.plan[k]):
      raise ValueRefusal(
        self.path,
        expected="what the trial was frozen with",
        got=f"other {', '.join(changed)}",
        mend="a changed mechanism is a new trial: freeze its plan in a new folder",
      )

  def check_trusted(self, trusted: runs.Trusted, *, asks: bool = True) -> None:
    """Refuses a plan that asks for more than the caller lets a folder execute.

    The hash of a plan says that it was not changed, not who wrote it: whoever opens a
    trial of others calls this before anything runs. `asks` is whether the endpoint,
    which may be given a key, is asked for anything.

    Raises:
      ValueError: It names code of its own, another sandbox level or, for a key, an
        endpoint that the caller did not name.
    """
    proposer = {**self.plan["endpoint"], "kind": "llm"}
    for spec in self.plan["tasks"].values():
      # The held-out task may be another one, whose code would run too.
      for each in (spec, {**spec, **spec.get("heldout", {})}):
        options = runs.RunOptions(
          task=placed(each, self._data),
          config={},
          sandbox=self.plan["sandbox"],
          proposer=proposer,
          holdout="off",
        )
        trusted.check(options)
        if asks:
          trusted.check_endpoint(options, self.path)

  def task(self, name: str) -> task_.Task:
    """Returns a task of the plan, loaded once.

    Raises:
      KeyError: The plan has no task of this name.
    """
    if name not in self._tasks:
      self._tasks[name] = task_.load(placed(self.plan["tasks"][name], self._data))
    return self._tasks[name]

  def heldout(self, name: str) -> task_.Task | None:
    """Returns a task on held-out data: those of the plan, or the task's own.

    None is a task that has none. It is loaded anew by every call.
    """
    spec = self.plan["tasks"][name]
    if "heldout" not in spec:
      return self.task(name).holdout()
    return task_.load(placed({**spec, **spec["heldout"]}, self._data))

  def folder(self, run: str) -> pathlib.Path:
    """Returns the folder of a run."""
    return self.path / "runs" / run

  @property
  def compiled(self) -> pathlib.Path | None:
    """Where jailed workers of all runs share what they compiled."""
    return None if self.plan["sandbox"] == "off" else self.path / "compiled"

  def options(self, name: str) -> runs.RunOptions:
    """Returns the options of a run: its arm, its seed and budget, and a cassette."""
    run, limits = self.plan["runs"][name], {}
    if "max_tokens" in run:
      limits["max_tokens"] = run["max_tokens"]
    config = {**ARMS[run["arm"]].changes, **run.get("config", {}), **limits}
    config |= {"seed": run["seed"], "budget": run["budget"]}
    config.setdefault("mark_every", max(1, run["budget"] // 2))
    tape = self.path / "cassettes" / f"{name}.jsonl"
    return runs.RunOptions(
      task=dict(self.task(run["task"]).spec),
      config=config,
      sandbox=self.plan["sandbox"],
      proposer={
        **self._endpoint("run_model", name=name, arm=run["arm"]),
        # After the settings of the plan, which would choose a file to write to.
        **{"kind": "llm", "cassette": str(tape.resolve())},
      },
      holdout="off",
    )

  def _endpoint(self, which: str, **names: str) -> dict[str, Any]:
    """Returns the settings of an endpoint, with the model's name filled in."""
    given = dict(self.plan["endpoint"])
    models = {key: given.pop(key) for key in ("run_model", "replay_model")}
    given["base_url"] = given["base_url"].format(**names)
    return {**given, "model": models[which].format(**names)}

  def run(self, name: str, *, closing: bool = False) -> dict[str, Any]:
    """Runs or resumes a run and scores what it found held out; returns the scores.

    `closing` ends it where it stands.

    Raises:
      OutageError: The model gave no answer; call it again.
    """
    folder, options = self.folder(name), self.options(name)
    if not runs.is_closed(folder):
      self.check_sources()
      if not (folder / "run.json").exists():
        (self.path / "cassettes").mkdir(exist_ok=True)
        runs.write_options(folder, options)
      # The options are made of the plan, which whoever opens a trial of others has
      # checked.
      own = runs.Trusted.own(options)
      show = lambda event: self._show(name, event)
      if closing:
        runs.close(folder, show, own)
      else:
        runs.run(folder, on_event=show, trusted=own, compiled=self.compiled)
    return self._score(name)

  def _show(self, name: str, event: Mapping[str, Any]) -> None:
    if event["event"] == "outcome" and event["charged"]:
      target = self.task(self.plan["runs"][name]["task"]).target
      value = event["values"].get(target, event["status"])
      self._tell(f"{name}: call {event['call']} {event['condition']}: {value}")
    elif event["event"] in ("verdict", "refused"):
      told = event.get("verdict") or event["status"]
      self._tell(f"{name}: {told} ({event.get('reason') or event.get('detail')})")

  def _score(self, name: str) -> dict[str, Any]:
    """Scores the initial program and the champion of each mark on held-out data."""
    store = Store(self.path / "heldout")
    if (known := store.get("scores", name)) is not None:
      return known
    events = begun_events(self.folder(name))
    hidden = self.heldout(self.plan["runs"][name]["task"])
    first = next(e["program"] for e in events if e["event"] == "program")
    marks = [(e["call"], e["champion"]) for e in events if e["event"] == "mark"]
    scores: dict[str, float | None] = {}
    if hidden is not None:
      kept = Store(self.path / "heldout" / name)
      level, shared = self.plan["sandbox"], self.compiled
      executor = runs.make_executor(hidden, kept, level, compiled=shared)
      # Workers end even where one of them was lost, which a second try may mend.
      with contextlib.closing(executor):
        evaluator = CachedEvaluator(hidden, executor, kept)
        for program in dict.fromkeys([first, *(champion for _, champion in marks)]):
          source = (self.folder(name) / "programs" / f"{program}.py").read_text()
          prepared = evaluator.prepare(source)
          ended = [] if prepared.call is None else evaluator.measure(prepared.call)
          is_ok = bool(ended) and ended[0].status == Status.OK
          scores[program] = ended[0].values[hidden.target] if is_ok else None
    found = {
      "initial": scores.get(first),
      "marks": [[call, scores.get(champion)] for call, champion in marks],
    }
    store.put("scores", name, found)
    return found

  def letter(self, condition: str) -> str:
    """Returns the letter that stands for a condition, so that its answers are blind."""
    # By the hash of the plan, so that all processes of a trial use the same letters.
    names = identity.shuffled(CONDITIONS, self.plan["hash"], "letters")
    return "abcd"[names.index(condition)]

  def replay(
    self, names: Sequence[str] = (), *, asks: bool = True, at_once: int = 64
  ) -> int:
    """Replays the closed runs of the plan's replay; returns the successors not there.

    All conditions of all runs are asked beside each other, `at_once` at a time, and the
    verdicts of a run under one condition one after another. Without `asks`, only what
    was recorded is computed again. `names` are some of the runs, so that several
    processes can share the work.
    """
    if asks:
      self.check_sources()
    lock = threading.Lock()
    replays: list[Replay] = []
    pool = concurrent.futures.ThreadPoolExecutor(at_once)
    waiting: list[concurrent.futures.Future[None]] = []
    failed = 0
    try:
      for name in names or self.plan["replay"]["runs"]:
        if not runs.is_closed(self.folder(name)):
          self._tell(f"{name}: not closed, so not replayed")
          continue
        with lock:
          # Answers of the runs before it come in meanwhile.
          replays.append(replay := self._replay(name, lock, asks=asks))
          count = replay.prepare()
        self._tell(f"{name}: {count} transitions")
        waiting += replay.start(pool)
      self._tell(f"{len(waiting)} successors are asked for")
      for done in concurrent.futures.as_completed(waiting):
        try:
          done.result()
        except OutageError as error:
          failed += 1
          self._tell(f"no answer: {str(error)[:300]}")
        for each in replays:
          each.score(BATCH)
      for each in replays:
        each.score(1)
    finally:
      pool.shutdown(cancel_futures=True)
      for each in replays:
        each.close()
    return failed

  def _replay(self, name: str, lock: threading.Lock, *, asks: bool) -> Replay:
    run, plan = self.plan["runs"][name], self.plan["replay"]

    def client(condition: str) -> Any:
      letter = self.letter(condition)
      names = {"name": name, "condition": condition, "letter": letter}
      return llm.client(self._endpoint("replay_model", **names))

    return Replay(
      folder=self.path / "replay" / name,
      run=self.folder(name),
      options=self.options(name),
      task=self.task(run["task"]),
      heldout=self.heldout(run["task"]),
      samples=plan["samples"],
      limit=plan["per_run"],
      conditions=plan.get("conditions", CONDITIONS),
      returns=plan.get("returns", 0),
      client=client if asks else None,
      compiled=self.compiled,
      lock=lock,
      tell=self._tell,
    )


def read_plan(path: pathlib.Path) -> dict[str, Any]:
  """Returns the plan of a trial.

  Raises:
    ValueError: There is none, or it was changed after it was frozen.
  """
  file = path / "plan.json"
  expected = "the frozen plan of a trial"
  mend = "freeze a plan by `mxjax discover trial freeze`, or restore it"
  plan: dict[str, Any] = {}
  if file.exists():
    with reading.refusing(file, expected, mend):
      plan = reading.parse_json(reading.read_bytes(file, mend=mend), dict[str, Any])
  body = {key: value for key, value in plan.items() if key != "hash"}
  if identity.digest(body) != plan.get("hash"):
    raise ValueRefusal(
      path,
      expected=expected,
      got="none, or one that was changed",
      mend=mend,
    )
  with reading.refusing(file, expected, mend):
    check({key: value for key, value in plan.items() if key not in FROZEN}, file)
  return plan


PACKED = (
  *("plan.json", "cassettes/*.jsonl", "heldout/scores/*.json"),
  *("runs/*/run.json", "runs/*/log.jsonl", "runs/*/programs/*.py"),
  *("runs/*/outcomes/*.json", "runs/*/proposals/*.json", "runs/*/replies/*.json"),
  *("replay/*/transitions/*.json", "replay/*/successors/*.json"),
  *("replay/*/cassettes/*.jsonl", "replay/*/prompts/*.json", "replay/*/scores/*.json"),
)
"""What is packed: prompts, replies, logs, programs and outcomes; nothing compiled."""
MANIFEST = "manifest.json"
"""In an archive, the digests of its other files by their names."""
UNPACKED = 2**30
"""Bytes that an archive may unpack to."""


def pack(trial: Trial, file: pathlib.Path, places: Mapping[str, str]) -> None:
  """Writes a trial into one compressed archive that says nothing of this machine.

  `places` are paths and what stands for each in the archive. A log in which one is
  replaced gets a new chain of hashes over what it says now. A manifest tells whether a
  file of the archive was lost or changed since, though not who wrote it.

  Raises:
    FileExistsError: The file is there.
  """
  if file.exists():
    raise FileExistsRefusal(
      file,
      expected="a new file",
      got="one that exists",
      mend="name another --out or remove it yourself",
    )
  names = sorted({p for pattern in PACKED for p in trial.path.glob(pattern)})
  digests: dict[str, str] = {}
  with tarfile.open(file, "w:xz", preset=9) as archive:
    for path in names:
      data = path.read_bytes()
      for place, name in places.items():
        data = data.replace(place.encode(), name.encode())
      if data != path.read_bytes():
        data = digested(path, data)
      name = path.relative_to(trial.path).as_posix()
      digests[name] = hashlib.sha256(data).hexdigest()
      _add(archive, name, data)
    _add(archive, MANIFEST, json.dumps(digests, indent=0).encode())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
  # A new entry, which has neither the time nor the owner of the file.
  info = tarfile.TarInfo(name)
  info.size = len(data)
  archive.addfile(info, io.BytesIO(data))


def digested(path: pathlib.Path, data: bytes) -> bytes:
  """Returns a file in which paths were replaced, with its digests as they are now."""
  if path.name == "log.jsonl":
    lines, last = [], ""
    for line in data.decode().splitlines():
      event = {**json.loads(line), "previous": last}
      del event["hash"]
      last = event["hash"] = identity.digest(event)
      lines.append(identity.canonical(event) + "\n")
    return "".join(lines).encode()
  value = json.loads(data) if path.suffix == ".json" else None
  if isinstance(value, dict) and value.keys() == {"sha256", "value"}:
    entry = {"sha256": identity.digest(value["value"]), "value": value["value"]}
    return identity.canonical(entry).encode()
  return data


def unpack(file: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Extracts the archive of a trial into a folder; returns it.

  Raises:
    ValueError: It is none, holds what is no file or lies elsewhere, is larger than
      `UNPACKED`, or its files are not those of its manifest.
  """
  expected, left = "the archive of a trial", UNPACKED
  mend = "name one that `mxjax discover trial pack` wrote"
  with reading.refusing(file, expected, mend), tarfile.open(file) as archive:
    for member in archive:
      # Before anything of it is unpacked; an empty file takes room too.
      left -= tarfile.BLOCKSIZE + member.size
      if not member.isfile() or left < 0:
        raise ValueRefusal(
          file,
          expected=f"{expected}: files of {UNPACKED} bytes at most",
          got=f"more in {member.name!r:.80}" if left < 0 else f"{member.name!r:.80}",
          mend=mend,
        )
      archive.extract(member, folder, filter="data")
    whole = folder / MANIFEST
    # Without a manifest every file is one too many.
    listed = whole.read_bytes() if whole.is_file() else b"{}"
    told = reading.parse_json(listed, dict[str, str])
    files = [path for path in folder.rglob("*") if path.is_file() and path != whole]
    found = {
      path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
      for path in files
    }
    if differing := sorted(dict(found.items() ^ told.items())):
      raise ValueRefusal(
        file,
        expected=f"{expected}, with the files of its manifest",
        got=f"others: {', '.join(differing)[:200]} lost, added or changed",
        mend=mend,
      )
  return folder


def restore(
  archive: pathlib.Path, folder: pathlib.Path, home: pathlib.Path | None = None
) -> None:
  """Unpacks the archive of a trial into a new folder, to go on with its runs.

  An archive has no path of a machine, and a resumed run must repeat its own first event
  to the letter. So `models/trained` and the folder of the trial, which is to be at
  `home`, are put back where they stood, and logs get a new chain of hashes.

  Raises:
    ValueError: See `unpack`.
    FileExistsError: The folder is there.
  """
  folder.mkdir(parents=True)
  unpack(archive, folder)
  trained = embedded.trained_folder("llama").parent.resolve()
  places = {
    '"models/trained/': f'"{trained}/',
    '"trial/cassettes/': f'"{(home or folder).resolve()}/cassettes/',
  }
  for path in (*folder.glob("runs/*/run.json"), *folder.glob("runs/*/log.jsonl")):
    data = path.read_bytes()
    for name, place in places.items():
      data = data.replace(name.encode(), place.encode())
    path.write_bytes(digested(path, data))


def names_of(trial: Trial, asked: Iterable[str]) -> Sequence[str]:
  """Returns the runs that were asked for, or all.

  Raises:
    ValueError: One is not in the plan.
  """
  names = list(asked) or list(trial.plan["runs"])
  if unknown := sorted({*names} - {*trial.plan["runs"]}):
    raise ValueRefusal(
      "trial",
      expected=f"runs of the plan: {', '.join(trial.plan['runs'])}",
      got=unknown,
      mend="name some of these",
    )
  return names
