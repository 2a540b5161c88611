"""Memory, disk and work of quantizing a model, from its config alone.

Counts are exact. Memory is the resident memory of a process on CPU: the arrays held in
each stage, the temporaries of the largest compiled function as XLA:CPU states them
(`lower(...).compile().memory_analysis()`), and the process itself.
`benchmarks/plan_memory.py` compares the plan with runs.

Paper: Persistent storage (Appendix, Computational and Storage Costs).
"""

import dataclasses
import math
from typing import Any

from mxjax.calibration.output_gradients import differentiated
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.models.config import ModelConfig
from mxjax.models.parameters import parameter_shapes
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract

MAP_BYTES = 4 * mxfp4.BLOCK_SIZE**2
"""U = DT of one input block, float32."""
GRAM_BYTES = 4 * mxfp4.BLOCK_SIZE * (mxfp4.BLOCK_SIZE + 1) // 2
"""The upper triangle of G_Q of one input block, float32."""
CROSS_BYTES = 4 * mxfp4.BLOCK_SIZE**2
"""K_Q of one input block, float32."""
BLOCK_BYTES = MAP_BYTES + GRAM_BYTES + CROSS_BYTES
"""10,304: the matrices that HiRes keeps for one input block."""
PROCESS_BYTES = 700 * 10**6
"""Python, JAX and some 200 compiled programs of a HiRes run on CPU: a process that
quantized a layer with 5 MB of arrays peaked at 0.71 GB (`plan_memory.py floor`)."""
PASS_BYTES = 7 * 10**6
"""Growth of a layer pass's compiled program with every QUERIES_AT_ONCE positions, over
which attention is unrolled: two of SmolLM2-135M grow by 94 MB from 256 to 2,048."""
QUERIES_AT_ONCE = 256
"""As in the attention of `models.functional`."""
RECOVERY_FITS = 2
"""Streams of hidden states beside the float one: attention and MLP."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Sizes in bytes, counts, and work; see `to_dict` for the printed form."""

  dtype: str  #: Compute dtype, of which are hidden states and captured inputs.
  parameters: int  #: Of the whole model; a tied head counts once.
  target_weights: int  #: Weights of the target linears.
  blocks: int  #: Input blocks of all target linears, counted for each linear.
  bf16: int  #: The whole model in bfloat16.
  auxiliary: int  #: Input maps, one-code tables and recovery coefficients.
  decoded_total: int  #: The paper's layout: bfloat16 weights and the auxiliary tensors.
  codes: int  #: Packed E2M1 codes of the targets.
  scales: int  #: E8M0 bytes of the targets.
  rest: int  #: Unquantized params in bfloat16: embedding, norms, head and biases.
  packed_total: int  #: Our layout: codes, scales, auxiliary and rest.
  loaded: dict[str, int]  #: As quantized, and by option of `layers.inference_packing`.
  memory: dict[str, int]  #: Peak resident bytes by stage, without evaluation.
  on_disk: bool  #: Whether `memory` assumes that layers and results stay on disk.
  disk: dict[str, int]  #: Written: checkpoint, run folder, scratch of layers on disk.
  model_passes: int  #: Passes of the calibration set through every layer.
  reductions: int  #: Passes over the captured inputs of each target linear.
  forward_flops: int  #: Products of the model passes, two a multiply-add.
  prediction_flops: int  #: Products that `hires-next` adds to them.

  def to_dict(self) -> dict[str, Any]:
    """Converts the plan to nested dicts that JSON can represent."""
    return dataclasses.asdict(self)


