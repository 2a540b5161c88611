"""Measures the registered margins of a PTQ contract once, before any comparison.

Two effects blur the target. Strict-A4 predictions are chaotic: perturbed replicates of
one program differ, in perplexity and divergence each by an amount of its own. A small
text is also a sample: the damage by the initial program differs from window to window,
and a change below the standard error of its mean cannot be told from the choice of
windows. The larger effect sets the registered margin.
With the control `other_text`, luck of the text is an account of its own, and the margin
is the smallest gain that this control can confirm. Operator errors have no such noise;
their margin is a small fraction of the initial program's value.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.residual import OTHER_TEXT
from mxjax.discovery.core.task import Artifacts, Call, Status
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import (
  candidate,
  payload,
  phases,
  programs,
  references,
)
from mxjax.discovery.tasks.ptq.options import PtqOptions
from mxjax.discovery.tasks.ptq.task import PtqTask
from mxjax.errors import ValueRefusal
from mxjax.evaluation.measures.agreement import agreement
from mxjax.evaluation.measures.perplexity import perplexity, perturbed
from mxjax.numerics.realization.activation_quantizers import ActivationQuantizer

REPLICATES = 4
SPREADS = 2.0
"""The margin in standard deviations of the difference of two programs."""
OPERATOR_SHARE = 0.01
EVERY = 30.0
"""Seconds after which a measurement says again that it goes on."""
PAIRED = "gptq"
"""The program that the initial one is compared with."""


def completed(
  spec: Mapping[str, Any], start: str = "", *, tell: Callable[[str], Any]
) -> dict[str, Any]:
  """Returns the specification of any task, a `ptq` one with its measured margins.

  They are those of `start`, if that is a program of the library: a file's source would
  run outside the jail. `tell` gets a sentence before they are measured.
  """
  if spec["task"] != "ptq" or "margins" in spec:
    return dict(spec)
  return calibrated(spec, start if start in programs.NAMES else "", tell)


class _Steps:
  """Says what is measured, how long it took, and every `EVERY` seconds that it goes on.

  A step is a build of a program, or a text that is scored by one.
  """

  def __init__(self, tell: Callable[[str], Any], steps: list[str]) -> None:
    self._tell, self._steps, self._done = tell, steps, 0
    tell(
      "Before the first call, margins, thresholds and references of this contract are "
      f"measured, once, in {len(steps)} steps: {'; '.join(steps)}."
    )

  @contextlib.contextmanager
  def step(self) -> Iterator[None]:
    """Runs the next step and says how long it took."""
    name, begun, ended = self._steps[self._done], time.monotonic(), threading.Event()
    self._done += 1
    place = f"step {self._done} of {len(self._steps)}, {name}"

    def wait() -> None:
      while not ended.wait(EVERY):
        self._tell(f"{place}: still at it after {time.monotonic() - begun:.0f} s")

    teller = threading.Thread(target=wait, daemon=True)
    teller.start()
    try:
      yield
    finally:
      ended.set()
      teller.join()
    self._tell(f"{place}: {time.monotonic() - begun:.1f} s")


def calibrated(
  spec: Mapping[str, Any], start: str = "", tell: Callable[[str], Any] = lambda _: None
) -> dict[str, Any]:
  """Returns the specification completed with `margins`, `initial` and `references`.

  Runs the default program, or that of the library named by `start`, which are our own
  sources, in this process and measures its perplexity over perturbed replicates. The
  result becomes part of every execution identity, so it must not contain anything that
  differs between runs, such as a time. `tell` gets a sentence for each step, and one
  every `EVERY` seconds within it.
  """
  task = PtqTask(**{key: value for key, value in spec.items() if key != "task"})
  name = start or "the initial program"
  steps = _Steps(
    tell,
    [
      f"quantizing by {name}",
      "measuring it like a call",
      f"the noise of its predictions, by {REPLICATES} replicates",
      "the float model, and one of the two operands rounded",
      *([f"quantizing by {PAIRED} and comparing the two"] if task.tests_luck else []),
    ],
  )
  with steps.step():
    call, artifacts = _initial(task, start)
    _, operands = phases.Fit(task.options).run(call, artifacts, b"")
  with steps.step():
    initial = phases.Measure(task.options).run(call, artifacts, operands)[0]["values"]
  rounding = candidate.activation_rule(artifacts, call.computation.get("encode_act"))
  with steps.step():
    chaos, errors = _noise(task.options, operands, rounding)
  with steps.step():
    known = references.measured(task.options, operands, rounding, name)
  margins = {
    # The bound gives a margin to what is 0 on the initial program as well.
    name: OPERATOR_SHARE * max(abs(value), 1e-4)
    for name, value in initial.items()
    if name not in errors and not name.startswith("layer_")
  }
  if task.tests_luck:
    with steps.step():
      errors |= _paired_errors(task, operands, rounding)
  # What differs are two programs, each a mean over the task's replicates.
  spread = SPREADS * (2.0 / task.options.replicates) ** 0.5
  margins |= {
    # The objective on another text is as chaotic as on this one.
    name: max(spread * chaos.get(name, chaos[task.options.objective]), error)
    for name, error in errors.items()
  }
  return {**task.spec, "margins": margins, "initial": initial, "references": known}


def _initial(task: PtqTask, start: str) -> tuple[Call, Artifacts]:
  """Returns the initial program's call, and what it runs."""
  executor, defaults = LocalExecutor(task), task.interface.default_source()
  source = programs.source(start) if start else defaults
  program = candidate_source.admit(source, task.interface)
  traced = executor.trace(
    candidate_source.with_functions(source, defaults, replace=False)
  )
  if traced.status != Status.OK:
    raise ValueRefusal(
      "ptq",
      expected="an initial program that can be traced",
      got=f"one that is {traced.status} ({traced.detail})",
      mend="mend it",
    )
  call = Call(traced.computation, program.plan, {})
  return call.active(task.interface), executor.artifacts


