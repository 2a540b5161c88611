"""How far replicates of one quantized checkpoint lie apart, and why.

  python benchmarks/replicate_noise.py --data ../shared/data [--models llama qwen3]
    [--methods METHOD ...] [--replicates 5]

A replicate is the same checkpoint whose embedding rows are multiplied by 1 + 1e-6 z, z
normal, at evaluation: less than a rounding error of bfloat16. Calibration is 8 rows of
512 tokens of C4, and windows are the first 8 of WikiText-2 and 8 of C4 rows that were
not calibrated on, of 512 tokens as well, as `hires_next.py` cuts them.

For each model and method the result has, by replicate and window, KL from the float
model and the negative log-likelihood; KL of each further replicate from the first; the
same for replicates of the float model; and, for the second replicate, the share of
activation codes that are not the first's, linear after linear, with the relative
difference of what enters each layer.
"""

import functools

import common
import hires_next
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.evaluation.measures import perplexity
from mxjax.layers.quantized_linear import quantized_inputs
from mxjax.run.quantize import run

MODELS = "llama", "qwen3", "mistral", "olmo2"
METHODS = "rtn", "hires:recover=none", "hires", "hires-next"
CLOSE = (
  ("hires", "hires:recover=none"),
  ("hires-next", "hires"),
)
"""Pairs whose difference is told over replicates."""
ORDER = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
"""The linears of a layer as they are computed."""
WINDOWS, CALIBRATION_ROWS, UNSEEN_ROW = 8, 8, 40


def rows_of(tokenizer, text, first, count):
  """Rows of tokens, int32 `[count, 512]`, from row `first` of a text."""
  length = hires_next.SMALL
  ids = tokenizer.encode(text)[first * length : (first + count) * length]
  return np.asarray(ids, np.int32).reshape(count, length)


@functools.partial(jax.jit, static_argnames="model")
def layer_with_codes(model, layer, hidden):
  """Runs a quantized layer; returns its output and each linear's A4 operand."""
  output, taps = model.layer_with_taps(layer, hidden)
  operands = {
    f"{sublayer}/{name}": quantized_inputs(taps[tap], layer[sublayer][name]["weight"])
    for (sublayer, name), tap in model.projection_taps.items()
  }
  return output, operands


def flipped(model, quantized, moved, ids):
  """Where a replicate's codes differ.

  Returns a row for each linear: layer, linear, share of codes that differ, and the
  relative difference of the hidden states that enter the layer.
  """
  both = [
    model.embed(streams.outer_params(model, one), ids) for one in (quantized, moved)
  ]
  found = []
  for index in range(model.num_layers):
    layer = quantized[model.layer_name(index)]
    gap = jnp.linalg.norm(both[1] - both[0]) / jnp.linalg.norm(both[0])
    results = [layer_with_codes(model, layer, hidden) for hidden in both]
    both = [output for output, _ in results]
    for linear in results[0][1]:
      first, second = (operands[linear] for _, operands in results)
      share = float((first != second).mean())
      found.append(
        {"layer": index, "linear": linear, "share": share, "entering": float(gap)}
      )
  return found


def measured(model, params, quantized, windows, replicates):
  """KL, loss and codes of the replicates of one checkpoint."""
  outer = streams.outer_params(model, params)
  ids = [jnp.asarray(window[None]) for window in windows]
  exact = streams.final_hiddens(model, params, ids)
  first, found = None, {"kl": [], "loss": [], "kl_from_first": []}
  for seed in range(replicates):
    moved = perplexity.perturbed(quantized, seed) if seed else quantized
    ours = streams.final_hiddens(model, moved, ids)
    first = ours if first is None else first

    def of(targets, ours=ours):
      each = zip(targets, ours, ids, strict=True)
      values = [hires_next.of_window(model, outer, *one) for one in each]
      return [[float(value[i]) for value in values] for i in (0, 1)]

    divergence, loss = of(exact)
    found["kl"].append(divergence)
    found["loss"].append(loss)
    if seed:
      found["kl_from_first"].append(of(first)[0])
  return found


