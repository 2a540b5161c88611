"""Source templates of the PTQ cards: what a card puts into a program."""

HADAMARD = """
def hadamard():
  matrix = jnp.ones((1, 1), jnp.float64)
  for _ in range(5):
    matrix = jnp.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / jnp.sqrt(32.0)
"""
ROOT = """
def power(matrix, exponent):
  values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
  floor = 1e-6 * jnp.maximum(jnp.max(values), 1e-30)
  scaled = vectors * jnp.maximum(values, floor) ** exponent
  return scaled @ vectors.T
"""
CHART = (
  HADAMARD
  + ROOT
  + """
def transform(stats):
  half = power(stats['activation'], 0.5)
  back = power(stats['activation'], -0.5)
  middle = power(half @ stats['weight'] @ half, 0.5)
  return hadamard() @ power(back @ middle @ back, {exponent})
"""
)
GPTQ = """
def encode_weight(block, curvature):
  exponent = block_exponent(block)
  def step(index, state):
    codes, errors = state
    target = block[index] - jnp.dot(curvature[:, index], errors)
    code = nearest_codes(target[None], exponent)[0]
    magnitude = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], block.dtype)[code & 7]
    value = jnp.ldexp(jnp.where(code >= 8, -magnitude, magnitude), exponent)
    error = (target - value) / curvature[index, index]
    return codes.at[index].set(code), errors.at[index].set(error)
  zeros = (jnp.zeros(32, jnp.uint8), jnp.zeros(32, block.dtype))
  return jax.lax.fori_loop(0, 32, step, zeros)[0], exponent
"""
DECODE = """
def element(codes, exponent):
  table = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)
  magnitude = table[(codes & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(codes >= 8, -magnitude, magnitude), exponent)
"""
EXPONENT_SEARCH = (
  DECODE
  + """
def searched(block):
  base = block_exponent(block)
  def cost(shift):
    exponent = jnp.clip(base + shift, -127, 127)
    decoded = element(nearest_codes(block, exponent), exponent)
    return jnp.sum(jnp.square(decoded - block))
  costs = jnp.stack([cost(0), cost({first}), cost({second})])
  shifts = jnp.array([0, {first}, {second}], jnp.int32)
  exponent = jnp.clip(base + shifts[jnp.argmin(costs)], -127, 127)
  return nearest_codes(block, exponent), exponent.astype(jnp.int32)
"""
)
ONE_CODE = (
  DECODE
  + """
def refined(block, gram, cross, exponent, codes):
  scale = jnp.ldexp(jnp.float32(1), exponent)
  value = element(codes, exponent)
  slope = gram @ (value - block) - cross @ block
  signs = jnp.array([1.0] * 8 + [-1.0] * 8, jnp.float32)
  grid = signs * jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, jnp.float32)
  delta = grid[None, :] * scale - value[:, None]
  score = 2 * delta * slope[:, None] + delta**2 * jnp.diagonal(gram)[:, None]
  best = jnp.argmin(score.reshape(-1))
  row, code = best // 16, best % 16
  accept = score.reshape(-1)[best] < 0
  chosen = jnp.where(accept, code.astype(jnp.uint8), codes[row])
  return codes.at[row].set(chosen)


def encode_act(block, gram, cross):
  exponent = block_exponent(block)
  codes = nearest_codes(block, exponent)
  for _ in range({rounds}):
    codes = refined(block, gram, cross, exponent, codes)
  return codes, exponent
"""
)
BALANCE = """
def balance(stats):
  tiles = lambda m: m.reshape(8, 4, 8, 4)
  trace = lambda a, b: jnp.einsum('gigj->g', tiles(a * b.T))
  risk_a = trace(stats['weight'], stats['activation_error']) + 1e-30
  risk_w = trace(stats['weight_error'], stats['activation']) + 1e-30
  step = {strength} * jnp.log2(risk_a / risk_w)
  return jnp.clip(step - jnp.mean(step), -1.0, 1.0)
"""
VALUE = """
def recover_value(stats):
  n = stats['count']
  mean, wanted = stats['value'] / n, stats['target'] / n
  spread = stats['value_square'] / n - mean**2
  shared = stats['product'] / n - mean * wanted
  scale = shared / jnp.maximum(spread, 1e-12)
  return jnp.stack([scale, wanted - scale * mean])
"""
MLP = """
def recover_mlp(stats):
  gram, target = jnp.sum(stats['gram'], 0), jnp.sum(stats['target'], 0)
  ridge = {ridge} * jnp.trace(gram) / 3 * jnp.eye(3) + 1e-12 * jnp.eye(3)
  theta = jnp.linalg.solve(gram + ridge, target[:, None])[:, 0]
  return theta * jnp.minimum(1.0, 0.125 / (jnp.sum(jnp.abs(theta)) + 1e-6))
"""
