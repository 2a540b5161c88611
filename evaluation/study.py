"""Quantizes and measures models: one method, or several on the same tokens."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from mxjax import methods
from mxjax.audit import arithmetic, sizes
from mxjax.calibration.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
  token_fingerprint,
)
from mxjax.calibration.store import params_digest
from mxjax.devices.placement import Placement
from mxjax.evaluation.measures.agreement import agreement
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.evaluation.measures.perplexity import Perplexity, perplexity
from mxjax.intake.reading import parse_json, read_bytes, refusing
from mxjax.methods.program import Program
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.run import progress
from mxjax.run.quantize import run
from mxjax.storage import atomic_io

ROWS = "rows"
"""Name of the subfolder with a study's finished rows."""
EVALUATING = "evaluating"
"""How the stages of an evaluation begin in a run's progress."""
STORE = "store"
"""Name of the subfolder with float-model data that methods of a study share."""

OnWindow = Callable[[int, int], None]
"""Called with (done, windows) after each test window."""


def evaluation_steps(
  on_progress: progress.OnProgress, layers: int, begin: float = 0.0
) -> OnWindow:
  """Returns what reports test windows as `Progress` from the fraction `begin` to 1."""

  def step(done: int, total: int) -> None:
    stage = f"{EVALUATING}, window {done}/{total}"
    fraction = begin + (1 - begin) * done / total
    on_progress(progress.Progress(layers - 1, layers, stage, fraction))

  return step


@dataclasses.dataclass(frozen=True)
class Subject:
  """A float model and the token windows on which it is evaluated.

  Attributes:
    model: The model.
    params: Its float params.
    tests: Windows by name, int32 `[windows, length]` each.
    replicates: Perplexity runs; those after the first perturb the embedding.
    with_operator_error: Whether to measure it, on the first window of the first test.
    with_agreement: Whether to compare predictions with the float model's by token, on
      the first test.
    mesh: Devices that share the work, or None for one.
  """

  model: CausalLanguageModel
  params: Params
  tests: dict[str, np.ndarray]
  replicates: int = 1
  with_operator_error: bool = True
  with_agreement: bool = False
  mesh: Mesh | None = None

  @property
  def dtype(self) -> str | None:
    """The model's compute dtype; None if it does not tell."""
    return getattr(getattr(self.model, "config", None), "dtype", None)

  @property
  def attention(self) -> dict[str, str] | None:
    """What computes the model's attention here; None if it does not tell."""
    return getattr(self.model, "attention", None)

  def float_perplexities(self, on_window: OnWindow | None = None) -> dict[str, float]:
    """Measures unperturbed perplexity of the float model on every test."""
    results = self._perplexities(self.params, 1, on_window)
    return {name: result.mean for name, result in results.items()}

  def _perplexities(
    self, params: Params, replicates: int, on_window: OnWindow | None
  ) -> dict[str, Perplexity]:
    """Measures all tests, and counts their windows together."""
    total = replicates * sum(map(len, self.tests.values()))
    done = itertools.count()
    step = (lambda *_: on_window(next(done), total)) if on_window else None
    if step:
      step()
    options = {"replicates": replicates, "mesh": self.mesh, "on_window": step}
    return {
      name: perplexity(self.model, params, tokens, **options)
      for name, tokens in self.tests.items()
    }

  def measure(
    self,
    quantized: Params,
    reference: Params | None = None,
    on_window: OnWindow | None = None,
  ) -> dict[str, Any]:
    """Measures quantized params: perplexities, operator error, agreement; JSON-ready.

    `reference` replaces the subject's float params if the program rewrote them;
    `on_window` is called with (done, windows) after each window of a perplexity.
    """
    start = time.perf_counter()
    exact = reference or self.params
    results = {
      name: result.to_dict()
      for name, result in self._perplexities(
        quantized, self.replicates, on_window
      ).items()
    }
    # The rest runs on one device, a layer at a time.
    quantized = Placement.of(self.mesh).on_primary(quantized)
    error = compared = None
    first = next(iter(self.tests.values()), None)
    if self.with_operator_error and first is not None:
      error = operator_error(self.model, exact, quantized, first[:1])
    if self.with_agreement and first is not None:
      compared = agreement(self.model, exact, quantized, first).to_dict()
    return {
      "dtype": self.dtype,
      "perplexity": results,
      "operator_error": error,
      "agreement": compared,
      "tests": {n: token_fingerprint(t) for n, t in self.tests.items()},
      "evaluation_seconds": time.perf_counter() - start,
    }


