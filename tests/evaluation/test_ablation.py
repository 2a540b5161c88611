"""Studies on a tiny model: rows, resumption, pairing, and what counts as a tie."""

import dataclasses
import json

import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation import ablation, ablation_table, study
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods import recovery_fits
from mxjax.methods.hires import ablations
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.realization.activation_quantizers import Unrounded
from mxjax.running.pipeline import quantize_with_record

PERPLEXITY = ablation_table.perplexity("t")
STUDIES = dict(ablations.STUDIES)
"""As the library has them: a fixture below puts a quicker one in place of another."""


def draw(seed):
  return np.random.default_rng(seed).integers(0, 61, (3, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def subject(tiny_model, tiny_params):
  return study.Subject(tiny_model, tiny_params, {"text": draw(9)}, replicates=2)


@pytest.fixture(scope="module")
def recovery(subject, tmp_path_factory):
  """The recovery study on RTN weights: the same fits, builds that take no time."""
  rows = tuple(
    (label, dataclasses.replace(methods.RTN, name=label, recover=program.recover))
    for label, program in ablations.STUDIES["recovery"]
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(ablations.STUDIES, "recovery", rows)
    folder = tmp_path_factory.mktemp("study")
    draws = {0: draw(0), 3: draw(3)}
    yield folder, ablation.run("recovery", subject, draws, folder)


def test_rows_of_recovery_share_one_build_and_differ_in_what_is_fitted(recovery):
  _, result = recovery
  for index in range(2):
    found = {label: rows[index] for label, rows in result["rows"].items()}
    errors = {row["operator_error"] for row in found.values()}
    assert len(errors) == 1  # The linears are the same in all rows.
    assert [row["reused_build"] for row in found.values()] == [False] + [True] * 4
    values = {
      label: row["perplexity"]["text"]["values"][0] for label, row in found.items()
    }
    assert len(set(values.values())) == 5
  first, second = (rows["perplexity"]["text"] for rows in result["rows"]["full HiRes"])
  assert first != second  # The fits are those of their own draw.


def test_a_reused_build_is_the_program_itself(tiny_model, tiny_params):
  build = lambda program: built(tiny_model, tiny_params, program)
  program = dataclasses.replace(methods.RTN, recover=methods.HIRES.recover)
  got = build(ablations.reuse(program, build(methods.RTN).params))
  alone = build(program)
  assert got.record.program == alone.record.program
  for block, name in (("self_attn", "value_recovery"), ("mlp", "mlp_recovery")):
    left, right = (p.params["layers_1"][block][name] for p in (got, alone))
    for field in dataclasses.fields(left):
      a, b = getattr(left, field.name), getattr(right, field.name)
      np.testing.assert_array_equal(a, b)


def test_only_equal_linears_have_equal_build_keys():
  keys = {
    label: ablations.build_key(program)
    for rows in STUDIES.values()
    for label, program in rows
  }
  assert keys["none"] == keys["attention only"] == keys["full HiRes"]
  assert keys["full HiRes"] == keys["layer-by-layer recovery (A16)"]
  different = ["full HiRes", "D = I", "nearest", "WUSH", "WUSH+R", "strict RTN"]
  different += ["layer-level J_b (A11)", "static scales (A12)", "RTN + one gain"]
  different.append("quantized upstream (A22)")
  assert len({keys[label] for label in different}) == len(different)
  assert ablations.build_key(methods.FOCUS) is None


def test_a_finished_study_is_not_run_again(recovery, subject, monkeypatch):
  folder, result = recovery
  monkeypatch.setattr(study, "run_method", None)
  again = ablation.run("recovery", subject, {0: draw(0), 3: draw(3)}, folder)
  assert again == json.loads(json.dumps(result))


def test_a_program_of_two_studies_is_built_once(recovery, subject, monkeypatch):
  folder, result = recovery
  program = dataclasses.replace(methods.RTN, name="none")
  monkeypatch.setitem(ablations.STUDIES, "encoding", (("plain", program),))
  monkeypatch.setattr(study, "run_method", None)
  (row,) = ablation.run("encoding", subject, {0: draw(0)}, folder)["rows"]["plain"]
  expected = result["rows"]["none"][0] | {"label": "plain"}
  assert row == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
  ("study_", "draws", "change", "message"),
  [
    ("recovery", (0,), {"replicates": 3}, "other replicates"),
    ("recovery", (0,), {"tests": {"text": draw(8)}}, "other tests"),
    ("stages", (0, 0), {}, "seeds 0, 1 draw the same calibration tokens"),
    ("colours", (0,), {}, "unknown study 'colours'; use one of stages"),
  ],
)
def test_other_settings_equal_draws_and_unknown_studies_are_refused(
  recovery, subject, study_, draws, change, message
):
  other = dataclasses.replace(subject, **change)
  with pytest.raises(ValueError, match=message):
    ablation.run(study_, other, dict(enumerate(map(draw, draws))), recovery[0])


def test_the_table_has_every_row_and_the_interval(recovery):
  _, result = recovery
  text = ablation_table.table(result).markdown()
  for label, _ in ablations.STUDIES["recovery"]:
    assert f"| {label} |" in text
  assert text.count("reference") == 3  # Twice in the table, once in the note.
  assert "[" in text
  assert "tie" in text  # Equal operator errors are ties.


def row(*values, error=0.01):
  return {
    "perplexity": {"t": {"values": list(values)}},
    "operator_error": error,
    "linears": {},
  }


def by_error(error):
  return row(1.0, error=error)


def test_the_interval_of_paired_draws_is_the_papers():
  """Fresh less stale Fit-3 on Qwen over three seeds (the paper prints these ends)."""
  differences = (-0.009132, -0.006444, -0.008489)
  rows = [by_error(0.05 + change) for change in differences]
  found = ablation_table.OPERATOR_ERROR.compare(rows, [by_error(0.05)] * 3)
  assert found.interval == pytest.approx((-0.011509, -0.004535), abs=2e-6)
  alone = ablation_table.OPERATOR_ERROR.compare(rows[:1], [by_error(0.05)])
  assert alone.interval is None


@pytest.mark.parametrize(
  ("ours", "verdict"),
  [((9.0, 9.1), "better"), ((10.1, 10.2), "tie"), ((11.0, 11.3), "worse")],
)
def test_a_difference_inside_the_spread_is_a_tie(ours, verdict):
  found = PERPLEXITY.compare([row(*ours)], [row(10.0, 10.2)])
  assert found.verdict == verdict
  assert found.spread == pytest.approx(max(0.2, np.ptp(ours)))


def test_one_replicate_cannot_rank():
  found = PERPLEXITY.compare([row(5.0)], [row(10.0)])
  assert found.verdict == "one replicate"


def test_differences_are_paired_by_draw():
  """Draws differ much, the pair little: pairing sees it, unless draws do not agree."""
  reference = [row(10.0, 10.0), row(20.0, 20.0)]
  found = PERPLEXITY.compare([row(9.0, 9.0), row(19.0, 19.0)], reference)
  assert found.mean == pytest.approx(-1.0)
  assert found.interval == pytest.approx((-1.0, -1.0))
  assert found.verdict == "better"
  found = PERPLEXITY.compare([row(9.0, 9.0), row(19.9, 19.9)], reference)
  assert found.interval[0] < 0 < found.interval[1]
  assert found.verdict == "tie"


@pytest.mark.parametrize(
  ("error", "verdict"), [(0.010009, "tie"), (0.01002, "worse"), (0.0099, "better")]
)
def test_operator_errors_within_a_thousandth_are_ties(error, verdict):
  found = ablation_table.OPERATOR_ERROR.compare([by_error(error)], [by_error(0.01)])
  assert found.verdict == verdict


def test_tables_compare_divergences_where_all_rows_have_them():
  with_kl = lambda kl: row(10.0, 10.2) | {"agreement": {"kl_mean": kl}}
  rows = {"ours": [with_kl(0.04), with_kl(0.05)], "full": [with_kl(0.06)] * 2}
  result = {"study": "next", "seeds": [0, 3], "reference": "full", "rows": rows}
  head, _, ours, reference = ablation_table.table(result).markdown().splitlines()[2:6]
  assert "KL, nats" in head
  assert "| 0.0450 | -0.015 [" in ours
  assert "| 0.0600 | reference |" in reference
  rows["full"][1] = row(10.0, 10.2) | {"agreement": None}
  assert "KL" not in ablation_table.table(result).markdown()
  found = ablation_table.DIVERGENCE.compare(rows["ours"][:1], rows["full"][:1])
  assert (found.verdict, found.mean) == ("better", pytest.approx(-0.02))


def built(model, params, program, **changes):
  program = dataclasses.replace(program, **changes)
  return quantize_with_record(params, Calibration(model, draw(0)), program, check=False)


def test_fits_before_encoding_see_unrounded_inputs(tiny_model, tiny_params):
  """Their coefficients differ from the deployed fit's, and the leaves stay legal."""
  early, late = (
    built(tiny_model, tiny_params, methods.RTN, name=name, recover=recover)
    for name, recover in (
      ("early", recovery_fits.parse("attention-unrounded+mlp-unrounded")),
      ("late", methods.HIRES.recover),
    )
  )
  scale = lambda r: r.params["layers_0"]["self_attn"]["value_recovery"].scale
  assert np.abs(np.asarray(scale(early) - scale(late))).max() > 1e-4
  leaf = early.params["layers_0"]["mlp"]["up_proj"]["weight"]
  assert isinstance(leaf, QuantizedLinear)
  assert not isinstance(leaf.rounding, Unrounded)
  changed = recovery_fits.unrounded(early.params["layers_0"])
  assert isinstance(changed["mlp"]["up_proj"]["weight"].rounding, Unrounded)


def test_a_gain_repairs_what_the_floor_rule_takes(tiny_model, tiny_params):
  result = built(tiny_model, tiny_params, methods.RTN_GAIN)
  linears = result.record.layers[0]["linears"].values()
  mean = lambda key: np.mean([line[key] for line in linears])
  assert mean("gain") > 1.0  # Floor shrinks block maxima: the gain expands.
  assert mean("error_final") < mean("error_rtn")


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
