"""Random model folders with the oddities of real ones, made from a number alone.

Each has a config, weights, a tokenizer and perhaps a generation config, all legal for
transformers, in spellings that people's tools have left behind.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers import processors as post

COUNT = 48
VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS = 320, 32, 64, 2, 4
TEXTS = (
  "Hello world, 2024 and 17.5%!",
  "<|user|>\n hi <|end|> there<|end|>",
  "  two  spaces\tand\nlines ",
  "naïve 東京 <s>x</s> <pad>",
)
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
TOKENS = np.random.default_rng(0).integers(0, 256, (1, 12)).astype(np.int32)
FAMILIES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "olmo2": "Olmo2ForCausalLM",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LEFT_BEHIND = {
  "pruned_heads": {},
  "torchscript": False,
  "use_bfloat16": False,
  "tie_encoder_decoder": False,
  "cross_attention_hidden_size": None,
  "task_specific_params": None,
  "_name_or_path": "somewhere/else",
  "attention_dropout": 0.1,
  "classifier_dropout": 0.1,
  "gradient_checkpointing": True,
  "temperature": 0.6,
  "top_p": 0.9,
  "max_length": 20,
  "unsloth_version": "2024.9",
  "transformers_version": "4.31.0",
  "torch_dtype": "float16",
  "num_labels": 3,
  "final_logit_softcapping": None,
}
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}"
  "<|end|>\n{% endfor %}{% if add_generation_prompt %}reply:{% endif %}"
)


def make(folder, number):
  """Writes folder `number` and returns the path."""
  rng = np.random.default_rng([64, number])
  folder.mkdir(parents=True, exist_ok=True)
  family = [*FAMILIES][number % len(FAMILIES)]
  config, shapes = make_config(rng, family)
  write(folder / "config.json", config)
  save_weights(rng, folder, shapes)
  save_tokenizer(rng, folder)
  if rng.random() < 0.6:
    ends = [3, [3, 258], [257, 259], None][rng.integers(4)]
    generation = {"eos_token_id": ends, "do_sample": True, "temperature": 0.7}
    write(folder / "generation_config.json", generation)
  return folder


def write(path, values):
  path.write_text(json.dumps(values, indent=1))


def make_config(rng, family):
  """Returns the values of `config.json`, and the shapes of the tensors it implies."""
  pick = lambda *options: options[rng.integers(len(options))]
  config = dict(
    model_type=family,
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
  )
  if (name := pick(FAMILIES[family], "MistralForCausalLM", None)) or rng.random() < 0.5:
    config["architectures"] = [name] if name else None
  for key in rng.permutation([*LEFT_BEHIND])[: rng.integers(8)]:
    config[key] = LEFT_BEHIND[key]
  kv_heads = pick(1, 2, 4, 4)
  if kv_heads < HEADS or family not in ("llama", "olmo2") or rng.random() < 0.3:
    config["num_key_value_heads"] = kv_heads
  elif rng.random() < 0.5:
    config["num_key_value_heads"] = None
  head = pick(8, 16) if family in ("llama", "mistral", "qwen3") else WIDTH // HEADS
  if head != WIDTH // HEADS or family == "qwen3":
    config["head_dim"] = head
  elif rng.random() < 0.3 and family in ("llama", "mistral"):
    config["head_dim"] = pick(None, head)
  for key, value in dict(
    rms_norm_eps=1e-4, max_position_embeddings=128, hidden_act=pick("silu", "swish")
  ).items():
    if rng.random() < 0.7:
      config[key] = value
  config |= rotary(rng)
  if family == "mistral" and rng.random() < 0.7:
    config["sliding_window"] = pick(None, 5)
  if family in ("qwen2", "qwen3"):
    config |= pick(
      {},
      {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
      {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
      {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": LAYERS},
      {"layer_types": ["full_attention"] * LAYERS},
    )
  biases = {"attention_bias": False, "mlp_bias": False}
  if family in ("llama", "qwen3", "olmo2") and rng.random() < 0.5:
    biases["attention_bias"] = config["attention_bias"] = pick(True, False)
  if family == "llama" and rng.random() < 0.5:
    biases["mlp_bias"] = config["mlp_bias"] = pick(True, False)
  for key, options in dict(
    eos_token_id=(257, [257, 258], None), bos_token_id=(256, None), pad_token_id=(-1, 0)
  ).items():
    if rng.random() < 0.7:
      config[key] = pick(*options)
  tied = pick(None, True, False)
  if tied is not None:
    config["tie_word_embeddings"] = tied
  return config, tensors(family, kv_heads, head, biases, bool(tied))


def rotary(rng):
  """Returns one of the spellings of the rotary base and scaling."""
  old = {"rope_theta": 5e4}
  scaling = {"rope_type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}
  legacy = {"type": "llama3", "original_max_position_embeddings": 32, **LLAMA3}
  plain = {"rope_type": "default", "rope_theta": 2e4}
  options = [
    {},
    old,
    old | {"rope_scaling": None},
    {"rope_parameters": plain},
    {"rope_parameters": plain, **old},
    old | {"rope_scaling": scaling},
    old | {"rope_scaling": legacy},
    {"rope_parameters": scaling | {"rope_theta": 2e4}},
    {"rope_parameters": plain, "rope_scaling": scaling},
    {"rope_parameters": plain, "rope_scaling": scaling, **old},
    old | {"rope_parameters": {"rope_type": "default"}},
    old | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
  ]
  return options[rng.integers(len(options))]


def tensors(family, kv_heads, head, biases, tied):
  """Returns the shapes of a checkpoint's tensors by their names."""
  queries, values = HEADS * head, kv_heads * head
  linears = {
    "self_attn.q_proj": (queries, WIDTH),
    "self_attn.k_proj": (values, WIDTH),
    "self_attn.v_proj": (values, WIDTH),
    "self_attn.o_proj": (WIDTH, queries),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
  }
  norms = {"post_attention_layernorm": WIDTH}
  norms["post_feedforward_layernorm" if family == "olmo2" else "input_layernorm"] = (
    WIDTH
  )
  if family == "qwen3":
    norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
  if family == "olmo2":
    norms |= {"self_attn.q_norm": queries, "self_attn.k_norm": values}
  shapes = {
    "model.embed_tokens.weight": (VOCABULARY, WIDTH),
    "model.norm.weight": WIDTH,
  }
  for layer in range(LAYERS):
    for name, shape in linears.items():
      key = f"model.layers.{layer}.{name}"
      shapes[f"{key}.weight"] = shape
      has_bias = biases["mlp_bias" if name.startswith("mlp") else "attention_bias"]
      is_qkv = name[-6:] in ("q_proj", "k_proj", "v_proj")
      if has_bias or (family == "qwen2" and is_qkv):
        shapes[f"{key}.bias"] = shape[0]
    shapes |= {f"model.layers.{layer}.{k}.weight": size for k, size in norms.items()}
  if not tied:
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
  return shapes


