"""Plain folders of effective weights."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import models
from mxjax.numerics import mxfp4
from mxjax.storage import export
from mxjax.storage.export import dequant

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


@pytest.mark.slow
def test_dequant_computes_the_model_without_activation_rounding(
  hires, unrounded, source, tiny_model, tmp_path
):
  """Maps and both recoveries are in weights and biases; only A4 is gone."""
  out = export.write_dequant(tmp_path / "out", source(hires), dtype=jnp.float32)
  model, params = models.from_pretrained(out)
  assert model.config.attention_bias and model.config.mlp_bias
  run = lambda model, params: jax.jit(model.apply)({"params": params}, TOKENS)
  ours, strict = run(model, params), run(tiny_model, hires)
  expected = run(tiny_model, unrounded(hires))
  error = float(jnp.abs(ours - expected).max())
  assert error < 1e-4 * float(jnp.abs(expected).max())
  assert float(jnp.abs(strict - expected).max()) > 100 * error
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert manifest["without_meaning_here"] == ["refinement"]
  folded = {"maps", "value-recovery", "mlp-recovery"}
  assert set(manifest["folded_into_weights"]) == folded
  assert 0 < manifest["largest_relative_rounding_error"] < 1e-7


def test_dequant_of_plain_codes_is_exact_in_bfloat16(rtn, source, tmp_path, tensors_in):
  out = export.write_dequant(tmp_path / "out", source(rtn))
  tensors = tensors_in(out)
  leaf = rtn["layers_0"]["self_attn"]["v_proj"]["weight"]
  # No product with a map here, which would lose the signs of zeros.
  np.testing.assert_array_equal(
    tensors["model.layers.0.self_attn.v_proj.weight"].view(np.uint16),
    np.asarray(mxfp4.decode(leaf.weight)).view(np.uint16),
  )
  manifest = json.loads((out / "mxjax_export.json").read_text())
  assert manifest["largest_relative_rounding_error"] == 0
  assert not any(name.endswith("bias") for name in tensors)


def test_a_family_without_mlp_bias_cannot_take_the_mlp_recovery(
  hires, source, tiny_config, tmp_path
):
  qwen = dataclasses.replace(tiny_config, family="qwen3")
  assert set(dequant.cannot_hold(hires, qwen)) == {"mlp-recovery"}
  mistral = dataclasses.replace(tiny_config, family="mistral")
  with pytest.raises(ValueError, match="family mistral can hold, got .*value-recovery"):
    export.write_dequant(
      tmp_path / "out", dataclasses.replace(source(hires), config=mistral)
    )


def test_a_bias_goes_through_the_recovery_like_the_product(float64):
  rng = np.random.default_rng(3)
  weight, bias, x = (jnp.asarray(rng.standard_normal(s)) for s in ((4, 6), 4, 6))
  scale, offset = jnp.asarray([2.0, 0.5, 1.0, -1.0]), jnp.asarray(0.25)
  expected = scale * (weight @ x + bias) + offset
  linear = {"weight": weight, "bias": bias}
  dequant._scale_linear(linear, scale, offset)
  np.testing.assert_allclose(linear["weight"] @ x + linear["bias"], expected)
