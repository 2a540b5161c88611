"""Passes on whole linears, heads and MLPs: what they sum, and what they may not do."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.calibration import streams
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.discovery.core import candidate_source
from mxjax.discovery.core.task import Call, ContractError, Status
from mxjax.discovery.sandbox import tracing
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.tasks.ptq import (
  candidate,
  candidate_codes,
  candidate_passes,
  edit_templates,
  phases,
  programs,
)
from mxjax.discovery.tasks.ptq import task as ptq
from mxjax.discovery.tasks.ptq.candidate_passes import LinearPasses
from mxjax.discovery.tasks.ptq.structure.fits import HookAttentionFit, HookMlpFit
from mxjax.methods.hires.stage3 import ATTENTION, MLP
from mxjax.methods.recovery import Sample
from mxjax.numerics.realization import gptq, one_code
from mxjax.numerics.recovery import mlp_recovery, value_recovery
from mxjax.numerics.shaping.input_maps import BlockDense
from tests.cases import slow

TASK = ptq.PtqTask(model="random:0", calibration=[8, 32], windows=[2, 32])
INTERFACE = TASK.interface
HEADER = "import jax\nimport jax.numpy as jnp\nPLAN = {'curvature': 'solved'}\n"


@functools.cache
def executor():
  return LocalExecutor(TASK)


def traced(source):
  defaults = INTERFACE.default_source()
  return executor().trace(
    candidate_source.with_functions(source, defaults, replace=False)
  )


def hooks(source):
  """The hooks of a source, as a function of a name and whether it is batched."""
  result = traced(source)
  assert result.status == Status.OK, result.detail
  table, computation = executor().artifacts, result.computation
  return lambda name, batched=False: jax.jit(
    (table.batched if batched else table.unit)(computation[name])
  )


def linear_passes(source, count=1):
  result = traced(source)
  assert result.status == Status.OK, result.detail
  table, computation = executor().artifacts, result.computation
  return LinearPasses(
    table.unit(computation["measure_linear"]),
    table.unit(computation["solve_linear"]),
    table.batched(computation["encode_linear"]),
    count,
  )


def operands(blocks=2, rows=24):
  rng = np.random.default_rng(0)
  x, weight = rng.normal(size=(3, blocks, 32, 32)), rng.normal(size=(blocks, 32, rows))
  narrow = lambda array: jnp.asarray(array, jnp.float32)
  matrix = np.eye(32) + 0.1 * rng.normal(size=(blocks, 32, 32))
  chunks = [narrow(x[:2]), narrow(x[2:])]
  return narrow(weight), LinearInputs(chunks), BlockDense(narrow(matrix))


SHOWN = (
  HEADER
  + """
def measure_linear(inputs, index, step, state):
  moment = jnp.matmul(inputs, inputs.T, precision="highest")
  return jnp.stack([(index + 1) * moment, (step + 1) * state[0]])
def solve_linear(step, sums, state):
  return jnp.stack([state[0] + sums[0], state[1] + sums[1]])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [*slow(2), 3])
def test_a_linears_passes_sum_all_sequences_and_hand_on_their_state(
  float64, blocks, monkeypatch
):
  weight, inputs, at = operands(blocks)
  seen = []
  made = linear_passes(SHOWN, count=2)
  encode = made.encode
  kept = candidate_passes._encoded_rows
  monkeypatch.setattr(
    candidate_passes,
    "_encoded_rows",
    lambda function, weight, state: seen.append(state) or kept(encode, weight, state),
  )
  result = made.codes(weight, inputs, at)
  x = np.stack([inputs.sequence(n) for n in range(3)]).astype(np.float64)
  x = x.reshape(3, 32 * blocks, 32)
  moments = np.einsum("s,sit,sjt->ij", [1, 2, 3], x, x)
  first = np.zeros((32 * blocks, 32 * blocks))
  for n, matrix in enumerate(np.asarray(at.matrix, np.float64)):
    first[32 * n : 32 * n + 32, 32 * n : 32 * n + 32] = matrix
  # Three sequences; the second pass doubles a state that has grown by the moments.
  second = 3 * first + 2 * 3 * (first + moments)
  expected = np.stack([first + 2 * moments, second])
  np.testing.assert_allclose(seen[0], expected, rtol=1e-5, atol=1e-3)
  plain = gptq.round_to_nearest(weight)
  np.testing.assert_array_equal(result.codes, plain.codes)
  np.testing.assert_array_equal(result.decoded, plain.decoded)


