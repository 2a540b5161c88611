"""What refinement and exponents take off the error of inputs, on a real model.

  python benchmarks/edit_rate_smollm2.py --data ../shared/data [--runs DIR]

SmolLM2-135M-Instruct is quantized by `hires-next` as in draw 1 of `hires_next.py`, and
with `--runs` its run folder is kept there, or a finished one is read. The inputs of
every linear, of the float model on 512 tokens of C4 that calibration did not see, are
then rounded in the coordinates of its map by the rules of `edit_rate.py`, by the
weights that are installed. The table has means over the layers.
"""

import pathlib

import common
import edit_rate
import hires_next
import jax
import jax.numpy as jnp
import numpy as np

from mxjax import methods, models
from mxjax.calibration import streams
from mxjax.calibration.calibration import Calibration
from mxjax.numerics import mxfp4
from mxjax.numerics.realization import one_code
from mxjax.run.quantize import run

TOKENS, STRIDE = 512, 4


def main():
  parser = common.parser(__doc__, data=True)
  parser.add_argument("--german", type=pathlib.Path, default=hires_next.GERMAN)
  parser.add_argument("--runs", type=pathlib.Path, help="a folder of run folders")
  options = parser.parse_args()
  made = common.stamp()
  model, params = models.from_pretrained(None)
  texts = hires_next.texts(options.data, options.german)
  calibration = Calibration(model, texts.draws[1])
  run_dir = options.runs and options.runs / "hires-next"
  built = run(
    params,
    calibration,
    methods.HIRES_NEXT,
    run_dir=run_dir,
    resume=run_dir is not None and run_dir.is_dir(),
    check=False,
    probe=False,
  )
  window = jnp.asarray(texts.test["C4"][:1, :TOKENS])
  hidden = model.embed(streams.outer_params(model, params), window)
  step = jax.jit(model.layer_with_taps)
  found = {}
  for index in range(model.num_layers):
    name = model.layer_name(index)
    hidden, taps = step(params[name], hidden)
    for (sublayer, linear), tap in models.PROJECTION_TAPS.items():
      leaf = built.params[name][sublayer][linear]["weight"]
      # Every fourth token, from the second on: the first has inputs of its own kind.
      rows = taps[tap][0, 1::STRIDE].astype(jnp.float32)
      mapped = leaf.input_map.apply(mxfp4.to_blocks(rows))
      gram = one_code.unpack_symmetric(leaf.rounding.gram)
      found.setdefault(linear, []).append(edit_rate.input_errors(mapped, gram))
  shapes = {
    linear: params[model.layer_name(0)][sublayer][linear]["weight"].shape
    for sublayer, linear in models.PROJECTION_TAPS
  }
  mean = {
    linear: {what: float(np.mean([one[what] for one in each])) for what in each[0]}
    for linear, each in found.items()
  }
  head = [
    "linear",
    "outputs",
    *(edit_rate.HEADINGS[what] for what in next(iter(mean.values()))),
  ]
  lines = [
    [linear, str(shapes[linear][0]), *(f"{value:.3f}" for value in row.values())]
    for linear, row in mean.items()
  ]
  common.write(
    options.out, {**made, "layers": found, "means": mean}, common.markdown(head, lines)
  )


if __name__ == "__main__":
  main()
