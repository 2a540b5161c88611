"""Checkpoints: the same bits back, or one sentence that names what is wrong."""

import dataclasses
import gc
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import models
from mxjax.layers import sizes
from mxjax.numerics import mxfp4
from mxjax.numerics.contract import PAPER_CONTRACT, Contract
from mxjax.storage import checkpoint, checkpoint_arrays, digested_json
from tests import tiny
from tests.mxjax import quantized
from tests.mxjax.quantized import DAMAGES, assert_same, at, damage, replaced

CONFIG = tiny.config(eos_ids=(2,))
NAME = "layers_0/self_attn/q_proj/weight/weight/codes"


@pytest.fixture(scope="module")
def params(tiny_params):
  return quantized.model(tiny_params, quantized.MIXED, recovery=True)


@pytest.fixture(scope="module")
def stored(params, tmp_path_factory):
  return checkpoint.save_checkpoint(
    tmp_path_factory.mktemp("stored") / "out",
    params,
    CONFIG,
    calibration={"fingerprint": "ab" * 32, "shape": (2, 12)},
    program={"name": "by hand"},
  )


@pytest.fixture
def saved(stored, tmp_path):
  """A copy of the checkpoint, for a test that harms it."""
  return shutil.copytree(stored, tmp_path / "out")


def edit(folder, **changes):
  """Changes the manifest and signs it again."""
  manifest = json.loads((folder / "mxjax.json").read_text()) | changes
  manifest["digest"] = digested_json.digest(manifest)
  (folder / "mxjax.json").write_text(json.dumps(manifest))


def test_round_trip_is_bit_for_bit(params, stored):
  restored, config = checkpoint.restore_checkpoint(stored)
  assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
  assert_same(restored, params)
  assert models.ModelConfig.from_dict(config) == CONFIG


@pytest.mark.slow
def test_portions_and_split_weights_change_nothing(params, tmp_path, monkeypatch):
  monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 2**10)
  monkeypatch.setattr(checkpoint_arrays, "BATCH_BYTES", 2**16)
  saved = checkpoint.save_checkpoint(tmp_path / "split", params, CONFIG)
  files = list((saved / "arrays").rglob(f"{NAME.replace('/', '.')}/[0-9]*"))
  assert len(files) == 2
  assert_same(checkpoint.restore_checkpoint(saved)[0], params)


def test_the_same_params_make_the_same_files(params, stored, tmp_path):
  """All but the two in which Orbax writes down the time."""
  again = checkpoint.save_checkpoint(tmp_path / "again", params, CONFIG)
  timed = {"_CHECKPOINT_METADATA", "commit_success.txt"}

  def contents(folder):
    return {
      file.relative_to(folder): file.read_bytes()
      for file in (folder / "arrays").rglob("*")
      if file.is_file() and file.name not in timed
    }

  first = contents(stored)
  assert first == contents(again)
  arrays = checkpoint.read_manifest(stored)["arrays"]
  # A description and the values of each, beside what describes the whole.
  assert len(first) >= 2 * len(arrays)


def test_manifest_says_what_was_saved(stored):
  manifest = checkpoint.read_manifest(stored)
  assert manifest["format_version"] == 2
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


def test_another_contract_is_refused_by_name(stored):
  other = Contract(rules=mxfp4.Rules(scale_rule="even"), kv_cache=True)
  with pytest.raises(ValueError) as caught:
    checkpoint.restore_checkpoint(stored, contract=other)
  message = str(caught.value)
  assert other.hash in message and PAPER_CONTRACT.hash in message
  assert "rules.scale_rule is 'floor', expected 'even'" in message
  assert "kv_cache is False, expected True" in message
  assert "tie_rule" not in message


