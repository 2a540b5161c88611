import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import models
from mxjax.audit import sizes
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.numerics.realization import one_code
from mxjax.numerics.realization.activation_quantizers import Nearest, OneCode
from mxjax.numerics.recovery.mlp_recovery import MlpRecovery
from mxjax.numerics.recovery.value_recovery import ValueRecovery
from mxjax.numerics.shaping import input_maps
from mxjax.storage import checkpoint, checkpoint_arrays
from tests import tiny

CONFIG = tiny.config(
  vocab_size=96, intermediate_size=128, max_positions=64, eos_ids=(2,)
)
MODEL = models.CausalLM(CONFIG)
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)
NAME = "layers_0/self_attn/q_proj/weight/weight/codes"


def quantized(rng, weight, kind):
  """A leaf of each kind, its tables random: restoring must not care."""
  blocks = weight.shape[1] // 32
  random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  tensor = mxfp4.encode(weight)
  if kind == "hires":
    gram = random(blocks, 32, 32)
    rounding = OneCode(one_code.pack_symmetric(gram @ gram.mT), random(blocks, 32, 32))
    near = jnp.eye(32, dtype=jnp.float32)[None] + 0.1 * random(blocks, 32, 32)
    return QuantizedLinear(tensor, input_maps.BlockDense(near), rounding)
  input_map = input_maps.Hadamard(64) if kind == "hadamard" else None
  return QuantizedLinear(tensor, input_map, Nearest())


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  tree = MODEL.init(jax.random.key(0), TOKENS)["params"]
  for index in range(CONFIG.num_layers):
    layer = tree[f"layers_{index}"]
    kinds = {"self_attn": "hires", "mlp": ("hadamard", "rtn")[index]}
    for block, kind in kinds.items():
      for linear in layer[block].values():
        linear["weight"] = quantized(rng, linear["weight"], kind)
    layer["self_attn"]["value_recovery"] = ValueRecovery(
      jnp.float32([1.1, 0.9]), jnp.float32([0.01, -0.02])
    )
    scalars = [jnp.float32(value) for value in (0.01, -0.02, 0.03, 1.5)]
    layer["mlp"]["mlp_recovery"] = MlpRecovery(*scalars)
  return tree


@pytest.fixture
def saved(params, tmp_path):
  return checkpoint.save_checkpoint(
    tmp_path / "out",
    params,
    CONFIG,
    calibration={"fingerprint": "ab" * 32, "shape": (2, 12)},
    program={"name": "by hand"},
  )


def edit(folder, **changes):
  """Changes the manifest and signs it again."""
  manifest = json.loads((folder / "mxjax.json").read_text()) | changes
  manifest["digest"] = checkpoint.manifest_digest(manifest)
  (folder / "mxjax.json").write_text(json.dumps(manifest))


def test_round_trip_is_bit_for_bit(params, saved):
  restored, config = checkpoint.restore_checkpoint(saved)
  assert jax.tree.structure(restored) == jax.tree.structure(params)
  for ours, theirs in zip(
    jax.tree.leaves(restored), jax.tree.leaves(params), strict=True
  ):
    assert isinstance(ours, jax.Array)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
  assert models.ModelConfig.from_dict(config) == CONFIG
  apply = jax.jit(lambda p: MODEL.apply({"params": p}, TOKENS))
  logits, expected = apply(restored), apply(params)
  assert np.asarray(logits).tobytes() == np.asarray(expected).tobytes()
  assert bool(jnp.isfinite(logits).all())


def test_portions_and_split_weights_change_nothing(params, tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 2**10)
  monkeypatch.setattr(checkpoint_arrays, "BATCH_BYTES", 2**16)
  saved = checkpoint.save_checkpoint(tmp_path / "split", params, CONFIG)
  files = list((saved / "arrays").rglob(f"{NAME.replace('/', '.')}/[0-9]*"))
  assert len(files) == 2
  restored, _ = checkpoint.restore_checkpoint(saved)
  assert jax.tree.structure(restored) == jax.tree.structure(params)
  for ours, theirs in zip(
    jax.tree.leaves(restored), jax.tree.leaves(params), strict=True
  ):
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_the_same_params_make_the_same_files(params, saved, tmp_path):
  """All but the two in which Orbax writes down the time."""
  again = checkpoint.save_checkpoint(tmp_path / "again", params, CONFIG)
  timed = {"_CHECKPOINT_METADATA", "commit_success.txt"}

  def contents(folder):
    return {
      file.relative_to(folder): file.read_bytes()
      for file in (folder / "arrays").rglob("*")
      if file.is_file() and file.name not in timed
    }

  first = contents(saved)
  assert first == contents(again)
  arrays = checkpoint.read_manifest(saved)["arrays"]
  # A description and the values of each, beside what describes the whole.
  assert len(first) >= 2 * len(arrays)


