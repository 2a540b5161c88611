"""`mxjax generate`: continues a prompt with a quantized model."""

import argparse
import json
from typing import Any

from mxjax.evaluation.cli import arguments


def add_parser(commands: Any) -> argparse.ArgumentParser:
  """Adds the command and its options."""
  parser = commands.add_parser("generate", help="continue a prompt")
  add = parser.add_argument
  add("checkpoint", metavar="DIR", help="a folder written by `quantize`")
  add("--prompt", required=True, help="the text to continue")
  add("--max-new-tokens", type=int, default=32, metavar="N", help="default: 32")
  add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
  add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
  add("--top-p", type=float, metavar="P", help="sample from a share P of probability")
  add("--seed", type=int, default=0, metavar="S", help="of the samples")
  arguments.add_json(parser)
  arguments.add_storage(parser)
  arguments.add_compiled(parser)
  return parser


def run(options: argparse.Namespace) -> None:
  """Prints the prompt and its continuation."""
  storage = arguments.storage(options.storage)

  import jax

  from mxjax.evaluation.cli import inputs, outputs

  model, params, tokenizer, _ = inputs.restore(options.checkpoint, storage=storage)
  text = outputs.continued(
    model,
    params,
    tokenizer,
    options.prompt,
    max_new_tokens=options.max_new_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    key=jax.random.key(options.seed),
  )
  print(json.dumps({"text": text}) if options.json else text)
