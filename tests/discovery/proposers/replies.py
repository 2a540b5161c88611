"""What a language model answered, in substance: controls, questions and programs.

Recreated from answers that one gave on a small model of the Llama family, whose
programs all ran and whose experiments failed for what these tests hold.
"""

import json

NEIGHBOUR = {"kind": "shuffle_stats", "hooks": ["encode_act"]}
DESCENT = '''
def signed_values(index, exponent):
  """Returns the values of signed indices -7..7 of the E2M1 grid."""
  table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
  magnitude = table[jnp.abs(index)]
  return jnp.ldexp(jnp.where(index < 0, -magnitude, magnitude), exponent)


def descended(block, gram, cross, exponent):
  """Returns codes after the best single steps of one code on the output error."""
  codes = nearest_codes(block, exponent)
  level = (codes & 7).astype(jnp.int32)
  index = jnp.where(codes >= 8, -level, level)
  pull = cross @ block

  def step(_, index):
    error = block - signed_values(index, exponent)
    slope = gram @ error + pull
    both = jnp.stack([jnp.clip(index - 1, -7, 7), jnp.clip(index + 1, -7, 7)])
    move = signed_values(index, exponent)[None] - signed_values(both, exponent)
    change = 2.0 * move * slope[None] + move * move * jnp.diagonal(gram)[None]
    best = jnp.argmin(change)
    side, place = best // 32, best % 32
    better = change.reshape(-1)[best] < 0.0
    return index.at[place].set(jnp.where(better, both[side, place], index[place]))

  index = jax.lax.fori_loop(0, {steps}, step, index)
  return (jnp.abs(index) + 8 * (index < 0)).astype(jnp.uint8)


def encode_act(block, gram, cross):
  """Nearest codes at the floor exponent after single-code steps on the output error."""
  floor = block_exponent(block)
  return descended(block, gram, cross, floor), floor
'''
MAP = '''
def hadamard():
  """Returns the orthogonal Sylvester matrix of order 32."""
  matrix = jnp.ones((1, 1), jnp.float32)
  for _ in range(5):
    matrix = jnp.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / jnp.sqrt(jnp.float32(32.0))


def transform(stats):
  """Both moments alike, then flat."""
  eye = jnp.eye(32, dtype=jnp.float64)
  inputs = stats["activation"] + {damping} * jnp.trace(stats["activation"]) / 32.0 * eye
  weights = stats["weight"] + {damping} * jnp.trace(stats["weight"]) / 32.0 * eye
  low = jnp.linalg.cholesky(inputs)
  values, vectors = jnp.linalg.eigh(low.T @ weights @ low)
  values = jnp.maximum(values, 1e-6 * jnp.max(values))
  half = jax.scipy.linalg.solve_triangular(low, eye, lower=True)
  return hadamard() @ ((values ** 0.25)[:, None] * (vectors.T @ half))
'''


def descent(steps=4):
  """The functions of the edit of activations."""
  return DESCENT.replace("{steps}", str(steps))


def balanced(damping="1e-4"):
  """The functions of the edit of the map; the damping 1.1e-4 was a null edit."""
  return MAP.replace("{damping}", damping)


def account(name, **predictions):
  return {"name": name, "statement": f"{name}.", "predictions": predictions}


OWN_METRIC = account(
  "own metric",
  primary={"operator_error": "down", "kl": "down"},
  neighbour={"operator_error": "lost"},
)
SMOOTHING = account(
  "smoothing",
  primary={"operator_error": "down", "kl": "down"},
  neighbour={"operator_error": "kept"},
)


def answer(**changes):
  """The third answer, in the cheap form: what changes, and its question."""
  return {
    "label": "activations descend in the metric of the realized weights",
    "note": "Four best single-code steps on the output error of the block.",
    "code": descent(),
    "residual": "operator_error",
    "explanations": [OWN_METRIC, SMOOTHING],
    "controls": [
      {"name": "neighbour", "intervention": NEIGHBOUR, "statement": "wrong"}
    ],
    **changes,
  }


def text(**changes):
  """The same as a reply."""
  return json.dumps(answer(**changes))
