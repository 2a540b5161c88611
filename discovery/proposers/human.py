"""A person as the proposer: questions and answers are files."""

import json
import pathlib
import time

from mxjax.discovery.core.proposal import Context, OutageError, Proposal
from mxjax.discovery.core.task import Task
from mxjax.discovery.proposers import prompt
from mxjax.discovery.proposers.llm import Answer


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
    seconds.
    """
    self._folder, self._task = pathlib.Path(folder), task
    self._seconds, self._poll = seconds, poll

  def propose(self, context: Context) -> Proposal:
    """See `Proposer.propose`."""
    name = "-".join(map(str, context.address))
    self._folder.mkdir(parents=True, exist_ok=True)
    system, user = prompt.messages(context, self._task)
    text = f"{system['content']}\n\n{user['content']}\n"
    (self._folder / f"question-{name}.md").write_text(text)
    (self._folder / f"question-{name}.py").write_text(context.parent.source)
    path = self._folder / f"answer-{name}.json"
    end = time.monotonic() + self._seconds
    while not path.exists():
      if time.monotonic() > end:
        raise OutageError(f"human: no {path} within {self._seconds:g} s")
      time.sleep(self._poll)
    values = json.loads(path.read_text())
    beside = self._folder / str(values.get("source", ""))
    if values.get("source", "").endswith(".py") and beside.is_file():
      values["source"] = beside.read_text()
    return Answer.model_validate(values).proposal({"calls": 1})
