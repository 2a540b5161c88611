"""What hooks of a program of one's own return is checked where the run takes it."""

import dataclasses
import linecache
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import errors
from mxjax.calibration.calibration import Calibration
from mxjax.methods.program import Learning, LinearResult, Prepared, Program, Shaping
from mxjax.methods.program_source import source_digests
from mxjax.methods.recovery import RecoveryFit
from mxjax.numerics.mxfp4 import Rules
from mxjax.numerics.shaping.input_maps import BlockDense
from mxjax.run.setup import Setup
from tests import refusals
from tests.mxjax.run.test_setup import CONTRACT, TOKENS, OwnModel, own_params


def program(**hooks):
  """A program with these hooks of its own."""
  return type("Own", (Program,), hooks)(name="own")


def quantize(**hooks):
  calib = Calibration(OwnModel(1.0), TOKENS)
  made = program(**hooks)
  return lambda: mxjax.quantize(
    own_params(), calib, made, contract=CONTRACT, check=False, probe=False
  )


def realization(**changes):
  """A `quantize_weight` whose result is that of RTN but for some parts."""

  def quantize_weight(self, weight, inputs, input_map):
    made = Program.quantize_weight(self, weight, inputs, input_map)
    parts = {part: change(made) for part, change in changes.items()}
    return made._replace(**parts)

  return quantize_weight


def leaf(change):
  """A `quantize_linear` whose leaf is that of RTN after a change."""

  def quantize_linear(self, weight, inputs):
    made, record = Program.quantize_linear(self, weight, inputs)
    return LinearResult(change(made), record)

  return quantize_linear


def rewritten(change):
  """A `prepare` that changes the only weight of the model."""

  def prepare(self, params, calib, contract):
    weight = change(params["layer"]["mlp"]["up_proj"]["weight"])
    return Prepared({**params, "layer": {"mlp": {"up_proj": {"weight": weight}}}})

  return prepare


def learning(**parts):
  """A `prepare` that learns nothing in two steps, with some of its parts replaced."""

  def prepare(self, params, calib, contract):
    whole = {
      "start": lambda: np.ones(2, np.float32),
      "steps": 2,
      "step": lambda now, losses: (now, 1.0),
      "finish": lambda now, losses: Prepared(params),
    }
    return Learning(**whole | parts)

  return prepare


def packed(made, **parts):
  return dataclasses.replace(made, weight=dataclasses.replace(made.weight, **parts))


codes = lambda change: (
  lambda made: made.weight._replace(codes=change(made.weight.codes))
)
PLACE = "layer/mlp/up_proj: "


