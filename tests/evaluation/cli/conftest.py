"""A model folder as people have them: config, weights, a tokenizer and a text."""

import dataclasses
import json

import jax
import pytest
import tokenizers
from safetensors.flax import save_file

from mxjax.models import CausalLM
from mxjax.models.families.hf_config_write import to_hf_config

TEXT = "the cat sat on the mat and the dog ran over the hill " * 40


@pytest.fixture(scope="session")
def text():
  return TEXT


@pytest.fixture(scope="session")
def write_tokenizer():
  """Writes `tokenizer.json` and `text.txt` into a folder."""

  def write(folder, vocab_size):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)

  return write


@pytest.fixture(scope="session")
def write_model(tiny_config, write_tokenizer):
  """Writes a folder with the tiny config, changed as told, and random weights."""

  def write(folder, **changes):
    config = dataclasses.replace(tiny_config, vocab_size=64, **changes)
    (folder / "config.json").write_text(json.dumps(to_hf_config(config)))
    ids = jax.numpy.zeros((1, 4), "int32")
    params = CausalLM(config).init(jax.random.key(0), ids)["params"]
    weights = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
      name = jax.tree_util.keystr(keys, simple=True, separator=".")
      weights["model." + name.replace("layers_", "layers.")] = leaf
    save_file(weights, folder / "model.safetensors")
    write_tokenizer(folder, 64)
    return folder

  return write
