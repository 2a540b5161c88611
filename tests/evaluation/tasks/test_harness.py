"""The adapter, where lm-evaluation-harness is installed (the extra `harness`)."""

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from mxjax import models
from mxjax.evaluation.tasks import harness, likelihoods, multiple_choice
from mxjax.models.loading import embedded


def instance(*arguments):
  return Instance("loglikelihood", {}, arguments, 0)


@pytest.fixture(scope="module")
def lm():
  folder = str(embedded.trained_folder("llama"))
  return get_model("mxjax").create_from_arg_string(f"pretrained={folder},dtype=float32")


def test_the_dtype_is_that_of_the_argument_or_the_default(lm):
  source = str(embedded.trained_folder("llama"))
  narrow = harness.MxjaxLM(pretrained=source)
  assert (lm.model.config.dtype, narrow.model.config.dtype) == ("float32", "bfloat16")


def test_the_harness_finds_the_model_by_name():
  assert get_model("mxjax") is harness.MxjaxLM


def test_log_likelihoods_are_ours(lm):
  pairs = [("The city of", " London"), ("It was built in", " the 19th century")]
  got = lm.loglikelihood([instance(*pair) for pair in pairs])
  requests = [multiple_choice.encode_pair(lm.tokenizer, *pair) for pair in pairs]
  want = likelihoods.score(lm.model, lm.params, requests, max_length=lm.max_length)
  assert got == [tuple(score) for score in want]


def test_rolling_log_likelihood_predicts_every_token_once(lm):
  text = "The river flows through the city. " * 20
  ids = lm.tokenizer.encode(text)
  whole = likelihoods.Request(np.asarray([0], np.int32), ids)
  (want,) = likelihoods.score(lm.model, lm.params, [whole], max_length=1024)
  (got,) = lm.loglikelihood_rolling([instance(text)])
  assert got == pytest.approx(want.log_likelihood, rel=1e-5)


def test_generation_stops_where_the_task_says(lm):
  settings = {"until": ["."], "max_gen_toks": 8}
  (text,) = lm.generate_until([instance("The river flows through", settings)])
  assert "." not in text
  ids = lm.tokenizer.encode("The river flows through")
  how = {"max_new_tokens": 8, "eos_id": lm.tokenizer.eos_id, "use_cache": False}
  output = models.generate(lm.model, lm.params, ids[None], **how)
  assert lm.tokenizer.decode(output[0, len(ids) :]).startswith(text)


def test_arguments_without_meaning_are_refused():
  with pytest.raises(ValueError, match="got colour"):
    harness.MxjaxLM(colour="red")
