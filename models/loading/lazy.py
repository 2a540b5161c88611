"""Params that stay in their file until a layer is read.

The mapping has the keys of a params dict, so code that takes params one layer at a time
runs on checkpoints larger than memory. Nothing is cached.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from mxjax.models import parameters
from mxjax.models.config import ModelConfig
from mxjax.models.parameters import Path, StoredTensor


class LazyParams(Mapping[str, Any]):
  """The params of a checkpoint on disk.

  `params["layers_3"]` reads and checks the tensors of that layer, in the dtypes of the
  file; so does every other top-level key. It is not a pytree: pass its values, not the
  mapping, to jitted functions.
  """

  config: ModelConfig

  def __init__(
    self, stored: Mapping[Path, StoredTensor], config: ModelConfig, source: str
  ) -> None:
    """Checks names and shapes against the config; reads no tensor.

    Raises:
      ValueError: Tensors are missing, unexpected or mis-shaped; all are named.
    """
    self.config = config
    self._source = source
    self._stored = stored
    expected = parameters.parameter_shapes(config)
    parameters.check_shapes(stored, expected, source)
    self._paths: dict[str, list[Path]] = {}
    for path in expected:
      self._paths.setdefault(path[0], []).append(path)

  def __getitem__(self, key: str) -> Any:
    """Reads all tensors below a top-level key.

    Raises:
      KeyError: There is no such key.
      ValueError: A tensor is not finite, or its file is damaged.
    """
    return self._read(self._paths[key])[key]

  def _read(self, paths: Iterable[Path]) -> dict[str, Any]:
    params: dict[str, Any] = {}
    values = {}
    for path in paths:
      # Copied, because the result must not depend on the file.
      value = jnp.array(self._stored[path].read())
      values[self._stored[path].name] = value
      parameters.insert(params, path, value)
    # After all are read, so that every broken tensor is named.
    parameters.check_finite(values, self._source)
    return params

  def __iter__(self) -> Iterator[str]:
    return iter(self._paths)

  def __len__(self) -> int:
    return len(self._paths)

  def load(self) -> dict[str, Any]:
    """Reads everything into a plain dict, which is a pytree.

    Raises:
      ValueError: Tensors are not finite; all are named and counted.
    """
    return self._read(path for paths in self._paths.values() for path in paths)
