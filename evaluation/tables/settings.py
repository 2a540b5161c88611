"""What the cells of the paper's tables are made with, and that a folder keeps to it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mxjax import models
from mxjax.errors import ValueRefusal
from mxjax.evaluation import datasets, provenance, text_sources
from mxjax.evaluation.evaluating import TaskData
from mxjax.evaluation.subjects import CalibrationSample, Evaluation
from mxjax.evaluation.tasks.seven_tasks import EMBEDDED
from mxjax.evaluation.tasks.tasks import ACCURACIES, PERPLEXITIES
from mxjax.intake.reading import read_json
from mxjax.storage import atomic_io

FILE = "settings.json"
"""Name of the file with the settings of a folder."""
SEQUENCES, LENGTH, LOCAL_SEQUENCES = 128, 2048, 512
"""The paper's calibration sample, and its sequences for local errors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What all cells of a folder of tables are made with; the paper's by default.

  Attributes:
    sample: The calibration; each build has a seed of its own.
    tasks: What is evaluated; its texts are also those of a build's own test.
    replicates: Perturbed replicates of a build's own perplexity, a column of its own.
    operator_error: Whether tables have it as a column.
    agreement: Whether tables have KL as a column.
    local_sequences: For local errors, on text that calibration did not see.
    dtype: Compute dtype; None is that of `models.default_dtype`.
  """

  sample: CalibrationSample = CalibrationSample(source="c4")
  tasks: TaskData = TaskData(item_source="hub")
  replicates: int = 1
  operator_error: bool = False
  agreement: bool = False
  local_sequences: int = LOCAL_SEQUENCES
  dtype: str | None = None

  @property
  def evaluation(self) -> Evaluation:
    """The test of every build.

    Only replicates and agreement are measured on all of its windows; the operator error
    takes the first.
    """
    reads_all = self.replicates > 1 or self.agreement
    return Evaluation(
      sources=(_unless_embedded(self.tasks.wikitext2 or "wikitext2"),),
      windows=(self.tasks.windows or 8) if reads_all else 1,
      window_length=self.tasks.window_length,
      replicates=self.replicates,
      operator_error=self.operator_error,
      agreement=self.agreement,
    )

  @property
  def written(self) -> dict[str, Any]:
    """What the cells of a folder depend on, JSON-ready, by the names of messages."""
    groups = {"calibration": self.sample, "tasks": self.tasks, "test": self.evaluation}
    return {
      f"{group} {name}": value
      for group, values in groups.items()
      for name, value in dataclasses.asdict(values).items()
    } | {"local sequences": self.local_sequences, "dtype": self.dtype}

  @property
  def columns(self) -> list[str]:
    """The columns that these settings add to every table."""
    return [
      *["perplexity"] * (self.replicates > 1),
      *["operator_error"] * self.operator_error,
      *["kl"] * self.agreement,
    ]

  def sample_of(self, seed: int | None) -> CalibrationSample:
    """Returns the calibration sample of a build."""
    source = _unless_embedded(self.sample.source)
    return dataclasses.replace(self.sample, source=source, seed=seed or 0)

  def unseen_tokens(self, seed: int | None, tokenizer: models.Tokenizer) -> np.ndarray:
    """Loads sequences that calibration did not see, int32 `[sequences, length]`.

    They are of the other split of the hub's sets and of the embedded text; of a file,
    they follow those of the calibration.

    Raises:
      ValueError: The file is too short, or calibration samples it at random.
    """
    sample = self.sample_of(seed)
    if sample.source is None or sample.source in text_sources.HUB_SETS:
      return datasets.load_tokens(
        sample.source,
        tokenizer,
        count=self.local_sequences,
        length=sample.length,
        split="test",
      )
    if sample.sampling not in (None, "windows"):
      raise ValueRefusal(
        "reproduce",
        expected=f"--sampling windows of {sample.source}",
        got=f"{sample.sampling}, which need not be disjoint from the calibration",
      )
    # Loaded at once, so that what is unseen follows the calibration in one order.
    both = sample.sequences + self.local_sequences
    tokens = dataclasses.replace(sample, sequences=both).load(tokenizer)
    return tokens[sample.sequences :]

  def reduced(self, needs: set[str], models_: Sequence[str]) -> list[str]:
    """Says in words what these settings have less of, or otherwise, than the paper.

    `needs` are the jobs of a table, `models_` its models.
    """
    found, sample, tasks = [], self.sample, self.tasks
    if (sample.sequences, sample.length) != (SEQUENCES, LENGTH):
      found.append(f"{sample.sequences} x {sample.length} calibration tokens")
    dtype = lambda model: self.dtype or models.default_dtype(provenance.source(model))
    if wide := [model for model in models_ if dtype(model) != "bfloat16"]:
      of = "" if wide == [*models_] else f" of {', '.join(map(_name, wide))}"
      found.append(f"float32 arithmetic{of}")
    if sample.source != "c4":
      found.append(f"calibrated on {_name(sample.source)}")
    if {*ACCURACIES} & needs and tasks.items:
      found.append(f"first {tasks.items} items")
    if {*PERPLEXITIES} & needs:
      if tasks.windows:
        found.append(f"first {tasks.windows} windows")
      if tasks.window_length != LENGTH:
        found.append(f"windows of {tasks.window_length} tokens")
      texts = {"wikitext2": tasks.wikitext2, "c4": tasks.c4}
      found += [f"{_name(text)} for {task}" for task, text in texts.items() if text]
    if "local" in needs and self.local_sequences < LOCAL_SEQUENCES:
      found.append(f"local errors on {self.local_sequences} sequences")
    return found


def _unless_embedded(source: str | None) -> str | None:
  return None if source == EMBEDDED else source


def _name(source: str | None) -> str:
  return "embedded text" if source in (None, EMBEDDED) else str(source).split("/")[-1]


def check_settings(
  place: pathlib.Path, there: Mapping[str, Any], given: Mapping[str, Any], mend: str
) -> None:
  """Compares what something was made with, with what would make it now.

  Raises:
    ValueError: They differ; the message names what, with both values, and `mend`.
  """
  # As the file gives it back: tuples are lists there.
  now = json.loads(json.dumps(given))
  if differs := [n for n in {**there, **now} if there.get(n) != now.get(n)]:
    listed = lambda values: ", ".join(f"{n} {_text(values.get(n))}" for n in differs)
    raise ValueRefusal(
      place, expected=f"what was made with {listed(now)}", got=listed(there), mend=mend
    )


def _text(value: Any) -> str:
  text = "none" if value is None else str(value)
  return text if len(text) <= 60 else f"{text[:60]}..."


def check_folder(out: pathlib.Path) -> None:
  """Rejects a folder that is not empty and holds no tables.

  Raises:
    FileExistsError: It is one.
  """
  if not (out / FILE).is_file():
    atomic_io.check_output(out)


def keep_to(out: pathlib.Path, given: Mapping[str, Any]) -> None:
  """Writes the settings that all cells of a folder depend on, or compares them.

  Raises:
    ValueError: The folder was made with other settings.
    FileExistsError: The folder has something else in it.
  """
  path = out / FILE
  if not path.is_file():
    atomic_io.create_output(out)
    atomic_io.write_json(path, given, indent=1)
    return
  mend = "name another --out, or give the same settings"
  there = read_json(path, dict[str, Any], "settings of tables", mend=mend)
  check_settings(out, there, given, mend)
