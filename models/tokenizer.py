"""Tokenizers as `transformers` loads them from a folder, or built from a GGUF file."""

import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mxjax.errors import FileNotFoundRefusal, NotImplementedRefusal, ValueRefusal
from mxjax.intake.reading import read_bytes, read_json, refusing
from mxjax.intake.token_ids import token_ids
from mxjax.models.families.hf_config import check_sizes, quiet_transformers
from mxjax.models.loading import gguf

if TYPE_CHECKING:
  import tokenizers
  import transformers

PRE_TOKENIZERS = ("smollm",)
"""Supported values of `tokenizer.ggml.pre`."""
CONTROL_TOKEN, USER_TOKEN = 3, 4
"""GGUF token types of special tokens, and of others that are never split."""
FILE = "tokenizer.json"
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Tokenizers that `transformers` converts, some with the help of sentencepiece."""
CONFIG = "config.json"
"""Its `model_type` has a say in what tokenizer it is."""
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
FILES = (
  FILE,
  "tokenizer.*.json",
  *OTHER_FILES,
  "merges.txt",
  *SETTINGS,
  "chat_template.jinja",
  "additional_chat_templates/*.jinja",
)
"""All that `transformers` reads of a tokenizer, as patterns; `*` stands for a version
or for the name of a template."""
SAVE = "save the fast tokenizer of the model there"
PROBES = ("a", "the", "0", " ", "\n")
"""Texts of which a tokenizer should know one."""


class Tokenizer:
  """A fast tokenizer of `transformers` that never adds special tokens by itself.

  Special tokens spelled out in the text, such as `<|im_start|>`, become their ids.

  Attributes:
    auto: The tokenizer of `transformers`, whose templates and special tokens are used.
    backend: Its tokenizer of the package `tokenizers`, which neither cuts nor pads.
    source: The file or folder that it came from, for messages.
  """

  def __init__(
    self, auto: "transformers.PreTrainedTokenizerBase", source: str = "tokenizer"
  ) -> None:
    """Takes the tokenizer of `transformers`; see `from_backend`, too.

    Raises:
      NotImplementedError: It is none that `tokenizers` can run.
    """
    backend: tokenizers.Tokenizer | None = getattr(auto, "backend_tokenizer", None)
    if backend is None:
      raise NotImplementedRefusal(
        source,
        expected="a fast tokenizer",
        got=f"{type(auto).__name__}, which runs in Python",
        mend=f"convert it to a {FILE}",
      )
    # What a tokenizer was last used with says nothing about the texts given here.
    backend.no_truncation()
    backend.no_padding()
    self.auto: Any = auto
    self.backend, self.source = backend, source

  @classmethod
  def from_backend(
    cls,
    backend: "tokenizers.Tokenizer",
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    chat_template: str | Mapping[str, str] | None = None,
    source: str = "tokenizer",
  ) -> "Tokenizer":
    """Makes the tokenizer of a backend and the ids that begin and end a text."""
    ends = {"bos_token": bos_id, "eos_token": eos_id}
    auto = quiet_transformers().PreTrainedTokenizerFast(
      tokenizer_object=backend,
      chat_template=dict(chat_template)
      if isinstance(chat_template, Mapping)
      else chat_template,
      **{k: backend.id_to_token(i) for k, i in ends.items() if i is not None},
    )
    return cls(auto, source)

  @property
  def bos_id(self) -> int | None:
    """The id of the token that begins a text, or None."""
    return self.auto.bos_token_id

  @property
  def eos_id(self) -> int | None:
    """The id of the token that ends a text, or None."""
    return self.auto.eos_token_id

  @property
  def chat_template(self) -> str | None:
    """The default chat template in Jinja, or None."""
    template = self.auto.chat_template
    return template.get("default") if isinstance(template, dict) else template

  def encode(self, text: str) -> np.ndarray:
    """Encodes a text as int32 `[n]`; an empty text gives no ids."""
    with refusing(self.source, "a tokenizer that encodes any text"):
      ids = self.backend.encode(text, add_special_tokens=False).ids
    # By dtype, because numpy makes floats of an empty list.
    return token_ids(np.asarray(ids, np.int64), "tokenizer")

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
    return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

  @functools.cached_property
  def special_texts(self) -> tuple[str, ...]:
    """The texts of all special tokens, longest first."""
    added = self.backend.get_added_tokens_decoder().values()
    return tuple(sorted((t.content for t in added if t.special), key=len, reverse=True))

  def template(self, name: str | None = None) -> str:
    """Returns the chat template of a name, or the default one.

    Raises:
      ValueError: There is no such template.
    """
    known = self.auto.chat_template
    if not known:
      raise ValueRefusal(
        "chat",
        expected="a tokenizer with a chat template",
        got="none",
        mend="it is a base model's: continue a text with `mxjax generate` instead",
      )
    templates = known if isinstance(known, dict) else {"default": known}
    if (name or "default") not in templates:
      raise ValueRefusal(
        "chat",
        expected=f"a chat template named {name or 'default'}",
        got=f"only those named {', '.join(sorted(templates))}",
        mend=f"give that name to one of them beside {self.source}",
      )
    return templates[name or "default"]

  def chat_prompt(
    self,
    messages: Sequence[Mapping[str, str]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
  ) -> str:
    """Renders a conversation by the chat template, up to where the reply begins.

    Every message has a `role` (system, user or assistant) and a `content`. Special
    tokens are spelled out, so `encode` turns the text into the prompt. `template` names
    one of several templates. Without `add_generation_prompt`, the last message is left
    open, to be continued.

    Raises:
      ValueError: There is no such template, or it refuses these messages.
    """
    import jinja2

    text = self.template(template)
    try:
      return self.auto.apply_chat_template(
        [dict(message) for message in messages],
        chat_template=text,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
      )
    except (jinja2.TemplateError, ValueError, TypeError) as error:
      raise ValueRefusal(
        "chat",
        expected="messages that the model's chat template takes",
        got=error,
        mend="change them, or leave the system message out",
      ) from error

  @functools.cached_property
  def prefix_ids(self) -> tuple[int, ...]:
    """Ids that the model's own tokenizer puts before a text, such as BOS of Llama-3.

    `encode` omits them; callers that follow the usual conventions add them. What it
    puts behind a text, such as EOS, is no part of them.
    """
    with refusing(self.source, "a tokenizer that encodes any text"):
      for text in itertools.chain(PROBES, self.backend.get_vocab()):
        if not len(self.encode(text)):
          continue
        encoding = self.backend.encode(text, add_special_tokens=True)
        # Tokens of the template belong to no sequence.
        places = encoding.sequence_ids
        if 0 in places:
          return tuple(encoding.ids[: places.index(0)])
    raise ValueRefusal(
      self.source,
      expected="a tokenizer that encodes some text",
      got="no id for any",
      mend="take the model's own",
    )

  @property
  def vocab_size(self) -> int:
    """Number of ids, special tokens included."""
    return self.backend.get_vocab_size(with_added_tokens=True)

  @functools.cached_property
  def fingerprint(self) -> str:
    """SHA-256 (hex) of vocabulary, merges, special tokens and splitting rules."""
    state = json.loads(self.backend.to_str())
    # What decides the ids of `encode`; templates and padding do not.
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
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    backend = _byte_level_bpe(tokens, get("tokenizer.ggml.merges"), types)
    bos_id = get("tokenizer.ggml.bos_token_id")
    # The prefix that the model's own tokenizer adds, which `prefix_ids` finds.
    if bos_id is not None and get("tokenizer.ggml.add_bos_token"):
      from tokenizers import processors

      bos = tokens[bos_id]
      backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, bos_id)]
      )
    named = {
      name: get(f"tokenizer.chat_template.{name}")
      for name in get("tokenizer.chat_templates", [])
    }
    default = get("tokenizer.chat_template")
    # A single template stays a text, as transformers has it; several are a dict by
    # name.
    templates = named | ({"default": default} if default else {})
    return cls.from_backend(
      backend,
      bos_id=bos_id,
      eos_id=get("tokenizer.ggml.eos_token_id"),
      chat_template=templates if named else default,
      source=str(path),
    )

  @classmethod
  def from_folder(cls, folder: pathlib.Path) -> "Tokenizer":
    """Takes the tokenizer that `transformers` builds from the files of a folder.

    It finds the special tokens and the chat templates, and converts older formats.

    Raises:
      FileNotFoundError: There is no tokenizer.
      NotImplementedError: It is none that `tokenizers` can run.
      ValueError: Its files are damaged.
    """
    path = folder / FILE
    if not path.is_file() and not any(
      (folder / name).is_file() for name in OTHER_FILES
    ):
      if files := sorted(one.name for one in folder.glob("*.gguf")):
        raise FileNotFoundRefusal(
          folder,
          expected=f"a file {FILE}",
          got=f"the GGUF file {', '.join(files)}",
          mend=f"name the file, {folder / files[0]}",
        )
      raise FileNotFoundRefusal(
        folder,
        expected=f"a file {FILE}",
        got="none",
        mend=SAVE,
      )
    # Their sizes are bounded here, as transformers reads them whole.
    for one in (*folder.glob("*.json"), *folder.glob("*.jinja")):
      if one.name == CONFIG or one.name in SETTINGS:
        values = read_json(one, dict[str, Any], "the settings of a tokenizer")
        check_sizes(values if one.name == CONFIG else {})
      elif not one.name.endswith(".index.json"):
        read_bytes(one)
    with refusing(folder, "the files of a tokenizer that transformers reads", SAVE):
      # Nothing is fetched, and no code of the folder is run.
      auto: Any = quiet_transformers().AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
      )
      return cls(auto, str(path))

  def save(self, folder: pathlib.Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` for `from_folder`."""
    self.backend.save(str(folder / FILE))
    special = self.auto.special_tokens_map
    settings = {
      # A class of its own would build other rules of splitting.
      "tokenizer_class": "PreTrainedTokenizerFast",
      "bos_token": None,
      "eos_token": None,
      **{name: text for name, text in special.items() if isinstance(text, str)},
      "chat_template": self.auto.chat_template,
    }
    # Several templates are a dict in memory and a list in the file.
    if isinstance(templates := settings["chat_template"], dict):
      settings["chat_template"] = [
        {"name": name, "template": text} for name, text in templates.items()
      ]
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode_prompt(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Encodes a text behind the tokenizer's prefix, int32 `[n]`, or as it is.

  It stays as it is if it begins with the prefix, as a rendered chat template does.
  """
  ids, prefix = tokenizer.encode(text), np.asarray(tokenizer.prefix_ids, np.int32)
  if np.array_equal(ids[: len(prefix)], prefix):
    return ids
  return np.concatenate([prefix, ids])


def _byte_level_bpe(
  tokens: list[str], merges: list[str], types: list[int]
) -> "tokenizers.Tokenizer":
  """Builds SmolLM's tokenizer: splits single digits, then GPT-2's byte-level words."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers

  vocabulary = {token: i for i, token in enumerate(tokens)}
  pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
  digits = pre_tokenizers.Digits(individual_digits=True)
  words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
  # Digits first: the words of GPT-2 would keep several digits together.
  backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
  backend.decoder = decoders.ByteLevel()
  added = lambda wanted: [
    tokenizers.AddedToken(token, special=wanted == CONTROL_TOKEN, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind == wanted
  ]
  # These are in the vocabulary already, whose ids they keep.
  backend.add_special_tokens(added(CONTROL_TOKEN))
  backend.add_tokens(added(USER_TOKEN))
  return backend