def plan(
  config: ModelConfig,
  *,
  sequences: int = 128,
  length: int = 2048,
  chunk: int = 1,
  contract: Contract = PAPER_CONTRACT,
  data: int = 1,
  model: int = 1,
  on_disk: bool = True,
) -> Plan:
  """Plans a HiRes run on `sequences` of `length` tokens, `chunk` in a device call.

  `data` and `model` are mesh axis sizes; memory is that of the first device of a
  process, which also runs unsharded solves. With `on_disk`, float layers are read on
  demand and finished ones written out; otherwise all of both stay in memory.

  Raises:
    ValueError: A target's input width is not a multiple of the block size.
  """
  linears = [
    (shape[0], shape[1])
    for path, shape in parameter_shapes(config).items()
    if path[0] == "layers_0" and path[-1] == "weight" and path[-2] in contract.targets
  ]
  if odd := sorted({width for _, width in linears if width % contract.block_size}):
    raise ValueError(
      f"plan: every target needs an input width that is a multiple of "
      f"{contract.block_size}, got {', '.join(map(str, odd))}; this model cannot be "
      "quantized under the contract."
    )
  sizes = _sizes(config, linears, contract.block_size)
  tokens, layers_packed = sequences * length, sizes["packed_total"] - sizes["rest"]
  run = RunArrays(config, linears, tokens // (data * model), length, chunk)
  return Plan(
    **sizes,
    dtype=config.dtype,
    loaded=_loaded(config, sizes),
    memory=_memory(run, sizes, devices=data * model, model=model, on_disk=on_disk),
    on_disk=on_disk,
    disk={
      "checkpoint": sizes["packed_total"],
      "run folder": layers_packed,
      "scratch, layers on disk": layers_packed,
      "scratch, gradients of hires-next": config.num_layers * run.gradients(),
    },
    model_passes=1 + RECOVERY_FITS,
    # Hessian, fold moments, anchor errors, errors after T, balance trials.
    reductions=5,
    forward_flops=2 * sizes["target_weights"] * tokens * (1 + RECOVERY_FITS),
    prediction_flops=_prediction_flops(config, linears, tokens),
  )


def _prediction_flops(
  config: ModelConfig, linears: list[tuple[int, int]], tokens: int
) -> int:
  """Counts the products of gradients and scale distillation.

  Half of the tokens are differentiated. The backward pass reruns each layer; a chunk of
  the head is differentiated where it is computed.
  """
  head, epochs = config.vocab_size * config.hidden_size, ScaleDistillation().epochs
  weights = config.num_layers * sum(rows * width for rows, width in linears)
  # Forward; for every layer forward and back; forward and back to the linears' outputs;
  # W'g of every linear, and the moment of its gradients.
  moments = lambda place: config.num_layers * sum(pair[place] ** 2 for pair in linears)
  first_halves = 6 * weights + 2 * head + moments(0) // 2
  # A Hessian for each linear.
  gradients = first_halves // 2 + moments(1) // 2
  # The float model once; in each epoch forward, forward again and back, and the head
  # forward, back and of the teacher.
  distillation = (1 + 3 * epochs) * weights + 3 * epochs * head
  return 2 * tokens * (gradients + distillation)


def _sizes(
  config: ModelConfig, linears: list[tuple[int, int]], block_size: int
) -> dict[str, int]:
  """Computes the fields of `Plan` that do not depend on the run: counts and bytes."""
  layers = config.num_layers
  parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
  weights = layers * sum(rows * width for rows, width in linears)
  blocks = layers * sum(width // block_size for _, width in linears)
  # Float32 scale and offset of each head; alpha, beta, eta and sigma_g of each layer.
  recovery = layers * 4 * (2 * config.num_kv_heads + 4)
  auxiliary = blocks * BLOCK_BYTES + recovery
  codes, scales, rest = weights // 2, weights // block_size, parameters - weights
  return {
    "parameters": parameters,
    "target_weights": weights,
    "blocks": blocks,
    "bf16": 2 * parameters,
    "auxiliary": auxiliary,
    "decoded_total": 2 * parameters + auxiliary,
    "codes": codes,
    "scales": scales,
    "rest": 2 * rest,
    "packed_total": codes + scales + auxiliary + 2 * rest,
  }


def _loaded(config: ModelConfig, sizes: dict[str, int]) -> dict[str, int]:
  """Computes bytes of a loaded HiRes model under each `inference_packing` option."""
  tables = sizes["packed_total"] - sizes["blocks"] * (GRAM_BYTES + CROSS_BYTES) // 2
  d, copies = config.hidden_size, 1 if config.tie_embeddings else 2
  narrower = lambda row: tables - copies * config.vocab_size * (2 * d - row)
  return {
    "as quantized": sizes["packed_total"],
    "bfloat16 tables": tables,
    "hires-next, bfloat16 tables": tables - sizes["blocks"] * CROSS_BYTES // 2,
    # A code for each value, and one float32 scale a row or one E8M0 byte a block.
    "bfloat16 tables, int8 embeddings": narrower(d + 4),
    "bfloat16 tables, MXFP4 embeddings": narrower(d // 2 + d // mxfp4.BLOCK_SIZE),
  }


@dataclasses.dataclass(frozen=True)
class RunArrays:
  """Sizes in bytes of a run's arrays and temporaries.

  `linears` are `(out_features, in_features)` of a layer's targets, `tokens` those of
  one device, `length` those of a sequence, `chunk` the sequences in a device call.
  """

  config: ModelConfig
  linears: list[tuple[int, int]]
  tokens: int
  length: int
  chunk: int

  @property
  def itemsize(self) -> int:
    """Bytes of a number in the compute dtype."""
    return {"float32": 4, "bfloat16": 2}[self.config.dtype]

  @property
  def layer_weights(self) -> int:
    """Number of target weights in a layer."""
    return sum(rows * width for rows, width in self.linears)

  @property
  def tap_widths(self) -> tuple[int, ...]:
    """Widths of the four tensors that the linears of a layer read."""
    d, queries = self.config.hidden_size, self.config.num_heads * self.config.head_dim
    return d, queries, d, self.config.intermediate_size

  def programs(self) -> int:
    """Growth of a layer's compiled passes with the sequence length."""
    return (1 + RECOVERY_FITS) * PASS_BYTES * (self.length // QUERIES_AT_ONCE)

  def streams(self) -> int:
    """Hidden states of the float model and of each recovery fit."""
    return (1 + RECOVERY_FITS) * self.tokens * self.config.hidden_size * self.itemsize

  def gradients(self) -> int:
    """Gradients at the output of one layer, or the hidden states entering it."""
    tokens = self.tokens // self.length * differentiated(self.length)
    return tokens * self.config.hidden_size * self.itemsize

  def inputs(self) -> int:
    """Captured inputs of a layer's linears."""
    return self.itemsize * self.tokens * sum(self.tap_widths)

  def values(self) -> int:
    """A layer's captured values, the targets of attention's fit."""
    return self.tokens * self.config.num_kv_heads * self.config.head_dim * self.itemsize

  def hessians(self) -> int:
    """The raw Hessians of a layer, kept until it is finished."""
    return 4 * sum(width**2 for width in self.tap_widths)

  def capturing(self) -> int:
    """Temporaries of a float layer's pass over a sequence."""
    config, length = self.config, self.length
    d, hidden = config.hidden_size, config.intermediate_size
    largest = max(rows * width for rows, width in self.linears)
    queries = min(length, QUERIES_AT_ONCE)
    return self._in_loop(4) + max(
      # A float32 product: its copy of the weight, input and output.
      4 * largest + 4 * length * (d + hidden),
      # Gate, up and their product in float32; XLA keeps narrow ones beside them.
      (12 if self.itemsize == 4 else 16) * length * hidden,
      # Scores and their exponentials beside the queries.
      8 * config.num_heads * queries * length + 4 * length * d,
    )

  def remeasuring(self) -> int:
    """Temporaries of a quantized layer's pass over a sequence, for attention's fit."""
    # The input of down_proj during code refinement: five float32 arrays of its shape,
    # and gate and up.
    refining = 23 * self.length * self.config.intermediate_size
    return self._in_loop(6) + max(refining, self.capturing() - self._in_loop(4))

  def fitting(self) -> int:
    """Same for the MLP's fit, with five columns of its equations in float64."""
    columns = 40 * self.length * self.config.intermediate_size
    return max(self.remeasuring(), self._in_loop(6) + columns)

  def _in_loop(self, each: int) -> int:
    """What XLA hoists out of the loop over the sequences of a chunk, if there is one.

    These are the layer's weights as products take them, `each` bytes a weight: float32
    and, in a quantized layer, a decoding step.
    """
    return each * self.layer_weights if self.chunk > 1 else 0

  def solving(self, devices: int) -> int:
    """The largest step of quantizing one linear, over all linears of a layer."""
    return max(self._solving(rows, width, devices) for rows, width in self.linears)

  def _solving(self, rows: int, width: int, devices: int) -> int:
    weights, square, inputs = rows * width, width**2, self.length * width
    # Bytes for each weight: the float32 copy in blocks is 4, after folding 8.
    steps = [
      # The conjugated Hessian, its damped and reversed copies, the factor, the solve.
      8 * weights + 30 * square,
      # Columns in order: the factor and the Hessian beside codes and errors.
      17 * weights + 8 * square,
      # A trial of the balance: folded in float64, scaled, decoded, their errors.
      25 * weights,
      # The report's probe, with outputs of its tokens.
      24 * weights + 4 * 256 * (8 * width + 4 * rows),
      # A sequence encoded in trial coordinates: mapped, rounded, scored.
      4 * weights + 26 * inputs,
    ]
    if devices > 1:
      # A Hessian's contribution and the arriving shares of a total.
      steps.append(2 * 4 * square)
    return max(steps)


def _memory(
  run: RunArrays, sizes: dict[str, int], *, devices: int, model: int, on_disk: bool
) -> dict[str, int]:
  """Computes the peak resident bytes of every stage."""
  rest, packed_total = sizes["rest"], sizes["packed_total"]
  layer = 2 * run.layer_weights
  process = PROCESS_BYTES + run.programs()
  base = process + run.streams() + run.values()
  if on_disk:
    layer_packed = (packed_total - rest) // run.config.num_layers
    base += rest + layer + layer_packed
  else:
    base += 2 * sizes["target_weights"] + packed_total
  if devices > 1:
    # The rows that lie on the mesh, and a layer gathered from all of them.
    base += (rest + layer) // model + (layer if model > 1 else 0)
  # Capturing reads a layer on disk once more than quantizing it.
  again = layer if on_disk else 0
  # Recovery holds neither the inputs of the linears nor their Hessians.
  measured = base + run.inputs()
  return {
    "calibration": measured + again + run.capturing(),
    "quantization": measured + run.hessians() + run.solving(devices),
    "attention recovery": base + run.remeasuring(),
    "mlp recovery": base + run.fitting(),
    "saving": process + 2 * packed_total,
  }
