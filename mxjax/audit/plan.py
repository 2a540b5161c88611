"""Memory, disk and work of quantizing a model, from its config alone.

Counts and sizes are exact. Peak memory is a rule of thumb for a process on CPU: the
arrays that a run holds at once, a workspace, the process itself, and an eighth on top;
or, where layers stay on disk, the packed model that is gathered to be saved.
`benchmarks/plan_memory.py` compares the rule with runs.

Paper: Persistent storage (Appendix, Computational and Storage Costs).
"""

import dataclasses
import math
from typing import Any, get_args

from mxjax.calibration.output_gradients import differentiated
from mxjax.errors import ValueRefusal
from mxjax.layers.sizes import size_report
from mxjax.methods.program import Program
from mxjax.methods.scale_distillation import ScaleDistillation
from mxjax.models.config import ModelConfig
from mxjax.models.functional import CacheFormat
from mxjax.models.generation import cache_bytes
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
WORKSPACE_ARRAYS = 8
"""Float32 copies of the largest array of a step that are alive at once, about: of a
Hessian while it is factored, of a weight, or of one sequence's activations."""
RECOVERY_BYTES = {"attention": lambda heads: 8 * heads, "mlp": lambda heads: 16}
"""Float32 scale and offset of each key-value head; alpha, beta, eta and sigma_g."""
RECOVERY_FITS = 2
"""Streams of hidden states beside the float one: attention and MLP."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Sizes in bytes, counts, and work; see `to_dict` for the printed form."""

  dtype: str  #: Compute dtype, of which are hidden states and captured inputs.
  parameters: int  #: Of the whole model; a tied head counts once.
  target_weights: int  #: Weights of the target linears.
  blocks: int  #: Input blocks of all target linears, sizes for each linear.
  bf16: int  #: The whole model in bfloat16.
  auxiliary: int  #: Input maps, one-code tables and recovery coefficients.
  decoded_total: int  #: The paper's layout: bfloat16 weights and the auxiliary tensors.
  codes: int  #: Packed E2M1 codes of the targets.
  scales: int  #: E8M0 bytes of the targets.
  rest: int  #: Unquantized params in bfloat16: embedding, norms, head and biases.
  packed_total: int  #: Our layout: codes, scales, auxiliary and rest.
  bits_per_weight: float  #: Of the target linears, scales and auxiliary included.
  loaded: dict[str, int]  #: As quantized, and by option of `layers.inference_packing`.
  cache: dict[str, int]  #: Keys and values of a token of text, by `CacheFormat`.
  memory: dict[str, int]  #: Bytes that a run holds at once, without evaluation.
  peak: int  #: Peak resident bytes, by a rule of thumb.
  on_disk: bool  #: Whether `memory` assumes that layers and results stay on disk.
  disk: dict[str, int]  #: Written: checkpoint, run folder, scratch of layers on disk.
  model_passes: int  #: Passes of the calibration set through every layer.
  sequences: int  #: Of the calibration set.
  length: int  #: Tokens of each.
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
  contract: Contract = PAPER_CONTRACT,
  data: int = 1,
  model: int = 1,
  on_disk: bool = True,
) -> Plan:
  """Plans a HiRes run on `sequences` of `length` tokens.

  `data` and `model` are mesh axis sizes; memory is that of the first device of a
  process, which also runs unsharded solves. With `on_disk`, float layers are read on
  demand and finished ones written out; otherwise all of both stay in memory.

  Raises:
    ValueError: A target's input width is not a multiple of the block size.
  """
  # Of the first layer: all layers have the same shapes.
  linears = [
    (shape[0], shape[1])
    for path, shape in parameter_shapes(config).items()
    if path[0] == "layers_0" and path[-1] == "weight" and path[-2] in contract.targets
  ]
  if odd := sorted({width for _, width in linears if width % contract.block_size}):
    raise ValueRefusal(
      "plan",
      expected="input widths of all targets that are multiples of "
      f"{contract.block_size}",
      got=", ".join(map(str, odd)),
      mend="choose another model, or leave them out of the contract",
    )
  sizes = _sizes(config, linears, contract.block_size)
  tokens, layers_packed = sequences * length, sizes["packed_total"] - sizes["rest"]
  # Sequences are shared by all devices, so that each has its part of the tokens.
  memory = _memory(
    config,
    linears,
    sizes,
    tokens=tokens // (data * model),
    length=length,
    devices=data * model,
    model=model,
    on_disk=on_disk,
  )
  # An eighth is what allocators keep. Saving the checkpoint gathers the packed model.
  held, saving = sum(memory.values()) * 9 // 8, 2 * sizes["packed_total"]
  positions = sequences // (data * model) * differentiated(length)
  gradients = positions * config.hidden_size * _itemsize(config)
  return Plan(
    **sizes,
    bits_per_weight=8 * layers_packed / sizes["target_weights"],
    dtype=config.dtype,
    loaded=_loaded(config, sizes),
    cache={how: cache_bytes(config, how) for how in get_args(CacheFormat)},
    memory=memory,
    peak=max(held, PROCESS_BYTES + saving),
    on_disk=on_disk,
    disk={
      "checkpoint": sizes["packed_total"],
      "run folder": layers_packed,
      "scratch, layers on disk": layers_packed,
      "scratch, gradients of hires-next": config.num_layers * gradients,
    },
    model_passes=1 + RECOVERY_FITS,
    sequences=sequences,
    length=length,
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


def learned_bytes(planned: Plan, program: Program) -> dict[str, int]:
  """Counts bytes of what tuning learns of maps and codes, beside `Plan`'s.

  Returns:
    `memory` of the process that holds the whole model, of which a mesh shares nothing;
    and `disk` of the run folder while it is written, half of which it keeps.
  """
  if program.tune is None:
    return {"memory": 0, "disk": 0}
  inputs = planned.blocks * mxfp4.BLOCK_SIZE
  numbers = program.tune.learned_numbers(planned.target_weights, inputs)
  # With Adam's two moments, and in memory with their gradients; a file of before is
  # removed when the next is there.
  return {"memory": 4 * 4 * numbers, "disk": 2 * 3 * 4 * numbers}


def stored(config: ModelConfig, program: Program) -> dict[str, Any]:
  """Computes the bytes that a model of a method stores, by what takes them.

  It assumes that what is not quantized is stored in bfloat16, but for the embedding and
  the head of rotated models, which are float32.

  Returns:
    JSON-ready: the `Contract.form`; bytes of `codes`, `scales`, `maps`, `tables` (of
    activation rounding), `recovery`, `embedding`, `head` (0 if tied), `others` (norms
    and biases) and their `total`; `bf16`, those of the float model; and
    `bits_per_weight` of the quantized linears, as in `size_report`.
  """
  shapes = parameter_shapes(config)
  contract = program.under(PAPER_CONTRACT)
  embedding = 2 * math.prod(shapes.pop(("embed_tokens", "weight")))
  head, bf16 = 2 * math.prod(shapes.pop(("lm_head", "weight"), (0,))), embedding
  bf16 += head
  if program.rotates_model and not config.is_post_norm:
    # Rotated, both are float32, and the norm is fused into the head alone.
    embedding = head = 2 * embedding
  parts = dict.fromkeys(("codes", "scales", "maps", "tables"), 0)
  weights = others = 0
  for path, shape in shapes.items():
    bf16 += 2 * math.prod(shape)
    is_target = path[-1] == "weight" and path[-2] in contract.targets
    if not (is_target and path[0].startswith("layers_")):
      others += 2 * math.prod(shape)
      continue
    rows, width = shape
    leaf = program.stored((rows, width))
    found = size_report({"linear": leaf})["quantized_linears"]
    parts["tables"] += found["rounding"]
    for part in ("codes", "scales", "maps"):
      parts[part] += found[part]
    weights += rows * width
  quantized = sum(parts.values())
  recovery = sum(
    RECOVERY_BYTES[fit.name](config.num_kv_heads) for fit in program.recover
  )
  unquantized = {"embedding": embedding, "head": head, "others": others}
  parts |= {"recovery": config.num_layers * recovery, **unquantized}
  return {
    "form": contract.form,
    **parts,
    "total": sum(parts.values()),
    "bf16": bf16,
    "bits_per_weight": 8 * quantized / weights,
  }


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
  # Two 4-bit codes a byte, and a byte of scale for each block.
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
  # bfloat16 halves what the plan counts as float32.
  tables = sizes["packed_total"] - sizes["blocks"] * (GRAM_BYTES + CROSS_BYTES) // 2
  d, copies = config.hidden_size, 1 if config.tie_embeddings else 2
  return {
    "as quantized": sizes["packed_total"],
    "bfloat16 tables": tables,
    "hires-next, bfloat16 tables": tables - sizes["blocks"] * CROSS_BYTES // 2,
    # In each row a byte for every value and one float32 scale, not two bytes a value.
    "bfloat16 tables, int8 embeddings": tables - copies * config.vocab_size * (d - 4),
  }


def _itemsize(config: ModelConfig) -> int:
  """Returns the bytes of a number in the compute dtype."""
  return {"float32": 4, "bfloat16": 2}[config.dtype]


def _memory(
  config: ModelConfig,
  linears: list[tuple[int, int]],
  sizes: dict[str, int],
  *,
  tokens: int,
  length: int,
  devices: int,
  model: int,
  on_disk: bool,
) -> dict[str, int]:
  """Computes the bytes of what a run holds at once; `tokens` are one device's."""
  d, hidden = config.hidden_size, config.intermediate_size
  # Of the four tensors that the linears of a layer read.
  widths = (d, config.num_heads * config.head_dim, d, hidden)
  values = config.num_kv_heads * config.head_dim
  rest, packed = sizes["rest"], sizes["packed_total"] - sizes["rest"]
  # Two bytes a weight, because they are bfloat16.
  layer = 2 * sizes["target_weights"] // config.num_layers
  if on_disk:
    weights = rest + layer + packed // config.num_layers
  else:
    weights = 2 * sizes["target_weights"] + rest + packed
  if devices > 1:
    # The rows that lie on the mesh, and a layer gathered from all of them.
    weights += (rest + layer) // model + (layer if model > 1 else 0)
  # The workspace belongs to one step at a time, so that its largest array decides.
  largest = max(
    max(width**2 for width in widths),
    max(rows * width for rows, width in linears),
    length * hidden,
  )
  feature = tokens * _itemsize(config)
  return {
    "process": PROCESS_BYTES,
    "weights": weights,
    # The float model's hidden states, and those of each recovery fit.
    "calibration stream": (1 + RECOVERY_FITS) * feature * d,
    # Of one layer: what the linears read, and the values that attention's fit aims at.
    "captured inputs": feature * (sum(widths) + values),
    "Hessians": 4 * sum(width**2 for width in widths),
    "workspace": 4 * WORKSPACE_ARRAYS * largest,
  }
