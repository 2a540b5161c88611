import json

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from mxjax import models
from mxjax.models.loading import weights

LAYER = "model.layers.1."


def save_shards(golden, folder):
  """Splits a folder's weights over two files and an index."""
  golden.save(folder)
  (folder / "model.safetensors").unlink()
  weight_map = {}
  for shard in (0, 1):
    file = f"model-0000{shard + 1}-of-00002.safetensors"
    part = {name: golden.weights[name] for name in sorted(golden.weights)[shard::2]}
    save_file(part, folder / file)
    weight_map |= dict.fromkeys(part, file)
  index = {"metadata": {}, "weight_map": weight_map}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_is_read_as_stored(family_golden, tmp_path, dtype):
  stored = {k: v.astype(jnp.dtype(dtype)) for k, v in family_golden.weights.items()}
  _, params = models.from_pretrained(family_golden.save(tmp_path / "hf", stored))
  leaves = flax.traverse_util.flatten_dict(params)
  assert len(leaves) == len(stored)
  for name, value in stored.items():
    leaf = leaves[weights.params_path(name)]
    assert leaf.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(leaf), value)


def test_shards_give_the_same_params_as_one_file(golden, tmp_path):
  _, single = models.from_pretrained(golden.save(tmp_path / "single"))
  _, sharded = models.from_pretrained(save_shards(golden, tmp_path / "sharded"))
  assert jax.tree.structure(single) == jax.tree.structure(sharded)
  jax.tree.map(np.testing.assert_array_equal, single, sharded)


def test_a_missing_shard_is_named(golden, tmp_path):
  folder = save_shards(golden, tmp_path / "hf")
  (folder / "model-00002-of-00002.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="all but model-00002-of-00002"):
    models.from_pretrained(folder)


@pytest.mark.parametrize("name", ["/tmp/x.safetensors", "../x", "a/../../x", "a/x", ""])
def test_shards_lie_in_the_folder_of_their_index(golden, tmp_path, name):
  folder = save_shards(golden, tmp_path / "hf")
  path = folder / "model.safetensors.index.json"
  index = json.loads(path.read_text())
  index["weight_map"]["model.norm.weight"] = name
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match="names of files in its own folder, got "):
    models.from_pretrained(folder)


def test_a_tensor_has_one_shard(golden, tmp_path):
  folder = save_shards(golden, tmp_path / "hf")
  save_file(golden.weights, folder / "model-00002-of-00002.safetensors")
  with pytest.raises(ValueError, match="that no other shard has, got .*00001-of-00002"):
    models.from_pretrained(folder)


@pytest.mark.parametrize(
  "offsets", [[-4096, 0], [0, 4096], [128, 64], [2**62, 2**62 + 128], [0, 2**64]]
)
def test_offsets_that_overlap_or_leave_the_file_are_refused(golden, tmp_path, offsets):
  path = golden.save(tmp_path / "hf") / "model.safetensors"
  data = path.read_bytes()
  end = 8 + int.from_bytes(data[:8], "little")
  header = json.loads(data[8:end])
  header["model.norm.weight"]["data_offsets"] = offsets
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
  with pytest.raises(ValueError, match="safetensors: expected .*all its tensors, got"):
    models.from_pretrained(path.parent)


def test_params_do_not_need_the_file_any_more(golden, tmp_path):
  folder = golden.save(tmp_path / "hf")
  model, params = models.from_pretrained(folder)
  path = folder / "model.safetensors"
  path.write_bytes(b"\0" * path.stat().st_size)
  logits = model.apply({"params": params}, golden.tokens)
  np.testing.assert_allclose(logits, golden.logits, atol=1e-4)


@pytest.mark.parametrize("kept", [0.9, 0.01])
def test_a_truncated_file_is_told_by_its_bytes(golden, tmp_path, kept):
  path = golden.save(tmp_path / "hf") / "model.safetensors"
  data = path.read_bytes()
  size = int(kept * len(data))
  path.write_bytes(data[:size])
  header_end = 8 + int.from_bytes(data[:8], "little")
  what = (
    "all its tensors" if size >= header_end else f"{header_end} bytes by its header"
  )
  message = rf"model.safetensors: expected .*{what}, got {size}.*; .*download"
  with pytest.raises(ValueError, match=message):
    models.from_pretrained(path.parent)


