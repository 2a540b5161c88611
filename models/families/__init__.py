"""Reading and writing `config.json` of every supported model family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mxjax.errors import NotImplementedRefusal
from mxjax.models.config import ModelConfig
from mxjax.models.families.decoders import FAMILIES


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a parsed `config.json` of any supported family (transformers 4 or 5).

  As in transformers, `model_type` says which family it is, and absent fields have the
  defaults of its config class.

  Raises:
    NotImplementedError: The family, or a field that would change the result, is not
      supported.
    ValueError: A required field is absent, or has a value of another kind.
  """
  name = values.get("model_type")
  if name not in FAMILIES:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"a model_type of {', '.join(FAMILIES)}",
      got=f"{'none' if name is None else name} (architectures "
      f"{values.get('architectures')})",
      mend="choose a model of a supported family",
    )
  return FAMILIES[name].read(values, dtype=dtype)


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
  """Returns the JSON values of a `config.json` that describes this model.

  Raises:
    NotImplementedError: The family's config format cannot express this model.
  """
  if config.family not in FAMILIES:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"a family of {', '.join(FAMILIES)}",
      got=config.family,
      mend="write its config by hand",
    )
  values = FAMILIES[config.family].write(config)
  check_reads_back(values, config)
  return values


def check_reads_back(values: Mapping[str, Any], config: ModelConfig) -> None:
  """Checks that a `config.json` describes the same model as `config`.

  Its stop ids may be fewer: others stand in `generation_config.json`.

  Raises:
    NotImplementedError: Fields differ; all of them are named.
  """
  read = from_hf_config(values, dtype=config.dtype)
  if set(read.eos_ids) <= set(config.eos_ids):
    read = dataclasses.replace(read, eos_ids=config.eos_ids)
  differing = [
    f"{field.name} would read {getattr(read, field.name)!r}, not "
    f"{getattr(config, field.name)!r}"
    for field in dataclasses.fields(config)
    if getattr(read, field.name) != getattr(config, field.name)
  ]
  if differing:
    raise NotImplementedRefusal(
      "config.json",
      expected=f"a model that a {config.family} config can describe",
      got="; ".join(differing),
      mend="use --format safetensors, or the config.json of the model that was "
      "quantized",
    )
