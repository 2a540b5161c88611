"""What quantizing a model will take, from its config alone.

Counts are exact. Memory is an estimate: the arrays that the pipeline holds in each
stage, plus the process itself. `benchmarks/plan_memory.py` compares it with a run.

Paper: Persistent storage (Appendix, Computational and Storage Costs).
"""

import dataclasses
import math
from typing import Any

from mxjax import mxfp4
from mxjax.contract import PAPER_CONTRACT, Contract
from mxjax.models.config import ModelConfig
from mxjax.models.parameters import parameter_shapes

MAP_BYTES = 4 * mxfp4.BLOCK_SIZE**2
"""U = DT of one input block, float32."""
GRAM_BYTES = 4 * mxfp4.BLOCK_SIZE * (mxfp4.BLOCK_SIZE + 1) // 2
"""The upper triangle of G_Q of one input block, float32."""
CROSS_BYTES = 4 * mxfp4.BLOCK_SIZE**2
"""K_Q of one input block, float32."""
BLOCK_BYTES = MAP_BYTES + GRAM_BYTES + CROSS_BYTES
"""10,304: the matrices that HiRes keeps for one input block."""
PROCESS_BYTES = 900 * 2**20
"""Python, JAX and compiled programs of a HiRes run on CPU, rounded up: a process that
quantized one layer of width 128 on 64 tokens (`benchmarks/plan_memory.py --layers 1
--width 128 --sequences 1 --length 64`) peaked at 0.84 GB."""
RECOVERY_FITS = 2
"""Streams of hidden states beside the float one: attention and MLP."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Sizes in bytes, counts, and work; see `to_dict` for the printed form.

  Attributes:
    parameters: Of the whole model; a tied head counts once.
    target_weights: Weights of the target linears.
    blocks: Input blocks of all target linears, each linear its own.
    bf16: The whole model in bfloat16.
    auxiliary: Input maps, one-code tables and recovery coefficients.
    decoded_total: The paper's layout: bfloat16 weights and the auxiliary tensors.
    codes: Packed E2M1 codes of the targets.
    scales: E8M0 bytes of the targets.
    rest: What is not quantized: embedding, norms, head and biases, bfloat16.
    packed_total: Our layout: codes, scales, auxiliary and rest.
    loaded: Bytes of the loaded model by storage option: as quantized, and after
      `mxjax.compact` without and with narrower embeddings.
    memory: Peak resident bytes by stage, layers and results on disk.
    disk: Bytes written: the checkpoint, the run folder, and scratch of a run whose
      layers stay on disk.
    model_passes: Passes of the calibration set through every layer.
    reductions: Passes over the captured inputs of each target linear.
    forward_flops: Products of the model passes, two a multiply-add.
  """

  parameters: int
  target_weights: int
  blocks: int
  bf16: int
  auxiliary: int
  decoded_total: int
  codes: int
  scales: int
  rest: int
  packed_total: int
  loaded: dict[str, int]
  memory: dict[str, int]
  disk: dict[str, int]
  model_passes: int
  reductions: int
  forward_flops: int

  def to_dict(self) -> dict[str, Any]:
    """A JSON-ready form."""
    return dataclasses.asdict(self)


def _targets(config: ModelConfig, contract: Contract) -> list[tuple[int, int]]:
  """`(out_features, in_features)` of the target linears of one layer."""
  return [
    (shape[0], shape[1])
    for path, shape in parameter_shapes(config).items()
    if path[0] == "layers_0" and path[-1] == "weight" and path[-2] in contract.targets
  ]