def test_leaves_of_other_rules_are_not_saved_under_a_contract(params, tmp_path):
  leaf = at(params, "layers_0/mlp/up_proj/weight")
  other = dataclasses.replace(leaf, rules=mxfp4.Rules(tie_rule="even"))
  with pytest.raises(ValueError, match="layer/weight has Rules.*tie_rule='even'"):
    checkpoint.save_checkpoint(tmp_path / "out", {"layer": {"weight": other}}, {})
  assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(params, stored):
  before = (stored / "mxjax.json").read_bytes()
  with pytest.raises(FileExistsError, match="never overwritten"):
    checkpoint.save_checkpoint(stored, params, CONFIG)
  assert (stored / "mxjax.json").read_bytes() == before


@pytest.mark.parametrize("existed", [False, True])
def test_a_failed_save_leaves_nothing(tmp_path, existed):
  out = tmp_path / "here" / "out"
  out.parent.mkdir()
  if existed:
    out.mkdir()
  tree = {"a": jnp.ones(3, jnp.float32)}
  absent = [tmp_path / "absent.json"]
  with pytest.raises(FileNotFoundError):
    checkpoint.save_checkpoint(out, tree, {}, tokenizer_files=absent)
  assert list(out.parent.iterdir()) == ([out] if existed else [])
  checkpoint.save_checkpoint(out, tree, {})
  assert_same(checkpoint.restore_checkpoint(out)[0], tree)


@pytest.mark.parametrize(
  ("tree", "message"),
  [
    ({"a": 1.0}, "save_checkpoint: a: .* got a float"),
    ({"a": {"b": [jnp.zeros(2)]}}, "save_checkpoint: a/b: .* got a list"),
    ({"a": np.zeros(2, np.float64)}, "save_checkpoint: a: .* got float64"),
    ({"a": {"b/c": jnp.zeros(2)}}, "save_checkpoint: a: .* got 'b/c'"),
  ],
)
def test_what_no_checkpoint_can_hold_is_named(tree, message, tmp_path):
  with pytest.raises(TypeError, match=message):
    checkpoint.save_checkpoint(tmp_path / "out", tree, {})
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_arrays_that_changed_are_named(params, stored, tmp_path):
  path = "layers_0/self_attn/q_proj/weight"
  tensor = at(params, path).weight
  codes = tensor.codes.at[3, 4].set(tensor.codes[3, 4] ^ jnp.uint8(1))
  other = dataclasses.replace(
    at(params, path), weight=dataclasses.replace(tensor, codes=codes)
  )
  changed = replaced(params, path, other)
  second = checkpoint.save_checkpoint(tmp_path / "second", changed, CONFIG)
  files = checkpoint.read_manifest(second)["files"]
  edit(second, **(checkpoint.read_manifest(stored) | {"files": files}))
  with pytest.raises(ValueError, match=f"SHA-256 .* in 1 of .*: {NAME};"):
    checkpoint.restore_checkpoint(second)
  checkpoint.restore_checkpoint(second, verify=False)


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGES)
def test_every_damaged_file_is_named(saved, how):
  names = list(checkpoint.read_manifest(saved)["files"])
  assert len(names) > 4
  for name in names:
    file = saved / name
    if not (data := file.read_bytes()):
      continue
    damage(file, how)
    with pytest.raises(ValueError, match=f"got damage: {name} [^;]*; copy"):
      checkpoint.restore_checkpoint(saved)
    file.write_bytes(data)
  checkpoint.restore_checkpoint(saved)


@pytest.mark.parametrize(
  ("harm", "message"),
  [
    (
      lambda text: text[:-200],
      "mxjax.json: expected the manifest .*Invalid JSON.*; copy",
    ),
    (
      lambda text: text.replace('"size": 64', '"size": 32'),
      "does not match its digest",
    ),
    (lambda _: "[]", "should be an object"),
    (lambda _: '{"format_version": 2}', "contract Field required"),
  ],
)
def test_a_damaged_manifest_is_one_sentence(saved, harm, message):
  file = saved / "mxjax.json"
  file.write_text(harm(file.read_text()))
  with pytest.raises(ValueError, match=message):
    checkpoint.restore_checkpoint(saved)


