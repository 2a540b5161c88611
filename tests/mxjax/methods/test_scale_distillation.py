"""Scale distillation: gradient, installation, improvement, resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods, models
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation import datasets
from mxjax.layers.linear import LearnedLinear, linear
from mxjax.layers.quantized_linear import QuantizedLinear, quantized_inputs
from mxjax.methods import scale_distillation
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.models.loading import embedded
from mxjax.numerics import implementations, mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT
from mxjax.numerics.shaping import input_maps
from mxjax.run import tune
from mxjax.run.folder import read_state
from mxjax.run.progress import Report
from mxjax.run.quantize import run
from mxjax.run.record import StageClock
from mxjax.run.setup import Setup
from tests import targets, tiny
from tests.cases import slow

TUNED = methods.get("hires+tune:epochs=1:length=16")


def distilled(options, params, quantized, calib):
  """The tuned layers of a quantized model, and the record."""
  program = dataclasses.replace(methods.RTN, tune=options)
  setup = Setup(params, calib, program, PAPER_CONTRACT)
  report = Report(program, setup.model.num_layers, StageClock())
  return tune.distill_scales(setup, quantized, None, report)


@pytest.fixture(scope="module")
def calib(tiny_model, tiny_tokens):
  return Calibration(tiny_model, tiny_tokens[:4])


@pytest.fixture(scope="module")
def leaf(tiny_hires):
  return tiny_hires.params["layers_0"]["mlp"]["up_proj"]["weight"]


@pytest.fixture(scope="module")
def whole(tiny_params, calib):
  """An uninterrupted run."""
  return run(tiny_params, calib, TUNED, check=False, probe=False)


def rows(count, width, seed=0):
  return jnp.asarray(
    np.random.default_rng(seed).standard_normal((count, width)), jnp.float32
  )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_pass_scales_the_inputs_of_the_strict_one(leaf, dtype):
  """By the map, in float32: a factor may be less than a step of bfloat16."""
  x, factor = rows(256, 64).astype(dtype), 1 + 1e-3 * rows(1, 64, seed=1)[0]
  matrix = leaf.input_map.matrix * factor.reshape(2, 1, 32)
  scaled = dataclasses.replace(leaf, input_map=input_maps.BlockDense(matrix))
  ours = linear(x, LearnedLinear(leaf, factor))
  np.testing.assert_array_equal(ours, linear(x, scaled))
  assert (ours != linear(x, leaf)).any()


@pytest.mark.slow
def test_on_a_gpu_learning_runs_the_kernels_of_the_strict_linear(leaf, monkeypatch):
  monkeypatch.setattr(implementations, "target", lambda: targets.HOPPER)
  x = jnp.ones((64, 64), jnp.bfloat16)
  traced = lambda weight: str(jax.make_jaxpr(lambda x: linear(x, weight))(x))
  kernels = traced(leaf).count("pallas_call")
  assert kernels
  for change in (None, jnp.zeros((2, 32, 32))):
    learned = LearnedLinear(leaf, jnp.ones(64), change)
    assert traced(learned).count("pallas_call") == kernels


@pytest.mark.slow
def test_the_backward_pass_takes_a4_for_the_identity(leaf):
  x, cotangent = rows(6, 64), rows(6, 96, seed=2)
  run = lambda x, factor: linear(x, LearnedLinear(leaf, factor))
  factor = 1 + 0.1 * rows(1, 64, seed=1)[0]
  dx, dfactor = jax.vjp(run, x, factor)[1](cotangent)
  decoded = np.asarray(mxfp4.decode(leaf.weight, jnp.float32), np.float64)
  maps = np.asarray(leaf.input_map.matrix, np.float64)
  mapped = (np.asarray(cotangent, np.float64) @ decoded).reshape(6, 2, 32)
  expected = np.einsum("bij,nbi->nbj", maps, mapped).reshape(6, 64)
  size = np.abs(expected).max()
  np.testing.assert_allclose(dx, expected * np.asarray(factor), atol=0.01 * size)
  np.testing.assert_allclose(
    dfactor, (expected * np.asarray(x)).sum(0), atol=0.05 * size
  )


def test_the_gradient_of_a_map_takes_a4_for_the_identity(leaf):
  """U becomes (I + A) U F, and A, F and the inputs get the gradients of its product."""
  x, cotangent = rows(6, 64), rows(6, 96, seed=2)
  factor = 1 + 0.1 * rows(1, 64, seed=1)[0]
  change = 0.1 * rows(64, 32, seed=3).reshape(2, 32, 32)
  run = lambda *learned: linear(learned[0], LearnedLinear(leaf, *learned[1:]))
  out, pull = jax.vjp(run, x, factor, change)
  wide = lambda array: np.asarray(array, np.float64)
  at_rounded = wide(cotangent) @ wide(mxfp4.decode(leaf.weight, jnp.float32))
  at_rounded = at_rounded.reshape(6, 2, 32)
  inputs, first = wide(x * factor[None]).reshape(6, 2, 32), wide(leaf.input_map.matrix)
  whole = (np.eye(32) + wide(change)) @ first
  at_scaled = np.einsum("bij,nbi->nbj", whole, at_rounded).reshape(6, 64)
  expected = (
    at_scaled * wide(factor),
    (at_scaled * wide(x)).sum(0),
    np.einsum("nbi,bjk,nbk->bij", at_rounded, first, inputs),
  )
  for ours, theirs in zip(pull(cotangent), expected, strict=True):
    assert ours.dtype == jnp.float32
    size = np.abs(theirs).max()
    np.testing.assert_allclose(ours, theirs, atol=0.01 * size)
  # The forward pass is the strict one by that map.
  scaled = input_maps.scaled(leaf.input_map, factor)
  learned = input_maps.followed(scaled, jnp.eye(32)[None] + change)
  np.testing.assert_array_equal(
    out, linear(x, dataclasses.replace(leaf, input_map=learned))
  )
  assert (out != linear(x, LearnedLinear(leaf, factor))).any()


@pytest.mark.slow
@pytest.mark.parametrize("change", [None, 0.1])
def test_the_gradient_of_codes_takes_their_rounding_for_the_identity(leaf, change):
  """Codes of the sum of elements and moves get that of a product with their inputs."""
  x, cotangent = rows(6, 64), rows(6, 96, seed=2)
  factor = 1 + 0.1 * rows(1, 64, seed=1)[0]
  change = None if change is None else change * rows(64, 32, seed=3).reshape(2, 32, 32)
  moves = 0.4 * rows(96, 64, seed=4)
  run = lambda *learned: linear(learned[0], LearnedLinear(leaf, *learned[1:]))
  learned = LearnedLinear(leaf, factor, change, moves)
  # A copy in float8 would be that of other codes.
  copied = dataclasses.replace(leaf, float8_scale=jnp.float32(1))
  assert dataclasses.replace(learned, quantized=copied).installed().float8_scale is None
  moved = learned.installed()
  codes = [mxfp4.unpack(of.weight.codes) for of in (leaf, moved)]
  assert 0.2 < float((codes[0] != codes[1]).mean()) < 0.8
  np.testing.assert_array_equal(moved.weight.scales, leaf.weight.scales)
  # The table of the A4 rule is that of the new codes.
  decoded = np.asarray(mxfp4.decode(moved.weight, jnp.float32), np.float64)
  blocks = decoded.T.reshape(2, 32, 96)
  gram = np.einsum("bim,bjm->bij", blocks, blocks)
  np.testing.assert_allclose(moved.rounding.tables()[0], gram, rtol=1e-5, atol=1e-5)
  out, pull = jax.vjp(run, x, factor, change, moves)
  # The forward pass is the strict one by these codes.
  np.testing.assert_array_equal(out, linear(x, moved))
  ours = pull(cotangent)
  wide = lambda array: np.asarray(array, np.float64)
  inputs = wide(quantized_inputs(x, moved))
  scales = np.exp2(wide(leaf.weight.scales) - 127).repeat(32, axis=1)
  expected = (inputs @ wide(cotangent)).T * scales
  size = np.abs(expected).max()
  assert ours[3].dtype == jnp.float32
  np.testing.assert_allclose(ours[3], expected, atol=0.01 * size)
  # All the other gradients are those of a linear which has the new codes.
  there = dataclasses.replace(leaf, weight=moved.weight, rounding=moved.rounding)
  without = lambda *learned: linear(learned[0], LearnedLinear(there, *learned[1:]))
  others = jax.vjp(without, x, factor, change)[1](cotangent)
  jax.tree.map(np.testing.assert_array_equal, ours[:3], others)


def test_codes_are_learned_and_installed(tiny_model, tiny_params, calib):
  """What the last step learned is in the codes, and only with a rate."""
  quantized = mxjax.quantize(tiny_params, calib, "rtn", check=False, probe=False)
  found, codes = {}, {}
  for rate in (0.0, 0.05):
    options = ScaleDistillation(
      epochs=8, length=32, rate=0.0, shared_rate=0.0, code_rate=rate, label_weight=0.0
    )
    tuned, record = distilled(options, tiny_params, quantized, calib)
    assert ("changed_codes_by_layer" in record) == bool(rate)
    found[rate] = record
    for layer in sorted(tuned):
      for (_, name), leaf in scale_distillation._quantized(
        tuned[layer], tiny_model
      ).items():
        codes[rate, layer, name] = np.asarray(mxfp4.decode(leaf.weight))
  for number, layer in enumerate(sorted(tuned)):
    parts = [key[2] for key in codes if key[:2] == (0.05, layer)]
    assert len(parts) == 7
    differ = [codes[0.0, layer, part] != codes[0.05, layer, part] for part in parts]
    assert all(part.any() for part in differ)
    share = np.concatenate([part.ravel() for part in differ]).mean()
    assert found[0.05]["changed_codes_by_layer"][number] == pytest.approx(share)
  # Without a move, codes are those of before, and so is the first step.
  before, after = found[0.0]["divergence"], found[0.05]["divergence"]
  assert before[0] == after[0]
  assert np.mean(after[-4:]) < 0.97 * np.mean(before[-4:])
  assert np.mean(before[-4:]) == pytest.approx(np.mean(before[:4]), rel=0.02)


def test_a_rate_that_changes_no_code_is_refused_before_the_build(tiny_params, calib):
  """Steps of the paper's schedule, over the chunks that there are."""
  method = "rtn+tune:epochs=2:length=32:warmup=1:code_rate="
  # Eight steps: 1 + 7/8 + ... + 1/8 rates.
  with pytest.raises(
    ValueError, match=r"code_rate .*got about 0\.22 in 8 steps of 0\.05;"
  ):
    mxjax.quantize(tiny_params, calib, f"{method}0.05", check=False, probe=False)
  with pytest.raises(ValueError, match="got about 0 in 0 steps of 1;"):
    mxjax.quantize(tiny_params, calib, "rtn+tune:epochs=0:code_rate=1.0")
  mxjax.quantize(tiny_params, calib, f"{method}0.06", check=False, probe=False)


