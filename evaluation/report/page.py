"""Writes one self-contained HTML page about quantization runs."""

import html
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.errors import ValueRefusal
from mxjax.evaluation.report.html import document, glossary
from mxjax.evaluation.report.run import run_section
from mxjax.evaluation.report.summary import summary
from mxjax.storage.atomic_io import write_durably

Run = Mapping[str, Any]
WORDS = {
  "perplexity": "How badly the model predicts text: the exponential of the mean loss.",
  "operator error": "Relative squared error of a linear's output on the float model's "
  "inputs, the mean over linears.",
  "KL": "Mean divergence of the predictions from the float model's, nats a token.",
  "flips": "Share of positions where the likeliest token is another.",
  "bits a weight": "All stored bytes of the linears, with maps and tables, over their "
  "weights.",
  "block": "32 neighbouring values with one power of two as their scale.",
  "map": "The transform of a block's inputs, folded into the weights.",
  "edit rate": "Share of activation blocks in which the A4 rule moved one code away "
  "from the nearest.",
  "saturation": "Values beyond 6 times the scale, the largest code.",
  "damping": "What is added to a Hessian's diagonal so that it can be factored.",
  "recovery": "Corrections of attention values and of the MLP's gate that are fitted "
  "after quantization.",
  "spread": "Difference of the largest and smallest replicate, whose embeddings differ "
  "by 1e-6.",
  "sanity gate": "A comparison with the float model that stops a collapsed one.",
}
_KEYS = ("method", "perplexity", "float_perplexity", "operator_error", "record")


def _check(runs: Sequence[Run]) -> None:
  if not runs:
    raise ValueRefusal(
      "write_report",
      expected="at least one run",
      got="none",
      mend="quantize with some method first",
    )
  for index, run in enumerate(runs):
    missing = [key for key in _KEYS if key not in run]
    if missing and "error" not in run:
      raise ValueRefusal(
        "write_report",
        expected=f"{', '.join(_KEYS)} in run {index} "
        f"({run.get('method', 'without a method')})",
        got=f"no {', '.join(missing)}",
        mend="pass the dict that the evaluation wrote",
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
  sections = "".join(
    run_section(run, f"run-{index}", is_open=len(good) == 1)
    for index, run in enumerate(good)
  )
  body = f"""<header><h1>{html.escape(title)}</h1><p>{html.escape(subtitle)}</p>
<nav aria-label="sections"><a href="#summary">Summary</a>{links}</nav></header>
<section id="summary"><h2>Summary</h2>{_failures(runs)}{summary(good)}</section>
{sections}
{glossary(WORDS)}
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
