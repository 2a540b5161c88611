"""`mxjax chat`: a conversation with a model that has a chat template."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from mxjax.cli import generate
from mxjax.cli import options as shared
from mxjax.errors import ValueRefusal


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser(
    "chat",
    help="talk with a model that has a chat template",
    description="Answers each line typed at a terminal with the conversation so far "
    "in mind. Standard input that is no terminal is one message: echo 'What is a "
    "quark?' | mxjax chat DIR.",
  )
  shared.add(parser, "source")
  parser.add_argument("--system", metavar="TEXT", help="a first message with the rules")
  generate.add_sampling(parser, max_new_tokens=512, temperature=0.7, top_p=0.9)
  parser.add_argument(
    "--context",
    type=shared.whole(2),
    default=2048,
    metavar="T",
    help="most tokens of a conversation, which set the cache's memory",
  )
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Answers messages until the input ends: lines of a terminal, or the piped text.

  Raises:
    ValueError: The tokenizer has no chat template, or the piped text is empty.
  """
  from mxjax.evaluation import subjects
  from mxjax.models.streaming import PrefixCache

  storage, sampling = shared.storage(options.storage), generate.sampling(options)
  is_terminal = sys.stdin.isatty()
  # On stderr: stdout has replies alone, for a pipe.
  print("loading", file=sys.stderr)
  model, params, tokenizer = subjects.restore(
    options.source, storage=storage, dtype=options.dtype
  )
  messages = [{"role": "system", "content": options.system}] if options.system else []
  # A base model's tokenizer is refused before anyone has typed a message.
  tokenizer.chat_prompt([*messages, {"role": "user", "content": ""}])
  cache = PrefixCache(model, params, options.context, options.cache)
  for message in _typed() if is_terminal else _piped():
    messages.append({"role": "user", "content": message})
    ids = tokenizer.encode(tokenizer.chat_prompt(messages))
    text = generate.speak_aloud(cache, tokenizer, ids, **sampling)
    # A reply that was interrupted stays in the conversation as far as it was shown.
    messages.append({"role": "assistant", "content": text})


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
    raise ValueRefusal("chat", "a message on standard input", got="none")
  yield text
