"""HiRes as a program: passes of blocks, of linears, of value heads and of MLPs.

Blocks: second moments give the reference chart, errors of one encoding in the chart
give the interaction K, errors in the coordinates of T propose the balance D, its three
trials encode the weights, and J_b of the encoded operands accepts one. Linears: one
pass sums the Hessian, and rows are encoded by GPTQ. Heads and MLPs: two recovery fits.
"""

import jax
import jax.numpy as jnp

PLAN = {
  "transform": "solved",
  "passes": 5,
  "curvature": "solved",
  "tables": "measured",
  "attention": True,
  "mlp": True,
}
GRID = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# Codes of columns [32, n], whose values share a scale along the first axis.
def exponents(columns):
  """Returns the floor of log2 of each column's largest magnitude, minus two."""
  peak = jnp.max(jnp.abs(columns), axis=0)
  field = jax.lax.bitcast_convert_type(peak, jnp.int32) >> 23
  return jnp.clip(field - 129, -127, 127).astype(jnp.int32)


def nearest(values, exponent):
  """Returns the nearest codes; a tie takes the larger magnitude."""
  scaled = jnp.ldexp(jnp.abs(values), -exponent)
  index = sum((scaled >= edge).astype(jnp.int32) for edge in EDGES)
  return (index + 8 * jnp.signbit(values)).astype(jnp.uint8)


def element(codes, exponent):
  """Returns the values of codes."""
  magnitude = jnp.array(GRID, jnp.float32)[(codes & 7).astype(jnp.int32)]
  return jnp.ldexp(jnp.where(codes >= 8, -magnitude, magnitude), exponent)


def rounded(columns):
  """Returns the values of the nearest codes."""
  return element(nearest(columns, exponents(columns)), exponents(columns))


def gptq(columns, upper, exponent):
  """Returns codes, values and scaled errors of a block, in the order of its rows."""

  def coordinate(i, state):
    codes, values, errors = state
    target = columns[i] - product(upper[:, i], errors)
    code = nearest(target, exponent)
    value = element(code, exponent)
    error = (target - value) / upper[i, i]
    return codes.at[i].set(code), values.at[i].set(value), errors.at[i].set(error)

  zeros = jnp.zeros(columns.shape, jnp.float32)
  start = jnp.zeros(columns.shape, jnp.uint8), zeros, zeros
  return jax.lax.fori_loop(0, 32, coordinate, start)


def code_scores(values, gram, slope, exponent):
  """Returns what each of the 16 codes in each place would add to the squared error."""
  table = jnp.array([*GRID, *(-value for value in GRID)], jnp.float32)
  change = jnp.ldexp(table[:, None], exponent)[None] - values[:, None]
  linear = 2 * change * slope[:, None]
  return linear + change * change * jnp.diagonal(gram)[:, None, None]


# Matrices.
def product(a, b):
  """Multiplies at full precision."""
  return jnp.matmul(a, b, precision="highest")


def moment(a, b):
  """Sums a column of one operand times the same column of another, in float64."""
  return product(a.astype(jnp.float64), b.astype(jnp.float64).T)


def slots(*matrices):
  """Fills the state or the sums with matrices, or numbers, the first ones first."""
  filled = [jnp.broadcast_to(jnp.float64(entry), (32, 32)) for entry in matrices]
  return jnp.stack(filled + (12 - len(filled)) * [jnp.zeros((32, 32))])


def hadamard():
  """Returns the normalized matrix R_H."""
  matrix = jnp.ones((1, 1), jnp.float64)
  for _ in range(5):
    matrix = jnp.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / jnp.sqrt(jnp.float64(32))


def unit_volume(matrix):
  """Divides by the 32nd root of the determinant."""
  return matrix * jnp.exp(-jnp.linalg.slogdet(matrix)[1] / 32)


def input_folds(matrix, index):
  """Returns what a tile adds to the fold of its sequence."""
  odd = (index % 2).astype(jnp.float64)
  return slots((1 - odd) * matrix, odd * matrix, 32 * (1 - odd), 32 * odd)


def means(sums):
  """Returns the means of both folds."""
  return sums[:2] / jnp.maximum(sums[2:4], 1.0)


# Pass 0: second moments, and the chart P_ref.
def input_moments(tile, index, state):
  """Sums x x' by fold: even and odd sequences."""
  return input_folds(moment(tile, tile), index)


