"""What one decoding step launches in every layer, counted in the compiled program.

The program of `generate` is compiled for an H200 without one, at Qwen3-8B's shapes in
HiRes form with both corrections, with two layers and with one: the difference is a
layer. A launch is an instruction of XLA's final program that runs on the device (see
`tests/hlo.py`), listed under our kernel's name or under what XLA calls it. The table of
`choice.py` and its candidates are compared, each at the rows that it is for.

  PYTHONPATH=PLUGIN python benchmarks/decode_launches.py

It also predicts, into `results/gpu_predictions.json`, what the candidates for one row
take, before any GPU has run them: the undivided product from the launches that it
saves, the fused one from what its parts need at least. What is assumed is in the
result. Of a layer, refinement and products took 52.8 us on an H200
(`results/gpu_measured.md`: 1.40 and .50 ms of a step of 36 layers).

Needs what `tests/compile_kernels.py` needs. Nothing is run.
"""

import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import sys

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests import compile_kernels

CASES = (
  (1, ()),
  (1, ("int8 undivided",)),
  (8, ()),
  (8, ("float8 stream-K",)),
  (1, ("float8 fused",)),
  (8, ("float8 fused",)),
)
"""Sequences of a step, and the candidates that are tried."""
OWN = re.compile(r"mxjax_\w+")
STEPS = 16


def launches(program):
  """Names of what a turn of the program's loop launches, with how often."""
  from tests import hlo

  made = hlo.Program(program)
  [loop] = [one for one, turns in made.loops() if turns == STEPS]
  found, waiting = collections.Counter(), [loop.called("body")]
  while waiting:
    for one in made.computations[waiting.pop()].values():
      if one.operation in hlo.CALLS:
        waiting += made.callees(one)
      elif one.operation not in hlo.FREE:
        own = OWN.search(one.rest) if one.operation == "custom-call" else None
        name = own[0] if own else re.sub(r"[._\d]+$", "", one.name)
        found[name] += 1
  return found


def quantized_layer(layer, has_float8):
  """A HiRes layer of the shapes of a float one, as `mxjax.load` gives it."""
  import gpu_models
  import jax.numpy as jnp

  from tests import hot_functions

  made = hot_functions._quantized(layer)
  kv_heads = hot_functions.CONFIG.num_kv_heads
  values, product = gpu_models.corrections(kv_heads)
  made["self_attn"]["value_recovery"], made["mlp"]["mlp_recovery"] = values, product
  for block in ("self_attn", "mlp"):
    for part in made[block].values():
      if has_float8 and isinstance(part, dict) and hasattr(part["weight"], "rounding"):
        leaf = part["weight"]
        part["weight"] = dataclasses.replace(leaf, float8_scale=jnp.ones(()))
  return made


def of_a_layer(batch, tried):
  """What one layer of a step launches, by the table or by candidates."""
  import functools

  import jax
  import jax.numpy as jnp

  from mxjax.models import CausalLM, generation
  from mxjax.pallas_kernels import choice
  from tests import hot_functions

  mesh, place = compile_kernels.target()
  array, counted = jax.ShapeDtypeStruct, []
  for layers in (1, 2):
    config = dataclasses.replace(hot_functions.CONFIG, num_layers=layers)
    model = CausalLM(config)
    ids = array((1, 8), jnp.int32)
    params = dict(jax.eval_shape(model.init, jax.random.key(0), ids)["params"])
    make = functools.partial(quantized_layer, has_float8=True)
    for index in range(layers):
      name = model.layer_name(index)
      params[name] = jax.eval_shape(make, params[name])
    empty = functools.partial(generation.empty_cache, model, batch, 2048)
    cache = jax.eval_shape(empty)
    state = params, cache, array((batch,), jnp.int32), array((batch,), bool)
    with contextlib.ExitStack() as stack:
      stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
      for candidate in tried:
        stack.enter_context(choice.trying(candidate))
      # A program that was traced before keeps its products.
      jax.clear_caches()
      program = generation._decode_in_one_program
      lowered = program.lower(
        model, *jax.tree.map(place, state), generation.GREEDY, STEPS
      )
      counted.append(launches(lowered.compile().as_text()))
  counted[1].subtract(counted[0])
  # XLA names what one layer and two fuse at the end in other ways.
  return {name: n for name, n in sorted(counted[1].items()) if n}


