"""Hooks and plan of the PTQ task; every default behaves as RTN."""

from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core.interface import Aval, Hook, Interface
from mxjax.discovery.tasks.ptq.options import PROXY_BLOCKS

# Statistics and what is solved from them are float64, as the paper's transform
# statistics; what an encoder sees is float32.
MATRIX = Aval("float64", (32, 32))
TABLE = Aval("float32", (32, 32))
BLOCK = Aval("float32", (32,))
SCALAR = Aval("float64", ())
INTEGER = Aval("int32", ())
MATRICES = 12
"""Matrices in the state of a block, and in the sums of a pass."""
STATE = Aval("float64", (MATRICES, 32, 32))
LINEAR = Aval("float32", (2, "width", "width"))
"""State of a linear, and the sums of its passes, in the precision of GPTQ."""
SUMS = Aval("float64", (32, 32))
"""What a head or an MLP sums for its recovery."""
MAX_PASSES = 8
EXPONENT_SLACK = 4
"""Largest distance of a block's exponent from that of its largest value.

Exponents carry scale, not side information: this leaves at most log2(9) bits per block
to choose.
"""
STATS = {
  name: MATRIX
  for name in (
    "activation",
    "activation_cross",
    "activation_error",
    "activation_fisher",
    "weight",
    "weight_cross",
    "weight_error",
    "weight_fisher",
  )
}
PAYLOAD = (Aval("uint8", (32,)), Aval("int32", ()))

ENCODE = '''
def block_exponent(block):
  """Floor of log2 of the largest magnitude, minus two, from float bits."""
  peak = jnp.max(jnp.abs(block))
  field = jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def nearest_codes(block, exponent):
  """E2M1 codes at an exponent; a tie takes the larger magnitude."""
  scaled = jnp.ldexp(jnp.abs(block), -exponent)
  edges = jnp.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], block.dtype)
  index = jnp.sum(scaled[:, None] >= edges[None, :], axis=-1)
  return (index + 8 * jnp.signbit(block)).astype(jnp.uint8)
'''


def _measure(what: str, tile: str, dtype: str, doc: str) -> Hook:
  """Builds the hook that a pass reduces over the tiles of one operand."""
  name = f"measure_{what}"
  return Hook(
    name=name,
    arguments={
      "tile": Aval(dtype, (32, 32)),
      "index": INTEGER,
      "step": INTEGER,
      "state": STATE,
    },
    outputs=(STATE,),
    batched=("tile", "index"),
    active_when=("transform", ("solved", "reached")),
    default=f"def {name}(tile, index, step, state):\n  return jnp.zeros_like(state)\n",
    doc=f"What pass `step` (0, 1, ...) sums over {tile} of a block, `[32 coordinates, "
    f"32 columns]`; a branch for each pass under jax.lax.switch. {doc}",
  )


PASSES = (
  _measure(
    "inputs",
    "all tiles of 32 tokens",
    "float32",
    "`index` is the tile's calibration sequence, and the inputs are in native "
    "coordinates, all tokens alike. Not called with transform reached, where the sums "
    "are zero.",
  ),
  _measure(
    "weights",
    "all tiles of 32 weight rows",
    "float64",
    "`index` is the tile's first row. Weights are in native coordinates, float32 "
    "values; with transform reached, they carry the errors of the later blocks.",
  ),
  Hook(
    name="solve",
    arguments={
      "step": INTEGER,
      "input_sums": STATE,
      "weight_sums": STATE,
      "curvature": MATRIX,
      "state": STATE,
    },
    outputs=(STATE,),
    active_when=("transform", ("solved", "reached")),
    default="def solve(step, input_sums, weight_sums, curvature, state):\n"
    "  return state\n",
    doc="A block's state after pass `step`, from what the pass measured. It starts "
    "with the identity and zeros, and after the last of the plan's `passes` its first "
    "matrix is the map T. `curvature` is the identity, or with transform reached the "
    "block's diagonal tile of R, upper, R'R the damped Hessian of the linear.",
  ),
)

