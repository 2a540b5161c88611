"""On-disk statistics shared by runs on one float model and one calibration set.

The store holds the hidden states entering every layer and the reductions of every
linear input, so a later run need not rerun the float layers. The key hashes the content
of params and tokens, and the model's config or else its computation: one store can hold
several models and calibration sets.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration, CausalLanguageModel, Params
from mxjax.storage.atomic_io import read_checked, write_checked
from mxjax.storage.tree_io import flatten

FORMAT = "checked"
"""Of the files; another one has another key, so that its files are never read."""


def params_digest(params: Params) -> str:
  """Computes the hex SHA-256 of a float model's arrays by path, one key at a time."""
  digest = hashlib.sha256()
  for name in sorted(params):
    for path, array in sorted(flatten(params[name]).items()):
      digest.update(f"{name}/{path} {array.dtype} {array.shape}".encode())
      digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def computation_digest(model: CausalLanguageModel, params: Params, inputs: Any) -> str:
  """Computes the hex SHA-256 of the program that takes one example to its outputs.

  It is that of the traced embedding, layers and outputs: another activation function,
  epsilon or mask changes it, and other weights of the same shapes do not.
  """
  digest = hashlib.sha256()

  def trace(function: Callable[..., Any], *arguments: Any) -> Any:
    shapes = jax.eval_shape(lambda *given: given, *arguments)
    traced, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    # Functions in the text of a program have their addresses, which differ each time.
    digest.update(re.sub("0x[0-9a-f]+", "", str(traced.jaxpr)).encode())
    for constant in traced.consts:
      digest.update(np.ascontiguousarray(constant).tobytes())
    return result

  example = jax.tree.map(lambda array: array[:1], inputs)
  outer = streams.outer_params(model, params)
  hidden = trace(model.embed, outer, example)
  for index in range(model.num_layers):
    hidden, _ = trace(model.layer_with_taps, params[model.layer_name(index)], hidden)
  # A `FlaxModel` has outputs of any kind in place of logits.
  if outputs := getattr(model, "outputs", None):
    trace(outputs, params, example)
  else:
    trace(model.logits, outer, hidden)
  return digest.hexdigest()


def model_identity(model: CausalLanguageModel, params: Params, inputs: Any) -> Any:
  """Returns what, beside weights, determines a model's outputs, JSON-ready.

  It is the model's config, where that has `to_dict`, and else the digest of what the
  model computes.
  """
  # Equal weights compute other states with another rotary base, epsilon or dtype.
  to_dict = getattr(getattr(model, "config", None), "to_dict", None)
  return to_dict() if to_dict else computation_digest(model, params, inputs)


def _write(path: pathlib.Path, array: Any) -> None:
  write_checked(path, {"array": array})


def _read(path: pathlib.Path) -> jax.Array:
  return jnp.asarray(read_checked(path)["array"])


class Reductions(dict[str, jax.Array]):
  """Reductions of one linear input by name; each is a file, written once."""

  def __init__(self, folder: pathlib.Path) -> None:
    super().__init__()
    self._folder = folder

  def __missing__(self, name: str) -> jax.Array:
    file = self._folder / f"{name}.safetensors"
    if not file.is_file():
      raise KeyError(name)
    array = _read(file)
    super().__setitem__(name, array)
    return array

  def __setitem__(self, name: str, array: jax.Array) -> None:
    super().__setitem__(name, array)
    _write(self._folder / f"{name}.safetensors", array)


class CalibrationStore:
  """Stored statistics of one float model and one calibration set."""

  def __init__(
    self,
    root: str | os.PathLike[str],
    params: Params,
    calib: Calibration,
  ) -> None:
    """Derives the folder from the content of params and tokens; writes nothing.

    `root` has one subfolder for each content key, which includes `model_identity`.
    """
    identity = model_identity(calib.model, params, calib.tokens)
    described = json.dumps(identity, sort_keys=True)
    parts = [FORMAT, params_digest(params), calib.fingerprint, described]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    self.path = pathlib.Path(root) / key[:16]

  def _hidden(self, index: int) -> pathlib.Path:
    return self.path / f"hidden_{index}.safetensors"

  def has_hidden(self, index: int) -> bool:
    """Whether the hidden states entering a layer are stored."""
    return self._hidden(index).is_file()

  def hidden(self, index: int, chunk: int) -> list[jax.Array]:
    """Reads the hidden states entering a layer, in chunks `[chunk, T, d]`."""
    array = _read(self._hidden(index))
    return [array[first : first + chunk] for first in range(0, len(array), chunk)]

  def put_hidden(self, index: int, stream: list[jax.Array]) -> None:
    """Writes the hidden states entering a layer unless they are stored already."""
    if not self.has_hidden(index):
      _write(self._hidden(index), np.concatenate([np.asarray(part) for part in stream]))

  def reductions(self, index: int, tap: str) -> Reductions:
    """Returns the stored reductions of a linear input of layer `index`."""
    return Reductions(self.path / f"layer_{index}" / tap)
