"""`mxjax generate`: continues a prompt with a quantized model."""

import argparse
import json
from typing import Any

from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser("generate", help="continue a prompt")
  arguments.add(parser, "checkpoint")
  add = parser.add_argument
  add("--prompt", required=True, help="the text to continue")
  add("--max-new-tokens", type=int, default=32, metavar="N", help="default: 32")
  add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
  add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
  add("--top-p", type=float, metavar="P", help="sample from a share P of probability")
  arguments.add(parser, "--seed", help="of the samples")
  arguments.add(parser, "--json", "--storage", "--compiled")
  return parser


def run(options: argparse.Namespace) -> None:
  """Prints the prompt and its continuation."""
  storage = arguments.storage(options.storage)

  import jax

  from mxjax.evaluation.cli import inputs, outputs

  restored = inputs.restore(options.checkpoint, storage=storage)
  text = outputs.continued(
    *restored,
    options.prompt,
    max_new_tokens=options.max_new_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    key=jax.random.key(options.seed),
  )
  print(json.dumps({"text": text}) if options.json else text)