OF_LINEARS = (
  Hook(
    name="measure_linear",
    arguments={
      "inputs": Aval("float32", ("width", "tokens")),
      "index": INTEGER,
      "step": INTEGER,
      "state": LINEAR,
    },
    outputs=(LINEAR,),
    active_when=("curvature", ("solved",)),
    default="""
def measure_linear(inputs, index, step, state):
  rows = inputs.reshape(-1, 32, inputs.shape[1])
  product = lambda tile: jnp.matmul(tile, inputs.T, precision="highest")
  moment = jax.lax.map(product, rows).reshape(state.shape[1:])
  moment = jnp.triu(moment) + jnp.triu(moment, 1).T
  return jnp.stack([moment, jnp.full_like(moment, inputs.shape[1])])
""",
    doc="What pass `step` of a linear adds to its sums for each calibration sequence "
    "`index`; it is called once a sequence. `inputs` are that sequence's, in native "
    "coordinates; with the plan key gradients, each token is multiplied by the root of "
    "its weight. By default the sums are the raw Hessian, sum x x', and the number of "
    "tokens in every place of a second matrix.",
  ),
  Hook(
    name="solve_linear",
    arguments={"step": INTEGER, "sums": LINEAR, "state": LINEAR},
    outputs=(LINEAR,),
    active_when=("curvature", ("solved",)),
    default="""
def solve_linear(step, sums, state):
  width = state.shape[1]
  blocks = width // 32
  places = jnp.arange(blocks)
  maps = state[0].reshape(blocks, 32, blocks, 32)[places, :, places]
  tiles = (sums[0] / sums[1, 0, 0]).reshape(blocks, 32, blocks, 32)
  left = jnp.einsum("aij,ajbk->aibk", maps, tiles, precision="highest")
  mapped = jnp.einsum("aibk,blk->aibl", left, maps, precision="highest")
  hessian = mapped.reshape(width, width)
  mean = jnp.trace(hessian) / width
  eye = jnp.eye(width, dtype=jnp.float32)

  def attempt(tried):
    damping, _ = tried
    shift = jnp.where(mean > 0, damping * mean, jnp.float32(1))
    upper = jnp.linalg.cholesky((hessian + shift * eye)[::-1, ::-1])[::-1, ::-1]
    solved = jax.lax.linalg.triangular_solve(upper, eye, left_side=True, lower=False)
    return damping * 10, solved

  again = lambda tried: (tried[0] < 50) & ~jnp.all(jnp.isfinite(tried[1]))
  start = jnp.float32(0.01), jnp.full_like(hessian, jnp.nan)
  upper = jax.lax.while_loop(again, attempt, start)[1]
  return jnp.stack([upper, jnp.zeros_like(upper)])
""",
    doc="A linear's state after pass `step` of the plan's `linear_passes`, from the "
    "sums of the pass; it is called once a pass. The state starts with the maps T of "
    "all blocks, as one block-diagonal matrix, and zeros. By default, which is made "
    "for one pass, its first matrix becomes the factor U of GPTQ: upper triangular, "
    "U'U = inv(H + .01 mean(diag H) I), H = T (mean of x x') T'.",
  ),
  Hook(
    name="encode_linear",
    arguments={"row": Aval("float32", ("width",)), "state": LINEAR},
    outputs=(Aval("uint8", ("width",)), Aval("int32", ("blocks",))),
    batched=("row",),
    active_when=("curvature", ("solved",)),
    default="def encode_linear(row, state):\n"
    "  blocks = row.reshape(-1, 32)\n"
    "  exponent = jax.vmap(block_exponent)(blocks)\n"
    "  codes = jax.vmap(nearest_codes)(blocks, exponent)\n"
    "  return codes.reshape(-1), exponent\n",
    doc="Codes of a whole row of weights in the coordinates of T (W T^-1), and the "
    "exponents of its blocks, from the last state of the linear. Trusted code carries "
    "no error from coordinate to coordinate, nor does the default; a program may. GPTQ "
    "does so with the default state, "
    "U = state[0]: coordinate i is rounded at target_i = row_i - sum over j < i of "
    "e_j U[j, i], and e_i = (target_i - value_i) / U[i, i].",
  ),
)

