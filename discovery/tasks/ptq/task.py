"""The PTQ task: quantizes a small real model under the frozen contract and measures it.

Its two phases run in two workers. `fit` holds float weights and calibration tokens and
turns a candidate's hooks into packed operands; `measure` holds the float model and the
evaluation text. The contract contains everything that determines an outcome, except the
program.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from typing_extensions import override

from mxjax.calibration.calibration import token_fingerprint
from mxjax.discovery.core import identity
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.interventions import Interventions
from mxjax.discovery.core.residual import OTHER_TEXT, Residual, Rival
from mxjax.discovery.core.task import Call, Defaults, Session
from mxjax.discovery.tasks.ptq import units
from mxjax.discovery.tasks.ptq.edit_templates import EDIT_TEMPLATES
from mxjax.discovery.tasks.ptq.interface import (
  DESCRIPTION,
  EXAMPLE,
  INTERFACE,
  OBSERVABLES,
  ONE_CODE,
  ONE_CODE_EXAMPLE,
  REGIMES,
  RESIDUALS,
  without_encode_act,
)
from mxjax.discovery.tasks.ptq.options import TEXTS, Objective, PtqOptions
from mxjax.discovery.tasks.ptq.phases import Fit, Measure
from mxjax.discovery.tasks.ptq.proxy import PROXY, Proxy
from mxjax.discovery.tasks.ptq.structure import interventions
from mxjax.errors import ValueRefusal
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.numerics.contract import PAPER_CONTRACT

OTHERS = ("holdout", "transfer")
"""Options that name other models; the task on one of them knows neither."""
OPEN_SHARE = 0.5
"""The error of both operands is open while it exceeds this fraction of the initial
program's value."""
PART_SHARE = 0.6
"""The same for every other residual, each of which is a part of that error.

What is open is addressed in the order of its excess over the threshold, so a round is
about the whole error first, and about a part of it where that stays behind.
"""
EVALUATOR_PACKAGES = (
  "mxjax.numerics",
  "mxjax.pallas_kernels",
  "mxjax.layers",
  "mxjax.models",
  "mxjax.devices",
  "mxjax.calibration",
  "mxjax.methods",
  "mxjax.run",
  "mxjax.evaluation.measures",
  "mxjax.discovery.sandbox",
  "mxjax.discovery.tasks",
)
"""Packages whose sources determine what an evaluator call measures."""


