"""Flax modules of one's own, linen and nnx: what is found, measured, and applied."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mxjax
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.run.progress import Stopped
from mxjax.run.quantize import run
from tests import refusals
from tests.cases import slow
from tests.mxjax.quantized import assert_same

LAYERS = r"layers[_/]\d"


class Block(nn.Module):
  hidden: int = 64

  @nn.compact
  def __call__(self, x, mask=None, *, scale=1.0):
    attention = nn.MultiHeadDotProductAttention(2, name="attention")
    x = x + attention(nn.LayerNorm()(x), mask=mask)
    hidden = nn.gelu(nn.Dense(self.hidden, name="up")(x))
    return x + scale * nn.Dense(32, name="down")(hidden)


class Encoder(nn.Module):
  block: type = Block
  chain: bool = True

  @nn.compact
  def __call__(self, batch):
    x = nn.Dense(32, name="embed")(batch["x"])
    before = x
    for index in range(2):
      x = self.block(name=f"layers_{index}")(x, batch["mask"], scale=0.5)
      x = x if self.chain else x + before
    return nn.Dense(5, name="head")(x.mean(1))


class NnxBlock(nnx.Module):
  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
    self.norm = nnx.LayerNorm(32, rngs=rngs)
    self.up = nnx.Linear(32, 64, rngs=rngs)
    self.down = nnx.Linear(64, 32, use_bias=False, rngs=rngs)

  def __call__(self, x, mask=None, *, scale=1.0):
    x = x + self.attention(self.norm(x), mask=mask)
    return x + scale * self.down(nnx.gelu(self.up(x)))


class NnxEncoder(nnx.Module):
  def __init__(self, rngs):
    self.embed, self.head = (
      nnx.Linear(inputs, outputs, rngs=rngs) for inputs, outputs in ((64, 32), (32, 5))
    )
    self.layers = nnx.List([NnxBlock(rngs) for _ in range(2)])

  def __call__(self, batch):
    x = self.embed(batch["x"])
    for layer in self.layers:
      x = layer(x, batch["mask"], scale=0.5)
    return self.head(x.mean(1))


@pytest.fixture(scope="module")
def batch():
  """Six examples; the mask has no axis of examples in the layers' arguments."""
  x = jax.random.normal(jax.random.key(0), (6, 12, 64))
  return {"x": x, "mask": jax.random.bernoulli(jax.random.key(1), 0.8, (6, 1, 1, 12))}


@pytest.fixture(scope="module", params=["linen", *slow("nnx")])
def own(request, batch):
  """A module, its params, and a function that applies it to the batch."""
  if request.param == "nnx":
    module = NnxEncoder(nnx.Rngs(0))
    params = mxjax.FlaxModel(module=module).params
    return module, params, jax.jit(lambda params: mxjax.apply(module, params, batch))
  module = Encoder()
  params = module.init(jax.random.key(2), batch)["params"]
  return (
    *(module, params),
    jax.jit(lambda params: mxjax.apply(module, {"params": params}, batch)),
  )


@pytest.fixture
def linen(batch):
  """Quantizes a linen module on the batch, from its own initial params."""

  def run(module, method="rtn", **options):
    names = {field.name for field in dataclasses.fields(mxjax.FlaxModel)}
    spec = {name: options.pop(name) for name in names & set(options)}
    params = module.init(jax.random.key(2), batch)["params"]
    calib = mxjax.Calibration(mxjax.FlaxModel(module=module, **spec), batch)
    return params, mxjax.quantize(params, calib, method, probe=False, **options)

  return run


