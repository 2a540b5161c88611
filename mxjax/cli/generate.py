"""`mxjax generate`: continues a prompt; and what `chat` and `demo` share with it."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mxjax.cli import options as shared
from mxjax.errors import ValueRefusal

if TYPE_CHECKING:
  import numpy as np

  from mxjax.models import Tokenizer
  from mxjax.models.streaming import PrefixCache

SEEDS = 2**32
"""Seeds of a sample; JAX takes others for one of these, or for none."""


def add_parser(commands: Any) -> None:
  """Adds the command and its options."""
  parser = commands.add_parser("generate", help="continue a prompt")
  shared.add(parser, "source")
  parser.add_argument("--prompt", required=True, help="the text to continue")
  add_sampling(parser)
  shared.add(parser, "--json")
  parser.set_defaults(run=run)


def add_sampling(
  parser: argparse.ArgumentParser,
  max_new_tokens: int = 32,
  temperature: float = 0.0,
  top_p: float | None = None,
) -> None:
  """Adds the options of text that is made, with their defaults, and of its model."""
  group = parser.add_argument_group("sampling")
  add = group.add_argument
  add(
    "--max-new-tokens",
    type=shared.whole(1),
    default=max_new_tokens,
    metavar="N",
    help="most tokens to make",
  )
  add(
    "--temperature",
    type=float,
    default=temperature,
    metavar="X",
    help="divides the logits; 0 takes the likeliest token",
  )
  add("--top-k", type=shared.whole(1), metavar="K", help="only the K likeliest tokens")
  add(
    "--top-p",
    type=float,
    default=top_p,
    metavar="P",
    help="only the likeliest tokens that reach probability P together",
  )
  add(
    "--stop",
    action="append",
    default=[],
    metavar="TEXT",
    help="end before this text; may be repeated",
  )
  shared.add(group, "--seed")
  parser.add_argument(
    "--cache",
    choices=("compute", "e4m3"),
    default="compute",
    help="how keys and values of past tokens are kept: in the compute dtype; or in "
    "E4M3 with a scale for each head and token, in half of bfloat16's memory, outside "
    "the paper's contract; changes the model",
  )
  shared.add(parser, "--storage", "--dtype", "--compiled", "--no-compiled")
  unset = {"top_k": None, "top_p": top_p, "max_new_tokens": max_new_tokens}
  parser.set_defaults(unset=unset)


def sampling(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the arguments of `speak` for the options of `add_sampling`.

  Raises:
    ValueError: A text to stop at is empty, and would be found at once; a seed that
      another one stands for; options that would be ignored.
  """
  command = options.command
  if "" in options.stop:
    raise ValueRefusal(
      command, "--stop with some text", got="none", mend="leave it out"
    )
  if options.seed >= SEEDS:
    raise ValueRefusal(command, f"a --seed below {SEEDS}", got=options.seed)
  # The defaults of `chat` hold for a temperature above 0 and are no request.
  if options.temperature == 0 and (ignored := shared.given(options, "top_k", "top_p")):
    raise ValueRefusal(
      command,
      expected=f"--temperature above 0 beside {ignored}",
      got="0, which takes the likeliest token",
      mend="correct the options",
    )
  return {
    "max_new_tokens": options.max_new_tokens,
    "temperature": options.temperature,
    "top_k": options.top_k,
    "top_p": options.top_p,
    "stops": options.stop,
    "seed": options.seed,
  }


