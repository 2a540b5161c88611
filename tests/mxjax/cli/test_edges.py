"""What a stranger does wrong: every answer is one sentence, told before any work."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from mxjax import models
from mxjax.cli import lm_eval, output
from mxjax.cli import main as main_module
from mxjax.cli import options as shared
from mxjax.cli.main import main
from mxjax.evaluation import subjects
from mxjax.evaluation.tables import jobs
from mxjax.models.loading import lazy
from mxjax.storage import checkpoint
from tests import tiny

ROOT = pathlib.Path(__file__).parents[3]
SIZES = ("--windows", "2", "--window-length", "32")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  """A model, one of another depth, and what RTN made of the first."""
  path = tmp_path_factory.mktemp("home")
  for name, layers in (("model", 1), ("other", 2)):
    (path / name).mkdir()
    tiny.save_folder(path / name, num_layers=layers)
  words = ["quantize", path / "model", "--method", "rtn", "--out", path / "run"]
  text = path / "model" / "text.txt"
  words += ["--calib", text, "--data", text, "--sequences", 2, "--length", 32, *SIZES]
  assert main(list(map(str, words))) == 0
  return path


@pytest.fixture
def place(home, monkeypatch):
  monkeypatch.chdir(home)
  return home


REFUSED = {
  "quantize": [
    ("--sequences 0", "whole number of at least 1, got '0'"),
    ("--windows -1", "whole number of at least 1, got '-1'"),
    ("--window-length 1", "of at least 2, got '1'"),
    ("--replicates 0", "of at least 1, got '0'"),
    ("--chunk 0", "of at least 1, got '0'"),
    ("--seed -1", "of at least 0, got '-1'"),
    ("--save-every x", "of at least 1, got 'x'"),
    ("--metod rtn", "--metod; write --method if"),
    ("--sampling window", "write windows if"),
    ("--method awq", "got 'awq'"),
    ("--method gtpq:scales=static", "write gptq if"),
    ("--method gptq:scale=static", "write scales if"),
    ("--calib absent.txt", "absent.txt: expected a file or one of"),
    ("--calib model/text.txt --sequences 500", "expected 16000 tokens"),
    ("--processes 2", "expected --distributed beside --processes"),
  ],
  "evaluate": [
    ("run --out results", "expected --tasks beside --out"),
    ("run --items 3 --name a", "expected --tasks beside --items, --name"),
    ("run --tasks c4 --windows 2", "expected no --tasks beside --windows"),
    ("run --tasks c4 --agreement", "expected no --tasks beside --agreement"),
    ("run --tasks c4 --task-windows 0", "of at least 1, got '0'"),
    ("run --tasks piqaa", "write piqa if"),
    ("run --model model", "expected --operator-error or --agreement beside"),
    ("run --operator-error", "float model of run, model, got none."),
    (
      "run --agreement --model other --windows 2 --window-length 32",
      "got other of another num_layers;",
    ),
    ("model --agreement", "expected a folder written by `quantize` to compare"),
    ("run --storage int8", "got 'int8'; write int8-embeddings if"),
    (
      "run --storage float8-products,bfloat16-products",
      "float8-products or bfloat16-products, got both",
    ),
    ("run --storage float8-products --mesh data=1", "--mesh without --storage"),
  ],
  "export": [
    ("run --format dequant --model absent", "got absent"),
    ("run --format dequant --shard-gb 0", "above 0, got 0.0"),
    (
      "run --format transformers --dtype float32",
      "expected --format dequant beside --dtype, got transformers",
    ),
    ("run --format safetensors --drop maps", "expected --drop of what the model has"),
    (
      "run --format dequant --transforms",
      "beside --transforms, got dequant",
    ),
    ("run --format dequant --drop beauty", "got beauty"),
  ],
  "compare": [
    ("model --methods ,", "expected at least one name"),
    ("model --methods rtn,hire", "write hires if"),
    ("model --scale-rules flor", "write floor if"),
  ],
  "reproduce": [
    ("main --models model --plan --seeds 0,x", "of at least 0, got 'x'"),
    ("stage", "write stages if"),
  ],
  "generate": [
    ("run --prompt a --top-k 0", "of at least 1, got '0'"),
    ("run --prompt a --temperature nan", "temperature >= 0, got nan"),
    # The model of these tests has 128 positions.
    (
      "run --prompt a --max-new-tokens 99999",
      "--max-new-tokens: expected at most 127 behind a prompt of 1 token: the model "
      "has 128 positions, got 99999; ask for fewer",
    ),
    (
      f"run --prompt {'g' * 100} --max-new-tokens 100",
      "behind a prompt of 100 tokens: the model has 128 positions, got 100",
    ),
    ("run --prompt a --seed 4294967296", "expected a --seed below 4294967296"),
    ("run --prompt a --top-p 0.5", "--temperature above 0 beside --top-p, got"),
    ("run --prompt a --stop=", "expected --stop with some text"),
    ("run --prompt a --cache int8", "invalid choice: 'int8'"),
    ("run --prompt a --compiled model/text.txt", "expected to read or write here"),
  ],
  "chat": [
    ("run --temperature 0 --top-k 3 --top-p 0.5", "beside --top-k, --top-p, got 0"),
    ("run", "expected a tokenizer with a chat template"),
  ],
  "verify": [
    ("absent", "name a folder written by `mxjax quantize`"),
    ("run/result.json", "got no such file"),
  ],
}
"""The words of a command that cannot be meant, and a part of the answer."""
FIXED = {
  "quantize": "model --out new --length 32",
  "export": "--out new",
  "compare": "--out new",
  "reproduce": "--out new",
}
"""Words that all of a command's are given with."""


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_meant_is_refused(command, place, refuses):
  fixed = FIXED.get(command, "")
  refuses((f"{command} {words} {fixed}", text) for words, text in REFUSED[command])
  assert not (place / "new").exists()


