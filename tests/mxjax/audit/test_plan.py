"""Plans against the paper's tables, what runs store, and what XLA states."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from mxjax.audit import plan, sizes
from mxjax.calibration import streams
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.models import CausalLM, families
from mxjax.numerics.realization import gptq
from mxjax.numerics.realization.activation_quantizers import FewCodes, OneCode
from tests import tiny
from tests.conftest import GOLDEN
from tests.evaluation.paper import PAPER

CONFIGS = {
  name: families.from_hf_config(values)
  for name, values in json.loads((GOLDEN / "paper_configs.json").read_text()).items()
}
STORAGE = PAPER["storage"]
MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize("row", STORAGE, ids=[row["Model"] for row in STORAGE])
def test_the_papers_storage_table(row):
  planned = plan.plan(CONFIGS[row["Model"]])
  assert f"{planned.blocks:,}" == row["Input blocks"]
  assert f"{planned.bf16 / GIB:.3f}" == row["BF16 GiB"]
  assert f"{planned.auxiliary / MIB:.3f}" == row["Auxiliary MiB"]
  assert f"{planned.decoded_total / GIB:.3f}" == row["Total GiB"]
  increase = planned.decoded_total / planned.bf16 - 1
  assert f"{100 * increase:.2f}%" == row["Increase"]


def test_recovery_bytes_of_the_paper():
  for name, size in {"Qwen3-8B": 2880, "Llama-3-8B": 2560, "Qwen3-32B": 5120}.items():
    planned = plan.plan(CONFIGS[name])
    assert planned.auxiliary - planned.blocks * 10_304 == size


def test_all_seven_models_of_the_paper_can_be_planned():
  billions = {name: plan.plan(c).parameters / 1e9 for name, c in CONFIGS.items()}
  expected = {
    "Llama-3.2-3B": 3.21,
    "Qwen3-4B": 4.02,
    "Mistral-7B": 7.25,
    "Qwen3-8B": 8.19,
    "Llama-3-8B": 8.03,
    "OLMo-2-13B": 13.7,
    "Qwen3-32B": 32.8,
  }
  assert billions == pytest.approx(expected, rel=3e-3)


def test_the_packed_layout_is_what_a_run_stores(tiny_config, tiny_hires):
  planned, measured = plan.plan(tiny_config), sizes.size_report(tiny_hires.params)
  linears = measured["quantized_linears"]
  assert planned.codes == linears["codes"]
  assert planned.scales == linears["scales"]
  auxiliary = linears["maps"] + linears["rounding"] + measured["recovery"]
  assert planned.auxiliary == auxiliary
  assert planned.rest == measured["other"]
  assert planned.packed_total == measured["total"]
  assert planned.bf16 == measured["bf16_total"]
  assert planned.target_weights == linears["weights"]
  for label, options in {
    "as quantized": {"tables": False},
    "bfloat16 tables": {},
    "bfloat16 tables, int8 embeddings": {"embeddings": "int8"},
    "bfloat16 tables, MXFP4 embeddings": {"embeddings": "mxfp4"},
  }.items():
    packed = pack_for_inference(tiny_hires.params, **options)
    assert planned.loaded.pop(label) == sizes.size_report(packed)["total"]
  packed = pack_for_inference(
    jax.tree.map(
      lambda node: FewCodes(node.gram, 2) if isinstance(node, OneCode) else node,
      tiny_hires.params,
      is_leaf=lambda node: isinstance(node, OneCode),
    )
  )
  without_cross = planned.loaded.pop("hires-next, bfloat16 tables")
  assert without_cross == sizes.size_report(packed)["total"]
  assert not planned.loaded


def test_more_calibration_takes_more_memory_and_work_only():
  small, large = (
    plan.plan(CONFIGS["Qwen3-32B"], sequences=n, length=2048) for n in (8, 128)
  )
  assert small.memory["calibration"] < large.memory["calibration"]
  assert 16 * small.forward_flops == large.forward_flops
  assert 16 * small.prediction_flops == large.prediction_flops
  # Three passes for gradients, one and three in each of two epochs, beside the head
  # and moments of outputs and inputs.
  passes = small.prediction_flops / (small.forward_flops / small.model_passes)
  assert 10 < passes < 13
  assert small.packed_total == large.packed_total
  # A 64-layer model, and yet less than its bfloat16 weights.
  assert small.memory["quantization"] < 0.6 * small.bf16


def test_a_width_that_no_block_divides_is_refused(tiny_config):
  with pytest.raises(ValueError, match="multiple of 32, got 80"):
    plan.plan(dataclasses.replace(tiny_config, intermediate_size=80))


def test_devices_share_streams_and_taps_but_not_the_solve():
  config = CONFIGS["Qwen3-32B"]
  alone, on_eight = (plan.plan(config, data=n) for n in (1, 8))
  assert alone == plan.plan(config)
  for stage in ("calibration", "quantization", "attention recovery", "mlp recovery"):
    assert on_eight.memory[stage] < alone.memory[stage]
  widest = max(config.hidden_size, config.intermediate_size)
  assert on_eight.memory["quantization"] > 3 * 4 * widest**2
  assert on_eight.memory["saving"] == alone.memory["saving"]


LENGTH, WIDTH, HIDDEN = 1024, 512, 1536


@pytest.fixture(params=("float32", "bfloat16"))
def layer_run(request):
  """A model of one layer, shapes of its params, and what the plan counts of a run."""
  config = tiny.config(
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=WIDTH // 8,
    max_positions=LENGTH,
    dtype=request.param,
  )
  model = CausalLM(config)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
  linears = [
    shapes["params"]["layers_0"][block][name]["weight"].shape
    for block, name in model.projection_taps
  ]
  run = plan.RunArrays(config, linears, tokens=LENGTH, length=LENGTH, chunk=1)
  return model, shapes["params"]["layers_0"], run


def test_arrays_and_temporaries_of_a_pass_are_those_that_xla_states(layer_run):
  model, layer, run = layer_run
  hidden = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), model.config.dtype)
  taps = tuple(sorted(set(model.projection_taps.values())))
  lowered = streams.capture.lower(model, layer, hidden, taps, ("value",))
  stated = lowered.compile().memory_analysis()
  kept = stated.output_size_in_bytes - stated.alias_size_in_bytes
  # Beside the arrays there is a table of their places.
  assert run.inputs() + run.values() == pytest.approx(kept, abs=1024)
  # Float, attention's and MLP's fit: a stream each.
  assert run.streams() == 3 * hidden.size * hidden.dtype.itemsize
  assert run.capturing() == pytest.approx(stated.temp_size_in_bytes, rel=0.2)


def test_the_largest_step_of_a_linear_is_what_xla_states(layer_run):
  _, _, run = layer_run
  matrix = jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32)
  stated = gptq.factor.lower(matrix).compile().memory_analysis()
  step = stated.temp_size_in_bytes + stated.output_size_in_bytes + matrix.size * 4
  weights = 8 * WIDTH * HIDDEN
  assert run.solving(1) == pytest.approx(step + weights, rel=0.2)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_plan_counts_every_array_of_a_run(dtype, size):
  config = dataclasses.replace(CONFIGS["Llama-3.2-3B"], dtype=dtype)
  few, many = (plan.plan(config, sequences=n, length=512) for n in (8, 16))
  tokens = 8 * 512
  d, hidden, values = 3072, 8192, 1024
  more = {stage: many.memory[stage] - few.memory[stage] for stage in few.memory}
  recovery = tokens * (3 * d + values) * size
  assert more["attention recovery"] == more["mlp recovery"] == recovery
  inputs = tokens * (3 * d + hidden) * size
  assert more["calibration"] == more["quantization"] == recovery + inputs
  held = plan.plan(config, sequences=8, length=512, on_disk=False)
  layer, packed = few.target_weights // 28 * 2, few.packed_total - few.rest
  resident = few.bf16 + packed - (few.rest + layer + packed // 28)
  assert held.memory["quantization"] - few.memory["quantization"] == resident
