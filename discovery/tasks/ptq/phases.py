"""The two phases of the PTQ evaluator: `fit` quantizes, `measure` measures."""

import dataclasses
import functools
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import Calibration
from mxjax.calibration import streams
from mxjax.calibration.calibration import targets
from mxjax.devices import execution
from mxjax.discovery.core import identity
from mxjax.discovery.core.task import Artifacts, Call, ContractError
from mxjax.discovery.sandbox import artifact, tracing
from mxjax.discovery.tasks.ptq import candidate, interface
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.recovery import mlp_recovery, value_recovery
from mxjax.numerics.shaping import input_maps
from mxjax.running import pipeline

if TYPE_CHECKING:
  from mxjax.discovery.tasks.ptq.task import PtqTask


def default_identities() -> dict[str, str]:
  """Lowered identity of every default hook; traced from our own source."""
  specs = interface.INTERFACE.to_list()
  traced = tracing.trace(interface.INTERFACE.default_source(), specs)
  return {
    hook.name: artifact.gate(spec, hook.unit, hook.batched)
    for hook, spec in zip(traced, specs, strict=True)
  }


class Fit:
  """Quantizes: weights and calibration tokens, no evaluation text."""

  def __init__(self, task: "PtqTask") -> None:
    """Loads them."""
    self._model, self._params = task.loaded()
    self._calibration = Calibration(self._model, task.tokens("fit"))
    self._defaults = default_identities()
    self._paths = [
      (layer, block, name)
      for layer in range(self._model.num_layers)
      for block, name in targets(self._model, PAPER_CONTRACT)
    ]

  def run(
    self, call: Call, artifacts: Artifacts, payload: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the pipeline with the candidate's hooks; packs what it made."""
    del payload
    program = candidate.CandidateProgram(call, artifacts, self._paths, self._defaults)
    result = pipeline.quantize_with_record(
      self._params, self._calibration, program, check=False, probe=False
    )
    packed, outputs = _pack(result.params, self._model)
    buffer = io.BytesIO()
    np.savez(buffer, **packed)  # pyright: ignore[reportArgumentType]
    return {"outputs": outputs}, buffer.getvalue()


def _pack(
  params: Mapping[str, Any], model: Any
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Packed operands by path, and digests of what each hook decided."""
  arrays: dict[str, np.ndarray] = {}
  for index in range(model.num_layers):
    layer = params[model.layer_name(index)]
    for block, name in model.projection_taps:
      leaf, path = layer[block][name]["weight"], f"{index}/{block}/{name}"
      arrays[f"{path}/codes"] = np.asarray(leaf.weight.codes)
      arrays[f"{path}/scales"] = np.asarray(leaf.weight.scales)
      if leaf.input_map is not None:
        arrays[f"{path}/map"] = np.asarray(leaf.input_map.matrix)
      for field in dataclasses.fields(leaf.rounding):
        table = getattr(leaf.rounding, field.name)
        if isinstance(table, (jax.Array, np.ndarray)):
          arrays[f"{path}/{field.name}"] = np.asarray(table)
    for block, name in (("self_attn", "value_recovery"), ("mlp", "mlp_recovery")):
      leaf = layer[block].get(name)
      for field in dataclasses.fields(leaf) if leaf is not None else ():
        arrays[f"{index}/{block}/{name}/{field.name}"] = np.asarray(
          getattr(leaf, field.name)
        )
  digests = lambda *ends: identity.digest(
    [
      [key, identity.digest(value.tobytes())]
      for key, value in sorted(arrays.items())
      if key.split("/")[-1] in ends or key.split("/")[-2] in ends
    ]
  )[:16]
  return arrays, {
    "transform": digests("map"),
    "balance": digests("map"),
    "encode_weight": digests("codes", "scales"),
    "recover_value": digests("value_recovery"),
    "recover_mlp": digests("mlp_recovery"),
  }


def unpack(
  payload: bytes, params: Mapping[str, Any], model: Any, rounding: Any
) -> dict[str, Any]:
  """The inverse of `_pack`: params with quantized leaves."""
  with np.load(io.BytesIO(payload), allow_pickle=False) as file:
    arrays = {key: jnp.asarray(file[key]) for key in file.files}
  result = dict(params)
  for index in range(model.num_layers):
    name = model.layer_name(index)
    layer = {block: dict(value) for block, value in params[name].items()}
    for block, linear in model.projection_taps:
      path = f"{index}/{block}/{linear}"
      matrix, gram = arrays.get(f"{path}/map"), arrays.get(f"{path}/gram")
      rule = Nearest()
      if gram is not None:
        rule = candidate.HookRounding(gram, arrays[f"{path}/cross"], rounding())
      leaf = QuantizedLinear(
        mxfp4.MXTensor(arrays[f"{path}/codes"], arrays[f"{path}/scales"]),
        None if matrix is None else input_maps.BlockDense(matrix),
        rule,  # pyright: ignore[reportArgumentType]
      )
      mxfp4.check_legal(leaf.weight, path)
      layer[block][linear] = {**params[name][block][linear], "weight": leaf}
    for block, leaf_name, kind in (
      ("self_attn", "value_recovery", value_recovery.ValueRecovery),
      ("mlp", "mlp_recovery", mlp_recovery.MlpRecovery),
    ):
      fields = [f.name for f in dataclasses.fields(kind)]
      place = f"{index}/{block}/{leaf_name}"
      if f"{place}/{fields[0]}" in arrays:
        layer[block][leaf_name] = kind(*(arrays[f"{place}/{f}"] for f in fields))
    result[name] = layer
  return result


@functools.partial(jax.jit, static_argnames="model")
def _mapped(
  model: Any, layer: Any, maps: Mapping[str, Any], hidden: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Output of a layer of the float model, and each linear's mapped input.

  A program of its own: the inputs are the same to the bit whatever rounds them, and so
  two rounding rules that agree are seen to agree.
  """
  output, taps = model.layer_with_taps(layer, hidden)
  result = {}
  for (block, name), tap in model.projection_taps.items():
    x, input_map = taps[tap].astype(jnp.float32), maps[f"{block}/{name}"]
    blocks = mxfp4.to_blocks(x.reshape(-1, x.shape[-1]))
    mapped = blocks if input_map is None else input_map.apply(blocks)
    result[f"{block}/{name}"] = mapped
  return output, result


@jax.jit
def _errors(
  leaves: Mapping[str, QuantizedLinear], folded: Any, inputs: Mapping[str, jax.Array]
) -> tuple[dict[str, dict[str, jax.Array]], dict[str, jax.Array]]:
  """Relative squared errors of a layer's linears on given inputs, and those rounded.

  `total` is the operator error; `activation` rounds activations only, `weight` weights
  only; `contaminated` is the share of blocks whose largest magnitude is over 32 times
  the median one.
  """
  errors, activations = {}, {}
  for path, leaf in leaves.items():
    mapped = inputs[path]
    rounded = leaf.rounding.round(mapped, leaf.rules)
    activations[path] = rounded
    product = lambda a, b: jnp.einsum("bin,bim->nm", a, b, precision=precision.HIGHEST)
    coded = mxfp4.to_blocks(mxfp4.decode(leaf.weight, jnp.float32))
    exact = product(mapped, folded[path])
    size = jnp.square(exact).sum()
    share = lambda y, exact=exact, size=size: jnp.square(y - exact).sum() / size
    magnitudes = jnp.sort(jnp.abs(mapped), axis=1)
    middle = 0.5 * (magnitudes[:, 15] + magnitudes[:, 16])
    errors[path] = {
      "total": share(product(rounded, coded)),
      "activation": share(product(rounded, folded[path])),
      "weight": share(product(mapped, coded)),
      "contaminated": (magnitudes[:, -1] > 32 * middle).mean(dtype=jnp.float32),
    }
  return errors, activations


@jax.jit
def _folded(weight: jax.Array, input_map: Any) -> jax.Array:
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  return blocks if input_map is None else input_map.fold(blocks)


class Measure:
  """Measures: the float model and the evaluation text, no calibration tokens."""

  def __init__(self, task: "PtqTask") -> None:
    """Loads them."""
    self._model, self._params = task.loaded()
    self._tokens = task.tokens("measure")
    self._replicates = task.replicates

  def run(
    self, call: Call, artifacts: Artifacts, payload: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Perplexity and operator errors of what `fit` packed."""
    rounding = lambda: artifacts.batched(call.computation["encode_act"])
    model = self._model
    if call.intervention.get("kind") == "scope":
      rounding = self._scoped(call, artifacts)
    params = unpack(payload, self._params, model, rounding)
    errors, rounded = self._operator_errors(params)
    mean = lambda key, keep=lambda path: True: float(
      np.mean([e[key] for path, e in errors.items() if keep(path)])
    )
    measured = perplexity(model, params, self._tokens, replicates=self._replicates)
    values = {
      "log_ppl": float(np.mean(np.log(measured.values))),
      "operator_error": mean("total"),
      "activation_error": mean("activation"),
      "weight_error": mean("weight"),
      "contaminated": mean("contaminated"),
      "value_error": mean("total", lambda p: p.endswith("v_proj")),
      "mlp_error": mean("total", lambda p: "/mlp/" in p),
    }
    for index in range(model.num_layers):
      name = model.layer_name(index)
      values[f"layer_{index}"] = mean("total", lambda p: p.startswith(name + "/"))  # noqa: B023
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
      raise FloatingPointError(
        f"ptq: {bad} are not finite: the candidate's codes or coefficients overflow, "
        "or an activation payload is not legal."
      )
    return {"values": values, "outputs": {"encode_act": rounded}}, b""

  def _scoped(self, call: Call, artifacts: Artifacts) -> Any:
    """The activation hook under `scope`, which must be one for all linears."""
    before = call.intervention["parent"]["computation"]["encode_act"]
    if before != call.computation["encode_act"]:
      raise ContractError("ptq: `scope` cannot divide an edit of encode_act.")
    return lambda: artifacts.batched(before)

  def _operator_errors(
    self, params: Mapping[str, Any]
  ) -> tuple[dict[str, dict[str, float]], str]:
    """Errors by linear, and a digest of the A4 values that its hook made there."""
    model = self._model
    tokens = jnp.asarray(self._tokens[:1], jnp.int32)
    hidden = model.embed(streams.outer_params(self._params), tokens)
    result, digests = {}, []
    for index in range(model.num_layers):
      name = model.layer_name(index)
      leaves = {
        f"{block}/{linear}": params[name][block][linear]["weight"]
        for block, linear in model.projection_taps
      }
      folded = {
        path: execution.block_on_cpu(
          _folded(
            self._params[name][path.split("/")[0]][path.split("/")[1]]["weight"],
            leaf.input_map,
          )
        )
        for path, leaf in leaves.items()
      }
      maps = {path: leaf.input_map for path, leaf in leaves.items()}
      hidden, inputs = execution.block_on_cpu(
        _mapped(model, self._params[name], maps, hidden)
      )
      errors, activations = execution.block_on_cpu(_errors(leaves, folded, inputs))
      for path, values in errors.items():
        result[f"{name}/{path}"] = {k: float(v) for k, v in values.items()}
        # A zero's sign is no response: adding zero drops it.
        bare = np.asarray(activations[path]) + np.float32(0)
        digests.append([f"{name}/{path}", identity.digest(bare.tobytes())])
    return result, identity.digest(digests)[:16]
