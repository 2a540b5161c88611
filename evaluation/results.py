"""Result files, and the checks before two results are compared."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pydantic

from mxjax.errors import FileNotFoundRefusal, ValueRefusal
from mxjax.evaluation.measures import fitness
from mxjax.evaluation.tasks.tasks import FLOAT as FLOAT
from mxjax.evaluation.tasks.tasks import TASKS
from mxjax.intake.reading import read_json, refusing
from mxjax.storage import atomic_io

KIND = "mxjax-evaluation"
"""The `kind` field of every result file."""


@dataclasses.dataclass(frozen=True)
class Result:
  """Measurements of one model under one method and calibration seed.

  Attributes:
    model: Name of the model.
    method: Name of the method, `BF16` for the float model.
    seed: Calibration seed, or None.
    tasks: What `to_json` was given, by task, `file`, where it was read from, and the
      compute `dtype`; absent if not measured.
    source: The file it was read from, for messages.
  """

  model: str
  method: str
  seed: int | None
  tasks: Mapping[str, Mapping[str, Any]]
  source: str

  @property
  def scores(self) -> dict[str, float]:
    """Perplexities and accuracies (fractions) by task."""
    return {task: float(values["score"]) for task, values in self.tasks.items()}

  @property
  def partial(self) -> dict[str, tuple[int, int]]:
    """Evaluated and official items of the tasks of which only a part was evaluated."""
    counts = {
      task: (values["items"], values.get("official_items") or 0)
      for task, values in self.tasks.items()
    }
    return {task: (n, of) for task, (n, of) in counts.items() if n < of}


def to_json(
  *, tasks: Mapping[str, Mapping[str, Any]], **details: Any
) -> dict[str, Any]:
  """Returns the content of a result file, JSON-ready.

  Each task has `score`, `items`, `official_items`, `token_sha256` and any other
  measurements; `details` are `model`, `method`, `seed` and further facts.
  """
  return {"kind": KIND, **details, "tasks": dict(tasks)}


def write(
  folder: pathlib.Path,
  result: Mapping[str, Any],
  items: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
  """Writes `evaluation.json`, and `items/TASK.jsonl` with one line per item."""
  folder.mkdir(parents=True, exist_ok=True)
  for task, rows in items.items():
    (folder / "items").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    atomic_io.write_durably(folder / "items" / f"{task}.jsonl", text.encode())
  # Last: where it is, its items are whole, which `jobs.Job.is_done` relies on.
  atomic_io.write_json(folder / "evaluation.json", result, indent=1)


def decisions(task: str, values: Mapping[str, Any]) -> np.ndarray | None:
  """Returns what a task's score is the mean of, float64 `[items or windows]`.

  `values` are those of `Result.tasks`. These are losses in nats a token for a
  perplexity, else 1 for a right and 0 for a wrong decision; None if they were not kept.
  """
  path = pathlib.Path(values["file"])
  mend = "evaluate the task again"
  if "window_losses" in values:
    with refusing(path, f"the losses of {task} by window", mend):
      return np.asarray(values["window_losses"], np.float64)
  path = path.parent / "items" / f"{task}.jsonl"
  if not path.is_file():
    return None
  kind = "prediction_norm" if TASKS[task].is_normalized else "prediction"
  with refusing(path, f"a decision on an item of {task} in each line", mend):
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return np.asarray([row[kind] == row["gold"] for row in rows], np.float64)


def _files(places: Iterable[str]) -> list[pathlib.Path]:
  files: list[pathlib.Path] = []
  for place in places:
    path = pathlib.Path(place)
    inside = sorted(path.rglob("evaluation.json")) if path.is_dir() else [path]
    if not inside or not inside[0].is_file():
      raise FileNotFoundRefusal(
        "results",
        expected="a result file or a folder with some",
        got=f"none at {place}",
        mend="name what `mxjax evaluate --tasks ... --out` wrote",
      )
    files += inside
  # Two places may hold one file.
  return list(dict.fromkeys(files))


def read(places: Iterable[str]) -> list[Result]:
  """Reads result files, and those named `evaluation.json` below folders, in order.

  Raises:
    FileNotFoundError: There is none.
    ValueError: A file is not a result, or two files of the same model, method and seed
      differ.
  """
  results: dict[tuple[str, str, int | None], Result] = {}
  for path in _files(places):
    new = _parse(path)
    key = new.model, new.method, new.seed
    if old := results.get(key):
      # Files of one model, method and seed are joined task by task.
      shared = old.tasks.keys() & new.tasks
      if any(old.scores[task] != new.scores[task] for task in shared):
        raise ValueRefusal(
          "results",
          expected=f"one score in {path} and {old.source}",
          got=f"different scores of {new.method} on {new.model} with seed {new.seed}",
          mend="keep one of them",
        )
      new = dataclasses.replace(new, tasks={**old.tasks, **new.tasks})
    results[key] = new
  return list(results.values())


class _Task(pydantic.BaseModel):
  score: float
  items: int
  official_items: int | None = None
  token_sha256: str


class _File(pydantic.BaseModel):
  model: str
  method: str
  seed: int | None
  tasks: dict[str, _Task]


def _parse(path: pathlib.Path) -> Result:
  mend = "name what `mxjax evaluate --tasks ... --out` wrote"
  values = read_json(path, dict[str, Any], f"a file of kind {KIND}", mend=mend)
  if values.get("kind") != KIND:
    raise ValueRefusal(
      f"results: {path}",
      expected=f"a file of kind {KIND}",
      got="another",
      mend="name what `mxjax evaluate --tasks ... --out` wrote",
    )
  with refusing(path, "a result", mend):
    # Strict, because a number in quotes is no number.
    _File.model_validate(values, strict=True)
  # Before there was a choice, all was float32.
  facts = {"file": str(path), "dtype": values.get("dtype", "float32")}
  tasks = {n: {**task, **facts} for n, task in values["tasks"].items()}
  if unknown := sorted(set(tasks) - set(fitness.TASKS)):
    raise ValueRefusal(
      f"results: {path}",
      expected=f"tasks of {', '.join(fitness.TASKS)}",
      got=", ".join(unknown),
      mend="remove them",
    )
  names = (values[key] for key in ("model", "method", "seed"))
  return Result(*names, tasks=tasks, source=str(path))


def references(results: Sequence[Result]) -> dict[str, Result]:
  """Returns the float model's result by model, after checking that the rest match it.

  Raises:
    ValueError: A method was evaluated on other tokens than the float model, or in
      another dtype.
  """
  floats = {r.model: r for r in results if r.method == FLOAT}
  for result in results:
    exact = floats.get(result.model, result)
    for task, ours in result.tasks.items():
      # What the float model lacks has nothing to differ from; there is no damage then.
      theirs = exact.tasks.get(task, ours)
      if theirs["token_sha256"] != ours["token_sha256"]:
        raise ValueRefusal(
          "results",
          expected=f"the same tokens in {result.source} and {exact.source}",
          got=f"{task} on different tokens, so a damage would mean nothing",
          mend="evaluate both with the same --items, --task-windows and data",
        )
      if theirs.get("dtype") != ours.get("dtype"):
        raise ValueRefusal(
          "results",
          expected=f"one dtype in {result.source} and {exact.source}",
          got=f"{task} in {ours['dtype']} and {theirs['dtype']}, so a damage would "
          "mean nothing",
          mend="evaluate both with the same --dtype",
        )
  return floats
