"""A candidate's hooks as a PTQ program of the library, under the frozen contract.

The candidate decides 32 x 32 maps, balances, codes and coefficients; everything else
is trusted code: statistics, folding, error propagation between blocks, decoding. What
a hook returns is checked before it is used.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import (
  code_refinement,
  dyadic_balance,
  execution,
  gptq,
  input_maps,
  mlp_recovery,
  mxfp4,
  reference_chart,
  value_recovery,
)
from mxjax.discovery.task import Artifacts, Call, ContractError
from mxjax.linear_inputs import LinearInputs
from mxjax.precision import HIGHEST
from mxjax.program import Program, Realized
from mxjax.quantized_linear import Nearest, QuantizedLinear
from mxjax.recovery import AttentionFit, MlpFit, RecoveryFit

MAX_CONDITION = 1e4
"""Largest condition number of a block's map: beyond it folding loses float32 digits."""
MAX_LOG2_BALANCE = 4.0
EXPONENT_SLACK = 4
"""How far a block's exponent may lie from that of its largest value. Exponents carry
scale, not side information: this leaves at most log2(9) bits a block to choose."""
MLP_CELLS = 16

Function = Callable[..., tuple[jax.Array, ...]]


@functools.partial(jax.jit, static_argnames="function")
def _map_units(function: Function, items: tuple[Any, ...]) -> tuple[jax.Array, ...]:
  """A hook on every unit, one after another: small LAPACK calls never run abreast."""
  return jax.lax.map(lambda arguments: function(*arguments), items)


def map_units(function: Function, *items: Any) -> list[np.ndarray]:
  """The hook's results on stacked units, on the host."""
  return [np.asarray(a) for a in execution.finish(_map_units(function, items))]


def _require_finite(place: str, *arrays: np.ndarray) -> None:
  for array in arrays:
    if not np.isfinite(array).all():
      raise ContractError(f"{place}: returned NaN or inf.")


def legal(codes: jax.Array, exponent: jax.Array, blocks: jax.Array) -> jax.Array:
  """Whether codes and exponents are a payload: `[..., 32, n]`, `[..., n]` to `[..., n]`.

  Args:
    codes: uint8, values 0 to 15.
    exponent: int32.
    blocks: The float values that were encoded.
  """
  own = mxfp4.block_exponent(blocks)
  near = jnp.abs(exponent - jnp.minimum(own, 127)) <= EXPONENT_SLACK
  is_byte = (exponent >= -mxfp4.SCALE_BIAS) & (exponent <= mxfp4.SCALE_BIAS)
  return near & is_byte & (codes <= 15).all(-2)