def leaves(params):
  """The quantized leaves by path."""
  found = jax.tree_util.tree_leaves_with_path(
    params, is_leaf=lambda node: isinstance(node, QuantizedLinear)
  )
  return {
    jax.tree_util.keystr(path[:-1], simple=True, separator="/"): leaf
    for path, leaf in found
    if isinstance(leaf, QuantizedLinear)
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(mxjax.Program):
  """RTN that keeps the second moments it was shown, and how many tokens."""

  seen: list = dataclasses.field(default_factory=list)

  def quantize_linear(self, weight, inputs):
    self.seen.append((inputs.name, inputs.tokens, np.asarray(inputs.hessian())))
    return super().quantize_linear(weight, inputs)

  def describe(self):
    return {"name": "watching"}


def quantized(own, batch, method, **options):
  model = mxjax.FlaxModel(module=own[0], **options)
  calib = mxjax.Calibration(model, batch)
  return mxjax.quantize(own[1], calib, method, probe=False)


@pytest.fixture(scope="module")
def whole(own, batch):
  """The module quantized as a whole."""
  return functools.cache(lambda method: quantized(own, batch, method))


def test_every_dense_layer_becomes_the_codes_of_its_kernel(own, batch, whole):
  module, params, run = own
  found = leaves(whole("rtn"))
  assert len(found) == 14
  for path, leaf in found.items():
    node = params
    for key in path.split("/"):
      node = node[key]
    rows = 2 if path.endswith("out") else 1
    kernel = np.asarray(node["kernel"])
    weight = kernel.reshape(int(np.prod(kernel.shape[:rows])), -1).T
    assert_same(leaf.weight, mxfp4.encode(weight))
  assert run(params).shape == run(whole("rtn")).shape == (6, 5)
  exact = (
    module(batch)
    if isinstance(module, nnx.Module)
    else module.apply({"params": params}, batch)
  )
  np.testing.assert_allclose(run(params), exact, atol=1e-5)
  error = jnp.linalg.norm(run(whole("rtn")) - exact) / jnp.linalg.norm(exact)
  assert 0 < error < 0.4


@pytest.mark.slow
def test_a_chain_of_layers_is_shown_what_the_whole_module_is(own, batch, whole):
  """Layer by layer, with the mask and the scale passed on, to the same codes."""
  chain = leaves(quantized(own, batch, "gptq", layers=LAYERS))
  everything = leaves(whole("gptq"))
  assert set(everything) - set(chain) == {"embed", "head"}
  for path, leaf in chain.items():
    got, want = (
      np.asarray(mxfp4.unpack(one.weight.codes)) for one in (leaf, everything[path])
    )
    assert (got == want).mean() > 0.99, path


@pytest.mark.slow
def test_methods_see_the_inputs_of_every_linear(own, batch):
  module, params, _ = own
  program = Watching()
  quantized(own, batch, program)
  seen = {name: (tokens, moment) for name, tokens, moment in program.seen}
  x = np.asarray(batch["x"], float).reshape(-1, 64)
  np.testing.assert_allclose(seen["embed"][1], x.T @ x / len(x), rtol=1e-4, atol=1e-4)
  assert {name: tokens for name, (tokens, _) in seen.items()} == {
    **dict.fromkeys(seen, 72),
    "head": 6,
  }
  taps = mxjax.FlaxModel(module=module).bound_to(params, batch).projection_taps
  read = {name: tap.rpartition(".")[2] for (_, name), tap in taps.items()}
  for name in ("query", "key", "value"):
    assert read[next(path for path in read if path.endswith(name))] == "query"


def test_a_checkpoint_restores_the_params_of_the_module(own, whole, tmp_path):
  mxjax.save_checkpoint(tmp_path / "own", whole("rtn"), {})
  params, _ = mxjax.restore_checkpoint(tmp_path / "own")
  assert_same(params, whole("rtn"))
  np.testing.assert_array_equal(own[2](params), own[2](whole("rtn")))


@pytest.mark.slow
def test_rules_choose_linears_and_methods(own, batch, whole):
  rules = {"head|embed": None, r".*/attention/\w+": "gptq", ".*": True}
  found = leaves(quantized(own, batch, "rtn", rules=rules))
  for path, leaf in found.items():
    assert_same(leaf, leaves(whole("gptq" if "attention" in path else "rtn"))[path])
  assert len(found) == 12


@pytest.mark.slow
def test_hires_runs_without_recovery_and_says_so(linen, batch, caplog):
  module, options = Encoder(), {"rules": {".*/up": True}, "layers": LAYERS}
  params = module.init(jax.random.key(2), batch)["params"]
  calib = mxjax.Calibration(mxjax.FlaxModel(module=module, **options), batch)
  result = run(params, calib, "hires")
  assert "no recovery of attention or mlp" in caplog.text
  assert set(leaves(result.params)) == {"layers_0/up", "layers_1/up"}
  notes = result.record.preparation
  assert notes["recovery_left_out"] == ["attention", "mlp"]
  assert "layers_0/down" in notes["linears_left"] and "head" in notes["linears_left"]
  assert 0 < result.record.sanity["relative_error"] < 0.1
  assert result.record.program["recover"] == []


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(linen, tmp_path):
  options = {"layers": LAYERS, "method": "gptq", "run_dir": tmp_path / "run"}
  _, alone = linen(Encoder(), layers=LAYERS, method="gptq")
  with pytest.raises(Stopped):
    linen(Encoder(), **options, stop=lambda: True)
  assert_same(linen(Encoder(), **options, resume=True)[1], alone)


class Twice(nn.Module):
  @nn.compact
  def __call__(self, batch):
    layer = nn.Dense(64, name="layers_0")
    return layer(layer(batch["x"]))


class Shared(nn.Module):
  """A dense layer called twice, in bfloat16, under remat, after a batch norm."""

  @nn.compact
  def __call__(self, batch):
    x = nn.BatchNorm(use_running_average=True)(batch["x"])
    dense = nn.remat(nn.Dense)(64, dtype=jnp.bfloat16, name="twice")
    return dense(dense(x[:, 0]))


@pytest.mark.slow
def test_calls_of_one_layer_state_dtype_and_remat(batch):
  module, program = Shared(), Watching()
  variables = module.init(jax.random.key(2), batch)
  state = {"batch_stats": jax.tree.map(lambda a: a + 1, variables["batch_stats"])}
  model = mxjax.FlaxModel(module=module, state=state)
  calib = mxjax.Calibration(model, batch)
  params = mxjax.quantize(variables["params"], calib, program)
  [(name, tokens, moment)] = program.seen
  assert (name, tokens) == ("twice", 12)
  run = jax.jit(lambda params: mxjax.apply(module, {"params": params, **state}, batch))
  exact = run(variables["params"])
  x = (np.asarray(batch["x"][:, 0], float) - 1) / np.sqrt(2)
  kernel = np.asarray(variables["params"]["twice"]["kernel"], float)
  want = (x.T @ x + (x @ kernel).T @ (x @ kernel)) / 12
  np.testing.assert_allclose(moment, want, atol=0.03)
  got = run(params)
  assert got.dtype == exact.dtype == jnp.bfloat16
  gap = np.asarray(got, float) - np.asarray(exact, float)
  assert 0 < np.linalg.norm(gap) < 0.4 * np.linalg.norm(np.asarray(exact, float))


@pytest.mark.slow
def test_a_quantized_module_has_gradients_at_its_inputs(linen, batch):
  module = Encoder()
  params, qparams = linen(module)
  loss = lambda x, params: jnp.square(
    mxjax.apply(module, {"params": params}, {**batch, "x": x})
  ).sum()
  gradient = jax.jit(jax.grad(loss))
  exact, got = (gradient(batch["x"], tree) for tree in (params, qparams))
  cosine = jnp.vdot(exact, got) / jnp.linalg.norm(exact) / jnp.linalg.norm(got)
  assert 0.8 < cosine < 1


def test_a_quantized_kernel_of_several_axes_is_applied_with_its_bias():
  kernel, x, bias = (
    jax.random.normal(jax.random.key(seed), shape)
    for seed, shape in enumerate([(32, 64), (3, 5, 2, 32), (4, 8)])
  )
  leaf = QuantizedLinear(mxfp4.encode(kernel), None, Nearest())
  module = nn.DenseGeneral((4, 8), axis=(-2, -1))
  got = mxjax.apply(module, {"params": {"kernel": leaf, "bias": bias}}, x)
  want = mxjax.linear(x.reshape(3, 5, 64), leaf).reshape(3, 5, 4, 8) + bias[None, None]
  np.testing.assert_allclose(got, want, rtol=1e-6)


class Odd(nn.Module):
  @nn.compact
  def __call__(self, batch):
    return nn.Dense(4, name="narrow")(batch["x"][..., :20])


class Bare(nn.Module):
  @nn.compact
  def __call__(self, batch):
    return nn.Conv(4, (3,), name="conv")(batch["x"])


class Stacked(nn.Module):
  @nn.compact
  def __call__(self, batch):
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    one = lambda _, x, __: (nn.Dense(64, name="dense")(x), None)
    return nn.scan(one, length=2, **axes)(self, batch["x"], None)[0]


class Recurrent(nn.Module):
  @nn.compact
  def __call__(self, batch):
    one = lambda _, x, __: (nn.Dense(64, name="dense")(x), None)
    shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    return nn.scan(one, length=2, **shared)(self, batch["x"], None)[0]


@pytest.mark.slow
def test_what_is_missing_is_said_at_the_door(linen):
  call = lambda module, **options: functools.partial(linen, module, **options)
  uneven = {".*0/up": "rtn", ".*/down": "rtn"}
  refusals.check(
    [
      (call(Encoder(), rules={"q_proj": True}), "'q_proj'", "calls embed, layers_0/a"),
      (call(Encoder(), rules={".*/up": True, "dwon": "rtn"}), "'dwon'"),
      (call(Encoder(), rules={"head": True}, layers=LAYERS), "in its 2 layers"),
      (call(Encoder(), layers=r"block_\d"), "'block_", "none"),
      (call(Encoder(chain=False), layers=LAYERS), "the output of layers_0"),
      (call(Encoder(), layers=LAYERS, rules=uneven), "same linears in every layer"),
      (call(Encoder(block=nn.remat(Block)), layers=LAYERS), "nn.remat"),
      (call(Twice(), layers=LAYERS), "layers_0", "one call", "several"),
      (call(Encoder(), layers=LAYERS, state={"batch_stats": {}}), "no state"),
      (call(Bare()), "the module calls none"),
      (call(Odd()), "linears/narrow", "width 20"),
      (call(Stacked()), "kernel (64, 64) for dense", "shape (2, 64"),
      (call(Recurrent()), "inputs of dense", "transformation"),
      (call(Encoder(), method="spinquant"), "spinquant", "a decoder"),
      (call(Encoder(), method="gptq+tune"), "differentiates the predictions"),
      (call(Encoder(), store="here"), "got store"),
    ]
  )


def test_layers_with_statistics_of_their_own_are_refused(batch):
  class Normed(nnx.Module):
    def __init__(self, rngs):
      layer = lambda: nnx.Sequential(
        nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
      )
      self.layers = nnx.List([layer(), layer()])

    def __call__(self, x):
      for layer in self.layers:
        x = layer(x)
      return x

  module = Normed(nnx.Rngs(0))
  module.eval()
  model = mxjax.FlaxModel(module=module, layers=LAYERS)
  with pytest.raises(ValueError, match="layers/1 params alone, got other state"):
    mxjax.quantize(model.params, mxjax.Calibration(model, batch["x"]), "rtn")


def test_a_bare_module_is_told_what_it_lacks(batch):
  tokens = np.zeros((2, 8), np.int32)
  with pytest.raises(TypeError, match="num_layers, .*mxjax.FlaxModel"):
    mxjax.quantize({}, mxjax.Calibration(Encoder(), tokens))
  model, cut = mxjax.FlaxModel(module=Encoder()), {**batch, "x": batch["x"][:2]}
  refusals.check(
    [
      (lambda: mxjax.apply(Encoder(), {"embed": {}}, batch), "module.apply", "embed"),
      (lambda: mxjax.Calibration(model, cut), "examples on their first axis"),
      (lambda: mxjax.Calibration(model, np.float32(1.0)), "got the shapes"),
    ]
  )


class Overflowing(nn.Module):
  @nn.compact
  def __call__(self, batch):
    return jnp.exp(100 * nn.Dense(64, name="dense")(batch["x"]))


def test_a_collapsed_module_fails_loudly(linen):
  with pytest.raises(FloatingPointError, match="quantize: module: .* NaN or inf"):
    linen(Overflowing())

  class Broken(mxjax.Program):
    def quantize_linear(self, weight, inputs):
      return super().quantize_linear(30 * weight, inputs)

  with pytest.raises(FloatingPointError, match="collapsed under broken: error"):
    linen(Encoder(), Broken(name="broken"))