TOKENS_OF_HEAD = Aval("float32", ("tokens", "head"))
HIDDEN = Aval("float32", ("hidden", "tokens"))
OF_LAYERS = (
  Hook(
    name="measure_value",
    arguments={"value": TOKENS_OF_HEAD, "target": TOKENS_OF_HEAD, "index": INTEGER},
    outputs=(SUMS,),
    batched=("value", "target"),
    active_when=("attention", (True,)),
    default="""
def measure_value(value, target, index):
  x, y = value.astype(jnp.float64), target.astype(jnp.float64)
  sums = [x, y, x * x, x * y, y * y]
  first = jnp.stack([jnp.float64(x.size), *(jnp.sum(each) for each in sums)])
  return jnp.zeros((32, 32)).at[0, :6].set(first)
""",
    doc="What one key-value head sums over all calibration sequences: its realized "
    "values and those of the float model, of sequence `index`. By default the first "
    "row has count, value, target, value_square, product and target_square.",
  ),
  Hook(
    name="recover_value",
    arguments={"sums": SUMS},
    outputs=(Aval("float64", (2,)),),
    active_when=("attention", (True,)),
    default="def recover_value(sums):\n  return jnp.array([1.0, 0.0], jnp.float64)\n",
    doc="Scale a and offset b of one key-value head, from its sums; its value outputs "
    "v become a v + b in every coordinate.",
  ),
  Hook(
    name="measure_mlp",
    arguments={
      "gate": HIDDEN,
      "up": HIDDEN,
      "gate_target": HIDDEN,
      "up_target": HIDDEN,
      "down": Aval("float32", ("model", "hidden")),
      "index": INTEGER,
    },
    outputs=(SUMS,),
    active_when=("mlp", (True,)),
    default="""
def measure_mlp(gate, up, gate_target, up_target, down, index):
  g, u, g_star, u_star = (
    each.astype(jnp.float64) for each in (gate, up, gate_target, up_target)
  )
  energy = jnp.sum(jnp.square(down.astype(jnp.float64)), axis=0)
  omega = jnp.clip(energy / (jnp.mean(energy) + 2.0**-20), 0.25, 4.0)
  omega = omega / jnp.mean(omega)
  sigmoid = jax.nn.sigmoid(g)
  slope = sigmoid + g * sigmoid * (1 - sigmoid)
  product = g * sigmoid * u
  error = g_star * jax.nn.sigmoid(g_star) * u_star - product
  design = jnp.stack([slope * u, g * slope * u, product, error])
  tokens = g.shape[1]
  quarter = jnp.minimum(jnp.arange(tokens) // (tokens // 4), 3)
  masks = (quarter == jnp.arange(4)[:, None]).astype(jnp.float64)
  moments = jnp.einsum(
    "ciht,jht->cij", design * masks[:, None, None] * omega[:, None], design
  )
  ones = g.shape[0] * jnp.sum(masks, axis=1)
  gates = jnp.einsum("kht,ct->ck", jnp.stack([g, g * g]), masks)
  cells = [ones[:, None], moments[:, :3, :3].reshape(4, 9), moments[:, :3, 3], gates]
  filled = jnp.pad(jnp.concatenate(cells, axis=1), ((0, 0), (0, 17)))
  return jax.lax.dynamic_update_slice(
    jnp.zeros((32, 32)), filled, (4 * (index % 8), jnp.int32(0))
  )
""",
    doc="What one MLP sums over all calibration sequences: its realized gate and up "
    "outputs, those of the float weights on the same inputs, and the float weight of "
    "down_proj. By default a row is a calibration cell, 4 (index mod 8) + quarter of "
    "the sequence: its count, the weighted normal equations of gate shift, gate scale "
    "and up scale (9 and 3 numbers, without the gate's deviation), and sum and sum of "
    "squares of the gate.",
  ),
  Hook(
    name="recover_mlp",
    arguments={"sums": SUMS},
    outputs=(Aval("float64", (4,)),),
    active_when=("mlp", (True,)),
    default="def recover_mlp(sums):\n  return jnp.array([0.0, 0, 0, 1])\n",
    doc="Gate shift, gate scale, up scale and the unit of the shift of one layer, from "
    "its sums: its gate outputs g become (1 + gate scale) g + gate shift * unit, and "
    "its up outputs u become (1 + up scale) u.",
  ),
)

