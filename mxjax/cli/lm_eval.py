"""`mxjax-lm-eval`: the command line of lm-evaluation-harness, with our models."""

import sys


def main() -> int:
  """Runs the harness; returns 2 where it is not installed."""
  try:
    from mxjax.evaluation.tasks import harness
  except ModuleNotFoundError as error:
    # Another missing module is a fault of the installation, and shows its traceback.
    if (error.name or "").partition(".")[0] != "lm_eval":
      raise
    print(
      "mxjax-lm-eval: expected the package lm-eval, got none; run `pip install "
      "'mxjax[harness]'`, in a checkout `pip install '.[harness]'`.",
      file=sys.stderr,
    )
    return 2
  harness.main()
  return 0
