"""What a reproduction runs with: words of commands, and what is less than the paper."""

import argparse
from typing import Any

import numpy as np

from mxjax import models
from mxjax.evaluation import datasets, text_sources
from mxjax.evaluation.reproduce import cells, paper
from mxjax.evaluation.reproduce.cells import Job
from mxjax.evaluation.reproduce.declared import Declared
from mxjax.evaluation.reproduce.tables import SUMMARIES
from mxjax.evaluation.tasks.seven_tasks import EMBEDDED
from mxjax.evaluation.tasks.tasks import ACCURACIES, PERPLEXITIES

SEQUENCES, LENGTH, LOCAL_SEQUENCES = 128, 2048, 512
"""The paper's calibration sample, and its sequences for local errors."""
EXTRA = {"operator_error": "operator_error", "agreement": "kl"}
"""Columns that options of `quantize` add, by option."""


def _given(**words: Any) -> list[str]:
  """Returns options with their values; those without a value are left out."""
  flags = {name.replace("_", "-"): value for name, value in words.items()}
  return [
    word
    for name, value in flags.items()
    if value is not None and value is not False
    for word in (f"--{name}", *([] if value is True else [str(value)]))
  ]


def _unless_embedded(source: str | None) -> str | None:
  return None if source == EMBEDDED else source


def quantize_words(options: argparse.Namespace) -> list[str]:
  """Returns the options of every `mxjax quantize`.

  Only replicates and agreement are measured on all windows of a build's own test; the
  operator error takes its first.
  """
  reads_all = options.replicates > 1 or options.agreement
  return _given(
    calib=_unless_embedded(options.calib),
    sequences=options.sequences,
    length=options.length,
    sampling=options.sampling,
    data=_unless_embedded(options.wikitext2 or "wikitext2"),
    windows=(options.windows or 8) if reads_all else 1,
    window_length=options.window_length,
    replicates=options.replicates,
    operator_error=options.operator_error,
    agreement=options.agreement,
    dtype=options.dtype,
  )


def evaluate_words(options: argparse.Namespace) -> list[str]:
  """Returns the options of every `mxjax evaluate --tasks`."""
  return _given(
    items=options.items,
    task_source=options.task_source,
    wikitext2=options.wikitext2,
    c4=options.c4,
    task_windows=options.windows,
    window_length=options.window_length,
    dtype=options.dtype,
  )


def extra_columns(options: argparse.Namespace) -> list[str]:
  """Returns the columns that options add to every table."""
  found = [column for name, column in EXTRA.items() if getattr(options, name)]
  return ["perplexity"] * (options.replicates > 1) + found


def reduced(whole: Declared, needs: set[str], options: argparse.Namespace) -> list[str]:
  """Says in words what a table has less of, or otherwise, than the paper's.

  `needs` are the jobs that it still needs.
  """
  found = []
  used = cells.seeds(whole, options.seeds)
  theirs = {row.model for row in paper.printed(whole)} - {*SUMMARIES}
  if len(options.models) < len(theirs):
    found.append(f"{len(options.models)} of {len(theirs)} models")
  if len(used) < len(whole.draws):
    found.append(f"{len(used)} of {len(whole.draws)} calibration draws")
  if (options.sequences, options.length) != (SEQUENCES, LENGTH):
    found.append(f"{options.sequences} x {options.length} calibration tokens")
  dtype = lambda model: options.dtype or models.default_dtype(cells.source(model))
  if wide := [m for m in options.models if dtype(m) != "bfloat16"]:
    of = "" if wide == options.models else f" of {', '.join(map(_name, wide))}"
    found.append(f"float32 arithmetic{of}")
  if options.calib != "c4":
    found.append(f"calibrated on {_name(options.calib)}")
  if {*ACCURACIES} & needs and options.items:
    found.append(f"first {options.items} items")
  if {*PERPLEXITIES} & needs:
    if options.windows:
      found.append(f"first {options.windows} windows")
    if options.window_length != LENGTH:
      found.append(f"windows of {options.window_length} tokens")
    for task in PERPLEXITIES:
      if source := getattr(options, task):
        found.append(f"{_name(source)} for {task}")
  if "local" in needs and options.local_sequences < LOCAL_SEQUENCES:
    found.append(f"local errors on {options.local_sequences} sequences")
  absent = (cells.needs(whole) - needs) | whole.rows.keys()
  if left_out := [name for name in options.without if name in absent]:
    found.append(f"without {', '.join(left_out)}")
  found += [
    f"{label} as {method}"
    for label, method in options.instead.items()
    if label in whole.rows and label not in options.without
  ]
  return found


def _name(source: str | None) -> str:
  return "embedded text" if source in (None, EMBEDDED) else str(source).split("/")[-1]


def unseen_tokens(
  options: argparse.Namespace, job: Job, tokenizer: models.Tokenizer
) -> np.ndarray:
  """Loads sequences that calibration did not see, int32 `[sequences, length]`.

  They are of the other split of the hub's sets and of the embedded text; of a file,
  they follow those of the calibration.

  Raises:
    ValueError: The file is too short, or calibration samples it at random.
  """
  source, count = _unless_embedded(options.calib), options.local_sequences
  load = lambda count, split, **given: datasets.load_tokens(
    source, tokenizer, count=count, length=options.length, split=split, **given
  )
  if source is None or source in text_sources.HUB_SETS:
    return load(count, "test")
  if options.sampling not in (None, "windows"):
    raise ValueError(
      f"reproduce: expected --sampling windows of {source}, got {options.sampling}; "
      "sequences drawn at random need not be disjoint from those of the calibration."
    )
  both = load(options.sequences + count, "calibration", seed=job.build.seed)
  return both[options.sequences :]
