"""Plans against the paper's tables, what runs store, and measured peaks of memory."""

import dataclasses
import json
import logging
import math

import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax import methods
from mxjax.audit import plan
from mxjax.layers import sizes
from mxjax.layers.inference_packing import pack_for_inference
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.models import CausalLM, families, generation, load_config
from mxjax.numerics.realization.activation_quantizers import FewCodes, OneCode
from tests.conftest import GOLDEN
from tests.evaluation.paper import PAPER

CONFIGS = {
  name: families.from_hf_config(values)
  for name, values in json.loads((GOLDEN / "paper_configs.json").read_text()).items()
}
STORAGE = PAPER["storage"]
MIB, GIB = 2**20, 2**30
RESULTS = GOLDEN.parents[1] / "benchmarks" / "results"


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_what_a_model_allocates(tiny_config, dtype):
  model = CausalLM(dataclasses.replace(tiny_config, dtype=dtype))
  planned = plan.plan(model.config).cache
  assert list(planned) == ["compute", "e4m3"]
  for how, size in planned.items():
    cache = jax.eval_shape(lambda how=how: generation.empty_cache(model, 2, 64, how))
    leaves = jax.tree.leaves(cache.layers)
    assert 2 * 64 * size == sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_methods_store_what_the_plan_of_hires_and_their_names_say(name):
  of = lambda method: plan.stored(CONFIGS[name], methods.get(method))
  hires, planned = of("hires"), plan.plan(CONFIGS[name])
  assert hires["total"] == planned.packed_total
  assert hires["bf16"] == planned.bf16
  assert hires["bits_per_weight"] == pytest.approx(planned.bits_per_weight, rel=1e-5)
  # K_Q is what hires-next leaves out, and recovery; bfloat16 halves maps and tables.
  cross = planned.blocks * plan.CROSS_BYTES
  assert of("hires-next")["total"] == hires["total"] - cross - hires["recovery"]
  narrow = of("hires:storage=bfloat16")
  for part in ("maps", "tables"):
    assert 2 * narrow[part] == hires[part]
  assert of("gptq")["bits_per_weight"] == 4.25
  weights = of("hires:activations=float")
  assert (weights["tables"], weights["maps"]) == (0, hires["maps"])
  assert weights["form"] == "W4A16"


@pytest.mark.parametrize(
  ("method", "parts"),
  [
    ("hires", []),
    ("rtn+tune", []),
    ("rtn+tune:code_rate=0.03", ["codes"]),
    ("rtn+tune:map_rate=0.001", ["maps"]),
    ("rtn+tune:code_rate=0.03:map_rate=0.001", ["codes", "maps"]),
  ],
)
def test_what_tuning_learns_is_planned(method, parts, tiny_model, tiny_build):
  """Its numbers, their gradients and the two moments of Adam, but for the factors.

  Two files are on the disk until the older one is removed, which have no gradients.
  """
  program, params = methods.get(method), tiny_build("rtn").params
  layers = [params[tiny_model.layer_name(i)] for i in range(tiny_model.num_layers)]
  own = (program.tune or ScaleDistillation()).initial(layers, tiny_model)
  leaves = jax.tree.leaves([[of_layer[part] for part in parts] for of_layer in own])
  size = sum(leaf.nbytes for leaf in leaves)
  planned = plan.plan(tiny_model.config)
  expected = {"memory": 4 * size, "disk": 2 * 3 * size}
  assert plan.learned_bytes(planned, program) == expected