def weight_moments(tile, index, state):
  """Sums w w' by fold: even and odd rows."""
  return slots(*(moment(tile[:, n::2], tile[:, n::2]) for n in (0, 1)), 16, 16)


def capped(log_values, bound):
  """Projects onto the box of a zero sum, by its sorted breakpoints."""
  kinks = jnp.sort(jnp.concatenate([log_values - bound, log_values + bound]))
  sums = jnp.clip(log_values[None] - kinks[:, None], -bound, bound).sum(1)
  left = jnp.clip(jnp.sum(sums >= 0) - 1, 0, kinks.shape[0] - 2)
  drop = sums[left] - sums[left + 1]
  share = sums[left] / jnp.where(drop > 0, drop, 1)
  shift = kinks[left] + share * (kinks[left + 1] - kinks[left])
  return jnp.clip(log_values - shift, -bound, bound)


def solve_chart(input_sums, weight_sums, state):
  """Balances the moments of inputs and weights: P_ref = Cap_8(M_0^(-1/2))."""
  mean = lambda sums: (sums[0] + sums[1]) / (sums[2] + sums[3])
  inputs, weights = mean(input_sums), mean(weight_sums)
  ridge = lambda m: m + (0.01 * jnp.trace(m) / 32 + 2.0**-30) * jnp.eye(32)
  first = unit_volume(ridge(inputs))
  # Two decompositions at once can hang on two cores; see `mxjax.numerics.lapack`.
  later = jnp.where(jnp.sum(first) == 2.0**126, jnp.nan, ridge(weights))
  inverse = jnp.linalg.inv(later)
  middle = 0.5 * (first + unit_volume(inverse))
  values, vectors = jnp.linalg.eigh(0.5 * (middle + middle.T))
  spectrum = capped(-0.5 * jnp.log(values), 0.5 * jnp.log(jnp.float64(8)))
  chart = (vectors * jnp.exp(spectrum)) @ vectors.T
  fold = jnp.linalg.inv(chart).T
  charted = chart @ means(input_sums) @ chart.T
  folded = fold @ means(weight_sums) @ fold.T
  total = weight_sums[0] + weight_sums[1]
  return slots(chart, hadamard() @ fold, *charted, *folded, inputs, total)


# Pass 1: errors of one encoding in the chart, the interaction K, and T.
def anchor_inputs(tile, index, state):
  """Sums e y' by fold, rotated."""
  mapped = product(jnp.float32(hadamard() @ state[0]), tile)
  return input_folds(moment(rounded(mapped) - mapped, mapped), index)


def anchor_weights(tile, index, state):
  """Sums e v' by fold, rotated."""
  mapped = product(jnp.float32(state[1]), jnp.float32(tile))
  error = rounded(mapped) - mapped
  return slots(*(moment(error[:, n::2], mapped[:, n::2]) for n in (0, 1)), 16, 16)


def modes(z):
  """Returns reciprocal and directed coordinates of all pairs, `[2, ..., 32, 32]`."""
  swapped = jnp.swapaxes(z, -1, -2)
  return jnp.stack([z + swapped, z - swapped]) / jnp.sqrt(jnp.float64(2))


def interaction(inputs, weights, input_cross, weight_cross):
  """Solves for K; the arguments are the anchor statistics of two folds."""
  c = jnp.diagonal(inputs, axis1=1, axis2=2)
  h = jnp.diagonal(weights, axis1=1, axis2=2)
  a, b = h[:, :, None] * input_cross, -c[:, None, :] * weight_cross
  others = 1 - jnp.eye(32)
  p = modes((a + b) * others)
  mean, of_a, of_b = p.mean(1), modes(a.mean(0)), modes(b.mean(0))
  own = 0.5 * (jnp.abs(of_a) + jnp.abs(of_b) - jnp.abs(of_a + of_b))
  threshold = 0.5 * jnp.abs(p[:, 0] - p[:, 1]) + own
  excess = jnp.maximum(jnp.abs(mean[1]) - jnp.abs(mean[0]), 0)
  threshold = threshold.at[1].add(excess)
  floor = 2.0**-30 * h.mean(1) * c.mean(1)
  q = (2 + 2.0**-8) * h[:, :, None] * c[:, None, :] + floor[:, None, None]
  middle = (q * others).sum() / (2 * 32 * 31) + 2.0**-30
  q_hat = 1 + (q.sum(0) + q.sum(0).T) / (4 * middle)
  scale = middle * jnp.sqrt(q_hat)
  z = jnp.sign(mean) * jnp.maximum(jnp.abs(mean / scale) - threshold / scale, 0)
  # Both orders of a pair are here, so the radius 1/8 has a factor of root two.
  norm, radius = jnp.sqrt((z * z).sum()), jnp.sqrt(jnp.float64(2)) / 8
  v = z * jnp.minimum(1, radius / jnp.where(norm > 0, norm, 1))
  return (v[0] + v[1]) / jnp.sqrt(2 * q_hat)


