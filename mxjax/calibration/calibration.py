"""The calibration tokens and the model interface that they are measured with."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from mxjax.errors import ValueRefusal
from mxjax.intake.token_ids import token_ids
from mxjax.numerics.contract import Contract

Params = Mapping[str, Any]


class CausalLanguageModel(Protocol):
  """The model interface of the pipeline: pure functions of params, layer by layer.

  `mxjax.models.CausalLM` implements it; any hashable object with these members works.
  """

  @property
  def num_layers(self) -> int:
    """The number of decoder layers."""
    ...

  @property
  def projection_taps(self) -> dict[tuple[str, str], str]:
    """Maps each target linear, in forward order, to the tap of its input."""
    ...

  def layer_name(self, index: int) -> str:
    """Returns the key of layer `index` in the params."""
    ...

  def embed(self, params: Params, tokens: jax.Array) -> jax.Array:
    """Embeds int32 tokens `[B, T]` into hidden states `[B, T, d]`."""
    ...

  def layer(self, layer_params: Params, hidden: jax.Array) -> jax.Array:
    """Runs one decoder layer, `[B, T, d]` to `[B, T, d]`."""
    ...

  def layer_with_taps(
    self, layer_params: Params, hidden: jax.Array
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one decoder layer and also returns its intermediate values by name."""
    ...

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Computes float32 logits `[B, T, V]` from final hidden states."""
    ...


def targets(model: CausalLanguageModel, contract: Contract) -> list[tuple[str, str]]:
  """Lists the target linears of a layer as (sublayer, name), in forward order."""
  return [path for path in model.projection_taps if path[1] in contract.targets]


def model_ids(
  model: CausalLanguageModel, tokens: Any, place: str, vocab_size: int | None = None
) -> np.ndarray:
  """Checks a model's token ids with `token_ids`, and their windows' length.

  The vocabulary is that of `model.config`, if it has one and no `vocab_size` is given;
  so are the positions.

  Raises:
    ValueError: There are ids outside the vocabulary, or windows longer than the model.
  """
  config = getattr(model, "config", None)
  vocabulary = vocab_size or getattr(config, "vocab_size", None)
  ids = token_ids(tokens, place, vocabulary=vocabulary)
  positions = getattr(config, "max_positions", None)
  if positions and ids.ndim and ids.shape[-1] > positions:
    raise ValueRefusal(
      place,
      expected=f"windows of at most {positions} tokens, the positions of the model",
      got=ids.shape[-1],
      mend="ask for shorter windows",
    )
  return ids


def replace_weights(
  layer: Params, weights: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
  """Returns a layer's params with the weights at these (sublayer, name) replaced."""
  new = dict(layer)
  # Every dict on the way is copied, because the caller's layer stays what it is.
  for (sublayer, name), weight in weights.items():
    linear = {**layer[sublayer][name], "weight": weight}
    new[sublayer] = {**new[sublayer], name: linear}
  return new


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Exact token ids and the model that measures them.

  Attributes:
    model: The model the params belong to.
    tokens: Integer ids, `[sequences, length]`; kept as int32. For a `FlaxModel`, what
      its module takes: any pytree of arrays `[examples, ...]`.
    vocab_size: Ids must be below this; taken from `model.config` when None.

  Raises:
    ValueError: No tokens, not two axes, too short, or ids outside the vocabulary.
    TypeError: The ids are not integers.
  """

  model: CausalLanguageModel
  tokens: Any
  vocab_size: int | None = None

  def __post_init__(self) -> None:
    if getattr(self.model, "takes_any_inputs", False):
      return self._take_any()
    tokens = model_ids(self.model, self.tokens, "Calibration", self.vocab_size)
    if tokens.size == 0 or tokens.ndim != 2:
      raise ValueRefusal(
        "Calibration",
        expected="token ids [sequences, length]",
        got=f"shape {tokens.shape}",
        mend="pass at least one full sequence, such as 128 of 2048 tokens",
      )
    if tokens.shape[1] < 4:
      raise ValueRefusal(
        "Calibration",
        expected="sequences of at least 4 tokens, for the four quarters of the MLP fit",
        got=tokens.shape[1],
        mend="use longer sequences",
      )
    # Past the frozen class, once: everyone reads the checked int32 ids.
    object.__setattr__(self, "tokens", tokens)
    return None

  def _take_any(self) -> None:
    """Checks inputs that are any pytree of arrays `[examples, ...]`."""
    # Host arrays of any dtype: what a module takes need not be integers.
    inputs = jax.tree.map(np.asarray, self.tokens)
    shapes = [leaf.shape for leaf in jax.tree.leaves(inputs)]
    if (
      len({shape[:1] for shape in shapes}) != 1
      or not all(map(math.prod, shapes))
      or () in shapes
    ):
      raise ValueRefusal(
        "Calibration",
        expected="arrays with examples on their first axis, equally many and at "
        "least one",
        got=f"the shapes {shapes}",
      )
    object.__setattr__(self, "tokens", inputs)

  @property
  def count(self) -> int:
    """The number of sequences, or of examples of another kind."""
    return jax.tree.leaves(self.tokens)[0].shape[0]

  @property
  def shape(self) -> list[Any]:
    """The shape of the tokens, or of every array of other inputs; JSON-ready."""
    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(self.tokens)]
    return shapes if getattr(self.model, "takes_any_inputs", False) else shapes[0]

  @property
  def fingerprint(self) -> str:
    """SHA-256 of shape and exact ids, hex; recorded with every result."""
    if not getattr(self.model, "takes_any_inputs", False):
      return token_fingerprint(self.tokens)
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(self.tokens):
      digest.update(f"{path} {leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return digest.hexdigest()


def token_fingerprint(tokens: np.ndarray) -> str:
  """Returns the fingerprint of these ids; see `Calibration.fingerprint`."""
  array = token_ids(tokens, "token_fingerprint")
  # The shape, too: the same ids cut into other sequences are another calibration.
  return hashlib.sha256(f"int32{array.shape}".encode() + array.tobytes()).hexdigest()
