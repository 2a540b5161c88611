"""Tiny models with known logits, and the embedded one."""

import hashlib
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxjax import models
from mxjax.models.loading import embedded

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
DIGESTS = {
  "llama_bias_untied": "99c6f030550e8292911187f525203740",
  "llama_gqa_untied": "58cde25439b9856aba1f95b88f15b76e",
  "llama_llama3_rope_tied": "bdcf1ba2c750c6d80fe6e9831e53c281",
  "llama_long_rope_tied": "192bbc9cff87d09fbef7fed3355dc9b0",
  "llama_multi_query_tied": "6c36118d1f36e32cd48ceb1a160fbf24",
  "mistral_full_tied": "57c2ca985cc40c519708465d71800d3a",
  "mistral_window_untied": "0a53c9c702820cc5fbc681ff199fb80d",
  "olmo2_multi_head_tied": "1608e859b07ac0658768aa6c7464841a",
  "olmo2_untied": "e63c7b724919e3ca69f04f306ce7044f",
  "qwen2_bias_untied": "bc80d044737e2406a0d9d4e953ac0978",
  "qwen2_window_tied": "781e270207f27c398b1866c72cb06dd7",
  "qwen3_head_dim_untied": "5db99e3a85bb6bb42b80f77a4721a6d8",
  "qwen3_tied": "8501adfe3ebfdbda35c22550695b959a",
}
CASES = sorted(DIGESTS)
ONE_A_FAMILY = (
  "llama_gqa_untied",
  "mistral_full_tied",
  "qwen2_bias_untied",
  "qwen3_head_dim_untied",
  "olmo2_untied",
)


class Golden:
  """A tiny random model of transformers and its torch logits."""

  def __init__(self, name):
    path = GOLDEN / f"{name}.npz"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    assert digest == DIGESTS[name], f"{path} changed: {digest}"
    arrays = np.load(path)
    self.config = json.loads(str(arrays["config"]))
    self.tokens, self.logits = arrays["tokens"], arrays["logits"]
    self.positions = arrays["positions"]
    self.weights = {
      key.removeprefix("weights/"): arrays[key]
      for key in arrays.files
      if key.startswith("weights/")
    }

  def save(self, folder, weights=None, **config):
    """Writes a Hugging Face folder, possibly with other tensors or fields."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(self.config | config))
    save_file(weights or self.weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def golden():
  return Golden("llama_gqa_untied")


@pytest.fixture(params=CASES)
def each_golden(request):
  return Golden(request.param)


@pytest.fixture(params=[name for name in CASES if name.startswith("llama")])
def llama_golden(request):
  return Golden(request.param)


@pytest.fixture(params=ONE_A_FAMILY)
def family_golden(request):
  return Golden(request.param)


@pytest.fixture
def tiny(golden, tmp_path):
  """Model, params and tokens of the first golden case."""
  return *models.from_pretrained(golden.save(tmp_path / "tiny")), golden.tokens


@pytest.fixture(scope="session")
def gguf_path():
  """The embedded GGUF file; tests skip without it."""
  try:
    return embedded.gguf_path()
  except FileNotFoundError as error:
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def embedded_tokenizer(gguf_path):
  """The tokenizer of that file, whose reading takes seconds."""
  return models.load_tokenizer(gguf_path)
