"""Who is quantized, on what, and how: one frozen value, `Setup`.

`Setup.of` makes and checks it; `prepared` returns the one that the run uses, in which a
method may have rewritten the model.
"""

import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mxjax import errors, methods
from mxjax.calibration import streams
from mxjax.calibration.calibration import (
  Calibration,
  CausalLanguageModel,
  Params,
  targets,
)
from mxjax.calibration.store import model_identity, params_digest
from mxjax.devices.placement import ONE_DEVICE, Placement
from mxjax.errors import TypeRefusal, ValueRefusal
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods import hook_results
from mxjax.methods.by_rule import ByRule
from mxjax.methods.program import Learning, Program
from mxjax.methods.program_source import source_digests
from mxjax.numerics import float_bits
from mxjax.numerics.contract import Contract
from mxjax.run import steps

_log = logging.getLogger(__name__)
_DIGESTING = threading.Lock()
"""Held while weights are digested, behind the work on the first layer or before it."""

MEMBERS = (
  "num_layers",
  "projection_taps",
  "layer_name",
  "embed",
  "layer",
  "layer_with_taps",
  "logits",
)
"""What a `CausalLanguageModel` must have."""


@runtime_checkable
class AnyModule(Protocol):
  """A module of any kind, such as a `FlaxModel`, whose linears are found by tracing."""

  def bound_to(self, params: Params, inputs: Any) -> Any:
    """Returns the module with its linears and layers found."""
    ...


