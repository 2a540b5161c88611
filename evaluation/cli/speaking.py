"""Text from a model as it is made: `mxjax generate` and `mxjax chat`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mxjax import models
from mxjax.evaluation.cli import arguments, inputs
from mxjax.models.streaming import PrefixCache, stream, text_pieces


def speak(
  cache: PrefixCache,
  tokenizer: models.Tokenizer,
  ids: np.ndarray,
  *,
  max_new_tokens: int,
  stops: Sequence[str] = (),
  seed: int = 0,
  show: Callable[[str], object] = lambda piece: None,
  **sampling: Any,
) -> dict[str, Any]:
  """Continues a prompt, int32 `[T]`, and shows each piece of text when it is known.

  `sampling` goes to `models.streaming.stream`. An interruption ends the text.

  Returns:
    JSON-ready: `text`, `tokens`, `seconds`, `first_token_seconds` (with the prompt and
    whatever had to be compiled), `tokens_per_second` after the first token, and `end`.

  Raises:
    ValueError: The prompt is empty or too long, or an option is out of range.
  """
  if not len(ids):
    raise ValueError("generate: the prompt is empty; give at least one word.")
  ends = {tokenizer.eos_id, *cache.model.config.eos_ids} - {None}
  began = time.perf_counter()
  times: list[float] = []
  # What the stream does not finish, a stop string does.
  end = "stop string"

  def timed() -> Iterator[int]:
    nonlocal end
    options = dict(max_new_tokens=max_new_tokens, eos_ids=ends, **sampling)
    for token in stream(cache, ids, key=jax.random.key(seed), **options):
      times.append(time.perf_counter() - began)
      yield token
    end = "end of text"

  pieces: list[str] = []
  try:
    for piece in text_pieces(timed(), tokenizer.decode, stops):
      pieces.append(piece)
      show(piece)
  except KeyboardInterrupt:
    end = "interrupted"
  else:
    if end != "stop string" and len(times) == max_new_tokens:
      end = f"{max_new_tokens} new tokens"
    elif end != "stop string" and len(times) == cache.limit - len(ids):
      end = f"context of {cache.limit} tokens full"
  rest = times[-1] - times[0] if times else 0.0
  return {
    "text": "".join(pieces),
    "tokens": len(times),
    "seconds": round(time.perf_counter() - began, 3),
    "first_token_seconds": round(times[0], 3) if times else None,
    "tokens_per_second": round((len(times) - 1) / rest, 2) if rest else None,
    "end": end,
  }


def speed(facts: dict[str, Any]) -> str:
  """Returns the line below a text: tokens, their rate, and why the text ended."""
  rate = facts["tokens_per_second"]
  parts = [
    f"{facts['tokens']} tokens",
    *([f"{rate:.1f} tokens/s"] if rate else []),
    *([f"first after {facts['first_token_seconds']:.1f} s"] if facts["tokens"] else []),
    facts["end"],
  ]
  return f"[{', '.join(parts)}]"


def show_piece(piece: str) -> None:
  """Prints a piece of text at once."""
  print(piece, end="", flush=True)


def generate(options: argparse.Namespace) -> None:
  """Prints the prompt and its continuation, as JSON or piece by piece."""
  storage = arguments.storage(options.storage)
  sampling = arguments.sampling(options)
  model, params, tokenizer = inputs.restore(
    options.source, storage=storage, dtype=options.dtype
  )
  ids = tokenizer.encode(options.prompt)
  ids = np.concatenate([np.asarray(tokenizer.prefix_ids, np.int32), ids])
  # The cache needs no more room than this text.
  cache = PrefixCache(model, params, len(ids) + options.max_new_tokens + 1)
  if options.json:
    facts = speak(cache, tokenizer, ids, **sampling)
    print(json.dumps(facts | {"text": options.prompt + facts["text"]}))
    return
  show_piece(options.prompt)
  facts = speak(cache, tokenizer, ids, show=show_piece, **sampling)
  print()
  print(speed(facts), file=sys.stderr)


def chat(options: argparse.Namespace) -> None:
  """Answers messages until the input ends: lines of a terminal, or the piped text.

  Raises:
    ValueError: The tokenizer has no chat template, or the piped text is empty.
  """
  storage = arguments.storage(options.storage)
  sampling = arguments.sampling(options)
  is_terminal = sys.stdin.isatty()
  print("loading", file=sys.stderr)
  model, params, tokenizer = inputs.restore(
    options.source, storage=storage, dtype=options.dtype
  )
  messages = [{"role": "system", "content": options.system}] if options.system else []
  # A base model's tokenizer is refused before anyone has typed a message.
  tokenizer.chat_prompt([*messages, {"role": "user", "content": ""}])
  cache = PrefixCache(model, params, options.context)
  for message in _typed() if is_terminal else _piped():
    messages.append({"role": "user", "content": message})
    ids = tokenizer.encode(tokenizer.chat_prompt(messages))
    facts = speak(cache, tokenizer, ids, show=show_piece, **sampling)
    print()
    print(speed(facts), file=sys.stderr)
    messages.append({"role": "assistant", "content": facts["text"]})


def _typed() -> Iterator[str]:
  """Yields the lines that someone types, until Ctrl-D or Ctrl-C at the prompt."""
  with contextlib.suppress(ImportError):
    # Gives `input` a history and the usual keys.
    import readline  # noqa: F401
  print("Ctrl-C ends a reply, Ctrl-D the conversation.", file=sys.stderr)
  while True:
    try:
      if line := input("> ").strip():
        yield line
    except (EOFError, KeyboardInterrupt):
      print()
      return


def _piped() -> Iterator[str]:
  """Yields the whole of standard input as one message."""
  if not (text := sys.stdin.read().strip()):
    raise ValueError("chat: expected a message on standard input, got none; pipe one.")
  yield text