def test_manifest_says_what_was_saved(saved):
  manifest = checkpoint.read_manifest(saved)
  assert manifest["format_version"] == 1
  assert Contract.from_dict(manifest["contract"]) == PAPER_CONTRACT
  assert manifest["calibration"] == {"fingerprint": "ab" * 32, "shape": [2, 12]}
  assert manifest["program"] == {"name": "by hand"}
  types = {path: node["type"] for path, node in manifest["nodes"].items()}
  assert types["embed_tokens/weight"] == "array"
  assert types["layers_0/self_attn/value_recovery"] == "ValueRecovery"
  assert types["layers_1/mlp/mlp_recovery"] == "MlpRecovery"
  leaf = manifest["nodes"]["layers_0/mlp/up_proj/weight"]
  assert leaf["static"]["rules"] == {"scale_rule": "floor", "tie_rule": "away"}
  assert leaf["children"]["input_map"]["static"] == {"size": 64}
  assert leaf["children"]["rounding"]["type"] == "Nearest"
  assert manifest["arrays"][NAME]["shape"] == [64, 32]
  assert manifest["arrays"][NAME]["dtype"] == "uint8"


def test_unquantized_params_and_tokenizer_files_are_kept(tmp_path):
  file = tmp_path / "tokenizer.json"
  file.write_text("{}")
  tree = {"norm": {"weight": np.ones(4, np.float32)}, "empty": {}}
  folder = checkpoint.save_checkpoint(
    tmp_path / "deep" / "out", tree, {"family": "none"}, tokenizer_files=[file]
  )
  assert (folder / "tokenizer" / "tokenizer.json").read_text() == "{}"
  restored, config = checkpoint.restore_checkpoint(folder)
  assert config == {"family": "none"}
  assert restored["empty"] == {}
  np.testing.assert_array_equal(restored["norm"]["weight"], tree["norm"]["weight"])


def test_another_contract_is_refused_by_name(saved):
  other = Contract(rules=mxfp4.Rules(scale_rule="even"), kv_cache=True)
  with pytest.raises(ValueError) as caught:
    checkpoint.restore_checkpoint(saved, contract=other)
  message = str(caught.value)
  assert other.hash in message and PAPER_CONTRACT.hash in message
  assert "rules.scale_rule is 'floor', expected 'even'" in message
  assert "kv_cache is False, expected True" in message
  assert "tie_rule" not in message


def test_leaves_of_other_rules_are_not_saved_under_a_contract(params, tmp_path):
  leaf = params["layers_0"]["mlp"]["up_proj"]["weight"]
  other = dataclasses.replace(leaf, rules=mxfp4.Rules(tie_rule="even"))
  with pytest.raises(ValueError, match="layer/weight has Rules.*tie_rule='even'"):
    checkpoint.save_checkpoint(tmp_path / "out", {"layer": {"weight": other}}, {})
  assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(params, saved):
  before = (saved / "mxjax.json").read_bytes()
  with pytest.raises(FileExistsError, match="never overwritten"):
    checkpoint.save_checkpoint(saved, params, CONFIG)
  assert (saved / "mxjax.json").read_bytes() == before


def test_an_empty_folder_is_used(tmp_path):
  (tmp_path / "out").mkdir()
  tree = {"a": jnp.ones(3, jnp.float32)}
  checkpoint.save_checkpoint(tmp_path / "out", tree, {})
  assert checkpoint.restore_checkpoint(tmp_path / "out")[1] == {}


@pytest.mark.parametrize("existed", [False, True])
def test_a_failed_save_leaves_nothing(tmp_path, existed):
  out = tmp_path / "here" / "out"
  out.parent.mkdir()
  if existed:
    out.mkdir()
  tree = {"a": jnp.ones(3, jnp.float32)}
  with pytest.raises(FileNotFoundError):
    checkpoint.save_checkpoint(
      out, tree, {}, tokenizer_files=[tmp_path / "absent.json"]
    )
  assert list(out.parent.iterdir()) == ([out] if existed else [])
  checkpoint.save_checkpoint(out, tree, {})


@pytest.mark.parametrize(
  "tree", [{"a": 1.0}, {"a": {"b": [jnp.zeros(2)]}}, {"a": np.zeros(2, np.float64)}]
)
def test_leaves_no_checkpoint_can_hold_are_named(tree, tmp_path):
  with pytest.raises(TypeError, match="save_checkpoint: a"):
    checkpoint.save_checkpoint(tmp_path / "out", tree, {})
  assert list(tmp_path.iterdir()) == []


