"""`benchmarks/shared_maps.py`: linears on the same inputs share one map."""

import pathlib
import sys

import numpy as np
import pytest

from mxjax import methods
from mxjax.calibration.calibration import Calibration
from mxjax.run.quantize import run

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
shared_maps = pytest.importorskip("shared_maps")


@pytest.mark.slow
def test_named_linears_are_quantized_as_one_and_the_others_alone(
  tiny_model, tiny_params
):
  vocabulary = tiny_model.config.vocab_size
  tokens = np.random.default_rng(0).integers(0, vocabulary, (4, 32), np.int32)
  program = methods.get("hires:recover=none")
  made = {
    shared: run(
      tiny_params,
      Calibration(tiny_model, tokens),
      shared_maps.sharing(program, shared_maps.SHARED[shared]),
      check=False,
      probe=False,
    ).params["layers_0"]
    for shared in ("none", "attention")
  }
  leaf = lambda layer, sublayer, name: layer[sublayer][name]["weight"]
  map_of = lambda shared, *place: np.asarray(
    leaf(made[shared], *place).input_map.matrix
  )
  queries, keys = (("self_attn", name) for name in ("q_proj", "k_proj"))
  assert (map_of("attention", *queries) == map_of("attention", *keys)).all()
  assert (map_of("none", *queries) != map_of("none", *keys)).any()
  # Each linear has its own rows of the codes, in their order.
  for place in (queries, keys):
    assert leaf(made["attention"], *place).shape == leaf(made["none"], *place).shape
  gate = ("mlp", "gate_proj")
  assert (map_of("attention", *gate) == map_of("none", *gate)).all()
