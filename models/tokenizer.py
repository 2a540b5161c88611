"""Tokenizers built from a GGUF vocabulary or a `tokenizer.json`."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pydantic

from mxjax.errors import NotImplementedRefusal
from mxjax.intake.reading import read_bytes, read_json, refusing
from mxjax.intake.token_ids import token_ids
from mxjax.models.loading import gguf, hub

if TYPE_CHECKING:
  import tokenizers

PRE_TOKENIZERS = ("smollm",)
"""Supported values of `tokenizer.ggml.pre`."""
CONTROL_TOKEN = 3
"""GGUF token type of special tokens."""


class Special(pydantic.BaseModel):
  """A saved special token; its other fields are not read."""

  content: str


class Template(pydantic.BaseModel):
  """One of several chat templates."""

  name: str
  template: str


class Settings(pydantic.BaseModel):
  """What is read of `tokenizer_config.json`."""

  bos_token: str | Special | None = None
  eos_token: str | Special | None = None
  chat_template: str | list[Template] | None = None


@dataclasses.dataclass(eq=False)
class Tokenizer:
  """A byte-level BPE tokenizer that never adds special tokens by itself.

  As in transformers, special tokens spelled out in the text, such as `<|im_start|>`,
  become their ids. `bos_id` and `eos_id` begin and end a text; they and the Jinja
  `chat_template` may be None. `backend` is of the `tokenizers` package; `source`, the
  file it came from, is for messages.
  """

  backend: "tokenizers.Tokenizer"
  _: dataclasses.KW_ONLY
  bos_id: int | None = None
  eos_id: int | None = None
  chat_template: str | None = None
  source: str = "tokenizer"

  def encode(self, text: str) -> np.ndarray:
    """Encodes a text as int32 `[n]`; an empty text gives no ids."""
    with refusing(self.source, "a tokenizer that encodes any text"):
      ids = self.backend.encode(text, add_special_tokens=False).ids
    return token_ids(np.asarray(ids, np.int64), "tokenizer")

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

  def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders a conversation by the chat template, up to where the reply begins.

    Every message has a `role` (system, user or assistant) and a `content`. Special
    tokens are spelled out, so `encode` turns the text into the prompt.

    Raises:
      ValueError: There is no template, or it refuses these messages.
    """
    if self.chat_template is None:
      raise ValueError(
        "chat: expected a tokenizer with a chat template, got none; it is a base "
        "model's: continue a text with `mxjax generate` instead."
      )
    import jinja2
    import tokenizers

    ends = {"bos_token": self.bos_id, "eos_token": self.eos_id}
    engine = hub.quiet_transformers().PreTrainedTokenizerFast(
      # Only the template is run, so it needs no vocabulary.
      tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
      chat_template=self.chat_template,
      **{k: self.backend.id_to_token(i) for k, i in ends.items() if i is not None},
    )
    try:
      return engine.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
      )
    except jinja2.TemplateError as error:
      raise ValueError(
        f"chat: the model's chat template refuses these messages ({error}); change "
        "them, or leave the system message out."
      ) from error

  @functools.cached_property
  def prefix_ids(self) -> tuple[int, ...]:
    """Ids that the model's own tokenizer prepends to a text, such as BOS of Llama-3.

    `encode` omits them; callers that follow the usual conventions add them.
    """
    with refusing(self.source, "a tokenizer that encodes any text"):
      return tuple(self.backend.encode("", add_special_tokens=True).ids)

  @property
  def vocab_size(self) -> int:
    """Number of ids, special tokens included."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 (hex) of vocabulary, merges, special tokens and splitting rules."""
    state = json.loads(self.backend.to_str())
    keys = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    text = json.dumps({key: state[key] for key in keys}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

  @classmethod
  def from_gguf(cls, path: pathlib.Path) -> "Tokenizer":
    """Builds the tokenizer from the vocabulary and merges in a GGUF file.

    Raises:
      NotImplementedError: The file names another pre-tokenizer.
    """
    with refusing(path, "the tokenizer of a model"):
      return cls._from_gguf(path)

  @classmethod
  def _from_gguf(cls, path: pathlib.Path) -> "Tokenizer":
    reader = gguf.open_reader(path)
    get = functools.partial(gguf.field, reader)
    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
      raise NotImplementedRefusal(
        path,
        expected=f"a gpt2 tokenizer with pre-tokenizer {', '.join(PRE_TOKENIZERS)}",
        got=f"{model} with {pre}",
        mend="load the tokenizer from the model's Hugging Face folder",
      )
    tokens, merges = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.merges")
    types = get("tokenizer.ggml.token_type")
    special = [
      t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN
    ]
    return cls(
      _byte_level_bpe(tokens, merges, special),
      bos_id=get("tokenizer.ggml.bos_token_id"),
      eos_id=get("tokenizer.ggml.eos_token_id"),
      chat_template=get("tokenizer.chat_template"),
      source=str(path),
    )

  @classmethod
  def from_hub(cls, name: str) -> "Tokenizer":
    """Takes the tokenizer that `transformers` builds for a hub id.

    Raises:
      FileNotFoundError: The hub cannot be reached, or it has no such tokenizer.
      NotImplementedError: `transformers` has no fast tokenizer for the model.
    """
    import tokenizers

    built, file = hub.tokenizer(name)
    auto: Any = built
    if file:
      backend = tokenizers.Tokenizer.from_file(file)
    elif (backend := getattr(auto, "backend_tokenizer", None)) is None:
      raise NotImplementedError(
        f"{name}: expected a fast tokenizer, got {type(auto).__name__}, which runs in "
        "Python; convert it to a tokenizer.json and load it from a folder."
      )
    return cls(
      backend,
      bos_id=auto.bos_token_id,
      eos_id=auto.eos_token_id,
      chat_template=_default_template(auto.chat_template),
    )

  def save(self, folder: pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` for `from_folder`."""
    self.backend.save(str(folder / "tokenizer.json"))
    settings = {
      name: None if number is None else self.backend.id_to_token(number)
      for name, number in (("bos_token", self.bos_id), ("eos_token", self.eos_id))
    }
    settings["chat_template"] = self.chat_template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

  @classmethod
  def from_folder(cls, folder: pathlib.Path) -> "Tokenizer":
    """Reads `tokenizer.json`, and settings and chat template if present.

    Raises:
      FileNotFoundError: There is no `tokenizer.json`.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    with refusing(path, "a tokenizer of the library tokenizers"):
      data = read_bytes(path, mend="save the fast tokenizer of the model there")
      backend = tokenizers.Tokenizer.from_buffer(data)
    # What a tokenizer was last used with says nothing about the texts given here.
    backend.no_truncation()
    backend.no_padding()
    path = folder / "tokenizer_config.json"
    settings = Settings()
    if path.is_file():
      settings = read_json(path, Settings, "the settings of a tokenizer")
    return cls(
      backend,
      bos_id=_special_id(backend, settings.bos_token),
      eos_id=_special_id(backend, settings.eos_token),
      chat_template=_chat_template(folder, settings),
      source=str(folder / "tokenizer.json"),
    )


def _byte_level_bpe(
  tokens: list[str], merges: list[str], special: list[str]
) -> "tokenizers.Tokenizer":
  """Builds SmolLM's tokenizer: splits single digits, then GPT-2's byte-level words."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  vocabulary = {token: i for i, token in enumerate(tokens)}
  pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
  digits = pre_tokenizers.Digits(individual_digits=True)
  words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(
    [tokenizers.AddedToken(t, special=True, normalized=False) for t in special]
  )
  return backend


def _special_id(
  backend: "tokenizers.Tokenizer", token: str | Special | None
) -> int | None:
  """Returns the id of a token given as a string or a saved AddedToken."""
  content = token.content if isinstance(token, Special) else token
  return None if content is None else backend.token_to_id(content)


def _chat_template(folder: pathlib.Path, settings: Settings) -> str | None:
  """Finds the chat template: transformers 5 has a file for it, 4 uses the settings."""
  path = folder / "chat_template.jinja"
  if path.is_file():
    with refusing(path, "a chat template in UTF-8"):
      return read_bytes(path).decode()
  template = settings.chat_template
  if isinstance(template, list):
    return _default_template({entry.name: entry.template for entry in template})
  return template


def _default_template(template: Any) -> str | None:
  """Returns the default of several named templates, or the only one."""
  if isinstance(template, list):
    template = {entry["name"]: entry["template"] for entry in template}
  return template.get("default") if isinstance(template, dict) else template
