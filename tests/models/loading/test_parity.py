"""Folders with the oddities of real ones mean what they mean to transformers.

Ids and logits are committed; where torch is installed, transformers is asked again.
"""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mxjax import models
from tests.cases import slow
from tests.conftest import GOLDEN
from tests.golden import make_odd_folders
from tests.models.loading import odd_folders

NUMBERS = range(odd_folders.COUNT)
LOGITS = np.load(GOLDEN / "odd_folders.npz")["logits"]
FACTS = json.loads((GOLDEN / "odd_folders.json").read_text())
HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="module", params=[*NUMBERS[::2], *slow(*NUMBERS[1::2])])
def odd(request, tmp_path_factory):
  """A folder, and what transformers makes of it."""
  folder = odd_folders.make(tmp_path_factory.mktemp("odd") / "model", request.param)
  return folder, FACTS[request.param], LOGITS[request.param]


def check_text(folder, facts):
  tokenizer = models.load_tokenizer(folder)
  config = models.load_config(folder)
  assert config.family == facts["model_type"]
  ends = {*config.eos_ids, tokenizer.eos_id} - {None}
  assert sorted(end for end in ends if end < config.vocab_size) == facts["ends"]
  assert (tokenizer.bos_id, tokenizer.eos_id) == (facts["bos"], facts["eos"])
  for text, ids, whole in zip(
    odd_folders.TEXTS, facts["ids"], facts["whole"], strict=True
  ):
    assert tokenizer.encode(text).tolist() == ids
    behind = [*tokenizer.prefix_ids, *ids]
    assert whole[: len(behind)] == behind
    # What follows is put behind a text, and never in front of one.
    assert tokenizer.eos_id not in tokenizer.prefix_ids
    assert len(whole) - len(behind) <= 1
  if facts["prompt"] is not None:
    assert tokenizer.chat_prompt(odd_folders.MESSAGES) == facts["prompt"]
  else:
    assert tokenizer.chat_template is None


def test_text_is_read_as_transformers_reads_it(odd):
  folder, facts, _ = odd
  check_text(folder, facts)


def test_logits_are_those_of_transformers(odd):
  folder, _, want = odd
  model, params = models.from_pretrained(folder)
  got = model.apply({"params": params}, odd_folders.TOKENS)[0, -3:]
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("ends", [0, [0, 257]])
def test_an_id_of_zero_ends_a_text(tmp_path, ends):
  folder = odd_folders.make(tmp_path / "model", 0)
  generation = folder / "generation_config.json"
  generation.write_text(json.dumps({"eos_token_id": ends}))
  facts = make_odd_folders.read(folder)
  assert 0 in facts["ends"]
  check_text(folder, facts)


@pytest.mark.skipif(not HAS_TORCH, reason="asks torch again; it is no dependency")
def test_what_is_committed_is_what_transformers_says_here(tmp_path):
  for number in NUMBERS:
    folder = odd_folders.make(tmp_path / str(number), number)
    assert make_odd_folders.read(folder) == FACTS[number]
    logits = make_odd_folders.logits_of(folder)
    np.testing.assert_allclose(logits, LOGITS[number], atol=1e-5)


@pytest.mark.slow
def test_a_hub_id_is_its_folder(tmp_path):
  """The hub is its cache here, as an earlier download left it."""
  names = []
  for number in range(0, odd_folders.COUNT, 6):
    cached = tmp_path / f"models--owner--m{number}"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("0123")
    odd_folders.make(cached / "snapshots/0123", number)
    names.append((f"owner/m{number}", str(cached / "snapshots/0123")))
  code = f"""
from mxjax import models
for pair in {names!r}:
  hub, folder = map(models.load_tokenizer, pair)
  assert hub.fingerprint == folder.fingerprint and hub.prefix_ids == folder.prefix_ids
  assert hub.auto.special_tokens_map == folder.auto.special_tokens_map
  assert hub.auto.chat_template == folder.auto.chat_template
  one, other = (models.open_pretrained(source) for source in pair)
  assert one[0] == other[0] and dict(one[1]).keys() == dict(other[1]).keys()
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