class PtqTask(Defaults):
  """A `mxjax.discovery.core.task.Task`, built from JSON options.

  The options contain margins and thresholds measured by `margins.calibrated`.
  """

  tells_seconds = True

  def __init__(self, **options: Any) -> None:
    """Takes the fields of `PtqOptions`.

    Raises:
      ValueError: An option is unknown, or the options are inconsistent.
    """
    known = {field.name for field in dataclasses.fields(PtqOptions)}
    if unknown := sorted(set(options) - known):
      raise ValueRefusal(
        "ptq",
        expected=f"options among {sorted(known)}",
        got=unknown,
        mend="correct their names",
      )
    self.options = PtqOptions(**options)
    frozen = self.options.frozen_hooks
    self.edit_templates = tuple(
      template for template in EDIT_TEMPLATES if not {*template.hooks} & {*frozen}
    )
    self.regimes = {
      stage: tuple(name for name in names if name not in frozen)
      for stage, names in REGIMES.items()
    }

  @functools.cached_property
  def interface(self) -> Interface:
    """The hooks, but those that the task freezes, at the sizes of its model."""
    left = INTERFACE.without(self.options.frozen_hooks)
    return dataclasses.replace(
      left,
      hooks=tuple(
        dataclasses.replace(hook, doc=self._worded(hook.doc)) for hook in left.hooks
      ),
      plan_docs={key: self._worded(doc) for key, doc in left.plan_docs.items()},
      sizes=self.options.sizes,
    )

  def _worded(self, text: str) -> str:
    """Returns a document without the hook that the task may have frozen."""
    return without_encode_act(text) if self.options.frozen_hooks else text

  @property
  def tests_luck(self) -> bool:
    """Whether there is a control that scores on another text."""
    return self.options.other_windows is not None

  @functools.cached_property
  def description(self) -> str:
    """What is quantized, and on how many tokens it is fitted and scored."""
    options, sizes = self.options, self.options.calibration
    rows = [f"{name} {each.rows}" for name, each in units.linears(options).items()]
    rule = f" {ONE_CODE}" if options.frozen_hooks else ""
    scored = options.tokens_scored["primary"]
    return (
      f"{self._worded(DESCRIPTION)}{rule} The model has {options.layer_count} "
      f"layers, and its linears so many rows (outputs): {', '.join(rows)}. A "
      f"candidate is fitted on {sizes[0]} calibration sequences of {sizes[1]} tokens, "
      f"and a primary run scores {scored} tokens of another text, in "
      f"{options.windows[0]} windows of {options.windows[1]}."
    )

  @functools.cached_property
  def observables(self) -> Mapping[str, str]:
    """What each observable means, of those that this task measures."""
    options = self.options
    # What only another objective, the proxy or another text has; what has a margin is
    # told in any case.
    absent = {*get_args(Objective)} - {"log_ppl", options.objective, *options.margins}
    if not options.proxy:
      absent |= {name for name in OBSERVABLES if name.startswith("proxy")}
    if not self._scores_other_text:
      absent |= {OTHER_TEXT}
    absent -= {*options.margins}
    return {k: self._worded(v) for k, v in OBSERVABLES.items() if k not in absent}

  @property
  def _scores_other_text(self) -> bool:
    return self.tests_luck and self.options.objective != "fit3"

  @functools.cached_property
  def interventions(self) -> Interventions:
    """The controls; one on another text only where the task has one."""
    known = interventions.without(self.options.frozen_hooks)
    return {
      kind: dataclasses.replace(each, doc=self._worded(each.doc))
      for kind, each in known.items()
      if kind != OTHER_TEXT or self._scores_other_text
    }

  @functools.cached_property
  def rivals_told(self) -> Sequence[str]:
    """Any map, and the luck of the text where it can be told."""
    lines = ["`any map would do` (1 call), where the edit changes what makes the map T"]
    if self._scores_other_text:
      calls = 2 * self.price({"kind": OTHER_TEXT})
      lines.append(
        f"`luck of this text` ({calls} calls, the parent's run included, which is paid "
        "once), for every edit"
      )
    return lines

  places = ("model", "transfer", *TEXTS)

  floors = {
    name: (0.0,)
    for name in OBSERVABLES
    if name.endswith(("_error", "contaminated")) or name == "kl"
  }

  @property
  def references(self) -> Mapping[str, float]:
    """The target of the float model, and with one of the two operands rounded."""
    return self.options.references

  @property
  def example(self) -> Mapping[str, Any]:
    """A whole answer to a first prompt."""
    return ONE_CODE_EXAMPLE if self.options.frozen_hooks else EXAMPLE

  @property
  def phases(self) -> Sequence[str]:
    """The two phases, or that of the proxy alone."""
    return ("proxy",) if self.options.proxy else ("fit", "measure")

  @property
  def target(self) -> str:
    """The objective of the options, or the proxy."""
    return PROXY if self.options.proxy else self.options.objective

  @property
  def spec(self) -> Mapping[str, Any]:
    """JSON from which `task.load` rebuilds the task."""
    return {"task": "ptq", **dataclasses.asdict(self.options)}

  @property
  def margins(self) -> Mapping[str, float]:
    """Registered margins, measured by `margins.calibrated`."""
    return self.options.margins

  @functools.cached_property
  def contract(self) -> Mapping[str, Any]:
    """Contract, weights, tokens and evaluator sources, each by content."""
    model, params = self.options.load()
    second = {}
    if self.target == "fit3":
      second["second"] = token_fingerprint(self.options.tokens("second"))
    if self.options.other_windows:
      second["other"] = token_fingerprint(self.options.tokens("other"))
    weights = [
      [jax.tree_util.keystr(path), identity.digest(np.asarray(leaf).tobytes())]
      for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    return {
      "contract": PAPER_CONTRACT.hash,
      "model": model.config.to_dict(),
      "weights": identity.digest(weights),
      "calibration": token_fingerprint(self.options.tokens("fit")),
      "evaluation": token_fingerprint(self.options.tokens("measure")),
      **second,
      "source": identity.source_digest(*EVALUATOR_PACKAGES),
    }

  def readable(self, phase: str) -> Sequence[str]:
    """Returns the model files and the phase's text."""
    return self.options.readable(phase)

  def open(self, phase: str) -> Session:
    """Loads the model and the phase's tokens."""
    return {"fit": Fit, "measure": Measure, "proxy": Proxy}[phase](self.options)

  def proxy(self) -> "PtqTask":
    """Returns the task whose calls measure a few blocks only; see `Proxy`."""
    return PtqTask(**{**dataclasses.asdict(self.options), "proxy": True})

  @override
  def refuses(self, intervention: Mapping[str, Any], own: Call, parent: Call) -> str:
    return interventions.refusal(intervention, own, parent, self.options)

  @override
  def rivals(self, own: Call, parent: Call) -> Sequence[Rival]:
    return interventions.rivals(own, parent, self.options)

  @override
  def units(self, plan: Mapping[str, Any]) -> Mapping[str, int]:
    return units.of_call(self.options, plan)

  def price(self, intervention: Mapping[str, Any]) -> int:
    """Returns the calls of a condition: its tokens in units of a primary run's."""
    if intervention.get("kind") != OTHER_TEXT:
      return 1
    scored = self.options.tokens_scored
    return max(1, math.ceil(scored["other"] / scored["primary"]))

  def ideal(self) -> float:
    """Returns the objective of the float model."""
    if self.target != "log_ppl":
      return 0.0
    model, params = self.options.load()
    return float(np.log(perplexity(model, params, self.options.tokens("measure")).mean))

  def holdout(self) -> "PtqTask | None":
    """Returns the task on the held-out model, or None if there is none."""
    return self._on("holdout")

  def transfer(self) -> "PtqTask | None":
    """Returns the task on the transfer-validation model, or None if there is none."""
    return self._on("transfer")

  def _on(self, which: str) -> "PtqTask | None":
    options = dataclasses.asdict(self.options)
    model, layers = options[which], options[f"{which}_layers"]
    if model is None and layers is None:
      return None
    others: dict[str, Any] = {
      f"{name}{end}": None for name in OTHERS for end in ("", "_layers")
    }
    # Controls run on the visible model only, so the others need no other text.
    others["holdout_windows"] = others["other_windows"] = None
    if which == "holdout":
      others["windows"] = options["holdout_windows"] or options["windows"]
    return PtqTask(**{**options, **others, "model": model, "layers": layers})

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Returns the observables above their share of the initial program's value."""
    share = lambda name: OPEN_SHARE if name == "operator_error" else PART_SHARE
    thresholds = {k: share(k) * v for k, v in self.options.initial.items()}
    return [
      Residual(program, name, values[name], thresholds[name])
      for name in RESIDUALS
      if name in thresholds and values[name] > thresholds[name]
    ]
