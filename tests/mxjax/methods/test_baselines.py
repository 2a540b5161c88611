"""Every baseline on a tiny model: identities, legality, and the float function kept."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import methods
from mxjax.audit import plan
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration
from mxjax.cli import export as command
from mxjax.evaluation.measures.operator_error import operator_error
from mxjax.layers import sizes
from mxjax.methods.baselines import focus, spinquant
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.realization.activation_quantizers import OneCode
from mxjax.run import steps
from mxjax.run.progress import Report
from mxjax.run.record import StageClock
from mxjax.storage import checkpoint
from mxjax.storage.export import compressed_tensors, dequant, gguf, transformers_folder
from tests.cases import slow
from tests.mxjax.quantized import assert_same
from tests.tiny import leaves_of

FAST = {
  "gptq": "gptq:scales=static:order=activation",
  # All sequences in every step: first and last loss are then of the same tokens.
  "batquant": "batquant:steps=80:batch=64",
  "torq": "torq:rows=512",
  "spinquant": "spinquant:steps=2:batch=2",
  "focus": "focus:batch=2",
  "hires-descent": "hires-descent:use_balance=false",
  "hires-next": "hires-next:use_balance=false",
  "hires-rotated": "hires-rotated:map_steps=4:map_fits=2",
  "map-search": "map-search:candidates=4",
  "map-descent": "map-descent:candidates=4:map_steps=4",
}
"""Options that make a method quick; its code path is the same."""

SLOW = ("hires", "wush+r")
"""Their legality is tested with the pipeline, and below through shared codes."""


def relative_error(logits, exact):
  return float(jnp.sqrt(jnp.square(logits - exact).mean() / jnp.square(exact).mean()))


QUICK = ("rtn", "gptq", "wush")
"""Methods that every run builds; the others compile for ten seconds and more."""
BUILT = [
  pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
  for name in methods.METHODS
  if name not in SLOW
]


def rotation(size, seed):
  """A random orthogonal matrix."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(np.linalg.qr(rng.standard_normal((size, size)))[0], jnp.float32)


def assert_same_weights(left, right):
  assert_same(*([x.weight for x in leaves_of(r.params)] for r in (left, right)))


@pytest.mark.parametrize("name", BUILT)
def test_every_payload_is_legal_and_the_model_still_runs(
  name, tiny_build, tiny_model, tiny_params, tiny_tokens
):
  result = tiny_build(FAST.get(name, name))
  leaves = leaves_of(result.params)
  assert len(leaves) == 14
  for leaf in leaves:
    mxfp4.check_legal(leaf.weight)
  error = operator_error(tiny_model, result.reference, result.params, tiny_tokens)
  assert 0 < error < 0.1
  window = jnp.asarray(tiny_tokens[:1])
  exact, logits = (
    tiny_model.logits(p, streams.final_hiddens(tiny_model, p, [window])[0])
    for p in (tiny_params, result.params)
  )
  assert float(jnp.abs(logits - exact).mean()) < float(jnp.abs(exact).mean())
  assert_planned(FAST.get(name, name), result.params, tiny_model.config)


def prepared(program, params, calib):
  """What all steps of a program's `prepare` lead to."""
  learning = program.prepare(params, calib, PAPER_CONTRACT)
  report = Report(program, calib.model.num_layers, StageClock())
  return steps.take(learning, "learning", None, report)


def assert_planned(name, params, config):
  """The bytes that `mxjax plan --method` promises are those that were stored."""
  planned, measured = (
    plan.stored(config, methods.get(name)),
    sizes.size_report(params),
  )
  linears = measured["quantized_linears"]
  unquantized = sum(planned[part] for part in ("embedding", "head", "others"))
  assert unquantized == measured["other"]
  assert planned["recovery"] == measured["recovery"]
  assert planned["tables"] == linears["rounding"]
  for part in ("codes", "scales", "maps", "bits_per_weight"):
    assert planned[part] == linears[part], part
  assert planned["total"] == measured["total"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", ["brq:signs=1", "rtn+tune:epochs=1", "wush:activations=float"]
)
def test_options_that_change_what_is_stored_are_planned(name, tiny_build, tiny_config):
  assert_planned(name, tiny_build(name).params, tiny_config)


