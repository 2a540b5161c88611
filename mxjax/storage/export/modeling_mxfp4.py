"""Runs a strict MXFP4 W4A4 model, exported by mxjax, in transformers.

  model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Every quantized linear maps its inputs, rounds each block of 32 to MXFP4 (E2M1 elements,
one E8M0 scale), improves one or a few codes of a block, and multiplies by the decoded
weight. This is the model's arithmetic in plain torch, on any device; it is not fast.
This file needs torch and transformers only.
"""

import torch
import transformers
from torch import nn

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
  """Decodes uint8 `[out, in / 2]` and E8M0 bytes `[out, in / 32]` to float32."""
  pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
  grid = torch.tensor(MAGNITUDES, device=codes.device)
  elements = torch.cat([grid, -grid])[pairs.long()]
  exponents = scales.int().sub(127).repeat_interleave(BLOCK, -1)
  return torch.ldexp(elements, exponents)


def nearest(
  blocks: torch.Tensor, rounds_up: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
  """Rounds float32 `[..., 32]` to element values and their scale `[..., 1]`.

  The scale is two binary orders below that of the largest magnitude, or one if the
  magnitude rounds up to the next power of two; ties go to the larger magnitude. A block
  with inf or NaN becomes NaN.
  """
  largest = blocks.abs().amax(-1, keepdim=True)
  mantissa, exponent = torch.frexp(largest)
  if rounds_up:
    exponent = exponent + (mantissa >= 0.875)
  exponent = (exponent - 3).clamp(-127, 127)
  scaled = torch.ldexp(blocks.abs(), -exponent)
  edges = torch.tensor(MIDPOINTS, device=blocks.device)
  grid = torch.tensor(MAGNITUDES, device=blocks.device)
  magnitude = grid[torch.bucketize(scaled.contiguous(), edges, right=True)]
  scale = torch.ldexp(torch.ones_like(largest), exponent)
  scale = torch.where(largest.isfinite(), scale, torch.nan)
  return torch.copysign(magnitude, blocks), scale


def refine(
  x: torch.Tensor,
  gram: torch.Tensor,
  cross: torch.Tensor | None,
  changes: int = 1,
  rounds_up: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
  """Rounds blocks `[n, blocks, 32]`, and changes codes of each where this helps.

  Changing coordinate i from q_0 to c changes the squared output error of the block by
  2 delta [G d - K x]_i + delta^2 G_ii, with delta = c - q_0 and d = q_0 - x. `gram` (G)
  and `cross` (K, zero if None) are `[blocks, 32, 32]`. The largest decrease wins; at
  ties the lowest coordinate, then the value toward zero. Further changes know of those
  before them.
  """
  values, scale = nearest(x, rounds_up)
  product = lambda table, rows: torch.einsum("bij,nbj->nbi", table, rows)
  slope = product(gram, values * scale - x)
  if cross is not None:
    slope = slope - product(cross, x)
  curvature = gram.diagonal(dim1=-2, dim2=-1)
  for turn in range(changes):
    chosen = changed(values, scale, slope, curvature)
    if turn + 1 < changes:
      slope = slope + product(gram, (chosen - values) * scale)
    values = chosen
  return values, scale


def changed(
  values: torch.Tensor,
  scale: torch.Tensor,
  slope: torch.Tensor,
  curvature: torch.Tensor,
) -> torch.Tensor:
  """Returns the values after the best change of one code of each block."""
  # The score is a parabola in c, so its minimum over the grid is beside its vertex.
  vertex = torch.where(slope == 0, values, values - slope / (curvature * scale))
  size = vertex.abs()
  step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
  inner = torch.floor(size / step) * step
  outer = torch.copysign((inner + step).clamp(max=6), vertex)
  inner = torch.copysign(inner.clamp(max=6), vertex)

  def score(candidate: torch.Tensor) -> torch.Tensor:
    delta = (candidate - values) * scale
    return 2 * delta * slope + delta * delta * curvature

  inner_score, outer_score = score(inner), score(outer)
  best = torch.minimum(inner_score, outer_score)
  candidate = torch.where(outer_score < inner_score, outer, inner)
  place = best.argmin(-1, keepdim=True)
  is_better = best.gather(-1, place) < 0
  chosen = torch.where(is_better, candidate.gather(-1, place), values.gather(-1, place))
  return values.scatter(-1, place, chosen)


class MXFP4Linear(nn.Module):
  """A strict W4A4 linear; its buffers say what it does.

  Buffers: `weight_packed`, `weight_scale`; the input map as `input_signs` `[in]`,
  `input_mix` `[blocks, blocks]` over blocks and `input_blocks` `[blocks or 1, 32, 32]`
  inside them; `refine_gram` (upper triangles, `[blocks, 528]`), with `refine_cross` or
  with `refine_how`, the number of changes and whether exponents round up;
  `inputs_float` where inputs are not rounded (weight-only, W4A16); `clip_low` and
  `clip_high` `[blocks]`; `bias`; `output_scale` and `output_shift` `[out]`, which apply
  last.
  """

  def __init__(self, shapes: dict[str, tuple[list[int], str]]) -> None:
    """Allocates the buffers, given as shape and dtype by name."""
    super().__init__()
    for name, (shape, dtype) in shapes.items():
      empty = torch.zeros(shape, dtype=getattr(torch, dtype))
      self.register_buffer(name, empty)

  def _mapped(self, blocks: torch.Tensor) -> torch.Tensor:
    """Applies the input map to float32 `[n, blocks, 32]`."""
    has = self._buffers
    if "input_signs" in has:
      blocks = blocks * self.input_signs.float().view(1, -1, BLOCK)
    if "input_mix" in has:
      blocks = torch.einsum("ab,nak->nbk", self.input_mix, blocks)
    if "input_blocks" in has:
      matrices = self.input_blocks.float().expand(blocks.shape[1], BLOCK, BLOCK)
      blocks = torch.einsum("bij,nbj->nbi", matrices, blocks)
    if "clip_low" in has:
      low = self.clip_low[:, None] * blocks.amin(-1, keepdim=True)
      high = self.clip_high[:, None] * blocks.amax(-1, keepdim=True)
      blocks = blocks.clamp(low, high)
    return blocks

  def _rounded(self, blocks: torch.Tensor) -> torch.Tensor:
    """Returns the decoded legal A4 values of mapped inputs, or the inputs."""
    if "inputs_float" in self._buffers:
      return blocks
    if "refine_gram" not in self._buffers:
      values, scale = nearest(blocks)
      return values * scale
    rows, columns = torch.triu_indices(BLOCK, BLOCK, device=blocks.device)
    gram = blocks.new_zeros(self.refine_gram.shape[0], BLOCK, BLOCK)
    gram[:, rows, columns] = self.refine_gram.float()
    gram[:, columns, rows] = self.refine_gram.float()
    if "refine_cross" in self._buffers:
      values, scale = refine(blocks, gram, self.refine_cross.float())
    else:
      changes, rounds_up = map(int, self.refine_how.tolist())
      values, scale = refine(blocks, gram, None, changes, bool(rounds_up))
    return values * scale

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Maps `[..., in]` to `[..., out]`, same dtype."""
    blocks = x.float().reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    operand = self._rounded(self._mapped(blocks)).reshape(x.shape)
    weight = decode(self.weight_packed, self.weight_scale)
    # Rounded operands are exact in bfloat16, and not always in float16.
    wide = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    y = nn.functional.linear(operand.to(wide), weight.to(wide))
    for name in ("bias", "output_scale", "output_shift"):
      if name in self._buffers:
        other = self._buffers[name].float()
        y = y.float() * other if name == "output_scale" else y.float() + other
    return y.to(x.dtype)


def _strict(base: type) -> type:
  """Returns a model class of transformers with strict linears in place of its own."""

  class Strict(base):
    # Maps, tables and scales are float32 in every dtype of the model.
    _keep_in_fp32_modules_strict = [
      *("input_mix", "input_blocks", "refine_gram", "refine_cross"),
      *("clip_low", "clip_high", "output_scale", "output_shift"),
    ]

    def __init__(self, config: transformers.PretrainedConfig) -> None:
      super().__init__(config)
      for path, shapes in config.mxfp4["linears"].items():
        parent, _, name = path.rpartition(".")
        setattr(self.get_submodule(parent), name, MXFP4Linear(shapes))

  Strict.__name__ = Strict.__qualname__ = f"MXFP4{base.__name__}"
  return Strict


for _family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Olmo2"):
  _base = getattr(transformers, f"{_family}ForCausalLM")
  globals()[f"MXFP4{_base.__name__}"] = _strict(_base)
