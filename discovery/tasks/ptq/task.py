"""The PTQ task: quantize a small real model under the frozen contract and measure it.

Two phases in two workers: `fit` holds float weights and calibration tokens and turns a
candidate's hooks into packed operands; `measure` holds the float model and the
evaluation text. Everything that fixes an outcome but the program is in the contract.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.calibration.calibration import token_fingerprint
from mxjax.discovery.core import identity
from mxjax.discovery.core.edit_templates import Card
from mxjax.discovery.core.interface import Interface
from mxjax.discovery.core.residual import Residual
from mxjax.discovery.core.task import Session
from mxjax.discovery.tasks.ptq import interface as ptq_interface
from mxjax.evaluation import datasets
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.recovery.mlp_recovery import CELL_RESIDUES

RANDOM = "random:"
"""Prefix of a model source: `random:3` is a tiny model with random weights."""
OPEN_SHARE = 0.5
"""A residual is open while it exceeds this share of the initial program's."""
EVALUATOR_PACKAGES = (
  "mxjax.numerics",
  "mxjax.pallas_kernels",
  "mxjax.layers",
  "mxjax.models",
  "mxjax.devices",
  "mxjax.calibration",
  "mxjax.methods",
  "mxjax.running",
  "mxjax.evaluation.measures",
  "mxjax.discovery.sandbox",
  "mxjax.discovery.tasks",
)
"""Whose sources decide what an evaluator call measures."""


@functools.lru_cache(maxsize=4)
def load_model(source: str | None, layers: int | None) -> tuple[Any, dict[str, Any]]:
  """A model and its params, cut to its first layers if asked.

  The params are committed to the device: what calls an artifact returns committed
  arrays, and a layer would be compiled again for those.
  """
  model, params = _load(source, layers)
  return model, jax.device_put(params, jax.devices()[0])


def _load(source: str | None, layers: int | None) -> tuple[Any, dict[str, Any]]:
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
  return model, dict(variables["params"])


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


def _absolute(source: str | None) -> str | None:
  """A path that exists here as it is known everywhere; a hub id as it is."""
  is_local = source is not None and pathlib.Path(source).exists()
  return str(pathlib.Path(source).resolve()) if source and is_local else source


class PtqTask:
  """See `mxjax.discovery.core.task.Task`; built from JSON options.

  Attributes:
    spec: The options, with margins and thresholds measured once by `calibrated`.
  """

  target = "log_ppl"
  phases: Sequence[str] = ("fit", "measure")
  call_seconds = 19.0
  """Of a small trained model on a busy pair of cores, most of it compilation: the
  seconds of `benchmarks/results/discovery_run.json` by its 240 calls."""

  def __init__(self, **options: Any) -> None:
    """Takes options.

    Args:
      **options: `model` and `holdout`: what `from_pretrained` takes; `layers` and
        `holdout_layers`: cut the models to their first layers; `calibration` and
        `windows`: `[sequences, length]`; `text`: a text file for both splits, the
        embedded text when None; `replicates`: perplexity runs averaged in the target;
        `seed`: of the calibration windows; `margins`, `initial`: what `calibrated`
        measured.
    """
    defaults = {
      "model": None,
      "layers": None,
      "holdout": None,
      "holdout_layers": None,
      "calibration": [8, 128],
      "windows": [4, 128],
      "text": None,
      "test_text": None,
      "replicates": 1,
      "seed": 0,
      "margins": {},
      "initial": {},
    }
    if unknown := set(options) - set(defaults):
      raise ValueError(f"ptq: unknown options {sorted(unknown)}.")
    self._options = {**defaults, **options}
    # A worker stands in a folder of its own, and a run is resumed from any.
    for name in ("model", "holdout", "text", "test_text"):
      self._options[name] = _absolute(self._options[name])
    if self._options["calibration"][0] < CELL_RESIDUES:
      raise ValueError(
        f"ptq: recover_mlp is told of {CELL_RESIDUES} classes of sequences, so it "
        f"needs at least as many, got calibration {self._options['calibration']}."
      )
    self.spec: Mapping[str, Any] = {"task": "ptq", **self._options}

  @property
  def interface(self) -> Interface:
    """See `ptq_interface`."""
    return ptq_interface.INTERFACE

  @property
  def cards(self) -> Sequence[Card]:
    """See `ptq_cards`."""
    from mxjax.discovery.tasks.ptq import edit_templates

    return edit_templates.CARDS

  @property
  def margins(self) -> Mapping[str, float]:
    """Registered margins; measured by `calibrated`."""
    return self._options["margins"]

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
      "source": identity.source_digest(*EVALUATOR_PACKAGES),
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

  def open(self, phase: str) -> Session:
    """Loads the model and the phase's tokens."""
    from mxjax.discovery.tasks.ptq.phases import Fit, Measure

    return Fit(self) if phase == "fit" else Measure(self)

  def loaded(self) -> tuple[Any, dict[str, Any]]:
    """The model and its float params."""
    return load_model(self._options["model"], self._options["layers"])

  @property
  def replicates(self) -> int:
    """Perplexity runs averaged in the target."""
    return self._options["replicates"]

  @property
  def regimes(self) -> Mapping[str, tuple[str, ...]]:
    """See `Task`."""
    return ptq_interface.REGIMES

  def ideal(self) -> float:
    """Log perplexity of the float model."""
    from mxjax.evaluation.measures.perplexity import perplexity

    model, params = self.loaded()
    return float(np.log(perplexity(model, params, self.tokens("measure")).mean))

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
