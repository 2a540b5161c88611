"""The other side of the questions: torch in BF16, written as its users would.

Weights of q, k, v and of gate, up are fused, attention is SDPA, and what stands before
and after it is compiled. Norms of queries and keys are there, as in `gpu_models`.
"""

import functools

import torch
import torch.nn.functional as F

EPS, BASE = 1e-6, 1e6


def device():
  """Where the baseline runs: a CPU in a rehearsal."""
  return "cuda" if torch.cuda.is_available() else "cpu"


def normal(rows, columns):
  """A random weight `[rows, columns]`."""
  made = torch.randn(rows, columns, dtype=torch.bfloat16, device=device())
  return made.mul_(columns**-0.5)


class Model:
  """A decoder of random weights; `is_compiled` says whether its layers are compiled."""

  def __init__(self, shape, layers, is_compiled):
    d, inside = shape.hidden, shape.heads * shape.head_dim
    both = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    self.shape = shape
    self.layers = [
      {
        "qkv": normal(both, d),
        "o": normal(d, inside),
        "gate_up": normal(2 * shape.intermediate, d),
        "down": normal(d, shape.intermediate),
      }
      for _ in range(layers)
    ]
    self.head, self.embedding = (normal(shape.vocabulary, d) for _ in range(2))
    ones = lambda n: torch.ones(n, dtype=torch.bfloat16, device=device())
    self.norm, self.of_head = ones(d), ones(shape.head_dim)
    self.before, self.after = self._before, self._after
    if is_compiled:
      make = functools.partial(torch.compile, dynamic=True)
      self.before, self.after = make(self._before), make(self._after)

  def _normalized(self, x):
    return F.rms_norm(x, x.shape[-1:], self.norm, EPS)

  def _before(self, x, w, cos, sin):
    def turned(a):
      left, right = a.chunk(2, -1)
      return a * cos + torch.cat([-right, left], -1) * sin

    batch, length, _ = x.shape
    heads, kv_heads, width = (
      self.shape.heads,
      self.shape.kv_heads,
      self.shape.head_dim,
    )
    y = self._normalized(x) @ w["qkv"].T
    y = y.view(batch, length, -1, width).transpose(1, 2)
    q, k, v = y.split([heads, kv_heads, kv_heads], 1)
    q, k = (F.rms_norm(a, (width,), self.of_head, EPS) for a in (q, k))
    return turned(q), turned(k), v

  def _after(self, x, attended, w):
    x = x + attended @ w["o"].T
    gate, up = (self._normalized(x) @ w["gate_up"].T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w["down"].T

  def hidden(self, ids):
    """Normalized states `[B, T, d]` that leave the last layer."""
    batch, length = ids.shape
    half = torch.arange(self.shape.head_dim // 2, device=device(), dtype=torch.float32)
    turns = torch.arange(length, device=device())[:, None] * BASE ** (-half / len(half))
    turns = torch.cat([turns, turns], -1)
    angles = turns.cos().bfloat16(), turns.sin().bfloat16()
    x = self.embedding[ids]
    for w in self.layers:
      q, k, v = self.before(x, w, *angles)
      y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
      x = self.after(x, y.transpose(1, 2).reshape(batch, length, -1), w)
    return self._normalized(x)