@pytest.mark.slow
def test_codes_beside_a_table_of_the_codes_before_are_refused(
  tiny_model, tiny_build, tiny_hires
):
  """K_Q needs the float weights, which tuning has not."""
  options = ScaleDistillation(code_rate=0.1)
  check = lambda params, options: scale_distillation.check(
    params["layers_0"], tiny_model, options
  )
  with pytest.raises(ValueError, match="self_attn/q_proj: code_rate: .*K_Q"):
    check(tiny_hires.params, options)
  check(tiny_hires.params, ScaleDistillation())
  for method in ("rtn", "hires:rounding=sensitivity"):
    check(tiny_build(method).params, options)


def test_a_step_of_the_optimizer_is_made_in_place(tiny_model, tiny_build):
  """So that what codes take in memory is not there twice."""
  options = ScaleDistillation(code_rate=0.1)
  layers = [tiny_build("rtn").params["layers_0"]]
  learned = options.initial(layers, tiny_model)
  state = [tune.optimizer(options, 4).init(layer) for layer in learned]
  ones = jax.tree.map(jnp.ones_like, learned)
  new = tune.update(options, 4, learned, state, ones)
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves((learned, state)))
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, ones)))


def test_a_learned_map_keeps_its_dtype(leaf):
  """A bfloat16 one stores as many bytes as without it."""
  narrow = input_maps.BlockDense(leaf.input_map.matrix.astype(jnp.bfloat16))
  bfloat16 = dataclasses.replace(leaf, input_map=narrow)
  change = 0.1 * rows(64, 32, seed=3).reshape(2, 32, 32)
  for quantized in (leaf, bfloat16):
    installed = LearnedLinear(quantized, jnp.ones(64), change).installed()
    assert installed.input_map.matrix.dtype == quantized.input_map.matrix.dtype


