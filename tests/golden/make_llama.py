"""Makes golden/llama_*.npz with transformers' torch LlamaForCausalLM.

Run it in an environment of its own, so that torch is no dependency of the project:

  python -m venv /tmp/torchenv
  /tmp/torchenv/bin/pip install torch==2.13.0 numpy transformers safetensors
  /tmp/torchenv/bin/python tests/golden/make_llama.py

Each file holds one tiny random model: `config` (its config.json as transformers
wrote it, as a string), `tokens` int32 [2, 40], `logits` float32 [2, 40, V], and the
float32 tensors under `weights/<name>`.
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 40
BASE = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=256,
  rms_norm_eps=1e-5,
  bos_token_id=1,
  eos_token_id=2,
)
LLAMA3 = dict(
  rope_type="llama3",
  rope_theta=10000.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  # So short that the 8 frequencies of a head fall in all three bands.
  original_max_position_embeddings=64,
)
CASES = {
  "gqa_untied": dict(tie_word_embeddings=False),
  "llama3_rope_tied": dict(
    tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=16
  ),
  "bias_untied": dict(
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    num_key_value_heads=4,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0),
  ),
  "multi_query_tied": dict(tie_word_embeddings=True, num_key_value_heads=1),
}


def make(name: str, overrides: dict, seed: int) -> None:
  torch.manual_seed(seed)
  config = LlamaConfig(**{**BASE, **overrides}, attn_implementation="eager")
  model = LlamaForCausalLM(config).eval()
  with torch.no_grad():
    # Large enough that logits spread and every part of the model matters.
    for key, value in model.named_parameters():
      is_norm = "norm" in key
      value.copy_(float(is_norm) + (0.2 if is_norm else 0.15) * torch.randn_like(value))
    tokens = torch.randint(0, config.vocab_size, (2, LENGTH))
    logits = model(tokens).logits
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    saved = json.loads((pathlib.Path(folder) / "config.json").read_text())
  tensors = {
    f"weights/{key}": value.numpy()
    for key, value in model.state_dict().items()
    if not (config.tie_word_embeddings and key == "lm_head.weight")
  }
  np.savez_compressed(
    pathlib.Path(__file__).parent / f"llama_{name}.npz",
    config=np.asarray(json.dumps(saved)),
    tokens=tokens.numpy().astype(np.int32),
    logits=logits.numpy(),
    **tensors,
  )


if __name__ == "__main__":
  for seed, (name, overrides) in enumerate(CASES.items()):
    make(name, overrides, seed)
