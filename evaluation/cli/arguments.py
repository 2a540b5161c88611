"""Options that several commands share, and a parser that suggests close matches."""

import argparse
from typing import Any, NoReturn

from mxjax.evaluation.cli import names

DEFAULT_MODEL = "SmolLM2-135M"
"""Name of the embedded model."""
MODEL_HELP = (
  "a Hugging Face folder, a .gguf file or a hub id; the embedded "
  f"{DEFAULT_MODEL} when omitted"
)
METHOD_HELP = (
  f"one of {', '.join(names.METHODS)}, with options as in gptq:scales=static"
)
DATA_HELP = (
  "a .npy of token ids [n, length] used exactly, a text file, a .jsonl with a text in "
  "each line, c4 or wikitext2 (from the hub); the embedded text when omitted"
)


class Parser(argparse.ArgumentParser):
  """A parser that suggests the closest option or command for a misspelled one."""

  def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
    """Parses like `argparse`, after rejecting unknown options of this parser."""
    for word in args or ():
      if word == "--" or (self._subparsers and not word.startswith("-")):
        break
      name = word.partition("=")[0]
      known = self._option_string_actions
      # argparse accepts any unambiguous prefix of an option.
      if name.startswith("--") and not any(option.startswith(name) for option in known):
        near = names.suggestion(name, known)
        self.error(f"unrecognized option {name}{near}")
    return super().parse_known_args(args, namespace)

  def _check_value(self, action: argparse.Action, value: Any) -> None:
    try:
      super()._check_value(action, value)
    except argparse.ArgumentError as error:
      error.message += names.suggestion(str(value), map(str, action.choices or ()))
      raise

  def error(self, message: str) -> NoReturn:
    """Prints the message and how to get help, then exits with 2."""
    self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def add_model(parser: argparse.ArgumentParser) -> None:
  """Adds the positional MODEL."""
  parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)


def add_json(parser: argparse.ArgumentParser) -> None:
  """Adds `--json`."""
  parser.add_argument("--json", action="store_true", help="print JSON for machines")


def add_sequences(group: Any) -> None:
  """Adds the options for the shape of the calibration tokens."""
  group.add_argument(
    "--sequences", type=int, default=128, metavar="N", help="default: 128"
  )
  group.add_argument(
    "--length", type=int, default=2048, metavar="T", help="tokens each; default: 2048"
  )


def add_calibration(parser: argparse.ArgumentParser) -> None:
  """Adds the options for the calibration tokens."""
  group = parser.add_argument_group("calibration")
  add = group.add_argument
  add("--calib", metavar="DATA", help=DATA_HELP)
  add_sequences(group)
  add("--seed", type=int, default=0, metavar="S", help="of the sample; default: 0")
  add(
    "--sampling",
    choices=("windows", "documents", "offsets"),
    help="consecutive windows of the joined text; or the field's C4 sample (random "
    "documents longer than the window, a random offset), the default for c4; or its "
    "WikiText-2 sample (random offsets of the text), the default for wikitext2",
  )


def add_windows(group: Any, *, data_help: str, windows_help: str) -> None:
  """Adds the options for the test windows."""
  add = group.add_argument
  add("--data", metavar="DATA", help=data_help)
  add("--windows", type=int, default=8, metavar="N", help=windows_help)
  add(
    "--window-length",
    type=int,
    default=2048,
    metavar="T",
    help="tokens in a window; default: 2048",
  )


def add_evaluation(parser: argparse.ArgumentParser) -> None:
  """Adds the options for test windows and measures, and `--json`."""
  group = parser.add_argument_group("evaluation")
  add_windows(
    group,
    data_help=f"{DATA_HELP}; several sets with commas between",
    windows_help="windows of each set; default: 8",
  )
  add = group.add_argument
  add(
    "--replicates",
    type=int,
    default=1,
    metavar="R",
    help="runs with the embedding perturbed by 1e-6: strict-A4 perplexity of small "
    "models is noise at the 1 %% level, and this shows how much",
  )
  add(
    "--operator-error",
    action="store_true",
    help="also measure every linear on the float model's inputs, which separates "
    "methods that perplexity cannot",
  )
  add(
    "--agreement",
    action="store_true",
    help="also compare every prediction with the float model's: KL and flips",
  )
  add_json(parser)


def add_on_disk(parser: argparse.ArgumentParser) -> None:
  """Adds `--on-disk`."""
  parser.add_argument(
    "--on-disk",
    action=argparse.BooleanOptionalAction,
    default=None,
    help="read each layer when it is needed instead of loading the model; by default "
    "only where bfloat16 weights would fill half of the memory",
  )


def add_compiled(parser: argparse.ArgumentParser) -> None:
  """Adds `--compiled`."""
  parser.add_argument(
    "--compiled",
    dest="compiled_kept",
    metavar="DIR",
    help="keep compiled programs in DIR and use those of earlier commands on this "
    "machine instead of compiling again; results do not depend on it",
  )


def add_mesh(parser: argparse.ArgumentParser) -> Any:
  """Adds `--mesh` and returns its group."""
  group = parser.add_argument_group("devices")
  group.add_argument(
    "--mesh",
    metavar="AXES",
    help="share the work out over devices, such as data=4,model=2: sequences over "
    "data, weights by output rows over model; one device when omitted",
  )
  return group


def add_processes(group: Any) -> None:
  """Adds the options that join several processes into one job."""
  add = group.add_argument
  add(
    "--distributed",
    action="store_true",
    help="this is one process of several that run the same command on one --out; "
    "without --mesh all of their devices are on data",
  )
  add(
    "--coordinator",
    metavar="HOST:PORT",
    help="process 0's address; this and the next two are taken from the cluster's "
    "environment when omitted",
  )
  add("--processes", type=int, metavar="N", help="how many there are")
  add("--process", type=int, metavar="I", help="which one this is")


STORAGE = {
  "bfloat16-tables": "refinement tables in bfloat16; near-ties of codes may fall "
  "otherwise",
  "int8-embeddings": "embedding and untied head in int8, one scale a row; changes the "
  "model, perplexity of SmolLM2-135M from 30.24 to 30.29",
  "mxfp4-embeddings": "embedding and untied head in MXFP4; the same perplexity rises "
  "to 41.88",
  "float8-products": "a GPU multiplies many rows in float8, exact products whose sums "
  "it rounds",
}
"""Values of `--storage`, and what each costs."""


def add_storage(parser: argparse.ArgumentParser) -> None:
  """Adds `--storage`."""
  kinds = "; ".join(f"{name} ({cost})" for name, cost in STORAGE.items())
  parser.add_argument(
    "--storage",
    metavar="NAMES",
    help="how the loaded model is stored and multiplied, outside the paper's "
    f"contract: a comma list of {kinds}",
  )


def storage(text: str | None) -> dict[str, Any]:
  """Returns the arguments of `inference_packing.pack_for_inference` for `--storage`.

  The dict is empty if the option is absent; then nothing is packed.

  Raises:
    ValueError: A name is unknown, or two kinds of embeddings are given.
  """
  requested = names.split(text or "")
  for name in requested:
    names.check("storage", name, STORAGE)
  kinds = [name.partition("-")[0] for name in requested if name.endswith("embeddings")]
  if len(set(kinds)) > 1:
    raise ValueError(
      "storage: expected one kind of embeddings, got int8-embeddings and "
      "mxfp4-embeddings; leave one out."
    )
  if not requested:
    return {}
  return {
    "tables": "bfloat16-tables" in requested,
    "embeddings": kinds[0] if kinds else None,
    "products": "float8" if "float8-products" in requested else None,
  }
