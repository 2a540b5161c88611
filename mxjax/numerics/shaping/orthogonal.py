r"""Orthogonal matrices: Hadamards of many orders, and Cayley gradient steps.

A step of Cayley SGD moves X along the curve
:math:`Y(\alpha) = (I - \tfrac{\alpha}{2} S)^{-1} (I + \tfrac{\alpha}{2} S) X` with a
skew-symmetric S computed from the gradient; five fixed-point iterations replace the
inverse.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mxjax import compilation
from mxjax.numerics.precision import HIGHEST

CAYLEY_ITERATIONS = 5
EPSILON = 1e-8
RENEWAL = 101
"""One step in this many re-orthonormalizes first."""


def _is_prime(number: int) -> bool:
  return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


def _paley(order: int) -> np.ndarray | None:
  """Builds a Hadamard matrix of an order by one of Paley's constructions, or None."""
  # Paley's first construction takes a prime 3 mod 4 to the order p + 1, the second one
  # 1 mod 4 to 2 (p + 1). Powers of primes would need arithmetic of their fields.
  for prime, second in ((order - 1, False), (order // 2 - 1, True)):
    if not _is_prime(prime) or prime % 4 != (1 if second else 3):
      continue
    squares = {i * i % prime for i in range(1, prime)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, prime)])
    index = np.arange(prime)
    core = character[(index[:, None] - index[None, :]) % prime]
    bordered = np.zeros((prime + 1, prime + 1))
    bordered[0, 1:] = 1
    bordered[1:, 0] = 1 if second else -1
    bordered[1:, 1:] = core
    identity = np.eye(prime + 1)
    if not second:
      return bordered + identity
    plus, minus = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return np.kron(bordered, plus) + np.kron(identity, minus)
  return None


def hadamard_any(order: int) -> np.ndarray | None:
  """Builds a normalized Hadamard matrix as a small Paley matrix times a power of two.

  Powers of two give Sylvester's matrix. Returns float64 `[order, order]`, or None if no
  such construction is available.
  """
  odd = order
  while odd % 2 == 0:
    odd //= 2
  # Doubled as long as it divides the order; above 2, every order is a multiple of four.
  core: int = odd
  base = np.ones((1, 1)) if odd == 1 else None
  while base is None and order % (2 * core) == 0:
    core *= 2
    base = _paley(core) if core % 4 == 0 else None
  if base is None:
    return None
  while len(base) < order:
    base = np.block([[base, base], [base, -base]])
  return base / np.sqrt(order)


def random_rotation(order: int, seed: int) -> tuple[np.ndarray, str]:
  """Draws a Hadamard matrix with random signs, or a random orthogonal matrix.

  Returns float64 `[order, order]`, and `hadamard` or `random orthogonal`.
  """
  rng = np.random.default_rng(seed)
  matrix = hadamard_any(order)
  if matrix is not None:
    return matrix * rng.choice([-1.0, 1.0], order)[:, None], "hadamard"
  # With a positive diagonal of R, Q is uniformly distributed; LAPACK leaves the signs
  # open.
  factor, triangle = np.linalg.qr(rng.standard_normal((order, order)))
  return factor * np.sign(np.diag(triangle))[None, :], "random orthogonal"


@compilation.jit()
def renewed(matrix: jax.Array) -> jax.Array:
  """Returns the orthogonal factor of QR with a positive diagonal; `[..., n, n]`."""
  factor, triangle = jnp.linalg.qr(matrix)
  signs = jnp.sign(jnp.diagonal(triangle, axis1=-2, axis2=-1))
  return factor * signs[..., None, :]


@compilation.jit(static_argnames="momentum")
def cayley_step(
  matrix: jax.Array,
  velocity: jax.Array,
  gradient: jax.Array,
  rate: jax.Array,
  momentum: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Takes one descent step that keeps a matrix orthogonal.

  `matrix` is float32 `[..., n, n]`; `velocity` is that of the previous step, initially
  zeros, and `momentum` the fraction of it that is kept; `rate` is the largest step, and
  a bound from the size of the `gradient` is often smaller. Returns the new matrix and
  velocity.
  """
  product = functools.partial(jnp.matmul, precision=HIGHEST)
  # Rounding takes rows off their length of one.
  norm = jnp.sqrt((matrix * matrix).sum(-1, keepdims=True))
  x = matrix / norm
  descent = momentum * velocity - gradient.mT
  a = product(descent, x)
  half = a - 0.5 * product(x.mT, product(x, a))
  skew = half - half.mT
  # The 1-norm of S bounds its spectral norm. With a step of at most its inverse, every
  # fixed-point iteration at least halves the error.
  largest = jnp.abs(skew).sum(-2).max(-1)[..., None, None]
  step = jnp.minimum(1.0 / (largest + EPSILON), rate)
  y = x.mT + step * descent
  for _ in range(CAYLEY_ITERATIONS):
    y = x.mT + step * product(skew, 0.5 * (x.mT + y))
  return y.mT, product(skew, x.mT)
