"""How many units a call runs each hook on, by the sizes of the model and of the texts.

A prompt tells it, because a loop in a hook costs its turns times the hook's units.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mxjax.discovery.tasks.ptq.options import PtqOptions
from mxjax.numerics.mxfp4 import BLOCK_SIZE


class LinearShape(NamedTuple):
  """Rows (outputs) and columns (inputs) of a linear's weight."""

  rows: int
  columns: int

  @property
  def blocks(self) -> int:
    """Blocks of a row."""
    return self.columns // BLOCK_SIZE


def linears(options: PtqOptions) -> dict[str, LinearShape]:
  """Returns the shape of every linear of a layer, by its name."""
  config = options.config
  model, hidden = config.hidden_size, config.intermediate_size
  heads, pairs = (
    count * config.head_dim for count in (config.num_heads, config.num_kv_heads)
  )
  return {
    "q_proj": LinearShape(heads, model),
    "k_proj": LinearShape(pairs, model),
    "v_proj": LinearShape(pairs, model),
    "o_proj": LinearShape(model, heads),
    "gate_proj": LinearShape(hidden, model),
    "up_proj": LinearShape(hidden, model),
    "down_proj": LinearShape(model, hidden),
  }


def of_call(options: PtqOptions, plan: Mapping[str, Any]) -> dict[str, int]:
  """Returns the units of a primary run by hook, whether the plan calls it or not.

  Activations are those of the scored texts; the fits of heads and MLPs run the encoder
  on calibration tokens as well, which are not counted.
  """
  shapes, layers = [*linears(options).values()], options.layer_count
  blocks = layers * sum(shape.blocks for shape in shapes)
  rows = layers * sum(shape.rows for shape in shapes)
  cells = layers * sum(shape.rows * shape.blocks for shape in shapes)
  sequences, length = options.calibration
  passes, linear_passes = plan["passes"], plan["linear_passes"]
  # Operator errors run the encoder on the first window once more.
  window = options.windows[1]
  scored = options.tokens_scored["primary"] + window
  if options.objective != "log_ppl":
    # The comparison with the float model runs the quantized one again.
    scored += options.windows[0] * window
  config, of_layers = options.config, layers * sequences
  channels = {
    "mlp": config.intermediate_size,
    "values": config.num_kv_heads * config.head_dim,
  }
  sorted_ = [n for part, n in channels.items() if plan["arrange"] in (part, "both")]
  return {
    "arrange": layers * sum(sorted_),
    # A measurement sees tiles: 32 tokens, or 32 rows, of a block at once.
    "measure_inputs": blocks * (sequences * length // BLOCK_SIZE) * passes,
    "measure_weights": cells // BLOCK_SIZE * passes,
    "solve": blocks * passes,
    "transform": blocks,
    "balance": blocks,
    "encode_weight": cells,
    "measure_linear": layers * len(shapes) * sequences * linear_passes,
    "solve_linear": layers * len(shapes) * linear_passes,
    "encode_linear": rows,
    "tables": cells // BLOCK_SIZE,
    "encode_act": blocks * scored,
    "measure_value": of_layers * config.num_kv_heads,
    "recover_value": layers * config.num_kv_heads,
    "measure_mlp": of_layers,
    "recover_mlp": layers,
  }