def test_a_wrong_result_of_a_hook_names_linear_and_hook():
  linear = PLACE + "quantize_linear: expected"
  weight = PLACE + "quantize_weight: expected"
  shape = PLACE + "shape: expected"
  none = lambda self, *arguments: None
  narrow = BlockDense(jnp.ones((3, 32, 32)))
  refusals.check(
    [
      (quantize(shape=none), shape, "a tuple of input map, record", "got None"),
      (quantize(shape=lambda *_: (None,)), shape, "got tuple"),
      (quantize(shape=lambda *_: (jnp.ones(3), {})), shape, "a InputMap or None"),
      (quantize(shape=lambda *_: (None, None)), shape, "as its record a Mapping"),
      (quantize(quantize_weight=none), weight, "got None"),
      (
        quantize(quantize_weight=realization(rounding=lambda made: None)),
        weight,
        "as its rounding a ActivationQuantizer, got None",
      ),
      (
        quantize(quantize_weight=realization(weight=codes(lambda a: a.astype(int)))),
        weight,
        "as its codes an array of uint8, got int",
      ),
      (quantize(quantize_linear=none), linear, "got None"),
      (
        quantize(quantize_linear=leaf(lambda made: packed(made, codes=None))),
        linear,
        "as its codes an array of uint8, got None",
      ),
      (
        quantize(
          quantize_linear=leaf(
            lambda made: packed(made, scales=made.weight.scales.astype("int32"))
          )
        ),
        linear,
        "as its scales an array of uint8, got int32",
      ),
      (
        quantize(shape=lambda *_: Shaping(None, {"a": jnp.ones(2)})),
        shape,
        "as its record what JSON has",
      ),
      (quantize(prepare=none), "prepare: expected", "got None"),
      (quantize(prepare=learning(steps="2")), "prepare: Learning: ", "got '2'"),
      (quantize(prepare=learning(sequences=0)), "prepare: Learning: ", "at least 1"),
      (quantize(prepare=learning(step=None)), "prepare: Learning: ", "a function"),
      (
        quantize(prepare=learning(start=lambda: 1.0)),
        "prepare: what a step learns: ",
        "got float",
      ),
      (
        quantize(prepare=learning(start=lambda: np.ones(2))),
        "prepare: what a step learns: ",
        "an array of float64",
      ),
      (
        quantize(prepare=learning(step=lambda now, losses: (now, "low"))),
        "prepare: a step of learning: ",
        "as its loss a number, got str",
      ),
      (
        quantize(prepare=learning(start=lambda: jax.random.key(0))),
        "prepare: what a step learns: ",
        "an array of key",
      ),
      (
        quantize(prepare=learning(step=lambda now, losses: now)),
        "prepare: a step of learning: ",
        "a tuple of what is learned now, and the loss, got ",
      ),
      (
        quantize(prepare=learning(step=lambda now, losses: (now.astype("int32"), 1.0))),
        "prepare: what a step learns: ",
        "['int32[2]']",
      ),
      (
        quantize(prepare=learning(step=lambda now, losses: ([now], 1.0))),
        "prepare: what a step learns: ",
        "same structure",
      ),
    ],
    errors.TypeRefusal,
  )
  refusals.check(
    [
      (
        quantize(quantize_weight=realization(weight=codes(lambda a: a[..., :-1]))),
        weight,
        "a codes of shape [1, 32, 32], got [1, 32, 31]",
      ),
      (
        quantize(
          quantize_linear=leaf(lambda made: packed(made, scales=made.weight.scales[1:]))
        ),
        linear,
        "a scales of shape [32, 1], got [31, 1]",
      ),
      (
        quantize(
          quantize_linear=leaf(
            lambda made: dataclasses.replace(made, rules=Rules(tie_rule="even"))
          )
        ),
        linear,
        "a leaf of the contract's",
      ),
      (quantize(shape=lambda *_: Shaping(narrow)), shape, "a map of 1 blocks", "got 3"),
      (quantize(prepare=rewritten(lambda a: a / 0)), "prepare: quantize: ", "1024 NaN"),
      (quantize(prepare=rewritten(lambda a: a[:, :-1])), "prepare: ", "input width 31"),
      (quantize(prepare=lambda *_: Prepared({})), "prepare: ", "none of layer"),
    ],
    errors.ValueRefusal,
  )
  nan = jnp.full((1, 32, 32), jnp.nan)
  refusals.check(
    [
      (
        quantize(quantize_weight=realization(correction=lambda made: nan)),
        weight,
        "NaN or inf in 1024 of 1024 of ['correction']",
      ),
      (quantize(shape=lambda *_: Shaping(BlockDense(nan))), shape, "1024 of matrix"),
      (
        quantize(
          quantize_linear=leaf(
            lambda made: dataclasses.replace(made, input_map=BlockDense(nan))
          )
        ),
        linear,
        "1024 of input_map.matrix",
      ),
    ],
    errors.FloatingPointRefusal,
  )


class Broken(RecoveryFit):
  """A fit whose solve finds nothing."""

  name, sublayer, leaf = "broken", "mlp", "broken"
  solution = None

  def prepare(self, float_layer, float_taps, sequences):
    return (), jnp.zeros(())

  def measure(self, moments, sample):
    return moments

  def solve(self, moments):
    return self.solution


def test_a_wrong_recovery_names_its_fit():
  calib = Calibration(OwnModel(1.0), TOKENS)
  for solution, error, words in (
    (None, errors.TypeRefusal, "the solve of broken: .*got None"),
    ((jnp.float32(jnp.inf), {}), errors.FloatingPointRefusal, "the solve of broken"),
  ):
    fit = Broken()
    fit.solution = solution
    made = dataclasses.replace(program(), recover=(fit,))
    with pytest.raises(error, match=words):
      mxjax.quantize(own_params(), calib, made, contract=CONTRACT, check=False)


def raises(error):
  def shape(self, weight, inputs):
    raise error

  return shape


def traced(self, weight, inputs):
  return Shaping(None, {"a": jax.jit(lambda a: float(a))(weight[0, 0, 0])})


