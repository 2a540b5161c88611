"""A rule that is a program of its own gives recovery the bits of one within a layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import streams
from mxjax.methods.hires import stage3
from mxjax.methods.program import Program, Realization, Shaping
from mxjax.numerics import pytree_nodes
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.shaping import input_maps
from mxjax.run import rounding_alone
from mxjax.run.quantize import run

SEEN = []


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Alone(Nearest):
  """The nearest codes, by a program of their own."""

  runs_alone = True

  def round_mapped(self, blocks, rules):
    SEEN.append(isinstance(blocks, jax.core.Tracer))
    return super().round_mapped(blocks, rules)


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class Overflowing(Alone):
  """What a program with too large a map or exponent returns."""

  def round_mapped(self, blocks, rules):
    return super().round_mapped(blocks, rules) * jnp.float32(2e38)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ruled(Program):
  """Rounds to nearest in the coordinates of rotations, with recovery."""

  alone: bool = False
  recover: tuple = (stage3.ATTENTION, stage3.MLP)

  def shape(self, weight, inputs):
    matrix = np.random.default_rng(0).standard_normal((32, 32))
    rotation = np.linalg.qr(matrix)[0].astype(np.float32)
    maps = np.broadcast_to(rotation, (len(weight), 32, 32))
    return Shaping(input_maps.BlockDense(jnp.asarray(maps)))

  def quantize_weight(self, weight, inputs, input_map):
    return Realization(
      gptq.round_to_nearest(weight, inputs.rules), Alone() if self.alone else Nearest()
    )


@pytest.fixture(scope="module")
def made(tiny_params, tiny_calib):
  SEEN.clear()
  build = lambda rule: run(
    tiny_params,
    tiny_calib,
    Ruled(name="ruled", alone=rule is Alone),
    check=False,
    probe=False,
  )
  return {rule: build(rule).params for rule in (Nearest, Alone)}


@pytest.mark.slow
def test_recovery_has_the_bits_of_rules_within_the_layer(made):
  found = {
    rule: [
      np.asarray(leaf)
      for layer in ("layers_0", "layers_1")
      for block, name in (("self_attn", "value_recovery"), ("mlp", "mlp_recovery"))
      for leaf in jax.tree.leaves(params[layer][block][name])
    ]
    for rule, params in made.items()
  }
  assert len(found[Nearest]) > 8
  for within, outside in zip(*found.values(), strict=True):
    np.testing.assert_array_equal(within, outside)


@pytest.mark.slow
def test_no_rule_is_a_part_of_a_layers_program(made):
  # The linears of two layers, for each of two fits, by chunk.
  assert SEEN and len(SEEN) % (2 * 7 * 2) == 0
  assert not any(SEEN), "a rule was traced into a program"


@pytest.mark.slow
def test_linears_in_another_order_than_the_layers_are_refused(
  made, tiny_model, tiny_params, tiny_tokens
):
  layer = made[Alone]["layers_0"]
  paths = list(tiny_model.projection_taps)
  outer = streams.outer_params(tiny_model, tiny_params)
  hidden = tiny_model.embed(outer, jnp.asarray(tiny_tokens))

  def rounded(order):
    linears = rounding_alone.linears_alone(layer, order)
    bare = rounding_alone.without_rules(layer, linears)
    return rounding_alone.rounded_inputs(tiny_model, bare, linears, hidden)

  assert {*rounded(paths)} == {"/".join(path) for path in paths}
  with pytest.raises(RuntimeError, match="runs before"):
    rounded(paths[::-1])


@pytest.mark.slow
def test_a_rule_that_overflows_is_no_linear_in_another_order(
  made, tiny_model, tiny_params, tiny_tokens
):
  """NaN equals nothing, and the order of linears is found by what they were told."""
  layer = made[Alone]["layers_0"]
  linears = {
    path: dataclasses.replace(leaf, rounding=Overflowing())
    for path, leaf in rounding_alone.linears_alone(
      layer, list(tiny_model.projection_taps)
    ).items()
  }
  outer = streams.outer_params(tiny_model, tiny_params)
  hidden = tiny_model.embed(outer, jnp.asarray(tiny_tokens))
  bare = rounding_alone.without_rules(layer, linears)
  values = rounding_alone.rounded_inputs(tiny_model, bare, linears, hidden)
  assert {*values} == {"/".join(path) for path in linears}
  assert any(np.isnan(np.asarray(each)).any() for each in values.values())