def plan(
  config: ModelConfig,
  *,
  sequences: int = 128,
  length: int = 2048,
  chunk: int = 1,
  contract: Contract = PAPER_CONTRACT,
  data: int = 1,
  model: int = 1,
) -> Plan:
  """Plans a HiRes run.

  Args:
    config: The model's description.
    sequences: Calibration sequences.
    length: Tokens in each.
    chunk: Sequences in a device call.
    contract: Targets and block size.
    data: Devices along the mesh's data axis; memory is then that of the first device
      of a process, which also solves what is not shared out.
    model: Devices along its model axis.

  Returns:
    The plan.

  Raises:
    ValueError: A target's input width is not a multiple of the block size.
  """
  linears = _targets(config, contract)
  if odd := sorted({width for _, width in linears if width % contract.block_size}):
    raise ValueError(
      f"plan: every target needs an input width that is a multiple of "
      f"{contract.block_size}, got {', '.join(map(str, odd))}; this model cannot be "
      "quantized under the contract."
    )
  layers = config.num_layers
  parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
  layer_weights = sum(rows * width for rows, width in linears)
  layer_blocks = sum(width // contract.block_size for _, width in linears)
  # Scale and offset a head; alpha, beta, eta and sigma_g a layer, all float32.
  layer_recovery = 4 * (2 * config.num_kv_heads + 4)
  layer_auxiliary = layer_blocks * BLOCK_BYTES + layer_recovery
  weights, auxiliary = layers * layer_weights, layers * layer_auxiliary
  rest = 2 * (parameters - weights)
  packed_total = weights // 2 + weights // contract.block_size + auxiliary + rest
  return Plan(
    parameters=parameters,
    target_weights=weights,
    blocks=layers * layer_blocks,
    bf16=2 * parameters,
    auxiliary=auxiliary,
    decoded_total=2 * parameters + auxiliary,
    codes=weights // 2,
    scales=weights // contract.block_size,
    rest=rest,
    packed_total=packed_total,
    loaded=_loaded(config, packed_total, layers * layer_blocks),
    memory=_memory(
      config, linears, (sequences, length), chunk, rest, packed_total, (data, model)
    ),
    disk={
      "checkpoint": packed_total,
      "run folder": packed_total - rest,
      "scratch, layers on disk": packed_total - rest,
    },
    model_passes=1 + RECOVERY_FITS,
    # Hessian, fold moments, anchor errors, errors after T, balance trials.
    reductions=5,
    forward_flops=2 * weights * sequences * length * (1 + RECOVERY_FITS),
  )


def _loaded(config: ModelConfig, packed_total: int, blocks: int) -> dict[str, int]:
  """Bytes of a loaded HiRes model under each storage option of `mxjax.compact`."""
  tables = packed_total - blocks * (GRAM_BYTES + CROSS_BYTES) // 2
  d, copies = config.hidden_size, 1 if config.tie_embeddings else 2
  narrower = lambda row: tables - copies * config.vocab_size * (2 * d - row)
  return {
    "as quantized": packed_total,
    "bfloat16 tables": tables,
    # A code for each value, and the row's float32 scale or one E8M0 byte a block.
    "bfloat16 tables, int8 embeddings": narrower(d + 4),
    "bfloat16 tables, MXFP4 embeddings": narrower(d // 2 + d // mxfp4.BLOCK_SIZE),
  }


def _memory(
  config: ModelConfig,
  linears: list[tuple[int, int]],
  extent: tuple[int, int],
  chunk: int,
  rest: int,
  packed_total: int,
  mesh: tuple[int, int],
) -> dict[str, int]:
  """Peak resident bytes of every stage, with layers and results on disk."""
  itemsize = {"float32": 4, "bfloat16": 2}[config.dtype]
  (sequences, length), devices, model = extent, mesh[0] * mesh[1], mesh[1]
  # Every device has its own sequences.
  tokens = sequences * length // devices
  d, ffn = config.hidden_size, config.intermediate_size
  queries = config.num_heads * config.head_dim
  values = config.num_kv_heads * config.head_dim
  layer = 2 * sum(rows * width for rows, width in linears)
  streams = (1 + RECOVERY_FITS) * tokens * d * itemsize
  # Inputs of the four groups of linears feature-major, and the float values.
  taps = 4 * tokens * (2 * d + queries + ffn) + itemsize * tokens * values
  held = PROCESS_BYTES + rest + streams + taps + layer
  if devices > 1:
    # The rows that lie on the mesh, and a layer gathered from all of them.
    held += (rest + layer) // model + (layer if model > 1 else 0)
  widths = (d, queries, d, ffn)
  hessians = 4 * sum(width**2 for width in widths)
  widest = max(widths)
  largest = max(rows * width for rows, width in linears)
  # One sequence through a layer: activations, and scores of a chunk of queries.
  scores = 2 * 4 * config.num_heads * min(length, 512) * length
  forward = 4 * chunk * length * (6 * d + 3 * ffn) + scores
  # Conjugated Hessian, its factor and the solve; weights and errors of one linear.
  solving = 3 * 4 * widest**2 + 6 * 4 * largest
  if devices > 1:
    # A Hessian's contribution and the shares that arrive, while a total is made.
    solving = max(solving, 2 * 4 * widest**2)
  # Gate and up of one sequence, twice, and their products in float64.
  fitting = 8 * length * ffn * 8 // 4 + forward
  return {
    "calibration": held + forward,
    "quantization": held + hessians + solving,
    "attention recovery": held + forward,
    "mlp recovery": held + fitting,
    "saving": PROCESS_BYTES + 2 * packed_total,
  }
