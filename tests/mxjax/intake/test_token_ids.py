"""Ids that are no integers, or too large, are refused by every taker of tokens."""

import functools

import numpy as np

from mxjax import models
from mxjax.calibration.calibration import Calibration, token_fingerprint
from mxjax.evaluation import datasets
from mxjax.evaluation.measures import agreement, operator_error, perplexity
from mxjax.intake.token_ids import token_ids
from tests import refusals

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


def test_no_id_is_cast_silently(tmp_path):
  takers = [
    loader,
    tokenizer,
    lambda ids, _: Calibration(None, ids),
    lambda ids, _: token_fingerprint(ids),
  ]
  refusals.check(
    [
      (functools.partial(taker, ids, tmp_path), "token ids")
      for taker in takers
      for kind, ids in WRONG.items()
      # No .npy file holds these, and no tokenizer gives them.
      if not (taker in takers[:2] and kind in ("objects", "rows of unequal length"))
    ],
    (TypeError, ValueError),
  )


def test_integers_of_any_width_keep_their_values():
  for dtype in ("int8", "uint16", "int32", "int64", "uint64", ">i4"):
    ids = token_ids(np.arange(16, dtype=dtype).reshape(2, 8), "here", vocabulary=16)
    assert ids.dtype == np.int32 and ids.flags.c_contiguous
    np.testing.assert_array_equal(ids, np.arange(16).reshape(2, 8))
  assert token_ids([2**31 - 1], "here")[0] == 2**31 - 1


def test_measures_and_generation_take_ids_of_the_vocabulary(tiny_model, tiny_params):
  pair = tiny_params, tiny_params
  calls = (
    lambda ids: perplexity.window_losses(tiny_model, tiny_params, ids),
    lambda ids: agreement.agreement(tiny_model, *pair, ids),
    lambda ids: operator_error.operator_errors(tiny_model, *pair, ids),
    lambda ids: models.generate(tiny_model, tiny_params, ids, max_new_tokens=1),
  )
  refusals.check(
    [
      (functools.partial(call, ids), "token ids")
      for call in calls
      for ids in (np.ones((1, 8)), np.full((1, 8), 61))
    ],
    (TypeError, ValueError),
  )