@pytest.mark.slow
def test_a_shape_or_rules_that_are_not_the_stored_ones_are_named(saved):
  manifest = checkpoint.read_manifest(saved)
  path = next(name for name in manifest["arrays"] if name.endswith("/codes"))
  linear, arrays = path.removesuffix("/weight/codes"), manifest["arrays"]
  turned = {**arrays[path], "shape": arrays[path]["shape"][::-1]}
  edit(saved, arrays={**arrays, path: turned})
  with pytest.raises(ValueError, match=f"with the shape .* {path}"):
    checkpoint.restore_checkpoint(saved)
  manifest["nodes"][linear]["static"]["rules"]["scale_rule"] = "even"
  edit(saved, arrays=arrays, nodes=manifest["nodes"])
  with pytest.raises(ValueError, match=f"1 others: {linear} has Rules"):
    checkpoint.restore_checkpoint(saved)


def test_what_is_absent_or_unknown_is_named(saved, tmp_path):
  with pytest.raises(FileNotFoundError, match="expected .*mxjax.json, got no such"):
    checkpoint.read_manifest(tmp_path)
  edit(saved, format_version=7)
  with pytest.raises(ValueError, match="expected format version 2, got 7"):
    checkpoint.read_manifest(saved)
  edit(saved, format_version=2, nodes={"a": {"type": "Kite", "static": {}}})
  with pytest.raises(ValueError, match="expected a of a type .* got 'Kite'"):
    checkpoint.restore_checkpoint(saved)
  (saved / "arrays").rename(saved / "elsewhere")
  with pytest.raises(FileNotFoundError, match="arrays, got no such folder"):
    checkpoint.restore_checkpoint(saved)


def test_sizes_add_up(params):
  report = sizes.size_report(params)
  linears = report["quantized_linears"]
  width, hidden, layers = 64, 96, 2
  weights = layers * (2 * width * width + 2 * width * 32 + 3 * width * hidden)
  assert linears["weights"] == weights
  assert linears["codes"] == weights // 2
  assert linears["scales"] == weights // 32
  assert linears["maps"] == layers * 4 * 2 * 32 * 32 * 4
  assert linears["rounding"] == layers * 4 * 2 * (528 + 1024) * 4
  assert report["recovery"] == layers * (2 * 2 + 4) * 4
  values = 61 * width + 5 * width
  assert report["other"] == 2 * values
  held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  assert report["total"] == held
  assert report["bf16_total"] == 2 * (weights + values)
  assert report["bf16_over_total"] == report["bf16_total"] / held
  assert sizes.size_report(jax.eval_shape(lambda: params)) == report


class Cycle:
  """What only a collection frees."""

  def __init__(self):
    self.own = self


@pytest.fixture
def unfrozen():
  """Python's collector as a program has it: tests/conftest.py sets objects aside."""
  gc.unfreeze()
  yield
  gc.freeze()


def old_cycle():
  """What became garbage after it had grown old: young generations have it no more."""
  one = Cycle()
  gc.collect(1)
  return weakref.ref(one)


def restore_with_leftovers(folder, monkeypatch):
  """Restores a checkpoint; which of the cycles that reading made are still there."""
  load, made = checkpoint_arrays._load, []

  def leaves_cycles(*arguments):
    made.extend((old_cycle(), weakref.ref(Cycle())))
    return load(*arguments)

  monkeypatch.setattr(checkpoint_arrays, "_load", leaves_cycles)
  checkpoint.restore_checkpoint(folder)
  return [one() is not None for one in made]


def test_leftovers_of_reading_are_freed_and_no_older_object_is_looked_at(
  stored, unfrozen, monkeypatch
):
  older = old_cycle()
  left = restore_with_leftovers(stored, monkeypatch)
  assert left and not any(left)
  assert older() is not None
  assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_stays_so(stored, monkeypatch):
  gc.freeze()
  left = restore_with_leftovers(stored, monkeypatch)
  assert left and not any(left)
  assert gc.get_freeze_count() > 0