LAUNCH_SAVED_US = (1.3, 1.94)
"""A small launch costs: one in a CUDA graph, and a conversion as it was measured."""
MEMORY = pathlib.Path(__file__).parent / "results" / "gpu" / "h200_3_memory.json"
COPY_TBPS = json.loads(MEMORY.read_text())["results"]["ceilings"]["copy_GBps"] / 1e3
"""Measured on an H200."""
SHARES, LAUNCH_US, FRONT_US = (0.95, 0.75), (1.7, 3.5), (4.0, 7.0)
"""Shares of a copy, what a launch takes, and what passes until the first product: the
refinement of a pair of blocks, signals of all programs and the copy of inputs. Assumed,
low and high."""
ISSUE_US = (3.2 / 0.8, 3.2 / 0.5)
"""Of the product of [12288, 4096]: see `stream_k_counts.py`."""
LINEARS = {
  "q, k, v": (6144, 4096, 3),
  "o": (4096, 4096, 1),
  "gate, up": (24576, 4096, 2),
  "down": (4096, 12288, 1),
}
"""Outputs of all, width, and linears with tables of their own."""
TABLE_BYTES = 10304
"""Of a block: U, G and K in float32."""


def fused_us():
  """Microseconds of each launch of the fused product at one row, low and high."""
  made = {}
  for name, (outputs, width, linears) in LINEARS.items():
    weights = outputs * width * 17 / 32
    moved = weights + TABLE_BYTES * width / 32 * linears
    made[name] = [
      round(launch + max(moved / COPY_TBPS / share / 1e6, front + issue * part), 1)
      for share, launch, front, issue in zip(
        SHARES, LAUNCH_US, FRONT_US, ISSUE_US, strict=True
      )
      for part in [outputs * width / (12288 * 4096)]
    ]
  made["a layer"] = [round(sum(each), 1) for each in zip(*made.values(), strict=True)]
  return made


def predict(result):
  """Writes the predictions beside those that are there."""
  cases = result["cases"]
  fewer = (
    cases["1 sequences, table"]["launches"]
    - cases["1 sequences, int8 undivided"]["launches"]
  )
  file = common.RESULTS / "gpu_predictions.json"
  every = json.loads(file.read_text())
  every["decoding, one row"] = {
    "command": result["command"],
    "date": result["date"],
    "for": "a layer of Qwen3-8B's shapes on one NVIDIA H200; nothing was run",
    "assumed": {
      "us of a launch that is saved": LAUNCH_SAVED_US,
      "copy_TBps": COPY_TBPS,
      "shares of it": SHARES,
      "us of a launch": LAUNCH_US,
      "us until the first product": FRONT_US,
      "us of instructions, [12288, 4096]": ISSUE_US,
    },
    "int8 undivided": {
      "launches saved": fewer,
      "us saved": [round(fewer * us, 1) for us in LAUNCH_SAVED_US],
    },
    "float8 fused": {"us": fused_us()},
  }
  file.write_text(json.dumps(every, indent=1) + "\n")


def main():
  """Counts, predicts and writes."""
  options = common.parser(__doc__).parse_args()
  if why_not := compile_kernels.obstacle():
    sys.exit(why_not)
  compile_kernels.prepare()
  from mxjax.pallas_kernels import choice

  by_name = {each.name: each for each in choice.CANDIDATES}
  cases, rows = {}, []
  for batch, tried in CASES:
    found = of_a_layer(batch, [by_name[name] for name in tried])
    what = ", ".join(tried) or "table"
    ours = sum(n for name, n in found.items() if name.startswith("mxjax_"))
    total = sum(found.values())
    cases[f"{batch} sequences, {what}"] = {"launches": total, "ours": ours} | found
    rows.append([str(batch), what, str(total), str(ours), str(total - ours)])
    print(rows[-1], found, flush=True)
  head = ["sequences", "products by", "launches a layer", "our kernels", "XLA's"]
  result = common.stamp() | {"compiled for": "sm_90a, nothing was run", "cases": cases}
  common.write(options.out, result, common.markdown(head, rows))
  predict(result)


if __name__ == "__main__":
  main()
