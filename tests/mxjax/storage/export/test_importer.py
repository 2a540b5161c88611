"""Folders of other programs: read bit for bit, or refused by name."""

import copy
import functools
import json

import jax.numpy as jnp
from safetensors.flax import save_file

from mxjax.models.loading import weights
from mxjax.storage import export
from tests import refusals


def set_in(tree, path, value):
  *parents, last = path.split("/")
  for key in parents:
    tree = tree[key]
  tree[last] = value


def test_other_schemes_are_refused_by_name(hadamard, compressed):
  out, scheme = compressed(hadamard, transforms=True)
  (out / "mxjax_export.json").unlink()
  values = json.loads((out / "config.json").read_text())

  def read(path, value):
    changed = copy.deepcopy(scheme)
    set_in(changed, path, value)
    whole = values | {"quantization_config": changed}
    (out / "config.json").write_text(json.dumps(whole))
    export.read_compressed_tensors(out)

  group = "transform_config/config_groups/hadamard_32"
  elsewhere = [{"targets": ["layers.0.mlp.down_proj"], "location": "input"}]
  cases = [
    ("quant_method", "awq", "quant_method", "awq"),
    ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    ("config_groups", {}, "groups 0"),
    ("config_groups/group_0/weights/group_size", 16, "group_size 16"),
    (f"{group}/type", "random-matrix", "type hadamard", "hadamard_32"),
    (f"{group}/head_dim", 64, "head_dim", "96", "layers.0.mlp.down_proj", "64"),
    (f"{group}/apply", elsewhere, "quantized linears", "layers.0.mlp.down_proj"),
  ]
  refusals.check(
    [(functools.partial(read, path, value), *said) for path, value, *said in cases]
  )


def test_damaged_tensors_are_named(rtn, compressed, tensors_in):
  out, _ = compressed(rtn)
  good = {name: jnp.asarray(value) for name, value in tensors_in(out).items()}
  (out / "mxjax_export.json").unlink()
  name = "model.layers.0.mlp.up_proj"
  scale = f"{name}.weight_scale"

  def read(change):
    tensors = {k: v for k, v in (good | change).items() if v is not None}
    save_file(tensors, out / weights.SINGLE_FILE)
    export.read_compressed_tensors(out)

  cases = [
    ({scale: None}, scale, "weight_packed"),
    ({scale: good[scale].at[0, 0].set(255)}, name, "255", "got 1 of them"),
    ({"model.norm.weight": None}, "norm.weight is missing"),
    ({"model.extra.weight": jnp.ones(3)}, "extra.weight is unexpected"),
    ({f"{name}.weight": jnp.ones((96, 64))}, f"{name} packed or plain, got both"),
    # Left out, it would be the embedding in its place.
    ({"lm_head.weight": jnp.ones((61, 64))}, "lm_head.weight", "the embedding"),
  ]
  refusals.check([(functools.partial(read, change), *said) for change, *said in cases])
