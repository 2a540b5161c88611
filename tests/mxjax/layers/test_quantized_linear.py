import collections
import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.audit import arithmetic
from mxjax.evaluation import evaluating
from mxjax.layers import inference_packing, sizes
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.layers.linear import linear, linear_many, map_rows, take_rows
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode, Unrounded
from mxjax.numerics.shaping.input_maps import BlockDense, Hadamard
from mxjax.pallas_kernels import mxfp4_decode
from mxjax.pallas_kernels.refinement.fused_inputs import Normalized
from mxjax.storage import checkpoint
from tests.cases import slow

run = jax.jit(linear, static_argnames="implementation")


@jax.jit
def tables(weight):
  """Those of `OneCode` for a weight that is rounded to nearest."""
  blocks = mxfp4.to_blocks(weight)
  gram, cross = one_code.tables(blocks, mxfp4.round_blocks(blocks))
  return one_code.pack_symmetric(gram), cross


decode = jax.jit(mxfp4.decode, static_argnames="dtype")


def leaf(kind, features=64, outputs=48, seed=0):
  """A quantized linear with one of the maps and roundings."""
  rng = np.random.default_rng(seed)
  weight = jnp.asarray(rng.standard_normal((outputs, features)), jnp.float32)
  blocks = features // 32
  matrix = np.linalg.qr(rng.standard_normal((blocks, 32, 32)))[0]
  rule = OneCode(*tables(weight))
  input_map, rounding = {
    "rtn": (None, Nearest()),
    "brq": (Hadamard(32), Nearest()),
    "wide": (Hadamard(64), Nearest()),
    "signed": (Hadamard(32, jnp.asarray(rng.choice([-1, 1], 64), jnp.int8)), Nearest()),
    "wush": (BlockDense(jnp.asarray(matrix, jnp.bfloat16)), Nearest()),
    "hires": (BlockDense(jnp.asarray(matrix, jnp.float32)), rule),
  }[kind]
  return QuantizedLinear(mxfp4.encode(weight), input_map, rounding)


def packed(weight, **options):
  """A weight as `pack_for_inference` leaves it."""
  params = {"embed_tokens": {"weight": weight}}
  return pack_for_inference(params, **options)["embed_tokens"]["weight"]


def draw(shape, dtype=jnp.float32):
  x = np.random.default_rng(1).standard_t(4, shape).astype(np.float32)
  return jnp.asarray(x.astype(dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
  "kind", [*slow("rtn", "brq", "wush"), "wide", "signed", "hires"]
)
@pytest.mark.parametrize("dtype", [*slow(jnp.float32), jnp.bfloat16])
def test_kernels_compute_the_linear_of_the_reference(kind, dtype):
  x, weight = draw((2, 5, 64), dtype), leaf(kind)
  got = run(x, weight, implementation="interpret")
  want = run(x, weight, implementation="xla")
  assert got.dtype == dtype and got.shape == (2, 5, 48)
  error = np.asarray(got, np.float64) - np.asarray(want, np.float64)
  # One code may differ where a product differs in its last bit.
  tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
  norms = np.linalg.norm(error, axis=-1) / np.linalg.norm(want, axis=-1)
  assert np.median(norms) <= tolerance
  assert (norms <= 10 * tolerance).mean() > 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
  "kinds", [("hires", "hires"), ("hires", "rtn"), ("wide", "hires"), ("rtn",)]
)
def test_linears_of_one_input_are_those_of_one_each(kinds):
  weights = [leaf(kind, outputs=32 * i + 8, seed=i) for i, kind in enumerate(kinds)]
  ones = jnp.ones(64, jnp.bfloat16)
  x = Normalized(draw((3, 1, 64), jnp.bfloat16), ones, 1e-6)
  for implementation in ("interpret", "xla"):
    side_by_side = functools.partial(linear_many, implementation=implementation)
    together = jax.jit(side_by_side)(x, weights)
    for y, weight in zip(together, weights, strict=True):
      alone = run(x, weight, implementation=implementation)
      assert y.shape == (3, 1, weight.shape[0])
      # The columns may be shared out otherwise: sums in another order, then rounded.
      y, alone = (np.asarray(a, np.float32) for a in (y, alone))
      np.testing.assert_allclose(y, alone, rtol=2**-7, atol=1e-5)


