"""On-disk statistics shared by runs on one float model and one calibration set.

The store holds the hidden states entering every layer and the reductions of every
linear input, so a later run need not rerun the float layers. The key hashes the content
of params and tokens, the model's config or else its computation, and the environment
(`devices.environment`): one store can hold several models and calibration sets, and
what another version, flag or device computed is never read.
"""

import concurrent.futures
import hashlib
import json
import logging
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
from mxjax.devices.environment import differing, environment
from mxjax.devices.placement import ONE_DEVICE
from mxjax.errors import TypeRefusal
from mxjax.storage import digested_json
from mxjax.storage.atomic_io import read_checked, write_checked, write_json
from mxjax.storage.tree_io import array_sha256, leaves_by_path

FORMAT = "checked"
"""This names the format of the files: another one has another key and is not read."""
ABOUT = "about.json"
"""This file says of what, and in which environment, a store's folder was computed."""
MOST_DIGESTS_AT_ONCE = 8
"""So many threads digest weights; SHA-256 and copies from a device release Python."""

_log = logging.getLogger(__name__)


def params_digest(params: Params) -> str:
  """Computes the hex SHA-256 of a float model's arrays by path, one key at a time.

  It digests the digests of the arrays, which threads compute from their buffers where
  these lie in the host's memory, and else from one copy of each that is under way.
  """
  digest = hashlib.sha256()
  threads = min(MOST_DIGESTS_AT_ONCE, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for name in sorted(params):
      # Sorted by path: the order of a dict says nothing of a model.
      leaves = sorted(leaves_by_path(params[name]).items())
      digests = pool.map(array_sha256, [leaf for _, leaf in leaves])
      for (path, leaf), own in zip(leaves, digests, strict=True):
        # Equal bytes can be of other shapes or dtypes.
        digest.update(f"{name}/{path} {leaf.dtype} {leaf.shape} {own};".encode())
  return digest.hexdigest()


def computation_digest(model: CausalLanguageModel, params: Params, inputs: Any) -> str:
  """Computes the hex SHA-256 of the program that takes one example to its outputs.

  It is that of the traced embedding, layers and outputs: another activation function,
  epsilon or mask changes it, and other weights of the same shapes do not.
  """
  digest = hashlib.sha256()

  def trace(function: Callable[..., Any], *arguments: Any) -> Any:
    # Shapes alone, so that the text does not depend on values.
    shapes = jax.eval_shape(lambda *given: given, *arguments)
    traced, result = jax.make_jaxpr(function, return_shape=True)(*shapes)
    # Functions in the text of a program have their addresses, which differ each time.
    digest.update(re.sub("0x[0-9a-f]+", "", str(traced.jaxpr)).encode())
    # Arrays that the model closes over, such as a mask, are not in the text.
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

  Raises:
    TypeError: The config's `to_dict` gives what is not JSON.
  """
  config = getattr(model, "config", None)
  # Equal weights compute other states with another rotary base, epsilon or dtype.
  to_dict = getattr(config, "to_dict", None)
  if to_dict is None:
    return computation_digest(model, params, inputs)
  try:
    return json.loads(json.dumps(to_dict()))
  except (TypeError, ValueError) as error:
    raise TypeRefusal(
      f"{type(config).__name__}.to_dict",
      expected="JSON, which says what the model computes",
      got=f"what is none: {error}",
      mend="return texts, numbers, lists and dicts of them, or leave to_dict out: the "
      "model is then known by what it computes",
    ) from error


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
    # Read once: `dict` has it from then on.
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
    weights: str | None = None,
  ) -> None:
    """Derives the folder from content and environment; writes nothing.

    `root` has one subfolder for each key of params, tokens, `model_identity` and
    environment. `weights` is the `params_digest`, if it is known.
    """
    identity = model_identity(calib.model, params, calib.tokens)
    described = json.dumps(identity, sort_keys=True)
    parts = [FORMAT, weights or params_digest(params), calib.fingerprint, described]
    content = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    here = json.loads(json.dumps(environment(ONE_DEVICE, calib.model)))
    self._root = pathlib.Path(root)
    self._about: dict[str, Any] = {"content": content, "in": here}
    key = hashlib.sha256(digested_json.canonical(self._about).encode()).hexdigest()
    # 64 bits tell the folders of one store apart; what is in them is in `ABOUT`.
    self.path = self._root / key[:16]

  def open(self) -> None:
    """Writes `ABOUT` into a new folder.

    A log line says which other folders have statistics of the same content, and what
    differs in the environment in which these were computed.
    """
    if (self.path / ABOUT).is_file():
      return
    for file in sorted(self._root.glob(f"*/{ABOUT}")):
      try:
        there = json.loads(file.read_bytes())
        changed = differing(self._about["in"], there["in"])
        is_same = there["content"] == self._about["content"]
      except (ValueError, KeyError, TypeError, AttributeError):
        continue  # Damaged; it is read for this line alone.
      if is_same:
        values = (
          f"{name} {had} there, {now} here" for name, (had, now) in changed.items()
        )
        _log.warning(
          "store: %s was computed in another environment (%s), so it is not used and "
          "the statistics are computed again.",
          file.parent,
          ", ".join(values),
        )
    self.path.mkdir(parents=True, exist_ok=True)
    write_json(self.path / ABOUT, self._about)

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