CHANNEL = ("index", "peak", "reader", "square", "writer")

TABLES = (
  "With D_c = W_c - W^_c for block c, the linear's "
  "output error is the sum over all blocks of W^_c e_c - D_c x_c, so what block b "
  "adds to its square is e' gram e - 2 e' W^' (sum over all c of D_c x_c), up to "
  "what no code changes and but for products with the errors e_c of other blocks. "
  "A block cannot see x_c of another, which leaves two forms of cross. Plan "
  "realized: gram = W^'W^ and cross = W^'(W - W^), summed over rows: the term "
  "c = b alone. It leaves out that later weights have made up for the errors of "
  "earlier ones, as encode_linear may do, so to follow it in full undoes that as "
  "well, and a share of it does better. Plan expected: the same gram, and cross = "
  "W^' (sum over c of D_c H_cb) inv(H_bb), H = the mean of x x' over calibration "
  "tokens: all terms, as far as the x of this block foretells them. It leaves out "
  "what this block says nothing of, and that other blocks may undo the same error. "
  "Plan float: gram = W'W, cross = 0. Plan measured: both as by the hook tables, "
  "which is told one block."
)
"""What activations are rounded by, under each value of the plan key `tables`."""

HOOKS = (
  Hook(
    name="arrange",
    arguments={"channel": dict.fromkeys(CHANNEL, SCALAR)},
    outputs=(SCALAR,),
    batched=("channel",),
    active_when=("arrange", ("mlp", "values", "both")),
    default='def arrange(channel):\n  return channel["index"]\n',
    doc="The key by which a channel is sorted, among the hidden channels of an MLP "
    "(plan mlp) or inside a value head (plan values): a free permutation, which "
    "decides what inputs of down_proj or o_proj share a scale. `square` is a channel's "
    "mean square, `peak` its largest magnitude; `reader` and `writer` are mean squares "
    "of the weights that read it and that write it.",
  ),
  *PASSES,
  Hook(
    name="transform",
    arguments={"stats": STATS},
    outputs=(MATRIX,),
    active_when=("transform", ("measured",)),
    default="def transform(stats):\n  return jnp.eye(32, dtype=jnp.float64)\n",
    doc="The map T of a block, with a condition number of at most 1e4; it is called "
    "once a block. With x the 32 inputs of a token, w the 32 weights of a row, and "
    "e = (value of the nearest codes) - (what they encode): `activation` is the mean "
    "of x x' over tokens, `activation_error` of e e', `activation_cross` of e x', and "
    "`weight`, `weight_error` and `weight_cross` are the same means over rows, of w. "
    "All are in native coordinates. With the plan key gradients, activation_fisher "
    "weights tokens and weight_fisher weights outputs by the float model's gradients "
    "there; without it they equal activation and weight.",
  ),
  Hook(
    name="balance",
    arguments={"stats": STATS},
    outputs=(Aval("float64", (8,)),),
    active_when=("balance", ("measured",)),
    default="def balance(stats):\n  return jnp.zeros(8, jnp.float64)\n",
    doc="log2 scales u, each within [-4, 4], of eight groups of four neighbouring "
    "coordinates, once a block: the map becomes Diag(2**u) T, so that a positive u "
    "makes activations larger and weights smaller. `stats` has the same keys as for "
    "transform, in the coordinates of T; without a map they are the native ones.",
  ),
  Hook(
    name="encode_weight",
    arguments={"block": BLOCK, "curvature": TABLE},
    outputs=PAYLOAD,
    batched=("block",),
    active_when=("curvature", ("none",)),
    default="def encode_weight(block, curvature):\n"
    "  exponent = block_exponent(block)\n"
    "  return nearest_codes(block, exponent), exponent\n",
    doc="Codes and exponent of the 32 weights of one row in one block, in the "
    "coordinates of T. `curvature` is the identity, and nothing is carried from block "
    "to block. With transform reached it is R, upper triangular: the block's codes "
    "w^ add |R (w - w^)|^2 to the loss of the linear, and trusted code has put the "
    "errors of the later blocks into w.",
  ),
  *OF_LINEARS,
  Hook(
    name="tables",
    arguments={"weight": TABLE, "decoded": TABLE},
    outputs=(MATRIX, MATRIX),
    batched=("weight", "decoded"),
    active_when=("tables", ("measured",)),
    default="def tables(weight, decoded):\n"
    "  weight, decoded = weight.astype(jnp.float64), decoded.astype(jnp.float64)\n"
    "  return decoded @ decoded.T, decoded @ (weight - decoded).T\n",
    doc="What a tile of 32 weight rows, `[32 coordinates, 32 rows]`, adds to the two "
    "tables of a block that encode_act is given, from its weights in the coordinates "
    "of the map and from those of its codes.",
  ),
  Hook(
    name="encode_act",
    arguments={"block": BLOCK, "gram": TABLE, "cross": TABLE},
    outputs=PAYLOAD,
    batched=("block",),
    default="def encode_act(block, gram, cross):\n"
    "  exponent = block_exponent(block)\n"
    "  return nearest_codes(block, exponent), exponent\n",
    doc="Codes and exponent of the 32 activations x of one token in one block, in the "
    "coordinates of T. With e = (their decoded value) - x, choose codes of a low "
    f"e' gram e - 2 e' cross x. {TABLES} It runs on every block of every token that is "
    "scored, so its loops are what a call takes longest for.",
  ),
  *OF_LAYERS,
)

