"""The functions in which a build and a forward spend their time, compiled for a GPU.

`compile_kernels.py` compiles them for an H200 at the shapes of Qwen3-8B and reads the
final program of each: a loop whose number of turns only the device knows makes the host
wait in every turn, and a copy of a weight costs as much memory traffic as its product.
Both are faults, but for the loops in `WAITS`.
"""

import functools

import jax
import jax.numpy as jnp

from mxjax.calibration import linear_inputs, streams
from mxjax.devices import execution, totals
from mxjax.devices.placement import ONE_DEVICE
from mxjax.methods.hires import stage1, stage3
from mxjax.models import CausalLM, ModelConfig, generation
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import gptq
from mxjax.numerics.shaping import dyadic_balance
from mxjax.run import recover
from tests import compile_kernels, hlo

LENGTH, LARGE = 2048, 1 << 20
"""Tokens of a sequence, and elements from which an array counts as a weight."""
WAITS = {"GPTQ's factor": 1}
"""Loops that may wait for the device: the factor's second try, which is rare."""
SOLVES = ("GPTQ's factor", "a trial")
"""Functions that make matrices of the size of their arguments, once a linear."""
CONFIG = ModelConfig(
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_layers=1,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  norm_eps=1e-6,
  rope_theta=1e6,
  tie_embeddings=False,
  qk_norm="head",
  max_positions=4096,
  dtype="bfloat16",
)
f32, f64, b16 = jnp.float32, jnp.float64, jnp.bfloat16
array = jax.ShapeDtypeStruct
MODEL = CausalLM(CONFIG)


def float_layer():
  """The params of one layer, and hidden states of one sequence."""
  ids = array((1, 8), jnp.int32)
  params = jax.eval_shape(MODEL.init, jax.random.key(0), ids)["params"]
  return params["layers_0"], array((1, LENGTH, CONFIG.hidden_size), b16)


def sums(step, chunk, init, *args, dtype=f32):
  """One call of a sum over sequences, as `LinearInputs.reduce` makes it."""
  static = step, mxfp4.PAPER_RULES, dtype

  def add(init, chunk, first, args):
    return totals._add_chunk.__wrapped__(
      *(linear_inputs._add_sequence, static, ONE_DEVICE, None, None, init),
      *(None, chunk, first, args),
    )

  return add, (init, chunk, array((), jnp.int32), args), (0,)


def of_width(width):
  """The sums over the inputs of a linear of this width."""
  blocks = width // 32
  chunk = array((1, blocks, 32, LENGTH), b16)
  square = lambda *lead, dtype=f32: array((*lead, blocks, 32, 32), dtype)
  folds, tiles = square(2, dtype=f64), array((blocks, 8, 4, 4), f64)
  two, one = [square(2)] * 3, [square(1)] * 3
  listed = array((blocks,), jnp.int32), array((), jnp.int32)
  hessian = array((width, width), f32)
  step = functools.partial(sums, chunk=chunk)
  return {
    "Hessian": step(linear_inputs._hessian_step, init=hessian, dtype=None),
    "moments": step(linear_inputs._fold_moment_step, init=folds),
    "anchor": sums(stage1._anchor_step, chunk, folds, square()),
    "errors": sums(stage1._error_step, chunk, tiles, square()),
    "trials": sums(stage1._trial_step, chunk, array((2, blocks), f64), *two),
    "half step": sums(stage1._listed_step, chunk, array((blocks,), f64), *listed, *one),
  }


def solves(width, rows):
  """The solves of a linear."""
  blocks = width // 32
  weight = array((blocks, 32, rows), f64)
  square = array((blocks, 32, 32), f64)
  scale, upper = array((blocks, 8), f64), array((blocks, 32, 32), f32)
  return {
    "GPTQ's factor": (gptq.factor.__wrapped__, (array((width, width), f32),), ()),
    "a trial": (
      dyadic_balance.prepare_trial.__wrapped__,
      (weight, square, scale, upper),
      (),
    ),
  }


def recoveries():
  """One sequence of each recovery fit."""
  float_params, hidden = float_layer()
  quantized = jax.eval_shape(_quantized, float_params)
  result = {}
  for fit, taps in (
    (stage3.ATTENTION, {"value": array((1, LENGTH, 8, 128), b16)}),
    (stage3.MLP, {}),
  ):
    prepare = functools.partial(fit.prepare, sequences=128)
    with jax.enable_x64(True):
      constants, moments = jax.eval_shape(prepare, float_params, taps)

    def measure(layers, moments, hidden, taps, first, constants, fit=fit):
      return totals._add_chunk.__wrapped__(
        *(recover._measure_sequence, (MODEL, fit), ONE_DEVICE, None, layers),
        *(moments, hidden, taps, first, (constants,)),
      )

    layers = {"quantized": quantized, "float": float_params}
    operands = layers, moments, hidden, taps, array((), jnp.int32), constants
    result[f"{fit.name} recovery"] = measure, operands, (1, 2)
  return result


