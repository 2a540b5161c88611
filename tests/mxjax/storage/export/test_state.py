"""Our own state as safetensors, and folders that appear whole or not at all."""

import pytest

from mxjax import models
from mxjax.models.loading import weights
from mxjax.storage import export
from mxjax.storage.export import folder
from tests.mxjax.quantized import assert_same, damage


def test_own_state_round_trip_is_bit_for_bit(hires, source, tiny_config, tmp_path):
  out = export.write_state(tmp_path / "out", source(hires), shard_bytes=50_000)
  assert (out / weights.INDEX_FILE).is_file()
  params, state = export.read_state(out)
  assert_same(params, hires)
  assert models.ModelConfig.from_dict(state["model_config"]) == tiny_config
  assert state["digest"] == "ab"


def test_a_changed_byte_of_own_state_is_named(rtn, source, tmp_path):
  out = export.write_state(tmp_path / "out", source(rtn))
  damage(out / weights.SINGLE_FILE, "flip")
  with pytest.raises(
    ValueError, match="damage: model.safetensors has another SHA-256;"
  ):
    export.read_state(out)


def test_nothing_is_overwritten_and_nothing_half_written_stays(
  rtn, source, tmp_path, monkeypatch
):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine" / "file").write_text("keep")
  with pytest.raises(FileExistsError, match="never overwritten"):
    export.write_state(tmp_path / "mine", source(rtn))

  def fail(*arguments):
    raise OSError("disk full")

  monkeypatch.setattr(folder, "list_files", fail)
  with pytest.raises(OSError, match="disk full"):
    export.write_compressed_tensors(tmp_path / "out", source(rtn))
  assert [path.name for path in tmp_path.iterdir()] == ["mine"]
