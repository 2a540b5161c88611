"""Exports to and imports from the checkpoint formats of other programs.

Exports refuse, by name, features that a format cannot hold; `features.drop` removes
them on request.
"""

from mxjax.storage.export.compressed_tensors import write_compressed_tensors
from mxjax.storage.export.dequant import write_dequant
from mxjax.storage.export.features import FEATURES, drop, features_of
from mxjax.storage.export.folder import Companions, Source
from mxjax.storage.export.gguf import write_gguf
from mxjax.storage.export.importer import Imported, read_compressed_tensors
from mxjax.storage.export.state import read_state, write_state
from mxjax.storage.export.transformers_folder import write_transformers

__all__ = [
  "FEATURES",
  "Companions",
  "Imported",
  "Source",
  "drop",
  "features_of",
  "read_compressed_tensors",
  "read_state",
  "write_compressed_tensors",
  "write_dequant",
  "write_gguf",
  "write_state",
  "write_transformers",
]
