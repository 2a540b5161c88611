"""`mxjax export` and `mxjax import` on a checkpoint made by hand."""

import json

import jax
import numpy as np
import pytest

from mxjax.evaluation.cli import parser
from mxjax.layers.quantized_linear import QuantizedLinear
from mxjax.numerics import mxfp4
from mxjax.numerics.realization.activation_quantizers import Nearest
from mxjax.numerics.shaping import input_maps
from mxjax.storage import checkpoint, export


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_params, tiny_config, write_tokenizer):
  """A checkpoint with Hadamards on its down projections, and its tokenizer."""
  folder = tmp_path_factory.mktemp("quantized")
  write_tokenizer(folder, 61)

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
  text = str(saved[0] / "text.txt")
  return [
    *("export", str(saved[0]), "--format", form, "--out", str(out), "--data", text),
    *("--windows", "2", "--window-length", "32", "--json", *extra),
  ]


def printed(capsys):
  return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_what_is_dropped_is_measured_and_said(saved, tmp_path, capsys):
  out = tmp_path / "out"
  form = "compressed-tensors"
  assert parser.main(command(saved, out, form)) == 2
  error = capsys.readouterr().err
  assert "cannot hold maps" in error and "--drop maps" in error
  assert not out.exists()
  assert parser.main(command(saved, out, form, "--drop", "maps", "--windows", "0")) == 2
  assert "measured before it is written" in capsys.readouterr().err
  assert not out.exists()

  assert parser.main(command(saved, out, form, "--drop", "maps")) == 0
  manifest = printed(capsys)
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
  assert parser.main(["import", str(out), "--out", str(tmp_path / "in")]) == 0
  evaluate = ["evaluate", str(tmp_path / "in"), "--data", str(saved[0] / "text.txt")]
  evaluate += ["--windows", "2", "--window-length", "32", "--json"]
  capsys.readouterr()
  assert parser.main(evaluate) == 0
  again = printed(capsys)["perplexity"]["text"]["mean"]
  assert again == measured["with what was dropped left out"]


def test_transforms_and_own_state_lose_nothing(saved, tmp_path, capsys):
  extra = ("--windows", "0")
  first, second = tmp_path / "transforms", tmp_path / "state"
  form = "compressed-tensors"
  assert parser.main(command(saved, first, form, "--transforms", *extra)) == 0
  assert printed(capsys)["transforms"] == ["hadamard_32"]
  assert parser.main(command(saved, second, "safetensors", *extra)) == 0
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


@pytest.mark.parametrize(
  ("form", "extra", "message"),
  [
    ("safetensors", ["--drop", "maps"], "holds everything"),
    ("dequant", ["--drop", "gains"], "expected --drop of what the model has (maps)"),
    ("dequant", ["--transforms"], "is for --format compressed-tensors"),
    ("dequant", ["--drop", "beauty"], "got beauty"),
  ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
  saved, tmp_path, capsys, form, extra, message
):
  out = tmp_path / "out"
  assert parser.main(command(saved, out, form, *extra)) == 2
  error = capsys.readouterr().err
  assert message in error
  assert "Traceback" not in error
  assert not out.exists()
