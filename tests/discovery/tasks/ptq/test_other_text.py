"""The control `other_text` of the PTQ task: which text it is, and what it measures."""

import dataclasses
import functools

import numpy as np
import pytest

from mxjax.discovery.core.residual import OTHER_TEXT
from mxjax.discovery.core.task import ContractError
from mxjax.discovery.tasks.ptq import candidate, margins, payload, phases
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.evaluation.measures.perplexity import perplexity

RANDOM = {"model": "random:0", "calibration": [8, 32], "windows": [2, 32]}
TRAINED = {"model": "models/trained/qwen3", "layers": 1, "windows": [2, 64]}
OTHER = {"kind": OTHER_TEXT}


@functools.cache
def task(**options):
  return ptq.PtqTask(**{**RANDOM, **options}, other_windows=(6, 32))


@functools.cache
def fitted():
  call, artifacts = margins._initial(task(), "")
  return call, artifacts, phases.Fit(task().options).run(call, artifacts, b"")[1]


@pytest.mark.slow
def test_it_scores_the_same_program_on_the_other_text():
  call, artifacts, operands = fitted()
  controlled = call._replace(intervention=OTHER)
  session = phases.Fit(task().options)
  assert session.run(controlled, artifacts, b"")[1] == operands
  shown, _ = phases.Measure(task().options).run(controlled, artifacts, operands)
  model, params = task().options.load()
  rounding = candidate.activation_rule(artifacts, call.computation["encode_act"])
  quantized = payload.to_params(payload.from_bytes(operands), params, model, rounding)
  tokens = task().options.tokens("other")
  expected = np.log(perplexity(model, quantized, tokens).mean)
  assert shown["values"].keys() == {OTHER_TEXT}
  assert shown["values"][OTHER_TEXT] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [{"other_windows": None}, {"objective": "fit3"}])
def test_a_task_without_it_refuses(options):
  call, artifacts, operands = fitted()
  plain = dataclasses.replace(task().options, **options)
  with pytest.raises(ContractError, match="other_windows"):
    phases.Measure(plain).run(call._replace(intervention=OTHER), artifacts, operands)


def test_no_score_sees_its_windows():
  options = ptq.PtqTask(**TRAINED, other_windows=(3, 64)).options
  scored, other = options.tokens("measure"), options.tokens("other")
  assert other.shape == (3, 64)
  assert not {row.tobytes() for row in scored} & {row.tobytes() for row in other}


def test_a_text_too_short_for_both_is_refused(tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one two three four five. " * 40)
  options = ptq.PtqTask(**TRAINED, other_windows=(3, 64), text=str(text)).options
  with pytest.raises(ValueError, match="expected an evaluation text of at least 320"):
    options.tokens("other")


def test_it_is_part_of_the_contract_and_not_of_the_held_out_task():
  plain = ptq.PtqTask(**RANDOM)
  assert task().contract != plain.contract
  assert task().tests_luck
  assert not plain.tests_luck
  held = ptq.PtqTask(**RANDOM, other_windows=(6, 32), holdout="random:1").holdout()
  assert not held.tests_luck


@pytest.mark.slow
def test_the_margin_is_what_it_can_confirm():
  spec = dict(task().spec)
  found = margins.calibrated(spec)["margins"]
  assert found[OTHER_TEXT] > 0
  more = margins.calibrated({**spec, "other_windows": (24, 32)})["margins"]
  assert 0 < more[OTHER_TEXT] < found[OTHER_TEXT]
  chaos = margins.calibrated({**spec, "other_windows": None})["margins"]
  assert found["log_ppl"] >= found[OTHER_TEXT]
  assert found.keys() == {*chaos, OTHER_TEXT}
