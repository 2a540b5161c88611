"""Makes golden/<family>_*.npz with transformers' torch models, in float32.

Run it in an environment of its own, so that torch is no dependency of the project:

  python -m venv /tmp/torchenv
  /tmp/torchenv/bin/pip install torch==2.13.0 numpy transformers==5.23.0 safetensors
  /tmp/torchenv/bin/python tests/golden/make_models.py [CASE ...]

Each file holds one tiny random model: `config` (its config.json as transformers
wrote it, as a string), `tokens` int32 [B, T], `positions` int32 [n] (all of them in
short cases), `logits` float32 [B, n, V] at these positions, and the float32 tensors
under `weights/<name>`. Files without `positions` have the logits of all positions.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers

SHORT = 40
# Past the windows, the rotary knee, and a chunk of queries.
LONG = 600
BASE = dict(
  vocab_size=96,
  hidden_size=32,
  intermediate_size=64,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  rms_norm_eps=1e-5,
  bos_token_id=1,
  eos_token_id=2,
  pad_token_id=0,
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
CLASSES = {
  "llama": "Llama",
  "mistral": "Mistral",
  "qwen2": "Qwen2",
  "qwen3": "Qwen3",
  "olmo2": "Olmo2",
}
UNTIED, TIED = dict(tie_word_embeddings=False), dict(tie_word_embeddings=True)
# The order fixes the seed of each case: append, never insert.
CASES = {
  "llama_gqa_untied": UNTIED,
  "llama_llama3_rope_tied": TIED | dict(rope_parameters=LLAMA3, head_dim=16),
  "llama_bias_untied": UNTIED
  | dict(
    attention_bias=True,
    mlp_bias=True,
    num_key_value_heads=4,
    rope_parameters=dict(rope_type="default", rope_theta=500000.0),
  ),
  "llama_multi_query_tied": TIED | dict(num_key_value_heads=1),
  "llama_long_rope_tied": TIED | dict(rope_parameters=LLAMA3, length=LONG),
  "mistral_window_untied": UNTIED | dict(sliding_window=48, head_dim=16, length=LONG),
  "mistral_full_tied": TIED | dict(sliding_window=None),
  "qwen2_bias_untied": UNTIED,
  "qwen2_window_tied": TIED
  | dict(use_sliding_window=True, sliding_window=9, max_window_layers=0, length=LONG),
  "qwen3_head_dim_untied": UNTIED | dict(head_dim=16),
  "qwen3_tied": TIED | dict(head_dim=8),
  "olmo2_untied": UNTIED,
  "olmo2_multi_head_tied": TIED | dict(num_key_value_heads=4),
}


def make(name: str, overrides: dict, seed: int) -> None:
  torch.manual_seed(seed)
  overrides = dict(overrides)
  length = overrides.pop("length", SHORT)
  prefix = CLASSES[name.split("_")[0]]
  config = getattr(transformers, prefix + "Config")(
    **{**BASE, **overrides},
    max_position_embeddings=1024 if length == LONG else 256,
    attn_implementation="eager",
  )
  model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
  batch = 1 if length == LONG else 2
  positions = np.arange(0, length, 7 if length == LONG else 1, dtype=np.int32)
  with torch.no_grad():
    # Large enough that logits spread and every part of the model matters.
    for key, value in model.named_parameters():
      is_norm = "norm" in key
      value.copy_(float(is_norm) + (0.2 if is_norm else 0.15) * torch.randn_like(value))
    tokens = torch.randint(0, config.vocab_size, (batch, length))
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
    pathlib.Path(__file__).parent / f"{name}.npz",
    config=np.asarray(json.dumps(saved)),
    tokens=tokens.numpy().astype(np.int32),
    positions=positions,
    logits=logits.numpy()[:, positions],
    **tensors,
  )


if __name__ == "__main__":
  chosen = sys.argv[1:] or list(CASES)
  for seed, (name, overrides) in enumerate(CASES.items()):
    if name in chosen:
      make(name, overrides, seed)
