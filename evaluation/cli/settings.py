"""What a command is about to do, told before it starts."""

import argparse
from collections.abc import Iterable

from mxjax import methods, models
from mxjax.audit import plan
from mxjax.devices import mesh as meshes
from mxjax.evaluation.cli import arguments
from mxjax.evaluation.estimates import LEARNING, expected_seconds
from mxjax.evaluation.report import numbers


def announcement(
  options: argparse.Namespace,
  config: models.ModelConfig,
  names: Iterable[str],
  *,
  on_disk: bool,
) -> list[str]:
  """Returns sentences on settings, defaults included, and what they will take."""
  names = tuple(names)
  mesh = getattr(options, "mesh", None)
  planned = plan.plan(
    config,
    sequences=options.sequences,
    length=options.length,
    on_disk=on_disk,
    **(meshes.sizes(mesh) if mesh else {}),
  )
  text = lambda data: data or "embedded text"
  memory = numbers.size(planned.peak)
  lines = [
    f"method: {', '.join(names)}" if names else "",
    f"arithmetic: {config.dtype}",
    f"calibration: {options.sequences} x {options.length:,} tokens of "
    f"{text(options.calib)}, "
    f"seed {options.seed}",
    f"test: {options.windows} x {options.window_length:,} tokens of "
    f"{text(options.data)}, {options.replicates} replicate(s)",
    f"expected memory: about {memory}, layers {'on disk' if on_disk else 'in memory'}",
  ]
  tests = len(arguments.split(options.data or "")) or 1
  tokens = tests * options.windows * options.window_length * options.replicates
  seconds = expected_seconds(planned, names, mesh, tokens) if names else None
  if seconds:
    learns = any(methods.base_name(name) in LEARNING for name in names)
    about = "more than" if learns else "about"
    lines.append(f"expected time: {about} {numbers.about(seconds)}")
  return [line for line in lines if line]
