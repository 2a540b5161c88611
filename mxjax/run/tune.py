"""Tuning of a finished model on the divergence of its predictions, step by step."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mxjax import compilation
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Params
from mxjax.devices import execution
from mxjax.methods import scale_distillation
from mxjax.methods.program import Learning
from mxjax.methods.scale_distillation import PredictionDivergence, ScaleDistillation
from mxjax.numerics.mxfp4 import PAPER_RULES
from mxjax.run import steps
from mxjax.run.folder import RunFolder
from mxjax.run.progress import Report
from mxjax.run.setup import Setup


def optimizer(options: ScaleDistillation, steps: int) -> optax.GradientTransformation:
  """Returns Adam for a layer, with warm-up and a linear decay to zero over `steps`."""

  def adam(rate: float) -> optax.GradientTransformation:
    schedule = lambda step: options.rate_at(rate, step, steps)
    return optax.adam(schedule, b1=0.9, b2=0.95)

  # One rate for the factors of single linears, and one for those that a tap shares; one
  # for whole maps, and one for codes.
  labels = lambda layer: {
    part: jax.tree.map(lambda _, label=part: label, layer[part]) for part in layer
  }
  rates: Any = {
    "linears": adam(options.rate),
    "taps": adam(options.shared_rate),
    "maps": adam(options.map_rate),
    "codes": adam(options.code_rate),
  }
  return optax.multi_transform(rates, labels)


# In place: beside the old values, new ones of all layers would take as much again.
@compilation.jit(
  static_argnames=("options", "steps"), donate_argnames=("learned", "state")
)
def _update_layer(
  options: ScaleDistillation, steps: int, learned: Any, state: Any, gradient: Any
) -> tuple[Any, Any]:
  with jax.numpy_dtype_promotion("standard"):  # Optax mixes its counter with floats.
    updates, state = optimizer(options, steps).update(gradient, state, learned)
  return optax.apply_updates(learned, updates), state


def update(
  options: ScaleDistillation, steps: int, *trees: list[Any]
) -> tuple[list[Any], list[Any]]:
  """Moves what all layers have learned, each by the same compiled function.

  `trees` are what they have learned and the optimizer's states, whose arrays are given
  away, and the gradients.
  """
  updated = [
    execution.block_on_cpu(_update_layer(options, steps, *of_layer))
    for of_layer in zip(*trees, strict=True)
  ]
  return [learned for learned, _ in updated], [state for _, state in updated]


def distill_scales(
  setup: Setup, quantized: Params, folder: RunFolder | None, report: Report
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Learns what changes maps and codes of all quantized linears, and folds it in.

  Args:
    setup: The run's setup, whose program has options of scale distillation.
    quantized: The quantized model, on the primary device.
    folder: Where what was learned is written, or None.
    report: Is told of every step and its divergence.

  Returns:
    The layers with what they learned installed, by name, and the record.

  Raises:
    FloatingPointError: The divergence is not finite.
  """
  options, model = setup.program.tune, setup.model
  assert options is not None
  chunks = options.chunks(setup.calib.tokens)
  order = options.order(len(chunks))
  layers = {name: quantized[name] for name in setup.layers}
  objective = PredictionDivergence(model, PAPER_RULES)

  def start() -> tuple[Any, Any]:
    learned = options.initial(list(layers.values()), model)
    return learned, [optimizer(options, len(order)).init(layer) for layer in learned]

  @functools.cache
  def examples() -> list[tuple[jax.Array, jax.Array]]:
    # Once for all steps, and not at all if none is left. Hidden states of width d,
    # because logits of the vocabulary would take far more memory.
    return [
      *zip(chunks, streams.final_hiddens(model, setup.params, chunks), strict=True)
    ]

  def step(now: Any, losses: Sequence[float]) -> tuple[Any, float]:
    learned, state = now
    weight = jnp.asarray(np.float32(options.weight_of_labels(losses)))
    # The order is drawn beforehand, so that a resumed run goes on where it stood.
    of_step = order[len(losses)]
    seen = [gradients.Example(*examples()[chunk], weight) for chunk in of_step]
    result = gradients.gradients(objective, quantized, None, learned, seen)
    return update(options, len(order), learned, state, result.own), result.shown

  def finish(now: Any, losses: list[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    learned, _ = now
    tuned = {
      name: scale_distillation.install(layer, own, model)
      for (name, layer), own in zip(layers.items(), learned, strict=True)
    }
    told = {"divergence": losses, "order": order, **_changes(learned)}
    if options.code_rate:
      told["changed_codes_by_layer"] = [
        scale_distillation.changed_codes(layers[name], tuned[name], model)
        for name in layers
      ]
    return tuned, told

  learning = Learning(
    start=start,
    steps=len(order),
    step=step,
    finish=finish,
    mend="lower the rate, such as rate=0.001",
  )
  return steps.take(learning, "tuning", folder, report, setup.placement.mesh)


def _changes(learned: list[Any]) -> dict[str, Any]:
  """Returns the root mean square change of the factors by layer, for the report.

  Where maps are learned, also that of their entries.
  """
  size = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
  squares = lambda tree: sum(
    float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(tree)
  )
  change = lambda tree: (squares(tree) / max(size(tree), 1)) ** 0.5
  factors = [(layer["linears"], layer["taps"]) for layer in learned]
  moved = {
    "parameters": sum(map(size, learned)),
    "change_by_layer": [change(of_layer) for of_layer in factors],
  }
  if learned and "maps" in learned[0]:
    moved["map_change_by_layer"] = [change(layer["maps"]) for layer in learned]
  return moved
