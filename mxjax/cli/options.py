"""Options that several commands share, and a parser that suggests close matches.

Help must not wait for JAX, so nothing here imports it.
"""

import argparse
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from mxjax import methods
from mxjax.errors import ValueRefusal
from mxjax.evaluation import text_sources
from mxjax.evaluation.provenance import DEFAULT_MODEL
from mxjax.intake import texts

METHOD_HELP = (
  f"one of {', '.join(methods.METHODS)}, with options as in gptq:scales=static; "
  "weighting=fisher goes with any, and +tune at the end with any but torq; "
  "activations=float quantizes weights alone, outside the paper's contract"
)
DATA_HELP = (
  "a .npy of token ids [n, length] used exactly, a text file, a .jsonl with a text in "
  "each line, c4 or wikitext2 (from the hub); the embedded text when omitted"
)
STORAGE = {
  "bfloat16-tables": "refinement tables in bfloat16; near-ties of codes may fall "
  "otherwise",
  "int8-embeddings": "embedding and untied head in int8, one scale a row; changes the "
  "model, perplexity of the embedded one from 30.24 to 30.29",
  "float8-products": "a GPU multiplies many rows in float8, exact products whose sums "
  "it rounds; the default where a check of its sums passes, on Hopper",
  "bfloat16-products": "a GPU never multiplies in float8",
}
"""Values of `--storage`, and what each costs."""


def whole(least: int) -> Callable[[str], int]:
  """Returns what reads a whole number of at least `least` for `argparse`."""

  def read(text: str) -> int:
    try:
      number = int(text)
    except ValueError:
      number = None
    if number is None or number < least:
      raise argparse.ArgumentTypeError(
        f"expected a whole number of at least {least}, got {text!r}; correct it."
      )
    return number

  return read


def whole_list(text: str) -> list[int]:
  """Reads a comma list of seeds for `argparse`."""
  return [whole(0)(part) for part in texts.split(text)]


def amount(text: str) -> float:
  """Reads a number of dollars or of seconds, or a share, for `argparse`.

  Raises:
    ValueError: It is negative or not finite.
  """
  if not 0 <= (value := float(text)) < float("inf"):
    raise ValueError
  return value


PAPER_SEQUENCES = 128
"""Texts to calibrate on, where there is enough text."""
EMBEDDED_SEQUENCES = 64
"""Of 2,048 tokens each: the embedded calibration text has 190,563 in all."""
LENGTH = 2048
"""Tokens of a calibration text and of a test window, in the paper."""
TEXTS = ("prompt", "stop", "system", "task_options")
"""Options that judge an empty text themselves; all others name something."""


def sequences(options: argparse.Namespace) -> int:
  """Returns `--sequences`, by default as many as the paper's or the embedded text's."""
  if options.sequences is not None:
    return options.sequences
  is_embedded = getattr(options, "calib", "") in (None, "embedded")
  return EMBEDDED_SEQUENCES if is_embedded else PAPER_SEQUENCES


def fit_lengths(options: argparse.Namespace, positions: int | None = None) -> None:
  """Sets the defaults of `--length` and `--window-length`, and checks what was given.

  `positions` is the longest sequence of the model that is going to be read, if one is;
  it is known from the config, before any weight is read.

  Raises:
    ValueError: A length exceeds the positions.
  """
  for name in ("length", "window_length"):
    if not hasattr(options, name):
      continue
    # Set here and not by argparse: the default depends on the model.
    if (given := getattr(options, name)) is None:
      setattr(options, name, min(LENGTH, positions or LENGTH))
    elif positions is not None and given > positions:
      option = f"--{name.replace('_', '-')}"
      raise ValueRefusal(
        f"{options.command}: {option}",
        expected=f"at most {positions} tokens, the positions of the model",
        got=given,
        mend=f"leave it out, or pass {option} {positions} or less",
      )