def run(options: argparse.Namespace) -> None:
  """Prints the prompt and its continuation, as JSON or piece by piece."""
  import numpy as np

  from mxjax.cli import output
  from mxjax.evaluation import subjects
  from mxjax.models.streaming import PrefixCache

  storage, arguments = shared.storage(options.storage), sampling(options)
  if shared.given(options, "max_new_tokens"):
    # Before any weight is read: a prompt has a token at least.
    _check_room(options, subjects.positions_of(options.source), 1)
  model, params, tokenizer = subjects.restore(
    options.source, storage=storage, dtype=options.dtype
  )
  ids = tokenizer.encode(options.prompt)
  # `encode` leaves out what the model's own tokenizer puts before a text, such as BOS.
  ids = np.concatenate([np.asarray(tokenizer.prefix_ids, np.int32), ids])
  _check_room(options, model.config.max_positions, len(ids))
  # The cache needs no more room than this text.
  room = len(ids) + options.max_new_tokens + 1
  cache = PrefixCache(model, params, room, options.cache)
  if options.json:
    facts = speak(cache, tokenizer, ids, **arguments)
    print(json.dumps(facts | {"text": options.prompt + facts["text"]}))
    return
  output.piece(options.prompt)
  speak_aloud(cache, tokenizer, ids, **arguments)


def _check_room(options: argparse.Namespace, positions: int, prompt: int) -> None:
  """Rejects more new tokens than fit behind a prompt, as `models.generate` does.

  The default is no number that anyone asked for: it ends where the positions do.

  Raises:
    ValueError: They do not fit.
  """
  if not shared.given(options, "max_new_tokens"):
    return
  if (asked := options.max_new_tokens) + prompt > positions:
    room = positions - prompt
    raise ValueRefusal(
      "generate: --max-new-tokens",
      expected=f"at most {max(room, 0)} behind a prompt of {prompt} token"
      f"{'s' * (prompt != 1)}: the model has {positions} positions",
      got=asked,
      mend="ask for fewer, or shorten the prompt",
    )


def speak_aloud(
  cache: "PrefixCache", tokenizer: "Tokenizer", ids: "np.ndarray", **arguments: Any
) -> str:
  """Prints a continuation as it is made, its speed on stderr; returns the text."""
  from mxjax.cli import output

  facts = speak(cache, tokenizer, ids, show=output.piece, **arguments)
  output.piece("\n")
  parts = [f"{facts['tokens']} tokens"]
  if facts["tokens_per_second"]:
    parts.append(f"{facts['tokens_per_second']:.1f} tokens/s")
  if facts["tokens"]:
    parts.append(f"first after {facts['first_token_seconds']:.1f} s")
  print(f"[{', '.join([*parts, facts['end']])}]", file=sys.stderr)
  return facts["text"]


def speak(
  cache: "PrefixCache",
  tokenizer: "Tokenizer",
  ids: "np.ndarray",
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
  import jax

  from mxjax.models.streaming import stream, text_pieces

  if not len(ids):
    raise ValueRefusal("generate", "a prompt of at least one word", got="none")
  began = time.perf_counter()
  times: list[float] = []
  # What the stream does not finish, a stop string does.
  end = "stop string"

  def timed() -> Iterator[int]:
    nonlocal end
    for token in stream(
      cache,
      ids,
      max_new_tokens=max_new_tokens,
      # At temperature 0 nothing reads it.
      key=jax.random.key(seed),
      eos_ids={tokenizer.eos_id, *cache.model.config.eos_ids} - {None},
      **sampling,
    ):
      times.append(time.perf_counter() - began)
      yield token
    if len(times) == max_new_tokens:
      end = f"{max_new_tokens} new tokens"
    elif len(times) == cache.limit - len(ids):
      end = f"context of {cache.limit} tokens full"
    else:
      end = "end of text"

  pieces: list[str] = []
  try:
    for piece in text_pieces(timed(), tokenizer.decode, stops):
      pieces.append(piece)
      show(piece)
  except KeyboardInterrupt:
    end = "interrupted"
  # The first token waits for the prompt and for compiling: the rate is of those behind
  # it.
  rest = times[-1] - times[0] if times else 0.0
  return {
    "text": "".join(pieces),
    "tokens": len(times),
    "seconds": round(time.perf_counter() - began, 3),
    "first_token_seconds": round(times[0], 3) if times else None,
    "tokens_per_second": round((len(times) - 1) / rest, 2) if rest else None,
    "end": end,
  }