INTERFACE = Interface(
  hooks=HOOKS,
  plan={
    "arrange": ("off", "mlp", "values", "both"),
    "transform": ("off", "measured", "solved", "reached"),
    "passes": tuple(range(1, MAX_PASSES + 1)),
    "balance": ("off", "measured"),
    "curvature": ("none", "solved"),
    "linear_passes": tuple(range(1, MAX_PASSES + 1)),
    "tables": ("realized", "float", "measured", "expected"),
    "gradients": (False, True),
    "attention": (False, True),
    "mlp": (False, True),
  },
  plan_docs={
    "arrange": "which channels the hook arrange sorts",
    "transform": "what makes the map T of each block: nothing, so that T is the "
    "identity (off); the hook transform (measured); the passes of measure_inputs, "
    "measure_weights and solve, for all blocks before any is rounded (solved); or "
    "passes of measure_weights and solve for one block after another, from the last to "
    "the first, each of which is rounded by encode_weight before the next is mapped "
    "(reached, which needs balance off and curvature none)",
    "passes": "how many passes solved and reached have",
    "balance": "whether the hook balance scales groups of coordinates after the map",
    "curvature": "who rounds weights: encode_weight, each block by itself (none), or "
    "encode_linear, whole rows with a state of the linear that measure_linear and "
    "solve_linear make (solved)",
    "linear_passes": "how many passes of measure_linear and solve_linear there are",
    "tables": "what encode_act is told: tables of the realized weights of its block "
    "(realized), of the float weights (float), those of the hook tables (measured), or "
    "those of its block and of the whole linear's weight error as its inputs foretell "
    "it (expected)",
    "gradients": "whether `activation_fisher` and `weight_fisher` of the statistics, "
    "and the inputs of measure_linear, are weighted by gradients of the float model's "
    "loss at the linear's outputs, which costs a backward pass",
    "attention": "whether recover_value corrects the outputs of value heads",
    "mlp": "whether recover_mlp corrects the MLPs",
  },
  header="import jax\nimport jax.numpy as jnp\n" + ENCODE,
)

_names = lambda hooks: tuple(hook.name for hook in hooks)
SHAPING = ("arrange", "transform", "passes", *_names(PASSES))
ENCODING = ("encode_weight", "curvature", "linear_passes", *_names(OF_LINEARS))
RESIDUALS = (
  "contaminated",
  "activation_error",
  "weight_error",
  "operator_error",
  "value_error",
  "mlp_error",
)
"""Observables that are open questions while they are large."""

