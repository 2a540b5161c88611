"""Names that help texts list, and suggestions for misspelled ones.

The registries that define the names import JAX, which help must not wait for, so the
names are repeated here; `tests/evaluation/cli/test_help.py` checks that they agree.
"""

import difflib
from collections.abc import Iterable

METHODS = (
  *("rtn", "gptq", "mr-gptq", "brq", "wush", "torq", "batquant", "spinquant", "focus"),
  *("wush+r", "hires", "hires-descent", "hires-next", "rtn+gain", "rtn+rceil"),
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
"""Values of `export --drop`: `FEATURES` and `GROUPS` of `storage.export.features`."""
TASKS = (
  *("wikitext2", "c4", "arc_challenge", "arc_easy", "hellaswag", "piqa", "winogrande"),
)
"""`mxjax.evaluation.measures.fitness.TASKS`."""


def suggestion(name: str, known: Iterable[str]) -> str:
  """Returns `; did you mean X?` for a name close to a known one, otherwise ""."""
  known = list(known)
  longer = [candidate for candidate in known if candidate.startswith(name)]
  close = longer or difflib.get_close_matches(name, known, n=1)
  return f"; did you mean {close[0]}?" if close else ""


def check(what: str, name: str, known: Iterable[str]) -> None:
  """Rejects an unknown name.

  Raises:
    ValueError: The name is unknown; lists the known names and suggests a close one.
  """
  known = tuple(known)
  if name not in known:
    raise ValueError(
      f"unknown {what} {name!r}{suggestion(name, known) or ';'} use one of "
      f"{', '.join(known)}."
    )


def split(text: str) -> list[str]:
  """Splits a comma-separated list of names and drops empty ones."""
  return [name.strip() for name in text.split(",") if name.strip()]