def _noise(
  options: PtqOptions,
  operands: bytes,
  rounding: Callable[[Any, Any], ActivationQuantizer],
) -> tuple[dict[str, float], dict[str, float]]:
  """Measures the noise of the initial program's predictions.

  Returns, for the log perplexity and for the objective (the divergence, or for `fit3`
  the damage to the first text), the standard deviation over perturbed replicates, and
  the standard error over windows; that of the log perplexity is of the loss in excess
  of the float model's.
  """
  model, params = options.load()
  quantized = payload.to_params(payload.from_bytes(operands), params, model, rounding)
  tokens = options.tokens("measure")
  measured = perplexity(model, quantized, tokens, replicates=REPLICATES)
  deviation = lambda values: float(np.std(values, ddof=1))
  chaos = {"log_ppl": deviation(np.log(measured.values))}
  exact = perplexity(model, params, tokens)
  excess = np.subtract(measured.window_losses, exact.window_losses)
  samples = {"log_ppl": excess}
  if options.objective == "kl":
    outer = streams.outer_params(model, params)
    embedded = jax.eval_shape(model.embed, outer, jnp.asarray(tokens[:1]))
    dtype = jax.tree.leaves(embedded)[0].dtype
    # As in `perplexity`, the first replicate is the program itself.
    replicates = [quantized]
    replicates += [perturbed(quantized, seed, dtype) for seed in range(1, REPLICATES)]
    divergences = [
      agreement(model, params, each, tokens).divergence.mean(-1) for each in replicates
    ]
    samples["kl"] = divergences[0]
    chaos["kl"] = deviation([each.mean() for each in divergences])
  if options.objective == "fit3":
    # The damage of Eq. fit3, PPL_q / PPL_16 - 1, window by window: the losses are logs.
    samples["fit3"] = np.expm1(excess)
    chaos["fit3"] = chaos["log_ppl"]
  errors = {
    name: deviation(values) / len(values) ** 0.5 for name, values in samples.items()
  }
  return chaos, errors


def _paired_errors(
  task: PtqTask, operands: bytes, rounding: Callable[[Any, Any], ActivationQuantizer]
) -> dict[str, float]:
  """Measures how far the difference of two programs depends on the text.

  They are the initial one and GPTQ. Returns the standard error of its mean over the
  windows of the control `other_text`, which is the margin of the objective as well: a
  gain is worth that control if the control can confirm it.
  """
  options = task.options
  model, params = options.load()
  call, artifacts = _initial(task, PAIRED)
  _, others = phases.Fit(options).run(call, artifacts, b"")
  tokens = options.tokens("other")
  losses = []
  for each in (operands, others):
    quantized = payload.to_params(payload.from_bytes(each), params, model, rounding)
    if options.objective == "kl":
      losses.append(agreement(model, params, quantized, tokens).divergence.mean(-1))
    else:
      losses.append(perplexity(model, quantized, tokens).window_losses)
  difference = np.subtract(*losses)
  error = float(np.std(difference, ddof=1) / len(difference) ** 0.5)
  return {OTHER_TEXT: error, options.objective: error}