@pytest.mark.slow
def test_linears_of_many_rows_share_a_pass_by_the_form_of_their_operands():
  x, weights = draw((300, 64), jnp.bfloat16), [leaf("hires", seed=i) for i in range(3)]
  weights[1] = packed(weights[1], tables=False, products="float8")
  side_by_side = functools.partial(linear_many, implementation="interpret")
  text = str(jax.make_jaxpr(side_by_side)(x, weights))
  assert text.count("name=mxjax_one_code") == 2
  for y, weight in zip(jax.jit(side_by_side)(x, weights), weights, strict=True):
    np.testing.assert_array_equal(y, run(x, weight, implementation="interpret"))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [*slow(3), 300])
def test_float8_products_are_asked_for_and_take_many_rows(rows):
  x, weight = draw((rows, 64), jnp.bfloat16), leaf("hires")
  chosen = packed(weight, tables=False, products="float8")
  top = float(weight.weight.scales.max())
  assert chosen.float8_scale == 2.0 ** (top - mxfp4.SCALE_BIAS - mxfp4_decode.TOP)
  assert weight.float8_scale is None
  doubled = map_rows(lambda a: jnp.concatenate([a, a]), lambda a: a, chosen)
  assert doubled.float8_scale == chosen.float8_scale
  assert doubled.shape == (96, 64)
  assert packed(chosen, tables=False, products="bfloat16").float8_scale is None
  got = run(x, chosen, implementation="interpret")
  want = run(x, weight, implementation="interpret")
  text = run.lower(x, chosen, implementation="interpret").as_text()
  assert ("f8E4M3FN" in text) == (rows == 300)
  # The operands are the same; sums differ in order, and are rounded to bfloat16.
  np.testing.assert_allclose(
    got.astype(jnp.float32), want.astype(jnp.float32), rtol=2.0**-7, atol=2.0**-6
  )


def test_a_weight_that_float8_cannot_hold_is_named_and_left(caplog):
  weight = leaf("rtn")
  scales = weight.weight.scales.at[0, 0].set(weight.weight.scales.max() - 15)
  wide = dataclasses.replace(weight, weight=mxfp4.MXTensor(weight.weight.codes, scales))
  params = {"layer": {"q": {"weight": weight}, "k": {"weight": wide}}}
  with caplog.at_level("WARNING", "mxjax"):
    layer = pack_for_inference(params, products="float8")["layer"]
  [told] = caplog.messages
  assert re.search("1 linears stay .*: layer/k/weight", told)
  assert layer["q"]["weight"].float8_scale is not None
  assert layer["k"]["weight"].float8_scale is None
  with pytest.raises(ValueError, match="expected products None"):
    pack_for_inference(params, products="float16")


Device = collections.namedtuple("Device", "platform compute_capability device_kind")


@pytest.mark.slow
@pytest.mark.parametrize(
  "platform, capability, error, chosen",
  [
    ("gpu", "9.0", 4e-4, "float8"),
    ("gpu", "9.0", float("nan"), "bfloat16"),
    ("cpu", None, 4e-4, None),
  ],
)
def test_float8_is_the_default_where_its_products_pass(
  monkeypatch, caplog, tmp_path, tiny_model, platform, capability, error, chosen
):
  device = Device(platform, capability, "this device")
  params = {"layer": {"q": {"weight": leaf("rtn")}}}
  config = tiny_model.config.to_dict()
  checkpoint.save_checkpoint(tmp_path / "made", params, model_config=config)
  inference_packing._passes.cache_clear()
  with monkeypatch.context() as patch, caplog.at_level("INFO", "mxjax"):
    patch.setattr(inference_packing, "float8_error", lambda: error)
    patch.setattr(inference_packing, "_device_of", lambda params: device)
    patch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    results = [pack_for_inference(params), checkpoint.load(tmp_path / "made")[1]]
    as_stored = checkpoint.load(tmp_path / "made", products=None)[1]
    asked = checkpoint.load(tmp_path / "made", products="float8")[1]
    # A float model has nothing to multiply so, and does not wait for the check.
    patch.setattr(inference_packing, "float8_is_faster", lambda _: 1 / 0)
    pack_for_inference({"layer": {"q": {"weight": jnp.ones((8, 32))}}})
  inference_packing._passes.cache_clear()
  # Once a process, however many models are loaded.
  assert len(caplog.records) == (chosen is not None)
  for record in caplog.records:
    assert f"multiplied in {chosen} on this this device" in record.getMessage()
    assert record.levelname == ("INFO" if chosen == "float8" else "WARNING")
  for result in results:
    assert inference_packing.has_float8_products(result) == (chosen == "float8")
    named = arithmetic.arithmetic(result, "bfloat16").get("products")
    assert named == (["float8"] if chosen == "float8" else None)
  assert not inference_packing.has_float8_products(as_stored)
  assert inference_packing.has_float8_products(asked)
  packing = evaluating.Packing(names=("int8-embeddings",))
  for result, names in ((asked, ["float8-products"]), (as_stored, [])):
    assert packing.found_in(result) == ["int8-embeddings", *names]
    stated = evaluating.Packing(names=("float8-products",)).found_in(result)
    assert stated == ["float8-products"]


