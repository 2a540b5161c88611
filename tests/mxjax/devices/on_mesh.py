"""What eight virtual devices make of the tiny model, a JSON line each: test_mesh.py.

The first argument is the model's config, the others name the facts to find.

A process has as many CPU devices as it says before JAX starts, so this one is apart.
"""

import hashlib
import json
import os
import pathlib
import sys
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses

import jax
import numpy as np

import mxjax
from mxjax import methods
from mxjax.devices import mesh as meshes
from mxjax.devices.placement import Placement
from mxjax.devices.totals import Totals
from mxjax.evaluation.measures.perplexity import perplexity
from mxjax.methods.hires import stage3
from mxjax.models import CausalLM, ModelConfig
from mxjax.run import progress
from mxjax.run.quantize import run
from mxjax.storage import checkpoint

EVALUATED_ON = ((2, 2), (1, 8))
# Both recovery fits and output gradients.
LIGHT = dataclasses.replace(
  methods.GPTQ,
  name="light",
  weighting="fisher",
  recover=(stage3.ATTENTION, stage3.MLP),
)


def bits(params):
  digest = hashlib.sha256()
  leaves, structure = jax.tree.flatten(params)
  digest.update(str(structure).encode())
  for leaf in leaves:
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


def device_bytes(params):
  """Bytes of a pytree on every device, by id."""
  held = {}
  for leaf in jax.tree.leaves(params):
    for shard in leaf.addressable_shards:
      held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
  return [held[i] for i in sorted(held)]


def quantized(model, params, tokens, program, shape):
  """Digests of the results of a program: without a mesh, and on one."""
  calib = mxjax.Calibration(model, tokens)

  def digest(mesh):
    result = run(params, calib, program, check=False, probe=False, mesh=mesh)
    assert result.record.mesh == Placement(mesh).describe()
    return bits(result.params)

  return [digest(None), digest(meshes.make(*shape))]


def resumed(model, params, tokens, folder):
  """A run that stops on one mesh after a layer, and goes on with another."""
  calib = mxjax.Calibration(model, tokens)
  options = {"check": False, "probe": False, "run_dir": folder / "run"}
  try:
    mxjax.quantize(
      params, calib, LIGHT, mesh=meshes.make(8, 1), stop=lambda: True, **options
    )
  except progress.Stopped:
    pass
  result = run(params, calib, LIGHT, mesh=meshes.make(1, 8), resume=True, **options)
  return {"bits": bits(result.params), "changed": result.record.resumed[0]["changed"]}


def evaluated(model, params, windows):
  """Relative distance of perplexities to those of one device, by mesh."""
  alone = perplexity(model, params, windows).mean
  on_mesh = lambda s: perplexity(model, params, windows, mesh=meshes.make(*s)).mean
  return {str(shape): abs(on_mesh(shape) / alone - 1) for shape in EVALUATED_ON}


def restored(params, model, folder):
  """Bytes by device of a checkpoint on meshes of several sizes, and the digests."""
  checkpoint.save_checkpoint(folder / "checkpoint", params, model.config)
  found = {}
  for size in (1, 2, 4, 8):
    back, _ = checkpoint.restore_checkpoint(
      folder / "checkpoint", mesh=meshes.make(1, size)
    )
    codes = back["layers_0"]["mlp"]["up_proj"]["weight"].weight.codes
    found[size] = {
      "bits": bits(back),
      "bytes": device_bytes(back),
      "rows": [shard.data.shape[0] for shard in codes.addressable_shards],
    }
  return found


def _add_part(totals, sequence, index, static, params):
  del index, static, params
  return {"total": totals["total"] + sequence[1]}, None


def ordered_sum():
  """A sum in float32 whose result depends on the order, over two chunks."""
  placement = Placement(meshes.make(4, 2))
  parts = np.asarray([1e8, 1.0, -1e8, 1.0, 3e7, 1.0, -3e7, 1.0], np.float32)
  totals = Totals({"total": np.zeros((), np.float32)}, placement)
  expected = np.float32(0)
  for chunk in (parts, parts[::-1].copy()):
    totals.add(_add_part, placement.put_sequences(chunk))
    for part in chunk:
      expected = np.float32(expected + part)
  pairwise = 2 * parts.reshape(4, 2).sum(1).reshape(2, 2).sum(1).sum()
  return {
    "got": float(totals.value()["total"]),
    "expected": float(expected),
    "other order": float(pairwise),
  }


def main():
  jax.config.update("jax_numpy_dtype_promotion", "strict")
  jax.config.update("jax_numpy_rank_promotion", "raise")
  model = CausalLM(ModelConfig.from_dict(json.loads(sys.argv[1])))
  params = model.init(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
  # As a mesh leaves them on its first device, so that both share what is compiled.
  params = jax.device_put(params, jax.devices()[0])
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, model.config.vocab_size, (8, 32)).astype(np.int32)
  windows = rng.integers(0, model.config.vocab_size, (5, 32)).astype(np.int32)
  once = mxjax.quantize(
    params, mxjax.Calibration(model, tokens), "rtn", check=False, probe=False
  )
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    facts = {
      "ordered sum": ordered_sum,
      "saved": lambda: {"bits": bits(once), "bytes": device_bytes(once)},
      "restored": lambda: restored(once, model, folder),
      "quantized perplexity": lambda: evaluated(model, once, windows),
      "float perplexity": lambda: evaluated(model, params, windows),
      "resumed": lambda: resumed(model, params, tokens, folder),
      "light": lambda: quantized(model, params, tokens, LIGHT, (8, 1)),
      "hires-descent": lambda: quantized(
        model, params, tokens, methods.HIRES_DESCENT, (4, 2)
      ),
    }
    for name in sys.argv[2:]:
      print(json.dumps([name, facts[name]()]), flush=True)


if __name__ == "__main__":
  main()
