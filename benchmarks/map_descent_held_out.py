"""What a descent of maps learns for tokens and rows that it did not see.

  python benchmarks/map_descent_held_out.py --data ../shared/data
    [--models llama SmolLM2]

The maps of some linears of a layer descend as in `hires-next` with `candidates=1` and
`map_steps=300`, on 2,048 tokens of C4 or on four times as many, and on 512 of the
output rows or on all. Both terms of its loss are then measured on the tokens that it
saw, on as many others from other documents, and on all output rows. The table has them
over those of the map where the descent starts.
"""

import common
import jax
import jax.numpy as jnp
import machines
import numpy as np
import replicate_noise

from mxjax import methods, models
from mxjax.calibration import streams
from mxjax.calibration.linear_inputs import LinearInputs
from mxjax.methods.hires import stage1
from mxjax.numerics import mxfp4, precision
from mxjax.numerics.shaping import map_descent

LAYERS = {"llama": 2, "SmolLM2": 14}
LINEARS = "q_proj", "gate_proj", "down_proj"
START = methods.get(
  "hires-next:weighting=uniform:two_sided=false:use_interaction=false"
  ":use_balance=false:candidates=1"
)
STEPS = 300
SEEN = (2048, 512), (2048, None), (8192, None)
"""Tokens, and rows or all of them."""
ROWS, OTHERS = 16, 4
"""Rows of 512 tokens that may be seen, and rows that are not."""


def terms(matrix, moment, weight_moment, inputs, weight):
  """The terms of the loss of inputs and of weights, sums over blocks."""
  inverse = np.linalg.inv(matrix).swapaxes(1, 2)
  single = lambda array: jnp.asarray(array, jnp.float32)
  gram = single(inverse @ weight_moment @ inverse.swapaxes(1, 2))
  kappa = map_descent.compensated_moment(jnp.asarray(matrix), jnp.asarray(moment))
  identity = jnp.broadcast_to(jnp.eye(32, dtype=jnp.float32), gram.shape)
  mapped = single(matrix) @ inputs, single(inverse) @ weight
  both, of_weight = (
    map_descent.loss_and_slope(identity, gram, single(kappa), *mapped, changes=changes)[
      0
    ].sum()
    for changes in (START.changes, None)
  )
  return np.array([float(both - of_weight), float(of_weight)])


def descended(matrix, moment, weight_moment, inputs, weight):
  """The map after its descent, float64."""
  matrix = jnp.asarray(matrix)
  found = map_descent.descend(
    matrix,
    jnp.linalg.inv(matrix).mT,
    map_descent.compensated_moment(matrix, jnp.asarray(moment)),
    inputs,
    weight,
    jnp.asarray(weight_moment),
    changes=START.changes,
    steps=STEPS,
  )
  return np.asarray(found.rotation, np.float64) @ np.asarray(matrix)


def sampled(columns, count):
  """At most so many columns, evenly spaced; all of them for None."""
  return columns if count is None else columns[..., :: -(-columns.shape[-1] // count)]


def entries(name, chunks, weight):
  """The shares that are left of both terms, for each choice of what is seen."""
  blocks = mxfp4.weight_blocks(weight)
  inputs = LinearInputs([chunks[:ROWS]]).for_linear()
  start = np.asarray(START.shape(blocks, inputs).input_map.matrix, np.float64)
  moment = np.asarray(inputs.moment())
  output = np.asarray(
    stage1.output_moment(blocks, inputs, stage1.weight_moments(blocks))
  )
  others = jnp.concatenate(list(chunks[ROWS:]), -1)
  tokens = jnp.concatenate(list(chunks[:ROWS]), -1)
  start_operands, found = (start, moment, output), []
  # A linear may have no more rows than a part of them.
  choices = {(seen, min(rows or len(weight), len(weight))) for seen, rows in SEEN}
  for seen, rows in sorted(choices):
    mine = sampled(tokens, seen)
    matrix = descended(*start_operands, mine, sampled(blocks, rows))
    share = lambda columns, *operands: (
      terms(*operands, columns, blocks) / terms(*start_operands, columns, blocks)
    )
    left, held = (share(each, matrix, moment, output) for each in (mine, others))
    found.append(
      {
        "linear": name,
        "outputs": int(weight.shape[0]),
        "tokens_seen": seen,
        "rows_seen": int(sampled(blocks, rows).shape[-1]),
        "inputs_seen": left[0],
        "inputs_others": held[0],
        "weights": held[1],
      }
    )
  return found


def of_model(data, name):
  """The entries of some linears of a layer."""
  number = LAYERS[name]
  model, params, tokenizer = machines.loaded(name, number + 1)
  text = common.c4_text(data)
  rows = replicate_noise.rows_of(tokenizer, text, 0, ROWS + OTHERS)
  step, outer = jax.jit(model.layer_with_taps), streams.outer_params(model, params)
  made = []
  for row in rows:
    hidden = model.embed(outer, jnp.asarray(row[None]))
    for index in range(number + 1):
      hidden, taps = step(params[model.layer_name(index)], hidden)
    made.append(taps)
  found = []
  for (sublayer, linear), tap in models.PROJECTION_TAPS.items():
    if linear in LINEARS:
      weight = params[model.layer_name(number)][sublayer][linear]["weight"]
      chunks = [mxfp4.to_blocks(taps[tap][0].astype(jnp.float32)) for taps in made]
      with precision.float64_scope():
        found += entries(linear, jnp.stack(chunks), weight.astype(jnp.float32))
  return [{"model": name, "layer": number, **entry} for entry in found]


def table(found):
  """A row for each descent."""
  head = [
    "model, layer",
    "linear",
    "outputs",
    "tokens seen",
    "rows seen",
    "input error, tokens seen",
    "input error, other tokens",
    "weight error, all rows",
  ]
  lines = [
    [
      f"{one['model']}, {one['layer']}",
      one["linear"],
      *(f"{one[key]:,}" for key in ("outputs", "tokens_seen", "rows_seen")),
      *(f"{one[key]:.3f}" for key in ("inputs_seen", "inputs_others", "weights")),
    ]
    for one in found
  ]
  return common.markdown(head, lines)


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--models", nargs="+", default=list(LAYERS), choices=LAYERS)
  options = parser.parse_args()
  made, found = common.stamp(), []
  for name in options.models:
    found += of_model(options.data, name)
    common.write(options.out, {**made, "entries": found}, table(found))


if __name__ == "__main__":
  main()