@pytest.mark.parametrize(
  "name", ["wush", "mr-gptq", *slow("torq", "batquant", "spinquant")]
)
def test_what_is_saved_is_what_is_restored(name, tiny_build, tiny_config, tmp_path):
  result = tiny_build(FAST.get(name, name))
  folder = checkpoint.save_checkpoint(tmp_path / name, result.params, tiny_config)
  restored, _ = checkpoint.restore_checkpoint(folder)
  assert_same(result.params, restored)


def test_methods_follow_the_rules_of_the_contract(tiny_build):
  contract = Contract(rules=mxfp4.Rules(scale_rule="even"))
  plain, other = tiny_build("wush").params, tiny_build("wush", contract).params
  pairs = list(zip(leaves_of(plain), leaves_of(other), strict=True))
  assert all(theirs.rules == contract.rules for _, theirs in pairs)
  assert any(
    (np.asarray(a.weight.scales) != np.asarray(b.weight.scales)).any() for a, b in pairs
  )


def test_brq_is_mr_gptq_of_32_with_fresh_scales():
  name = "mr-gptq:sizes=[32]:scales=fresh"
  assert methods.get(name) == dataclasses.replace(methods.BRQ, name=name)


def test_mr_gptq_takes_the_first_size_that_divides_and_records_it(tiny_build):
  linears = tiny_build("mr-gptq").record.layers[0]["linears"]
  assert linears["self_attn/q_proj"]["hadamard_size"] == 64
  assert linears["mlp/down_proj"]["hadamard_size"] == 32


@pytest.mark.slow
def test_batquant_at_the_identity_is_gptq(tiny_build):
  untrained = tiny_build("batquant:steps=0:clip_logit=Infinity")
  assert_same_weights(untrained, tiny_build("gptq"))
  for leaf in leaves_of(untrained.params):
    np.testing.assert_array_equal(leaf.rounding.high, 1.0)


@pytest.mark.slow
def test_batquant_learns(tiny_build):
  linears = tiny_build(FAST["batquant"]).record.layers[0]["linears"]
  losses = np.asarray([line["learning_losses"] for line in linears.values()])
  assert (losses[:, 1] < losses[:, 0]).all()
  assert losses[:, 1].mean() < 0.95 * losses[:, 0].mean()
  assert all(1 < line["map_condition"] < 1e4 for line in linears.values())


def test_focus_without_learning_is_rtn_with_rceil_weights(tiny_build, tiny_params):
  unlearned = tiny_build("focus:epochs=0:divisor_logit=Infinity")
  rules = mxfp4.Rules(scale_rule="rceil")
  for layer in ("layers_0", "layers_1"):
    weight = tiny_params[layer]["mlp"]["up_proj"]["weight"]
    leaf = unlearned.params[layer]["mlp"]["up_proj"]["weight"]
    assert_same(leaf.weight, mxfp4.encode(weight, rules))


@pytest.mark.slow
def test_focus_distills(tiny_model, tiny_params, tiny_tokens):
  """More epochs lower the divergence on the tokens it learns from."""
  calib = Calibration(tiny_model, tiny_tokens[:2])
  program = dataclasses.replace(focus.FOCUS, epochs=12, batch=2)
  record = prepared(program, tiny_params, calib).record
  assert record["steps"] == 12
  assert min(record["losses"][6:]) < 0.95 * record["losses"][0]


@pytest.fixture(scope="module")
def biased(tiny_model):
  """Float params with biases and gains, which rotations must carry along."""
  config = dataclasses.replace(tiny_model.config, attention_bias=True, mlp_bias=True)
  model = type(tiny_model)(config)
  params = model.init(jax.random.key(1), jnp.zeros((1, 4), jnp.int32))["params"]
  rng = np.random.default_rng(2)
  draw = lambda a: jnp.asarray(0.2 * rng.standard_normal(a.shape), jnp.float32)
  moved = lambda path, a: a + 1.0 if "norm" in jax.tree_util.keystr(path) else a
  return model, jax.tree_util.tree_map_with_path(moved, jax.tree.map(draw, params))


