"""Compares methods on one set of calibration tokens: each is a row, under each rule."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from mxjax import methods
from mxjax.calibration.calibration import Params, token_fingerprint
from mxjax.calibration.store import params_digest
from mxjax.evaluation import builds
from mxjax.evaluation.subjects import Subject, evaluation_steps
from mxjax.evaluation.tables import runner
from mxjax.evaluation.tables.settings import check_settings, keep_to
from mxjax.intake.reading import parse_json, read_bytes, refusing
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.run import progress
from mxjax.storage import atomic_io

ROWS = "rows"
"""Name of the subfolder with a comparison's finished rows."""
STORE = "store"
"""Name of the subfolder with float-model data that its methods share."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """A row: a method under a contract, whose mark stands behind the method's name."""

  program: Program
  contract: Contract
  mark: str = ""

  @property
  def label(self) -> str:
    """Its name in the table; what only quantizes weights says so."""
    return self.contract.marked(f"{self.program.name} {self.mark}".strip())


def declared(
  names: Iterable[str], contracts: Mapping[str, Contract] | None = None
) -> list[Row]:
  """Lists the rows: each method under each contract, by its mark."""
  programs = [methods.get(name) for name in names]
  rules = (contracts or {"": PAPER_CONTRACT}).items()
  pairs = itertools.product(programs, rules)
  return [
    Row(program, program.under(contract), mark) for program, (mark, contract) in pairs
  ]


@dataclasses.dataclass(kw_only=True)
class Comparison(runner.Work[Row]):
  """The work of a comparison.

  Attributes:
    subject: The model and its tests.
    tokens: Calibration tokens, int32 `[sequences, length]`.
    folder: Where finished rows are kept; None keeps them here alone.
    facts: What every new row says beside its measurements, JSON-ready.
    on_method: Called with a row's label; returns what follows its progress.
    made: Finished rows by label.
    last: Params of the row that was made last, in this call.
  """

  subject: Subject
  tokens: np.ndarray
  folder: pathlib.Path | None
  facts: Mapping[str, Any]
  on_method: Callable[[str], progress.OnProgress | None] | None
  made: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  last: Params | None = None

  def __post_init__(self) -> None:
    """Names the store in the folder."""
    self.store = self.folder / STORE if self.folder else None

  def _file(self, row: Row) -> pathlib.Path | None:
    name = f"{row.label.replace(' ', '-')}.json"
    return self.folder / ROWS / name if self.folder else None

  @override
  def is_done(self, job: Row) -> bool:
    """Reads a finished row."""
    file = self._file(job)
    if job.label in self.made or not (file and file.is_file()):
      return job.label in self.made
    with refusing(file, "a row of a comparison", "remove it to make the row again"):
      row = parse_json(read_bytes(file), dict[str, Any])
      record, size = row["record"], row.get("size") or {}
      if "ratio" in size:
        # As rows before 0.1.0 name it; one result file has one name.
        size["bf16_over_total"] = size.pop("ratio")
      there = {"options": record["program"], "rules": record["contract_hash"]}
    given = {"options": job.program.describe(), "rules": job.contract.hash}
    check_settings(file, there, given, "remove it to make the row again")
    self.made[job.label] = row
    return True

  @override
  def perform(self, job: Row) -> None:
    row, self.last = builds.run_method(
      self.subject,
      self.tokens,
      job.program,
      contract=job.contract,
      store=self.store,
      on_progress=self.on_method(job.label) if self.on_method else None,
    )
    row |= {"method": job.label, **self.facts}
    row["shared_with"] = [str(self.store)] if self.store else []
    if file := self._file(job):
      file.parent.mkdir(parents=True, exist_ok=True)
      atomic_io.write_json(file, row, indent=1)
    self.made[job.label] = row


def compare(
  subject: Subject,
  tokens: np.ndarray,
  names: Iterable[str],
  *,
  folder: str | os.PathLike[str] | None = None,
  contracts: Mapping[str, Contract] | None = None,
  on_method: Callable[[str], progress.OnProgress | None] | None = None,
  facts: Mapping[str, Any] | None = None,
) -> tuple[list[dict[str, Any]], Params | None]:
  """Runs several methods in order on the same calibration tokens.

  A method that collapses, runs out of memory or meets a Hessian it cannot factor gets a
  row with its `error`; the others continue. With a folder, float activations and raw
  Hessians are computed once for all methods, and each finished row is written: a rerun
  skips finished rows and retries failed methods.

  Every method runs under each of `contracts`, with the key appended to its name; None
  means the paper's contract alone. `on_method` is called with each name and returns the
  progress callback of that method. New rows get the JSON-ready `facts`.

  Returns:
    One row per method and contract, and the params of the last method that succeeded in
    this call.

  Raises:
    ValueError: The folder, or a finished row in it, was made with other settings.
    FileExistsError: The folder has something else in it.
  """
  rows, path = declared(names, contracts), None
  if folder is not None:
    path = pathlib.Path(folder)
    keep_to(path, _settings(subject, tokens))
  follow = on_method("float model") if on_method else None
  exact = subject.float_perplexities(
    evaluation_steps(follow, subject.model.num_layers) if follow else None
  )
  work = Comparison(
    subject=subject,
    tokens=tokens,
    folder=path,
    facts={"float_perplexity": exact, **(facts or {})},
    on_method=on_method,
  )
  failures = runner.run(work, rows)
  made = [
    work.made.get(row.label)
    or {"error": failures[row], "method": row.label, **work.facts}
    for row in rows
  ]
  return made, work.last


def _settings(subject: Subject, tokens: np.ndarray) -> dict[str, Any]:
  """Returns what all rows are made of and measured by; reads all weights."""
  config = getattr(subject.model, "config", None)
  fields = {} if config is None else config.to_dict()
  # The dtype has a name of its own among what differs.
  model = json.dumps([fields | {"dtype": None}, params_digest(subject.params)])
  return {
    "model": hashlib.sha256(model.encode()).hexdigest(),
    "dtype": subject.dtype,
    "calibration tokens": token_fingerprint(tokens),
    "tests": {name: token_fingerprint(t) for name, t in subject.tests.items()},
    "replicates": subject.replicates,
    "operator error": subject.with_operator_error,
    "agreement": subject.with_agreement,
  }
