"""Quantize and measure: what `quantize`, `evaluate`, `compare` and `demo` share."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mxjax import methods, pipeline, sizes
from mxjax.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
  token_fingerprint,
)
from mxjax.evaluation.agreement import agreement
from mxjax.evaluation.operator_error import operator_error
from mxjax.evaluation.perplexity import perplexity
from mxjax.program import Program


@dataclasses.dataclass(frozen=True)
class Subject:
  """A float model and the token windows it is judged on.

  Attributes:
    model: The model.
    params: Its float params.
    tests: Windows by name, int32 `[windows, length]` each.
    replicates: Perplexity runs, those after the first with a perturbed embedding.
    with_operator_error: Whether to measure it, on the first window of the first test.
    with_agreement: Whether to compare predictions with the float model's by token, on
      the first test.
  """

  model: CausalLanguageModel
  params: Params
  tests: dict[str, np.ndarray]
  replicates: int = 1
  with_operator_error: bool = True
  with_agreement: bool = False

  def float_perplexities(self) -> dict[str, float]:
    """Unperturbed perplexity of the float model on every test."""
    return {
      name: perplexity(self.model, self.params, tokens).mean
      for name, tokens in self.tests.items()
    }

  def measure(self, quantized: Params) -> dict[str, Any]:
    """Perplexities and operator error of quantized params, JSON-ready."""
    start = time.perf_counter()
    results = {
      name: perplexity(
        self.model, quantized, tokens, replicates=self.replicates
      ).to_dict()
      for name, tokens in self.tests.items()
    }
    error = None
    if self.with_operator_error and self.tests:
      window = next(iter(self.tests.values()))[:1]
      error = operator_error(self.model, self.params, quantized, window)
    compared = None
    if self.with_agreement and self.tests:
      windows = next(iter(self.tests.values()))
      compared = agreement(self.model, self.params, quantized, windows).to_dict()
    return {
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
  **options: Any,
) -> tuple[dict[str, Any], Params]:
  """Quantizes with one method and measures the result.

  Args:
    subject: Model and tests.
    tokens: Calibration tokens, int32 `[sequences, length]`.
    method: A name or a program.
    **options: For `pipeline.quantize_with_record`.

  Returns:
    A JSON-ready row (`method`, `perplexity`, `operator_error`, `size`, `seconds`,
    `record`), and the quantized params.
  """
  program = methods.get(method)
  start = time.perf_counter()
  result = pipeline.quantize_with_record(
    subject.params, Calibration(subject.model, tokens), program, **options
  )
  seconds = time.perf_counter() - start
  row = {
    "method": program.name,
    "seconds": seconds,
    **subject.measure(result.params),
    "size": sizes.size_report(result.params),
    "record": result.record.to_dict(),
  }
  return row, result.params


def compare(
  subject: Subject,
  tokens: np.ndarray,
  names: Sequence[str],
  *,
  on_method: Callable[[str], pipeline.OnProgress | None] | None = None,
) -> tuple[list[dict[str, Any]], Params | None]:
  """Runs several methods on the same calibration tokens.

  A method that collapses or meets a Hessian it cannot factor gets a row with its
  `error`; the others go on.

  Args:
    subject: Model and tests.
    tokens: Calibration tokens.
    names: Methods in the order to run.
    on_method: Called with each name; what it returns follows that method's progress.

  Returns:
    One row a method, and the params of the last method that succeeded.
  """
  programs = [methods.get(name) for name in names]
  float_perplexity = subject.float_perplexities()
  rows, last = [], None
  for program in programs:
    progress = on_method(program.name) if on_method else None
    try:
      row, last = run_method(subject, tokens, program, on_progress=progress)
    except (ValueError, FloatingPointError) as error:
      row = {"method": program.name, "error": str(error)}
    rows.append({**row, "float_perplexity": float_perplexity})
  return rows, last