@pytest.mark.parametrize(
  "platform, capability, error, is_faster",
  [
    ("gpu", "9.0", 0.1, False),
    ("gpu", "8.9", 4e-4, True),
    ("gpu", "12.0", 4e-4, True),
    ("gpu", "8.6", 4e-4, False),
    ("gpu", "gfx942", 4e-4, False),
  ],
)
def test_the_device_and_the_check_decide_what_is_faster(
  monkeypatch, platform, capability, error, is_faster
):
  inference_packing._passes.cache_clear()
  monkeypatch.setattr(inference_packing, "float8_error", lambda: error)
  monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
  device = Device(platform, capability, "this device")
  assert inference_packing.float8_is_faster(device) == is_faster
  inference_packing._passes.cache_clear()


@pytest.mark.slow
def test_the_float8_product_is_measured_against_the_exact_one():
  assert float(inference_packing.float8_error()) < 1e-6


def test_an_explicit_choice_never_falls_back():
  x, weight = draw((3, 64)), leaf("hires")
  np.testing.assert_array_equal(run(x, weight), run(x, weight, implementation="xla"))
  with pytest.raises(NotImplementedError, match="linear: .*need an NVIDIA GPU"):
    linear(x, weight, implementation="pallas")
  other = dataclasses.replace(weight, rules=mxfp4.Rules(scale_rule="even"))
  with pytest.raises(NotImplementedError, match="paper's rules only"):
    linear(x, other, implementation="interpret")


def test_packing_tables_keep_the_result_legal_and_close():
  x, weight = draw((200, 64)), leaf("hires")
  small = packed(weight)
  assert small.rounding.gram.dtype == small.rounding.cross.dtype == jnp.bfloat16
  assert small.input_map is weight.input_map and small.weight is weight.weight
  got, want = run(x, small), run(x, weight)
  same = (np.asarray(got) == np.asarray(want)).all(-1)
  assert 0.5 < same.mean()
  error = np.linalg.norm(got - want) / np.linalg.norm(want)
  nearest = dataclasses.replace(weight, rounding=Nearest())
  assert error < 0.5 * np.linalg.norm(run(x, nearest) - want) / np.linalg.norm(want)


def test_packing_tables_keep_the_gain_of_refinement():
  weight = leaf("hires", outputs=96)
  small = packed(weight)
  gram, cross = weight.rounding.tables()
  x = weight.input_map.apply(mxfp4.to_blocks(draw((300, 64))))

  def objective(elements, exponent):
    d = np.asarray(elements, np.float64) * np.exp2(exponent[:, None]) - np.asarray(x)
    pulled = np.einsum("bij,bjn->bin", np.asarray(gram, np.float64), d)
    mismatch = np.einsum("bij,bjn->bin", np.asarray(cross, np.float64), x)
    return (d * (pulled - 2 * mismatch)).sum()

  def gain(rounding):
    refined = one_code.refine(x, *rounding.tables())
    exponent = np.asarray(refined.exponent, np.float64)
    before = objective(refined.nearest, exponent)
    return before - objective(refined.elements, exponent)

  assert gain(weight.rounding) > 0
  assert gain(small.rounding) > 0.999 * gain(weight.rounding)


