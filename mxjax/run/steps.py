"""Learning in steps: each is told to the caller of a run, and kept in its folder.

What a step learned is written to the run folder before the next one begins, so a killed
run goes on to the same bits. Where that is large, a step waits to be written, so that
writes take about a tenth of the time; an interrupt writes the last one, unless it comes
into the update of a step.
"""

import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mxjax import errors
from mxjax.devices import processes
from mxjax.errors import FloatingPointRefusal
from mxjax.methods import hook_results
from mxjax.methods.program import Learning
from mxjax.run.folder import RunFolder
from mxjax.run.progress import LEARNING, TUNING, Report

SMALL_BYTES = 2**26
"""What is not larger than this is written after every step, in less than a second."""
PATIENCE = 10
"""Writes of what is larger take about one part in so many of the time, beside the last
one."""

_LABELS = {"learning": LEARNING, "tuning": TUNING}
_log = logging.getLogger("mxjax")


def take(
  learning: Learning[Any],
  stage: Literal["learning", "tuning"],
  folder: RunFolder | None,
  report: Report,
  mesh: Mesh | None = None,
) -> Any:
  """Takes the steps that `folder` does not have, and returns what they lead to.

  Args:
    learning: The steps, and what is made of their result.
    stage: Whether they are those of `Program.prepare` or of tuning.
    folder: Where what is learned is written, or None.
    report: Is told of every step and its loss.
    mesh: Devices of all processes that take these steps.

  Returns:
    What `learning.finish` makes of all steps.

  Raises:
    FloatingPointError: The loss of a step is not finite.
    TypeError: A step returns no loss, or what is learned is not as it was before.
  """
  place = "prepare" if stage == "learning" else None
  within = lambda: errors.within(place) if place else contextlib.nullcontext()
  # In one variable, so that no interrupt comes between what is learned and its losses,
  # and so that only it holds what was learned before.
  now = _begun(learning, stage, folder, within)
  written = len(now[1])
  # The process that writes removes a file which the others have to read first.
  processes.wait_for_all(mesh)
  if stage == "learning":
    report.has_learned(learning.steps * learning.sequences)
  tell = report.learning if stage == "learning" else report.tuning
  if written < learning.steps:
    tell(written, learning.steps, None)
  start, patience = time.perf_counter(), 0.0

  def write() -> None:
    nonlocal start, patience, written
    assert folder
    learned, losses = now
    # The time of steps includes the write before them.
    began = time.perf_counter()
    leaves = jax.tree.leaves(learned)
    named = {f"{number:06d}": leaf for number, leaf in enumerate(leaves)}
    folder.write_step(stage, named, losses, began - start, learning.sequences)
    start, written = began, len(losses)
    if sum(leaf.nbytes for leaf in leaves) > SMALL_BYTES:
      patience = PATIENCE * (time.perf_counter() - start)

  try:
    while len(now[1]) < learning.steps:
      with within():
        now = _step(learning, stage, *now)
      is_last = len(now[1]) == learning.steps
      if folder and (is_last or time.perf_counter() - start >= patience):
        write()
      tell(len(now[1]), learning.steps, now[1][-1])
  except KeyboardInterrupt:
    if folder and written < len(now[1]):
      taken = f"{_LABELS[stage]}, step {len(now[1])} of {learning.steps}"
      # A step in work may have given away the arrays that it began with.
      if any(leaf.is_deleted() for leaf in jax.tree.leaves(now[0])):
        lost = "%s, is lost, because the stop came while it was replaced; %d is on disk"
        _log.warning(lost, taken, written)
      else:
        _log.warning("%s, is being written; one more stop loses it", taken)
        write()
    raise
  with within():
    return learning.finish(*now)


def _begun(
  learning: Learning[Any],
  stage: Literal["learning", "tuning"],
  folder: RunFolder | None,
  within: Callable[[], AbstractContextManager[None]],
) -> tuple[Any, list[float]]:
  """Returns what `folder` has of steps, or what they start with; and losses."""
  with within():
    learned = hook_results.arrays_of_step(learning.start())
  if not (folder and folder.has_steps(stage)):
    return learned, []
  # Only leaves are on disk; the structure follows from options and model, which are
  # those of the start.
  structure = jax.tree.structure(learned)
  # Of what is learned only one copy is in memory, and one leaf of another.
  del learned
  saved = folder.read_steps(stage)
  assert saved
  leaves = [jnp.asarray(saved.arrays.pop(key)) for key in sorted(saved.arrays)]
  return jax.tree.unflatten(structure, leaves), saved.losses


def _step(
  learning: Learning[Any], stage: str, learned: Any, losses: list[float]
) -> tuple[Any, list[float]]:
  """Takes a step; returns what is learned now, and the losses of all steps."""
  new, loss = hook_results.check_step(learning.step(learned, tuple(losses)), learned)
  if not np.isfinite(loss):
    raise FloatingPointRefusal(
      _LABELS[stage],
      expected="a finite loss",
      got=f"{loss} at step {len(losses) + 1} of {learning.steps}",
      mend=learning.mend,
    )
  return new, [*losses, loss]
