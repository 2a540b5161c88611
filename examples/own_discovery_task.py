"""A discovery task of your own: search for a filter that removes noise from rows."""

import pathlib
import tempfile

import jax
import numpy as np

from mxjax.discovery.core.edit_templates import EditTemplate
from mxjax.discovery.core.interface import Aval, Hook, Interface
from mxjax.discovery.core.residual import Control, Explanation, Residual
from mxjax.discovery.search import runs

ROW = Aval("float32", (16,))
NOTHING = "def clean(x):\n  return x\n"
SMOOTH = "def clean(x):\n  return x + (jnp.roll(x, 1) + jnp.roll(x, -1) - 2 * x) / 4\n"
FLIP = "def clean(x):\n  return x[::-1]\n"
# Two accounts of why an edit helps, and a control that may tell them apart.
ACTS = Explanation("acts", "it removes noise", {"primary": {"loss": "down"}})
IDLE = Explanation("idle", "it does nothing", {"primary": {"loss": "same"}})
HALF = Control("half", {"kind": "half"}, statement="half of the edit")


def edit(name, template):
  about = {"residual": "noise", "explanations": (ACTS, IDLE), "controls": (HALF,)}
  return EditTemplate(id=name, hooks=("clean",), template=template, **about)


class Denoise:
  what = {"arguments": {"x": ROW}, "outputs": (ROW,), "batched": ("x",)}
  hooks = (Hook(name="clean", default=NOTHING, **what),)
  interface = Interface(hooks=hooks, plan={"unused": (False,)})
  edit_templates = (edit("smooth", SMOOTH), edit("flip", FLIP))
  interventions, regimes = {"half": "half of the edit"}, {"Filter": ("clean",)}
  target, margins = "loss", {"loss": 1e-3, "noise": 1e-3}
  phases = ("measure",)

  def __init__(self, seed=0):
    self.spec = {"task": f"{__name__}:Denoise", "seed": seed}
    self.contract = {"seed": seed}  # what fixes an outcome beside the program
    random = np.random.default_rng(seed)
    self.signal = np.sin(random.uniform(0, 6, (64, 1)) + np.arange(16) / 3)
    self.rows = np.float32(self.signal + random.normal(0, 0.5, self.signal.shape))

  readable = lambda self, phase: ()  # files that a worker may read
  open = lambda self, phase: self  # loads what a phase needs
  ideal = lambda self: 0.0
  holdout = lambda self: Denoise(self.spec["seed"] + 100)

  def residuals(self, program, values):
    """The open questions about a program: is there noise left to remove?"""
    return [Residual(program, "noise", values["noise"], 0.01, ("clean",))]

  def run(self, call, artifacts, payload):
    """One evaluator call: the hook on all rows, and the error of what it returns."""
    cleaned = jax.jit(artifacts.batched(call.computation["clean"]))(self.rows)[0]
    share = 0.5 if call.intervention.get("kind") == "half" else 1.0
    estimate = self.rows + share * (np.asarray(cleaned) - self.rows)
    loss = float(np.square(estimate - self.signal).mean())
    outputs = {"clean": str(np.square(cleaned).sum())}  # tells if the hook changed
    return {"values": {"loss": loss, "noise": loss}, "outputs": outputs}, b""


def main(folder=None, budget=8):
  run = pathlib.Path(folder or tempfile.mkdtemp()) / "run"
  task, config = {"task": f"{__name__}:Denoise"}, {"budget": budget}
  off = {"sandbox": "off", "holdout": "off"}
  runs.write_options(run, runs.RunOptions(task=task, config=config, **off))
  champion = runs.run(run)
  print(champion.source, champion.values)
  return champion


if __name__ == "__main__":
  main()
