"""The entrance of `quantize`: what a model must have, and how a Flax module gets in."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from mxjax import methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, Params
from mxjax.methods.by_rule import ByRule
from mxjax.methods.program import Program
from mxjax.numerics.contract import Contract
from mxjax.running.run_state import Result

MEMBERS = (
  *("num_layers", "projection_taps", "layer_name", "embed", "layer"),
  *("layer_with_taps", "logits"),
)
"""What a `CausalLanguageModel` must have."""


class Entered(NamedTuple):
  """What the pipeline takes; for a `FlaxModel` also its own params, and notes."""

  params: Params
  calib: Calibration
  program: Program
  contract: Contract
  own: Params | None = None
  notes: Mapping[str, Any] = {}


def check_model(params: Params, calib: Calibration, program: Program) -> None:
  """Checks that a model is a `CausalLanguageModel` with all that a program recovers.

  Raises:
    TypeError: Members are missing; the message names them.
    ValueError: Taps or a block of a recovery fit are missing; so does that message.
  """
  model: Any = calib.model
  if missing := [name for name in MEMBERS if not hasattr(model, name)]:
    raise TypeError(
      f"quantize: expected the members of CausalLanguageModel, got a "
      f"{type(model).__name__} without {', '.join(missing)}; wrap a Flax module of "
      "your own as mxjax.FlaxModel(module=...), or give the model these members."
    )
  if program.recover:
    _check_recovery(params, calib, program)


def _check_recovery(params: Params, calib: Calibration, program: Program) -> None:
  model, outer = calib.model, streams.outer_params(calib.model, params)
  layer = params[model.layer_name(0)]
  run = lambda ids: model.layer_with_taps(layer, model.embed(outer, ids))[1]
  found = set(jax.eval_shape(run, jax.ShapeDtypeStruct((1, 4), "int32")))
  lacking = []
  for fit in program.recover:
    lacks = [f"the tap {tap}" for tap in fit.taps if tap not in found]
    lacks += [f"the block {fit.block}"] if fit.block and fit.block not in layer else []
    lacking += [f"{fit.name} lacks {' and '.join(lacks)}"] if lacks else []
  if lacking:
    raise ValueError(
      f"quantize: expected in every layer what the recovery of {program.name} reads "
      f"({', '.join(fit.name for fit in program.recover)}), got taps "
      f"{', '.join(sorted(found))}: {'; '.join(lacking)}; add it, or pass "
      "dataclasses.replace(program, recover=...) with the fits that the model has."
    )


def enter(
  params: Params,
  calib: Calibration,
  program: Program,
  contract: Contract,
  **refused: Any,
) -> Entered:
  """Checks a model, or finds the linears of a `FlaxModel` and rearranges its params.

  Raises:
    TypeError: See `check_model`.
    ValueError: See there, and `flax_discovery.plan`; or an option or a part of a
      method needs a `CausalLanguageModel`.
  """
  model: Any = calib.model
  if not hasattr(model, "bound_to"):
    check_model(params, calib, program)
    return Entered(params, calib, program, contract)
  if given := [name for name, value in refused.items() if value is not None]:
    raise ValueError(
      f"quantize: expected no {' or '.join(given)} beside a FlaxModel, got one; only "
      "models with the members of CausalLanguageModel take it, so leave it out."
    )
  bound = model.bound_to(params, calib.tokens)
  program, unfit = _program(bound, program)
  notes = {"linears_left": bound.plan.left, "recovery_left_out": unfit}
  if unfit:
    warnings.warn(
      f"quantize: no recovery of {' or '.join(unfit)} is fitted, because it needs the "
      "values and gates of a decoder, which a FlaxModel does not name; the rest of the "
      "method is done.",
      stacklevel=4,
    )
  targets = tuple(name for _, name in bound.projection_taps)
  contract = dataclasses.replace(contract, targets=targets)
  calib = dataclasses.replace(calib, model=bound)
  return Entered(bound.split(params), calib, program, contract, params, notes)


def _program(bound: Any, default: Program) -> tuple[Program, list[str]]:
  """Returns the program of all rules, and the recovery fits that are left out."""
  by_method: dict[Any, Program] = {}
  keys = {}
  for name, method in bound.methods.items():
    keys[name] = key = method if isinstance(method, str | bool) else id(method)
    if key not in by_method:
      by_method[key] = default if isinstance(method, bool) else methods.get(method)
  programs = list(by_method.values())
  for one in programs:
    _check_program(one, bound.num_layers)
  unfit = sorted({fit.name for one in programs for fit in one.recover})
  kept = [dataclasses.replace(one, recover=()) for one in programs]
  if len(kept) == 1:
    return kept[0], unfit
  shared = {}
  for option in ("upstream", "staged"):
    values = [getattr(one, option) for one in kept]
    if len({*values}) > 1:
      named = [f"{p.name} with {v}" for p, v in zip(kept, values, strict=True)]
      raise ValueError(
        f"quantize: expected one value of `{option}` in the methods of all rules, got "
        f"{', '.join(named)}; choose one."
      )
    shared[option] = values[0]
  order = {key: place for place, key in enumerate(by_method)}
  choice = {name: order[key] for name, key in keys.items()}
  name = " and ".join(one.name for one in kept)
  return ByRule(name=name, programs=kept, choice=choice, **shared), unfit


def _check_program(program: Program, layers: int) -> None:
  """Checks that a program needs no more of the model than the inputs of linears."""
  obstacle = None
  if type(program).prepare is not Program.prepare:
    obstacle = "learns on or rewrites a decoder before it quantizes"
  elif program.tune is not None or program.weighting != "uniform":
    obstacle = "differentiates the predictions of tokens (`+tune`, `weighting=fisher`)"
  elif program.upstream == "quantized" and layers == 1:
    obstacle = (
      "shows the outputs of quantized layers, which FlaxModel(layers=...) names"
    )
  if obstacle:
    raise ValueError(
      f"quantize: the method {program.name} {obstacle}, expected one that needs only "
      "the inputs of each linear of a FlaxModel; choose another, such as gptq or hires."
    )


def leave(result: Result, entered: Entered) -> Result:
  """Rearranges the params of a finished run for a Flax module, and adds the notes."""
  model: Any = entered.calib.model
  if entered.own is None:
    return result
  preparation = {**result.record.preparation, **entered.notes}
  record = dataclasses.replace(result.record, preparation=preparation)
  return Result(model.join(result.params), record, entered.own)
