"""The two phases of the PTQ evaluator: `fit` quantizes and `measure` evaluates."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import Calibration
from mxjax.calibration import streams
from mxjax.calibration.calibration import targets
from mxjax.devices import execution
from mxjax.discovery.core import identity
from mxjax.discovery.core.residual import OTHER_TEXT
from mxjax.discovery.core.task import Artifacts, Call, ContractError
from mxjax.discovery.sandbox import artifact, frames, tracing
from mxjax.discovery.tasks.ptq import candidate, interface, payload
from mxjax.discovery.tasks.ptq.candidate_codes import EncodedUnits
from mxjax.discovery.tasks.ptq.options import PtqOptions
from mxjax.discovery.tasks.ptq.structure import interventions, order
from mxjax.evaluation.measures import fitness
from mxjax.evaluation.measures.agreement import KeptStates, agreement
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run.quantize import run

# The paper's definition of a contaminated block.
OUTLIER_RATIO = 32
"""A block is contaminated if its largest magnitude over its median exceeds this."""


def default_identities() -> dict[str, str]:
  """Returns the lowered identity of the default encoders, traced from our source."""
  hooks = [interface.INTERFACE.hook(name) for name in ("encode_weight", "encode_act")]
  specs = [hook.to_dict() for hook in hooks]
  traced = tracing.trace(interface.INTERFACE.default_source(), specs)
  return {
    hook.name: artifact.gate(spec, frames.pack(hook.units))
    for hook, spec in zip(traced, specs, strict=True)
  }


class Fit:
  """Quantizes, with weights and calibration tokens but no evaluation text."""

  def __init__(self, options: PtqOptions) -> None:
    """Loads the model and the calibration tokens."""
    self._model, self._params = options.load()
    self._calibration = Calibration(self._model, options.tokens("fit"))
    self._defaults = default_identities()
    self._paths = [
      (layer, block, name)
      for layer in range(self._model.num_layers)
      for block, name in targets(self._model, PAPER_CONTRACT)
    ]

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the pipeline with the candidate's hooks; returns the packed operands."""
    del before
    orders = self._orders(call, artifacts)
    params = order.arranged(self._params, self._model, orders)
    program = candidate.CandidateProgram(call, artifacts, self._paths, self._defaults)
    result = run(params, self._calibration, program, check=False, probe=False)
    operands = {**payload.of_params(result.params, self._model), **orders}
    return {"outputs": payload.digests(operands)}, payload.to_bytes(operands)

  def _orders(self, call: Call, artifacts: Artifacts) -> payload.Operands:
    """Returns the orders of channels, measured in the float model when first asked."""
    if call.plan["arrange"] == "off" and call.intervention.get("kind") != "permute":
      # Under `scope` some linears are as in the parent, which may arrange channels.
      parent = call.intervention.get("parent")
      if not parent or parent["plan"]["arrange"] == "off":
        return {}
    at = interventions.behaviours(call)
    return order.choose(self._model, self._channels, at, artifacts)

  @functools.cached_property
  def _channels(self) -> list[dict[str, dict[str, np.ndarray]]]:
    return order.measure_channels(self._model, self._params, self._calibration.tokens)


