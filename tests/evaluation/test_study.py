"""Comparisons of several methods on the same calibration tokens."""

import dataclasses

import numpy as np
import pytest

from mxjax import models
from mxjax.evaluation import study
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from tests import tiny


def draw(seed):
  return np.random.default_rng(seed).integers(0, 61, (3, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def subject(tiny_model, tiny_params):
  return study.Subject(tiny_model, tiny_params, {"text": draw(9)}, replicates=2)


def test_a_comparison_survives_a_failing_method_and_tries_it_again(
  subject, tmp_path, monkeypatch
):
  calls = []
  real = study.run_method

  def flaky(subject, tokens, method, **options):
    calls.append(method.name)
    if method.name == "gptq" and calls.count("gptq") == 1:
      raise FloatingPointError("gptq met a bad Hessian")
    return real(subject, tokens, method, check=False, probe=False, **options)

  monkeypatch.setattr(study, "run_method", flaky)
  names = ("rtn", "gptq", "mr-gptq")
  rows, _ = study.compare(subject, draw(0), names, folder=tmp_path)
  assert [row["method"] for row in rows] == [*names]
  assert rows[1]["error"] == "gptq met a bad Hessian"
  assert (tmp_path / "store").is_dir()
  rows, _ = study.compare(subject, draw(0), names, folder=tmp_path)
  assert not any("error" in row for row in rows)
  assert calls == ["rtn", "gptq", "mr-gptq", "gptq"]
  study.clear_store(tmp_path)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["rows"]


def test_rules_are_marked_and_rows_of_other_tokens_are_refused(subject, tmp_path):
  even = Contract(rules=mxfp4.Rules(scale_rule="even"))
  contracts = {"": PAPER_CONTRACT, "[even]": even}
  options = {"folder": tmp_path, "contracts": contracts}
  rows, _ = study.compare(subject, draw(0), ("rtn",), **options)
  assert [row["method"] for row in rows] == ["rtn", "rtn [even]"]
  assert rows[0]["operator_error"] != rows[1]["operator_error"]
  with pytest.raises(ValueError, match="other calibration tokens"):
    study.compare(subject, draw(1), ("rtn",), folder=tmp_path)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"replicates": 3}, "other replicates"),
    ({"tests": {"text": draw(8)}}, "other tests"),
    ({"model": models.CausalLM(tiny.config(rope_theta=5e5))}, "other model; name"),
  ],
)
def test_rows_of_other_measurements_are_refused(subject, tmp_path, change, message):
  study.compare(subject, draw(0), ("rtn",), folder=tmp_path)
  other = dataclasses.replace(subject, **change)
  with pytest.raises(ValueError, match=message):
    study.compare(other, draw(0), ("rtn",), folder=tmp_path)


def test_rows_of_other_weights_are_refused(subject, tmp_path):
  """Such as those of a tuned variant, in the folder of the first comparison."""
  study.compare(subject, draw(0), ("rtn",), folder=tmp_path)
  norm = {"weight": 2 * subject.params["norm"]["weight"]}
  other = dataclasses.replace(subject, params={**subject.params, "norm": norm})
  with pytest.raises(ValueError, match="made with other model; name another --out"):
    study.compare(other, draw(0), ("rtn",), folder=tmp_path)
