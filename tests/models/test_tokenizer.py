import json

import numpy as np
import pytest
import tokenizers

from mxjax import models

TEXT = (
  'In 2024, 3,141 owls (Bubo bubo) weren\'t counted:  naïve "estimates"…\n'
  "\tdef f(x): return x**2  # tab & café\n東京 😀\n"
)
# Made with the tokenizer that counts 303,415 tokens in WikiText-2's test split.
IDS = [
  *(788, 216, 34, 32, 34, 36, 28, 216, 35, 28, 33, 36, 33, 27933, 365, 50, 611, 95),
  *(10569, 95, 25, 11535, 982, 17288, 42, 216, 15486, 46494, 476, 381, 21597, 18),
  *(2829, 198, 197, 1604, 275, 24, 104, 727, 1003, 1792, 828, 34, 216, 907, 10147),
  *(1456, 37366, 198, 30679, 126, 16736, 122, 40303, 218, 198),
]


@pytest.fixture(scope="module")
def tokenizer(embedded_tokenizer):
  return embedded_tokenizer


@pytest.fixture
def folder(tmp_path):
  """A folder with a hand-made byte-level tokenizer of five tokens."""
  words = {"a": 0, "b": 1, "Ġ": 2, "ab": 3}
  bpe = tokenizers.models.BPE(vocab=words, merges=[("a", "b")])
  backend = tokenizers.Tokenizer(bpe)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<end>"])
  backend.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def test_known_text_has_known_ids(tokenizer):
  ids = tokenizer.encode(TEXT)
  assert ids.dtype == np.int32
  assert ids.tolist() == IDS
  assert tokenizer.decode(ids) == TEXT


def test_metadata_of_the_embedded_tokenizer(tokenizer):
  assert tokenizer.vocab_size == 49152
  assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
  assert "<|im_start|>" in tokenizer.chat_template


def test_no_special_token_is_added_but_spelled_ones_are_known(tokenizer):
  assert tokenizer.encode("").shape == (0,)
  spelled = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
  assert (spelled[0], spelled[-1]) == (1, 2)
  assert tokenizer.decode(spelled) == "<|im_start|>user\nHi<|im_end|>"


def test_wikitext_has_the_known_token_count(tokenizer, shared):
  text = (shared / "data/wikitext2/wiki.test.raw").read_text(encoding="utf-8")
  assert tokenizer.encode(text).shape == (303_415,)


def test_a_folder_gives_its_tokenizer(folder):
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.encode("ab a<end>").tolist() == [3, 2, 0, 4]
  assert tokenizer.vocab_size == 5
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None,) * 3


def test_a_template_of_the_tokenizer_is_a_prefix_and_not_in_every_text(folder):
  path = str(folder / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single="<end> $A", special_tokens=[("<end>", 4)]
  )
  backend.save(path)
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.encode("ab a").tolist() == [3, 2, 0]
  assert tokenizer.prefix_ids == (4,)


@pytest.mark.parametrize(
  "token", ["<end>", {"__type": "AddedToken", "content": "<end>", "special": True}]
)
@pytest.mark.parametrize("template", ["T", [{"name": "default", "template": "T"}]])
def test_settings_of_a_folder_are_read(folder, token, template):
  settings = {"eos_token": token, "bos_token": None, "chat_template": template}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = models.load_tokenizer(folder)
  assert (tokenizer.eos_id, tokenizer.chat_template) == (4, "T")
  (folder / "chat_template.jinja").write_text("apart")
  assert models.load_tokenizer(folder).chat_template == "apart"


@pytest.mark.parametrize("template", ["<end> $A a", "$A <end>", "<end> $A <end> <end>"])
def test_what_is_put_behind_a_text_is_never_in_front(folder, template):
  path = str(folder / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=template, special_tokens=[("<end>", 4), ("a", 0)]
  )
  backend.save(path)
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.prefix_ids == ((4,) if template.startswith("<end>") else ())
  assert tokenizer.encode("ab").tolist() == [3]


@pytest.mark.parametrize("file", ["added_tokens_decoder", "added_tokens.json"])
def test_tokens_added_outside_of_the_tokenizer_are_known(folder, file):
  added = {"5": {"content": "<turn>", "special": True, "rstrip": True}}
  settings = {"eos_token": "<turn>", "tokenizer_class": "PreTrainedTokenizerFast"}
  if file == "added_tokens_decoder":
    settings[file] = added
  else:
    (folder / file).write_text(json.dumps({"<turn>": 5}))
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.encode("ab<turn>").tolist() == [3, 5]
  assert tokenizer.eos_id == 5


