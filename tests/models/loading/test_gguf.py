import functools
import types

import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import models
from mxjax.models.loading import gguf
from tests import refusals

KINDS = {
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  **{f"{name}_proj": f"attn_{name}" for name in "qkv"},
  "o_proj": "attn_output",
  **{f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
GLOBALS = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
}


def permute(rows, heads):
  """llama.cpp's convert_hf_to_gguf: halves of a head interleaved."""
  halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
  return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_tensor(golden, name, value):
  """Name and rows of a Hugging Face tensor as llama.cpp stores it."""
  if name in GLOBALS:
    return GLOBALS[name], value
  parts = name.split(".")
  kind = KINDS[parts[-2]]
  heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(kind)
  rows = permute(value, golden.config[heads]) if heads else value
  return f"blk.{parts[2]}.{kind}.{parts[-1]}", rows


def write(golden, path, architecture="llama", extra=None, keys=None, **options):
  """Writes a golden model as an F32 GGUF file, possibly with a tensor or keys more."""
  config = golden.config
  writer = gguf_package.GGUFWriter(path, architecture, **options)
  kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
  for key, value in (keys or {}).items():
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
  for kind, name in {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
  }.items():
    getattr(writer, f"add_{kind}")(config[name])
  writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
  tensors = [gguf_tensor(golden, *item) for item in golden.weights.items()]
  if extra:
    tensors.append((extra, np.ones((2, 32), np.float32)))
  for name, value in tensors:
    writer.add_tensor(name, np.ascontiguousarray(value))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_unpermute_undoes_the_order_of_llama_cpp(heads, columns):
  rows = np.arange(heads * 8 * int(np.prod(columns))).reshape(heads * 8, *columns)
  stored = permute(rows, heads)
  assert not np.array_equal(stored, rows)
  np.testing.assert_array_equal(gguf.unpermute(stored, heads), rows)


def test_a_gguf_file_equals_the_hf_folder(llama_golden, tmp_path):
  rope = llama_golden.config["rope_parameters"]
  if rope["rope_type"] != "default":
    pytest.skip("GGUF files with rotary scaling are refused")
  narrow = {k: v.astype(jnp.bfloat16) for k, v in llama_golden.weights.items()}
  folder = llama_golden.save(tmp_path / "hf", narrow)
  model, params = models.from_pretrained(write(llama_golden, tmp_path / "tiny.gguf"))
  want_model, want = models.from_pretrained(folder)
  assert model == want_model
  assert models.load_config(tmp_path / "tiny.gguf", dtype=None).dtype == "float32"
  assert jax.tree.structure(params) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"architecture": "qwen2"}, NotImplementedError, "of llama, got qwen2"),
    ({"extra": "rope_freqs.weight"}, NotImplementedError, "rotary scaling"),
    ({"extra": "blk.0.ffn_gate_inp.weight"}, ValueError, "gate_inp.weight is unexpect"),
  ],
)
def test_what_is_not_supported_is_named(golden, tmp_path, options, error, message):
  path = write(golden, tmp_path / "other.gguf", **options)
  with pytest.raises(error, match=message):
    models.from_pretrained(path)


CHANGING = [
  ("llama.rope.scale_linear", 4.0),
  ("llama.rope.scaling.factor", 4.0),
  ("llama.rope.scaling.attn_factor", 1.5),
  ("llama.rope.dimension_count", 4),
  ("llama.rope.freq_base_swa", 5e5),
  ("llama.expert_count", 8),
  ("llama.attention.value_length", 64),
  ("llama.attention.sliding_window", 16),
  ("llama.attention.scale", 0.5),
  ("llama.attention.clamp_kqv", 8.0),
  ("llama.attention.causal", False),
  ("llama.logit_scale", 2.0),
  ("llama.residual_scale", 2.0),
  ("llama.embedding_scale", 2.0),
  ("llama.final_logit_softcapping", 30.0),
  ("llama.tensor_data_layout", "another"),
  ("llama.vocab_size", 7),
  ("adapter.type", "lora"),
  ("split.count", 2),
  ("llama.what_comes_next_year", 1),
]
"""Keys of a GGUF file, and values of them that could change logits."""


def test_a_key_that_could_change_logits_is_refused_by_name(golden, tmp_path):
  def load(key, value):
    return models.from_pretrained(
      write(golden, tmp_path / f"{key}.gguf", keys={key: value})
    )

  cases = [(functools.partial(load, *row), f"logit, got {row[0]}=") for row in CHANGING]
  refusals.check(cases, NotImplementedError)


def test_keys_that_change_nothing_are_no_reason_to_refuse(golden, tmp_path):
  config = golden.config
  keys = {
    "general.type": "model",
    "general.sampling.temp": 0.6,
    "general.anything": "at all",
    "quantize.imatrix.file": "x.dat",
    "tokenizer.ggml.pre": "smollm",
    "llama.vocab_size": config["vocab_size"],
    "llama.rope.dimension_count": config["head_dim"],
    "llama.attention.value_length": config["head_dim"],
    "llama.attention.causal": True,
    "llama.expert_count": 0,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.finetuned": False,
    "llama.tensor_data_layout": "Meta AI original pth",
    "split.count": 1,
  }
  _, want = models.from_pretrained(write(golden, tmp_path / "plain.gguf"))
  _, got = models.from_pretrained(write(golden, tmp_path / "more.gguf", keys=keys))
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_adapter_is_no_model(golden, tmp_path):
  path = write(golden, tmp_path / "lora.gguf", keys={"general.type": "adapter"})
  with pytest.raises(NotImplementedError, match="whole model, got one of the type ada"):
    models.from_pretrained(path)