def test_maps_are_learned_and_installed(tiny_model, tiny_params, calib):
  """What the last step learned is in the maps, and only with a rate."""
  quantized = mxjax.quantize(tiny_params, calib, "rtn", check=False, probe=False)
  found = {}
  for rate in (0.0, 3e-3):
    options = ScaleDistillation(
      epochs=4, length=32, rate=0.0, shared_rate=0.0, map_rate=rate, label_weight=0.0
    )
    tuned, record = distilled(options, tiny_params, quantized, calib)
    [own] = options.initial([quantized["layers_0"]], tiny_model)
    assert ("maps" in own) == bool(rate)
    matrix = tuned["layers_0"]["mlp"]["gate_proj"]["weight"].input_map.matrix
    found[rate] = record["divergence"], np.abs(np.asarray(matrix) - np.eye(32)).max()
    assert max(record["change_by_layer"]) == 0
    assert min(record.get("map_change_by_layer", [0])) > 0 or not rate
  assert found[0.0][1] == 0 < found[3e-3][1]
  assert found[3e-3][0][0] == found[0.0][0][0]
  last = [np.mean(divergence[-4:]) for divergence, _ in found.values()]
  assert last[1] < 0.99 * last[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*slow("rtn", "brq"), "hires"])
def test_installed_factors_compute_what_was_learned(name, tiny_model, tiny_build):
  """Without a map, with one for all blocks, with one for each."""
  layer = tiny_build(name).params["layers_1"]
  [own] = ScaleDistillation().initial([layer], tiny_model)
  learned = jax.tree.map(
    lambda zero: zero + 0.02 * rows(1, zero.size, seed=zero.size)[0], own
  )
  installed = scale_distillation.install(layer, learned, tiny_model)
  leaf, old = (x["mlp"]["gate_proj"]["weight"] for x in (installed, layer))
  x = rows(5, 64, seed=3)
  steps, shared = learned["linears"]["mlp/gate_proj"], learned["taps"]["gate_up_input"]
  factor = (1 + steps) * (1 + shared)
  np.testing.assert_array_equal(linear(x, leaf), linear(x, LearnedLinear(old, factor)))
  expected = linear(x * factor[None], old)
  close = jnp.abs(linear(x, leaf) - expected) < 1e-3 * jnp.abs(expected).max()
  assert close.mean() > 0.9
  np.testing.assert_array_equal(leaf.weight.codes, old.weight.codes)


