"""Thousands of damaged files: each is read, or refused in one sentence with its name.

DAMAGED_FILES sets how many; the default takes seconds.
"""

import gzip
import io
import json
import os
import random
import resource
import shutil
import time

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mxjax import models
from mxjax.cli.main import MENDABLE
from mxjax.evaluation import datasets, results
from mxjax.models.families import to_hf_config
from mxjax.models.loading import weights
from mxjax.run.folder import RunFolder
from mxjax.storage import checkpoint, digested_json, export
from tests import tiny
from tests.mxjax import quantized

FILES = int(os.environ.get("DAMAGED_FILES", "320"))
SECONDS, BYTES = 10, 2**30
"""What reading one file may take, and what all of them together."""
VALUES = (
  *(None, True, False, 0, -1, 1, 2, 2**31, 2**64, 10**30, 0.5, 1e308, float("nan")),
  *("", "x", "../../etc/passwd", "/etc/passwd", "\0", "é" * 99, [], {}, [None], [[]]),
  *({"a": 1}, [1, "a"], "1" * 5000, {"": {}}, -0.0, 1e-320),
)
HUGE = [0, 1, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def places(node, path=()):
  """Yields the path of every value in JSON."""
  yield path
  items = enumerate(node) if isinstance(node, list) else ()
  for key, value in node.items() if isinstance(node, dict) else items:
    yield from places(value, (*path, key))


def other_json(rng, values):
  """JSON with one value replaced, removed, renamed, or nested deep."""
  path = rng.choice(list(places(values))[:2000])
  if not path:
    return rng.choice(VALUES)
  *parents, last = path
  node = values
  for key in parents:
    node = node[key]
  how = rng.random()
  if how < 0.7:
    node[last] = rng.choice(VALUES)
  elif how < 0.85:
    del node[last]
  elif isinstance(node, dict):
    node[rng.choice(["x", "../x", "", "0" * 300])] = node.pop(last)
  else:
    node.extend(node)
  return values


def other_bytes(rng, data):
  """Bytes flipped, cut, repeated, filled, or with a large number in them."""
  at = rng.randrange(len(data) + 1)
  end = min(len(data), at + rng.choice([1, 8, 100, 5000]))
  number = rng.choice(HUGE)
  early = rng.randrange(min(len(data) + 1, 400))
  return rng.choice(
    [
      lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
      lambda: data[:at],
      lambda: data[:at] + data[end:],
      lambda: data[:at] + data[at:end] * 3 + data[end:],
      lambda: data[:at] + bytes(end - at) + data[end:],
      lambda: data[:at] + rng.randbytes(end - at) + data[end:],
      lambda: data[:early] + number.to_bytes(8, "little") + data[early + 8 :],
      lambda: data[:early] + (number % 2**32).to_bytes(4, "little") + data[early + 4 :],
      lambda: data[:at] + rng.choice([b"[", b'{"a":']) * 100_000 + data[at:],
      lambda: data + rng.randbytes(50),
      lambda: b"",
      lambda: rng.randbytes(300),
    ]
  )()


def dumped(values):
  return json.dumps(values).encode()


def in_json(rng, data):
  return dumped(other_json(rng, json.loads(data)))


def in_header(rng, data):
  """Another header of safetensors, with its length."""
  end = 8 + int.from_bytes(data[:8], "little")
  header = in_json(rng, data[8:end])
  return len(header).to_bytes(8, "little") + header + data[end:]


def in_lines(rng, data):
  lines = data.splitlines(keepends=True)
  number = rng.randrange(len(lines))
  lines[number] = rng.choice([in_json, other_bytes])(rng, lines[number])
  return b"\n".join(lines)


def resealed(rng, data):
  """Another manifest, with the digest of its content."""
  values = other_json(rng, json.loads(data))
  if isinstance(values, dict):
    values["digest"] = digested_json.digest(values)
  return dumped(values)


def in_gzip(rng, data):
  if rng.random() < 0.1:
    return gzip.compress(bytes(200 * 2**20), 9)
  return gzip.compress(in_lines(rng, gzip.decompress(data)))


def other_array(rng, data):
  """Another dtype, shape or kind of file, truthful or not."""
  dtype = rng.choice(["<f8", "<M8[D]", "<m8[s]", "<c16", "<U3", "|O", "|b1", ">i8"])
  array, file = np.zeros((3, 16)).astype(dtype), io.BytesIO()
  if rng.random() < 0.2:
    np.savez(file, array)
  elif rng.random() < 0.5:
    np.save(file, array, allow_pickle=True)
  else:
    shape = rng.choice(["(10**15, 16)", "(99999999999, 16)", "(-3, 16)", "()", "(3,)"])
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    file.write(
      b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data[:64]
    )
  return file.getvalue()


def write_gguf(path, config, params):
  """A model of one layer and its tokenizer, as llama.cpp has them."""
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_block_count(1)
  writer.add_context_length(128)
  writer.add_embedding_length(64)
  writer.add_feed_forward_length(96)
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  tokens = [chr(97 + i) for i in range(26)] + [
    "ab",
    "cd",
    *(f"<{i}>" for i in range(33)),
  ]
  writer.add_token_list(tokens)
  writer.add_token_merges(["a b", "c d"])
  writer.add_token_types([1] * 28 + [3] * 33)
  writer.add_eos_token_id(60)
  names = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "attn_output",
    **{f"{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
  }
  add = lambda name, value: writer.add_tensor(name, np.asarray(value, np.float32))
  add("token_embd.weight", params["embed_tokens"]["weight"])
  add("output_norm.weight", params["norm"]["weight"])
  layer = params["layers_0"]
  for block in (layer, layer["self_attn"], layer["mlp"]):
    for name, part in block.items():
      if name in names:
        add(f"blk.0.{names[name]}.weight", part["weight"])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def read_model(path):
  models.open_pretrained(path)[1].load()


def read_tokenizer(path):
  tokenizer = models.load_tokenizer(path)
  tokenizer.decode(tokenizer.encode("the cat sat on 12 mats, é 😀 <end>"))
  return tokenizer.prefix_ids, tokenizer.fingerprint, tokenizer.vocab_size


def read_tokens(name):
  class Letters:
    prefix_ids = ()

    def encode(self, text):
      return np.asarray([ord(c) % 50 for c in text], np.int32)

  options = {"count": 1, "length": 4, "split": "test"}
  return lambda folder: datasets.load_tokens(str(folder / name), Letters(), **options)


def read_run(folder):
  with RunFolder(folder, resume=True) as run:
    run.begin({"weights": "ab"}, {"jax": "1"})
    for layer in run.finished:
      run.read_layer(layer)
    if run.finished:
      run.read_streams(2)
    run.read_prepared()
    run.read_steps("learning")
    run.read_steps("tuning")


def read_results(folder):
  read = results.read([str(folder)])
  return results.references(read), [(one.scores, one.partial) for one in read]


@pytest.fixture(scope="module")
def originals(tiny_config, tiny_params, tmp_path_factory):
  """Small valid folders: name of the file, reader, and ways to damage it, by kind."""
  root, kinds = tmp_path_factory.mktemp("originals"), {}

  def folder(name):
    (root / name).mkdir()
    return root / name

  model = folder("model")
  weights.save_folder(model, to_hf_config(tiny_config), tiny_params)
  tiny.save_tokenizer(model, 61)
  eos = {
    "eos_token": {"__type": "AddedToken", "content": "a"},
    "chat_template": [{"name": "x", "template": "T"}],
  }
  (model / "tokenizer_config.json").write_text(json.dumps(eos))
  kinds["config"] = model, "config.json", read_model, [in_json]
  kinds["safetensors"] = model, "model.safetensors", read_model, [in_header]
  kinds["tokenizer"] = model, "tokenizer.json", read_tokenizer, [in_json]
  kinds["settings"] = model, "tokenizer_config.json", read_tokenizer, [in_json]
  shards = folder("shards")
  shutil.copyfile(model / "config.json", shards / "config.json")
  with weights.open_tensors(model / "model.safetensors") as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  places = {}
  for number in (0, 1):
    part = {name: tensors[name] for name in sorted(tensors)[number::2]}
    save_file(part, shards / f"{number}.safetensors")
    places |= dict.fromkeys(part, f"{number}.safetensors")
  (shards / weights.INDEX_FILE).write_text(json.dumps({"weight_map": places}))
  kinds["index"] = shards, weights.INDEX_FILE, read_model, [in_json]
  kinds["shard"] = shards, "1.safetensors", read_model, [in_header]
  one = folder("gguf")
  write_gguf(one / "m.gguf", tiny_config, tiny_params)
  kinds["gguf"] = one, "m.gguf", lambda f: read_model(f / "m.gguf"), []
  of_gguf = lambda f: read_tokenizer(f / "m.gguf")
  kinds["gguf tokenizer"] = one, "m.gguf", of_gguf, []
  text = folder("text")
  lines = "".join(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(9))
  (text / "a.jsonl").write_text(lines)
  (text / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
  (text / "a.txt").write_text(lines)
  np.save(text / "a.npy", np.arange(48).reshape(3, 16))
  for name, ways in {
    "a.jsonl": [in_lines],
    "a.jsonl.gz": [in_gzip],
    "a.txt": [],
    "a.npy": [other_array],
  }.items():
    kinds[name] = text, name, read_tokens(name), ways
  params = quantized.model(tiny_params, quantized.MIXED, recovery=True)
  saved = checkpoint.save_checkpoint(root / "checkpoint", params, tiny_config)
  array = next(name for name in checkpoint.read_manifest(saved)["files"])
  restore = checkpoint.restore_checkpoint
  kinds["manifest"] = saved, "mxjax.json", restore, [in_json, resealed, resealed]
  kinds["array"] = saved, array, restore, []
  source = export.Source(quantized.model(tiny_params, "rtn"), tiny_config)
  state = export.write_state(root / "state", source)
  kinds["state"] = state, "mxjax_state.json", export.read_state, [in_json]
  kinds["export"] = state, "mxjax_export.json", export.read_state, [in_json, resealed]
  packed = export.write_compressed_tensors(root / "packed", source)
  (packed / "mxjax_export.json").unlink()
  read = export.read_compressed_tensors
  kinds["foreign config"] = packed, "config.json", read, [in_json, in_json]
  kinds["foreign tensors"] = packed, "model.safetensors", read, [in_header]
  run = root / "run"
  with RunFolder(run) as opened:
    opened.begin({"weights": "ab"}, {"jax": "1"})
    opened.write_prepared({"norm": {"w": jnp.ones(2)}}, {"a/b": jnp.ones(2)}, {})
    clock = {"seconds": {"all": 1.0}, "peak_bytes": {}}
    rows = {"float": [jnp.ones((2, 3, 4))]}
    layer = params["layers_0"]
    opened.write_layer("layers_0", layer, {"v": 1}, streams=rows, clock=clock)
    opened.write_step("tuning", {"s": jnp.ones(2)}, [0.5], 1.0)
  kinds["run"] = run, "state.json", read_run, [in_json, resealed, resealed]
  kinds["layer"] = run, "layers/layers_0.safetensors", read_run, [in_header]
  scored = folder("scored")
  task = {"score": 5.5, "items": 2, "official_items": 9, "token_sha256": "ab"}
  found = results.to_json(tasks={"c4": task}, model="m", method="BF16", seed=None)
  results.write(scored, found, {})
  kinds["result"] = scored, "evaluation.json", read_results, [in_json]
  for where, _, reader, _ in kinds.values():
    reader(where)
  return kinds


def fault(reader, folder, name):
  """What is wrong with how a file is refused, if it is refused."""
  start = time.monotonic()
  try:
    reader(folder)
  except MENDABLE as error:
    text = str(error)
    if len(text.splitlines()) != 1 or str(folder) not in text or "; " not in text:
      return f"said {type(error).__name__}: {text[:300]!r}"
  except BaseException as error:
    return f"raised {type(error).__name__}: {str(error)[:300]!r}"
  seconds = time.monotonic() - start
  return f"took {seconds:.0f} s" if seconds > SECONDS else None


@pytest.mark.slow
# Reads that Orbax started beside one that failed complain when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(max(120, FILES))
def test_no_damaged_file_does_more_than_be_refused(originals, tmp_path):
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  wrong, outside = [], tmp_path / "etc"
  outside.write_text("not of this folder")
  for number in range(FILES):
    rng = random.Random(number)
    kind = list(originals)[number % len(originals)]
    source, name, reader, ways = originals[kind]
    damage = rng.choice([other_bytes, *ways, *ways])
    folder = shutil.copytree(source, tmp_path / "x" / "copy")
    data = damage(rng, (source / name).read_bytes())
    (folder / name).write_bytes(data)
    if said := fault(reader, folder, name):
      wrong.append(f"{number} {kind} {damage.__name__} {said}")
    shutil.rmtree(folder)
  assert not wrong, f"{len(wrong)} of {FILES}:\n" + "\n".join(wrong)
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak < BYTES
  assert outside.read_text() == "not of this folder"
