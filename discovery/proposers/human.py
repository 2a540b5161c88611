"""A person as the proposer: questions and answers are files."""

import json
import pathlib
import time

import pydantic

from mxjax.discovery.core.proposal import Context, OutageError, Proposal
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.llm import Answer


def _state(path: pathlib.Path) -> tuple[int, int] | None:
  """Returns what changes while a file is being written; None if there is none."""
  try:
    found = path.stat()
  except FileNotFoundError:
    return None
  return found.st_size, found.st_mtime_ns


class HumanProposer:
  """Writes each question into a folder and waits there for the answer."""

  name = "human"

  def __init__(
    self, folder: str | pathlib.Path, task: Task, *, seconds: float, poll: float = 1.0
  ) -> None:
    """Sets up the exchange through a folder.

    The folder receives `question-0-0.md` and `question-0-0.py`. The person puts
    `answer-0-0.json` there, with the fields of `llm.Answer`; its `source` may name a
    file in the same folder. The proposer waits `seconds` for it and checks every `poll`
    seconds, until it finds it unchanged.
    """
    self._folder, self._task = pathlib.Path(folder), task
    self._seconds, self._poll = seconds, poll

  def propose(self, context: Context) -> Proposal:
    """Writes a question into the folder and waits for the answer.

    Raises:
      OutageError: There is no answer in time, or the file holds none.
    """
    name = "-".join(map(str, context.address))
    self._folder.mkdir(parents=True, exist_ok=True)
    system, user = prompt.messages(context, self._task)
    text = f"{system['content']}\n\n{user['content']}\n"
    (self._folder / f"question-{name}.md").write_text(text)
    (self._folder / f"question-{name}.py").write_text(context.parent.source)
    path = self._folder / f"answer-{name}.json"
    end, before = time.monotonic() + self._seconds, None
    # An editor or a copy may still be writing: a whole answer stands as it is.
    while (now := _state(path)) is None or now != before:
      if now is None and time.monotonic() > end:
        raise OutageError(f"human: no {path} within {self._seconds:g} s")
      before = now
      time.sleep(self._poll)
    try:
      answer = self._read(path)
      base, parent = context.base.source, context.parent.source
      usage = {"calls": 1}
      return answer.proposal(base, self._task.interface, usage, parent=parent)
    except ValueError as error:
      told = str(error)
      if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        told = f"{'.'.join(map(str, first['loc'])) or 'answer'}: {first['msg']}"
      raise OutageError(
        f"human: {path}: expected a JSON object with code, plan or source, got: "
        f"{told}; mend the file."
      ) from error

  def _read(self, path: pathlib.Path) -> Answer:
    """Returns the answer in a file, with the source that it may name beside it."""
    try:
      values = json.loads(path.read_text())
    except RecursionError as error:
      raise ValueError("JSON that is nested too deeply") from error
    if isinstance(values, dict) and isinstance(source := values.get("source"), str):
      # The name of a file beside it; anything else is the program itself.
      beside = self._folder / source
      if source.endswith(".py") and beside.is_file():
        values["source"] = beside.read_text()
    return Answer.model_validate(values)