def test_linears_on_one_tensor_share_factors(tiny_model, tiny_build):
  quantized = tiny_build("rtn").params
  [own] = ScaleDistillation().initial([quantized["layers_0"]], tiny_model)
  assert set(own["taps"]) == {"qkv_input", "gate_up_input"}
  assert len(own["linears"]) == 7


def test_structured_maps_of_single_blocks_become_dense():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  kronecker, factor = input_maps.Kronecker(draw(8, 8), draw(2, 4, 4)), draw(64)
  blocks = draw(2, 32, 5)
  np.testing.assert_allclose(
    input_maps.scaled(kronecker, factor).apply(blocks),
    kronecker.apply(blocks * factor.reshape(2, 32, 1)),
    rtol=1e-4,
    atol=1e-4,
  )
  halves = input_maps.BlockDense(draw(2, 32, 32).astype(jnp.bfloat16))
  assert input_maps.scaled(halves, factor).matrix.dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_method_whose_map_mixes_blocks_is_refused_at_its_first_layer(
  tiny_params, calib
):
  seen = []
  with pytest.raises(ValueError, match="self_attn/q_proj: .*TwoLevel, which mixes"):
    mxjax.quantize(
      tiny_params, calib, "torq+tune", on_progress=lambda p: seen.append(p.layer)
    )
  assert set(seen) == {0}