def test_a_key_with_a_slash_is_refused(tmp_path):
  with pytest.raises(TypeError, match="'b/c' under a"):
    checkpoint.save_checkpoint(tmp_path / "out", {"a": {"b/c": jnp.zeros(2)}}, {})


def test_arrays_that_changed_are_named(params, saved, tmp_path):
  leaf = params["layers_0"]["self_attn"]["q_proj"]["weight"]
  codes = leaf.weight.codes.at[3, 4].set(leaf.weight.codes[3, 4] ^ jnp.uint8(1))
  tensor = dataclasses.replace(leaf.weight, codes=codes)
  other = dataclasses.replace(leaf, weight=tensor)
  attention = params["layers_0"]["self_attn"] | {"q_proj": {"weight": other}}
  changed = params | {"layers_0": params["layers_0"] | {"self_attn": attention}}
  second = checkpoint.save_checkpoint(tmp_path / "second", changed, CONFIG)
  files = checkpoint.read_manifest(second)["files"]
  edit(second, **(checkpoint.read_manifest(saved) | {"files": files}))
  with pytest.raises(ValueError, match=f"1 of .* SHA-256 .*: {NAME};"):
    checkpoint.restore_checkpoint(second)
  checkpoint.restore_checkpoint(second, verify=False)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_every_damaged_file_is_named(saved, damage):
  names = list(checkpoint.read_manifest(saved)["files"])
  assert len(names) > 4
  for name in names:
    file = saved / name
    if not (data := file.read_bytes()):
      continue
    middle = len(data) // 2
    flipped = bytes([data[middle] ^ 255])
    file.write_bytes(data[:middle])
    if damage == "flip":
      file.write_bytes(data[:middle] + flipped + data[middle + 1 :])
    elif damage == "remove":
      file.unlink()
    with pytest.raises(ValueError, match=f"got damage: {name} [^;]*; copy"):
      checkpoint.restore_checkpoint(saved)
    file.write_bytes(data)
  checkpoint.restore_checkpoint(saved)


def test_a_truncated_manifest_is_one_sentence(saved):
  file = saved / "mxjax.json"
  file.write_bytes(file.read_bytes()[:-200])
  with pytest.raises(ValueError, match="mxjax.json, got damaged JSON .*; copy"):
    checkpoint.read_manifest(saved)


def test_an_edited_manifest_is_noticed(saved):
  file = saved / "mxjax.json"
  file.write_text(file.read_text().replace('"size": 64', '"size": 32'))
  with pytest.raises(ValueError, match="does not match its digest"):
    checkpoint.restore_checkpoint(saved)


def test_what_is_absent_or_unknown_is_named(saved, tmp_path):
  with pytest.raises(FileNotFoundError, match="expected .*mxjax.json, got no such"):
    checkpoint.read_manifest(tmp_path)
  edit(saved, format_version=7)
  with pytest.raises(ValueError, match="expected format version 1 .* got 7"):
    checkpoint.read_manifest(saved)
  edit(saved, format_version=1, nodes={"a": {"type": "Kite", "static": {}}})
  with pytest.raises(ValueError, match="a has the type 'Kite'"):
    checkpoint.restore_checkpoint(saved)
  (saved / "arrays").rename(saved / "elsewhere")
  with pytest.raises(FileNotFoundError, match="arrays, got no such folder"):
    checkpoint.restore_checkpoint(saved)
  (saved / "mxjax.json").write_text("[]")
  with pytest.raises(ValueError, match="got a JSON list"):
    checkpoint.read_manifest(saved)
  (saved / "mxjax.json").write_text('{"format_version": 1}')
  with pytest.raises(ValueError, match="got none of contract"):
    checkpoint.read_manifest(saved)


def test_sizes_add_up(params):
  report = sizes.size_report(params)
  linears = report["quantized_linears"]
  width, hidden, layers = 64, 128, 2
  weights = layers * (2 * width * width + 2 * width * 32 + 3 * width * hidden)
  assert linears["weights"] == weights
  assert linears["codes"] == weights // 2
  assert linears["scales"] == weights // 32
  assert linears["maps"] == layers * 4 * 2 * 32 * 32 * 4
  assert linears["rounding"] == layers * 4 * 2 * (528 + 1024) * 4
  assert report["recovery"] == layers * (2 * 2 + 4) * 4
  values = 96 * width + 5 * width
  assert report["other"] == 2 * values
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert report["total"] == held
  assert report["bf16_total"] == 2 * (weights + values)
  assert report["ratio"] == report["bf16_total"] / held
  assert sizes.size_report(jax.eval_shape(lambda: params)) == report


def test_importing_is_light():
  program = "import sys, mxjax.storage.checkpoint; assert 'orbax' not in sys.modules"
  root = pathlib.Path(__file__).parents[3]
  subprocess.run([sys.executable, "-c", program], check=True, cwd=root)