def test_a_saved_tokenizer_is_the_same_tokenizer(folder, tmp_path):
  template = [{"name": "default", "template": "T"}, {"name": "rag", "template": "R"}]
  settings = {"eos_token": "<end>", "bos_token": "<begin>", "chat_template": template}
  settings |= {"pad_token": "a"}
  path = str(folder / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single="<end> $A <end>", special_tokens=[("<end>", 4)]
  )
  backend.save(path)
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  one = models.load_tokenizer(folder)
  (tmp_path / "saved").mkdir()
  one.save(tmp_path / "saved")
  other = models.load_tokenizer(tmp_path / "saved")
  assert one.prefix_ids == other.prefix_ids == (4,)
  assert one.fingerprint == other.fingerprint
  assert one.auto.special_tokens_map == other.auto.special_tokens_map
  assert one.auto.chat_template == other.auto.chat_template


def test_named_templates_need_a_default_or_a_name(folder):
  named = [{"name": "rag", "template": "R"}, {"name": "tools", "template": "T"}]
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.chat_template is None
  with pytest.raises(
    ValueError, match="named default, got only those named rag, tools"
  ):
    tokenizer.chat_prompt([])
  assert (
    tokenizer.chat_prompt([{"role": "user", "content": "a"}], template="rag") == "R"
  )


def test_a_gguf_file_in_a_folder_is_to_be_named(tmp_path):
  (tmp_path / "model.gguf").touch()
  with pytest.raises(FileNotFoundError, match="GGUF file model.gguf; name the file"):
    models.load_tokenizer(tmp_path)


def test_what_a_tokenizer_was_last_used_with_cuts_no_text(folder):
  path = str(folder / "tokenizer.json")
  backend = tokenizers.Tokenizer.from_file(path)
  backend.enable_truncation(2)
  backend.enable_padding(length=9)
  backend.save(path)
  assert models.load_tokenizer(folder).encode("ab a ab").tolist() == [3, 2, 0, 2, 3]


def test_a_folder_without_tokenizer_says_so(tmp_path):
  with pytest.raises(FileNotFoundError, match="expected a file tokenizer.json"):
    models.load_tokenizer(tmp_path)


def test_fingerprint_follows_the_rules_not_the_file_layout(folder):
  before = models.load_tokenizer(folder).fingerprint
  path = folder / "tokenizer.json"
  state = json.loads(path.read_text(encoding="utf-8"))
  path.write_text(json.dumps(state, indent=2), encoding="utf-8")
  assert models.load_tokenizer(folder).fingerprint == before
  state["model"]["vocab"] |= {"a": 1, "b": 0}
  path.write_text(json.dumps(state), encoding="utf-8")
  assert models.load_tokenizer(folder).fingerprint != before


@pytest.mark.parametrize("pre", ["llama-bpe", None])
def test_another_split_in_a_gguf_file_is_refused_by_name(tmp_path, pre):
  gguf = pytest.importorskip("gguf")
  writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
  writer.add_tokenizer_model("gpt2")
  if pre:
    writer.add_tokenizer_pre(pre)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(NotImplementedError, match=f"smollm, got gpt2 with {pre}"):
    models.load_tokenizer(tmp_path / "other.gguf")


def test_a_conversation_is_rendered_by_the_template(tokenizer):
  said = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
  ]
  turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in said]
  want = "".join(turns) + "<|im_start|>assistant\n"
  assert tokenizer.chat_prompt(said) == want
  assert tokenizer.decode(tokenizer.encode(want)) == want


def test_a_template_sees_the_special_tokens_and_may_refuse(folder):
  template = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ eos_token }}{{ messages | length }}{{ add_generation_prompt }}"
  )
  settings = {"eos_token": "<end>", "chat_template": template}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = models.load_tokenizer(folder)
  assert tokenizer.chat_prompt([{"role": "user", "content": "a"}]) == "<end>1True"
  with pytest.raises(ValueError, match="template takes, got no system"):
    tokenizer.chat_prompt([{"role": "system", "content": "a"}])


def test_a_base_model_is_no_chat_model(folder):
  with pytest.raises(ValueError, match="expected a tokenizer with a chat template"):
    models.load_tokenizer(folder).chat_prompt([])
