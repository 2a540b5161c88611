import json

import numpy as np
import pytest

from mxjax.evaluation import datasets


class Letters:
  def encode(self, text):
    return np.asarray([ord(c) % 50 for c in text], np.int32)


def load(source, **options):
  defaults = {"count": 2, "length": 8, "split": "test"}
  return datasets.load_tokens(source, Letters(), **(defaults | options))


def test_arrays_are_used_exactly(tmp_path):
  path = tmp_path / "ids.npy"
  array = np.arange(40).reshape(4, 10)
  np.save(path, array)
  np.testing.assert_array_equal(load(str(path)), array[:2, :8])
  with pytest.raises(ValueError, match=r"\[5, 8\], got \(4, 10\)"):
    load(str(path), count=5)


def test_text_and_jsonl(tmp_path):
  text = tmp_path / "a.txt"
  text.write_text("the quick brown fox jumps")
  expected = Letters().encode("the quick brown fox jumps")[:16].reshape(2, 8)
  np.testing.assert_array_equal(load(str(text)), expected)
  lines = tmp_path / "a.jsonl"
  lines.write_text(json.dumps({"text": "one two"}) + "\n" + json.dumps({"text": "six"}))
  ids = load(str(lines), count=1, length=12)
  np.testing.assert_array_equal(ids[0], Letters().encode("one two\n\nsix")[:12])


def test_too_little_text_says_how_much(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("short")
  with pytest.raises(ValueError, match="need 16 tokens, got 5"):
    load(str(path))


def test_a_missing_file_names_the_choices():
  with pytest.raises(FileNotFoundError, match="c4, wikitext2"):
    load("nowhere.txt")


def test_hub_data_without_a_network_says_what_to_pass():
  with pytest.raises(ConnectionError, match="pass a text, JSONL or .npy file"):
    load("wikitext2")


def test_seeds_choose_other_windows_in_a_fixed_order(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("abcdefghijklmnopqrstuvwxyz" * 10)
  first, again = load(str(path), seed=3), load(str(path), seed=3)
  np.testing.assert_array_equal(first, again)
  assert (first != load(str(path), seed=4)).any()


def test_embedded_splits_share_no_passage():
  try:
    passages = datasets.embedded_passages()
  except FileNotFoundError as error:
    pytest.skip(str(error))
  assert len(passages) > 2000
  calibration = datasets.embedded_text("calibration")
  assert passages[0] in calibration
  assert not any(p in calibration for p in passages[len(passages) // 2 :][:50])
