"""The table of products, and what a linear launches by it."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear, linear_many
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.pallas_kernels import choice, lowering
from mxjax.pallas_kernels.mosaic import device
from tests import targets

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = 12288, 4096
"""Outputs and width."""


@pytest.fixture
def has_mosaic(monkeypatch):
  """As with jax 0.11."""
  monkeypatch.setattr(device, "obstacle", lambda: None)


def product(rows, target, monkeypatch, *, has_float8=True, shape=SHAPE):
  monkeypatch.setattr(implementations, "target", lambda: target)
  return choice.product(rows, *shape, has_float8=has_float8)


@pytest.mark.usefixtures("has_mosaic")
def test_rows_and_device_decide(monkeypatch):
  every = targets.AMPERE, targets.ADA, targets.HOPPER, targets.BLACKWELL, targets.CPU
  for target in every:
    for rows, wanted in (
      (1, choice.INT8),
      (4, choice.INT8),
      (5, choice.PACKED),
      (255, choice.PACKED),
      (256, choice.LIBRARY),
      (9999, choice.LIBRARY),
    ):
      assert product(rows, target, monkeypatch, has_float8=False) is wanted
    few = product(63, target, monkeypatch)
    assert few is choice.PACKED
  for target in every:
    is_hopper, has_float8 = target is targets.HOPPER, target is not targets.AMPERE
    packed = choice.FLOAT8_MOSAIC if is_hopper else choice.PACKED
    many = choice.FLOAT8_LIBRARY if has_float8 else choice.LIBRARY
    many = choice.FLOAT8_MOSAIC if is_hopper else many
    for rows, wanted in ((64, packed), (255, packed), (256, many), (2048, many)):
      assert product(rows, target, monkeypatch) is wanted, (target, rows)


@pytest.mark.usefixtures("has_mosaic")
def test_shapes_that_mosaic_does_not_take_are_the_librarys(monkeypatch):
  for shape in ((130, 4096), (12288, 96)):
    for rows, wanted in ((64, choice.PACKED), (256, choice.FLOAT8_LIBRARY)):
      assert product(rows, targets.HOPPER, monkeypatch, shape=shape) is wanted


def test_before_jax_0_11_there_is_no_mosaic(monkeypatch):
  monkeypatch.setattr(device, "obstacle", lambda: "an old jax")
  assert product(256, targets.HOPPER, monkeypatch) is choice.FLOAT8_LIBRARY


def test_every_entry_names_a_measurement_that_is_there():
  for entry in choice.TABLE:
    assert (ROOT / entry.measured).is_file()
  assert not set(choice.TABLE) & set(choice.CANDIDATES)


@pytest.mark.usefixtures("has_mosaic")
def test_a_candidate_is_taken_only_where_it_is_tried_and_can_run(monkeypatch):
  stream = choice.FLOAT8_STREAM
  assert product(64, targets.HOPPER, monkeypatch) is choice.FLOAT8_MOSAIC
  with choice.trying(stream):
    for rows, wanted in (
      (4, choice.INT8),
      (5, stream),
      (511, stream),
      (512, choice.FLOAT8_MOSAIC),
    ):
      assert product(rows, targets.HOPPER, monkeypatch) is wanted
    for target in (targets.AMPERE, targets.ADA, targets.BLACKWELL):
      assert product(64, target, monkeypatch) is choice.PACKED
    for shape in ((12288, 4224), (12300, 4096)):
      assert product(8, targets.HOPPER, monkeypatch, shape=shape) is choice.PACKED
    assert product(8, targets.HOPPER, monkeypatch, has_float8=False) is choice.PACKED
  assert product(8, targets.HOPPER, monkeypatch) is choice.PACKED


def leaf(outputs, float8=True):
  weight = np.random.default_rng(outputs).standard_normal((outputs, 128))
  scale = jnp.float32(2.0**-8) if float8 else None
  packed = mxfp4.encode(jnp.asarray(weight, jnp.float32))
  return QuantizedLinear(packed, None, Nearest(), float8_scale=scale)


def launches(monkeypatch, target, rows, weights):
  """Names of the kernels that linears of one input launch, in order."""
  launched, on_gpu = [], lowering.launch

  def launch(*arguments, name, **how):
    launched.append(name)
    return on_gpu(*arguments, name=name, **how)

  monkeypatch.setattr(lowering, "launch", launch)
  monkeypatch.setattr(implementations, "target", lambda: target)
  x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
  traced = jax.make_jaxpr(lambda x: linear_many(x, weights))(x)
  return launched, str(traced)


@pytest.mark.parametrize(
  "target, rows, names",
  [
    (targets.HOPPER, 1, ["transform_encode", "mxfp4_int8_matmul"]),
    (targets.HOPPER, 70, ["transform_encode", "mxfp4_matmul"]),
    (targets.AMPERE, 300, ["transform_encode", "mxfp4_decode", "mxfp4_decode"]),
    (
      targets.ADA,
      300,
      ["transform_encode", *["float8_shift", "mxfp4_decode_float8"] * 2],
    ),
    (targets.TURING, 300, []),
    (targets.AMD, 1, []),
  ],
)
def test_linears_of_one_input_launch_what_the_table_says(
  target, rows, names, monkeypatch
):
  monkeypatch.setattr(device, "obstacle", lambda: "an old jax")
  launched, _ = launches(monkeypatch, target, rows, [leaf(128), leaf(256)])
  assert launched == names


@pytest.mark.skipif(device.obstacle() is not None, reason=str(device.obstacle()))
def test_float8_inputs_are_made_once_for_both_of_the_products(monkeypatch):
  weights = [leaf(128), leaf(130), leaf(256, float8=False)]
  launched, traced = launches(monkeypatch, targets.HOPPER, 300, weights)
  assert traced.count("mxjax_float8_product") and "dot_general" in traced
  # One refinement for float8, one for the linear without a scale.
  assert launched.count("transform_encode") == 2
  assert launched.count("float8_shift") == 2


def test_a_device_without_kernels_computes_what_the_reference_does(monkeypatch):
  x, weight = jnp.ones((3, 128), jnp.bfloat16), leaf(128)
  want = linear(x, weight, implementation="xla")
  for target in (targets.TURING, targets.AMD, targets.TPU):
    monkeypatch.setattr(implementations, "target", lambda target=target: target)
    got = linear(x, dataclasses.replace(weight))
    np.testing.assert_array_equal(got, want)