NAMED = {
  "plan": "MODEL --dtype bfloat16 --mesh data=2",
  "quantize": "MODEL --out OUT --calib DATA --data DATA --store DIR --linears DIR "
  "--method rtn --compiled DIR --mesh data=2 --coordinator HOST",
  "verify": "DIR",
  "evaluate": "DIR --data DATA --model MODEL --tasks piqa --out OUT --wikitext2 DATA "
  "--c4 DATA --name NAME --storage int8-embeddings --compiled DIR",
  "compare": "MODEL --methods rtn --scale-rules floor --out OUT --calib DATA",
  "reproduce": "main --models MODEL --out OUT --results DIR --without c4",
  "generate": "DIR --prompt text --compiled DIR --storage int8-embeddings",
  "chat": "DIR --storage int8-embeddings",
  "demo": "--out OUT",
  "export": "DIR --format dequant --out OUT --model DIR --data DATA --drop maps",
  "import": "FOLDER --out OUT",
}
"""Every argument of a command that names something."""


@pytest.mark.parametrize("command", NAMED)
def test_an_empty_name_is_refused_before_anything_is_read(command, refuses, place):
  """It is what an unset variable of a shell leaves: `mxjax quantize "$MODEL"`."""
  words = NAMED[command].split()
  told = "expected a value, got ''; set the variable that it comes from"
  cases = []
  for index, word in enumerate(words):
    if not word.startswith("--") and words[index - 1] not in ("--prompt", "--format"):
      cases.append(([command, *words[:index], "", *words[index + 1 :]], told))
      cases.append(([command, *words[:index], " ", *words[index + 1 :]], "got ' '"))
  assert cases
  refuses(cases)


OUTPUTS = {
  "quantize": "model --method rtn",
  "evaluate": "run --tasks piqa",
  "compare": "model --methods rtn",
  "reproduce": "main --models model --calib model/text.txt",
  "demo": "",
  "export": "run --format dequant",
  "import": "model",
}
"""Every command that writes a folder, without its name."""


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_below_a_file_is_refused_before_anything_is_read(
  command, refuses, place, monkeypatch
):
  def read(*arguments, **options):
    raise AssertionError("a model was read")

  for name in ("open_pretrained", "from_pretrained", "load_config", "load_tokenizer"):
    monkeypatch.setattr(models, name, read)
  monkeypatch.setattr(checkpoint, "read_manifest", read)
  told = "text.txt, which is a file; name another --out."
  refuses(
    (f"{command} {OUTPUTS[command]} --out model/text.txt/{below}", told)
    for below in ("new", "some/new")
  )


