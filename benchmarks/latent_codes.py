"""Whether weight codes can be learned through latent weights from more text.

  python benchmarks/latent_codes.py --data ../shared/data [--model models/trained/llama]
    [--rows 512] [--rates .03 .06] [--runs DIR]

A latent weight is a float from which a code is rounded, at the exponent of its block,
which stays. The forward pass is that of the strict model with these codes; the backward
pass takes the rounding for the identity. Latents begin at the codes of `hires-rotated`
tuned without labels on 128 rows of C4 (draw 128 of `hires_next.py`). Two questions are
asked, on as many of the rows behind those as `--rows`:

  agreement  The gradient of the divergence at all latents is the mean over two halves
             of the rows, in random order. How large is the cosine between the two, for
             1, 2, 4, ... rows in each half?
  learning   Adam takes 64 steps in one pass over all rows, at each of `--rates`, in
             units of a block's scale. What is the divergence on windows of four texts,
             which no row has, and on the windows for choices?

The windows are those of `hires_next.py`. The result file is rewritten after every rate.
"""

import dataclasses
import pathlib
import time

import common
import hires_next
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mxjax import models
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration, replace_weights
from mxjax.layers.linear import LearnedMap
from mxjax.layers.quantized_linear import QuantizedLinear, quantized_inputs
from mxjax.methods.scale_distillation import PredictionDivergence
from mxjax.numerics import mxfp4, pytree_nodes
from mxjax.numerics.precision import HIGHEST
from mxjax.run.quantize import run

METHOD = "hires-rotated+tune:label_weight=0"
FIRST, STEPS, WARMUP, SEED = 184, 64, 5, 0


def scale_of(quantized):
  """The scale of every weight, float32 `[out_features, in_features]`."""
  exponents = quantized.weight.scales.astype(jnp.int32) - mxfp4.SCALE_BIAS
  return jnp.repeat(mxfp4.scale_of(exponents), mxfp4.BLOCK_SIZE, axis=-1)


def rounded(latent):
  """The element values that latents round to, in units of the scale."""
  return mxfp4.round_elements(latent, jnp.zeros_like(latent, jnp.int32))


@pytree_nodes.register
@dataclasses.dataclass(frozen=True)
class LatentCodes(LearnedMap):
  """A strict linear whose codes are rounded from latents, which `factor` holds."""

  def linear(self, x):
    return latent_linear(x, self.factor, self.quantized)


@jax.custom_vjp
def latent_linear(x, latent, quantized: QuantizedLinear):
  inputs = quantized_inputs(x, quantized)
  weight = rounded(latent) * scale_of(quantized)
  outputs = jnp.einsum("in,oi->no", inputs, weight, precision=HIGHEST)
  return outputs.reshape(*x.shape[:-1], -1).astype(x.dtype)


def latent_backward(saved, cotangent):
  x, latent, quantized = saved
  inputs, scale = quantized_inputs(x, quantized), scale_of(quantized)
  rows = cotangent.astype(jnp.float32).reshape(-1, cotangent.shape[-1])
  at_latent = jnp.einsum("no,in->oi", rows, inputs, precision=HIGHEST) * scale
  weight = rounded(latent) * scale
  at_inputs = jnp.einsum("no,oi->ni", rows, weight, precision=HIGHEST)
  blocks = mxfp4.to_blocks(at_inputs)
  if quantized.input_map is not None:
    zeros = jnp.zeros_like(blocks)
    [blocks] = jax.vjp(quantized.input_map.apply, zeros)[1](blocks)
  at_inputs = mxfp4.from_blocks(blocks).reshape(x.shape)
  return at_inputs.astype(x.dtype), at_latent, None


latent_linear.defvjp(lambda *args: (latent_linear(*args), args), latent_backward)


def with_latents(layer, own):
  """A layer whose linears have the codes of their latents."""
  leaves = {}
  for path, latent in own.items():
    sublayer, name = path.split("/")
    leaves[sublayer, name] = LatentCodes(layer[sublayer][name]["weight"], latent)
  return replace_weights(layer, leaves)


class LatentDivergence(PredictionDivergence):
  """The divergence of a model whose codes come from latents."""

  def layer(self, shared, own, hidden, layer):
    del shared
    return self.model.layer(with_latents(layer, own), hidden)


def initial(model, quantized):
  """Latents at the values of their codes, by layer and by path."""
  latents = []
  for index in range(model.num_layers):
    layer = quantized[model.layer_name(index)]
    leaves = {
      f"{sublayer}/{name}": layer[sublayer][name]["weight"]
      for sublayer, name in model.projection_taps
    }
    latents.append(
      {
        path: mxfp4.decode(leaf.weight, jnp.float32) / scale_of(leaf)
        for path, leaf in leaves.items()
      }
    )
  return latents


def installed(model, quantized, latents):
  """The model with the codes of latents."""
  names = [model.layer_name(index) for index in range(model.num_layers)]
  layers = zip(names, latents, strict=True)
  return {**quantized, **{n: with_latents(quantized[n], own) for n, own in layers}}


