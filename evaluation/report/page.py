"""Writes one self-contained HTML page about quantization runs."""

import html
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.evaluation.report.html import document
from mxjax.evaluation.report.run import run_section
from mxjax.evaluation.report.summary import summary
from mxjax.storage.atomic_io import write_durably

Run = Mapping[str, Any]
_KEYS = ("method", "perplexity", "float_perplexity", "operator_error", "record")


def _check(runs: Sequence[Run]) -> None:
  if not runs:
    raise ValueError(
      "write_report: expected at least one run, got none; quantize with some method "
      "first."
    )
  for index, run in enumerate(runs):
    missing = [key for key in _KEYS if key not in run]
    if missing and "error" not in run:
      raise ValueError(
        f"write_report: run {index} ({run.get('method', 'without a method')}) must "
        f"have {', '.join(_KEYS)}, got no {', '.join(missing)}; pass the dict that the "
        "evaluation wrote."
      )


def _failures(runs: Sequence[Run]) -> str:
  return "".join(
    f'<p class="flag"><b>{html.escape(str(run.get("method", "a run")))}</b> gave no '
    f"result: {html.escape(str(run['error']))}</p>"
    for run in runs
    if "error" in run
  )


def page(runs: Sequence[Run], *, title: str, subtitle: str) -> str:
  """Returns the whole HTML document as text; see `write_report`."""
  _check(runs)
  good = [run for run in runs if "error" not in run]
  links = "".join(
    f'<a href="#run-{index}">{html.escape(str(run["method"]))}</a>'
    for index, run in enumerate(good)
  )
  sections = "".join(run_section(run, f"run-{index}") for index, run in enumerate(good))
  body = f"""<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>
<nav aria-label="sections"><a href="#summary">Summary</a>{links}</nav></header>
<section id="summary"><h2>Summary</h2>{_failures(runs)}{summary(good)}</section>
{sections}
<footer>Written by mxjax. Hover over a mark to read its value.</footer>"""
  return document(title, body)


def write_report(
  path: str | os.PathLike[str], runs: Sequence[Run], *, title: str, subtitle: str
) -> pathlib.Path:
  """Writes a page with all measurements, readable without a network; returns its path.

  Args:
    path: The file, replaced if it exists, or a folder, which gets `report.html`.
    runs: One JSON-ready dict per method: `method`; `perplexity`, by dataset `mean`,
      `spread` and `values`; `float_perplexity`, numbers by dataset;
      `operator_error` or None; `size` of `sizes.size_report` or None; and `record`, of
      `QuantizationRecord.to_dict`. A failed run has an `error` instead, which is shown.
    title: Heading of the page.
    subtitle: A line under the heading, such as model, data and machine.

  Raises:
    ValueError: There are no runs, or one lacks a required key.
  """
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / "report.html"
  content = page(runs, title=title, subtitle=subtitle)
  file.parent.mkdir(parents=True, exist_ok=True)
  write_durably(file, content.encode())
  return file
