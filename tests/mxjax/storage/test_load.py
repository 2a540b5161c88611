"""A quantized model in another process, on four devices: loaded, and as a program."""

import json
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax

ELSEWHERE = """
import json, os, pathlib, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import mxjax

folder = pathlib.Path(sys.argv[1])
model, params = mxjax.load(folder)
tokens = np.load(folder / "tokens.npy")
split = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
logits = jax.jit(model.apply)({"params": params}, jax.device_put(tokens, split))
program = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
np.savez(folder / "logits", sharded=logits, exported=program.call(params, tokens))
leaves = jax.tree.leaves(params)
print(json.dumps([len(logits.devices()), any(leaf.committed for leaf in leaves)]))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory, tiny_model, tiny_hires, tiny_tokens):
  """Logits here and there, the program's text, and what the other process prints."""
  folder, tokens = tmp_path_factory.mktemp("model"), tiny_tokens[:4]
  mxjax.save_checkpoint(folder / "checkpoint", tiny_hires.params, tiny_model.config)
  np.save(folder / "tokens", tokens)
  forward = jax.jit(lambda params, tokens: tiny_model.apply({"params": params}, tokens))
  here = forward(tiny_hires.params, tokens)
  program = jax.export.export(forward)(tiny_hires.params, tokens)
  (folder / "program").write_bytes(program.serialize())
  command = [sys.executable, "-c", ELSEWHERE, str(folder)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
  there = np.load(folder / "logits.npz")
  return here, there, program.mlir_module(), json.loads(done.stdout)


@pytest.mark.slow
def test_a_loaded_model_runs_on_sharded_tokens(elsewhere):
  here, there, _, (devices, committed) = elsewhere
  assert devices == 4 and not committed
  # Products of fewer rows may round otherwise, and then a code of A4 flips.
  error = np.linalg.norm(there["sharded"] - here, axis=-1)
  assert np.median(error / np.linalg.norm(here, axis=-1)) < 1e-5


@pytest.mark.slow
def test_an_exported_program_needs_no_kernel_of_ours(elsewhere):
  here, there, text, _ = elsewhere
  assert not [name for name in re.findall(r"custom_call @(\w+)", text) if "mx" in name]
  np.testing.assert_array_equal(there["exported"], here)


def test_a_config_of_another_model_is_refused(tmp_path):
  params = {"dense": {"kernel": jnp.ones((32, 4))}}
  mxjax.save_checkpoint(tmp_path / "mine", params, {"width": 32})
  with pytest.raises(ValueError, match="restore_checkpoint.* of your own"):
    mxjax.load(tmp_path / "mine")
