"""The commands on a tiny model folder with a real tokenizer file."""

import json

import numpy as np
import pytest

from mxjax import methods
from mxjax.devices import execution
from mxjax.evaluation import study
from mxjax.evaluation.cli import parser
from mxjax.methods.hires import ablations


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_model):
  path = tmp_path_factory.mktemp("model")
  return write_model(path, num_layers=1, max_positions=256, eos_ids=(2,))


def arguments(folder, out, *extra):
  text = str(folder / "text.txt")
  data = ["--calib", text, "--data", text, "--sequences", "2", "--length", "32"]
  windows = ["--windows", "2", "--window-length", "32"]
  return [str(folder), "--out", str(out), *data, *windows, "--json", *extra]


def last_json(capsys):
  return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_quantize_evaluate_generate(folder, tmp_path, capsys):
  out = tmp_path / "out"
  options = arguments(folder, out, "--method", "gptq", "--operator-error")
  options.append("--agreement")
  assert parser.main(["quantize", *options]) == 0
  row = last_json(capsys)[0]
  assert row["method"] == "gptq"
  assert (out / "report.html").read_text().startswith("<!")
  assert (out / "run" / "journal.jsonl").is_file()

  text = str(folder / "text.txt")
  evaluate = ["evaluate", str(out), "--data", text, "--windows", "2"]
  evaluate += ["--window-length", "32", "--json", "--operator-error", "--agreement"]
  evaluate += ["--model", str(folder)]
  assert parser.main(evaluate) == 0
  again = last_json(capsys)
  assert again["perplexity"]["text"]["values"] == row["perplexity"]["text"]["values"]
  assert again["operator_error"] == row["operator_error"]
  assert again["agreement"] == row["agreement"]
  assert 0 < row["agreement"]["kl_mean"] < 1

  generate = ["generate", str(out), "--prompt", "the cat", "--max-new-tokens", "4"]
  assert parser.main([*generate, "--json"]) == 0
  assert last_json(capsys)["text"].startswith("the cat")

  # The same model in less memory: the embedding changes it a little, and is told.
  packed = ("--storage", "int8-embeddings,float8-products")
  assert parser.main([*generate, "--json", *packed]) == 0
  assert last_json(capsys)["text"].startswith("the cat")
  assert parser.main([*evaluate, *packed]) == 0
  small = last_json(capsys)
  assert (again["storage"], small["storage"]) == ([], packed[1].split(","))
  assert small["size"]["other"] < 0.6 * again["size"]["other"]
  before, after = (r["perplexity"]["text"]["mean"] for r in (again, small))
  assert after != before and after == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize(
  ("extra", "message"),
  [
    (["--storage", "int8"], "unknown storage 'int8'; did you mean int8-embeddings?"),
    (["--storage", "int8-embeddings,mxfp4-embeddings"], "one kind of embeddings"),
    (["--storage", "float8-products", "--mesh", "data=1"], "--mesh without --storage"),
  ],
)
def test_storage_that_cannot_be_is_refused(tmp_path, capsys, extra, message):
  assert parser.main(["evaluate", str(tmp_path), *extra]) == 2
  assert message in capsys.readouterr().err


def test_layers_on_disk_give_the_same_bits(folder, tmp_path, capsys):
  rows = []
  for flag in ("--on-disk", "--no-on-disk"):
    out = tmp_path / flag.strip("-")
    options = arguments(folder, out, "--method", "gptq", flag)
    assert parser.main(["quantize", *options]) == 0
    rows.append(last_json(capsys)[0])
  manifests = [
    json.loads((tmp_path / name / "checkpoint/mxjax.json").read_text())
    for name in ("on-disk", "no-on-disk")
  ]
  assert manifests[0]["arrays"] == manifests[1]["arrays"]
  assert manifests[0]["nodes"] == manifests[1]["nodes"]
  assert [row["layers_on_disk"] for row in rows] == [True, False]
  assert rows[0]["perplexity"] == rows[1]["perplexity"]
  # The scratch folder is gone.
  assert sorted(p.name for p in tmp_path.iterdir()) == ["no-on-disk", "on-disk"]


