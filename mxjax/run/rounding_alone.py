"""Passes through a layer whose A4 rules are programs of their own.

A rule of a candidate program takes seconds to compile and is used for a few calls.
Within the program of a layer it would be there once for each linear, and the program be
compiled anew for every rule. So the rule rounds outside (`runs_alone`), and the program
of the layer takes what it returned: that program is compiled once, for all rules.

A linear's inputs depend on how those before it were rounded. The layer therefore runs
once for each tensor that linears read, and each run knows the rounded inputs of one
more of them. A run costs little beside the rules. The bits are those of a program that
holds the rules: what is around them is compiled alike.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.calibration.calibration import (
  CausalLanguageModel,
  Params,
  replace_weights,
)
from mxjax.devices import execution
from mxjax.layers.quantized_linear import QuantizedLinear, quantized_inputs
from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Unrounded,
)

Path = tuple[str, str]
"""Sublayer and name of a linear."""
Values = dict[str, jax.Array]
"""Rounded inputs by linear, `[sequences, blocks, 32, T]`."""


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Given(ActivationQuantizer):
  """What an A4 rule returned for the inputs that come next.

  Attributes:
    values: Rounded inputs, float32 `[blocks, 32, n]`; None until they are known.
  """

  values: jax.Array | None = None

  def round_mapped(self, blocks: jax.Array, rules: mxfp4.Rules) -> jax.Array:
    """Returns the values, whatever the inputs are."""
    del blocks, rules
    assert self.values is not None
    return self.values


def linears_alone(layer: Params, paths: Sequence[Path]) -> dict[Path, QuantizedLinear]:
  """Returns the linears of a layer whose rules run alone, in the order of `paths`."""
  leaves = {path: layer[path[0]][path[1]]["weight"] for path in paths}
  return {
    path: leaf
    for path, leaf in leaves.items()
    if isinstance(leaf, QuantizedLinear) and leaf.rounding.runs_alone
  }


def without_rules(layer: Params, linears: Mapping[Path, QuantizedLinear]) -> Params:
  """Returns a layer whose `linears` have no rule: one structure for all rules."""
  bare = {
    path: dataclasses.replace(leaf, rounding=Given()) for path, leaf in linears.items()
  }
  return replace_weights(layer, bare)


def with_values(layer: Params, values: Mapping[str, jax.Array]) -> Params:
  """Returns a layer of `without_rules` that takes these rounded inputs."""
  leaves = {}
  for path, rounded in values.items():
    sublayer, name = path.split("/")
    leaf = layer[sublayer][name]["weight"]
    leaves[sublayer, name] = dataclasses.replace(leaf, rounding=Given(rounded))
  return replace_weights(layer, leaves)


@execution.jit(
  static_argnames=("model", "names"), compiler_options=execution.FEW_TEMPORARIES
)
def _taps(
  model: CausalLanguageModel,
  layer: Params,
  hidden: jax.Array,
  values: Values,
  names: tuple[str, ...],
) -> dict[str, jax.Array]:
  """Returns some taps of a chunk, `[sequences, T, width]`."""

  def one(item: tuple[jax.Array, Values]) -> dict[str, jax.Array]:
    states, rounded = item
    _, taps = model.layer_with_taps(with_values(layer, rounded), states[None])
    return {name: taps[name][0] for name in names}

  return jax.lax.map(one, (hidden, values))


@execution.jit()
def _mapped(leaf: QuantizedLinear, inputs: jax.Array) -> jax.Array:
  """Returns a linear's inputs in the coordinates of its map, `[blocks, 32, S * T]`."""
  one = lambda rows: quantized_inputs(rows, leaf)
  sequences = jax.lax.map(one, inputs)
  # From `[S, d, T]` to `[d, S, T]`, so that the tokens of a sequence stay together on
  # the last axis; `_by_sequence` cuts them apart again.
  columns = jnp.moveaxis(sequences, 0, 1)
  return columns.reshape(-1, mxfp4.BLOCK_SIZE, columns.shape[1] * columns.shape[2])


@execution.jit(static_argnames="sequences")
def _by_sequence(rounded: jax.Array, sequences: int) -> jax.Array:
  """Cuts `[blocks, 32, S * T]` into `[S, blocks, 32, T]`."""
  blocks, size, columns = rounded.shape
  cut = rounded.reshape(blocks, size, sequences, columns // sequences)
  return jnp.moveaxis(cut, 2, 0)


def rounded_inputs(
  model: CausalLanguageModel,
  layer: Params,
  linears: Mapping[Path, QuantizedLinear],
  hidden: jax.Array,
) -> Values:
  """Returns what the rules of `linears` make of their inputs in a chunk of sequences.

  `layer` is that of `without_rules`, and `hidden`, `[sequences, T, d]`, what enters it.
  The linears are in the order in which the layer runs them.

  Raises:
    RuntimeError: They are not, so that a linear read what was not known yet.
  """
  sequences, length, _ = hidden.shape
  read = model.projection_taps
  # All taps in every pass, because another selection would be another program.
  names = tuple(sorted({read[path] for path in linears}))
  # All on the device of the states: a mixture of committed arrays and others would be
  # another program each time.
  beside = lambda array: jax.device_put(array, hidden.sharding)
  # Zeros stand for what is not known yet: every pass is one program, and what they lead
  # to is not read.
  values = {}
  for path, leaf in linears.items():
    shape = sequences, leaf.shape[1] // mxfp4.BLOCK_SIZE, mxfp4.BLOCK_SIZE, length
    values["/".join(path)] = beside(jnp.zeros(shape, jnp.float32))
  # After pass k, the inputs of the first k tensors are final. `used` has those that
  # were given to a rule, to see that no later pass moves them.
  used: dict[str, np.ndarray] = {}
  for tap in dict.fromkeys(read[path] for path in linears):
    # The model runs without 64-bit types, as everywhere; hooks may need them.
    with jax.enable_x64(False):
      taps = _taps(model, layer, hidden, values, names)
    # By bits: a program that overflows has NaN, which equals nothing.
    if wrong := [
      name
      for name, known in used.items()
      if known.tobytes() != np.asarray(taps[name]).tobytes()
    ]:
      raise RuntimeError(f"rounding_alone: {tap} runs before {', '.join(wrong)}")
    used[tap] = np.asarray(taps[tap])
    for path, leaf in linears.items():
      if read[path] == tap:
        # `_mapped` then maps and does not round.
        bare = dataclasses.replace(leaf, rounding=Unrounded())
        mapped = _mapped(bare, taps[tap])
        rounded = leaf.rounding.round_mapped(mapped, leaf.rules)
        made = _by_sequence(jnp.asarray(rounded), sequences)
        values["/".join(path)] = beside(made)
  return values
