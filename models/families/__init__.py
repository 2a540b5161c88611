"""The families by architecture: the one place that knows all of them."""

from collections.abc import Mapping
from typing import Any

from mxjax.models.config import ModelConfig
from mxjax.models.families import llama, mistral, olmo2, qwen2, qwen3

FAMILIES = {
  "llama": llama,
  "mistral": mistral,
  "qwen2": qwen2,
  "qwen3": qwen3,
  "olmo2": olmo2,
}
"""The module of each family, by `model_type`."""
ARCHITECTURES = {module.ARCHITECTURE: module for module in FAMILIES.values()}
"""The module of each family, by entry of `architectures`."""


def from_hf_config(values: Mapping[str, Any], *, dtype: str = "float32") -> ModelConfig:
  """Translates a `config.json` of any supported family.

  Args:
    values: The parsed file, as transformers 4 or 5 writes it.
    dtype: Compute dtype.

  Returns:
    The model's description.

  Raises:
    NotImplementedError: The architecture, or a field that would change the result, is
      not supported.
    ValueError: A required field is absent.
  """
  names = values.get("architectures") or [values.get("model_type")]
  known = ARCHITECTURES | FAMILIES
  for name in names:
    if name in known:
      return known[name].from_hf_config(values, dtype=dtype)
  raise NotImplementedError(
    f"config.json: expected an architecture of {', '.join(ARCHITECTURES)}, got "
    f"{', '.join(map(str, names))}; choose a model of a supported architecture."
  )