@pytest.mark.slow
@pytest.mark.parametrize("has_r1", [True, False])
def test_fused_rotations_keep_the_logits(biased, tiny_tokens, has_r1):
  model, params = biased
  r1, r2 = rotation(64, 3) if has_r1 else None, [rotation(16, 4), rotation(16, 5)]
  fused = spinquant.rotate_model(model, params, r1, r2)
  tokens = jnp.asarray(tiny_tokens)
  exact, logits = (model.apply({"params": p}, tokens) for p in (params, fused))
  assert relative_error(logits, exact) < 1e-5
  changed = fused["layers_0"]["self_attn"]["v_proj"]["weight"]
  original = params["layers_0"]["self_attn"]["v_proj"]["weight"]
  assert float(jnp.abs(changed - original).max()) > 0.1
  # In pieces, as evaluation runs it.
  hidden = model.embed(fused, tokens)
  for index in range(2):
    hidden = model.layer(fused[f"layers_{index}"], hidden)
  np.testing.assert_allclose(model.logits(fused, hidden), logits, atol=1e-5)


def test_post_norm_layers_get_no_residual_rotation(tiny_params):
  layer = tiny_params["layers_0"]
  assert spinquant.recipe(layer) == "R1 and R2"
  post = {k: v for k, v in layer.items() if k != "input_layernorm"}
  assert spinquant.recipe(post | {"post_feedforward_layernorm": 0}) == "R2 only"
  sandwich = layer | {"post_feedforward_layernorm": 0}
  assert spinquant.recipe(sandwich) == "R2 only"


@pytest.mark.slow
def test_spinquant_learns_orthogonal_rotations(tiny_model, tiny_params, tiny_tokens):
  program = dataclasses.replace(spinquant.SPINQUANT, steps=12, batch=2)
  calib = Calibration(tiny_model, tiny_tokens[:2])
  made = prepared(program, tiny_params, calib)
  losses = made.record["losses"]
  assert np.mean(losses[-4:]) < np.mean(losses[:4])
  tokens = jnp.asarray(tiny_tokens)
  exact = tiny_model.apply({"params": tiny_params}, tokens)
  logits = tiny_model.apply({"params": made.params}, tokens)
  assert relative_error(logits, exact) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("which", ["spinquant", "focus"])
def test_layerwise_gradients_are_those_of_the_whole_model(
  which, tiny_model, tiny_params, tiny_tokens
):
  """Against jax.grad through all layers at once."""
  params, ids = tiny_params, jnp.asarray(tiny_tokens[:1])
  rules, targets = PAPER_CONTRACT.rules, PAPER_CONTRACT.targets
  teacher = None
  if which == "spinquant":
    objective = spinquant._QuantizedLoss(tiny_model, rules, targets)
    shared, own = rotation(64, 4), [rotation(16, 5), rotation(16, 6)]
  else:
    objective, shared = focus._Distillation(tiny_model, rules, 10), None
    layers = params["layers_0"], params["layers_1"]
    own = [focus.FOCUS._initial(x, tiny_model, PAPER_CONTRACT) for x in layers]
    teacher = jax.random.normal(jax.random.key(5), (1, 32, 64))

  example = gradients.Example(ids, teacher)

  def whole(shared, own):
    hidden = objective.embed(shared, params, ids)
    for index, learned in enumerate(own):
      layer = params[f"layers_{index}"]
      hidden = objective.layer(shared, learned, hidden, layer)
    return objective.loss(shared, hidden, params, example)

  loss, expected = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(shared, own)
  got = gradients.gradients(objective, params, shared, own, [example])
  assert got.shown == pytest.approx(float(loss), rel=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3 * float(jnp.abs(b).max())),
    *((got.shared, got.own), expected),
  )


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_description_is_strict_json(name):
  described = methods.get(name).describe()
  assert json.loads(json.dumps(described, allow_nan=False))["name"] == name