DESCRIPTION = (
  "A language model is quantized to strict MXFP4, W4A4, after training. Weights and "
  "inputs of every linear of every layer are held as E2M1 codes (magnitudes 0, .5, 1, "
  "1.5, 2, 3, 4, 6; code 8 and above is the negative of code - 8, so that code 8 is "
  "minus zero and decodes like code 0), and each block of "
  "32 inputs of a row shares one E8M0 scale 2**exponent, -127 to 127: value = "
  "magnitude * 2**exponent. Weights are rounded once, from calibration statistics; "
  "activations are rounded at run time, each block of each token by itself, and "
  "everything else (embeddings, norms, softmax, head) stays float. A block map T acts "
  "as x' = T x on the 32 inputs of a block and as W' = W T^-1 on the weights, so the "
  "float function is unchanged; only trusted code decodes. A payload is legal if its "
  f"codes are at most 15 and its exponent is within {EXPONENT_SLACK} of "
  "block_exponent of the 32 numbers that it encodes, as trusted code has them and in "
  "the coordinates of T: the weights of W' = W T^-1 before any error is carried into "
  "them (with transform reached, after), and the activations x' = T x; one illegal "
  "payload fails the call. Layers are quantized from the first to the last, each "
  "linear from the float model's calibration inputs: first its maps, then its "
  "weights, then its tables; the fits of heads and MLPs come after them. Most of a "
  "first call's time goes to compiling. Everything runs on the cores of one CPU: "
  "encode_weight and encode_act on 128 rows or tokens of a block at once, "
  "encode_linear on all rows of a linear, a pass on all tiles of a block, and the "
  "other hooks on one unit after another. `gram`, `cross`, `curvature` and `state` "
  "belong to the block or linear and are not batched: a product with them is one "
  "matrix product for all rows."
)
OBSERVABLES: Mapping[str, str] = {
  "log_ppl": "natural logarithm of the perplexity of the evaluation text, in nats",
  "kl": "mean KL divergence of the predictions from the float model's, nats a token",
  "fit3": "half of the mean and half of the worst of three relative damages: "
  "perplexity of two texts, and the share of top predictions that change",
  "operator_error": "relative squared error |y - y_float|^2 / |y_float|^2 of a "
  "linear's output with both operands rounded, mean of all linears, on the float "
  "model's inputs of the first window of the evaluation text",
  "activation_error": "the same with the program's activation codes beside the FLOAT "
  "weights. The codes are those that encode_act chose for the rounded weights: codes "
  "that cancel weight errors (by `cross`, or by tables realized at all) lower "
  "operator_error and may raise this, so it is no goal of its own; judge encode_act by "
  "operator_error",
  "weight_error": "the same with the program's weights beside float activations",
  "contaminated": "share of activation blocks whose largest magnitude is more than 32 "
  "times their median, after the map",
  "value_error": "operator_error of the v_proj linears",
  "mlp_error": "operator_error of the gate, up and down projections",
  "down_contaminated": "contaminated, of the inputs of down_proj",
  "down_up_ratio": "activation_error of down_proj over that of up_proj",
  "other_text": "the target on windows that no primary run sees",
  "proxy_error": "operator_error of some rows and blocks of four linears of the middle "
  "layer, with statistics of three quarters of the calibration sequences and measured "
  "on the rest, on the float model's inputs. What blocks left out make up for, later "
  "layers, arranged channels, gradients and recovery are not in it: it tells what is "
  "hopeless, and not which of two close programs is better. A linear has "
  f"{PROXY_BLOCKS} of its blocks there, so hardly any weight error is made good by "
  "another block: it overrates activation codes that undo weight errors, and how "
  "strongly they should "
  "(the share of `cross`) is to be decided by a call",
  "proxy_act": "the same with the activation codes beside the float weights, as in "
  "activation_error",
  "proxy_weight": "the same with the weights beside float activations",
  "layer_N": "operator_error of the linears of layer N",
}

