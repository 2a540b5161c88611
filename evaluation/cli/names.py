"""Names that help texts list, and the near one for a name that does not exist.

The registries that define them import JAX, which help must not wait for, so the names
stand here a second time; `tests/evaluation/cli/test_help.py` holds both equal.
"""

import difflib
from collections.abc import Iterable

METHODS = (
  *("rtn", "gptq", "mr-gptq", "brq", "wush", "torq", "batquant", "spinquant", "focus"),
  *("wush+r", "hires", "hires-next", "rtn+gain", "rtn+rceil"),
)
"""Keys of `mxjax.methods.METHODS`."""
STUDIES = (
  *("stages", "components", "rules", "recovery", "encoding", "geometry", "readings"),
  *("next", "controls"),
)
"""Keys of `mxjax.methods.hires.ablations.STUDIES`."""
FEATURES = (
  *("maps", "refinement", "clipping", "value-recovery", "mlp-recovery", "gains"),
  *("rules", "recovery"),
)
"""What `export --drop` takes: `FEATURES` and `GROUPS` of `storage.export.features`."""
TASKS = (
  *("wikitext2", "c4", "arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande"),
)
"""`mxjax.evaluation.measures.fitness.TASKS`."""


def suggestion(name: str, known: Iterable[str]) -> str:
  """`; did you mean X?` for a name close to a known one, otherwise empty."""
  known = list(known)
  longer = [candidate for candidate in known if candidate.startswith(name)]
  close = longer or difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]}?" if close else ""


def check(what: str, name: str, known: Iterable[str]) -> None:
  """Refuses an unknown name.

  Raises:
    ValueError: With the closest known name, if any is close, and all of them.
  """
  known = tuple(known)
  if name not in known:
    raise ValueError(
      f"unknown {what} {name!r}{suggestion(name, known) or ';'} use one of "
      f"{', '.join(known)}."
    )


def split(text: str) -> list[str]:
  """The names of a comma list, without empty ones."""
  return [name.strip() for name in text.split(",") if name.strip()]