def test_every_error_of_a_hook_tells_its_linear():
  for error in (
    ValueError("no"),
    TypeError("no"),
    IndexError("no"),
    FloatingPointError("no"),
    RuntimeError("no"),
  ):
    with pytest.raises(type(error), match=f"^{PLACE}no$") as caught:
      quantize(shape=raises(error))()
    assert caught.value.__cause__ is error
  for hook, kind in (
    (raises(KeyError("no")), KeyError),
    (raises(TypeError("no", 1)), TypeError),
    (raises(UserWarning("no")), UserWarning),
    (traced, jax.errors.ConcretizationTypeError),
  ):
    with pytest.raises(kind) as caught:
      quantize(shape=hook)()
    assert caught.value.__notes__[-1] == "This happened in layer/mlp/up_proj."


def test_what_cannot_be_described_or_received_is_refused_at_once():
  described = type("Own", (Program,), {"describe": lambda self: {"a": np.ones(2)}})
  unfit = described(name="own")
  calib = Calibration(OwnModel(1.0), TOKENS)
  call = lambda made="rtn", **options: (
    lambda: mxjax.quantize(own_params(), calib, made, contract=CONTRACT, **options)
  )
  refusals.check(
    [
      (call(unfit), "describe of own", "ndarray"),
      (lambda: mxjax.Contract(targets="up_proj"), "targets=('up_proj',)"),
      (lambda: mxjax.Contract(targets=["up_proj"]), "pass a tuple"),
    ],
    errors.TypeRefusal,
  )
  refusals.check(
    [
      (call(into={"layers_7": 1, "layer": 2}), "layers_7, which the model has not"),
      (call("hires:"), "option=value behind every colon of hires", "nothing behind"),
      (call("hires:damping=0.1:"), "nothing behind one of them"),
    ],
    errors.ValueRefusal,
  )


TEXT = """
from mxjax.methods.program import Program

class Edited(Program):
  def shape_group(self, weights, inputs):
    return {value}
"""


def edited(value, *, has_source):
  """The class of `TEXT` in a module that a kill and an edit lie between."""
  module = types.ModuleType("own_methods")
  text, name = TEXT.format(value=value), f"<own-{value}-{has_source}>"
  sys.modules["own_methods"] = module
  if has_source:
    module.__file__ = name
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
  exec(compile(text, name, "exec"), vars(module))
  return module.Edited(name="edited")


@pytest.mark.parametrize("has_source", [True, False])
def test_a_class_edited_since_the_kill_is_noticed(tmp_path, has_source):
  params, calib = own_params(), Calibration(OwnModel(1.0), TOKENS)

  def run(value, **options):
    made = edited(value, has_source=has_source)
    return mxjax.quantize(
      params, calib, made, contract=CONTRACT, check=False, **options
    )

  digests = [source_digests(edited(value, has_source=has_source)) for value in "112"]
  assert digests[0] == digests[1] != digests[2]
  assert list(digests[0]) == ["own_methods.Edited"]
  run(1, run_dir=tmp_path / "run")
  run(1, run_dir=tmp_path / "run", resume=True)
  with pytest.raises(ValueError, match="source of own_methods.Edited .*options and co"):
    run(2, run_dir=tmp_path / "run", resume=True)


def test_programs_of_the_library_have_no_source_of_their_own():
  assert source_digests(mxjax.methods.get("hires-next")) == {}
  assert source_digests(program()) != {}


def test_a_rewritten_model_is_kept_and_weighed_once(monkeypatch, tmp_path):
  from mxjax.run import setup as setup_module

  calls, original = [], setup_module.params_digest

  def counted(params):
    calls.append(1)
    return original(params)

  monkeypatch.setattr(setup_module, "params_digest", counted)
  calib = Calibration(OwnModel(1.0), TOKENS)
  options = {"contract": CONTRACT, "check": False, "store": tmp_path / "store"}
  mxjax.quantize(own_params(), calib, "gptq", run_dir=tmp_path / "a", **options)
  assert len(calls) == 1
  double = lambda self, params, calib, contract: Prepared(
    jax.tree.map(lambda a: 2 * a, params)
  )
  made = program(prepare=double)
  mxjax.quantize(own_params(), calib, made, run_dir=tmp_path / "b", **options)
  assert len(calls) == 3
  assert isinstance(Setup.of(own_params(), calib, "rtn", CONTRACT).weights_digest, str)