@pytest.mark.slow
def test_gptq_written_whole_is_the_librarys(float64):
  weight, inputs, at = operands(blocks=3)
  made = linear_passes(programs.source("gptq"))
  result = made.codes(weight, inputs, at)
  hessian = at.conjugate(inputs.hessian())
  expected = gptq.reconstruct(weight, gptq.factor(hessian).upper)
  np.testing.assert_array_equal(result.codes, expected.codes)
  np.testing.assert_array_equal(result.exponent, expected.exponent)
  alone = gptq.reconstruct_local(weight, gptq.factor(hessian[:32, :32]).upper[None])
  assert (np.asarray(result.codes) != np.asarray(alone.codes)).any()


HOSTILE = {
  "another shape": (
    "def measure_linear(inputs, index, step, state):\n  return state[0]\n",
    Status.REFUSED,
    "measure_linear: expected results",
  ),
  "a shape that depends on data": (
    "def measure_linear(inputs, index, step, state):\n"
    "  return state + jnp.sum(inputs[jnp.nonzero(inputs[:, 0] > 0)[0]])\n",
    Status.TRACE_FAILED,
    "nonzero",
  ),
  "values of all pairs of pairs": (
    "def measure_linear(inputs, index, step, state):\n"
    "  flat = state.reshape(-1)\n"
    "  return state + jnp.sum(jnp.sin(flat[:, None] * flat))\n",
    Status.REFUSED,
    "measure_linear: its values have [0-9]+ bytes, at most 268435456",
  ),
  "arithmetic without end": (
    "def solve_linear(step, sums, state):\n"
    "  wide = jnp.tile(state[0].astype(jnp.bfloat16), (80, 80))\n"
    "  return state + jnp.sum(wide @ wide).astype(jnp.float32)\n",
    Status.REFUSED,
    "solve_linear: [0-9]+ floating-point operations, at most 68719476736",
  ),
  "codes of another row": (
    "def encode_linear(row, state):\n"
    "  return jnp.zeros(row.shape[0] // 2, jnp.uint8), jnp.zeros(2, jnp.int32)\n",
    Status.REFUSED,
    "encode_linear: expected results",
  ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_pass_may_not_do_is_refused_before_it_runs(name):
  code, status, message = HOSTILE[name]
  result = traced(HEADER + code)
  assert result.status == status
  assert re.search(message, result.detail), result.detail


@pytest.mark.parametrize(
  ("code", "message"),
  [
    (
      "def measure_linear(inputs, index, step, state):\n"
      "  return jnp.full_like(state, 2e38)\n",
      "measure_linear: returned NaN or inf",
    ),
    (
      "def solve_linear(step, sums, state):\n  return jnp.log(-1 - state)\n",
      "solve_linear: returned NaN or inf",
    ),
    (
      "def encode_linear(row, state):\n"
      "  exponent = row[::32].astype(jnp.int32)\n"
      "  return jnp.full(row.shape, 200, jnp.uint8), exponent\n",
      "encode_linear: 48 of 48 blocks have a code over 15",
    ),
    (
      "def encode_linear(row, state):\n"
      "  exponent = jax.vmap(block_exponent)(row.reshape(-1, 32)) + 9\n"
      "  return jnp.zeros(row.shape, jnp.uint8), exponent\n",
      "encode_linear: 48 of 48 blocks have",
    ),
  ],
)
def test_what_a_pass_may_not_give_is_a_contract_error(float64, code, message):
  with pytest.raises(ContractError, match=message):
    linear_passes(HEADER + code).codes(*operands())


def test_data_of_a_size_that_was_not_traced_is_named(float64):
  with pytest.raises(ValueError, match="measure_linear: expected arrays of one of"):
    linear_passes(HEADER).codes(*operands(blocks=4))


def pairs():
  rng = np.random.default_rng(1)
  values, targets = rng.normal(size=(2, 8, 2, 32, 16))
  return values.astype(np.float32), (0.8 * values + 0.1 * targets).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("source", [programs.source("recovery"), *slow(None)])
def test_a_heads_fit_is_least_squares_of_its_own_sums(float64, source):
  card = next(t for t in edit_templates.EDIT_TEMPLATES if t.id == "value-affine")
  get = hooks(source or card.edit(INTERFACE.default_source(), {}))
  measure, recover = get("measure_value", batched=True), get("recover_value")
  values, targets = pairs()
  sums = sum(
    measure(v, t, jnp.int32(n))[0]
    for n, (v, t) in enumerate(zip(values, targets, strict=True))
  )
  moments = value_recovery.moments(
    *(jnp.asarray(each).transpose(0, 2, 1, 3) for each in (values, targets))
  )
  expected = value_recovery.solve(moments)
  for head in range(2):
    scale, offset = recover(sums[head])[0]
    assert float(scale) == pytest.approx(float(expected.scale[head]), rel=1e-9)
    assert float(offset) == pytest.approx(float(expected.offset[head]), rel=1e-6)


def mlp_arrays():
  rng = np.random.default_rng(2)
  gate, up = rng.normal(size=(2, 8, 96, 32))
  noisy = lambda x: 1.03 * x + 0.05 * rng.normal(size=x.shape)
  arrays = (gate, up, noisy(gate) + 0.1, noisy(up))
  narrow = [np.asarray(each, np.float32) for each in arrays]
  return narrow, np.asarray(rng.normal(size=(64, 96)), np.float32)


def library_cells(arrays, down):
  """The library's moments of 32 cells, and the deviation of the gate."""
  weights = mlp_recovery.column_weights(jnp.asarray(down))
  cells = [a.transpose(1, 0, 2).reshape(96, 32, 8) for a in arrays]
  sums = mlp_recovery.cell_moments(*map(jnp.asarray, cells), weights=weights)
  gates = mlp_recovery.gate_moments(jnp.asarray(arrays[0]))
  return sums, mlp_recovery.gate_deviation(gates)


def mlp_sums(measure, arrays, down):
  each = zip(*arrays, strict=True)
  return sum(measure(*a, down, jnp.int32(n))[0] for n, a in enumerate(each))


@pytest.mark.slow
def test_the_mlps_fit_written_whole_is_the_librarys(float64):
  get, (arrays, down) = hooks(programs.source("recovery")), mlp_arrays()
  sums, deviation = library_cells(arrays, down)
  expected = mlp_recovery.aggregate(mlp_recovery.solve_cells(sums, deviation))
  got = get("recover_mlp")(mlp_sums(get("measure_mlp"), arrays, down))[0]
  np.testing.assert_allclose(got, [*expected, deviation], rtol=1e-9)
  assert np.abs(expected).min() > 1e-3


def test_the_mlps_default_sums_are_normal_equations_by_cell(float64):
  get, (arrays, down) = hooks(INTERFACE.default_source()), mlp_arrays()
  sums, deviation = library_cells(arrays, down)
  gram, target = mlp_recovery.normal_equations(sums, deviation)
  namespace = {"jnp": jnp}
  exec(edit_templates.SNIPPETS["equations"], namespace)  # noqa: S102
  with tracing.tracing_scope():
    got = namespace["equations"](mlp_sums(get("measure_mlp"), arrays, down))
  for mine, theirs in zip(got, (gram, target, deviation), strict=True):
    np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def fits(source):
  result = traced(source)
  assert result.status == Status.OK, result.detail
  table, names = executor().artifacts, result.computation
  return (
    HookAttentionFit(
      table.batched(names["measure_value"]), table.unit(names["recover_value"])
    ),
    HookMlpFit(table.unit(names["measure_mlp"]), table.unit(names["recover_mlp"])),
  )


def samples():
  """What the pipeline tells both fits of eight sequences, and the float weights."""
  (values, targets), rng = pairs(), np.random.default_rng(3)
  weights = [rng.normal(size=size) for size in ((96, 64), (96, 64), (64, 96))]
  names = ("gate_proj", "up_proj", "down_proj")
  narrow = lambda array: jnp.asarray(array, jnp.float32)
  layer = {
    "mlp": {n: {"weight": narrow(w)} for n, w in zip(names, weights, strict=True)}
  }
  for index in range(8):
    x = rng.normal(size=(1, 32, 64))
    noisy = [x @ w.T + 0.1 * rng.normal(size=(1, 32, 96)) for w in weights[:2]]
    heads = lambda a, index=index: narrow(a[index].swapaxes(0, 1)[None])
    taps = {"gate_up_input": x, "gate": noisy[0], "up": noisy[1]}
    yield Sample(
      (),
      layer,
      {"value": heads(values), **{k: narrow(v) for k, v in taps.items()}},
      {"value": heads(targets)},
      jnp.int32(index),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("which", "library"), [(0, ATTENTION), (1, MLP)])
def test_the_pipeline_sums_what_a_program_asks_of_every_sequence(
  float64, which, library
):
  mine, all_samples = fits(programs.source("recovery"))[which], list(samples())
  first = all_samples[0]
  found = []
  for fit in (mine, library):
    constants, moments = fit.prepare(first.float_layer, first.float_taps, 8)
    for sample in all_samples:
      moments = fit.measure(moments, sample._replace(constants=constants))
    found.append(jax.tree.leaves(fit.solve(moments)[0]))
  for got, expected in zip(*found, strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("which", "hook", "code"),
  [
    (
      0,
      "measure_value",
      "(value, target, index):\n  return jnp.log(-1 - target @ value.T)",
    ),
    (0, "recover_value", "(sums):\n  return jnp.full(2, jnp.inf)"),
    (1, "recover_mlp", "(sums):\n  return jnp.log(-1 - sums[0, :4] ** 2)"),
  ],
)
def test_what_a_fit_may_not_give_is_a_contract_error(float64, which, hook, code):
  code = f"{HEADER}\ndef {hook}{code}.astype(jnp.float64)\n"
  fit, sample = fits(code)[which], next(samples())
  constants, moments = fit.prepare(sample.float_layer, sample.float_taps, 8)
  moments = fit.measure(moments, sample._replace(constants=constants))
  with pytest.raises(ContractError, match=f"{hook}: returned NaN or inf"):
    fit.solve(moments)


@pytest.mark.slow
def test_a_search_computes_in_the_dtype_that_it_says():
  options = {"model": "random:0", "calibration": [8, 32], "windows": [2, 32]}
  narrow = ptq.PtqTask(**options, dtype="bfloat16")
  model, params = narrow.options.load()
  assert model.config.dtype == narrow.contract["model"]["dtype"] == "bfloat16"
  assert TASK.contract["model"]["dtype"] == "float32"
  assert narrow.spec["dtype"] == "bfloat16"
  hidden = model.embed(params, jnp.zeros((1, 4), jnp.int32))
  assert hidden.dtype == jnp.bfloat16
  with pytest.raises(ValueError, match="expected dtype to be one of float32, bfloat16"):
    ptq.PtqTask(**options, dtype="float16")


@pytest.mark.parametrize("tables", ["realized", "expected"])
def test_the_expected_tables_are_of_the_whole_linear_in_the_maps_coordinates(
  float64, tables
):
  weight, inputs, at = operands()
  act = "def encode_act(block, gram, cross):\n  exponent = block_exponent(block) + 1\n"
  act += "  return nearest_codes(block, exponent), exponent\n"
  plan = {**INTERFACE.default_plan, "tables": tables}
  call = Call(traced(act).computation, plan, {}).active(INTERFACE)
  paths, defaults = [(0, "self_attn", "q_proj")], phases.default_identities()
  program = candidate.CandidateProgram(call, executor().artifacts, paths, defaults)
  made = program.quantize_weight(weight, inputs, at)
  decoded = gptq.round_to_nearest(weight, inputs.rules).decoded
  gram, cross = one_code.tables(weight, decoded)
  if tables == "expected":
    hessian = at.conjugate(inputs.hessian())
    whole = one_code.expected_cross(weight, decoded, hessian)
    assert np.abs(whole - cross).max() > 0.1 * np.abs(cross).max()
    cross = whole
  for got, expected in zip(made.rounding.tables(), (gram, cross), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("told", ["its own", "weighted", "its neighbours'"])
def test_a_linear_without_hooks_of_its_own_has_the_factor_of_its_hessian(
  float64, told, monkeypatch
):
  weight, inputs, at = operands(blocks=3)
  if told == "weighted":
    tokens = np.random.default_rng(3).uniform(0.1, 1.9, (3, 32))
    inputs = inputs.weighted(jnp.asarray(tokens, jnp.float32))
  hessian = inputs.hessian()
  if is_shuffled := told == "its neighbours'":
    hessian = jnp.roll(hessian, 32, axis=(0, 1))
  seen, kept = [], candidate_passes._encoded_rows
  monkeypatch.setattr(
    candidate_passes,
    "_encoded_rows",
    lambda function, weight, state: seen.append(state) or kept(function, weight, state),
  )
  made = dataclasses.replace(linear_passes(HEADER), is_shuffled=is_shuffled)
  made.codes(weight, inputs, at)
  expected = gptq.factor(at.conjugate(hessian)).upper
  np.testing.assert_allclose(seen[0][0], expected, rtol=1e-3, atol=1e-4)


def test_a_linear_of_one_block_has_no_neighbours():
  with pytest.raises(ContractError, match="a linear of 1 block"):
    candidate_codes.neighbours_in_linear(jnp.zeros((2, 32, 32)))


def _nearest(rows, table):
  """An encoder of rows `[n, 32]` whose exponents are told by a table."""
  exponent = jnp.full(len(rows), table[0, 0], jnp.int32)
  return (jnp.abs(rows) > 1).astype(jnp.uint8), exponent


def test_equal_units_are_encoded_once_and_no_others(monkeypatch):
  counts, original = [], candidate_codes.map_units

  def counted(function, rows, *tables):
    counts.append(len(rows))
    return original(function, rows, *tables)

  monkeypatch.setattr(candidate_codes, "map_units", counted)
  known = candidate_codes.EncodedUnits()
  blocks = np.random.default_rng(0).standard_normal((2, 32, 130)).astype(np.float32)
  tables = np.arange(2, dtype=np.float32)[:, None, None] * np.ones((1, 32, 32))

  def encoded(blocks, tables=tables, function=_nearest):
    counts.clear()
    got = candidate_codes.encoded(function, blocks, tables, known=known)
    ran = sum(counts)
    want = candidate_codes.encoded(function, blocks, tables)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_array_equal(a, b, strict=True)
    return ran

  # Two units for each block, the second of two rows.
  assert encoded(blocks) == 4
  assert encoded(blocks) == 0
  assert encoded(blocks[..., :-1]) == 0
  # Filling counts for no row: here the second unit is a zero longer than it was.
  longer = np.pad(blocks[..., :-1], ((0, 0), (0, 0), (0, 1)))
  assert encoded(longer) == 2
  assert encoded(blocks, tables + 1) == 4
  assert encoded(blocks, function=lambda rows, table: _nearest(-rows, table)) == 4
  moved = blocks.copy()
  moved[0, 5, 17] += 4
  assert encoded(moved) == 1
  # Zeros of the two signs may be encoded differently.
  signed = np.zeros_like(blocks)
  assert (encoded(signed), encoded(-signed)) == (4, 4)


def test_a_full_memory_of_units_keeps_nothing_more(monkeypatch):
  monkeypatch.setattr(candidate_codes, "KEPT_UNITS", 1)
  known = candidate_codes.EncodedUnits()
  for seed in range(3):
    blocks = np.full((1, 32, 4), seed, np.float32)
    table = np.zeros((1, 32, 32), np.float32)
    candidate_codes.encoded(_nearest, blocks, table, known=known)
  assert len(known._results) == 2


@pytest.mark.slow
def test_no_call_is_told_what_another_call_encoded(monkeypatch):
  task = ptq.PtqTask(
    model="random:0", calibration=[8, 32], windows=[2, 32], objective="kl"
  )
  made, original = [], candidate_codes.EncodedUnits

  class Watched(original):
    def __init__(self):
      super().__init__()
      assert not self._results
      made.append(self)

  monkeypatch.setattr(phases, "EncodedUnits", Watched)
  own = LocalExecutor(task)
  source = candidate_source.merged(
    INTERFACE.default_source(),
    "def encode_act(block, gram, cross):\n"
    "  exponent = block_exponent(block) + 1\n"
    "  return nearest_codes(block, exponent), exponent\n",
    {},
  )
  call = Call(own.trace(source).computation, INTERFACE.default_plan, {})
  calls, outcomes = [call.active(INTERFACE)] * 2, []
  runs, streamed = [], streams.final_hiddens

  def counted(model, params, *rest):
    runs.append(params is own._sessions["measure"]._params)
    return streamed(model, params, *rest)

  monkeypatch.setattr(streams, "final_hiddens", counted)
  own.run(calls, lambda index, outcome, seconds: outcomes.append(outcome))
  assert len(made) == 2 and all(each._results for each in made)
  assert outcomes[0] == outcomes[1] and outcomes[0].status == Status.OK
  # The float model runs once, the candidate for perplexity and divergence of each call.
  assert (runs.count(True), runs.count(False)) == (1, 4)


MIXED = """
def encode_linear(row, state):
  carried = row @ state[0]
  blocks = (row + 0.001 * carried).reshape(-1, 32)
  exponent = jax.vmap(block_exponent)(blocks)
  return jax.vmap(nearest_codes)(blocks, exponent).reshape(-1), exponent
"""


def test_an_encoder_of_rows_is_compiled_once_for_all_numbers_of_rows(float64):
  encode = linear_passes(HEADER + candidate_source_of(MIXED)).encode
  rng = np.random.default_rng(1)
  weight = jnp.asarray(rng.normal(size=(2, 32, 300)), jnp.float32)
  state = jnp.asarray(rng.normal(size=(2, 64, 64)), jnp.float32)
  candidate_passes._encoded_rows.clear_cache()
  made = {
    rows: candidate_passes.encoded_linear(encode, weight[..., :rows], state)
    for rows in (300, 128, 24)
  }
  assert candidate_passes._encoded_rows._cache_size() == 1
  whole = candidate_passes._encoded_rows(encode, weight, state)
  for rows, found in made.items():
    for got, expected in zip(found, whole, strict=True):
      np.testing.assert_array_equal(got, np.asarray(expected)[..., :rows])


def candidate_source_of(code):
  """The functions of the interface that a hook may call, and the hook."""
  return candidate_source.with_functions(INTERFACE.header, code).replace(
    "import jax\nimport jax.numpy as jnp\n", ""
  )


MEASURED = """
def measure_weights(tile, index, step, state):
  moment = tile @ tile.T * (1 + index) / 3
  return jnp.zeros_like(state).at[0].set(moment + state[0]).at[1].set(2.0 * step)
"""


def test_a_measurement_is_compiled_once_and_adds_tiles_in_turn(float64):
  get = hooks(HEADER + MEASURED)
  function = get("measure_weights", batched=True)
  rng = np.random.default_rng(2)
  candidate_passes._add_tiles.clear_cache()
  for blocks, rows in ((1, 32), (4, 160), (20, 64)):
    weight = rng.normal(size=(blocks, 32, rows))
    state = rng.normal(size=(blocks, 12, 32, 32))
    index = np.arange(0, rows, 32, dtype=np.int32)
    (sums,) = candidate_passes._sums(
      function, [weight], (12, 32, 32), index=index, step=jnp.int32(1), state=state
    )
    expected = np.zeros_like(state)
    for block in range(blocks):
      for tile in range(rows // 32):
        columns = weight[block][:, 32 * tile : 32 * tile + 32]
        moment = columns @ columns.T * (1 + 32 * tile) / 3
        expected[block, 0] += moment + state[block, 0]
        expected[block, 1] += 2.0
    np.testing.assert_allclose(sums, expected, rtol=1e-12, atol=1e-12)
  assert candidate_passes._add_tiles._cache_size() == 1