def agreement(gradient, examples, latents):
  """Cosines between the gradients of two halves, by rows in each half."""
  order = np.random.default_rng(SEED).permutation(len(examples))
  halves, found = [0.0, 0.0], {}
  for number, index in enumerate(order, 1):
    leaves = jax.tree.leaves(gradient(latents, [examples[index]]).own)
    flat = np.concatenate([np.asarray(leaf).ravel() for leaf in leaves])
    halves[number % 2] = halves[number % 2] + flat
    if number > 1 and number & (number - 1) == 0:
      first, second = halves
      norms = np.linalg.norm(first) * np.linalg.norm(second)
      found[number // 2] = float(first @ second / norms)
      print(f"{number // 2} rows in each half: cosine {found[number // 2]:.3f}")
  return found


def learned(gradient, examples, latents, rate):
  """Latents after all steps, and the divergence of every step."""
  order = np.random.default_rng(SEED).permutation(len(examples))
  bounds = np.linspace(0, len(order), STEPS + 1).astype(int)
  schedule = lambda step: (
    rate * jnp.minimum(1, (step + 1) / WARMUP) * (1 - step / STEPS)
  )
  adam = optax.adam(schedule, b1=0.9, b2=0.95)

  @jax.jit
  def update(slope, state, latents):
    with jax.numpy_dtype_promotion("standard"):
      updates, state = adam.update(slope, state, latents)
    return optax.apply_updates(latents, updates), state

  state, divergences = adam.init(latents), []
  for start, end in zip(bounds, bounds[1:], strict=False):
    result = gradient(latents, [examples[index] for index in order[start:end]])
    divergences.append(result.shown)
    latents, state = update(result.own, state, latents)
  return latents, divergences


def changed(before, after):
  """The share of codes that differ."""
  pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
  differ = [np.asarray(rounded(a) != rounded(b)).ravel() for a, b in pairs]
  return float(np.concatenate(differ).mean())


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--model", type=pathlib.Path, help="SmolLM2 without it")
  parser.add_argument("--rows", type=int, default=512)
  parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.06])
  parser.add_argument("--german", type=pathlib.Path, default=hires_next.GERMAN)
  parser.add_argument("--runs", type=pathlib.Path, help="of the build before")
  options = parser.parse_args()
  made = common.stamp("optax")
  source = str(options.model) if options.model else None
  model, params = models.from_pretrained(source)
  texts = hires_next.texts(options.data, options.german, source)
  length = texts.draws[128].shape[1]
  ids = models.load_tokenizer(source).encode(common.c4_text(options.data))
  last = (FIRST + options.rows) * length
  rows = np.asarray(ids[FIRST * length : last], np.int32).reshape(-1, length)
  # The last windows of the text are those on which nothing is chosen or learned.
  assert len(rows) == options.rows and last < len(ids) - 16 * length
  folder = options.runs / f"latents-{model.num_layers}" if options.runs else None
  quantized = run(
    params,
    Calibration(model, texts.draws[128]),
    METHOD,
    check=False,
    probe=False,
    run_dir=folder,
    resume=folder is not None and folder.is_dir(),
  ).params
  latents, kept = initial(model, quantized), {}

  def measured(params_of):
    return {
      part: {
        text: hires_next.measured(model, params, params_of, windows, kept)
        for text, windows in getattr(texts, part).items()
      }
      for part in ("test", "validation")
    }

  each = [jnp.asarray(row[None]) for row in rows]
  teachers = streams.final_hiddens(model, params, each)
  no_labels = jnp.float32(0)
  examples = [
    gradients.Example(row, teacher, no_labels)
    for row, teacher in zip(each, teachers, strict=True)
  ]
  objective = LatentDivergence(model, mxfp4.PAPER_RULES)
  gradient = lambda latents, seen: gradients.gradients(
    objective, quantized, None, latents, seen
  )
  start = measured(quantized)
  as_latents = hires_next.measured(
    model, params, installed(model, quantized, latents), texts.test["C4"], kept
  )
  # The same codes give the same model, but for the order of sums.
  both = np.mean(as_latents["kl"]), np.mean(start["test"]["C4"]["kl"])
  np.testing.assert_allclose(*both, rtol=1e-2)
  result = {
    **made,
    "method": METHOD,
    "model": source or "SmolLM2-135M-Instruct",
    "rows": list(rows.shape),
    "sources": texts.sources,
    "code": hires_next.code_digest(),
    "start": start,
    "agreement_by_rows": agreement(gradient, examples, latents),
    "learned": {},
  }
  common.write(options.out, result)
  for rate in options.rates:
    begun = time.perf_counter()
    new, divergences = learned(gradient, examples, latents, rate)
    seconds = time.perf_counter() - begun
    found = measured(installed(model, quantized, new))
    result["learned"][str(rate)] = {
      "changed_codes": changed(latents, new),
      "divergence": divergences,
      "seconds": seconds,
      **found,
    }
    mean = lambda part, text: np.mean(part["test"][text]["kl"])
    moves = {
      text: f"{mean(found, text) / mean(start, text) - 1:+.1%}" for text in texts.test
    }
    print(f"rate {rate}, {seconds:.0f} s: KL", moves, flush=True)
    common.write(options.out, result)


if __name__ == "__main__":
  main()