def _quantized(layer):
  """A HiRes layer of the shapes of a float one."""
  from mxjax.layers.quantized_linear import QuantizedLinear
  from mxjax.numerics.realization.activation_quantizers import OneCode
  from mxjax.numerics.shaping.input_maps import BlockDense

  def leaf(weight):
    blocks = weight.shape[1] // 32
    table = jnp.zeros((blocks, 32, 32), f32)
    rounding = OneCode(jnp.zeros((blocks, 528), f32), table)
    return QuantizedLinear(mxfp4.encode(weight), BlockDense(table), rounding)

  return {
    block: {
      name: {"weight": leaf(part["weight"])} if name.endswith("_proj") else part
      for name, part in parts.items()
    }
    if block in ("self_attn", "mlp")
    else parts
    for block, parts in layer.items()
  }


def cases():
  """Name: function, abstract arguments, and the positions of the donated ones."""
  layer, hidden = float_layer()
  blocked = tuple(sorted(set(MODEL.projection_taps.values())))
  capture = lambda layer, hidden: streams.capture.__wrapped__(
    MODEL, layer, hidden, blocked, ("value",)
  )
  return {
    "capture": (capture, (layer, hidden), (1,)),
    **{f"{name}, width 4096": case for name, case in of_width(4096).items()},
    **{f"{name}, width 12288": case for name, case in of_width(12288).items()},
    **solves(4096, 12288),
    **recoveries(),
  }


def generations(place, mesh):
  """Name: what compiles a program of `generate`, and its abstract arguments."""
  ids = array((1, 8), jnp.int32)
  plain = jax.eval_shape(MODEL.init, jax.random.key(0), ids)["params"]
  layer, _ = float_layer()
  packed = plain | {"layers_0": jax.eval_shape(_quantized, layer)}
  result = {}

  def add(name, program, arguments, *static):
    def make():
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        placed = jax.tree.map(place, arguments)
        return program.lower(MODEL, *placed, generation.GREEDY, *static).compile()

    result[name] = make, arguments

  for kind, params in (("BF16", plain), ("HiRes", packed)):
    prompt = params, array((1, LENGTH), jnp.int32), array((1,), jnp.int32)
    add(f"first token, {kind}", generation._prefill_in_one_program, prompt)
    for batch, how in ((1, "compute"), (32, "compute"), (32, "e4m3")):
      make = functools.partial(generation.empty_cache, MODEL, batch, LENGTH, how)
      newest, is_done = array((batch,), jnp.int32), array((batch,), bool)
      state = params, jax.eval_shape(make), newest, is_done
      decode = generation._decode_in_one_program, state, generation.TOKENS_AT_ONCE
      beside = "" if how == "compute" else f", {how}"
      add(f"tokens of {batch}, {kind}{beside}", *decode)
  return result


def compiled(function, arguments, donated, place, mesh):
  """Compiles a function for the GPU."""
  with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    jitted = jax.jit(
      function,
      donate_argnums=donated,
      # As the library compiles the passes over the calibration set and of tokens.
      compiler_options=execution.FEW_TEMPORARIES,
    )
    return jitted.lower(*jax.tree.map(place, arguments)).compile()


def weights(arguments):
  """(dtype, sizes) of the matrices among the arguments that are as large as weights."""
  short = {"float32": "f32", "bfloat16": "bf16", "float64": "f64", "uint8": "u8"}
  return {
    (short[leaf.dtype.name], leaf.shape)
    for leaf in jax.tree.leaves(arguments)
    if len(leaf.shape) == 2 and leaf.size >= LARGE
  }


def faults(name, program, arguments):
  """What is wrong with a compiled function: sentences, none if it is right."""
  waiting = program.waiting()[WAITS.get(name, 0) :]
  copied = program.copies(weights(arguments)) if name not in SOLVES else []
  return [f"the host waits in every turn of {loop}" for loop in waiting] + [
    f"copies a weight in every call: {one}" for one in copied
  ]


def check(selected=""):
  """Compiles and prints; yields names, counts and faults."""
  mesh, place = compile_kernels.target()
  each = generations(place, mesh)
  for name, (function, arguments, donated) in cases().items():
    make = functools.partial(compiled, function, arguments, donated, place, mesh)
    each[name] = make, arguments
  for name, (make, arguments) in each.items():
    if selected and selected not in name:
      continue
    made = make()
    program = hlo.Program(made.as_text())
    found, counts = faults(name, program, arguments), program.counts()
    print(f"{'FAIL' if found else 'ok  '} {name}: {counts}", *found, sep="\n       ")
    yield name, counts, found