def test_maps_that_mix_blocks_are_refused():
  with pytest.raises(ValueError, match="mixes blocks"):
    input_maps.scaled(input_maps.Hadamard(128), jnp.ones(128))


@pytest.mark.slow
def test_predictions_of_a_trained_model_come_closer():
  """On the text of the tuning and, by less, on other text; labels lower perplexity."""
  folder = embedded.trained_folder("llama")
  model, params = models.from_pretrained(folder)
  tokenizer = models.load_tokenizer(folder)
  load = lambda split, count: datasets.load_tokens(
    None, tokenizer, count=count, length=128, split=split
  )
  calib, unseen = Calibration(model, load("calibration", 32)), load("test", 16)
  apply = jax.jit(model.apply)
  quantized = mxjax.quantize(params, calib, "brq", check=False, probe=False)

  def tuned(label_weight):
    options = ScaleDistillation(length=128, label_weight=label_weight)
    return quantized | distilled(options, params, quantized, calib)[0]

  # Texts of one shape share what is compiled.
  texts = [unseen, *np.split(calib.tokens, 2)]
  logs = lambda p: [jax.nn.log_softmax(apply({"params": p}, text)) for text in texts]
  exact = logs(params)

  def measured(found):
    """Divergence and surprise, each on unseen text and on that of the tuning."""
    each = [
      (
        float((jnp.exp(own) * (own - scores)).sum(-1).mean()),
        float(-np.take_along_axis(scores[:, :-1], text[:, 1:, None], -1).mean()),
      )
      for own, scores, text in zip(exact, logs(found), texts, strict=True)
    ]
    return each[0], np.mean(each[1:], 0)

  default = ScaleDistillation().label_weight
  before, alone, labels = map(measured, (quantized, tuned(0.0), tuned(default)))
  assert alone[0][0] < 0.98 * before[0][0]
  assert alone[1][0] < 0.93 * before[1][0]
  # In nats a token; the divergence falls all the same.
  assert labels[0][1] < alone[0][1] - 0.005
  assert labels[1][1] < alone[1][1] - 0.01
  assert labels[0][0] < before[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("label_weight", [0.0, 0.25])
def test_the_gradient_of_the_loss_is_that_of_its_definition(
  label_weight, tiny_model, tiny_params
):
  """Over several chunks of the head, of which the last is not full."""
  outer = streams.outer_params(tiny_model, tiny_params)
  states, teacher = rows(150, 64), rows(150, 64, seed=3)
  ids = np.random.default_rng(4).integers(
    0, tiny_model.config.vocab_size, (1, 150), np.int32
  )
  objective = scale_distillation.PredictionDivergence(tiny_model, mxfp4.PAPER_RULES)
  example = gradients.Example(
    jnp.asarray(ids), teacher[None], jnp.float32(label_weight)
  )

  def defined(hidden):
    """The loss and the divergence; the last token is followed by none."""
    target, student = (
      jax.nn.log_softmax(tiny_model.logits(outer, h))[0]
      for h in (teacher[None], hidden)
    )
    divergence = (jnp.exp(target) * (target - student)).sum(-1)
    follows = -student[np.arange(149), ids[0, 1:]]
    loss = (1 - label_weight) * divergence[:-1] + label_weight * follows
    return (loss.sum() + divergence[-1]) / 150, divergence.mean()

  ours = lambda hidden: objective.loss_and_shown(None, hidden, outer, example)
  found, expected = (
    jax.value_and_grad(lambda h, run=run: 3 * run(h)[0])(states[None])
    for run in (ours, defined)
  )
  assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
  size = np.abs(expected[1]).max()
  np.testing.assert_allclose(found[1], expected[1], atol=1e-5 * size)
  told = [float(run(states[None])[1]) for run in (ours, defined)]
  assert told[0] == pytest.approx(told[1], rel=1e-5)


@pytest.mark.slow
def test_a_bfloat16_model_is_tuned(tiny_params, tiny_tokens):
  model = models.CausalLM(tiny.config(dtype="bfloat16"))
  params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_params)
  program = methods.get("rtn+tune:epochs=12:length=32")
  built = run(
    params, Calibration(model, tiny_tokens[:2]), program, check=False, probe=False
  )
  divergence = np.asarray(built.record.tuning["divergence"])
  assert divergence[-4:].mean() < 0.9 * divergence[:4].mean()