@pytest.mark.slow
def test_the_defaults_fit_the_embedded_text(place, refuses, monkeypatch):
  """And a sample that does not fit is refused before a weight is read, by its flag."""
  parsed = lambda *words: shared.sequences(main_module.build_parser().parse_args(words))
  assert parsed("quantize", "--out", "x") == shared.EMBEDDED_SEQUENCES == 64
  assert parsed("quantize", "--out", "x", "--calib", "c4") == 128
  assert parsed("quantize", "--out", "x", "--sequences", "3") == 3
  assert parsed("plan") == 128

  def read(*_):
    raise AssertionError("weights were read")

  monkeypatch.setattr(lazy.LazyParams, "load", read)
  words = "quantize model --out new --calib"
  refuses(
    [
      (f"{words} model/text.txt --length 32", "windows (--sequences, --length), or"),
      (f"{words} absent.txt", "absent.txt: expected a file or one of"),
      (f"{words} wikitext", "write wikitext2 if that was meant"),
      (
        f"{words} model/text.txt --length 32 --sequences 2 --windows 900000",
        "windows (--windows, --window-length), or",
      ),
      (
        f"{words} model/text.txt --length 100000",
        "--length: expected at most 128 tokens, the positions",
      ),
      (
        f"{words} model/text.txt --length 32 --window-length 100000",
        "pass --window-length 128 or less",
      ),
      ("evaluate run --window-length 129", "pass --window-length 128 or less"),
      ("plan model --length 129", "pass --length 128 or less"),
    ]
  )


def test_text_that_is_not_there_is_refused_before_anything_is_said(place, capsys):
  for words in (
    "quantize absent --out new --calib absent.txt",
    "quantize absent --out new --data absent.txt",
    "compare absent --out new --calib absent.txt",
    "evaluate absent --data absent.txt",
  ):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "data absent.txt: expected a file or one of c4, wikitext2, got" in line


def test_more_tokens_than_fit_are_refused_before_a_weight_is_read(
  place, refuses, monkeypatch
):
  def read(*arguments, **options):
    raise AssertionError("weights were read")

  monkeypatch.setattr(subjects, "restore", read)
  words = "--prompt a --max-new-tokens 128"
  told = "the model has 128 positions, got 128"
  refuses((f"generate {source} {words}", told) for source in ("run", "model"))


def test_lengths_are_by_default_what_the_model_holds():
  options = argparse.Namespace(command="quantize", length=None, window_length=None)
  shared.fit_lengths(options, 1024)
  assert (options.length, options.window_length) == (1024, 1024)
  shared.fit_lengths(options, 4096)
  assert options.length == 1024, "what is set stays"
  options = argparse.Namespace(command="quantize", length=None)
  shared.fit_lengths(options, 32768)
  assert options.length == 2048 and not hasattr(options, "window_length")


@pytest.mark.slow
def test_the_embedded_text_holds_the_default_sample():
  tokenizer = models.load_tokenizer()
  tokens = subjects.CalibrationSample(sequences=shared.EMBEDDED_SEQUENCES).load(
    tokenizer
  )
  assert tokens.shape == (64, 2048)


def test_a_misspelled_command_is_answered_with_the_near_one(refuses):
  refuses(
    [
      ("quantise", "write quantize if"),
      ("discover run --seeed 1", "--seeed; write --seed if"),
    ]
  )


def test_operator_error_of_a_rotated_model_is_refused(place, refused, monkeypatch):
  """Its linears have other coordinates than the float model's."""
  read = checkpoint.read_manifest
  rotated = lambda path: read(path) | {"program": {"name": "spinquant:steps=0"}}
  monkeypatch.setattr(checkpoint, "read_manifest", rotated)
  words = ["evaluate", "run", "--model", "model", *SIZES]
  assert "spinquant, which rotates them" in refused(*words, "--operator-error")


def test_sets_of_test_data_may_be_written_as_people_do(place, mxjax):
  (place / "b.txt").write_text(tiny.TEXT)
  (row,) = [mxjax("evaluate", "run", "--data", "model/text.txt, b.txt", *SIZES)]
  assert list(row["perplexity"]) == ["text", "b"]


