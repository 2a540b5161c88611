"""Makes golden/odd_folders.npz and .json: what transformers and torch make of them.

Run it where make_models.py runs, with mxjax's other needs beside torch, from the root:

  /tmp/torchenv/bin/python -m tests.golden.make_odd_folders

`logits` are float32 `[COUNT, 3, V]`: those of `odd_folders.TOKENS` at the last three
positions. The JSON has for each folder what `read` below returns.
"""

import json
import pathlib
import tempfile

import numpy as np

from tests.models.loading import odd_folders

HERE = pathlib.Path(__file__).parent


def logits_of(folder):
  """The logits of the last three positions by torch, float32."""
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  with torch.no_grad():
    return model(torch.tensor(odd_folders.TOKENS, dtype=torch.long)).logits[0, -3:]


def read(folder):
  """What transformers reads of a folder beside its weights, JSON-ready."""
  from transformers import AutoConfig, AutoTokenizer, GenerationConfig

  config = AutoConfig.from_pretrained(folder)
  tokenizer = AutoTokenizer.from_pretrained(folder)
  ends = [config.eos_token_id, tokenizer.eos_token_id]
  if (folder / "generation_config.json").is_file():
    ends.append(GenerationConfig.from_pretrained(folder).eos_token_id)
  listed = [one if isinstance(one, list) else [one] for one in ends]
  ids = {end for one in listed for end in one if end is not None}
  call = lambda text, **how: tokenizer(text, **how).input_ids
  prompt = None
  if tokenizer.chat_template:
    prompt = tokenizer.apply_chat_template(
      odd_folders.MESSAGES, tokenize=False, add_generation_prompt=True
    )
  return {
    "model_type": config.model_type,
    "ends": sorted(end for end in ids if 0 <= end < odd_folders.VOCABULARY),
    "bos": tokenizer.bos_token_id,
    "eos": tokenizer.eos_token_id,
    "ids": [call(text, add_special_tokens=False) for text in odd_folders.TEXTS],
    "whole": [call(text) for text in odd_folders.TEXTS],
    "prompt": prompt,
  }


def main():
  logits, facts = [], []
  for number in range(odd_folders.COUNT):
    with tempfile.TemporaryDirectory() as scratch:
      folder = odd_folders.make(pathlib.Path(scratch) / "model", number)
      logits.append(logits_of(folder).numpy())
      facts.append(read(folder))
  np.savez_compressed(HERE / "odd_folders.npz", logits=np.stack(logits))
  (HERE / "odd_folders.json").write_text(
    "[\n" + ",\n".join(json.dumps(one) for one in facts) + "\n]\n"
  )


if __name__ == "__main__":
  main()