@dataclasses.dataclass(frozen=True)
class Setup:
  """All that a run reads and never changes.

  Attributes:
    params: The float model of this run, which `Program.prepare` may have rewritten;
      reading a key brings its arrays to the primary device.
    calib: The model and its calibration tokens.
    program: The quantizer.
    contract: The number format and the target linears.
    placement: The devices.
    chunk: Sequences that go through a layer together.
    probe: Whether each linear is measured for the record.
    store: The folder of statistics that runs on the same model and tokens share.
    learned: What `Program.prepare` learned, by path of a linear.
    preparation: The record of `Program.prepare`, and notes about a `FlaxModel`.
    own: Params of a `FlaxModel` as its author has them; else None.
  """

  params: Params
  calib: Calibration
  program: Program
  contract: Contract
  placement: Placement = ONE_DEVICE
  chunk: int = 1
  probe: bool = True
  store: str | os.PathLike[str] | None = None
  learned: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  preparation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  own: Params | None = None

  @classmethod
  def of(
    cls,
    params: Params,
    calib: Calibration,
    method: str | Program,
    contract: Contract,
    *,
    chunk: int = 1,
    mesh: Mesh | None = None,
    probe: bool = True,
    store: str | os.PathLike[str] | None = None,
    into: Any = None,
  ) -> "Setup":
    """Checks everything that can be checked before any work.

    For a `FlaxModel` it finds the linears and rearranges the params. `into` is only
    checked; the others are the fields.

    Raises:
      TypeError: The model lacks members of `CausalLanguageModel`.
      ValueError: The method is unknown; the model lacks a target or what a recovery fit
        reads; a weight cannot be quantized; sequences do not divide over the mesh; or
        options exclude each other.
    """
    if mesh is not None and store is not None:
      raise ValueRefusal(
        "quantize",
        expected="a store or a mesh",
        got="both, but what a store holds was computed by one device",
        mend="leave one of them out",
      )
    _check_types(params, calib, method, contract)
    if into is params:
      raise ValueRefusal(
        "quantize",
        expected="a mapping of its own for into",
        got="the params that are quantized, with which the result is compared",
        mend="pass an empty dict or another LayerStore",
      )
    if stale := sorted(map(str, set(into or ()) - set(params))):
      raise ValueRefusal(
        "quantize",
        expected="an empty mapping for into, or one with keys of this model alone",
        got=f"{', '.join(stale)}, which the model has not",
        mend="remove these keys, or pass an empty dict or another LayerStore",
      )
    placement, program = Placement.of(mesh), methods.get(method)
    if contract.activations != "mxfp4" and contract != program.under(contract):
      raise ValueRefusal(
        "quantize",
        expected="a program whose inputs stay as they are, as in the contract",
        got=f"{program.name}, which rounds them",
        mend="choose activations=float in the method, such as gptq:activations=float, "
        "which brings its contract along",
      )
    setup = cls(params, calib, program, contract, placement, probe=probe, store=store)
    if isinstance(calib.model, AnyModule):
      options = {"store": store, "into": into, "mesh": mesh}
      if given := [name for name, value in options.items() if value is not None]:
        raise ValueRefusal(
          "quantize",
          expected="beside a FlaxModel only what needs no CausalLanguageModel",
          got=" and ".join(given),
          mend="leave it out",
        )
      # It replaces params, targets and program, which all checks below read.
      setup = _with_linears_found(setup, calib.model)
    else:
      _check_model(setup)
    on_primary = placement.on_primary(setup.params)
    chunk = placement.chunk_size(calib.count, chunk)
    setup = dataclasses.replace(
      setup,
      params=on_primary,
      chunk=chunk,
      contract=setup.program.under(setup.contract),
    )
    # First what model and contract alone decide: `_check_weights` reads every weight,
    # perhaps from disk.
    if setup.program.tune:
      setup.program.tune.check_reach(calib.tokens, program.name)
    _check_targets(setup)
    _check_weights(setup)
    _check_description(program)
    return setup

  @property
  def model(self) -> CausalLanguageModel:
    """The model, used only to measure."""
    return self.calib.model

  @functools.cached_property
  def layers(self) -> list[str]:
    """The keys of the decoder layers in the params, in order."""
    return [self.model.layer_name(index) for index in range(self.model.num_layers)]

  @functools.cached_property
  def targets(self) -> list[tuple[str, str]]:
    """The target linears of a layer as (sublayer, name), in forward order."""
    return targets(self.model, self.contract)

  @property
  def outer(self) -> dict[str, Any]:
    """The params outside the layers: embedding, final norm, head."""
    return streams.outer_params(self.model, self.params)

  def identity(self) -> dict[str, Any]:
    """Returns what determines the result and must be equal to resume a run.

    It is JSON-ready, and reads every weight.
    """
    return {**self.identity_but_weights(), "weights": self.weights_digest}

  def identity_but_weights(self) -> dict[str, Any]:
    """Returns the part of `identity` that reads no weight."""
    # Two classes can describe themselves by the same name and options and compute
    # otherwise.
    kind = type(self.program)
    return {
      "program": dict(self.program.describe()),
      "program class": f"{kind.__module__}.{kind.__qualname__}",
      "source of": source_digests(self.program),
      "contract": self.contract.hash,
      "calibration": self.data(),
      "model": model_identity(self.model, self.params, self.calib.tokens),
    }

  @property
  def weights_digest(self) -> str:
    """The SHA-256 of the float params, computed once, when it is first read."""
    # A cached property lets two threads compute since Python 3.12.
    with _DIGESTING:
      return self._weights_digest

  @functools.cached_property
  def _weights_digest(self) -> str:
    return params_digest(self.params)

  def data(self) -> dict[str, Any]:
    """Describes the calibration tokens, JSON-ready."""
    return {"fingerprint": self.calib.fingerprint, "shape": self.calib.shape}

  def prepared(self, folder: Any | None, report: Any) -> "Setup":
    """Returns the setup after `Program.prepare`, of whose steps `report` is told.

    A run folder keeps what was prepared, so that a resumed run reads it.
    """
    saved, result = folder.read_prepared() if folder else None, None
    if folder and saved:
      rewritten, learned, record = saved
      report.has_learned(folder.learned_sequences)
    else:
      made = result = self.program.prepare(self.params, self.calib, self.contract)
      if isinstance(made, Learning):
        with errors.within("prepare"):
          hook_results.check_learning(made)
        mesh = self.placement.mesh
        made = steps.take(made, "learning", folder, report, mesh)
      hook_results.check_prepared(self.program, made)
      learned, record = made.learned, dict(made.record)
      # By identity: a hook that changes nothing hands back what it got, and then no
      # model is written.
      rewritten = None if made.params is self.params else made.params
    found = dataclasses.replace(
      self,
      params=self.params if rewritten is None else self.placement.on_primary(rewritten),
      learned=learned,
      preparation={**self.preparation, **record},
    )
    if rewritten is None and self.store is not None:
      # Past the frozen dataclass, into the place where `cached_property` looks;
      # `replace` does not copy it.
      vars(found)["_weights_digest"] = self.weights_digest  # Of the same arrays.
    if rewritten is not None and hook_results.is_own(self.program, "prepare"):
      with errors.within("prepare"):
        _check_layers(found)
        _check_weights(found)
    # A method that learns nothing leaves no file to check on a resume.
    has_made = rewritten is not None or learned or isinstance(result, Learning)
    if folder and not saved and has_made:
      folder.write_prepared(rewritten, learned, record)
    return found

  def joined(self, quantized: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Returns quantized params as their author has them."""
    model: Any = self.model
    return quantized if self.own is None else model.join(quantized)

  @property
  def reference(self) -> Params:
    """The float params to compare with, as their author has them."""
    return self.params if self.own is None else self.own


def _check_model(setup: Setup) -> None:
  """Checks that a model has what the pipeline and the program's recovery read."""
  model: Any = setup.model
  if missing := [name for name in MEMBERS if not hasattr(model, name)]:
    raise TypeRefusal(
      "quantize",
      expected="the members of CausalLanguageModel",
      got=f"a {type(model).__name__} without {', '.join(missing)}",
      mend="wrap a Flax module of your own as mxjax.FlaxModel(module=...), or give the "
      "model these members",
    )
  _check_layers(setup)
  program = setup.program
  if not program.recover:
    return
  layer, outer = setup.params[model.layer_name(0)], setup.outer
  # Traced and not run. Four tokens are the shortest sequence of a calibration.
  run = lambda ids: model.layer_with_taps(layer, model.embed(outer, ids))[1]
  found = set(jax.eval_shape(run, jax.ShapeDtypeStruct((1, 4), "int32")))
  lacking = []
  for fit in program.recover:
    lacks = [f"the tap {tap}" for tap in fit.taps if tap not in found]
    lacks += (
      [f"the sublayer {fit.sublayer}"]
      if fit.sublayer and fit.sublayer not in layer
      else []
    )
    lacking += [f"{fit.name} lacks {' and '.join(lacks)}"] if lacks else []
  if lacking:
    raise ValueRefusal(
      "quantize",
      expected=f"in the first layer what the recovery of {program.name} reads "
      f"({', '.join(fit.name for fit in program.recover)})",
      got=f"taps {', '.join(sorted(found))}: {', '.join(lacking)}",
      mend="add it, or pass dataclasses.replace(program, recover=...) with the fits "
      "that the model has",
    )


def _check_description(program: Program) -> None:
  """Checks that results, run folders and checkpoints can say what the program is."""
  try:
    described = dict(program.describe())
    # Python would write NaN and Infinity, which are no JSON.
    json.dumps(described, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise TypeRefusal(
      f"describe of {program.name}",
      expected="name, recover and options that JSON can say",
      got=f"what it cannot: {error}",
      mend="override describe to convert the fields that are no texts, numbers, lists "
      "or dicts",
    ) from error


def _check_types(params: Any, calib: Any, method: Any, contract: Any) -> None:
  """Checks what kinds of objects the arguments are; calls swap and forget them."""
  for name, given, kinds, mend in (
    ("params", params, Mapping, "pass the model's params, a nested dict of arrays"),
    ("calib", calib, Calibration, "pass mxjax.Calibration(model, tokens)"),
    ("method", method, str | Program, "pass a name, such as 'hires', or a Program"),
    ("contract", contract, Contract, "pass mxjax.Contract(...), or leave it out"),
  ):
    if not isinstance(given, kinds):
      wanted = getattr(kinds, "__name__", "str or Program")
      raise TypeRefusal(
        "quantize", expected=f"{name}: {wanted}", got=type(given).__name__, mend=mend
      )


def _check_layers(setup: Setup) -> None:
  """Checks that the params have every layer of the model."""
  if missing := [name for name in setup.layers if name not in setup.params]:
    # The variables of a Flax module, in place of its params.
    wrapped = set(setup.params) == {"params"}
    raise ValueRefusal(
      "quantize",
      expected="params of every layer of the model",
      got=f"none of {', '.join(missing)}",
      mend="pass params['params']" if wrapped else "pass the params of this model",
    )


def _check_targets(setup: Setup) -> None:
  """Checks that the model has every projection that the contract names, and one."""
  model, contract = setup.model, setup.contract
  # Each once, in forward order.
  names = list(dict.fromkeys(name for _, name in model.projection_taps))
  missing = [name for name in contract.targets if name not in names]
  if missing or not contract.targets or not model.num_layers:
    raise ValueRefusal(
      "quantize",
      expected=f"each of Contract.targets ({', '.join(contract.targets)}) among the "
      f"projections of the model's {model.num_layers} layers "
      f"({', '.join(names) or 'none'})",
      got=f"no {', '.join(missing) or 'target'}",
      mend="pass contract=mxjax.Contract(targets=...) with the projections to quantize",
    )


def _check_weights(setup: Setup) -> None:
  """Checks every target weight and reports all problems at once."""
  complaints, size = [], setup.contract.block_size
  for layer_name in setup.layers:
    layer = setup.params[layer_name]
    for sublayer, name in setup.targets:
      weight = layer.get(sublayer, {}).get(name, {}).get("weight")
      path = f"{layer_name}/{sublayer}/{name}"
      if weight is None:
        complaints.append(f"{path} without a weight")
        continue
      if not isinstance(weight, (jax.Array, np.ndarray)):
        is_quantized = isinstance(weight, QuantizedLinear)
        kind = "already quantized" if is_quantized else f"a {type(weight).__name__}"
        complaints.append(f"{path}, {kind}")
        continue
      if weight.ndim < 2 or not jnp.issubdtype(weight.dtype, jnp.floating):
        complaints.append(f"{path}, {weight.dtype} {list(weight.shape)}")
        continue
      if weight.shape[-1] % size:
        complaints.append(f"{path} of input width {weight.shape[-1]}")
      if bad := int(float_bits.count_not_finite(weight)):
        complaints.append(f"{path} with {bad} NaN or inf of {weight.size} weights")
  if complaints:
    raise ValueRefusal(
      "quantize",
      expected="of every target a float weight, finite, with an input width that is a "
      f"multiple of {size}",
      got=", ".join(complaints),
      mend="mend the checkpoint or leave these projections out of Contract.targets",
    )


def _with_linears_found(setup: Setup, model: AnyModule) -> Setup:
  """Returns the setup of a module whose linears and layers are found by tracing."""
  bound = model.bound_to(setup.params, setup.calib.tokens)
  program, unfit = _program_of_rules(bound, setup.program)
  if unfit:
    _log.warning(
      "quantize: no recovery of %s is fitted, because it needs the values and gates of "
      "a decoder, which a FlaxModel does not name; the rest of the method is done.",
      " or ".join(unfit),
    )
  names = tuple(name for _, name in bound.projection_taps)
  return dataclasses.replace(
    setup,
    params=bound.split(setup.params),
    calib=dataclasses.replace(setup.calib, model=bound),
    program=program,
    contract=dataclasses.replace(setup.contract, targets=names),
    preparation={"linears_left": bound.plan.left, "recovery_left_out": unfit},
    own=setup.params,
  )


def _program_of_rules(bound: Any, default: Program) -> tuple[Program, list[str]]:
  """Returns the program of all rules, and the recovery fits that are left out."""
  by_method: dict[Any, Program] = {}
  keys = {}
  for name, method in bound.methods.items():
    # A `Program` of the user's need not be hashable; True stands for the method given
    # to `quantize`.
    keys[name] = key = method if isinstance(method, str | bool) else id(method)
    if key not in by_method:
      by_method[key] = default if isinstance(method, bool) else methods.get(method)
  programs = list(by_method.values())
  for program in programs:
    obstacle = None
    # Overridden, so that it would read a decoder's params.
    if type(program).prepare is not Program.prepare:
      obstacle = "learns on or rewrites a decoder before it quantizes"
    elif program.tune is not None or program.weighting != "uniform":
      obstacle = (
        "differentiates the predictions of tokens (`+tune`, `weighting=fisher`)"
      )
    if obstacle:
      raise ValueRefusal(
        "quantize",
        expected="a method that needs only the inputs of each linear of a FlaxModel",
        got=f"{program.name}, which {obstacle}",
        mend="choose another, such as gptq or hires",
      )
  if len({program.activations for program in programs}) > 1:
    raise ValueRefusal(
      "quantize",
      expected="methods that all round their inputs, or none, under one contract",
      got=", ".join(
        f"{one.name} with activations={one.activations}" for one in programs
      ),
      mend="choose the same activations for all of them",
    )
  unfit = sorted({fit.name for program in programs for fit in program.recover})
  # A fit needs values and gates of a decoder, which a module of another kind does not
  # name.
  kept = [dataclasses.replace(program, recover=()) for program in programs]
  if len(kept) == 1:
    return kept[0], unfit
  order = {key: number for number, key in enumerate(by_method)}
  choice = {name: order[key] for name, key in keys.items()}
  name = " and ".join(program.name for program in kept)
  found = ByRule(
    name=name, programs=kept, choice=choice, activations=programs[0].activations
  )
  return found, unfit