EXAMPLE: Mapping[str, Any] = {
  "label": "the larger of two exponents where it costs less, for both operands",
  "note": "The floor rule clips magnitudes above 6 times the scale; one exponent more "
  "keeps them, on a coarser grid.",
  "code": """def decoded(codes, exponent):
  table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
  magnitude = table[(codes & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(codes >= 8, -magnitude, magnitude), exponent)


def chosen(block):
  floor = block_exponent(block)
  exponents = jnp.minimum(jnp.stack([floor, floor + 1]), 127)
  codes = jax.vmap(lambda e: nearest_codes(block, e))(exponents)
  errors = jnp.square(jax.vmap(decoded)(codes, exponents) - block).sum(axis=1)
  best = jnp.argmin(errors)
  return codes[best], exponents[best]


def encode_weight(block, curvature):
  return chosen(block)


def encode_act(block, gram, cross):
  return chosen(block)
""",
  "declared": ["encode_weight", "encode_act"],
  "residual": "operator_error",
  "explanations": [
    {
      "name": "both operands",
      "statement": "Both are clipped: with the activations as before, a part of the "
      "gain is lost.",
      "predictions": {
        "primary": {"operator_error": "down"},
        "weights alone": {"operator_error": "lost"},
      },
    },
    {
      "name": "weights",
      "statement": "Weights alone are clipped: with the activations as before, the "
      "gain is kept.",
      "predictions": {
        "primary": {"operator_error": "down"},
        "weights alone": {"operator_error": "kept"},
      },
    },
  ],
  "controls": [
    {
      "name": "weights alone",
      "intervention": {"kind": "program", "without": ["encode_act"]},
      "statement": "an ablation: the program without its second part",
    }
  ],
}
"""A whole answer to a first prompt, which a test executes."""

ONE_CODE = (
  "In this task trusted code rounds activations, by one rule for every program, and a "
  "program decides its two tables alone, by PLAN tables and the hook tables. For the "
  "32 activations x of a token in a block, in the coordinates of T, it takes the "
  "nearest codes at block_exponent, and then changes one code of the 32, if that "
  "lowers e' gram e - 2 e' cross x, e = (decoded value) - x: the one code, and its new "
  f"value, that lower it most. {TABLES}"
)
"""What a task with `activation_rule` one_code is told in the place of a hook."""
WITHOUT_ENCODE_ACT = (
  (
    "encode_weight and encode_act on 128 rows or tokens of a block at once",
    "encode_weight on 128 rows of a block at once",
  ),
  ("`gram`, `cross`, `curvature` and `state`", "`curvature` and `state`"),
  ("that encode_act is given", "that activations are rounded by"),
  ("what encode_act is told", "what activations are rounded by"),
  ("that encode_act chose", "that the rule chose"),
  ("; judge encode_act by operator_error", "; judge tables by operator_error"),
  ("encode_act or of a recovery", "PLAN tables or of a recovery"),
)
"""Words of the documents of this interface, and what stands there without the hook."""


def without_encode_act(text: str) -> str:
  """Returns a document as it is where trusted code rounds activations."""
  for with_hook, without in WITHOUT_ENCODE_ACT:
    text = text.replace(with_hook, without)
  return text


def _account(name: str, statement: str, symbol: str) -> dict[str, Any]:
  predictions = {
    "primary": {"operator_error": "down"},
    "tables as before": {"operator_error": symbol},
  }
  return {"name": name, "statement": statement, "predictions": predictions}


ONE_CODE_EXAMPLE: Mapping[str, Any] = {
  "label": "the larger of two exponents where it costs less, and expected tables",
  "note": "The floor rule clips weights above 6 times the scale, and activation codes "
  "can undo a part of the errors of all blocks instead of those of their own.",
  "code": EXAMPLE["code"].partition("\n\n\ndef encode_act")[0] + "\n",
  "plan": {"tables": "expected"},
  "declared": ["encode_weight", "tables"],
  "residual": "operator_error",
  "explanations": [
    _account("both", "with the tables as before, a part of the gain is lost", "lost"),
    _account("weights", "with the tables as before, the gain is kept", "kept"),
  ],
  "controls": [
    {
      "name": "tables as before",
      "intervention": {"kind": "program", "without": ["tables"]},
      "statement": "an ablation: the program without its second part",
    }
  ],
}
"""`EXAMPLE` for a task without encode_act; a test executes it as well."""

REGIMES: Mapping[str, tuple[str, ...]] = {
  "Geometric shaping": (*SHAPING, "balance"),
  "Discrete realization": (*ENCODING, "encode_act", "tables"),
  "Structural recovery": ("attention", "mlp"),
}
"""The three stages of the paper's hierarchy, in order."""
