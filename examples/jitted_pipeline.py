"""Quantized params are an ordinary pytree: jit, vmap, scan, shard_map, Orbax.

With XLA_FLAGS=--xla_force_host_platform_device_count=4 the CPU counts as four devices.
"""

import tempfile

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mxjax


def main(source="models/trained/llama", method="gptq", batch=4, length=32):
  model, params = mxjax.from_pretrained(source)
  key, vocabulary = jax.random.key(0), model.config.vocab_size
  tokens = jax.random.randint(key, (batch, length), 0, vocabulary)
  qparams = mxjax.quantize(params, mxjax.Calibration(model, tokens), method)

  # jit: params are an argument, so other params of the same form reuse the program.
  forward = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))
  outputs = {"jit": forward(qparams, tokens)}

  # vmap: one sequence at a time, the batch axis added from outside.
  one = lambda params, sequence: forward(params, sequence[None])[0]
  outputs["vmap"] = jax.jit(jax.vmap(one, in_axes=(None, 0)))(qparams, tokens)

  # scan: equal layers stack leaf by leaf, quantized or not, and compile once.
  layers = [qparams[model.layer_name(i)] for i in range(model.num_layers)]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

  step = lambda hidden, layer: (model.layer(layer, hidden), None)
  hidden, _ = jax.lax.scan(step, model.embed(qparams, tokens), stacked)
  outputs["scan"] = model.logits(qparams, hidden)

  # shard_map: a part of the batch for each device, the params whole on all of them.
  mesh = Mesh(jax.devices(), ("data",))
  specs = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
  split = jax.shard_map(forward, mesh=mesh, **specs)
  outputs["shard_map"] = jax.jit(split)(qparams, tokens)

  # Orbax by hand; mxjax.save_checkpoint adds checksums, the contract and the config.
  with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as orbax:
    orbax.save(f"{folder}/params", qparams)
    orbax.wait_until_finished()
    restored = orbax.restore(f"{folder}/params", jax.eval_shape(lambda: qparams))
  outputs["orbax"] = forward(restored, tokens)
  for name, logits in outputs.items():
    print(f"{name:10} largest difference {jnp.abs(logits - outputs['jit']).max():.1e}")
  return outputs


if __name__ == "__main__":
  main()
