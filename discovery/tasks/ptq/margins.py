"""What is measured once for a PTQ contract, before any comparison.

Two things blur the target. Strict-A4 perplexity is chaotic: perturbed replicates of one
program differ. And a small text is a sample: the damage that the initial program does
differs from window to window, and a change below the standard error of its mean cannot
be told from the choice of windows. The larger of the two is the registered margin.
Operator errors have no such noise; their margin is a small share of the initial
program's.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import candidate, phases
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.evaluation.measures.perplexity import perplexity

REPLICATES = 4
SPREADS = 2.0
"""The margin in standard deviations of the difference of two programs."""
OPERATOR_SHARE = 0.01


def calibrated(spec: Mapping[str, Any]) -> dict[str, Any]:
  """The specification with `margins` and `initial` measured.

  Runs the initial program, our own source, in this process, and measures its
  perplexity over perturbed replicates.

  Args:
    spec: Options of the PTQ task.

  Returns:
    The completed specification. It becomes part of every execution identity, so
    nothing that differs from run to run, such as a time, may be in it.
  """
  options = {key: value for key, value in spec.items() if key != "task"}
  task = ptq.PtqTask(**options)
  bench = LocalExecutor(task)
  plan = task.interface.default_plan
  traced = bench.trace(task.interface.default_source())
  active = {h.name for h in task.interface.hooks if h.is_active(plan)}
  hooks = {k: v for k, v in traced.computation.items() if k in active}
  call = Call(hooks, plan, {})
  outcomes: list[Outcome] = []
  bench.run([call], lambda index, outcome, seconds: outcomes.append(outcome))
  first = outcomes[0]
  if first.status != Status.OK:
    raise ValueError(f"ptq: the initial program ended {first.status}: {first.detail}")
  spread, sampling = _noise(task, call)
  margins = {
    name: OPERATOR_SHARE * max(abs(value), 1e-4)
    for name, value in first.values.items()
    if name != task.target and not name.startswith("layer_")
  }
  # Two programs, each a mean over the task's replicates.
  noise = spread * (2.0 / task.replicates) ** 0.5
  margins[task.target] = max(SPREADS * noise, sampling)
  return {
    **task.spec,
    "margins": margins,
    "initial": dict(first.values),
  }


def _noise(task: ptq.PtqTask, call: Call) -> tuple[float, float]:
  """What blurs the initial program's log perplexity.

  Returns:
    The standard deviation over perturbed replicates, and the standard error over
    windows of its excess over the float model, window by window.
  """
  fit = phases.Fit(task)
  model, params = task.loaded()
  _, payload = fit.run(call, _NoArtifacts(), b"")
  quantized = phases.unpack(payload, params, model, lambda: None)
  tokens = task.tokens("measure")
  measured = perplexity(model, quantized, tokens, replicates=REPLICATES)
  exact = perplexity(model, params, tokens)
  excess = np.subtract(measured.window_losses, exact.window_losses)
  error = np.std(excess, ddof=1) / len(excess) ** 0.5
  return float(np.std(np.log(measured.values), ddof=1)), float(error)


class _NoArtifacts:
  """The initial program runs native code only."""

  def unit(self, computation: str) -> candidate.Function:
    """Never asked."""
    raise KeyError(computation)

  def batched(self, computation: str) -> candidate.Function:
    """Never asked."""
    raise KeyError(computation)
