"""Runs a candidate's hooks as a PTQ program of the library under the frozen contract.

The candidate decides 32 x 32 maps, balances, codes and coefficients. Trusted code does
everything else: statistics, folding, error propagation between blocks and decoding. The
values that a hook returns are checked before use.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.devices import execution
from mxjax.discovery.core.task import Artifacts, Call, ContractError
from mxjax.discovery.tasks.ptq.candidate_codes import (
  EncodedUnits,
  Function,
  checked,
  decoded,
  encoded,
  legal,
  map_units,
  measure_stats,
  neighbours,
  require_finite,
)
from mxjax.discovery.tasks.ptq.candidate_passes import (
  LinearPasses,
  Passes,
  measured_tables,
  require_legal,
  require_map,
)
from mxjax.discovery.tasks.ptq.structure.fits import HookAttentionFit, HookMlpFit
from mxjax.discovery.tasks.ptq.structure.interventions import RECOVERY, behaviours
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.gptq import conjugated
from mxjax.methods.program import (
  LinearResult,
  Program,
  Realization,
  Shaping,
  fold,
  pack,
)
from mxjax.methods.recovery import RecoveryFit
from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Nearest,
  OneCode,
)
from mxjax.numerics.shaping import dyadic_balance, input_maps

MAX_LOG2_BALANCE = 4.0


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class HookRounding(ActivationQuantizer):
  """Dynamic A4 quantizer of a candidate's hook; illegal payloads decode to NaN.

  Attributes:
    gram: First table, float32 `[blocks, 32, 32]`.
    cross: Second table, same shape and dtype.
    function: The batched hook (static).
    known: Units that the hook has encoded in this call, or None (static).
  """

  gram: jax.Array
  cross: jax.Array
  function: Function = dataclasses.field(metadata={"static": True})
  known: EncodedUnits | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  runs_alone = True

  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Returns decoded A4 values of mapped inputs `[blocks, 32, n]`, float32.

    Within a traced function, as in recovery fits, the hook becomes a part of it.
    """
    del rules
    if not isinstance(blocks, jax.core.Tracer):
      operands = encoded(self.function, blocks, *self.tables(), known=self.known)
      return execution.block_on_cpu(_or_nan(*operands, blocks))

    def one(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
      block, gram, cross = item
      codes, exponent = self.function(block.T, gram, cross)
      # Traced code cannot raise: NaN reaches an observable, which the phase refuses.
      is_legal = legal(codes.T, exponent, block)[None]
      return jnp.where(is_legal, decoded(codes.T, exponent), jnp.float32(jnp.nan))

    return jax.lax.map(one, (blocks, self.gram, self.cross))

  def tables(self) -> tuple[jax.Array, jax.Array]:
    """Returns the two tables of the hook."""
    return self.gram, self.cross


@jax.jit
def _or_nan(codes: jax.Array, exponent: jax.Array, blocks: jax.Array) -> jax.Array:
  """Decodes payloads of blocks `[blocks, 32, n]`; those that are illegal to NaN."""
  value, is_legal = checked(codes, exponent, blocks)
  return jnp.where(is_legal[:, None], value, jnp.float32(jnp.nan))


def activation_rule(
  artifacts: Artifacts, hook: str | None, known: EncodedUnits | None = None
) -> Callable[[jax.Array, jax.Array], ActivationQuantizer]:
  """Returns what makes an A4 rule of two tables, `[blocks, 32, 32]` each.

  Without a hook, which some tasks freeze, that is HiRes' own. All rules share the units
  of `known`.
  """
  if hook is None:
    return lambda gram, cross: OneCode(one_code.pack_symmetric(gram), cross)
  function = artifacts.batched(hook)
  return lambda gram, cross: HookRounding(gram, cross, function, known)


class CandidateProgram(Program):
  """A candidate run by the library's pipeline; use one instance per quantization."""

  def __init__(
    self,
    call: Call,
    artifacts: Artifacts,
    paths: list[tuple[int, str, str]],
    defaults: Mapping[str, str],
  ) -> None:
    """Binds a call.

    `paths` lists layer, block and name of every linear in the order of the pipeline.
    `defaults` holds the identity of each default hook; the default encoders run
    natively, which is faster.
    """
    self._artifacts, self._defaults = artifacts, defaults
    self._behaviour = behaviours(call)
    self._paths = iter(paths)
    self._now = self._behaviour(0, "self_attn")
    recover: list[RecoveryFit] = []
    # Of any layer: a control that shuffles is the same in all, and recoveries are not
    # divided.
    told = lambda hook: hook in self._now.shuffled
    if call.plan["attention"]:
      sum_ = artifacts.batched(call.computation["measure_value"])
      fit = artifacts.unit(call.computation["recover_value"])
      recover.append(HookAttentionFit(sum_, fit, told("recover_value")))
    if call.plan["mlp"]:
      sum_, fit = (artifacts.unit(call.computation[n]) for n in RECOVERY["mlp"])
      recover.append(HookMlpFit(sum_, fit, told("recover_mlp")))
      if told("recover_mlp") and len({layer for layer, *_ in paths}) < 2:
        raise ContractError(
          "recover_mlp: shuffle_stats tells a layer the sums of the layer before it, "
          "got one layer; use another control."
        )
    weighting = "fisher" if call.plan["gradients"] else "uniform"
    super().__init__(name="candidate", recover=tuple(recover), weighting=weighting)

  def describe(self) -> Mapping[str, Any]:
    """Returns the names only; the packet identifies the program that runs."""
    return {"name": self.name, "recover": [f.name for f in self.recover], "options": {}}

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> LinearResult:
    """See `Program.quantize_linear`; tracks the position in the pipeline."""
    layer, block, _ = next(self._paths)
    self._now = self._behaviour(layer, block)
    if self._now.plan["transform"] == "reached":
      return LinearResult(self._reached(weight, inputs))
    return super().quantize_linear(weight, inputs)

  def _reached(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """Maps and encodes the blocks one by one, from the last to the first."""
    plan, now = self._now.plan, self._now
    if (plan["balance"], plan["curvature"]) != ("off", "none"):
      raise ContractError(
        "ptq: transform reached needs balance off and curvature none, got "
        f"{plan['balance']} and {plan['curvature']}; change the plan."
      )
    if now.random_map or now.shuffled - {"encode_act"}:
      raise ContractError(
        "ptq: random_map and shuffle_stats cannot change transform reached, whose "
        "blocks are mapped one by one; use the control scope."
      )
    blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
    encode = self._artifacts.batched(now.hooks["encode_weight"])
    maps, result = self._passes().reach(blocks, inputs, encode)
    input_map = input_maps.BlockDense(maps.astype(jnp.float32))
    rounding = self._rounding(fold(blocks, input_map), result, inputs, input_map)
    return QuantizedLinear(pack(result), input_map, rounding, rules=inputs.rules)

  def _passes(self) -> Passes:
    hooks, batched = self._now.hooks, self._artifacts.batched
    return Passes(
      measure_inputs=batched(hooks["measure_inputs"]),
      measure_weights=batched(hooks["measure_weights"]),
      solve=self._artifacts.unit(hooks["solve"]),
      count=int(self._now.plan["passes"]),
      told=lambda sums: self._told("solve", sums),
    )

  def _linear_passes(self) -> LinearPasses:
    hooks, table = self._now.hooks, self._artifacts
    return LinearPasses(
      measure=table.unit(hooks["measure_linear"]),
      solve=table.unit(hooks["solve_linear"]),
      encode=table.batched(hooks["encode_linear"]),
      count=int(self._now.plan["linear_passes"]),
      is_shuffled="solve_linear" in self._now.shuffled,
    )

  def _told(self, hook: str, stats: Any) -> Any:
    """Returns each block's own statistics or, under a control, its neighbour's."""
    if hook not in self._now.shuffled:
      return stats
    return neighbours(hook, stats)

  def shape(self, weight: jax.Array, inputs: LinearInputs) -> Shaping:
    """Returns the candidate's map and balance."""
    plan = self._now.plan
    if plan["transform"] == "off" and plan["balance"] == "off":
      return Shaping(None)
    transform = jnp.broadcast_to(
      jnp.eye(mxfp4.BLOCK_SIZE, dtype=jnp.float64), (weight.shape[0], 32, 32)
    )
    if plan["transform"] != "off":
      transform = self._transform(weight, inputs, transform)
    if plan["balance"] != "off":
      stats = measure_stats(weight, inputs, transform)
      # Diag(2^u) T: the rows of T are scaled. The statistics before it are in T's
      # coordinates.
      transform = self._balance(stats)[..., None] * transform
    # Made in float64, and applied in float32 as at run time.
    return Shaping(input_maps.BlockDense(transform.astype(jnp.float32)))

  def _transform(
    self, weight: jax.Array, inputs: LinearInputs, native: jax.Array
  ) -> jax.Array:
    """Returns the program's maps, `[blocks, 32, 32]`, checked to be invertible."""
    if self._now.random_map:
      return jnp.asarray(_random_rotations(len(native)))
    if self._now.plan["transform"] == "solved":
      return self._passes().maps(weight, inputs)
    unit = self._artifacts.unit(self._now.hooks["transform"])
    stats = measure_stats(weight, inputs, native)
    (maps,) = map_units(unit, self._told("transform", stats))
    require_map("transform", maps)
    return jnp.asarray(maps)

  def _balance(self, stats: Any) -> jax.Array:
    """Returns the hook's dyadic scales, `[blocks, 32]`."""
    unit = self._artifacts.unit(self._now.hooks["balance"])
    (scale,) = map_units(unit, self._told("balance", stats))
    require_finite("balance", scale)
    if (largest := np.abs(scale).max()) > MAX_LOG2_BALANCE:
      raise ContractError(
        f"balance: |u| is at most {MAX_LOG2_BALANCE}, got {largest:.3g}."
      )
    return dyadic_balance.diagonal(jnp.asarray(scale) * self._now.dose)

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> Realization:
    """Returns the candidate's codes, and its activation rule with tables from them."""
    result = self._encode(weight, inputs, input_map)
    return Realization(result, self._rounding(weight, result, inputs, input_map))

  def _rounding(
    self,
    weight: jax.Array,
    result: gptq.Reconstruction,
    inputs: LinearInputs,
    input_map: input_maps.InputMap | None,
  ) -> ActivationQuantizer:
    hook = self._now.hooks.get("encode_act")
    if hook == self._defaults["encode_act"]:
      return Nearest()
    if (plan := self._now.plan["tables"]) == "measured":
      function = self._artifacts.batched(self._now.hooks["tables"])
      tables = measured_tables(function, weight, result.decoded)
    else:
      # The float weights in both places have W'W and no weight error: cross is zero.
      target = weight if plan == "float" else result.decoded
      tables = execution.block_on_cpu(one_code.tables(weight, target))
    if plan == "expected":
      hessian = conjugated(inputs.hessian(), input_map)
      cross = one_code.expected_cross(weight, result.decoded, hessian)
      tables = tables[0], execution.block_on_cpu(cross)
    gram, cross = self._told("encode_act", tables)
    return activation_rule(self._artifacts, hook)(gram, cross)

  def _encode(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> gptq.Reconstruction:
    if self._now.plan["curvature"] == "solved":
      return self._linear_passes().codes(weight, inputs, input_map)
    hook = self._now.hooks["encode_weight"]
    if hook == self._defaults["encode_weight"]:
      return gptq.round_to_nearest(weight, inputs.rules)
    # No curvature: every block is encoded by itself.
    identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32), (len(weight), 32, 32))
    codes, exponent = encoded(self._artifacts.batched(hook), weight, identity)
    value, is_legal = execution.block_on_cpu(checked(codes, exponent, weight))
    require_legal(is_legal)
    return gptq.Reconstruction(jnp.asarray(codes), jnp.asarray(exponent), value)


def _random_rotations(blocks: int) -> np.ndarray:
  # One seed for all programs: the control is the same whatever it is a control of.
  generator = np.random.default_rng(32)
  matrix = generator.standard_normal((blocks, 32, 32))
  return np.linalg.qr(matrix)[0]
