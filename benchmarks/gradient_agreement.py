"""How far the gradients of two halves of a text agree on weights and factors.

  python benchmarks/gradient_agreement.py --data ../shared/data
    [--model models/trained/llama] [--draw 512] [--runs DIR]

Tuning learns factors on the inputs of linears and, with `code_rate`, the codes of their
weights (`mxjax/methods/scale_distillation.py`). Both learn from the gradient of the
divergence from the float model. What a text says of them by chance, another one does
not say. So the rows of a calibration draw of `hires_next.py` are split into two halves,
in random order, and the question is how large the cosine between the mean gradients of
the two is, for 1, 2, 4, ... rows in each half. The model is one that `hires-rotated`
quantized on the same rows, before tuning, and no labels are in the loss.

By default the draw is the one with as many tokens as the paper: 128 rows of 2,048 for
SmolLM2-135M-Instruct, 512 of 512 for a small model. With `--runs` the layers come from
the run folder of `hires_next.py`, or go there.
"""

import pathlib

import common
import hires_next
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration import gradients, streams
from mxjax.calibration.calibration import Calibration
from mxjax.methods.scale_distillation import PredictionDivergence
from mxjax.numerics import mxfp4

METHOD = "hires-rotated+tune:label_weight=0:code_rate=0.03"
SEED = 0


def agreement(gradient, count):
  """Cosines between the gradients of two halves, by part and rows in each half."""
  halves, found = {"factors": [0.0, 0.0], "codes": [0.0, 0.0]}, {}
  for number, index in enumerate(np.random.default_rng(SEED).permutation(count), 1):
    own = gradient(index)
    parts = {
      "factors": [[layer["linears"], layer["taps"]] for layer in own],
      "codes": [layer["codes"] for layer in own],
    }
    for part, tree in parts.items():
      flat = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(tree)])
      halves[part][number % 2] = halves[part][number % 2] + flat
    if number > 1 and number & (number - 1) == 0:
      found[number // 2] = {
        part: float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
        for part, (a, b) in halves.items()
      }
      print(f"{number // 2} rows in each half:", found[number // 2], flush=True)
  return found


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--model", help="a folder; SmolLM2-135M-Instruct if omitted")
  parser.add_argument("--draw", type=int)
  parser.add_argument("--german", type=pathlib.Path, default=hires_next.GERMAN)
  parser.add_argument("--runs", type=pathlib.Path, help="a folder of run folders")
  options = parser.parse_args()
  by_default = hires_next.SMALL_AMOUNT if options.model else hires_next.PAPER_AMOUNT
  draw = options.draw or by_default
  made = common.stamp("optax")
  model, params = models.from_pretrained(options.model)
  texts = hires_next.texts(options.data, options.german, options.model)
  rows, program = texts.draws[draw], methods.get(METHOD)
  folder = options.runs and options.runs / hires_next.folder_of(
    hires_next.code_digest(hires_next.TUNING), options.model, draw, program
  )
  built = hires_next.build(
    params, Calibration(model, rows), hires_next.untuned(program), {}, folder
  )
  quantized = built.params
  layers = [quantized[model.layer_name(i)] for i in range(model.num_layers)]
  own = program.tune.initial(layers, model)
  objective = PredictionDivergence(model, mxfp4.PAPER_RULES)

  def gradient(index):
    ids = jnp.asarray(rows[index][None])
    [teacher] = streams.final_hiddens(model, params, [ids])
    example = gradients.Example(ids, teacher, jnp.float32(0))
    return gradients.gradients(objective, quantized, None, own, [example]).own

  size = lambda part: sum(
    leaf.size for layer in own for leaf in jax.tree.leaves(layer[part])
  )
  common.write(
    options.out,
    {
      **made,
      "method": METHOD,
      "model": options.model or "SmolLM2-135M-Instruct",
      "draw": draw,
      "rows": list(rows.shape),
      "numbers": {"factors": size("linears") + size("taps"), "codes": size("codes")},
      "sources": texts.sources,
      "code": hires_next.code_digest(),
      "agreement_by_rows": agreement(gradient, len(rows)),
    },
  )


if __name__ == "__main__":
  main()