@pytest.mark.slow
def test_labels_are_learned_beside_the_divergence(
  tiny_model, tiny_params, calib, monkeypatch
):
  """They weigh by the mean divergence so far, and what is told is the divergence."""
  quantized = mxjax.quantize(tiny_params, calib, "rtn", check=False, probe=False)
  taken, seen = gradients.gradients, []

  def recording(*args):
    seen.append(float(args[-1][0].label_weight))
    return taken(*args)

  monkeypatch.setattr(gradients, "gradients", recording)
  told = {}
  for most in (0.0, 1e-4, 1.0):
    seen.clear()
    options = ScaleDistillation(epochs=2, length=32, label_weight=most)
    _, record = distilled(options, tiny_params, quantized, calib)
    told[most] = record["divergence"]
    means = [0, *(np.mean(told[most][:n]) for n in range(1, len(seen)))]
    expected = np.minimum(most, 2.25 * np.asarray(means))
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
  assert len(seen) == 8 and 1e-4 < min(seen[1:]) < max(seen) < 1
  # The first step has no divergence to weigh by.
  assert told[0.0][:2] == told[1.0][:2]
  assert told[0.0][-1] != told[1.0][-1]


@pytest.mark.slow
def test_the_record_has_every_step(whole, tiny_model):
  record = whole.record.to_dict()["tuning"]
  assert len(record["divergence"]) == len(record["order"]) == 8
  assert sorted(record["order"]) == [[chunk] for chunk in range(8)]
  assert record["parameters"] == 2 * (7 * 64 + 32 + 2 * 64)
  assert len(record["change_by_layer"]) == 2
  assert min(record["change_by_layer"]) > 0
  assert whole.record.program["options"]["tune"]["length"] == 16


class Killed(Exception):
  pass


@pytest.mark.slow
@pytest.mark.parametrize(
  ("program", "after"),
  [
    (TUNED, "0/8"),
    (TUNED, "3/8"),
    (TUNED, "8/8"),
    (methods.get("rtn+tune:epochs=1:length=16:code_rate=0.2"), "3/8"),
  ],
)
def test_a_killed_tuning_goes_on_to_the_same_bits(
  program, after, whole, tiny_params, calib, tmp_path
):
  if program != TUNED:
    whole = run(tiny_params, calib, program, check=False, probe=False)

  def kill(progress):
    if f"distillation {after}" in progress.stage:
      raise Killed

  options = {"check": False, "probe": False, "run_dir": tmp_path / "run"}
  with pytest.raises(Killed):
    mxjax.quantize(tiny_params, calib, program, on_progress=kill, **options)
  resumed = run(tiny_params, calib, program, resume=True, **options)
  assert resumed.record.tuning == whole.record.tuning
  for ours, theirs in zip(
    jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True
  ):
    np.testing.assert_array_equal(ours, theirs)
  assert len(list((tmp_path / "run" / "tuning").iterdir())) == 1
  # The time is that of all processes.
  steps = read_state(tmp_path / "run")["tuning"]["seconds"]
  assert len(steps) == 8 and min(steps) > 0
  assert resumed.record.clock.seconds["tuning"] >= sum(steps)


