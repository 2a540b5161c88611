"""The adapter's answers, with the harness or, where it is absent, a stand-in for it."""

import importlib
import json
import sys
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from mxjax import models
from mxjax.models.loading import weights
from tests import tiny

END, BEGIN, TURN = 0, 1, 2
SPECIAL = ["<|end|>", "<s>", "<|turn|>"]
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
  "{% if add_generation_prompt %}answer:{% endif %}"
)
NAMED = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]


@pytest.fixture
def harness(monkeypatch):
  """The module, on the harness itself if it is installed."""
  try:
    importlib.import_module("lm_eval.models")
  except ImportError:
    for name, members in {
      "lm_eval": {},
      "lm_eval.models": {},
      "lm_eval.api": {},
      "lm_eval.utils": {},
      "lm_eval.api.instance": {"Instance": object},
      "lm_eval.api.model": {"LM": type("LM", (), {})},
      "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
    }.items():
      module = types.ModuleType(name)
      vars(module).update(members)
      monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
      sys.modules["lm_eval"], "utils", sys.modules["lm_eval.utils"], False
    )
  place = "mxjax.evaluation.tasks.harness"
  is_known = place in sys.modules
  yield importlib.import_module(place)
  if not is_known:
    sys.modules.pop(place, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model of 64 positions whose tokenizer puts BOS in front."""
  path = tiny.save_folder(tmp_path_factory.mktemp("harness"), max_positions=64)
  letters = [*"abcdefghijklmnopqrstuvwxyz:."]
  vocabulary = {token: index for index, token in enumerate([*SPECIAL, *letters])}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
  backend.decoder = tokenizers.decoders.Fuse()
  backend.add_special_tokens(SPECIAL)
  backend.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", BEGIN)]
  )
  tokenizer = models.Tokenizer.from_backend(
    backend, bos_id=BEGIN, eos_id=END, chat_template=TEMPLATE
  )
  tokenizer.save(path)
  (path / "generation_config.json").write_text(
    json.dumps({"eos_token_id": [END, TURN]})
  )
  return path


@pytest.fixture
def ask(harness, folder, monkeypatch):
  """Asks the adapter, whose model answers with the tokens that are given."""
  lm = harness.MxjaxLM(pretrained=str(folder), dtype="float32")
  seen = {}

  def ask(answer, context="ab", **settings):
    def generate(model, params, prompt, *, max_new_tokens, eos_id, use_cache, **how):
      # The contract evaluates without a cache.
      assert not use_cache
      seen.update(prompt=prompt[0].tolist(), new=max_new_tokens, ends=eos_id, how=how)
      ids = lm.tokenizer.encode(answer)[:max_new_tokens]
      padded = np.pad(ids, (0, max_new_tokens - len(ids)), constant_values=eos_id[0])
      return np.concatenate([prompt, padded[None]], axis=1)

    monkeypatch.setattr(models, "generate", generate)
    return lm._generate(context, {"max_gen_toks": 16, **settings})

  ask.seen, ask.lm = seen, lm
  return ask


@pytest.mark.parametrize(
  ("answer", "until", "want"),
  [
    ("paris<|end|>x", [], "paris"),
    ("<|end|>paris", [], ""),
    ("paris<|turn|>x.", ["."], "paris"),
    ("pa.ris<|end|>", ["."], "pa"),
    ("pa.ris:x", ["x", ":", "."], "pa"),
    ("paris", ".", "paris"),
    ("paris", None, "paris"),
    ("paris", ["", "r"], "pa"),
    ("pa<s>ris<|end|>", [], "paris"),
  ],
)
def test_an_answer_ends_at_the_first_stop_and_has_none_of_it(ask, answer, until, want):
  assert ask(answer, until=until) == want
  assert ask.seen["ends"] == [END, TURN]


def test_a_text_begins_once(ask):
  ask("a", "ab")
  assert ask.seen["prompt"] == [BEGIN, 3, 4]
  prompt = ask.lm.apply_chat_template([{"role": "user", "content": "ab"}])
  assert prompt == "<s>ab<|turn|>answer:"
  ask("a", prompt)
  assert ask.seen["prompt"][:4] == [BEGIN, 3, 4, TURN]
  ask("a", "")
  assert ask.seen["prompt"] == [BEGIN]


def test_the_last_message_may_be_left_open(ask):
  said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
  open_ = ask.lm.apply_chat_template(said, add_generation_prompt=False)
  assert open_ == "<s>ab<|turn|>cd"
  assert ask.lm.chat_template(True) == TEMPLATE
  assert ask.lm.chat_template(False) == ""


@pytest.mark.parametrize("new", [64, 100, 0, -1])
def test_an_answer_leaves_room_for_a_context(ask, new):
  with pytest.raises(ValueError, match=f"max_gen_toks from 1 to 63, .*got {new};"):
    ask("a", max_gen_toks=new)


def test_a_long_context_loses_its_first_tokens_and_says_so(ask, caplog):
  ask("a", "x" * 100 + "abc", max_gen_toks=61)
  assert ask.seen["prompt"] == [3, 4, 5]
  ask("a", "x" * 100 + "abc", max_gen_toks=61)
  (said,) = caplog.messages
  assert "context of 104 tokens leaves no room for 61 new ones" in said


def test_settings_are_followed_or_refused(ask):
  ask("a", max_gen_toks=None, max_new_tokens=9, do_sample=False, temperature=0.7)
  assert (ask.seen["new"], ask.seen["how"]) == (9, {})
  ask("a", do_sample=True, temperature=0.7, top_p=0.9, num_beams=1)
  assert ask.seen["how"].pop("key") is not None
  assert ask.seen["how"] == {"temperature": 0.7, "top_k": None, "top_p": 0.9}
  with pytest.raises(ValueError, match="got num_beams=4, presence_penalty=0.5"):
    ask("a", num_beams=4, presence_penalty=0.5)


def test_an_empty_context_is_the_token_that_begins_a_text(ask):
  request = ask.lm._pair("", "ab")
  assert (request.context.tolist(), request.continuation.tolist()) == ([BEGIN], [3, 4])
  request = ask.lm._pair("", "<s>ab")
  assert (request.context.tolist(), request.continuation.tolist()) == ([BEGIN], [3, 4])


@pytest.mark.parametrize("longest", [65, 0])
def test_windows_fit_into_the_positions(harness, folder, longest):
  if longest:
    with pytest.raises(ValueError, match="max_length from 1 to the model's 64"):
      harness.MxjaxLM(pretrained=str(folder), max_length=longest)
  assert harness.MxjaxLM(pretrained=str(folder), max_length=32).max_length == 32


def test_named_templates_need_a_name(harness, folder, tmp_path):
  for name in ("config.json", "model.safetensors", "tokenizer.json"):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": NAMED}))
  lm = harness.MxjaxLM(pretrained=str(tmp_path))
  with pytest.raises(ValueError, match="named default, got only those named rag, tool"):
    lm.apply_chat_template([{"role": "user", "content": "a"}])
  assert lm.chat_template("rag") == "R"
  assert lm.apply_chat_template([{"role": "user", "content": "a"}]) == "R"


def test_the_folder_is_that_of_the_project(folder):
  assert weights.read_config(folder).eos_ids == (END, TURN)