def test_packing_packs_embedding_and_head_when_asked():
  table = draw((96, 64), jnp.bfloat16)
  params = {"embed_tokens": {"weight": table}, "norm": {"weight": table[0]}}
  assert packed(table) is table
  smaller = pack_for_inference(params, embeddings="int8")
  report = sizes.size_report(smaller)
  assert report["total"] == 96 * (64 + 4) + 128
  assert report["bf16_total"] == 2 * (96 * 64 + 64)
  table = smaller["embed_tokens"]["weight"]
  assert packed(table, embeddings="int8") is table
  # A head of its own is packed beside the embedding, and keeps its bias.
  untied = {**params, "lm_head": {"weight": draw((96, 64)), "bias": jnp.ones(96)}}
  smaller = pack_for_inference(untied, embeddings="int8")
  for name in ("embed_tokens", "lm_head"):
    assert smaller[name]["weight"].codes.dtype == jnp.int8, name
  assert smaller["lm_head"]["bias"] is untied["lm_head"]["bias"]
  assert pack_for_inference(untied)["lm_head"]["weight"] is untied["lm_head"]["weight"]


def test_an_int8_matrix_is_close_in_both_its_uses():
  table, x = draw((96, 64), jnp.bfloat16), draw((5, 64))
  bytes_ = packed(table, embeddings="int8")
  exact = np.asarray(table, np.float64)
  half_step = np.abs(exact).max(1) / 254 * 1.001
  index = jnp.asarray([95, 0, 7], jnp.int32)
  rows = np.asarray(take_rows(bytes_, index), np.float64)
  assert (np.abs(rows - exact[[95, 0, 7]]) <= half_step[[95, 0, 7], None]).all()
  none = jnp.asarray([96, -1, -96], jnp.int32)
  for stored in (bytes_, table):
    assert np.isnan(np.asarray(take_rows(stored, none), np.float32)).all()
  on_host = packed(np.asarray(table), embeddings="int8")
  jax.tree.map(np.testing.assert_array_equal, on_host, bytes_)
  got, want = np.asarray(linear(x, bytes_)), np.asarray(x, np.float64) @ exact.T
  bound = np.abs(np.asarray(x)).sum(1)[:, None] * half_step[None] + 1e-4
  assert (np.abs(got - want) <= bound).all()
  assert sizes.size_report({"weight": bytes_})["total"] == 96 * 64 + 4 * 96
  with pytest.raises(ValueError, match="None or 'int8', got 'int4'"):
    packed(table, embeddings="int4")


def test_the_native_kernel_is_taken_or_refused_by_the_rule():
  x = draw((2, 40, 64))
  np.testing.assert_array_equal(
    run(x, leaf("hires"), implementation="native"),
    run(x, leaf("hires"), implementation="xla"),
  )
  for rounding in (Nearest(), Unrounded()):
    weight = dataclasses.replace(leaf("rtn"), rounding=rounding)
    with pytest.raises(NotImplementedError, match="has no kernel for CPUs"):
      run(x, weight, implementation="native")


@pytest.mark.parametrize("kind", ["rtn", "wide", "signed", "wush", "hires"])
def test_gradients_at_the_input_are_straight_through(kind):
  x, back = draw((48, 64)), draw((48, 48))[::-1]
  weight = leaf(kind)
  gradient = jax.jit(jax.grad(lambda x: jnp.vdot(linear(x, weight), back)))(x)
  decoded = np.asarray(decode(weight.weight, dtype=jnp.float32), float)
  # U' W' d: the map's columns are the images of the unit vectors.
  identity = jnp.eye(64)
  mapped = mxfp4.to_blocks(identity)
  if weight.input_map is not None:
    mapped = weight.input_map.apply(mapped)
  want = np.asarray(back, float) @ decoded @ np.asarray(mapped, float).reshape(64, 64)
  error = np.linalg.norm(gradient - want) / np.linalg.norm(want)
  assert error < 2**-8


def test_gradients_pass_deferred_inputs_and_add_over_linears():
  weights, norm = [leaf("hires"), leaf("rtn", outputs=16)], jnp.ones(64)
  rows = draw((40, 64))

  deferred = lambda x: linear_many(x, weights)
  alone = lambda x: [linear(x.array(), weight) for weight in weights]

  def gradients(run):
    loss = lambda *parts: sum(y.sum() for y in run(Normalized(*parts, 1e-6)))
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, norm)

  deferred, whole = map(gradients, (deferred, alone))
  for got, want in zip(deferred, whole, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert jnp.abs(want).max() > 0.1