def test_a_large_model_is_warned_of_with_what_takes_its_bytes(tiny_hires, caplog):
  report = sizes.size_report(tiny_hires.params)
  assert report["total"] > report["bf16_total"] / 2
  with caplog.at_level(logging.WARNING, logger="mxjax"):
    told = sizes.warn("hires", report)
  assert told and caplog.messages == [f"hires: {told}"]
  ratio = report["total"] / report["bf16_total"]
  assert f"{ratio:.2f} of its" in told
  table_share = report["quantized_linears"]["rounding"] / report["total"]
  assert f"tables that refine activations {table_share:.0%}" in told
  assert told.index("tables that refine") < told.index("codes")
  half = report | {"total": report["bf16_total"] // 2}
  floats = sizes.size_report({"norm": {"weight": jnp.ones(4)}})
  assert sizes.warn("hires", half) is sizes.warn("none", floats) is None


def test_quantizing_in_python_warns_once(tiny_params, tiny_calib, caplog):
  with caplog.at_level(logging.WARNING, logger="mxjax"):
    mxjax.quantize(tiny_params, tiny_calib, "wush", check=False, probe=False)
  [message] = caplog.messages
  assert message.startswith("wush: the quantized model takes")


def test_more_calibration_takes_more_memory_and_work_only():
  small, large = (
    plan.plan(CONFIGS["Qwen3-32B"], sequences=n, length=2048) for n in (8, 128)
  )
  parts = {part for part in small.memory if small.memory[part] < large.memory[part]}
  assert parts == {"calibration stream", "captured inputs"}
  assert small.peak < large.peak
  assert 16 * small.forward_flops == large.forward_flops
  assert 16 * small.prediction_flops == large.prediction_flops
  # Three passes for gradients, one and three in each of two epochs, beside the head
  # and moments of outputs and inputs.
  passes = small.prediction_flops / (small.forward_flops / small.model_passes)
  assert 10 < passes < 13
  assert small.packed_total == large.packed_total
  # A 64-layer model, and yet less than its bfloat16 weights.
  assert small.peak < 0.7 * small.bf16


def test_a_width_that_no_block_divides_is_refused(tiny_config):
  with pytest.raises(ValueError, match="multiples of 32, got 80"):
    plan.plan(dataclasses.replace(tiny_config, intermediate_size=80))


def test_devices_share_the_stream_but_not_the_solve():
  config = CONFIGS["Qwen3-32B"]
  alone, on_eight = (plan.plan(config, data=n) for n in (1, 8))
  assert alone == plan.plan(config)
  for part in ("calibration stream", "captured inputs"):
    assert 8 * on_eight.memory[part] == alone.memory[part]
  for part in ("Hessians", "workspace"):
    assert on_eight.memory[part] == alone.memory[part]
  assert on_eight.peak < alone.peak


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_plan_counts_every_array_of_a_run(dtype, size):
  config = dataclasses.replace(CONFIGS["Llama-3.2-3B"], dtype=dtype)
  few = plan.plan(config, sequences=8, length=512)
  tokens, d, hidden, values = 8 * 512, 3072, 8192, 1024
  assert few.memory["calibration stream"] == tokens * 3 * d * size
  assert few.memory["captured inputs"] == tokens * (3 * d + hidden + values) * size
  assert few.memory["Hessians"] == 4 * (3 * d**2 + hidden**2)
  held = plan.plan(config, sequences=8, length=512, on_disk=False)
  layer, packed = few.target_weights // 28 * 2, few.packed_total - few.rest
  resident = few.bf16 + packed - (few.rest + layer + packed // 28)
  assert held.memory["weights"] - few.memory["weights"] == resident


def planned_peak(case):
  """The rule's answer for a case of benchmarks/plan_memory.py."""
  values = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": case["vocabulary"],
    "hidden_size": case["width"],
    "intermediate_size": case["intermediate"],
    "num_hidden_layers": case["layers"],
    "num_attention_heads": case["width"] // 64,
    "max_position_embeddings": case["length"],
  }
  dtype = case.get("dtype", "float32")
  config = families.from_hf_config(values) if case["width"] else load_config(None)
  return plan.plan(
    dataclasses.replace(config, dtype=dtype),
    sequences=case["sequences"],
    length=case["length"],
    on_disk=case["on_disk"],
  ).peak


@pytest.mark.slow
def test_the_rule_of_thumb_is_near_the_peaks_that_were_measured():
  rows = json.loads((RESULTS / "plan_memory.json").read_text())
  ratios = {n: planned_peak(r["case"]) / r["measured_peak"] for n, r in rows.items()}
  assert len(ratios) == 7
  assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios
