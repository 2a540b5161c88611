"""Ids that are no integers, or too large, are refused by every taker of tokens."""

import numpy as np
import pytest

from mxjax import models
from mxjax.calibration.calibration import Calibration, token_fingerprint
from mxjax.evaluation import datasets
from mxjax.evaluation.measures import agreement, operator_error, perplexity
from mxjax.intake.token_ids import token_ids

WRONG = {
  "floats": np.ones((2, 8)),
  "floats of integers": np.full((2, 8), 3, np.float16),
  "complex": np.full((2, 8), 3 + 0j),
  "dates": np.full((2, 8), "2020-01-01", "datetime64[D]"),
  "durations": np.full((2, 8), 5, "timedelta64[s]"),
  "booleans": np.ones((2, 8), bool),
  "text": np.full((2, 8), "7"),
  "bytes": np.full((2, 8), b"7"),
  "objects": np.full((2, 8), 10**30, object),
  "records": np.zeros((2, 8), [("id", np.int32)]),
  "rows of unequal length": [[1, 2], [3]],
  "beyond int32": np.full((2, 8), 2**31),
  "wrapping to 3": np.full((2, 8), 2**32 + 3),
  "unsigned and wrapping": np.full((2, 8), 2**64 - 1, np.uint64),
  "negative": np.full((2, 8), -1),
}


class Letters:
  prefix_ids = ()


def loader(ids, tmp_path):
  np.save(tmp_path / "ids.npy", ids)
  options = {"count": 2, "length": 8, "split": "test"}
  return datasets.load_tokens(str(tmp_path / "ids.npy"), Letters(), **options)


def tokenizer(ids, tmp_path):
  class Odd(Letters):
    def encode(self, text):
      return np.asarray(ids)[0]

  (tmp_path / "a.txt").write_text("text")
  options = {"count": 1, "length": 8, "split": "test"}
  return datasets.load_tokens(str(tmp_path / "a.txt"), Odd(), **options)


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("taker", [loader, tokenizer, "Calibration", "fingerprint"])
def test_no_id_is_cast_silently(taker, kind, tmp_path):
  takers = {
    "Calibration": lambda ids, _: Calibration(None, ids),
    "fingerprint": lambda ids, _: token_fingerprint(ids),
  }
  if taker in (loader, tokenizer) and kind in ("objects", "rows of unequal length"):
    pytest.skip("no .npy file holds these, and no tokenizer gives them")
  with pytest.raises((TypeError, ValueError), match="token ids"):
    takers.get(taker, taker)(WRONG[kind], tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64", ">i4"])
def test_integers_of_any_width_keep_their_values(dtype):
  ids = token_ids(np.arange(16, dtype=dtype).reshape(2, 8), "here", vocabulary=16)
  assert ids.dtype == np.int32 and ids.flags.c_contiguous
  np.testing.assert_array_equal(ids, np.arange(16).reshape(2, 8))
  assert token_ids([2**31 - 1], "here")[0] == 2**31 - 1


@pytest.mark.parametrize("ids", [np.ones((1, 8)), np.full((1, 8), 61)])
def test_measures_and_generation_take_ids_of_the_vocabulary(
  tiny_model, tiny_params, ids
):
  pair = tiny_params, tiny_params
  for call in (
    lambda: perplexity.window_losses(tiny_model, tiny_params, ids),
    lambda: agreement.agreement(tiny_model, *pair, ids),
    lambda: operator_error.operator_errors(tiny_model, *pair, ids),
    lambda: models.generate(tiny_model, tiny_params, ids, max_new_tokens=1),
  ):
    with pytest.raises((TypeError, ValueError), match="token ids"):
      call()