def test_the_folder_where_one_stands_has_a_name(place, mxjax, monkeypatch, tmp_path):
  monkeypatch.chdir("model")
  words = ["quantize", ".", "--method", "rtn", "--out", tmp_path / "out", *SIZES]
  words += ["--calib", "text.txt", "--data", "text.txt"]
  mxjax(*words, "--sequences", 2, "--length", 32)
  manifest = checkpoint.read_manifest(tmp_path / "out/checkpoint")
  assert manifest["calibration"]["model"] == "model"
  assert "<h1>rtn on model</h1>" in (tmp_path / "out/report.html").read_text()
  planned = mxjax("reproduce", "main", "--models", ".", "--plan", "--calib", "text.txt")
  assert planned["rows"][0][0] == "model"
  monkeypatch.chdir(tmp_path / "out/run")
  build = jobs.Build("..", "rtn", 0)
  assert build.folder(tmp_path) == tmp_path / "out/rtn-seed0"


def test_rtn_reads_one_sequence_says_why_and_stores_the_same(place, tmp_path, capsys):
  words = ["quantize", "model", "--method", "rtn", "--out", tmp_path / "out", *SIZES]
  words += ["--calib", "model/text.txt", "--data", "model/text.txt", "--length", "32"]
  assert main(list(map(str, words))) == 0
  said = capsys.readouterr().err
  assert "calibration: 1 x 32 tokens of model/text.txt" in said
  assert (
    "rtn stores nothing that depends on calibration; the report's errors of" in said
  )
  of = lambda folder: json.loads((folder / "result.json").read_text())[0]
  # The other one read two sequences.
  (ours, theirs) = of(tmp_path / "out"), of(place / "run")
  assert ours["record"]["calibration"]["shape"] == [1, 32]
  for key in ("perplexity", "size", "agreement"):
    assert ours[key] == theirs[key]
  errors = lambda row: [
    linear["error_final"]
    for layer in row["record"]["layers"]
    for linear in layer["linears"].values()
  ]
  assert errors(ours) == errors(theirs)
  assert ours["record"]["sanity"] == theirs["record"]["sanity"]


def test_a_path_is_never_broken_into_lines(capsys):
  path = "folder/" * 30
  output.say(f"wrote {path}")
  assert capsys.readouterr().out == f"wrote {path}\n"


def test_the_name_of_a_file_does_not_act_on_the_terminal(place, mxjax, tmp_path):
  folder = shutil.copytree("run", tmp_path / "run")
  (folder / "checkpoint/a\x1b[2J").write_text("")
  told = mxjax("verify", folder, as_json=False, code=1)
  assert "file a\\x1b[2J is not in mxjax.json." in told.splitlines()


def test_errors_of_the_system_say_what_to_do(place, refused):
  line = refused("generate", "run", "--prompt", "a", "--compiled", "model/text.txt")
  assert line.startswith("mxjax generate: /")
  assert "model/text.txt: expected to read or write" in line
  assert line.endswith("check the path, its permissions and the room on the disk.")
  assert "Errno" not in line


def run(program, **options):
  words = [sys.executable, "-c", program]
  env = os.environ | {"PYTHONPATH": str(ROOT)}
  return subprocess.run(words, cwd=ROOT, env=env, check=False, **options)


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
  """As in `mxjax plan | head -1`."""
  read, write = os.pipe()
  os.close(read)
  program = """
import argparse
from mxjax.cli import main

options = argparse.Namespace(command="x", log="bars", distributed=False, run=print)
raise SystemExit(main._run(options))
"""
  done = run(program, stdout=write, stderr=subprocess.PIPE)
  os.close(write)
  assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupt_while_libraries_load_prints_no_traceback():
  program = """
import os, signal, sys

class Interrupt:
  def find_spec(self, name, *_):
    if name == "mxjax.devices.processes":
      os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from mxjax.cli.main import main
main(["verify", "absent"])
"""
  done = run(program, capture_output=True)
  assert (done.returncode, done.stderr) == (-2, b"")


def test_the_harness_says_how_it_is_installed(capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval", None)
  monkeypatch.delitem(sys.modules, "mxjax.evaluation.tasks.harness", raising=False)
  # A test before this one may have imported it, and then the package names it too.
  monkeypatch.delattr("mxjax.evaluation.tasks.harness", raising=False)
  assert lm_eval.main() == 2
  assert "run `pip install 'mxjax[harness]'`" in capsys.readouterr().err
