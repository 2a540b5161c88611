"""A candidate's hooks as a PTQ program of the library, under the frozen contract.

The candidate decides 32 x 32 maps, balances, codes and coefficients; everything else
is trusted code: statistics, folding, error propagation between blocks, decoding. What
a hook returns is checked before it is used.
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
  EXPONENT_SLACK,
  Function,
  conjugated,
  decoded,
  diagonal_blocks,
  encode_groups,
  inverses,
  legal,
  map_units,
  measure_stats,
  require_finite,
)
from mxjax.discovery.tasks.ptq.candidate_fits import HookAttentionFit, HookMlpFit
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.methods.program import Program, Realized
from mxjax.methods.recovery_fits import RecoveryFit
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Nearest,
)
from mxjax.numerics.shaping import dyadic_balance, input_maps

MAX_CONDITION = 1e4
"""Largest condition number of a block's map: beyond it folding loses float32 digits."""
MAX_LOG2_BALANCE = 4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HookRounding(ActivationQuantizer):
  """Dynamic A4 by a candidate's hook; a payload that is not legal decodes to NaN.

  Attributes:
    gram: First table, float32 `[blocks, 32, 32]`.
    cross: Second table, same shape.
    function: The batched hook (static).
  """

  gram: jax.Array
  cross: jax.Array
  function: Function = dataclasses.field(metadata={"static": True})

  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Decoded A4 of mapped inputs `[blocks, 32, n]`, float32."""
    del rules

    def one(item: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
      block, gram, cross = item
      codes, exponent = self.function(block.T, gram, cross)
      codes = codes.T
      values = decoded(codes, exponent)
      is_legal = legal(codes, exponent, block)[None]
      return jnp.where(is_legal, values, jnp.float32(jnp.nan))

    return jax.lax.map(one, (blocks, self.gram, self.cross))


@dataclasses.dataclass(frozen=True)
class Behaviour:
  """Hooks and plan that apply to a linear, with the control's changes.

  Attributes:
    hooks: Hook name to lowered identity.
    plan: The plan.
    shuffled: Hooks that are told another block's statistics.
    random_map: Whether the map is replaced by a random rotation.
    dose: Factor on the balance.
  """

  hooks: Mapping[str, str]
  plan: Mapping[str, Any]
  shuffled: frozenset[str] = frozenset()
  random_map: bool = False
  dose: float = 1.0


def behaviours(call: Call) -> Callable[[int, str], Behaviour]:
  """What applies to each linear: the candidate, and where a control says so, not.

  Raises:
    ContractError: An unknown intervention.
  """
  candidate = Behaviour(call.computation, call.plan)
  intervention = call.intervention
  kind = intervention.get("kind")
  if kind is None:
    return lambda layer, block: candidate
  if kind == "shuffle_stats":
    hooks = frozenset(intervention["hooks"])
    return lambda layer, block: dataclasses.replace(candidate, shuffled=hooks)
  if kind == "random_map":
    return lambda layer, block: dataclasses.replace(candidate, random_map=True)
  if kind == "dose":
    factor = float(intervention["factor"])
    return lambda layer, block: dataclasses.replace(candidate, dose=factor)
  if kind == "scope":
    before = intervention["parent"]
    parent = Behaviour(before["computation"], before["plan"])
    inside = {
      "even": lambda layer, block: layer % 2 == 0,
      "odd": lambda layer, block: layer % 2 == 1,
      "attention": lambda layer, block: block == "self_attn",
      "mlp": lambda layer, block: block == "mlp",
    }[intervention["part"]]
    return lambda layer, block: candidate if inside(layer, block) else parent
  raise ContractError(f"ptq: unknown intervention {kind!r}.")


class CandidateProgram(Program):
  """A candidate run by the library's pipeline; made for one quantization."""

  def __init__(
    self,
    call: Call,
    artifacts: Artifacts,
    paths: list[tuple[int, str, str]],
    defaults: Mapping[str, str],
  ) -> None:
    """Binds a call.

    Args:
      call: The condition.
      artifacts: Its hooks.
      paths: Layer, block and name of every linear in the pipeline's order.
      defaults: Identity of the default of each hook, whose native form is faster.
    """
    self._artifacts, self._defaults = artifacts, defaults
    self._behaviour = behaviours(call)
    self._paths = iter(paths)
    self._now = self._behaviour(0, "self_attn")
    plan, fits = call.plan, []
    if plan["attention"]:
      unit = artifacts.unit(call.computation["recover_value"])
      fits.append(HookAttentionFit(unit))
    if plan["mlp"]:
      fits.append(HookMlpFit(artifacts.unit(call.computation["recover_mlp"])))
    recover: tuple[RecoveryFit, ...] = tuple(fits)
    super().__init__(name="candidate", recover=recover)

  def describe(self) -> Mapping[str, Any]:
    """Name only: what runs is identified by the packet."""
    return {"name": self.name, "recover": [f.name for f in self.recover], "options": {}}

  def quantize_linear(self, weight: jax.Array, inputs: LinearInputs) -> QuantizedLinear:
    """See `Program.quantize_linear`; keeps count of where the pipeline is."""
    layer, block, _ = next(self._paths)
    self._now = self._behaviour(layer, block)
    return super().quantize_linear(weight, inputs)

  def _told(self, hook: str, stats: Any) -> Any:
    """Statistics for a hook: each block's own, or under a control its neighbour's."""
    if hook not in self._now.shuffled:
      return stats
    return jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), stats)

  def shape(
    self, weight: jax.Array, inputs: LinearInputs
  ) -> input_maps.InputMap | None:
    """The candidate's map and balance."""
    plan, hooks = self._now.plan, self._now.hooks
    if plan["transform"] == "off" and plan["balance"] == "off":
      return None
    identity = jnp.broadcast_to(
      jnp.eye(mxfp4.BLOCK_SIZE, dtype=jnp.float64), (weight.shape[0], 32, 32)
    )
    transform = identity
    native = measure_stats(weight, inputs, identity)
    if plan["transform"] != "off":
      unit = self._artifacts.unit(hooks["transform"])
      (maps,) = map_units(unit, self._told("transform", native))
      if self._now.random_map:
        maps = _random_rotations(len(maps))
      require_finite("transform", maps)
      worst = float(np.linalg.cond(maps).max())
      if not worst <= MAX_CONDITION:
        raise ContractError(
          f"transform: a map with condition number {worst:.3g} has no usable inverse; "
          f"at most {MAX_CONDITION:g}."
        )
      transform = jnp.asarray(maps)
    if plan["balance"] != "off":
      stats = native
      if plan["balance"] == "measured" and plan["transform"] != "off":
        stats = measure_stats(weight, inputs, transform)
      unit = self._artifacts.unit(hooks["balance"])
      (scale,) = map_units(unit, self._told("balance", stats))
      require_finite("balance", scale)
      if np.abs(scale).max() > MAX_LOG2_BALANCE:
        raise ContractError(f"balance: |u| is at most {MAX_LOG2_BALANCE}.")
      diagonal = dyadic_balance.diagonal(jnp.asarray(scale) * self._now.dose)
      transform = diagonal[..., None] * transform
    return input_maps.BlockDense(transform.astype(jnp.float32))

  def quantize_weight(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> Realized:
    """The candidate's codes, and its activation rule with tables from them."""
    result = self._encode(weight, inputs, input_map)
    hooks, plan = self._now.hooks, self._now.plan
    if hooks["encode_act"] == self._defaults["encode_act"]:
      return Realized(result, Nearest())
    target = result.decoded if plan["tables"] == "realized" else weight
    tables = execution.block_on_cpu(one_code.tables(weight, target))
    tables = self._told("encode_act", tables)
    function = self._artifacts.batched(hooks["encode_act"])
    rounding = HookRounding(tables[0], tables[1], function)
    return Realized(result, rounding)  # pyright: ignore[reportArgumentType]

  def _encode(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> gptq.Reconstruction:
    plan, hooks = self._now.plan, self._now.hooks
    is_default = hooks["encode_weight"] == self._defaults["encode_weight"]
    if is_default and plan["curvature"] != "full":
      return gptq.round_to_nearest(weight, inputs.rules)
    blocks = weight.shape[0]
    eye = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32), (blocks, 32, 32))
    upper, curvature, inverse = eye[0], eye, eye
    if plan["curvature"] != "none":
      hessian = execution.block_on_cpu(conjugated(inputs.hessian(), input_map))
      if plan["curvature"] == "local":
        factor = execution.block_on_cpu(gptq.factor(diagonal_blocks(hessian)))
        curvature = factor.upper
      else:
        factor = execution.block_on_cpu(gptq.factor(hessian))
        upper = factor.upper
        curvature = execution.block_on_cpu(diagonal_blocks(upper))
        inverse = execution.block_on_cpu(inverses(curvature))
      if not np.isfinite(np.asarray(factor.damping)).all():
        raise FloatingPointError("candidate: the Hessian is not positive definite.")
    told = self._told("encode_weight", curvature)
    function = self._artifacts.batched(hooks["encode_weight"])
    codes, exponent, value, is_legal = execution.block_on_cpu(
      encode_groups(
        function, weight, told, upper, inverse, full=plan["curvature"] == "full"
      )
    )
    if not bool(is_legal.all()):
      bad = int((~is_legal).sum())
      raise ContractError(
        f"encode_weight: {bad} of {is_legal.size} blocks have a code over 15 or an "
        f"exponent more than {EXPONENT_SLACK} from that of their largest value."
      )
    return gptq.Reconstruction(codes, exponent, value)


def _random_rotations(blocks: int) -> np.ndarray:
  generator = np.random.default_rng(32)
  matrix = generator.standard_normal((blocks, 32, 32))
  return np.linalg.qr(matrix)[0]
