"""What a build measures without being asked for: KL, flips, and the right baseline."""

import dataclasses

import pytest

from mxjax.evaluation import builds, subjects
from mxjax.evaluation.report import page
from tests import tiny

WEIGHT_ONLY = "gptq:activations=float"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  path = tiny.save_folder(tmp_path_factory.mktemp("model"), num_layers=1)
  text = str(path / "text.txt")
  sample = subjects.CalibrationSample(source=text, sequences=2, length=32)
  evaluation = subjects.Evaluation(sources=(text,), windows=2, window_length=32)
  return subjects.prepare(str(path), sample, evaluation)


def test_a_build_compares_predictions_unless_it_is_told_not_to(prepared, tmp_path):
  options = builds.BuildOptions(baseline=True)
  row = builds.build(prepared, "gptq", tmp_path / "one", options)
  assert 0 < row["agreement"]["kl_mean"] < row["baseline"]["agreement"]["kl_mean"]
  # All predictions of the windows whose perplexity is measured.
  assert row["agreement"]["predictions"] == 2 * 31
  said = page.verdict([row])
  assert "nats a token and flips" in said and "(RTN: " in said
  without = dataclasses.replace(options, agreement=False, baseline=False)
  row = builds.build(prepared, "gptq", tmp_path / "two", without)
  assert row["agreement"] is None
  said = page.remarks([row])[0]
  assert said.startswith("Not measured: KL, flips, operator error; ask by --agreement")


@pytest.mark.slow
def test_a_weight_only_build_is_held_against_weight_only_rtn(prepared, tmp_path):
  options = builds.BuildOptions(baseline=True, agreement=False)
  row = builds.build(prepared, WEIGHT_ONLY, tmp_path / "one", options)
  assert row["method"] == f"{WEIGHT_ONLY} [W4A16]"
  assert row["baseline"]["method"] == "rtn:activations=float [W4A16]"
  strict, _ = builds.run_method(prepared.subject, prepared.tokens[:1], "rtn")
  loose = row["baseline"]["perplexity"]["text"]
  assert loose["values"] != strict["perplexity"]["text"]["values"]
  assert "of RTN" in page.verdict([row])


def test_time_left_counts_what_a_program_learns(prepared):
  """Layers and windows that follow have their tokens' part of what learning leaves."""
  seen = []
  builds.run_method(
    prepared.subject,
    prepared.tokens,
    "spinquant:steps=3:batch=2",
    on_progress=seen.append,
    check=False,
    probe=False,
  )
  fractions = [now.fraction for now in seen]
  assert fractions == sorted(fractions) and fractions[-1] == 1
  [learned] = {now.learned for now in seen if now.stage.startswith("learning")}
  windows = [now for now in seen if now.stage.startswith(subjects.EVALUATING)]
  # 64 tokens calibrate and 64 are evaluated; learning takes 6 / 2 * 8 as long as one.
  assert learned == pytest.approx(24 / 25)
  assert windows[0].fraction == pytest.approx(25 / 26)