def test_damage_to_the_state_of_tuning_is_found(tiny_params, calib, tmp_path):
  options = {"check": False, "probe": False, "run_dir": tmp_path / "run"}
  mxjax.quantize(tiny_params, calib, TUNED, **options)
  [file] = (tmp_path / "run" / "tuning").iterdir()
  data = bytearray(file.read_bytes())
  data[-5] ^= 1
  file.write_bytes(data)
  with pytest.raises(ValueError, match="tuning/8.safetensors"):
    mxjax.quantize(tiny_params, calib, TUNED, resume=True, **options)


def test_only_quantized_leaves_change_and_only_their_maps(whole, tiny_params, calib):
  plain = mxjax.quantize(tiny_params, calib, "hires", check=False, probe=False)
  is_leaf = lambda node: isinstance(node, QuantizedLinear)
  for ours, theirs in zip(
    jax.tree.leaves(whole.params, is_leaf=is_leaf),
    jax.tree.leaves(plain, is_leaf=is_leaf),
    strict=True,
  ):
    if not is_leaf(ours):
      np.testing.assert_array_equal(ours, theirs)
      continue
    assert float(jnp.abs(ours.input_map.matrix - theirs.input_map.matrix).max()) > 0
    same = dataclasses.replace(ours, input_map=theirs.input_map)
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(theirs), strict=True):
      np.testing.assert_array_equal(a, b)
  assert len(tiny.leaves_of(whole.params)) == 14


def test_names_carry_options_of_tuning():
  program = methods.get("wush:weighting=fisher+tune:epochs=2")
  assert program.name == "wush:weighting=fisher+tune:epochs=2"
  assert (program.weighting, program.tune.epochs) == ("fisher", 2)
  assert methods.get("wush+r+tune").tune == ScaleDistillation()
  for wrong in ("rtn+tuned", "rtn+tune:speed=2", "+tune", "rtn+tune:epochs=many"):
    with pytest.raises(ValueError, match="methods: "):
      methods.get(wrong)


def test_chunks_are_equal_and_each_epoch_sees_all():
  options = ScaleDistillation(length=40, epochs=3)
  chunks = options.chunks(np.arange(200).reshape(2, 100).astype(np.int32))
  assert [chunk.shape for chunk in chunks] == [(1, 33)] * 6
  assert int(chunks[3][0, 0]) == 100
  order = options.order(6)
  assert all(len(of_step) == 1 for of_step in order)
  epochs = [sum(order[i : i + 6], []) for i in (0, 6, 12)]
  assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
  assert epochs[0] != epochs[1]
  # The same chunks in the same order, however many there are in a step.
  fewer = dataclasses.replace(options, steps=4).order(6)
  assert sorted(map(len, fewer)) == [4, 4, 5, 5] and sum(fewer, []) == sum(epochs, [])


def test_a_step_of_several_chunks_goes_by_their_mean(tiny_params, calib):
  quantized = mxjax.quantize(tiny_params, calib, "rtn", check=False, probe=False)
  options = ScaleDistillation(
    epochs=1, length=calib.tokens.shape[1], label_weight=0.0, steps=1
  )

  def of_rows(tokens):
    rows = dataclasses.replace(calib, tokens=tokens)
    tuned, record = distilled(options, tiny_params, quantized, rows)
    [divergence] = record["divergence"]
    return tuned, divergence

  alone = [of_rows(row[None]) for row in calib.tokens]
  _, together = of_rows(calib.tokens)
  assert together == pytest.approx(np.mean([each for _, each in alone]), rel=1e-5)
  # Three times the same text is the step of one.
  repeated, _ = of_rows(np.repeat(calib.tokens[:1], 3, axis=0))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  jax.tree.map(close, repeated, alone[0][0])