def save_weights(rng, folder, shapes):
  """Writes random tensors, in one file or two, perhaps without the prefix."""
  dtype = [np.float32, np.float16, ml_dtypes.bfloat16][rng.integers(3)]
  stored = {}
  for name, shape in shapes.items():
    noise = rng.standard_normal(shape, np.float32)
    stored[name] = (0.15 * noise + ("norm" in name)).astype(dtype)
  if "lm_head.weight" not in stored and rng.random() < 0.3:
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].copy()
  if rng.random() < 0.2:
    buffer = np.ones(4, np.float32)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = buffer
  if rng.random() < 0.2:
    stored = {name.removeprefix("model."): value for name, value in stored.items()}
  if rng.random() < 0.7:
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return
  places = {}
  for part in (0, 1):
    file = f"model-0000{part + 1}-of-00002.safetensors"
    names = sorted(stored)[part::2]
    save_file({name: stored[name] for name in names}, folder / file, {"format": "pt"})
    places |= dict.fromkeys(names, file)
  write(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def save_tokenizer(rng, folder):
  """Writes a byte-level tokenizer whose added tokens stand in one file or another."""
  pick = lambda *options: options[rng.integers(len(options))]
  bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {char: index for index, char in enumerate(bytes_)}
  tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  flags = lambda: dict(
    lstrip=bool(rng.random() < 0.3),
    rstrip=bool(rng.random() < 0.3),
    single_word=bool(rng.random() < 0.1),
    normalized=bool(rng.random() < 0.2),
  )
  names = ["<s>", "</s>", "<|end|>", "<|user|>", "<pad>"]
  settings = {"bos_token": pick("<s>", None), "eos_token": pick("</s>", "<|end|>")}
  inside = pick(5, 5, 3, 0)
  added = [AddedToken(name, special=True, **flags()) for name in names[:inside]]
  tokenizer.add_special_tokens(added)
  if inside < 5 or rng.random() < 0.5:
    settings["added_tokens_decoder"] = {
      str(256 + index): dict(content=name, special=name != "<|user|>", **flags())
      for index, name in enumerate(names)
    }
  if rng.random() < 0.3:
    eos = {"__type": "AddedToken", "content": settings["eos_token"], **flags()}
    settings["eos_token"] = eos
  if inside >= 2 and settings["bos_token"]:
    template = pick(None, "<s> $A", "<s> $A </s>", "$A </s>")
    if template:
      ends = [("<s>", 256), ("</s>", 257)]
      tokenizer.post_processor = post.TemplateProcessing(
        single=template, special_tokens=ends
      )
    settings |= pick({}, {}, {"add_bos_token": True}, {"add_eos_token": True})
  if rng.random() < 0.3:
    tokenizer.enable_truncation(5)
  if rng.random() < 0.3:
    tokenizer.enable_padding(length=9, pad_id=0, pad_token=bytes_[0])
  if name := pick("PreTrainedTokenizerFast", "LlamaTokenizerFast", None):
    settings["tokenizer_class"] = name
  named = [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": "R"}]
  template = pick(None, TEMPLATE, named, "apart")
  if template == "apart":
    (folder / "chat_template.jinja").write_text(TEMPLATE)
  elif template:
    settings["chat_template"] = template
  tokenizer.save(str(folder / "tokenizer.json"))
  write(folder / "tokenizer_config.json", settings)