OPTIONS: dict[str, dict[str, Any]] = {
  "model": dict(
    nargs="?",
    metavar="MODEL",
    help="a Hugging Face folder, a .gguf file or a hub id; the embedded "
    f"{DEFAULT_MODEL} when omitted",
  ),
  "checkpoint": dict(metavar="DIR", help="a folder written by `quantize`"),
  "source": dict(
    nargs="?",
    metavar="DIR",
    help="a folder written by `quantize`, or a float model: a Hugging Face folder, a "
    f".gguf file or a hub id; the embedded {DEFAULT_MODEL} when omitted",
  ),
  "--out": dict(required=True, metavar="DIR", help="a new folder"),
  "--json": dict(action="store_true", help="print JSON for machines"),
  "--calib": dict(metavar="DATA", help=DATA_HELP),
  "--sequences": dict(
    type=whole(1),
    metavar="N",
    help=f"texts to calibrate on; default: {PAPER_SEQUENCES}, and {EMBEDDED_SEQUENCES} "
    "of the embedded text, which has no more; 1 of `quantize --method rtn`, whose "
    "codes depend on none",
  ),
  "--length": dict(
    type=whole(1),
    metavar="T",
    help=f"tokens each; default: {LENGTH}, or all positions of a model that has fewer",
  ),
  "--seed": dict(type=whole(0), default=0, metavar="S", help="of the sample"),
  "--sampling": dict(
    choices=text_sources.SAMPLINGS,
    help="consecutive windows of the joined text; or the field's C4 sample (random "
    "documents longer than the window, a random offset), the default for c4; or its "
    "WikiText-2 sample (random offsets of the text), the default for wikitext2",
  ),
  "--data": dict(metavar="DATA", help=f"{DATA_HELP}; several sets with commas between"),
  "--windows": dict(type=whole(1), default=8, metavar="N", help="windows of each set"),
  "--window-length": dict(
    type=whole(2),
    metavar="T",
    help="tokens in a window; "
    f"default: {LENGTH}, or all positions of a model that has fewer",
  ),
  "--replicates": dict(
    type=whole(1),
    default=1,
    metavar="R",
    help="runs with the embedding perturbed by 1e-6: strict-A4 perplexity of small "
    "models is noise at the 1 %% level, and this shows how much",
  ),
  "--operator-error": dict(
    action="store_true",
    help="also measure every linear on the float model's inputs, which separates "
    "methods that perplexity cannot",
  ),
  "--agreement": dict(
    action="store_true",
    help="also compare every prediction with the float model's: KL and flips",
  ),
  "--chunk": dict(
    type=whole(1), default=1, metavar="N", help="sequences in a device call"
  ),
  "--on-disk": dict(
    action=argparse.BooleanOptionalAction,
    help="read each layer when it is needed instead of loading the model; by default "
    "only where bfloat16 weights would fill half of the memory",
  ),
  "--compiled": dict(
    dest="compiled_kept",
    metavar="DIR",
    help="keep compiled programs in DIR and use those of earlier commands on this "
    "machine instead of compiling again; results do not depend on it. On a GPU they "
    "are kept in ~/.cache/mxjax/compiled by default",
  ),
  "--no-compiled": dict(
    dest="compiled_kept",
    action="store_const",
    const=False,
    help="keep no compiled programs and use none of earlier commands",
  ),
  "--mesh": dict(
    metavar="AXES",
    help="share the work out over devices, such as data=4,model=2: sequences over "
    "data, weights by output rows over model; one device when omitted",
  ),
  "--dtype": dict(
    choices=("float32", "bfloat16"),
    help="compute dtype of a float model, by default bfloat16 of a folder or hub id, "
    "as in the paper, and float32 of a .gguf file and the embedded model; params keep "
    "theirs, and what `quantize` wrote keeps that of its build",
  ),
  "--storage": dict(
    metavar="NAMES",
    help="how the loaded model is stored and multiplied, outside the paper's "
    "contract: a comma list of "
    + "; ".join(f"{name} ({cost})" for name, cost in STORAGE.items()),
  ),
}
"""What `argparse` needs to know of each shared option."""
CALIBRATION = ("--calib", "--sequences", "--length", "--seed", "--sampling")
WINDOWS = ("--data", "--windows", "--window-length")
EVALUATION = (*WINDOWS, "--replicates", "--operator-error", "--agreement")


def add(target: Any, *names: str, **changes: Any) -> None:
  """Adds shared options to a parser or a group, with `changes` of their settings."""
  for name in names:
    target.add_argument(name, **OPTIONS[name] | changes)


def add_run(parser: argparse.ArgumentParser, **agreement: Any) -> None:
  """Adds the options of commands that quantize and measure.

  `agreement` changes the settings of `--agreement`.
  """
  add(parser.add_argument_group("calibration"), *CALIBRATION)
  group = parser.add_argument_group("evaluation")
  add(group, *(name for name in EVALUATION if name != "--agreement"))
  add(group, "--agreement", **agreement)
  add(parser, "--json", "--compiled", "--no-compiled")


