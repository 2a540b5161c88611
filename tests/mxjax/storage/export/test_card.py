"""The model card of each format."""

import json

import pytest

from mxjax.storage import export
from mxjax.storage.export import card

FACTS = {
  "digest": "abc",
  "contract_hash": "c0ffee",
  "program": {"name": "gptq", "options": {"damping": 0.01}},
  "calibration": {"model": "a|b", "data": "c4", "shape": [2, 32]},
}
MEASURED = {
  "data": "wikitext2",
  "windows": [8, 2048],
  "perplexity": {"checkpoint": 12.5, "exported": 13.25},
}


@pytest.mark.parametrize(
  ("write", "loaded"),
  [
    (export.write_compressed_tensors, "quantization_config=scheme\n).float()"),
    (export.write_dequant, "Any Hugging Face loader"),
    (export.write_state, "mxjax.storage.export.read_state"),
    (export.write_transformers, "trust_remote_code=True"),
  ],
)
def test_every_folder_has_a_card_that_is_sealed(
  write, loaded, rtn, tiny_config, tmp_path
):
  record = {"dropped": ["maps"], "evaluation": MEASURED}
  write(tmp_path / "out", export.Source(rtn, tiny_config, facts=FACTS, record=record))
  text = (tmp_path / "out/README.md").read_text()
  front = text.split("---\n")[1].splitlines()
  keys = dict(line.split(": ", 1) for line in front)
  assert set(keys) == {"library_name", "pipeline_tag", "tags"}
  assert "mxfp4" in keys["tags"]
  assert "| method | gptq |" in text and "| contract | c0ffee |" in text
  assert "| float model | a\\|b |" in text and "| left out | maps |" in text
  assert "| perplexity, exported | 13.2500 on wikitext2, 8 x 2048 tokens |" in text
  assert loaded in text
  manifest = json.loads((tmp_path / "out/mxjax_export.json").read_text())
  assert "README.md" in manifest["files"]


def test_what_the_build_measured_stands_beside_the_float_model():
  built = {
    "data": "c4",
    "windows": [4, 256],
    "perplexity": {"float model": 20.5, "W4A4": 23.25},
    "agreement": {"kl_mean": 0.125, "flips": 0.0625},
  }
  manifest = {"source": {}, "activations": "not rounded", "built": built}
  text = card.model_card("dequant", manifest)
  assert (
    "| when built, perplexity, float model | 20.5000 on c4, 4 x 256 tokens |" in text
  )
  assert "| when built, perplexity, W4A4 | 23.2500 on c4, 4 x 256 tokens |" in text
  assert "| when built, KL from the float model | 0.1250 nats a token |" in text
  assert "| when built, most likely token changed | 6.2% of tokens |" in text
  text = card.model_card("dequant", manifest | {"built": built | {"agreement": None}})
  assert "23.2500" in text and "KL" not in text


def test_what_was_not_measured_or_is_not_known_is_said():
  text = card.model_card("dequant", {"source": {}, "activations": "not rounded"})
  assert "| perplexity | not measured when it was exported |" in text
  assert "| method | unknown |" in text and "| float model | unknown |" in text
  assert "w4a4" not in text
  tags = lambda contract: card.model_card(
    "mxjax-safetensors",
    {"source": {"contract": contract}, "activations": "as in the checkpoint"},
  ).splitlines()[3]
  assert "w4a4" in tags({}) and "w4a4" not in tags({"activations": "float"})
  assert set(card.LOADING) == {
    *("compressed-tensors", "dequant", "gguf", "mxjax-safetensors"),
    "mxjax-transformers",
  }