def solve_pairs(input_sums, weight_sums, state):
  """Installs T = R_H G P_ref, and the moments in its coordinates."""
  rotation = hadamard()
  crosses = rotation @ means(input_sums) @ rotation
  of_weights = jnp.swapaxes(rotation @ means(weight_sums) @ rotation, 1, 2)
  k = interaction(state[2:4], state[4:6], crosses, of_weights)
  transform = rotation @ unit_volume(jnp.eye(32) + k) @ state[0]
  fold = jnp.linalg.inv(transform).T
  inputs, weights = transform @ state[6] @ transform.T, fold @ state[7] @ fold.T
  return slots(transform, fold, inputs, weights)


# Pass 2: errors in the coordinates of T, the proposal of D, and GPTQ of its trials.
def balance_inputs(tile, index, state):
  """Sums e e' and counts the tokens."""
  mapped = product(jnp.float32(state[0]), tile)
  error = rounded(mapped) - mapped
  return slots(moment(error, error), 32)


def balance_weights(tile, index, state):
  """Sums e e'."""
  mapped = jnp.float32(product(state[1], tile))
  error = rounded(mapped) - mapped
  return slots(moment(error, error))


def proposal(risk_a, risk_w):
  """Returns u of eight subgroups, from the risks of inputs and weights."""
  ordered = jnp.sort(risk_a + risk_w)
  floor = 2.0**-12 * 0.5 * (ordered[3] + ordered[4])
  left, right = risk_a + floor, risk_w + floor
  is_positive = jnp.all((left > 0) & (right > 0))
  ratio = jnp.where(is_positive, left, 1) / jnp.where(is_positive, right, 1)
  step = (jnp.log2(ratio) - jnp.mean(jnp.log2(ratio))) / 8
  clipped = lambda shift: jnp.clip(step - shift, -1 / 8, 1 / 8)

  def halve(_, bracket):
    low, high = bracket
    middle = 0.5 * (low + high)
    is_low = jnp.sum(clipped(middle)) > 0
    return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

  ends = jnp.min(step) - 1 / 8, jnp.max(step) + 1 / 8
  low, high = jax.lax.fori_loop(0, 80, halve, ends)
  return jnp.where(is_positive, clipped(0.5 * (low + high)), 0)


def factor(hessian):
  """Returns U with inv(H + .01 mean(diag H)) = U'U, tenfold damping if needed."""
  hessian = jnp.float32(hessian)
  mean = jnp.trace(hessian) / hessian.shape[0]
  eye = jnp.eye(hessian.shape[0], dtype=jnp.float32)

  def attempt(state):
    damping, _ = state
    shift = jnp.where(mean > 0, damping * mean, jnp.float32(1))
    upper = jnp.linalg.cholesky((hessian + shift * eye)[::-1, ::-1])[::-1, ::-1]
    solved = jax.lax.linalg.triangular_solve(upper, eye, left_side=True, lower=False)
    return damping * 10, solved

  again = lambda state: (state[0] < 50) & ~jnp.all(jnp.isfinite(state[1]))
  start = jnp.float32(0.01), jnp.full_like(hessian, jnp.nan)
  return jax.lax.while_loop(again, attempt, start)[1]


def solve_balance(input_sums, weight_sums, state):
  """Proposes D, and factors the Hessian of its full, half and zero step."""
  transform, fold, inputs, gram = state[:4]
  subgroups = lambda a, b: jnp.sum((a * b).reshape(8, 4, 8, 4), axis=(1, 3)).diagonal()
  errors = input_sums[0] / input_sums[1]
  u = proposal(subgroups(gram, errors), subgroups(inputs, weight_sums[0]))
  scales = jnp.stack([jnp.exp2(jnp.repeat(step * u, 4)) for step in (1.0, 0.5, 0.0)])
  rescaled = inputs * scales[:, :, None] * scales[:, None, :]
  uppers = jax.lax.map(factor, rescaled)
  signal = jnp.full((1, 32), jnp.sum(gram * inputs))
  known = jnp.concatenate([scales, signal, jnp.zeros((28, 32))])
  return slots(transform, fold, known, *uppers, *rescaled)


