"""The transformers folder: our buffers, and what its own code makes of them."""

import ast
import dataclasses
import hashlib
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.layers.linear import linear
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import (
  ActivationQuantizer,
  Clipped,
  FewCodes,
  Nearest,
  OneCode,
  Unrounded,
)
from mxjax.numerics.shaping import input_maps
from mxjax.storage import export
from mxjax.storage.export import transformers_folder
from tests import refusals
from tests.mxjax.quantized import MIXED, at, model, replaced
from tests.mxjax.storage.export.conftest import DOWN


class Unknown(ActivationQuantizer):
  """A rule from outside the library."""


CODE = pathlib.Path(transformers_folder.__file__).parent


def operator(kind, of):
  """The map and the rule of a golden linear, from its buffers."""
  match kind:
    case "plain":
      return None, Nearest()
    case "refined":
      rule = OneCode(of["refine_gram"], of["refine_cross"])
      return input_maps.BlockDense(of["input_blocks"]), rule
    case "few codes":
      changes, rounds_up = of["refine_how"].astype(int).tolist()
      rule = FewCodes(of["refine_gram"], changes, bool(rounds_up))
      return input_maps.BlockDense(of["input_blocks"]), rule
    case "clipped":
      rule = Clipped(of["clip_low"], of["clip_high"])
      return input_maps.BlockDense(of["input_blocks"]), rule
    case "hadamard":
      return input_maps.Hadamard(64, of["input_signs"].astype(jnp.int8)), Nearest()
    case "two-level":
      inside = of["input_blocks"][0].T
      return input_maps.TwoLevel(of["input_mix"], inside), Nearest()
    case "weight-only":
      return input_maps.BlockDense(of["input_blocks"]), Unrounded()


@pytest.mark.parametrize(
  "kind",
  [
    *("plain", "refined", "few codes", "clipped", "hadamard", "two-level"),
    "weight-only",
  ],
)
def test_the_folders_code_computes_our_linears(golden, kind):
  prefix = f"strict/{kind}/"
  of = {
    name.removeprefix(prefix): jnp.asarray(golden[name])
    for name in golden.files
    if name.startswith(prefix)
  }
  weight = mxfp4.MXTensor(of["weight_packed"], of["weight_scale"])
  leaf = QuantizedLinear(weight, *operator(kind, of))
  after = {"bias", "output_scale", "output_shift", "y"}
  buffers = transformers_folder.linear_tensors(leaf, "here")
  assert set(buffers) == set(of) - after
  for name, buffer in buffers.items():
    np.testing.assert_allclose(buffer, of[name], rtol=1e-6, err_msg=name)
  y = linear(jnp.asarray(golden["strict/x"]), leaf)
  wide = lambda name: of[name][None, None]
  ours = (y + wide("bias")) * wide("output_scale") + wide("output_shift")
  np.testing.assert_allclose(ours, of["y"], rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_the_golden_outputs_are_those_of_the_code_as_it_is(golden):
  code = (CODE / "modeling_mxfp4.py").read_bytes()
  assert str(golden["strict/code"]) == hashlib.sha256(code).hexdigest(), (
    "run tests/golden/make_exports.py again"
  )
  imported = {
    alias.name if isinstance(node, ast.Import) else node.module
    for node in ast.walk(ast.parse(code))
    if isinstance(node, ast.Import | ast.ImportFrom)
    for alias in node.names
  }
  assert imported == {"torch", "transformers"}


def test_a_folder_has_every_buffer_that_its_config_names(
  tiny_params, source, tmp_path, tensors_in
):
  params = model(tiny_params, MIXED, recovery=True)
  out = export.write_transformers(tmp_path / "out", source(params))
  config = json.loads((out / "config.json").read_text())
  assert config["auto_map"] == {
    "AutoModelForCausalLM": "modeling_mxfp4.MXFP4LlamaForCausalLM"
  }
  tensors = tensors_in(out)
  linears = config["mxfp4"]["linears"]
  assert len(linears) == 14
  for module, buffers in linears.items():
    for name, (shape, dtype) in buffers.items():
      array = tensors.pop(f"{module}.{name}")
      assert (list(array.shape), str(array.dtype)) == (shape, dtype)
  assert not [name for name in tensors if "_proj" in name]
  fit = at(params, "layers_0/mlp/mlp_recovery")
  saved = tensors_in(out)
  gate = "model.layers.0.mlp.gate_proj"
  assert (saved[f"{gate}.output_scale"] == 1 + fit.gate_scale).all()
  shift = fit.gate_shift * fit.gate_deviation
  assert (saved[f"{gate}.output_shift"] == np.asarray(shift)).all()
  values = at(params, "layers_1/self_attn/value_recovery")
  for part, expected in (("scale", values.scale), ("shift", values.offset)):
    rows = saved[f"model.layers.1.self_attn.v_proj.output_{part}"]
    assert (rows == np.repeat(expected, 16)).all()
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert "modeling_mxfp4.py" in manifest["files"]


def test_what_the_code_does_not_know_is_refused(
  rtn, hires, tiny_params, source, tmp_path
):
  write = lambda params: (
    lambda: export.write_transformers(tmp_path / "out", source(params))
  )
  odd = lambda **change: write(
    replaced(rtn, DOWN, dataclasses.replace(at(rtn, DOWN), **change))
  )
  path = "layers_0/mlp/up_proj"
  bare = replaced(hires, path, at(tiny_params, path))
  refusals.check(
    [
      (odd(rules=mxfp4.Rules(scale_rule="even")), "down_proj", "Rules", "--format"),
      (odd(rounding=Unknown()), "down_proj", "A4 rule Unknown"),
      (write(bare), "up_proj", "only quantized linears"),
    ]
  )
  assert not (tmp_path / "out").exists()