@functools.partial(jax.jit, static_argnames="model")
def _mapped(
  model: Any, layer: Any, maps: Mapping[str, Any], hidden: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Returns the output of a layer of the float model, and each linear's mapped input.

  This is a separate program so that the inputs are bitwise the same whatever rounds
  them. Two rounding rules that agree then produce equal values.
  """
  output, taps = model.layer_with_taps(layer, hidden)
  inputs = {}
  for (block, name), tap in model.projection_taps.items():
    x, input_map = taps[tap].astype(jnp.float32), maps[f"{block}/{name}"]
    blocks = mxfp4.to_blocks(x.reshape(-1, x.shape[-1]))
    inputs[f"{block}/{name}"] = blocks if input_map is None else input_map.apply(blocks)
  return output, inputs


@functools.partial(jax.jit, static_argnames="rules")
def _rounded(rounding: Any, mapped: jax.Array, rules: mxfp4.Rules) -> jax.Array:
  return rounding.round(mapped, rules)


def rounded(leaf: QuantizedLinear, mapped: jax.Array) -> jax.Array:
  """Returns the A4 values of a linear's mapped inputs, `[blocks, 32, n]`, float32.

  This is a separate program too, which linears of one width share, unless the rule
  brings its own for all widths, as that of a candidate does.
  """
  if leaf.rounding.runs_alone:
    return leaf.rounding.round(mapped, leaf.rules)
  return execution.block_on_cpu(_rounded(leaf.rounding, mapped, leaf.rules))


@jax.jit
def operator_errors(
  weights: Mapping[str, mxfp4.MXTensor],
  folded: Any,
  inputs: Mapping[str, jax.Array],
  activations: Mapping[str, jax.Array],
) -> dict[str, dict[str, jax.Array]]:
  """Returns relative squared errors of a layer's linears.

  `inputs` are mapped and `activations` what they are rounded to. `total` is the
  operator error, `activation` the error when only activations are rounded, and `weight`
  the error when only weights are. `contaminated` is the fraction of blocks with an
  outlier.
  """
  errors = {}
  for path, weight in weights.items():
    mapped, rounded = inputs[path], activations[path]
    product = lambda a, b: jnp.einsum("bin,bim->nm", a, b, precision=precision.HIGHEST)
    coded = mxfp4.to_blocks(mxfp4.decode(weight, jnp.float32))
    exact = product(mapped, folded[path])
    size = jnp.square(exact).sum()
    share = lambda y, exact=exact, size=size: jnp.square(y - exact).sum() / size
    magnitudes = jnp.sort(jnp.abs(mapped), axis=1)
    # Of 32 sorted magnitudes, the mean of the two in the middle.
    median = 0.5 * (magnitudes[:, 15] + magnitudes[:, 16])
    is_outlier = magnitudes[:, -1] > OUTLIER_RATIO * median
    errors[path] = {
      "total": share(product(rounded, coded)),
      "activation": share(product(rounded, folded[path])),
      "weight": share(product(mapped, coded)),
      "contaminated": is_outlier.mean(dtype=jnp.float32),
    }
  return errors


@jax.jit
def fold_weight(weight: jax.Array, input_map: Any) -> jax.Array:
  """Returns float32 blocks of a weight `[out, in]` in the coordinates of a map."""
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  return blocks if input_map is None else input_map.fold(blocks)


class Measure:
  """Measures, with float model and evaluation text but no calibration tokens."""

  def __init__(self, options: PtqOptions) -> None:
    """Loads the float model and the evaluation text."""
    self._model, self._params = options.load()
    self._tokens = options.tokens("measure")
    self._replicates, self._objective = options.replicates, options.objective
    self._module_layers = options.module_layers
    self._second = options.tokens("second") if options.objective == "fit3" else None
    self._other = options.tokens("other") if options.other_windows else None
    # The float model's hidden states on the two texts, which depend on no candidate.
    self._exact = {"measure": KeptStates(), "other": KeptStates()}

  def run(
    self, call: Call, artifacts: Artifacts, before: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Returns perplexity and operator errors of the operands packed by `fit`.

    Raises:
      ContractError: A `scope` control would divide an edit of `encode_act`.
      FloatingPointError: An observable is not finite.
    """
    model = self._model
    hook = _activation_hook(call)
    rounding = candidate.activation_rule(artifacts, hook, EncodedUnits())
    operands = payload.from_bytes(before)
    exact = order.arranged(self._params, model, operands)
    params = payload.to_params(operands, exact, model, rounding)
    if call.intervention.get("kind") == OTHER_TEXT:
      return self._on_other_text(params), b""
    errors, rounded = self._operator_errors(params, exact)
    first, end = self._module_layers or (0, model.num_layers)
    modules = {model.layer_name(index) for index in range(first, end)}
    # Over all linears; where a part of them is named, over the layers of
    # `module_layers`.
    mean = lambda key, part="": float(
      np.mean(
        [
          error[key]
          for path, error in errors.items()
          if part in f"/{path}/" and (not part or path.partition("/")[0] in modules)
        ]
      )
    )
    measured = perplexity(model, params, self._tokens, replicates=self._replicates)
    values = {
      "log_ppl": float(np.mean(np.log(measured.values))),
      "operator_error": mean("total"),
      "activation_error": mean("activation"),
      "weight_error": mean("weight"),
      "contaminated": mean("contaminated"),
      "value_error": mean("total", "/v_proj/"),
      "mlp_error": mean("total", "/mlp/"),
      "down_contaminated": mean("contaminated", "/down_proj/"),
      "down_up_ratio": mean("activation", "/down_proj/")
      / max(mean("activation", "/up_proj/"), 1e-30),
    }
    if self._objective != "log_ppl":
      values[self._objective] = self._distance(params, measured.mean)
    for index in range(model.num_layers):
      name = model.layer_name(index)
      of_layer = [e["total"] for p, e in errors.items() if p.startswith(f"{name}/")]
      values[f"layer_{index}"] = float(np.mean(of_layer))
    by_linear = {"operator": "total", "activation": "activation", "weight": "weight"}
    return {
      "values": _finite(values),
      "outputs": {"encode_act": rounded} if hook else {},
      "parts": {
        f"{kind}_error": {path: error[key] for path, error in errors.items()}
        for kind, key in by_linear.items()
      },
    }, b""

  def _on_other_text(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a call measures under the control `other_text`: the objective."""
    if self._other is None or self._objective == "fit3":
      raise ContractError(
        "ptq: the control other_text needs the option other_windows, and an objective "
        "on one text; use another control."
      )
    if self._objective == "kl":
      compared = agreement(
        self._model, self._params, params, self._other, kept=self._exact["other"]
      )
      value = float(np.mean(compared.divergence, dtype=np.float64))
    else:
      count = self._replicates
      measured = perplexity(self._model, params, self._other, replicates=count)
      value = float(np.mean(np.log(measured.values)))
    return {"values": _finite({OTHER_TEXT: value}), "outputs": {}}

  def _distance(self, params: Mapping[str, Any], ppl: float) -> float:
    """Returns the objective `kl` or `fit3`; `ppl` is the perplexity of the text."""
    compared = agreement(
      self._model, self._params, params, self._tokens, kept=self._exact["measure"]
    )
    if self._objective == "kl":
      return float(np.mean(compared.divergence, dtype=np.float64))
    first, second = self._float_perplexities
    again = perplexity(
      self._model, params, self._second, replicates=self._replicates
    ).mean
    # The float model agrees with itself, so the loss of accuracy is the share of flips.
    return fitness.mean_and_worst(
      [ppl / first - 1, again / second - 1, float(compared.is_flipped.mean())]
    )

  @functools.cached_property
  def _float_perplexities(self) -> list[float]:
    texts = (self._tokens, self._second)
    return [perplexity(self._model, self._params, text).mean for text in texts]

  def _operator_errors(
    self, params: Mapping[str, Any], float_params: Mapping[str, Any]
  ) -> tuple[dict[str, dict[str, float]], str]:
    """Returns the errors of each linear, and a digest of all rounded A4 values."""
    model = self._model
    tokens = jnp.asarray(self._tokens[:1], jnp.int32)
    hidden = model.embed(streams.outer_params(model, float_params), tokens)
    result, digests = {}, []
    for index in range(model.num_layers):
      name = model.layer_name(index)
      leaves, maps, folded = {}, {}, {}
      for block, linear in model.projection_taps:
        path, leaf = f"{block}/{linear}", params[name][block][linear]["weight"]
        exact = float_params[name][block][linear]["weight"]
        leaves[path], maps[path] = leaf, leaf.input_map
        folded[path] = execution.block_on_cpu(fold_weight(exact, leaf.input_map))
      # Onwards by the float layer, so that the errors of a layer are its own.
      hidden, inputs = execution.block_on_cpu(
        _mapped(model, float_params[name], maps, hidden)
      )
      activations = {p: rounded(leaf, inputs[p]) for p, leaf in leaves.items()}
      weights = {path: leaf.weight for path, leaf in leaves.items()}
      errors = execution.block_on_cpu(
        operator_errors(weights, folded, inputs, activations)
      )
      for path, values in errors.items():
        result[f"{name}/{path}"] = {k: float(v) for k, v in values.items()}
        # Adding zero drops the sign of zeros, which is not a response.
        bare = np.asarray(activations[path]) + np.float32(0)
        digests.append([f"{name}/{path}", identity.digest(bare.tobytes())])
    return result, identity.digest(digests)[:16]


def _finite(values: dict[str, float]) -> dict[str, float]:
  """Returns the values; raises `FloatingPointError` if one is not finite."""
  if bad := [name for name, value in values.items() if not np.isfinite(value)]:
    raise FloatingPointError(
      f"ptq: {bad} are not finite: the candidate's codes or coefficients overflow, or "
      "an activation payload is not legal."
    )
  return values


def _activation_hook(call: Call) -> str | None:
  """Returns the identity of the activation hook, which all linears share, if any.

  Raises ContractError if a `scope` control would divide an edit of it over linears.
  """
  hook = call.computation.get("encode_act")
  if call.intervention.get("kind") == "scope":
    if call.intervention["parent"]["computation"].get("encode_act") != hook:
      raise ContractError("ptq: `scope` cannot divide an edit of encode_act.")
  return hook