def test_ends_of_turns_are_stop_ids(golden, tmp_path):
  keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
  path = write(golden, tmp_path / "chat.gguf", keys=keys)
  assert models.load_config(path).eos_ids == (2, 7)


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom"])
def test_a_token_beyond_the_vocabulary_is_refused_by_name(golden, tmp_path, name):
  size = golden.config["vocab_size"]

  def written(token):
    # `write` takes two of these keys from the config.
    changed = {"config": golden.config | {f"{name}_token_id": token}}
    keys = {} if name in ("bos", "eos") else {f"tokenizer.ggml.{name}_token_id": token}
    model = types.SimpleNamespace(weights=golden.weights, **changed)
    return write(model, tmp_path / f"{token}.gguf", keys=keys)

  told = f"expected tokenizer.ggml.{name}_token_id below {size}, .* got {size};"
  with pytest.raises(ValueError, match=told):
    models.load_config(written(size))
  config = models.load_config(written(size - 1))
  assert size - 1 in (config.bos_id, *config.eos_ids)


def test_another_byte_order_is_named(golden, tmp_path):
  order = gguf_package.GGUFEndian.BIG
  path = write(golden, tmp_path / "big.gguf", endianess=order)
  with pytest.raises(NotImplementedError, match="got a big-endian one; convert"):
    models.from_pretrained(path)


def test_a_header_is_read_once_in_a_block_and_anew_behind_it(
  golden, tmp_path, monkeypatch
):
  path, read = write(golden, tmp_path / "tiny.gguf"), []
  actual = gguf._read_header
  monkeypatch.setattr(gguf, "_read_header", lambda at: read.append(at) or actual(at))
  with gguf.headers_kept():
    models.load_config(path)
    with gguf.headers_kept():
      models.open_pretrained(path)
    models.load_config(path)
  assert read == [path]
  write(golden, path, keys={"tokenizer.ggml.eot_token_id": 7})
  assert 7 in models.load_config(path).eos_ids
  assert len(read) == 2


@pytest.mark.parametrize("shift", [0, 32])
def test_tensors_that_share_bytes_are_refused(golden, tmp_path, shift):
  path = write(golden, tmp_path / "tiny.gguf")
  reader = gguf.open_reader(path)
  place = {tensor.name: tensor for tensor in reader.tensors}
  offset = lambda name: int(place[name].data_offset) - reader.data_offset
  field = place["blk.1.ffn_up.weight"].field
  start = int(field.offset) + sum(int(part.nbytes) for part in field.parts[:-1])
  data = bytearray(path.read_bytes())
  moved = offset("blk.1.ffn_gate.weight") + shift
  data[start : start + 8] = moved.to_bytes(8, "little")
  path.write_bytes(data)
  with pytest.raises(
    ValueError, match=r"do not overlap, got blk.1.ffn_(up|gate).weight"
  ):
    models.from_pretrained(path)


@pytest.mark.parametrize("kept", [0.9, 0.02, 0.0])
def test_a_truncated_file_is_one_sentence(golden, tmp_path, kept):
  path = write(golden, tmp_path / "tiny.gguf")
  data = path.read_bytes()
  path.write_bytes(data[: int(kept * len(data))])
  with pytest.raises(ValueError, match=r"tiny.gguf: expected a complete GGUF"):
    models.from_pretrained(path)


@pytest.mark.parametrize("length", [300_000, 2**60, 2**64 - 1])
def test_a_list_is_no_longer_than_its_file(tmp_path, length):
  """The library would read nothing, that many times."""
  number = lambda value, size: value.to_bytes(size, "little")
  header = b"GGUF" + number(3, 4) + number(0, 8) + number(1, 8)
  key = number(1, 8) + b"k" + number(9, 4)
  path = tmp_path / "long.gguf"
  path.write_bytes(header + key + number(0, 4) + number(length, 8) + bytes(100))
  with pytest.raises(ValueError, match="long.gguf: expected a complete GGUF file, got"):
    models.from_pretrained(path)


@pytest.mark.slow
def test_the_embedded_model_predicts_text(gguf_path, embedded_tokenizer):
  model, params = models.from_pretrained(gguf_path)
  assert model.config.num_layers == 30
  assert model.config.norm_eps == 1e-5
  tokens = embedded_tokenizer.encode("The capital of France is")
  hidden = jax.jit(model.embed)(params, tokens[None])
  layer = jax.jit(model.layer)
  for index in range(model.num_layers):
    hidden = layer(params[model.layer_name(index)], hidden)
  best = np.asarray(jax.jit(model.logits)(params, hidden))[0, -1].argmax()
  assert embedded_tokenizer.decode([int(best)]) == " Paris"
