"""GGUF files with MXFP4: the library's own decoding, and our loader's."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from mxjax import models
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models.loading import gguf as loading
from mxjax.numerics import mxfp4
from mxjax.storage import export
from mxjax.storage.export import features, gguf
from tests import refusals, tiny


def test_blocks_decode_as_the_library_says():
  draw = np.random.default_rng(0)
  codes = draw.integers(0, 256, (6, 48), np.uint8)
  scales = draw.integers(0, 254, (6, 3), np.uint8)
  tensor = mxfp4.MXTensor(jnp.asarray(codes), jnp.asarray(scales))
  made = gguf.blocks(tensor)
  assert made.shape == (6, 3 * 17)
  # Doubled values meet halved scales, whose smallest are subnormal.
  theirs = dequantize(made, GGMLQuantizationType.MXFP4)
  exact = np.stack([codes & 15, codes >> 4], -1).reshape(6, 96)
  values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[exact & 7] * np.where(
    exact > 7, -1, 1
  )
  powers = np.ldexp(1.0, scales.astype(int) - 127).repeat(32, axis=1)
  np.testing.assert_array_equal(theirs.astype(np.float64), values * powers)


@pytest.mark.parametrize("heads", [1, 4])
def test_permute_is_the_inverse_of_what_the_loader_does(heads):
  rows = np.arange(heads * 8 * 3).reshape(heads * 8, 3)
  assert (loading.unpermute(gguf.permute(rows, heads), heads) == rows).all()
  assert (gguf.permute(loading.unpermute(rows, heads), heads) == rows).all()


@pytest.fixture
def base(tiny_config, tiny_params, tmp_path):
  """Writes a float GGUF file of the tiny model, as llama.cpp converts one."""

  def write(**changes):
    config = dataclasses.replace(tiny_config, **changes)
    return tiny.save_gguf(tmp_path / f"base{len(changes)}.gguf", tiny_params, config)

  return write


def test_our_loader_reads_the_decoded_weights_and_all_settings(
  base, source, rtn, tiny_config, tmp_path
):
  file = base()
  out = gguf.write_gguf(tmp_path / "out", source(rtn), export.Companions(model=file))
  read = loading.open_file(out / "model.gguf")
  assert dataclasses.replace(read.config, eos_ids=tiny_config.eos_ids) == (
    dataclasses.replace(tiny_config, dtype=read.config.dtype, bos_id=read.config.bos_id)
  )
  loaded = dict(features.nodes(read.load()))
  kinds = set()
  for path, node in features.nodes(rtn):
    kinds.add(type(node).__name__)
    value = mxfp4.decode(node.weight) if isinstance(node, QuantizedLinear) else node
    wide = np.asarray(value.astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.asarray(loaded[path], np.float32), wide)
  assert "QuantizedLinear" in kinds and len(kinds) == 2
  reader = GGUFReader(out / "model.gguf")
  assert loading.field(reader, "tokenizer.ggml.tokens") == tiny.GGUF_TOKENS
  assert loading.field(reader, "tokenizer.ggml.token_type") == [1, 1, 3]
  assert loading.field(reader, "general.file_type") == 38
  stored = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
  assert (
    stored["blk.0.attn_q.weight"] == "MXFP4" and stored["output_norm.weight"] == "F32"
  )
  # As a float model it computes what weight-only MXFP4 does.
  tokens = np.arange(8, dtype=np.int32)[None]
  model = models.CausalLM(tiny_config)
  ours = model.apply({"params": gguf.runtime_params(rtn)}, tokens)
  theirs = model.apply({"params": read.load()}, tokens)
  np.testing.assert_allclose(ours, theirs, atol=2e-2)


def test_what_it_cannot_hold_or_find_is_refused(base, source, rtn, hires, tmp_path):
  write = lambda params, model: (
    lambda: gguf.write_gguf(
      tmp_path / "out",
      source(params),
      export.Companions(model=model and pathlib.Path(model)),
    )
  )
  refusals.check(
    [
      (write(hires, None), "maps", "refinement", "dequant", "--format transformers"),
      (write(rtn, None), "--model with a GGUF file of the float model"),
      (write(rtn, tmp_path), "--model with a GGUF file"),
      (write(rtn, base(rope_theta=5.0)), "another rope_theta"),
    ]
  )
  assert not (tmp_path / "out").exists()
