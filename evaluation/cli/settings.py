"""What a command is about to do, and by what a result was made."""

import argparse
import datetime
import os
import pathlib
import platform
import shlex
import time
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from mxjax import methods, models
from mxjax.audit import plan
from mxjax.devices import mesh as meshes
from mxjax.evaluation.cli import arguments
from mxjax.evaluation.report import numbers

LEARNING = ("torq", "batquant", "spinquant", "focus")
"""Methods whose searches the plan does not count."""
STARTING, STARTING_FIT = 10.0, 15.0
"""Seconds to compile the programs of a method, and those of each of its fits."""
STARTING_TWO_SIDED = 60.0
"""What two-sided programs add, whatever the tokens: programs, and rows in groups."""
REDUCING = 2.0
"""Time of a run over that of its model passes: with Hessians, moments and solves."""
PACKAGES = ("mxjax", "jax", "jaxlib", "flax", "numpy", "transformers")


def _processor() -> str:
  """Returns the name of the processor, where the system tells, or its architecture."""
  file = pathlib.Path("/proc/cpuinfo")
  lines = file.read_text().splitlines() if file.is_file() else []
  names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
  return next(names, platform.machine())


def made_by(options: argparse.Namespace) -> dict[str, Any]:
  """Returns date, command, device and versions for a result file, JSON-ready."""
  device = jax.devices()[0]
  kind = f"{device.device_kind} x {jax.device_count()}"
  if device.platform == "cpu":
    kind = f"{_processor()}, {os.cpu_count()} cores"
  installed = {}
  for name in PACKAGES:
    try:
      installed[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      installed[name] = "not installed"
  return {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "command": shlex.join(["mxjax", *options.arguments]),
    "device": f"{device.platform}: {kind}",
    "versions": {"python": platform.python_version(), **installed},
  }


def products_a_second(dtype: str) -> float:
  """Measures products on the first device, in FLOP/s, within half a second."""
  matrix = jnp.ones((1024, 1024), dtype)
  run = jax.jit(lambda a: a @ a)
  jax.block_until_ready(run(matrix))
  seconds = []
  for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready(run(matrix))
    seconds.append(time.perf_counter() - start)
  return 2 * 1024**3 / min(seconds)


def expected_seconds(
  planned: plan.Plan,
  names: Iterable[str],
  mesh: str | None = None,
  test_tokens: int = 0,
  rate: float | None = None,
) -> float | None:
  """Estimates the wall time of methods and their evaluation on one CPU.

  `planned` is for the calibration set; `rate` in FLOP/s is measured if absent. Searches
  of `LEARNING` methods are not in it. None on a mesh or another device, where no run
  has been timed. On SmolLM2-135M it is within a factor of two.
  """
  if mesh or jax.default_backend() != "cpu":
    return None
  rate = rate or products_a_second(planned.dtype)
  one_pass = planned.forward_flops / planned.model_passes
  flops = 2.0 * planned.target_weights * test_tokens
  seconds = flops / rate
  for name in names:
    program = methods.get(name)
    work = REDUCING * one_pass * (1 + len(program.recover)) + flops
    if program.tune or program.weighting != "uniform":
      work += planned.prediction_flops
    if getattr(program, "two_sided", False):
      seconds += STARTING_TWO_SIDED
    seconds += STARTING + STARTING_FIT * len(program.recover) + work / rate
  return seconds


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