def test_plan_reads_the_config_alone(folder, tmp_path, capsys):
  config = tmp_path / "config.json"
  config.write_text((folder / "config.json").read_text())
  assert parser.main(["plan", str(config), "--sequences", "4", "--json"]) == 0
  planned = last_json(capsys)
  # q, k, v and o, gate, up of width 64, down of 96.
  assert planned["blocks"] == 6 * 2 + 3
  assert parser.main(["plan", str(config)]) == 0
  assert "packed layout" in capsys.readouterr().out


def test_compare_writes_one_table_and_one_report(folder, tmp_path, capsys):
  out = tmp_path / "out"
  options = arguments(folder, out, "--methods", "rtn,brq")
  assert parser.main(["compare", *options]) == 0
  assert [row["method"] for row in last_json(capsys)] == ["rtn", "brq"]
  rows = json.loads((out / "result.json").read_text())
  assert rows[0]["record"]["layers"]


def test_compare_marks_rules_and_resumes(folder, text, tmp_path, capsys):
  out = tmp_path / "out"
  both = ("--data", f"{folder / 'text.txt'},{folder / 'other.txt'}")
  (folder / "other.txt").write_text(text[7:])
  options = arguments(folder, out, "--methods", "rtn", *both)
  assert parser.main(["compare", *options]) == 0
  first = last_json(capsys)
  assert list(first[0]["perplexity"]) == ["text", "other"]
  options = arguments(
    folder, out, "--methods", "rtn,rtn+rceil", "--scale-rules", "floor,even", *both
  )
  assert parser.main(["compare", *options]) == 0
  rows = last_json(capsys)
  names = ["rtn", "rtn [even]", "rtn+rceil", "rtn+rceil [even]"]
  assert [row["method"] for row in rows] == names
  assert rows[0] == first[0]
  assert not (out / "store").exists()
  page = (out / "report.html").read_text()
  assert "rtn [even]" in page


def test_ablate_writes_tables_and_resumes(folder, tmp_path, capsys, monkeypatch):
  rows = (("one gain", methods.RTN_GAIN), ("strict RTN", methods.RTN))
  monkeypatch.setitem(ablations.STUDIES, "controls", rows)
  out = tmp_path / "out"
  extra = ("--study", "controls", "--seeds", "0,3", "--replicates", "2")
  command = ["ablate", *arguments(folder, out, *extra)]
  assert parser.main(command) == 0
  result = last_json(capsys)[0]
  assert result["seeds"] == [0, 3]
  table = (out / "tables.md").read_text()
  assert "| one gain |" in table and "reference" in table
  monkeypatch.setattr(study, "run_method", None)
  assert parser.main(command) == 0
  assert last_json(capsys)[0] == result


@pytest.mark.parametrize(
  ("extra", "message"),
  [
    (["--method", "awq"], "unknown method 'awq'"),
    (["--calib", "absent.txt"], "absent.txt is neither a file nor one of"),
    (["--sequences", "500"], "need 16000 tokens"),
  ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
  folder, tmp_path, capsys, extra, message
):
  out = tmp_path / "out"
  assert parser.main(["quantize", *arguments(folder, out), *extra]) == 2
  error = capsys.readouterr().err
  assert message in error
  assert "Traceback" not in error
  assert not out.exists()


def test_an_existing_output_folder_is_refused(folder, tmp_path, capsys):
  (tmp_path / "mine").write_text("keep")
  assert parser.main(["quantize", *arguments(folder, tmp_path)]) == 2
  assert "never overwritten" in capsys.readouterr().err
  assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]


def test_token_ids_out_of_range_are_named(folder, tmp_path, capsys):
  path = tmp_path / "ids.npy"
  np.save(path, np.full((2, 32), 64))
  options = arguments(folder, tmp_path / "out", "--calib", str(path))
  assert parser.main(["quantize", *options]) == 2
  assert "outside the vocabulary of 64" in capsys.readouterr().err


def test_compiled_programs_are_kept_where_a_command_says(tmp_path, monkeypatch):
  kept = []
  monkeypatch.setattr(execution, "keep_compiled", kept.append)
  prompt = ["--prompt", "a"]
  parser.main(["generate", str(tmp_path / "none"), *prompt, "--compiled", "here"])
  parser.main(["generate", str(tmp_path / "none"), *prompt])
  assert kept == ["here"]
