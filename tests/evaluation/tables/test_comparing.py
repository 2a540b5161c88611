"""Comparisons of several methods on the same calibration tokens."""

import dataclasses

import numpy as np
import pytest

from mxjax import models
from mxjax.evaluation import builds
from mxjax.evaluation.subjects import Subject
from mxjax.evaluation.tables.comparing import compare
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from tests import tiny


def draw(seed):
  return np.random.default_rng(seed).integers(0, 61, (3, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def subject(tiny_model, tiny_params):
  return Subject(tiny_model, tiny_params, {"text": draw(9)}, replicates=2)


@pytest.mark.slow
def test_a_comparison_survives_a_failing_method_and_tries_it_again(
  subject, tmp_path, monkeypatch
):
  calls = []
  real = builds.run_method

  def flaky(subject, tokens, method, **options):
    calls.append(method.name)
    if method.name == "gptq" and calls.count("gptq") == 1:
      raise FloatingPointError("gptq met a bad Hessian")
    return real(subject, tokens, method, check=False, probe=False, **options)

  monkeypatch.setattr(builds, "run_method", flaky)
  names = ("rtn", "gptq", "mr-gptq")
  rows, _ = compare(subject, draw(0), names, folder=tmp_path)
  assert [row["method"] for row in rows] == [*names]
  assert rows[1]["error"] == "gptq met a bad Hessian"
  assert (tmp_path / "store").is_dir()
  rows, _ = compare(subject, draw(0), names, folder=tmp_path)
  assert not any("error" in row for row in rows)
  assert calls == ["rtn", "gptq", "mr-gptq", "gptq"]
  # What the methods shared is removed once all have a row.
  assert sorted(p.name for p in tmp_path.iterdir()) == ["rows", "settings.json"]


@pytest.mark.slow
def test_rules_are_marked_and_rows_of_other_tokens_are_refused(subject, tmp_path):
  even = Contract(rules=mxfp4.Rules(scale_rule="even"))
  contracts = {"": PAPER_CONTRACT, "[even]": even}
  options = {"folder": tmp_path, "contracts": contracts}
  rows, _ = compare(subject, draw(0), ("rtn",), **options)
  assert [row["method"] for row in rows] == ["rtn", "rtn [even]"]
  assert rows[0]["operator_error"] != rows[1]["operator_error"]
  with pytest.raises(ValueError, match="made with calibration tokens "):
    compare(subject, draw(1), ("rtn",), folder=tmp_path)


def test_rows_that_name_the_size_as_before_0_1_0_are_kept_under_its_name(
  subject, tmp_path
):
  [row], _ = compare(subject, draw(0), ("rtn",), folder=tmp_path)
  file = tmp_path / "rows" / "rtn.json"
  older = file.read_text().replace('"bf16_over_total"', '"ratio"')
  file.write_text(older)
  [again], _ = compare(subject, draw(0), ("rtn",), folder=tmp_path)
  assert again["size"] == row["size"] and "ratio" not in again["size"]
  assert file.read_text() == older


def test_rows_of_other_measurements_are_refused(subject, tmp_path):
  compare(subject, draw(0), ("rtn",), folder=tmp_path)
  norm = {"weight": 2 * subject.params["norm"]["weight"]}
  changes = {
    "replicates 3, got replicates 2; name another --out": {"replicates": 3},
    "tests {'text': '": {"tests": {"text": draw(8)}},
    "agreement True, got agreement False;": {"with_agreement": True},
    "model ": {"model": models.CausalLM(tiny.config(rope_theta=5e5))},
    # Such as a tuned variant, in the folder of the first comparison.
    " model ": {"params": {**subject.params, "norm": norm}},
  }
  for message, change in changes.items():
    other = dataclasses.replace(subject, **change)
    with pytest.raises(ValueError, match="expected what was made with ") as refused:
      compare(other, draw(0), ("rtn",), folder=tmp_path)
    assert message in str(refused.value)
