"""Models with the tokens they are calibrated and tested on, and how they are loaded."""

import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from mxjax import models
from mxjax.audit import plan
from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  token_fingerprint,
)
from mxjax.devices.placement import Placement
from mxjax.errors import ValueRefusal
from mxjax.evaluation import datasets, provenance
from mxjax.evaluation.measures.agreement import agreement
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.evaluation.measures.perplexity import Perplexity, perplexity
from mxjax.layers import inference_packing
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.run import progress
from mxjax.storage import checkpoint

EVALUATING = "evaluating"
"""How the stages of an evaluation begin in a run's progress."""

OnWindow = Callable[[int, int], None]
"""Called with (done, windows) after each test window."""


def evaluation_steps(
  on_progress: progress.OnProgress, layers: int, begin: float = 0.0
) -> OnWindow:
  """Returns what reports test windows as `Progress` from the fraction `begin` to 1."""

  def step(done: int, total: int) -> None:
    stage = f"{EVALUATING}, window {done}/{total}"
    fraction = begin + (1 - begin) * done / total
    on_progress(progress.Progress(layers - 1, layers, stage, fraction))

  return step


@dataclasses.dataclass(frozen=True)
class Subject:
  """A float model and the token windows on which it is evaluated.

  Attributes:
    model: The model.
    params: Its float params.
    tests: Windows by name, int32 `[windows, length]` each.
    replicates: Perplexity runs; those after the first perturb the embedding.
    with_operator_error: Whether to measure it, on the first window of the first test.
    with_agreement: Whether to compare predictions with the float model's by token, on
      the first test.
    mesh: Devices that share the work, or None for one.
  """

  model: CausalLanguageModel
  params: Params
  tests: dict[str, np.ndarray]
  replicates: int = 1
  with_operator_error: bool = True
  with_agreement: bool = False
  mesh: Mesh | None = None

  @property
  def dtype(self) -> str | None:
    """The model's compute dtype; None if it does not tell."""
    return getattr(getattr(self.model, "config", None), "dtype", None)

  @property
  def attention(self) -> dict[str, str] | None:
    """What computes the model's attention here; None if it does not tell."""
    return getattr(self.model, "attention", None)

  def float_perplexities(self, on_window: OnWindow | None = None) -> dict[str, float]:
    """Measures unperturbed perplexity of the float model on every test."""
    results = self._perplexities(self.params, 1, on_window)
    return {name: result.mean for name, result in results.items()}

  def _perplexities(
    self, params: Params, replicates: int, on_window: OnWindow | None
  ) -> dict[str, Perplexity]:
    """Measures all tests, and counts their windows together."""
    total = replicates * sum(map(len, self.tests.values()))
    done = itertools.count()
    step = (lambda *_: on_window(next(done), total)) if on_window else None
    if step:
      step()
    options = {"replicates": replicates, "mesh": self.mesh, "on_window": step}
    return {
      name: perplexity(self.model, params, tokens, **options)
      for name, tokens in self.tests.items()
    }

  def measure(
    self,
    quantized: Params,
    reference: Params | None = None,
    on_window: OnWindow | None = None,
  ) -> dict[str, Any]:
    """Measures quantized params: perplexities, operator error, agreement; JSON-ready.

    `reference` replaces the subject's float params if the program rewrote them;
    `on_window` is called with (done, windows) after each window of a perplexity.
    """
    start = time.perf_counter()
    exact = reference or self.params
    results = {
      name: result.to_dict()
      for name, result in self._perplexities(
        quantized, self.replicates, on_window
      ).items()
    }
    # The rest runs on one device, a layer at a time.
    quantized = Placement.of(self.mesh).on_primary(quantized)
    error = compared = None
    first = next(iter(self.tests.values()), None)
    if self.with_operator_error and first is not None:
      error = operator_error(self.model, exact, quantized, first[:1])
    if self.with_agreement and first is not None:
      compared = agreement(self.model, exact, quantized, first).to_dict()
    return {
      "dtype": self.dtype,
      "perplexity": results,
      "operator_error": error,
      "agreement": compared,
      "tests": {n: token_fingerprint(t) for n, t in self.tests.items()},
      "evaluation_seconds": time.perf_counter() - start,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationSample:
  """Which windows of which text a model is calibrated on; see `datasets.load_tokens`.

  Attributes:
    source: Data to take them from; None is the embedded text.
    sequences: How many.
    length: Tokens in each.
    seed: Of the sample.
    sampling: How they are cut; None is the custom for the source.
  """

  source: str | None = None
  sequences: int = 128
  length: int = 2048
  seed: int = 0
  sampling: str | None = None

  def load(self, tokenizer: models.Tokenizer) -> np.ndarray:
    """Loads the tokens, int32 `[sequences, length]`."""
    return datasets.load_tokens(
      self.source,
      tokenizer,
      count=self.sequences,
      length=self.length,
      split="calibration",
      seed=self.seed,
      sampling=self.sampling,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Which windows a quantized model is measured on, and what is measured.

  Attributes:
    sources: Sets of test data, as `datasets.load_tokens` takes them.
    windows: How many of each.
    window_length: Tokens in each.
    replicates: See `Subject`.
    operator_error: Whether to measure it.
    agreement: Whether to compare predictions with the float model's.
  """

  sources: tuple[str | None, ...] = (None,)
  windows: int = 8
  window_length: int = 2048
  replicates: int = 1
  operator_error: bool = False
  agreement: bool = False

  def subject(
    self,
    model: models.CausalLM,
    params: Params,
    tokenizer: models.Tokenizer,
    mesh: Mesh | None = None,
  ) -> Subject:
    """Loads the windows and joins a float model with them.

    Raises:
      ValueError: Two sets have the same name, or one has too little text.
    """
    tests: dict[str, np.ndarray] = {}
    for source in self.sources:
      name = pathlib.Path(source).stem if source else "embedded test"
      if name in tests:
        raise ValueRefusal(
          "test data",
          expected="sets of different names",
          got=f"two named {name}",
          mend="rename one of the files",
        )
      tests[name] = datasets.load_tokens(
        source,
        tokenizer,
        count=self.windows,
        length=self.window_length,
        split="test",
      )
    return Subject(
      model,
      params,
      tests,
      replicates=self.replicates,
      with_operator_error=self.operator_error,
      with_agreement=self.agreement,
      mesh=mesh,
    )


class Prepared(NamedTuple):
  """What is quantized: a loaded model with its tests, on its calibration tokens.

  Attributes:
    name: The model as it was given, or the name of the embedded one.
    tokenizer: The model's.
    subject: The model and its tests; its params may stay on disk.
    sample: Where the tokens are from.
    tokens: Calibration tokens, int32 `[sequences, length]`.
  """

  name: str
  tokenizer: models.Tokenizer
  subject: Subject
  sample: CalibrationSample
  tokens: np.ndarray


def prepare(
  model: str | None,
  sample: CalibrationSample,
  evaluation: Evaluation,
  *,
  dtype: str | None = None,
  on_disk: bool | None = None,
  mesh: Mesh | None = None,
) -> Prepared:
  """Loads a model, its calibration tokens and its tests.

  `model` and `dtype` are those of `models.open_pretrained`. With `on_disk` each layer
  is read when it is needed; None does so where memory is short; see `stays_on_disk`.
  """
  exact, params = models.open_pretrained(model, dtype=dtype)
  tokenizer = models.load_tokenizer(model)
  # Absent or short texts are found before any weight is read.
  tokens = sample.load(tokenizer)
  subject = evaluation.subject(exact, params, tokenizer, mesh)
  if not stays_on_disk(params.config, on_disk):
    subject = dataclasses.replace(subject, params=params.load())
  return Prepared(model or provenance.DEFAULT_MODEL, tokenizer, subject, sample, tokens)


def stays_on_disk(config: models.ModelConfig, on_disk: bool | None = None) -> bool:
  """Returns `on_disk`, or if it is None whether BF16 weights fill half the memory."""
  if on_disk is not None:
    return on_disk
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return plan.plan(config).bf16 > memory // 2


def checkpoint_folder(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the checkpoint in a folder that a build wrote, or the folder itself."""
  inside = pathlib.Path(path) / checkpoint.CHECKPOINT
  return inside if inside.is_dir() else pathlib.Path(path)


def is_checkpoint(source: str | os.PathLike[str] | None) -> bool:
  """Tells whether `source` is a folder that a build wrote, or its checkpoint."""
  if not source:
    return False
  return (checkpoint_folder(source) / checkpoint.MANIFEST).is_file()


def positions_of(source: str | os.PathLike[str] | None) -> int:
  """Returns the longest sequence of what `restore` reads; reads no array."""
  if source is not None and is_checkpoint(source):
    manifest = checkpoint.read_manifest(checkpoint_folder(source))
    return manifest["model_config"]["max_positions"]
  return models.load_config(None if source is None else str(source)).max_positions


def restore(
  source: str | os.PathLike[str] | None,
  mesh: Mesh | None = None,
  storage: Mapping[str, Any] | None = None,
  dtype: str | None = None,
) -> tuple[models.CausalLM, dict[str, Any], models.Tokenizer]:
  """Loads the model, params and tokenizer that a build wrote, or any float model.

  `source` is the build's folder, the checkpoint in it, or what `models.from_pretrained`
  takes; `mesh` is where to place a checkpoint's params, and `storage` the arguments of
  `pack_for_inference` (none: a checkpoint's linears are multiplied as `checkpoint.load`
  does by default). `dtype` is the compute dtype of a float model; without it,
  `models.default_dtype` decides.

  Raises:
    ValueError: A checkpoint computes in another dtype.
  """
  if is_checkpoint(source):
    folder = checkpoint_folder(str(source))
    # `pack_for_inference` below chooses the products together with the rest.
    products = None if storage else "fastest"
    # Weight-only models are evaluated, too; what they are called says what they are.
    activations = checkpoint.read_contract(folder).activations
    contract = dataclasses.replace(PAPER_CONTRACT, activations=activations)
    model, params = checkpoint.load(
      folder, contract=contract, mesh=mesh, products=products
    )
    if dtype not in (None, model.config.dtype):
      raise ValueRefusal(
        folder,
        expected=f"--dtype {model.config.dtype}, that of its build",
        got=dtype,
        mend=f"leave the option out, or quantize again with --dtype {dtype}",
      )
    tokenizer = models.Tokenizer.from_folder(folder / checkpoint.TOKENIZER)
  else:
    name = None if source is None else str(source)
    model, params = models.from_pretrained(name, dtype=dtype)
    tokenizer = models.load_tokenizer(name)
  if storage:
    params = inference_packing.pack_for_inference(params, **storage)
  return model, params, tokenizer