def decoded(codes: jax.Array, exponent: jax.Array) -> jax.Array:
  """The one decoder: codes `[..., 32, n]` and exponents `[..., n]` to float32."""
  value = mxfp4.magnitude((codes & 7).astype(jnp.int32))
  sign = jnp.where(codes >= 8, jnp.float32(-1), jnp.float32(1))
  return sign * value * mxfp4.power_of_two(exponent)[..., None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HookRounding:
  """Dynamic A4 by a candidate's hook; a payload that is not legal decodes to NaN.

  Attributes:
    gram: First table, float32 `[blocks, 32, 32]`.
    cross: Second table, same shape.
    function: The batched hook (static).
  """

  gram: jax.Array
  cross: jax.Array
  function: Function = dataclasses.field(metadata={"static": True})

  def round(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
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


@functools.partial(jax.jit, static_argnames=("function", "full"))
def _encode_groups(
  function: Function,
  weight: jax.Array,
  curvature: jax.Array,
  upper: jax.Array,
  inverse: jax.Array,
  *,
  full: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Encodes blocks in order; with `full`, each absorbs the errors of those before it.

  Args:
    function: The batched hook.
    weight: `[blocks, 32, rows]`.
    curvature: What the hook is told of each block, `[blocks, 32, 32]`.
    upper: U of GPTQ, `[d, d]`, or `[32, d]` of anything without `full`.
    inverse: Inverse of each diagonal block of U, `[blocks, 32, 32]`.
    full: Whether errors propagate.

  Returns:
    Codes, exponents, decoded values, and legality `[blocks, rows]`.
  """
  blocks, size, rows = weight.shape

  def group(errors: jax.Array, item: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
    index, target, told, solve = item
    if full:
      start = index * size
      columns = jax.lax.dynamic_slice_in_dim(upper, start, size, axis=1)
      target -= jnp.einsum("di,dm->im", columns, errors, precision=HIGHEST)
    codes, exponent = function(target.T, told)
    codes = codes.T
    value = decoded(codes, exponent)
    if full:
      # U is upper triangular: the errors e of the columns solve e U = w - q.
      error = jnp.einsum("ij,im->jm", solve, target - value, precision=HIGHEST)
      errors = jax.lax.dynamic_update_slice_in_dim(errors, error, index * size, axis=0)
    return errors, (codes, exponent, value, legal(codes, exponent, target))

  errors = jnp.zeros((blocks * size if full else 1, rows), weight.dtype)
  order = jnp.arange(blocks, dtype=jnp.int32)
  return jax.lax.scan(group, errors, (order, weight, curvature, inverse))[1]


@jax.jit
def _diagonal_blocks(matrix: jax.Array) -> jax.Array:
  blocks = matrix.shape[0] // mxfp4.BLOCK_SIZE
  tiles = matrix.reshape(blocks, mxfp4.BLOCK_SIZE, blocks, mxfp4.BLOCK_SIZE)
  return jnp.einsum("aiaj->aij", tiles)


@jax.jit
def _inverses(upper: jax.Array) -> jax.Array:
  identity = jnp.broadcast_to(jnp.eye(upper.shape[-1], dtype=upper.dtype), upper.shape)
  return jax.lax.linalg.triangular_solve(upper, identity, left_side=True, lower=False)


@jax.jit
def _conjugated(hessian: jax.Array, input_map: Any) -> jax.Array:
  return hessian if input_map is None else input_map.conjugate(hessian)


def _error_step(
  carry: dict[str, jax.Array],
  blocks: jax.Array,
  index: jax.Array,
  rules: mxfp4.Rules,
  transform: jax.Array,
) -> dict[str, jax.Array]:
  """Adds a sequence's error moments in the coordinates of a map."""
  del index
  mapped = input_maps.BlockDense(transform).apply(blocks)
  error = mxfp4.round_blocks(mapped, rules) - mapped
  wide, signal = error.astype(jnp.float64), mapped.astype(jnp.float64)
  return {
    "error": carry["error"] + jnp.einsum("bin,bjn->bij", wide, wide),
    "cross": carry["cross"] + jnp.einsum("bin,bjn->bij", wide, signal),
    "signal": carry["signal"] + jnp.einsum("bin,bjn->bij", signal, signal),
  }


@functools.partial(jax.jit, static_argnames="rules")
def _weight_stats(folded: jax.Array, rules: mxfp4.Rules) -> dict[str, jax.Array]:
  narrow = folded.astype(jnp.float32)
  error = (mxfp4.round_blocks(narrow, rules) - narrow).astype(jnp.float64)
  rows = folded.shape[-1]
  product = lambda a, b: jnp.einsum("bim,bjm->bij", a, b) / rows
  return {
    "weight": reference_chart.block_moment(folded) / rows,
    "weight_error": product(error, error),
    "weight_cross": product(error, narrow.astype(jnp.float64)),
  }


def measure_stats(
  weight: jax.Array, inputs: LinearInputs, transform: jax.Array
) -> dict[str, jax.Array]:
  """Second moments and nearest-code error moments of every block, float64.

  Args:
    weight: `[blocks, 32, rows]`, native.
    inputs: The linear's inputs.
    transform: The map in whose coordinates to measure, `[blocks, 32, 32]`.
  """
  # Three buffers, not one thrice: the reduction donates them.
  start = {
    name: jnp.zeros(transform.shape, jnp.float64)
    for name in ("error", "cross", "signal")
  }
  moments = inputs.reduce(_error_step, start, transform.astype(jnp.float32))
  fold = input_maps.BlockDense(transform.astype(jnp.float64)).fold
  folded = execution.finish(jax.jit(fold)(weight.astype(jnp.float64)))
  return {
    "activation": moments["signal"] / inputs.tokens,
    "activation_error": moments["error"] / inputs.tokens,
    "activation_cross": moments["cross"] / inputs.tokens,
    **execution.finish(_weight_stats(folded, inputs.rules)),
  }


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
      _require_finite("transform", maps)
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
      _require_finite("balance", scale)
      if np.abs(scale).max() > MAX_LOG2_BALANCE:
        raise ContractError(f"balance: |u| is at most {MAX_LOG2_BALANCE}.")
      diagonal = dyadic_balance.diagonal(jnp.asarray(scale) * self._now.dose)
      transform = diagonal[..., None] * transform
    return input_maps.BlockDense(transform.astype(jnp.float32))

  def realize(
    self, weight: jax.Array, inputs: LinearInputs, input_map: input_maps.InputMap | None
  ) -> Realized:
    """The candidate's codes, and its activation rule with tables from them."""
    result = self._encode(weight, inputs, input_map)
    hooks, plan = self._now.hooks, self._now.plan
    if hooks["encode_act"] == self._defaults["encode_act"]:
      return Realized(result, Nearest())
    target = result.decoded if plan["tables"] == "realized" else weight
    tables = execution.finish(code_refinement.tables(weight, target))
    tables = self._told("encode_act", tables)
    function = self._artifacts.batched(hooks["encode_act"])
    return Realized(result, HookRounding(*tables, function))

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
      hessian = execution.finish(_conjugated(inputs.hessian(), input_map))
      if plan["curvature"] == "local":
        factor = execution.finish(gptq.factor(_diagonal_blocks(hessian)))
        curvature = factor.upper
      else:
        factor = execution.finish(gptq.factor(hessian))
        upper = factor.upper
        curvature = execution.finish(_diagonal_blocks(upper))
        inverse = execution.finish(_inverses(curvature))
      if not np.isfinite(np.asarray(factor.damping)).all():
        raise FloatingPointError("candidate: the Hessian is not positive definite.")
    told = self._told("encode_weight", curvature)
    function = self._artifacts.batched(hooks["encode_weight"])
    codes, exponent, value, is_legal = execution.finish(
      _encode_groups(
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


@dataclasses.dataclass(frozen=True)
class HookAttentionFit(AttentionFit):
  """Attention recovery whose two coefficients of a head come from a hook.

  Attributes:
    function: The hook on one head.
  """

  function: Function

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    stats = {
      field.name: getattr(moments, field.name) for field in dataclasses.fields(moments)
    }
    (pairs,) = map_units(self.function, stats)
    _require_finite("recover_value", pairs)
    fit = value_recovery.ValueRecovery(
      jnp.asarray(pairs[:, 0], jnp.float32), jnp.asarray(pairs[:, 1], jnp.float32)
    )
    return fit, {"scale": pairs[:, 0].tolist(), "offset": pairs[:, 1].tolist()}


@dataclasses.dataclass(frozen=True)
class HookMlpFit(MlpFit):
  """MLP recovery whose three scalars of a layer come from a hook.

  Attributes:
    function: The hook on one layer.
  """

  function: Function

  def solve(self, moments: Any) -> tuple[Any, dict[str, Any]]:
    """See `RecoveryFit.solve`."""
    gate_sums, by_cell = moments
    cells = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), by_cell)
    deviation = mlp_recovery.gate_deviation(gate_sums)
    gram, target = mlp_recovery._normal_equations(cells, deviation)
    if gram.shape[0] != MLP_CELLS:
      raise ValueError(f"ptq: expected {MLP_CELLS} cells, got {gram.shape[0]}.")
    stats = {"gram": gram[None], "target": target[None], "count": cells.count[None]}
    (theta,) = map_units(self.function, stats)
    _require_finite("recover_mlp", theta)
    theta = theta[0]
    leaf = mlp_recovery.MlpRecovery(
      *(jnp.asarray(value, jnp.float32) for value in (*theta, deviation))
    )
    return leaf, {"theta": theta.tolist()}