def storage(text: str | None) -> dict[str, Any]:
  """Returns the arguments of `inference_packing.pack_for_inference` for `--storage`.

  The dict is empty if the option is absent; then nothing is packed, and products are
  in the fastest dtype, as they are where no name decides.

  Raises:
    ValueError: A name is unknown, or two exclude each other.
  """
  requested = texts.split(text or "")
  for name in requested:
    texts.check("--storage", name, STORAGE)
  if not requested:
    return {}
  dtypes = "float8", "bfloat16"
  products = [dtype for dtype in dtypes if f"{dtype}-products" in requested]
  if len(products) > 1:
    raise ValueRefusal(
      "--storage",
      expected="float8-products or bfloat16-products",
      got="both",
      mend="leave one out",
    )
  return {
    "tables": "bfloat16-tables" in requested,
    "embeddings": "int8" if "int8-embeddings" in requested else None,
    "products": products[0] if products else "fastest",
  }


def given(options: argparse.Namespace, *names: str) -> str:
  """Lists those of the options whose value is not that of `options.unset`."""
  is_given = lambda name: getattr(options, name) != options.unset[name]
  return ", ".join(f"--{name.replace('_', '-')}" for name in names if is_given(name))


def check_method(text: str) -> None:
  """Rejects an unknown method, or one with options that it does not have."""
  texts.check("method", methods.base_name(text), methods.METHODS)
  methods.get(text)


def method_names(text: str) -> list[str]:
  """Returns the methods of a comma list, with `all` and `paper` for groups, checked."""
  groups = {"all": tuple(methods.METHODS), "paper": methods.PAPER_METHODS}
  # A dict keeps the order and each method once.
  selected: dict[str, None] = {}
  for name in texts.split(text):
    selected |= dict.fromkeys(groups.get(name, (name,)))
  for name in selected:
    check_method(name)
  return list(selected)


class _Formatter(argparse.HelpFormatter):
  """Adds every default; wraps between words, never at the hyphen of a name."""

  def _get_help_string(self, action: argparse.Action) -> str | None:
    value = action.default
    # None, "", False and lists are no default, or one that the help describes.
    is_left_out = value in (None, "") or isinstance(value, (bool, list))
    if is_left_out or value == argparse.SUPPRESS or not action.option_strings:
      return action.help
    return f"{action.help}; default: %(default)s"

  def _split_lines(self, text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _mend(name: str, known: Iterable[str]) -> str:
  mend = texts.mend(name, known)
  return f"; {mend}" if mend else ""


class Parser(argparse.ArgumentParser):
  """A parser that suggests the closest option or command for a misspelled one."""

  def __init__(self, *args: Any, **options: Any) -> None:
    """See `argparse.ArgumentParser`; help keeps hyphenated names whole."""
    super().__init__(*args, **{"formatter_class": _Formatter} | options)

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses like `argparse`, after rejecting unknown options of this parser."""
    for word in args or ():
      # What follows the name of a command is for that command's parser.
      if word == "--" or (self._subparsers and not word.startswith("-")):
        break
      name = word.partition("=")[0]
      known = self._option_string_actions
      # argparse accepts any unambiguous prefix of an option.
      if name.startswith("--") and not any(option.startswith(name) for option in known):
        self.error(f"unrecognized option {name}{_mend(name, known)}")
    return super().parse_known_args(args, namespace)

  def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
    # A path or a name that is empty, as of an unset variable, would be read as the
    # folder in which the command stands.
    is_empty = not arg_string.strip() and arg_string != action.default
    if is_empty and action.dest not in TEXTS:
      raise argparse.ArgumentError(
        action,
        f"expected a value, got {arg_string!r}; set the variable that it comes from, "
        "or leave the argument out.",
      )
    return super()._get_value(action, arg_string)

  def _check_value(self, action: argparse.Action, value: Any) -> None:
    try:
      super()._check_value(action, value)
    except argparse.ArgumentError as error:
      error.message += _mend(str(value), map(str, action.choices or ()))
      raise

  def error(self, message: str) -> NoReturn:
    """Prints the message and how to get help, then exits with 2."""
    self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")
