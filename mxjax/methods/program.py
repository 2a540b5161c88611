"""The `Program` base class: the hooks that define a PTQ method, run by one pipeline."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from mxjax import compilation
from mxjax.calibration.calibration import Calibration, Params
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods import hook_results
from mxjax.methods.recovery import RecoveryFit
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import Activations, Contract
from mxjax.numerics.realization import activation_quantizers, gptq
from mxjax.numerics.shaping import input_maps
from mxjax.numerics.shaping.input_maps import InputMap

Record = Mapping[str, Any]
"""What a hook tells of its work for the report: JSON-ready values by name."""


class Shaping(NamedTuple):
  """Result of `shape`: the input map, or None for native coordinates."""

  input_map: InputMap | None
  record: Record = {}


class Realization(NamedTuple):
  """Result of `quantize_weight`: legal codes in the map's coordinates and the A4 rule.

  `correction`, `[blocks, 32, 32]`, multiplies mapped inputs if it is given.
  """

  weight: gptq.Reconstruction
  rounding: activation_quantizers.ActivationQuantizer
  correction: jax.Array | None = None
  record: Record = {}


class LinearResult(NamedTuple):
  """Result of `quantize_linear`: the leaf that replaces a weight, and all records."""

  leaf: QuantizedLinear
  record: Record = {}


class Prepared(NamedTuple):
  """Result of `prepare`: the float model of this run, and what was learned.

  Operator error is measured against `params`. Hooks get `learned`, keyed by path such
  as `layers_0/self_attn/q_proj`, as `inputs.learned`; `record` is JSON for the report.
  """

  params: Params
  learned: Mapping[str, Any] = {}
  record: Mapping[str, Any] = {}


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning(Generic[T]):
  """What a program learns step by step; `prepare` returns one if it learns for long.

  The pipeline takes the steps. It tells each to the caller of the run, and a run folder
  keeps what was learned last, so that a killed run goes on behind that step.

  Attributes:
    start: Returns what is learned before the first step, a pytree of arrays. Whatever
      steps change belongs in it, such as the state of an optimizer.
    steps: The number of steps.
    step: Takes a step. It gets what was learned so far and the losses of all steps
      before, whose number is that of this step, and returns what is learned now, in
      arrays of the same shapes and dtypes, and the loss before the step.
    finish: Makes the result of what was learned and the losses of all steps.
    sequences: Sequences of tokens on which a step differentiates the model. A run tells
      by it how large a part of its time the steps take.
    mend: What helps if a loss is not finite, for the refusal.
  """

  start: Callable[[], Any]
  steps: int
  step: Callable[[Any, Sequence[float]], tuple[Any, float]]
  finish: Callable[[Any, list[float]], T]
  sequences: int = 1
  mend: str = "take fewer or smaller steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Base program: no map, round to nearest, no recovery.

  Attributes:
    name: The name in results.
    recover: Recovery fits in order, each measured on the state left by the one before.
    weighting: Whether tokens count equally in the moments that hooks see, or by their
      Fisher information, for which the model is differentiated once; see `fisher`.
    tune: Scale distillation after everything else, or None.
    activations: Whether the linears round their inputs, `mxfp4`, or leave them as they
      are, `float`. Weights are quantized alike in both, so that a model of each shows
      what A4 costs; `float` is outside the paper's contract. Recovery and tuning
      measure the model without A4 then, and the rules of A4 have no effect.
  """

  name: str = "rtn"
  recover: tuple[RecoveryFit, ...] = ()
  weighting: Literal["uniform", "fisher"] = "uniform"
  tune: ScaleDistillation | None = None
  activations: Activations = "mxfp4"
  needs_a4: ClassVar[str | None] = None
  """Why the method means nothing without A4, as what a sentence says of it, or None."""
  a4_options: ClassVar[tuple[str, ...]] = ()
  """Options that say how inputs are rounded."""
  rotates_model: ClassVar[bool] = False
  """Whether `prepare` gives linears other coordinates than the float model's."""
  compiles_together: ClassVar[bool] = False
  """Whether `quantize_linear` may run in several threads, and with a result that is
  dropped: it changes neither the program nor its inputs. A subclass says so itself."""

  @property
  def reads_data(self) -> bool:
    """Whether calibration data decides anything of what the program stores.

    It does not in RTN, which neither recovers nor tunes. Of a program of another kind
    nothing is known, so that it is said to.
    """
    return type(self) is not Program or bool(self.recover) or self.tune is not None

  def under(self, contract: Contract) -> Contract:
    """Returns the contract of the program's results, where `contract` is the given one.

    It differs in `activations`, which the program decides.
    """
    return dataclasses.replace(contract, activations=self.activations)

  def prepare(
    self, params: Params, calib: Calibration, contract: Contract
  ) -> Prepared | Learning[Prepared]:
    """Rewrites the float model, keeping its function, or learns; runs first.

    What takes long to learn is returned as `Learning`, whose steps the pipeline takes.
    """
    del calib, contract
    return Prepared(params)

  def shape_group(self, weights: Mapping[str, jax.Array], inputs: LinearInputs) -> Any:
    """Learns what linears that read one tensor share, before each is shaped.

    `weights` are float32 `[blocks, 32, out_features]` by linear name. `shape` and
    `quantize_weight` get the result as `inputs.group`; None by default.
    """
    del weights, inputs

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    """Chooses the input map of one linear, or none for native coordinates.

    `weight` is feature-major, float32 `[blocks, 32, out_features]`.
    """
    del weight, inputs
    return Shaping(None)

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: InputMap | None
  ) -> Realization:
    """Chooses legal W4 codes and the A4 rule in the installed coordinates.

    `weight` is folded, float32 `[blocks, 32, out_features]`; `inputs` are in native
    coordinates, and `input_map` conjugates their Hessian.
    """
    del input_map
    codes = gptq.round_to_nearest(weight, inputs.rules)
    return Realization(codes, activation_quantizers.Nearest())

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    """Runs `shape`, folds, and runs `quantize_weight`; override it to interleave them.

    `weight` is `[out_features, in_features]`; the leaf of the result replaces it.
    """
    # Stage I in native coordinates; the fold; Stage II in those of the map.
    blocks = mxfp4.weight_blocks(weight)
    shaping = self.shape(blocks, inputs)
    hook_results.check_shaping(self, shaping, blocks)
    input_map, of_shape = shaping
    folded = fold(blocks, input_map)
    made = self.quantize_weight(folded, inputs, input_map)
    hook_results.check_realization(self, made, folded)
    if made.correction is not None:
      input_map = input_maps.followed(input_map, made.correction)
    leaf = QuantizedLinear(
      pack(made.weight), input_map, made.rounding, rules=inputs.rules
    )
    return LinearResult(leaf, {**of_shape, **made.record})

  def stored(self, shape: tuple[int, int]) -> QuantizedLinear:
    """Returns what replaces a weight `[out_features, in_features]`, without values.

    Its arrays are `jax.ShapeDtypeStruct`; `mxjax plan --method` counts their bytes. A
    program that stores maps or tables says so in `stored_map` and `stored_rounding`.
    """
    rows, width = shape
    blocks = width // mxfp4.BLOCK_SIZE
    bytes_: Any = lambda columns: jax.ShapeDtypeStruct((rows, columns), jnp.uint8)
    weight = mxfp4.MXTensor(bytes_(width // 2), bytes_(blocks))
    input_map = self.stored_map(blocks)
    if self.tune is not None:
      # Learned factors make one matrix for every block of any map, or of none.
      factor = jax.ShapeDtypeStruct((width,), jnp.float32)
      input_map = jax.eval_shape(input_maps.scaled, input_map, factor)
    is_float = self.activations == "float"
    unrounded = activation_quantizers.Unrounded()
    rounding = unrounded if is_float else self.stored_rounding(blocks)
    return QuantizedLinear(weight, input_map, rounding)

  def stored_map(self, blocks: int) -> Any:
    """Returns the input map of a linear of so many input blocks; see `stored`."""
    del blocks

  def stored_rounding(self, blocks: int) -> activation_quantizers.ActivationQuantizer:
    """Returns the A4 rule of a linear of so many input blocks; see `stored`."""
    del blocks
    return activation_quantizers.Nearest()

  def describe(self) -> Mapping[str, Any]:
    """Returns name and options, JSON-ready, for results and checkpoints."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    options = {
      # Strict JSON has no infinity.
      name: str(value) if isinstance(value, float) and math.isinf(value) else value
      for name, value in fields.items()
      if name not in ("name", "recover", "tune")
    }
    # As in `Contract.to_dict`: what it was before there was a choice.
    if self.activations == "mxfp4":
      del options["activations"]
    if self.tune is not None:
      options["tune"] = dataclasses.asdict(self.tune)
    recover = [fit.label for fit in self.recover]
    return {"name": self.name, "recover": recover, "options": options}


@compilation.jit()
def pack(result: gptq.Reconstruction) -> mxfp4.MXTensor:
  """Packs legal codes into an `MXTensor` `[out_features, in_features]`."""
  return result.tensor()


def fold(blocks: jax.Array, input_map: InputMap | None) -> jax.Array:
  """Folds weights into a map's coordinates; computes in float64, returns float32.

  Whoever folds by one map gets the same bits: LAPACK inverts it on one thread.
  """
  with execution.one_lapack_thread():
    return _fold(blocks, input_map)


@execution.jit()
def _fold(blocks: jax.Array, input_map: InputMap | None) -> jax.Array:
  if input_map is None:
    return blocks
  # In float64, and rounded once, to the float32 that is encoded.
  return input_map.fold(blocks.astype(jnp.float64)).astype(jnp.float32)


RTN = Program()
"""RTN: strict rounding of weights and activations, without calibration data."""
