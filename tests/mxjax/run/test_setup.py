"""What a run is made of: what makes two runs the same, and what is refused at once."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax.calibration.calibration import Calibration
from mxjax.calibration.store import CalibrationStore, computation_digest
from mxjax.methods.program import Program
from mxjax.run.setup import Setup
from tests import refusals

CONTRACT = mxjax.Contract(targets=("up_proj",))


@dataclasses.dataclass(frozen=True)
class OwnModel:
  """A `CausalLanguageModel` without a config, of one layer."""

  eps: float
  cap: float = 30.0
  num_layers = 1
  projection_taps = {("mlp", "up_proj"): "x"}  # noqa: RUF012

  def layer_name(self, index):
    return "layer"

  def embed(self, params, tokens):
    return params["embedding"][tokens]

  def layer(self, params, hidden):
    return self.layer_with_taps(params, hidden)[0]

  def layer_with_taps(self, params, hidden):
    x = hidden / jnp.sqrt((hidden**2).mean(-1, keepdims=True) + self.eps)
    return hidden + mxjax.linear(x, params["mlp"]["up_proj"]["weight"]), {"x": x}

  def logits(self, params, hidden):
    return self.cap * jnp.tanh(hidden @ params["embedding"].T / self.cap)


class Network(nn.Module):
  """A network whose weights do not tell which activation function it has."""

  act: str

  @nn.compact
  def __call__(self, x):
    return nn.Dense(32, name="b")(getattr(nn, self.act)(nn.Dense(32, name="a")(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Program):
  name: str = "mine"


class Others(Mine):
  """Another program under the same name."""


def own_params(dtype="float32", shape=(32, 32)):
  rng = np.random.default_rng(0)
  weight = jnp.asarray(rng.standard_normal(shape), dtype)
  embedding = jnp.asarray(rng.standard_normal((7, 32)), "float32")
  return {"embedding": embedding, "layer": {"mlp": {"up_proj": {"weight": weight}}}}


TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8) % 7


def identity(model, params, inputs, method="gptq", contract=CONTRACT):
  return Setup.of(params, Calibration(model, inputs), method, contract).identity()


def test_models_that_compute_otherwise_are_other_runs_and_other_stores():
  ids = [identity(OwnModel(eps), own_params(), TOKENS) for eps in (1e-5, 1e-5, 10.0)]
  assert ids[0] == ids[1]
  assert ids[0]["weights"] == ids[2]["weights"]
  assert ids[0]["model"] != ids[2]["model"]
  capped = identity(OwnModel(1e-5, cap=2.0), own_params(), TOKENS)
  assert capped["model"] != ids[0]["model"], "tuning and the gate read logits"
  calibs = [Calibration(OwnModel(eps), TOKENS) for eps in (1e-5, 1e-5, 10.0)]
  keys = [CalibrationStore("s", own_params(), calib).path for calib in calibs]
  assert keys[0] == keys[1] != keys[2]


def test_an_activation_function_makes_another_run_of_a_flax_module():
  inputs = np.ones((2, 4, 32), np.float32)
  ids = []
  for act in ("relu", "relu", "tanh"):
    params = Network(act).init(jax.random.key(0), inputs)["params"]
    model = mxjax.FlaxModel(module=Network(act))
    ids.append(identity(model, params, inputs, contract=mxjax.Contract()))
  assert ids[0] == ids[1]
  assert ids[0]["weights"] == ids[2]["weights"]
  assert ids[0]["model"] != ids[2]["model"]


def digest_of_relu():
  inputs = np.ones((1, 4, 32), np.float32)
  params = Network("relu").init(jax.random.key(0), inputs)["params"]
  bound = mxjax.FlaxModel(module=Network("relu")).bound_to(params, inputs)
  return computation_digest(bound, bound.split(params), inputs)


@pytest.mark.slow
def test_the_digest_of_a_computation_is_that_of_another_process():
  program = "from tests.mxjax.run import test_setup as t; print(t.digest_of_relu())"
  root = pathlib.Path(__file__).parents[3]
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=root,
    env=os.environ | {"PYTHONPATH": str(root), "PYTHONHASHSEED": "7"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.strip() == digest_of_relu()


def test_programs_of_one_name_and_two_classes_are_two_runs():
  ids = [identity(OwnModel(1.0), own_params(), TOKENS, p) for p in (Mine(), Others())]
  assert ids[0]["program"] == ids[1]["program"]
  assert ids[0] != ids[1]


def test_arguments_are_refused_before_any_work():
  params, calib = own_params(), Calibration(OwnModel(1.0), TOKENS)

  def call(params=params, calib=calib, method="rtn", contract=CONTRACT, **options):
    return lambda: mxjax.quantize(params, calib, method, contract=contract, **options)

  refusals.check(
    [
      (call(params={"params": params}), "layer", "params['params']"),
      (call(params={"layer": {}, "embedding": 0}), "layer/mlp/up_proj", "weight"),
      (call(params=own_params("int8")), "layer/mlp/up_proj", "int8"),
      (call(params=own_params(shape=(32,))), "layer/mlp/up_proj", "[32]"),
      (call(chunk=0), "chunk", "0"),
      (call(chunk=2.5), "chunk", "2.5"),
      (call(chunk=True), "chunk", "True"),
      (call(resume=True), "run_dir"),
      (call(into=params), "into"),
    ],
    mxjax.Refusal,
  )
  refusals.check(
    [
      (call(params=None), "params", "NoneType"),
      (call(calib=TOKENS), "calib", "ndarray"),
      (call(method=None), "method", "NoneType"),
      (call(method=Program), "method", "type"),
      (call(contract=None), "contract", "NoneType"),
    ],
    TypeError,
  )


@pytest.mark.parametrize("act", ["relu", "tanh"])
def test_a_folder_is_resumed_by_the_model_of_its_start(tmp_path, act):
  inputs = np.ones((2, 4, 32), np.float32) * np.linspace(-1, 1, 32, dtype=np.float32)
  params = Network("relu").init(jax.random.key(0), inputs)["params"]

  def start(act, **options):
    calib = Calibration(mxjax.FlaxModel(module=Network(act)), inputs)
    return mxjax.quantize(params, calib, "rtn", run_dir=tmp_path / "run", **options)

  start("relu")
  if act == "relu":
    start(act, resume=True)
  else:
    with pytest.raises(ValueError, match="model"):
      start(act, resume=True)
