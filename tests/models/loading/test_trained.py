"""The committed small models: real text, real weights of several families."""

import json

import jax
import jax.numpy as jnp
import pytest

from mxjax.evaluation import datasets
from mxjax.evaluation.builds import run_method
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.evaluation.subjects import Subject
from mxjax.models import families, from_pretrained, load_tokenizer
from mxjax.models.loading import embedded
from tests.cases import slow

LENGTH = 256


def available(name):
  try:
    return embedded.trained_folder(name)
  except FileNotFoundError:
    return None


TRAINED = [name for name in families.FAMILIES if available(name)]


@pytest.fixture(scope="module", params=[*TRAINED[:1], *slow(*TRAINED[1:])])
def trained(request):
  """Training log, model, params, and windows of unseen and of calibration text."""
  folder = embedded.trained_folder(request.param)
  tokenizer = load_tokenizer(folder)
  load = lambda split, count: datasets.load_tokens(
    None, tokenizer, count=count, length=LENGTH, split=split
  )
  try:
    tokens = load("test", 8), load("calibration", 4)
  except FileNotFoundError as error:
    pytest.skip(str(error))
  log = json.loads((folder / "training.json").read_text())
  assert log["command"]["family"] == request.param
  return log, *from_pretrained(folder), *tokens


def test_there_are_several_families():
  assert {"llama", "qwen3"} <= set(TRAINED)


@pytest.mark.slow
def test_the_log_describes_the_model(trained):
  log, model, params, _, _ = trained
  leaves = jax.tree.leaves(params)
  assert log["parameters"] == sum(leaf.size for leaf in leaves)
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}
  assert log["command"]["family"] == model.config.family
  losses = [loss for _, loss in log["losses"]]
  assert losses[-1] < losses[0] - 2
  assert log["test_perplexity"] < log["test_perplexity_of_unigrams"] / 3
  widths = {leaf.shape[-1] for leaf in leaves if leaf.ndim == 2}
  assert all(width % 32 == 0 for width in widths)


@pytest.mark.slow
def test_unseen_text_is_far_below_unigrams(trained):
  log, model, params, test, _ = trained
  found = perplexity(model, params, test).mean
  # The log ends passages with a token of their own; here blank lines join them.
  assert found == pytest.approx(log["test_perplexity"], rel=0.35)
  assert found < log["test_perplexity_of_unigrams"] / 3


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["llama", "olmo2"], indirect=True)
def test_hires_is_below_rtn(trained):
  """One model with pre-norm, one with post-norm; docs/results/methods.md has all."""
  _, model, params, test, calibration = trained
  subject = Subject(model, params, {"test": test})
  run = lambda name: run_method(subject, calibration, name, check=False, probe=False)[0]
  rows = run("rtn"), run("hires")
  rtn, hires = (row["perplexity"]["test"]["mean"] for row in rows)
  exact = perplexity(model, params, test).mean
  assert exact < hires < rtn
  assert hires - exact < 0.8 * (rtn - exact)
  assert rows[1]["operator_error"] < 0.8 * rows[0]["operator_error"]
