"""A discovery task of your own: search for a filter that removes noise from rows."""

import pathlib
import tempfile

import numpy as np

from mxjax.discovery.core import edit_templates, interface, residual, task
from mxjax.discovery.search import runs

ROW = interface.Aval("float32", (16,))
SMOOTH = "def clean(x):\n  return x + (jnp.roll(x, 1) + jnp.roll(x, -1) - 2 * x) / 4\n"
EDITS = {"smooth": SMOOTH, "flip": "def clean(x):\n  return x[::-1]\n"}
YES = residual.Explanation("acts", "it removes noise", {"primary": {"loss": "down"}})
NO = residual.Explanation("blurs", "the signal goes too", {"primary": {"loss": "up"}})
WHY = dict(hooks=("clean",), residual="loss", explanations=(YES, NO), controls=())


class Denoise(task.Defaults):
  arrays = {"arguments": {"x": ROW}, "outputs": (ROW,), "batched": ("x",)}
  told = {"name": "clean", "doc": "One noisy row, cleaned."}
  hook = interface.Hook(default="def clean(x):\n  return x\n", **told, **arrays)
  interface = interface.Interface(hooks=(hook,))
  edit_templates = [
    edit_templates.EditTemplate(id=k, template=v, **WHY) for k, v in EDITS.items()
  ]
  # what a language model would be told
  description = "Rows of sixteen samples of a sine with noise, to be cleaned."
  observables = {"loss": "mean squared error, in squared units of a sample"}
  target, margins = "loss", {"loss": 1e-3}
  holdout = lambda self: Denoise(self.spec["seed"] + 100)

  def __init__(self, seed=0):
    self.spec = {"task": f"{__name__}:Denoise", "seed": seed}
    self.contract = {"seed": seed}  # what fixes an outcome beside the program
    random = np.random.default_rng(seed)
    self.signal = np.sin(random.uniform(0, 6, (64, 1)) + np.arange(16) / 3)
    self.rows = np.float32(random.normal(self.signal, 0.5))

  def residuals(self, program, values):  # the open questions about a program
    return [residual.Residual(program, "loss", values["loss"], 0.01)]

  def run(self, call, artifacts, payload):  # one call; outputs tell what changed
    cleaned = np.asarray(artifacts.batched(call.computation["clean"])(self.rows)[0])
    values = {"loss": float(np.square(cleaned - self.signal).mean())}
    return {"values": values, "outputs": {"clean": str(np.square(cleaned).sum())}}, b""


def main(folder=None, budget=8):
  run = pathlib.Path(folder or tempfile.mkdtemp()) / "run"
  options = {"config": {"budget": budget}, "sandbox": "off", "holdout": "off"}
  made = runs.RunOptions(task=Denoise().spec, **options)
  runs.write_options(run, made)
  return runs.run(run, trusted=runs.Trusted.own(made))


if __name__ == "__main__":
  print(main().source)
