"""`mxjax export` and `mxjax import` on a checkpoint made by hand."""

import json

import jax
import numpy as np
import pytest

from mxjax.cli import export as export_command
from mxjax.cli import output
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.shaping import input_maps
from mxjax.storage import checkpoint, digested_json, export
from tests import tiny

WINDOWS = ("--windows", "2", "--window-length", "32")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_params, tiny_config):
  """A checkpoint with Hadamards on its down projections, and its tokenizer."""
  folder = tmp_path_factory.mktemp("quantized")
  tiny.save_tokenizer(folder, 61)

  def quantized(path, leaf):
    name = jax.tree_util.keystr(path)
    if "_proj" not in name:
      return leaf
    map_ = input_maps.Hadamard(32) if "down" in name else None
    return QuantizedLinear(mxfp4.encode(leaf), map_, Nearest())

  params = jax.tree_util.tree_map_with_path(quantized, tiny_params)
  checkpoint.save_checkpoint(
    folder / "checkpoint",
    params,
    tiny_config,
    program={"name": "by hand"},
    tokenizer_files=[folder / "tokenizer.json"],
  )
  return folder, params


def command(saved, out, form, *extra):
  data = ("--data", saved[0] / "text.txt", *WINDOWS)
  return ["export", saved[0], "--format", form, "--out", out, *data, *extra]


@pytest.mark.slow
def test_what_is_dropped_is_measured_and_said(saved, tmp_path, mxjax, refused):
  out = tmp_path / "out"
  export_ = command(saved, out, "compressed-tensors")
  error = refused(*export_)
  assert "can hold, got maps" in error and "--drop maps" in error
  error = refused(*export_, "--drop", "maps", "--windows", 0)
  assert "measured before it is written" in error
  assert not out.exists()

  manifest = mxjax(*export_, "--drop", "maps")
  assert manifest == json.loads((out / "mxjax_export.json").read_text())
  assert manifest["dropped"] == ["maps"]
  assert manifest["source"]["program"] == {"name": "by hand"}
  measured = manifest["evaluation"]["perplexity"]
  assert set(measured) == {
    "checkpoint",
    "with what was dropped left out",
    "exported, activations as compressed-tensors rounds them",
  }
  assert len(set(measured.values())) == 3

  # The import measures as the export said: our rule on the same codes.
  words = ("import", out, "--out", tmp_path / "in", "--dtype", "float32")
  assert "arithmetic: float32" in mxjax(*words, as_json=False)
  again = mxjax("evaluate", tmp_path / "in", "--data", saved[0] / "text.txt", *WINDOWS)
  mean = again["perplexity"]["text"]["mean"]
  assert mean == measured["with what was dropped left out"]


def test_the_row_of_the_build_is_that_of_the_same_program_and_tokens(tmp_path):
  """A folder may have rows of several methods, and a checkpoint may come of another."""
  measured = lambda mean: {"c4": {"mean": mean, "windows": 4, "length": 256}}
  record = lambda name, tokens: {
    "program": {"name": name},
    "calibration": {"fingerprint": tokens},
    "form": "W4A4",
  }
  rows = [
    {
      "record": record(name, tokens),
      "perplexity": measured(mean),
      "float_perplexity": {"c4": 20.5},
      "agreement": {"kl_mean": 0.125},
    }
    for name, tokens, mean in [("rtn", "a", 30.0), ("by hand", "a", 25.0)]
  ]
  facts = {"program": {"name": "by hand"}, "calibration": {"fingerprint": "a"}}
  assert export_command._built(tmp_path, facts) is None
  (tmp_path / "result.json").write_text(json.dumps(rows))
  # Until a build lists it, the file may be anybody's.
  assert export_command._built(tmp_path, facts) is None
  digested_json.write_outputs(tmp_path)
  built = export_command._built(tmp_path, facts)
  assert built["perplexity"] == {"float model": 20.5, "W4A4": 25.0}
  assert (built["data"], built["windows"]) == ("c4", [4, 256])
  other = facts | {"calibration": {"fingerprint": "b"}}
  assert export_command._built(tmp_path, other) is None
  (tmp_path / "result.json").write_text(json.dumps(rows[:1]))
  with pytest.raises(ValueError, match="the results that a build wrote, got .*result"):
    export_command._built(tmp_path, facts)


