"""The PTQ task on a tiny model: hooks against the library, contract, phases."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration import fisher
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.discovery.core import candidate_source, identity, store
from mxjax.discovery.core.candidate_source import admit
from mxjax.discovery.core.task import Call, Outcome, Status
from mxjax.discovery.sandbox import frames, tracing
from mxjax.discovery.sandbox.artifact import ArtifactTable
from mxjax.discovery.sandbox.executor import Took
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search.cached_evaluator import CachedEvaluator
from mxjax.discovery.tasks.ptq import (
  candidate_codes,
  edit_templates,
  interface,
  margins,
  payload,
  programs,
)
from mxjax.discovery.tasks.ptq import (
  task as ptq,
)
from mxjax.evaluation.measures.agreement import agreement
from mxjax.evaluation.measures.perplexity import perplexity, perturbed
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq, one_code
from tests.cases import slow

OPTIONS = {"model": "random:0", "calibration": [8, 32], "windows": [2, 32]}
INTERFACE = interface.INTERFACE
SOURCE = INTERFACE.default_source()
SPECS = {spec["name"]: spec for spec in INTERFACE.to_list()}


@pytest.fixture(scope="module")
def executor():
  return LocalExecutor(ptq.PtqTask(**OPTIONS))


def template(name):
  return next(c for c in edit_templates.EDIT_TEMPLATES if c.id == name)


def measure(executor, source, intervention=None):
  program = admit(source, INTERFACE)
  traced = executor.trace(source)
  assert traced.status == Status.OK, traced.detail
  call = Call(traced.computation, program.plan, intervention or {})
  outcomes = []
  on_done = lambda index, outcome, seconds: outcomes.append(outcome)
  executor.run([call.active(INTERFACE)], on_done)
  return outcomes[0]


@pytest.fixture(scope="module")
def initial(executor):
  return measure(executor, SOURCE)


def hook(name, source=SOURCE):
  """The batched form of a traced hook."""
  (traced,) = tracing.trace(source, [SPECS[name]])
  table = ArtifactTable(SPECS)
  table.add("x", name, frames.pack(traced.units))
  return jax.jit(table.batched("x"))


def linear_hook(name, width, source=SOURCE):
  """The batched form of a traced hook of linears of one width."""
  sizes = [{"width": width, "blocks": width // 32, "tokens": 32}]
  specs = dataclasses.replace(INTERFACE, sizes=sizes).to_list()
  spec = next(each for each in specs if each["name"] == name)
  (traced,) = tracing.trace(source, [spec])
  table = ArtifactTable({name: spec})
  table.add("x", name, frames.pack(traced.units))
  return jax.jit(table.batched("x"))


@pytest.fixture(scope="module")
def rtn_operands():
  """The model, its float params, and the operands of its RTN quantization."""
  task = ptq.PtqTask(**OPTIONS)
  model, params = task.options.load()
  calib = mxjax.Calibration(model, task.options.tokens("fit"))
  quantized = mxjax.quantize(params, calib, "rtn", check=False, probe=False)
  return model, params, payload.of_params(quantized, model)


def blocks(seed, rows=200):
  generator = np.random.default_rng(seed)
  x = generator.standard_normal((rows, 32)) * 2.0 ** generator.integers(
    -9, 9, (rows, 1)
  )
  x[0] = 0
  x[1, :8] = [0.25, -0.75, 1.25, 1.75, 2.5, -3.5, 5.0, 6.0]
  return jnp.asarray(x, jnp.float32)


def test_the_initial_program_is_the_librarys_rtn(initial):
  task = ptq.PtqTask(**OPTIONS)
  model, params = task.options.load()
  calib = mxjax.Calibration(model, task.options.tokens("fit"))
  quantized = mxjax.quantize(params, calib, "rtn", check=False, probe=False)
  expected = perplexity(model, quantized, task.options.tokens("measure")).values[0]
  assert initial.values["log_ppl"] == pytest.approx(np.log(expected), abs=1e-12)


@pytest.mark.parametrize("name", ["encode_weight", "encode_act"])
def test_the_default_encoders_are_the_codec_bit_for_bit(name):
  x = blocks(0)
  tables = [jnp.eye(32, dtype=jnp.float32)] * (1 if name == "encode_weight" else 2)
  codes, exponent = hook(name)(x, *tables)
  expected = mxfp4.encode(x)
  assert np.array_equal(mxfp4.pack(codes), expected.codes)
  nonzero = np.asarray(x).any(-1)
  got = np.asarray(exponent + mxfp4.SCALE_BIAS)
  assert np.array_equal(got[nonzero], np.asarray(expected.scales)[nonzero, 0])


@pytest.mark.parametrize("blocks_", [*slow(1), 3])
def test_the_gptq_template_is_the_librarys_gptq(blocks_):
  generator = np.random.default_rng(1)
  width = 32 * blocks_
  x = generator.standard_normal((500, width)) @ generator.standard_normal(
    (width, width)
  )
  hessian = jnp.asarray(x.T @ x / 500, jnp.float32)
  upper = gptq.factor(hessian).upper
  weight = jnp.asarray(generator.standard_normal((blocks_, 32, 200)), jnp.float32)
  encode = linear_hook("encode_linear", width, template("gptq").edit(SOURCE, {}))
  codes, exponent = encode(weight.reshape(width, -1).T, jnp.stack([upper, 0 * upper]))
  codes = codes.T.reshape(weight.shape)
  expected = gptq.reconstruct(weight, upper)
  # Sums run in another order, so a value on an edge may fall to the other side.
  assert (np.asarray(codes) != np.asarray(expected.codes)).mean() < 1e-2
  value = candidate_codes.decoded(codes, exponent.T)
  loss = lambda decoded: float(gptq.reconstruction_loss(weight, decoded, hessian))
  assert loss(value) == pytest.approx(loss(expected.decoded), rel=0.02)
  assert loss(value) < loss(gptq.round_to_nearest(weight).decoded)


@pytest.mark.slow
def test_the_one_code_template_is_the_librarys_refinement():
  generator = np.random.default_rng(3)
  weight = jnp.asarray(generator.standard_normal((1, 32, 48)), jnp.float32)
  gram, cross = one_code.tables(weight, mxfp4.round_blocks(weight))
  x = blocks(4)
  source = template("one-code").edit(SOURCE, {"rounds": 1})
  codes, exponent = hook("encode_act", source)(x, gram[0], cross[0])
  got = candidate_codes.decoded(codes.T, exponent)
  expected = one_code.refined_blocks(x.T[None], gram, cross)[0]
  assert (np.asarray(got) != np.asarray(expected)).any(0).mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
  ("act", "is_changed"),
  [
    ("jnp.roll(jnp.roll(block, 3), -3)", False),
    ("block + 0 * jnp.sum(block)", False),
    ("jnp.where(block == jnp.max(block), 0.5 * block, block)", True),
  ],
)
def test_the_output_of_the_activation_hook_is_what_it_executed(
  executor, initial, act, is_changed
):
  code = (
    "def encode_act(block, gram, cross):\n"
    f"  block = {act}\n"
    "  exponent = block_exponent(block)\n"
    "  return nearest_codes(block, exponent), exponent\n"
  )
  source = candidate_source.with_functions(SOURCE, code)
  outcome = measure(executor, source)
  assert outcome.status == Status.OK, outcome.detail
  differs = outcome.outputs["encode_act"] != initial.outputs["encode_act"]
  assert differs == is_changed
  assert outcome.outputs["encode_weight"] == initial.outputs["encode_weight"]


@pytest.mark.parametrize(
  ("codes", "exponent", "expected"),
  [(200, 0, False), (15, 0, True), (0, 5, False), (0, -5, False), (0, 4, True)],
)
def test_37_and_40_payloads_outside_the_contract_are_not_legal(
  codes, exponent, expected
):
  x = jnp.ones((32, 1), jnp.float32)
  own = mxfp4.block_exponent(x)
  found = candidate_codes.legal(
    jnp.full((32, 1), codes, jnp.uint8), own + jnp.int32(exponent), x
  )
  assert bool(found[0]) == expected


def test_37_illegal_codes_end_as_a_contract_violation(executor):
  code = (
    "def encode_weight(block, curvature):\n"
    "  return jnp.full(32, 200, jnp.uint8), block_exponent(block)\n"
  )
  source = candidate_source.with_functions(SOURCE, code)
  outcome = measure(executor, source)
  assert outcome.status == Status.CONTRACT
  assert "encode_weight" in outcome.detail
  assert not outcome.values


def test_44_a_map_without_an_inverse_is_a_contract_violation(executor):
  code = "def transform(stats):\n  return jnp.ones((32, 32), jnp.float64)\n"
  source = candidate_source.with_functions(SOURCE, code)
  source = candidate_source.with_plan(source, {"transform": "measured"})
  outcome = measure(executor, source)
  assert outcome.status == Status.CONTRACT
  assert not outcome.values
  assert "condition number" in outcome.detail


@pytest.mark.parametrize(
  ("name", "code"),
  [
    ("transform", "def transform(stats):\n  return jnp.eye(64, dtype=jnp.float64)\n"),
    ("recover_value", "def recover_value(sums):\n  return jnp.zeros(3)\n"),
    ("recover_mlp", "def recover_mlp(sums):\n  return jnp.zeros(5)\n"),
    (
      "encode_act",
      "def encode_act(block, gram, cross):\n"
      "  return block.astype(jnp.bfloat16), jnp.int32(0)\n",
    ),
  ],
)
def test_38_and_44_more_than_the_interface_allows_is_refused(executor, name, code):
  source = candidate_source.with_functions(SOURCE, code)
  traced = executor.trace(source)
  assert traced.status == Status.REFUSED
  assert name in traced.detail


def test_the_phases_never_hold_each_others_data():
  task = ptq.PtqTask(**OPTIONS)
  fit, measure_ = task.open("fit"), task.open("measure")
  assert not np.array_equal(
    task.options.tokens("fit")[:2], task.options.tokens("measure")
  )
  assert not hasattr(fit, "_tokens")
  assert not hasattr(measure_, "_calibration")


def test_42_the_score_follows_the_text_and_not_the_program(initial):
  other = ptq.PtqTask(**{**OPTIONS, "windows": [1, 32]})
  outcome = measure(LocalExecutor(other), SOURCE)
  assert outcome.values["log_ppl"] != initial.values["log_ppl"]


def test_the_contract_names_weights_tokens_and_source():
  one, two = (ptq.PtqTask(**{**OPTIONS, "model": f"random:{s}"}) for s in (0, 1))
  assert one.contract["weights"] != two.contract["weights"]
  other = ptq.PtqTask(**{**OPTIONS, "seed": 1})
  assert other.contract["weights"] == one.contract["weights"]
  with pytest.raises(ValueError, match="options among"):
    ptq.PtqTask(modell="x")


def test_the_contract_binds_outcomes_to_the_librarys_sources():
  expected = identity.source_digest(*ptq.EVALUATOR_PACKAGES)
  assert ptq.PtqTask(**OPTIONS).contract["source"] == expected


def test_outcomes_of_another_library_version_are_paid_for_again(tmp_path, monkeypatch):
  executed = []

  class Recording(LocalExecutor):
    def run(self, calls, on_done):
      executed.extend(calls)
      for index in range(len(calls)):
        on_done(index, Outcome(Status.OK, {"log_ppl": 1.0}), Took(0.0))

  def exec_id(version):
    monkeypatch.setattr(identity, "source_digest", lambda *packages: version)
    task = ptq.PtqTask(**OPTIONS)
    folder = store.Store(tmp_path)
    evaluator = CachedEvaluator(task, Recording(task), folder)
    call = Call({"encode_act": "a"}, INTERFACE.default_plan, {})
    evaluator.measure(call)
    return evaluator.condition("primary", "candidate", call).exec_id

  old = exec_id("old")
  assert exec_id("old") == old
  assert len(executed) == 1
  assert exec_id("new") != old
  assert len(executed) == 2


def test_operands_survive_the_way_between_the_phases(rtn_operands):
  model, params, operands = rtn_operands
  again = payload.from_bytes(payload.to_bytes(operands))
  assert payload.digests(again) == payload.digests(operands)
  assert {p: set(a) for p, a in again.items()} == {
    p: set(a) for p, a in operands.items()
  }
  del again[payload.Place(0, "mlp", "up_proj")]
  with pytest.raises(KeyError):
    payload.to_params(again, params, model, None)


def test_there_are_as_many_decoys_as_useful_templates_and_all_are_admitted():
  assert len(edit_templates.USEFUL) == len(edit_templates.DECOYS)
  assert len({c.id for c in edit_templates.EDIT_TEMPLATES}) == len(
    edit_templates.EDIT_TEMPLATES
  )
  for each in edit_templates.EDIT_TEMPLATES:
    for params in each.params:
      admit(each.edit(SOURCE, params), INTERFACE)


def test_programs_are_told_what_output_gradients_weight(float64):
  rng = np.random.default_rng(5)
  x, gradients = rng.normal(size=(2, 2, 32, 7)), rng.normal(size=(2, 7, 24))
  gradients[0, 0] *= 50  # Heavier than the largest weight of a token.
  weight = rng.normal(size=(2, 32, 24))
  transform = np.eye(32) + 0.1 * rng.normal(size=(2, 32, 32))
  narrow = lambda array: jnp.asarray(array, jnp.float32)
  inputs = LinearInputs([narrow(x)])
  stats = lambda view: candidate_codes.measure_stats(
    narrow(weight), view, jnp.asarray(transform)
  )
  plain = stats(inputs)
  view = inputs.for_linear("q_proj", gradients=[narrow(gradients)])
  weighted = stats(fisher.weighted(view))
  for name in ("activation", "weight"):
    np.testing.assert_array_equal(plain[name], plain[f"{name}_fisher"])
    np.testing.assert_array_equal(plain[name], weighted[name])
  squares = np.square(gradients).sum(-1)
  share = np.minimum(squares / squares.mean(), 20)
  share = 0.3 + 0.7 * share / share.mean()
  moment = np.einsum("st,sbit,sbjt->bij", share, x, x) / 14
  back = np.einsum("bim,stm->bist", weight, gradients).reshape(2, 32, -1)
  output = 0.3 * weight @ weight.transpose(0, 2, 1) / 24
  output += 0.7 * back @ back.transpose(0, 2, 1) / squares.sum()
  inverse = np.linalg.inv(transform)
  expected = {
    "activation_fisher": transform @ moment @ transform.transpose(0, 2, 1),
    "weight_fisher": inverse.transpose(0, 2, 1) @ output @ inverse,
  }
  for name, array in expected.items():
    np.testing.assert_allclose(weighted[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_plan_asks_for_output_gradients(executor):
  source = template("chart-fisher").edit(SOURCE, {})
  assert "'gradients': True" in source
  weighted = measure(executor, source)
  plain = measure(executor, source.replace("'gradients': True", "'gradients': False"))
  chart = measure(executor, template("chart").edit(SOURCE, {"exponent": 0.5}))
  assert plain.outputs == chart.outputs != weighted.outputs


@pytest.mark.slow
def test_the_divergence_can_be_the_objective(rtn_operands):
  task = ptq.PtqTask(**OPTIONS, objective="kl")
  assert (task.target, task.ideal()) == ("kl", 0.0)
  model, params, operands = rtn_operands
  executor = LocalExecutor(task)
  outcome = measure(executor, SOURCE)
  quantized = payload.to_params(operands, params, model, None)
  expected = agreement(model, params, quantized, task.options.tokens("measure"))
  assert outcome.values["kl"] == pytest.approx(expected.divergence.mean(), rel=1e-5)
  spec = margins.calibrated(task.spec)
  error = expected.divergence.mean(-1).std(ddof=1) / 2**0.5
  assert spec["margins"]["kl"] >= 0.99 * error > 0
  # Divergence has a chaos of its own, which is not that of the log perplexity.
  replicates = [perturbed(quantized, seed, jnp.float32) for seed in range(1, 4)]
  values = [
    agreement(model, params, each, task.options.tokens("measure")).divergence.mean()
    for each in (quantized, *replicates)
  ]
  found, errors = margins._noise(task.options, payload.to_bytes(operands), None)
  assert found["kl"] == pytest.approx(np.std(values, ddof=1), rel=1e-2)
  assert found["kl"] != pytest.approx(found["log_ppl"], rel=0.1)
  assert errors["kl"] == pytest.approx(error, rel=1e-3)
  margin = max(2 * 2**0.5 * found["kl"], errors["kl"])
  assert spec["margins"]["kl"] == pytest.approx(margin, rel=1e-2)
  with pytest.raises(ValueError, match="objective to be one of log_ppl, kl, fit3, got"):
    ptq.PtqTask(**OPTIONS, objective="loss")


@pytest.mark.slow
def test_fit3_can_be_the_objective(rtn_operands):
  task = ptq.PtqTask(**OPTIONS, objective="fit3")
  assert (task.target, task.ideal()) == ("fit3", 0.0)
  model, params, operands = rtn_operands
  measured = measure(LocalExecutor(task), SOURCE).values["fit3"]
  quantized = payload.to_params(operands, params, model, None)
  first, second = (task.options.tokens(name) for name in ("measure", "second"))
  assert (first != second).any()
  ppl = lambda text, tree: perplexity(model, tree, text).mean
  damages = [ppl(text, quantized) / ppl(text, params) - 1 for text in (first, second)]
  damages.append(agreement(model, params, quantized, first).is_flipped.mean())
  expected = sum(damages) / 6 + max(damages) / 2
  assert measured == pytest.approx(expected, rel=1e-5)
  excess = np.subtract(
    *(perplexity(model, tree, first).window_losses for tree in (quantized, params))
  )
  spec = margins.calibrated(task.spec)
  assert spec["margins"]["fit3"] >= 0.99 * np.expm1(excess).std(ddof=1) / 2**0.5 > 0
  assert "second" in task.contract
  with pytest.raises(ValueError, match="expected a second_text"):
    ptq.PtqTask(model="models/trained/llama", objective="fit3")


@pytest.mark.slow
def test_a_search_can_begin_with_a_whole_method(executor):
  source = programs.source("gptq")
  defaults = candidate_source.with_functions(source, SOURCE, replace=False)
  card = template("gptq").edit(SOURCE, {})
  ours, cards = measure(executor, defaults), measure(executor, card)
  assert ours.values == cards.values != measure(executor, SOURCE).values
  initial = margins.calibrated(ptq.PtqTask(**OPTIONS).spec, "gptq")["initial"]
  assert initial["operator_error"] == pytest.approx(ours.values["operator_error"])


def test_the_transfer_model_is_another_task_that_knows_neither():
  names = {"holdout": "random:2", "transfer": "random:1"}
  task = ptq.PtqTask(**OPTIONS, **names, objective="kl")
  second, held_out = task.transfer(), task.holdout()
  assert (second.options.model, held_out.options.model) == ("random:1", "random:2")
  for other in (second, held_out):
    assert other.transfer() is None is other.holdout()
    assert other.target == "kl"
  assert ptq.PtqTask(**OPTIONS).transfer() is None
