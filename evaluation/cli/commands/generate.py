"""`mxjax generate` and `mxjax chat`: let a model continue a text or answer."""

import argparse
from typing import Any

from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds both commands and their options; returns the parser of `generate`."""
  chat = commands.add_parser(
    "chat",
    help="talk with a model that has a chat template",
    description="Answers each line typed at a terminal with the conversation so far "
    "in mind. Standard input that is no terminal is one message: echo 'What is a "
    "quark?' | mxjax chat DIR.",
  )
  arguments.add(chat, "source")
  chat.add_argument("--system", metavar="TEXT", help="a first message with the rules")
  _add_speaking(chat, **{"--max-new-tokens": 512, "--temperature": 0.7, "--top-p": 0.9})
  told = "most tokens of a conversation, which set the cache's memory"
  chat.add_argument(
    "--context", type=arguments.whole(2), default=2048, metavar="T", help=told
  )
  chat.set_defaults(run=run_chat)

  parser = commands.add_parser("generate", help="continue a prompt")
  arguments.add(parser, "source")
  parser.add_argument("--prompt", required=True, help="the text to continue")
  _add_speaking(parser)
  arguments.add(parser, "--json")
  return parser


def _add_speaking(parser: argparse.ArgumentParser, **defaults: Any) -> None:
  group = parser.add_argument_group("sampling")
  arguments.add(group, *arguments.SAMPLING)
  parser.set_defaults(**{k[2:].replace("-", "_"): v for k, v in defaults.items()})
  unset = {name: parser.get_default(name) for name in ("top_k", "top_p")}
  parser.set_defaults(unset=unset)
  arguments.add(parser, "--storage", "--dtype", "--compiled")


def run(options: argparse.Namespace) -> None:
  """Prints the prompt and its continuation."""
  from mxjax.evaluation.cli import speaking

  speaking.generate(options)


def run_chat(options: argparse.Namespace) -> None:
  """Answers messages until the input ends."""
  from mxjax.evaluation.cli import speaking

  speaking.chat(options)
