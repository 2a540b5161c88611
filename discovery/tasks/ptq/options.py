"""Options of the PTQ task, and loading of the models and tokens that they name."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import models
from mxjax.errors import ValueRefusal
from mxjax.evaluation import datasets
from mxjax.numerics.mxfp4 import BLOCK_SIZE
from mxjax.numerics.recovery.mlp_recovery import CELL_RESIDUES

RANDOM = "random:"
"""Prefix of a model source: `random:3` is a tiny model with random weights."""
Objective = Literal["log_ppl", "kl", "fit3"]
ActivationRule = Literal["program", "one_code"]
Dtype = Literal["float32", "bfloat16"]
CHOICES = {
  "dtype": get_args(Dtype),
  "objective": get_args(Objective),
  "activation_rule": get_args(ActivationRule),
}
TEXTS = ("text", "test_text", "second_text")
VOCABULARY = 97
"""Vocabulary size of a random model."""
PROXY_BLOCKS = 2
"""Blocks of inputs to which the proxy cuts a linear."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PtqOptions:
  """JSON options of the task; existing paths are made absolute.

  Attributes:
    model: Model used by the search: anything that `from_pretrained` accepts.
    layers: Keeps only this many first layers of the model.
    dtype: Compute dtype of the float models, `float32` or `bfloat16`.
    holdout: The held-out model, which the search never loads.
    holdout_layers: Keeps only this many first layers of the held-out model.
    transfer: The model on which an improvement must hold to be accepted.
    transfer_layers: Keeps only this many first layers of that model.
    calibration: `[sequences, length]` of the calibration windows.
    windows: `[windows, length]` of the evaluation text.
    holdout_windows: The same on the held-out model; None for those of the search.
    other_windows: `[windows, length]`, from the end of the evaluation text, of the
      control `other_text`; None: no such control.
    text: A text file for both splits; None for the embedded text.
    test_text: A separate file for the evaluation split.
    module_layers: `[first, end]`, without the end, of the layers whose modules
      `value_error`, `mlp_error` and the observables of down_proj are about; None for
      all.
    replicates: Perplexity runs averaged in the target.
    seed: Seed for drawing the calibration windows.
    second_text: Another evaluation text, which `fit3` needs.
    objective: The observable that the search minimizes: log perplexity; the mean KL
      divergence from the float model; or `fit3`, Eq. fit3 with a stand-in for
      ARC-Challenge, of which a small model knows nothing: the loss of accuracy at
      predicting the float model's own next token. The last two are measured only when
      they are the objective.
    activation_rule: What rounds activations at run time: `program`, the hook
      encode_act; or `one_code`, HiRes' own rule, with the program's tables. Then
      programs have no such hook, and none costs more at run time than HiRes.
    proxy: Whether calls measure only the operator error of a few blocks.
    margins: Registered margins, measured by `margins.calibrated`.
    initial: Observables of the initial program, measured with the margins.
    references: The objective of the float model, and of the initial program with only
      one of the two operands rounded, measured with the margins.

  Raises:
    ValueError: A name is unknown, `fit3` has no second text, or there are too few
      calibration sequences for the MLP fit.
  """

  model: str | None = None
  layers: int | None = None
  dtype: Dtype = "float32"
  holdout: str | None = None
  holdout_layers: int | None = None
  transfer: str | None = None
  transfer_layers: int | None = None
  calibration: Sequence[int] = (8, 128)
  windows: Sequence[int] = (4, 128)
  holdout_windows: Sequence[int] | None = None
  other_windows: Sequence[int] | None = None
  text: str | None = None
  test_text: str | None = None
  second_text: str | None = None
  module_layers: Sequence[int] | None = None
  replicates: int = 1
  seed: int = 0
  objective: Objective = "log_ppl"
  activation_rule: ActivationRule = "program"
  proxy: bool = False
  margins: Mapping[str, float] = dataclasses.field(default_factory=dict)
  initial: Mapping[str, float] = dataclasses.field(default_factory=dict)
  references: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    """Makes paths absolute, because workers and resumed runs use other folders."""
    for name in ("model", "holdout", "transfer", *TEXTS):
      source = getattr(self, name)
      if source is not None and pathlib.Path(source).exists():
        object.__setattr__(self, name, str(pathlib.Path(source).resolve()))
    for name, known in CHOICES.items():
      if (value := getattr(self, name)) not in known:
        raise ValueRefusal(
          "ptq",
          expected=f"{name} to be one of {', '.join(known)}",
          got=repr(value),
          mend="use one of these",
        )
    if self.objective == "fit3" and self.second_text is None and not self.is_random:
      raise ValueRefusal(
        "ptq",
        expected="a second_text for the objective fit3",
        got="none",
        mend="name the file of another text",
      )
    if self.calibration[0] < CELL_RESIDUES:
      raise ValueRefusal(
        "ptq",
        expected=f"calibration on at least {CELL_RESIDUES} sequences, because "
        "recover_mlp is told of as many classes of them",
        got=self.calibration,
        mend="raise its first number",
      )

  @property
  def frozen_hooks(self) -> tuple[str, ...]:
    """Hooks of the interface that programs of this task do not have."""
    return ("encode_act",) if self.activation_rule == "one_code" else ()

  @property
  def is_random(self) -> bool:
    """Whether the model has random weights."""
    return self.model is not None and self.model.startswith(RANDOM)

  @functools.cached_property
  def config(self) -> models.ModelConfig:
    """Configuration of the model that the search quantizes, with all its layers."""
    return _config(self.model, self.dtype)

  @functools.cached_property
  def layer_count(self) -> int:
    """Layers of the model that the search quantizes."""
    count = self.config.num_layers
    return count if self.layers is None else min(self.layers, count)

  @property
  def tokens_scored(self) -> dict[str, int]:
    """Tokens that a primary run scores, and those of the control `other_text`."""
    texts = 2 if self.objective == "fit3" else 1
    other = int(np.prod(self.other_windows)) if self.other_windows else 0
    return {
      "primary": texts * self.replicates * int(np.prod(self.windows)),
      "other": self.replicates * other,
    }

  @functools.cached_property
  def sizes(self) -> list[dict[str, int]]:
    """Sizes of the linears, heads and MLPs of the model, and of what the proxy cuts."""
    config = _config(self.model, self.dtype)
    tokens = {"tokens": self.calibration[1]}
    heads = config.num_heads * config.head_dim
    whole = [config.hidden_size, heads, config.intermediate_size]
    cut = [min(width, PROXY_BLOCKS * BLOCK_SIZE) for width in whole]
    mlp = {"hidden": config.intermediate_size, "model": config.hidden_size}
    return [
      *(
        {"width": width, "blocks": width // BLOCK_SIZE, **tokens}
        for width in dict.fromkeys([*whole, *cut])
      ),
      {"head": config.head_dim, **tokens},
      {**mlp, **tokens},
    ]

  def load(self) -> tuple[Any, dict[str, Any]]:
    """Returns the model and its float params."""
    return _load_model(self.model, self.layers, self.dtype)

  def tokens(self, phase: str) -> np.ndarray:
    """Returns the token windows of a phase, int32 `[windows, length]`.

    Beside the phases, `second` names the windows of the second text, and `other` those
    of the control `other_text`. The proxy has those of the calibration.

    Raises:
      ValueError: The other windows would be among those of the measurement.
    """
    is_fit, is_other = phase in ("fit", "proxy"), phase == "other"
    shape = self.calibration if is_fit else self.windows
    if is_other:
      assert self.other_windows is not None
      shape = self.other_windows
    # The seed draws calibration windows; what is scored is the same for all seeds.
    seed = self.seed if is_fit else 0
    if self.is_random:
      # Two streams, so that a random model is not scored on its calibration tokens.
      generator = np.random.default_rng([seed, not is_fit])
      drawn = (shape[0] * (2 if phase == "second" else 3 if is_other else 1), shape[1])
      ids = generator.integers(0, VOCABULARY, drawn).astype(np.int32)
      return ids[-shape[0] :]
    if is_other:
      return self._last_windows(shape)
    return datasets.load_tokens(
      self._text(phase),
      models.load_tokenizer(self.model),
      count=shape[0],
      length=shape[1],
      split="calibration" if is_fit else "test",
      seed=seed,
    )

  def _last_windows(self, shape: Sequence[int]) -> np.ndarray:
    """Returns the last windows of the evaluation text, far from those of any score."""
    every = datasets.load_tokens(
      self._text("measure"),
      models.load_tokenizer(self.model),
      count=None,
      length=shape[1],
      split="test",
      seed=0,
    )
    scored = max(np.prod(w) for w in (self.windows, self.holdout_windows) if w)
    if every.size - np.prod(shape) < scored:
      raise ValueRefusal(
        "ptq",
        expected=f"an evaluation text of at least {scored + np.prod(shape)} tokens, "
        "so that other_windows are none of a score",
        got=every.size,
        mend="use fewer windows or a longer text",
      )
    return every[-shape[0] :]

  def _text(self, phase: str) -> str | None:
    own = {"measure": self.test_text, "second": self.second_text}
    return own.get(phase) or self.text

  def readable(self, phase: str) -> list[str]:
    """Returns the model files and the phase's texts: all paths its worker may read."""
    second = self.second_text if phase == "measure" else None
    paths = (None if self.is_random else self.model, self._text(phase), second)
    return [str(pathlib.Path(path).resolve()) for path in paths if path]


@functools.lru_cache(maxsize=4)
def _load_model(
  source: str | None, layers: int | None, dtype: Dtype
) -> tuple[Any, dict[str, Any]]:
  """Loads a model and its params, committed to the device.

  Artifacts return committed arrays, so uncommitted params would compile a layer twice.
  """
  if source is not None and source.startswith(RANDOM):
    model = models.CausalLM(_config(source, dtype))
    seed = jax.random.key(int(source.removeprefix(RANDOM)))
    params = dict(model.init(seed, jnp.zeros((1, 4), jnp.int32))["params"])
  else:
    model, params = models.from_pretrained(source, dtype=dtype)
    if layers is not None and layers < model.num_layers:
      config = dataclasses.replace(model.config, num_layers=layers)
      cut = {model.layer_name(index) for index in range(layers, model.num_layers)}
      params = {key: value for key, value in params.items() if key not in cut}
      model = models.CausalLM(config)
  return model, jax.device_put(params, jax.devices()[0])


def _config(source: str | None, dtype: Dtype) -> models.ModelConfig:
  if source is None or not source.startswith(RANDOM):
    return models.load_config(source, dtype=dtype)
  # Tiny, with random weights: it exercises all code and has no meaning.
  return models.ModelConfig(
    vocab_size=VOCABULARY,
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
    dtype=dtype,
  )