def run_method(
  subject: Subject,
  tokens: np.ndarray,
  method: str | Program,
  *,
  on_progress: progress.OnProgress | None = None,
  **options: Any,
) -> tuple[dict[str, Any], Params]:
  """Quantizes with one method and measures the result.

  Calibration tokens are int32 `[sequences, length]`; `on_progress` follows both, and
  its last fraction is 1; `options` are those of `mxjax.run.quantize.run`.

  Returns:
    A JSON-ready row (`method`, `perplexity`, `operator_error`, `size`,
    `arithmetic`, `seconds`, `record`), and the quantized params.
  """
  program = methods.get(method)
  # Tokens that pass through the model before the evaluation, and in it.
  before = np.size(tokens) * (1 + len(program.recover))
  after = subject.replicates * sum(map(np.size, subject.tests.values()))
  share = before / (before + after)
  follow = on_progress or (lambda now: None)
  start = time.perf_counter()
  result = run(
    subject.params,
    Calibration(subject.model, tokens),
    program,
    mesh=subject.mesh,
    on_progress=lambda now: follow(now._replace(fraction=share * now.fraction)),
    **options,
  )
  seconds = time.perf_counter() - start
  if result.record.resumed:
    # Includes the time of interrupted processes.
    seconds = sum(result.record.clock.seconds.values())
  record = result.record.to_dict()
  row = {
    "method": program.name,
    "seconds": seconds,
    **subject.measure(
      result.params,
      result.reference,
      evaluation_steps(follow, subject.model.num_layers, share),
    ),
    "size": sizes.size_report(result.params),
    "arithmetic": subject.dtype
    and arithmetic.arithmetic(
      result.params,
      subject.dtype,
      record["layers"],
      subject.attention,
    ),
    "record": record,
  }
  return row, result.params


def _identity(subject: Subject) -> str:
  """Returns the SHA-256 of a model's config and weights, hex; reads all of them."""
  config = getattr(subject.model, "config", None)
  fields = {} if config is None else config.to_dict()
  # The dtype has a name of its own among what differs.
  text = json.dumps([fields | {"dtype": None}, params_digest(subject.params)])
  return hashlib.sha256(text.encode()).hexdigest()


def read_row(
  file: pathlib.Path,
  subject: Subject,
  tokens: np.ndarray,
  program: Program,
  contract: Contract,
  identity: str,
) -> dict[str, Any] | None:
  """Reads a finished row of a model of this `_identity`; None if there is no file.

  Raises:
    ValueError: It was made under other settings; the message says which, and what to
      do.
  """
  if not file.is_file():
    return None
  tests = {name: token_fingerprint(t) for name, t in subject.tests.items()}
  made_of = token_fingerprint(tokens)
  with refusing(file, "a row of a comparison", "remove it to make the row again"):
    row = parse_json(read_bytes(file), dict[str, Any])
    record = row["record"]
    replicates = {len(result["values"]) for result in row["perplexity"].values()}
    differs = {
      "calibration tokens": record["calibration"]["fingerprint"] != made_of,
      "tests": row["tests"] != tests,
      "dtype": row.get("dtype", "float32") != (subject.dtype or "float32"),
      "options": record["program"] != json.loads(json.dumps(program.describe())),
      "rules": record["contract_hash"] != contract.hash,
      "replicates": replicates - {subject.replicates} != set(),
      "operator error": subject.with_operator_error and row["operator_error"] is None,
      "agreement": subject.with_agreement and row["agreement"] is None,
      # Rows once did not say it.
      "model": row.get("model_sha256", identity) != identity,
    }
  if differing := [name for name, is_other in differs.items() if is_other]:
    raise ValueError(
      f"{file} was made with other {', '.join(differing)}; name another --out, or "
      "remove that file to make the row again."
    )
  return row


def write_row(file: pathlib.Path, row: Mapping[str, Any]) -> None:
  """Writes a finished row durably."""
  file.parent.mkdir(parents=True, exist_ok=True)
  atomic_io.write_json(file, row, indent=1)


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
  """
  programs = [methods.get(name) for name in names]
  follow = on_method("float model") if on_method else None
  float_perplexity = subject.float_perplexities(
    evaluation_steps(follow, subject.model.num_layers) if follow else None
  )
  path = pathlib.Path(folder) if folder is not None else None
  identity = _identity(subject) if path else None
  rows, last = [], None
  for program, (mark, contract) in itertools.product(
    programs, (contracts or {"": PAPER_CONTRACT}).items()
  ):
    label = f"{program.name} {mark}".strip()
    file = path / ROWS / f"{label.replace(' ', '-')}.json" if path else None
    row = None
    if file and identity:
      row = read_row(file, subject, tokens, program, contract, identity)
    if row is None:
      try:
        row, last = run_method(
          subject,
          tokens,
          program,
          contract=contract,
          store=path / STORE if path else None,
          on_progress=on_method(label) if on_method else None,
        )
      except (ValueError, FloatingPointError, MemoryError, JaxRuntimeError) as error:
        row = {"error": str(error)}
      row |= {"method": label, "float_perplexity": float_perplexity}
      row |= {"model_sha256": identity} if identity else {}
      row |= facts or {}
      if file and "error" not in row:
        write_row(file, row)
    rows.append(row)
  return rows, last


def clear_store(folder: str | os.PathLike[str]) -> None:
  """Removes the large data that methods share, once a study is finished."""
  shutil.rmtree(pathlib.Path(folder) / STORE, ignore_errors=True)