# Pass 3: the weights of every trial.
def trial_weights(tile, index, state):
  """Sums G_Q, K_Q and the part of J_b that needs no inputs, for every trial."""
  folded = product(state[1], tile)

  def trial(scale, upper, inputs):
    scaled = jnp.float32(folded / scale[:, None])
    _, values, _ = gptq(scaled, jnp.float32(upper), exponents(scaled))
    error = scaled - values
    return *tables(scaled, values), jnp.sum(moment(error, error) * inputs)

  trials = zip(state[2, :3], state[3:6], state[6:9], strict=True)
  grams, crosses, terms = zip(*(trial(*t) for t in trials), strict=True)
  return slots(*grams, *crosses, *terms)


def solve_trials(input_sums, weight_sums, state):
  """Keeps T, the scales, and the tables of every trial."""
  return slots(state[0], state[2], *weight_sums[:9])


# Pass 4: J_b of every trial, and the largest step that does not raise it.
def trial_inputs(tile, index, state):
  """Sums what the one-code rule leaves of J_b, and counts the tokens."""
  transform, known, grams, crosses = state[0], state[1], state[2:5], state[5:8]

  def trial(scale, gram, cross):
    gram, cross = jnp.float32(gram), jnp.float32(cross)
    mapped = product(jnp.float32(scale[:, None] * transform), tile)
    exponent, values = exponents(mapped), rounded(mapped)
    difference, mismatch = values - mapped, product(cross, mapped)
    slope = product(gram, difference) - mismatch
    scores = code_scores(values, gram, slope, exponent)
    gain = jnp.minimum(jnp.min(scores, axis=(0, 1)), 0)
    objective = jnp.sum(difference * (slope - mismatch), axis=0) + gain
    return jnp.sum(jnp.float64(objective))

  trials = zip(known[:3], grams, crosses, strict=True)
  return slots(*(trial(*t) for t in trials), 32)


def solve_acceptance(input_sums, weight_sums, state):
  """Installs D T of the accepted step."""
  known = state[1]
  total = (input_sums[:3] / input_sums[3] + state[8:11])[:, 0, 0]
  full, half, identity = total / jnp.maximum(known[3, 0], 2.0**-1022)
  scale = jnp.where(half <= identity, known[1], known[2])
  scale = jnp.where(full <= identity, known[0], scale)
  return slots(scale[:, None] * state[0])


# The hooks.
nothing = lambda tile, index, state: slots(state[0] * 0)


def measure_inputs(tile, index, step, state):
  """Sums what each pass asks of the inputs."""
  passes = [input_moments, anchor_inputs, balance_inputs, nothing, trial_inputs]
  return jax.lax.switch(step, passes, tile, index, state)


def measure_weights(tile, index, step, state):
  """Sums what each pass asks of the weights."""
  passes = [weight_moments, anchor_weights, balance_weights, trial_weights, nothing]
  return jax.lax.switch(step, passes, tile, index, state)


def solve(step, input_sums, weight_sums, curvature, state):
  """Solves each pass."""
  passes = [solve_chart, solve_pairs, solve_balance, solve_trials, solve_acceptance]
  return jax.lax.switch(step, passes, input_sums, weight_sums, state)


def tables(weight, decoded):
  """Sums G_Q and K_Q."""
  return moment(decoded, decoded), moment(decoded, weight - decoded)


def encode_act(block, gram, cross):
  """Nearest codes, of which the best change of one is made if it helps."""
  columns = block[:, None]
  exponent, values = exponents(columns), rounded(columns)
  codes = nearest(columns, exponent)
  slope = product(gram, values - columns) - product(cross, columns)
  scores = code_scores(values, gram, slope, exponent)[..., 0].reshape(-1)
  best = jnp.argmin(scores)
  place, code = best // 16, (best % 16).astype(jnp.uint8)
  chosen = jnp.where(scores[best] < 0, code, codes[place, 0])
  return codes[:, 0].at[place].set(chosen), exponent[0]
