"""Tiny models with known logits, and the embedded one."""

import hashlib
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from mxjax import models
from mxjax.models import embedded

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
DIGESTS = {
  "bias_untied": "91dd5f90a42f56f3feff1fffcae2ba7e",
  "gqa_untied": "d975ec17bc6e859605c689e55c5944cd",
  "llama3_rope_tied": "66bcac0b47d0ca7fec8504316872c12d",
  "multi_query_tied": "4be18115309009e7d9c99efe56763589",
}
CASES = sorted(DIGESTS)


class Golden:
  """A tiny random model of transformers and its torch logits."""

  def __init__(self, name):
    path = GOLDEN / f"llama_{name}.npz"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    assert digest == DIGESTS[name], f"{path} changed: {digest}"
    arrays = np.load(path)
    self.config = json.loads(str(arrays["config"]))
    self.tokens, self.logits = arrays["tokens"], arrays["logits"]
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
  return Golden("gqa_untied")


@pytest.fixture(params=CASES)
def each_golden(request):
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