def tables(entries):
  """The spread of replicates, where codes flip, and close methods over replicates."""
  spread, layers, pairs = [], [], []
  for key, entry in entries.items():
    name, method = key.split(" ", 1)
    kl = np.mean(entry["kl"], axis=1)
    ppl = np.exp(np.mean(entry["loss"], axis=1))
    between = np.mean(entry["kl_from_first"], axis=1)
    told = "{:.5f} ± {:.5f}".format
    spread.append(
      [
        *(name, method, told(kl.mean(), kl.std(ddof=1))),
        f"{ppl.mean():.2f} ± {ppl.std(ddof=1):.2f}",
        f"{between.mean():.2g}",
        "" if method == "float" else f"{between.mean() / kl[0]:.2f}",
      ]
    )
    if "codes" in entry:
      place = lambda row: (row["layer"], ORDER.index(row["linear"].split("/")[1]))
      codes = sorted(entry["codes"], key=place)
      first = next((row for row in codes if row["share"]), None)
      numbers = sorted({row["layer"] for row in codes})
      of = lambda number, what, codes=codes: np.mean(
        [row[what] for row in codes if row["layer"] == number]
      )
      layers.append(
        [
          *(name, method),
          f"{first['layer'] + 1}, {first['linear'].split('/')[1]}" if first else "none",
          " / ".join(f"{100 * of(n, 'share'):.2g}" for n in numbers),
          " / ".join(f"{of(n, 'entering'):.1g}" for n in numbers),
        ]
      )
  for name in dict.fromkeys(key.split(" ", 1)[0] for key in entries):
    for ours, theirs in CLOSE:
      if f"{name} {ours}" in entries and f"{name} {theirs}" in entries:
        both = [entries[f"{name} {method}"] for method in (ours, theirs)]
        cells = []
        for what in ("kl", "loss"):
          values = [np.mean(entry[what], axis=1) for entry in both]
          gap = values[0].mean() - values[1].mean()
          error = sum(v.var(ddof=1) / len(v) for v in values) ** 0.5
          cells += [f"{values[0][0] - values[1][0]:+.5f}", f"{gap:+.5f} ± {error:.5f}"]
        pairs.append([name, f"{ours} less {theirs}", *cells])
  heads = (
    "model,method,KL from float,ppl,KL between replicates,over KL from float",
    "model,method,first code that flips: layer and linear,"
    "% of codes flipped by layer,relative difference of what enters each layer",
    "model,methods,KL by one replicate,over replicates,"
    "ln ppl by one replicate,over replicates",
  )
  return "\n".join(
    common.markdown(head.split(","), lines)
    for head, lines in zip(heads, (spread, layers, pairs), strict=True)
    if lines
  )


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--models", nargs="+", default=MODELS)
  parser.add_argument("--methods", nargs="+", default=METHODS)
  parser.add_argument("--replicates", type=int, default=5)
  options = parser.parse_args()
  made, entries = common.stamp(), {}
  read = lambda file: (options.data / file).read_text()
  c4 = common.c4_text(options.data)
  for name in options.models:
    source = f"models/trained/{name}"
    model, params = models.from_pretrained(source)
    tokenizer = models.load_tokenizer(source)
    calibration = Calibration(model, rows_of(tokenizer, c4, 0, CALIBRATION_ROWS))
    windows = np.concatenate(
      [
        rows_of(tokenizer, read(common.WIKITEXT), 0, WINDOWS),
        rows_of(tokenizer, c4, UNSEEN_ROW, WINDOWS),
      ]
    )
    for method in ("float", *options.methods):
      quantized = params
      if method != "float":
        program = methods.get(method)
        built = run(params, calibration, program, check=False, probe=False)
        quantized = built.params
      entry = measured(model, params, quantized, windows, options.replicates)
      if method != "float":
        moved = perplexity.perturbed(quantized, 1)
        entry["codes"] = flipped(model, quantized, moved, jnp.asarray(windows))
      entries[f"{name} {method}"] = entry
      result = {**made, "perturbation": perplexity.PERTURBATION, "entries": entries}
      common.write(options.out, result, tables(entries))


if __name__ == "__main__":
  main()