def test_options_in_a_name_reach_the_program():
  program = methods.get("batquant:tokens=64:clip_logit=Infinity")
  assert (program.tokens, program.clip_logit) == (64, math.inf)
  assert methods.get("brq:sizes=[64,32]").sizes == (64, 32)


def refusal_of(check, params):
  """What a check says against params, or None."""
  try:
    check(params)
  except ValueError as error:
    return str(error)
  return None


@pytest.mark.parametrize("name", BUILT)
def test_the_formats_said_to_hold_a_method_do(name, tiny_build, tiny_config):
  params = tiny_build(FAST.get(name, name)).params
  checks = {
    "compressed-tensors": functools.partial(
      compressed_tensors.check, transforms=name in command.TRANSFORMED
    ),
    "gguf": gguf.check,
    "dequant": lambda params: dequant.check(params, tiny_config),
    "safetensors": lambda params: None,
    "transformers": transformers_folder.to_tensors,
  }
  refusals = {form: refusal_of(check, params) for form, check in checks.items()}
  held = {form for form, refusal in refusals.items() if refusal is None}
  assert held == {*command.formats(name)} & {*checks}, refusals


def test_any_state_of_recovery_has_a_name(tiny_build):
  for name, expected in {
    "hires:recover=none": [],
    "hires:recover=attention+mlp-parent": ["attention", "mlp-parent"],
    "gptq+r": ["attention", "mlp"],
    "wush+r": ["attention", "mlp"],
    "brq+r:recover=mlp-unrounded": ["mlp-unrounded"],
  }.items():
    program = methods.get(name)
    assert (program.name, program.describe()["recover"]) == (name, expected)
  assert methods.get("gptq+r").recover == methods.HIRES.recover
  assert methods.get("wush+r") is methods.WUSH_R
  params = tiny_build("rtn:recover=mlp").params
  layer = params["layers_0"]
  assert "mlp_recovery" in layer["mlp"]
  assert "value_recovery" not in layer["self_attn"]


@pytest.mark.parametrize("method", ["rtn+tune:epochs=1", "gptq+r", "brq:recover=mlp"])
def test_tuned_and_recovered_models_are_none_of_compressed_tensors(method):
  assert command.formats(method) == command.formats("hires")


def test_gguf_is_said_to_hold_models_that_came_from_such_a_file():
  rest = [form for form in command.FORMATS if form != "gguf"]
  assert [*command.formats("gptq", "models/trained/llama")] == rest
  for model in (None, "float.gguf"):
    assert command.formats("gptq", model) == command.FORMATS
    assert "gguf" not in command.formats("hires", model)


def test_wush_and_its_refined_form_share_every_code(tiny_build):
  refined = tiny_build("wush:rounding=full")
  assert_same_weights(tiny_build("wush"), refined)
  assert methods.WUSH_R.rounding == "full"
  assert methods.WUSH_R.recover == methods.HIRES.recover
  for leaf in leaves_of(refined.params):
    assert isinstance(leaf.rounding, OneCode)


@pytest.mark.slow
def test_a_second_run_learns_the_same_bits(tiny_build, tiny_params, tiny_calib):
  again = mxjax.quantize(
    tiny_params, tiny_calib, FAST["spinquant"], check=False, probe=False
  )
  assert_same(tiny_build(FAST["spinquant"]).params, again)


def test_a_newcomer_is_one_line_and_is_none_of_the_papers_ten():
  ten = "rtn gptq mr-gptq brq wush torq batquant spinquant focus hires".split()
  assert list(methods.PAPER_METHODS) == ten
  source = pathlib.Path(methods.__file__).read_text()
  line = '  "rtn": "program.RTN",\n'
  assert line in source
  planted = source.replace(line, line + '  "newcomer": "gptq.GPTQ",\n')
  scope = {"__name__": "mxjax.methods"}
  exec(compile(planted, methods.__file__, "exec"), scope)
  assert scope["METHODS"]["newcomer"] is methods.GPTQ
  assert list(scope["PAPER_METHODS"]) == ten


def test_an_unknown_constant_is_an_attribute_error():
  with pytest.raises(AttributeError, match="no attribute 'AWQ'"):
    methods.AWQ  # noqa: B018