def test_windows_are_as_long_as_the_model_allows_where_nobody_says(
  saved, tiny_config, tmp_path, mxjax, monkeypatch
):
  """Of a perplexity it is said on what, for it differs from that of the build."""
  stages = []
  monkeypatch.setattr(output, "stage", stages.append)
  words = ["export", saved[0], "--format", "safetensors", "--out", tmp_path / "out"]
  text = saved[0] / "text.txt"
  said = mxjax(*words, "--data", text, "--windows", 2, as_json=False)
  measured = json.loads((tmp_path / "out/mxjax_export.json").read_text())["evaluation"]
  assert measured["windows"] == [2, tiny_config.max_positions]
  mean = f"{measured['perplexity']['checkpoint']:.4f}"
  shape = f"2 x {tiny_config.max_positions} tokens"
  assert f"perplexity, checkpoint: {mean} on {text}, {shape}\n" in said
  assert stages[-2:] == ["export, perplexity, checkpoint", "export, writing"]


@pytest.mark.slow
def test_transforms_and_own_state_lose_nothing(saved, tmp_path, mxjax):
  first, second = tmp_path / "transforms", tmp_path / "state"
  extra = ("--windows", 0)
  transforms = command(saved, first, "compressed-tensors", "--transforms", *extra)
  assert mxjax(*transforms)["transforms"] == ["hadamard_32"]
  mxjax(*command(saved, second, "safetensors", *extra))
  for params in (
    export.read_compressed_tensors(first).params,
    export.read_state(second)[0],
  ):
    assert jax.tree.structure(params) == jax.tree.structure(saved[1])
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(saved[1]), strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert (first / "tokenizer.json").is_file()
  settings = json.loads((first / "generation_config.json").read_text())
  assert isinstance(settings, dict)


@pytest.mark.slow
def test_a_gguf_file_needs_that_of_the_float_model(
  saved, tmp_path, mxjax, refuses, tiny_params, tiny_config
):
  out, base = tmp_path / "out", tmp_path / "base.gguf"
  told = "expected --model with the GGUF file of the float model"
  refuses(
    [
      (command(saved, out, "gguf"), f"{told}, got none"),
      (
        command(saved, out, "gguf", "--model", base),
        "base.gguf, which is not a GGUF file",
      ),
      (command(saved, out, "gguf", "--model", tmp_path), "--format dequant, which"),
    ]
  )
  tiny.save_gguf(base, tiny_params, tiny_config)
  refuses(
    [(command(saved, out, "gguf", "--model", base), "what gguf can hold, got maps")]
  )
  assert not out.exists()
  manifest = mxjax(*command(saved, out, "gguf", "--model", base, "--drop", "maps"))
  measured = manifest["evaluation"]["perplexity"]
  assert set(measured) == {
    *("checkpoint", "with what was dropped left out"),
    "exported, activations not rounded",
  }
  assert len(set(measured.values())) == 3
  assert "Q8_0" in manifest["activations"]
  assert sorted(path.name for path in out.iterdir()) == [
    *("README.md", "model.gguf", "mxjax_export.json")
  ]


@pytest.mark.slow
def test_what_the_format_has_or_the_model_lacks_is_not_dropped(
  saved, tmp_path, refuses
):
  out = tmp_path / "out"
  refuses(
    [
      (command(saved, out, "safetensors", "--drop", "maps"), "holds everything"),
      (
        command(saved, out, "dequant", "--drop", "clipping"),
        "expected --drop of what the model has (maps)",
      ),
    ]
  )
  assert not out.exists()