def test_a_file_of_another_format_is_refused(golden, tmp_path):
  path = golden.save(tmp_path / "hf") / "model.safetensors"
  path.write_bytes((4).to_bytes(8, "little") + b"\xff\xfe{]")
  with pytest.raises(ValueError, match="JSON header"):
    models.from_pretrained(path.parent)


def test_every_tensor_out_of_place_is_named_once(golden, tmp_path):
  stored = dict(golden.weights)
  del stored[LAYER + "mlp.up_proj.weight"], stored["model.norm.weight"]
  stored["model.extra.weight"] = np.zeros(3, np.float32)
  stored[LAYER + "self_attn.k_proj.weight"] = np.zeros((4, 32), np.float32)
  with pytest.raises(ValueError, match="expected the 21 tensors") as caught:
    models.from_pretrained(golden.save(tmp_path / "hf", stored))
  message = str(caught.value)
  assert "layers_1.mlp.up_proj.weight is missing" in message
  assert "norm.weight is missing" in message
  assert "model.extra.weight is unexpected" in message
  assert "k_proj.weight has shape [4, 32], not [16, 32]" in message


def test_nan_and_inf_are_named_and_counted(golden, tmp_path):
  stored = {name: value.copy() for name, value in golden.weights.items()}
  stored[LAYER + "mlp.up_proj.weight"][3, 5:8] = np.nan
  stored["model.norm.weight"][0] = -np.inf
  message = r"up_proj.weight has 3 of 2048; model.norm.weight has 1 of 32; download"
  with pytest.raises(ValueError, match=message):
    models.from_pretrained(golden.save(tmp_path / "hf", stored))


def test_a_foreign_dtype_is_named(golden, tmp_path):
  stored = golden.weights | {"model.norm.weight": np.ones(32, np.int8)}
  with pytest.raises(ValueError, match="model.norm.weight in BF16, F16, F32, got I8"):
    models.from_pretrained(golden.save(tmp_path / "hf", stored))


def test_rotary_buffers_of_old_checkpoints_are_ignored(golden, tmp_path):
  buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
  models.from_pretrained(golden.save(tmp_path / "hf", golden.weights | buffer))


def test_a_tied_head_may_be_stored_only_as_a_copy(golden, tmp_path):
  embedding = golden.weights["model.embed_tokens.weight"]
  copy = golden.weights | {"lm_head.weight": embedding}
  folder = golden.save(tmp_path / "copy", copy, tie_word_embeddings=True)
  assert "lm_head" not in models.from_pretrained(folder)[1]
  folder = golden.save(tmp_path / "other", tie_word_embeddings=True)
  with pytest.raises(ValueError, match="lm_head.weight to equal the embedding"):
    models.from_pretrained(folder)


