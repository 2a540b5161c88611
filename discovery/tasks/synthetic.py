"""What the synthetic worlds share: sites with a hook each, on rows of eight numbers."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from mxjax.discovery.core import identity
from mxjax.discovery.core.interface import Aval, Hook, Interface
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Artifacts, Call

WIDTH = 8
MARGIN, CHAOS = 0.004, 0.001
"""The margin of the loss is four times the chaos."""


def site_interface(
  sites: Sequence[str], plan: Mapping[str, tuple[Any, ...]]
) -> Interface:
  """Returns an interface with one hook per site, float32 `[8]` to `[8]`."""
  row = Aval("float32", (WIDTH,))
  hooks = tuple(
    Hook(
      name=site,
      arguments={"x": row},
      outputs=(row,),
      batched=("x",),
      default=f"def {site}(x):\n  return x\n",
      doc=f"What is done at {site}; the default does nothing.",
    )
    for site in sites
  )
  return Interface(hooks=hooks, plan=plan)


def margins(sites: Sequence[str]) -> Mapping[str, float]:
  """Returns the margins of the loss and of every site's excess, exact to 0.02."""
  return {"loss": MARGIN} | {f"excess_{site}": 0.02 for site in sites}


class Synthetic:
  """A landscape over the sites' hooks; see `mxjax.discovery.core.task.Task`.

  A world says what a change of the rows amounts to, and what follows from it.
  """

  target = "loss"
  phases: Sequence[str] = ("measure",)
  sites: ClassVar[Sequence[str]]
  name: ClassVar[str]
  rows: ClassVar[int]
  threshold: ClassVar[float]

  def __init__(self, seed: int = 0, transfer: int = 0) -> None:
    """Draws the fixed rows; `transfer` above 0 is a held-out form."""
    self._seed, self._transfer = seed, transfer
    generator = np.random.default_rng(1234)
    self._inputs = generator.standard_normal((self.rows, WIDTH)).astype(np.float32)
    self._known: dict[str, tuple[np.ndarray, str]] = {}

  def _amounts(self, change: np.ndarray) -> np.ndarray:
    """Decomposes what a hook adds to the rows, float64 `[rows, 8]`."""
    raise NotImplementedError

  def _values(
    self, done: dict[str, np.ndarray], call: Call, artifacts: Artifacts
  ) -> dict[str, float]:
    """Returns the observables, without chaos, of the amounts done at every site."""
    raise NotImplementedError

  @staticmethod
  def _digest(result: np.ndarray) -> str:
    return hashlib.sha256(result.tobytes()).hexdigest()[:16]

  @property
  def spec(self) -> Mapping[str, Any]:
    """See `Task`."""
    return {"task": self.name, "seed": self._seed, "transfer": self._transfer}

  def readable(self, phase: str) -> Sequence[str]:
    """Returns no files."""
    del phase
    return ()

  def open(self, phase: str) -> Self:
    """Returns the world, which is its own session."""
    del phase
    return self

  def holdout(self) -> Self:
    """Returns the same truth with other magnitudes and another draw of the noise."""
    return type(self)(self._seed, self._transfer + 1)

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Returns the sites whose excess is above the threshold."""
    return [
      Residual(program, name, values[name], self.threshold, (site,))
      for site in self.sites
      if values[name := f"excess_{site}"] > self.threshold
    ]

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs every site's hook on the fixed rows and evaluates the landscape."""
    del before
    done, outputs = {}, {}
    for site in self.sites:
      done[site], outputs[site] = self._behaviour(call.computation[site], artifacts)
    values = self._values(done, call, artifacts)
    noise = identity.draw(self._seed, self._transfer, sorted(outputs.items()), "chaos")
    values["loss"] += CHAOS * (2 * noise - 1)
    return {"values": values, "outputs": outputs}, b""

  def _behaviour(
    self, computation: str, artifacts: Artifacts
  ) -> tuple[np.ndarray, str]:
    """Returns what a hook does, decomposed, and a digest of its result."""
    if computation not in self._known:
      result = np.asarray(jax.jit(artifacts.batched(computation))(self._inputs)[0])
      if not np.isfinite(result).all():
        raise FloatingPointError(f"{self.name}: a hook returned NaN or inf.")
      change = (result - self._inputs).astype(np.float64)
      self._known[computation] = self._amounts(change), self._digest(result)
    return self._known[computation]
