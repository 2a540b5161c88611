"""The tiny model of the tests: one config, one folder of it, and what tests read of it.

Tests that keep these widths share what is compiled.
"""

import jax
import jax.numpy as jnp
import tokenizers
from gguf import GGUFWriter

from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.models import CausalLM, ModelConfig
from mxjax.models.families import to_hf_config
from mxjax.models.loading import weights
from mxjax.storage import export
from mxjax.storage.export import gguf

TEXT = "the cat sat on the mat and the dog ran over the hill " * 40


def config(**changes):
  """Two layers with grouped queries, every width a multiple of 32."""
  fields = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    tie_embeddings=True,
    rope_theta=1e4,
    max_positions=128,
  )
  return ModelConfig(**(fields | changes))


def save_folder(path, **changes):
  """Writes a float model as Hugging Face does, its tokenizer, and a text of it."""
  model = CausalLM(config(vocab_size=64, **changes))
  params = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
  weights.save_folder(path, to_hf_config(model.config), params)
  return save_tokenizer(path, 64)


def save_tokenizer(path, size):
  """Writes a tokenizer of `size` tokens and the text that it was learned from."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, show_progress=False)
  backend.train_from_iterator([TEXT], trainer)
  backend.save(str(path / "tokenizer.json"))
  (path / "text.txt").write_text(TEXT)
  return path


GGUF_TOKENS = ["<a>", "b", "é"]
"""What a GGUF file of the tiny model says of its tokenizer."""


def save_gguf(path, params, of):
  """Writes float params of the config `of` as llama.cpp converts a model."""
  writer = GGUFWriter(path, "llama")
  writer.add_block_count(of.num_layers)
  writer.add_context_length(of.max_positions)
  writer.add_embedding_length(of.hidden_size)
  writer.add_feed_forward_length(of.intermediate_size)
  writer.add_head_count(of.num_heads)
  writer.add_head_count_kv(of.num_kv_heads)
  writer.add_key_length(of.head_dim)
  writer.add_layer_norm_rms_eps(of.norm_eps)
  writer.add_rope_freq_base(of.rope_theta)
  writer.add_tokenizer_model("gpt2")
  writer.add_token_list(GGUF_TOKENS)
  writer.add_token_types([1, 1, 3])
  writer.add_file_type(0)
  for name, array, kind in gguf.to_tensors(export.Source(params, of)):
    writer.add_tensor(name, array, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def leaves_of(params):
  """The quantized linears of a pytree."""
  is_leaf = lambda node: isinstance(node, QuantizedLinear)
  return [x for x in jax.tree.leaves(params, is_leaf=is_leaf) if is_leaf(x)]