def test_a_folder_without_files_says_what_it_needs(golden, tmp_path):
  with pytest.raises(FileNotFoundError, match=r"config\.json"):
    models.from_pretrained(tmp_path)
  (golden.save(tmp_path / "hf") / "model.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="index"):
    models.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize(
  ("prefix", "mend"),
  [
    ("model.language_model.", "part of a larger model"),
    ("language_model.model.", "part of a larger model"),
    ("_orig_mod.model.", "torch.compile"),
    ("module.model.", "DataParallel"),
    ("base_model.model.model.", "merge_and_unload"),
  ],
)
def test_a_prefix_is_named_once_and_with_its_reason(golden, tmp_path, prefix, mend):
  stored = {
    name.replace("model.", prefix, 1) if name.startswith("model.") else name: value
    for name, value in golden.weights.items()
  }
  with pytest.raises(ValueError, match=rf"the prefix {prefix} .*{mend}") as caught:
    models.from_pretrained(golden.save(tmp_path / "hf", stored))
  assert "missing" not in str(caught.value)


def test_names_without_the_prefix_are_those_of_the_bare_model(golden, tmp_path):
  bare = {name.removeprefix("model."): value for name, value in golden.weights.items()}
  _, want = models.from_pretrained(golden.save(tmp_path / "hf"))
  _, got = models.from_pretrained(golden.save(tmp_path / "bare", bare))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  both = bare | golden.weights
  with pytest.raises(ValueError, match="which are two names of one"):
    models.from_pretrained(golden.save(tmp_path / "both", both))


@pytest.mark.parametrize(
  ("files", "message"),
  [
    (["pytorch_model.bin"], r"only pickled weights \(pytorch_model.bin\)"),
    (["pytorch_model.bin.index.json"], "only the index of pickled weights"),
    (
      ["model-00001-of-00002.safetensors"],
      "1 shard without the index; download model",
    ),
    (
      ["model.Q4_K_M.gguf"],
      "GGUF file model.Q4_K_M.gguf; name the file, .*Q4_K_M.gguf",
    ),
    (
      ["adapter_config.json", "adapter_model.safetensors"],
      "adapter .*merge_and_unload",
    ),
    (["consolidated.safetensors"], r"other names \(consolidated.safetensors\)"),
    (["tf_model.h5"], "another library"),
    ([], "got no weights"),
  ],
)
def test_weights_that_are_not_there_are_told_from_others(
  golden, tmp_path, files, message
):
  (golden.save(tmp_path) / "model.safetensors").unlink()
  for name in files:
    (tmp_path / name).touch()
  with pytest.raises(FileNotFoundError, match=message):
    models.from_pretrained(tmp_path)


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("mlp.up_proj.weight_scale_inv", "fp8 with block scales"),
    ("mlp.up_proj.weight_packed", "compressed-tensors"),
    ("mlp.up_proj.qweight", "GPTQ or AWQ"),
    ("mlp.up_proj.weight.absmax", "bitsandbytes 4-bit"),
    ("mlp.up_proj.SCB", "bitsandbytes int8"),
    ("mlp.up_proj.scales", "MLX"),
  ],
)
def test_quantized_tensors_are_refused_by_their_kind(golden, tmp_path, name, kind):
  stored = golden.weights | {LAYER + name: np.ones(3, np.float32)}
  with pytest.raises(NotImplementedError, match=f"{name}, as {kind} has"):
    models.from_pretrained(golden.save(tmp_path, stored))


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_pointer_of_git_lfs_is_named(golden, tmp_path, name):
  path = golden.save(tmp_path) / name
  path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
  with pytest.raises(ValueError, match="got a Git LFS pointer of .*git lfs pull"):
    models.from_pretrained(path if name.endswith(".gguf") else tmp_path)


@pytest.mark.parametrize(
  ("name", "mend"),
  [
    ("mxjax.json", "quantized; name the float model; `mxjax evaluate`, .*`mxjax.load`"),
    ("checkpoint/mxjax.json", "quantized; name the float model; `mxjax evaluate`"),
    ("mxjax_state.json", "format safetensors; read it by .*read_state`"),
  ],
)
def test_a_folder_that_mxjax_wrote_is_no_float_model(tmp_path, name, mend):
  (tmp_path / name).parent.mkdir(exist_ok=True)
  (tmp_path / name).touch()
  with pytest.raises(FileNotFoundError, match=mend):
    models.from_pretrained(tmp_path)


def test_a_folder_that_transformers_runs_by_our_code_is_quantized(golden, tmp_path):
  folder = golden.save(tmp_path)
  config = json.loads((folder / "config.json").read_text())
  config["mxfp4"] = {"linears": {str(i): {} for i in range(1000)}}
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(NotImplementedError, match="kind mxjax export --format transform"):
    models.from_pretrained(folder)
  # A long value of another field is cut.
  config["other"] = config.pop("mxfp4")
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(NotImplementedError, match=r"other=.*\.\.\.") as refused:
    models.from_pretrained(folder)
  assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
  ("generation", "ends"),
  [([7, 2], (2, 7)), (7, (2, 7)), (None, (2,)), ([], (2,)), ([2, 10**6, -1], (2,))],
)
def test_stop_ids_are_those_of_both_configs(golden, tmp_path, generation, ends):
  folder = golden.save(tmp_path, eos_token_id=2)
  values = {"eos_token_id": generation, "temperature": 0.5}
  (folder / "generation_config.json").write_text(json.dumps(values))
  assert models.load_config(folder).eos_ids == ends
  assert models.load_config(folder / "config.json").eos_ids == ends
  assert models.open_pretrained(folder)[1].config.eos_ids == ends


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "end"}'])
def test_a_damaged_generation_config_is_named(golden, tmp_path, text):
  folder = golden.save(tmp_path)
  (folder / "generation_config.json").write_text(text)
  with pytest.raises(ValueError, match="generation_config.json: expected"):
    models.load_config(folder)
