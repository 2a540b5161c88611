"""Learning in steps: each is told to the caller of a run, and kept in its folder.

Every step is written to the run folder before the next begins, so a killed run goes on
to the same bits.
"""

import contextlib
import time
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

_LABELS = {"learning": LEARNING, "tuning": TUNING}


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
    folder: Where every step is written, or None.
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
  with within():
    learned = hook_results.arrays_of_step(learning.start())
  losses: list[float] = []
  if folder and (saved := folder.read_steps(stage)):
    # Only leaves are on disk; the structure follows from options and model, which are
    # those of the start.
    leaves = [jnp.asarray(saved.arrays[key]) for key in sorted(saved.arrays)]
    structure = jax.tree.structure(learned)
    learned, losses = jax.tree.unflatten(structure, leaves), saved.losses
  # The process that writes removes a file which the others have to read first.
  processes.wait_for_all(mesh)
  if stage == "learning":
    report.has_learned(learning.steps * learning.sequences)
  tell = report.learning if stage == "learning" else report.tuning
  if len(losses) < learning.steps:
    tell(len(losses), learning.steps, None)
  start = time.perf_counter()
  while len(losses) < learning.steps:
    with within():
      learned, loss = hook_results.check_step(
        learning.step(learned, tuple(losses)), learned
      )
      if not np.isfinite(loss):
        raise FloatingPointRefusal(
          _LABELS[stage],
          expected="a finite loss",
          got=f"{loss} at step {len(losses) + 1} of {learning.steps}",
          mend=learning.mend,
        )
    losses.append(loss)
    if folder:
      # A step's time includes the write of the one before it.
      before, start = start, time.perf_counter()
      leaves = jax.tree.leaves(learned)
      named = {f"{number:06d}": leaf for number, leaf in enumerate(leaves)}
      folder.write_step(stage, named, losses, start - before, learning.sequences)
    tell(len(losses), learning.steps, loss)
  with within():
    return learning.finish(learned, losses)
