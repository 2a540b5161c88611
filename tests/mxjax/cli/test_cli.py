"""The commands on a tiny model folder with a real tokenizer file."""

import contextlib
import functools
import importlib.util
import io
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxjax import methods, models
from mxjax.audit import plan
from mxjax.cli import main as cli
from mxjax.cli import output
from mxjax.cli.main import main
from mxjax.devices import kept_programs
from mxjax.evaluation import estimates
from mxjax.models import CausalLM, Tokenizer, generation
from mxjax.models.loading import embedded
from mxjax.run import folder as run_folder
from tests import tiny

WINDOWS = ("--windows", "2", "--window-length", "32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("model")
  return tiny.save_folder(path, num_layers=1, max_positions=256, eos_ids=(2,))


def arguments(folder, out, *extra):
  text = folder / "text.txt"
  data = ("--calib", text, "--data", text, "--sequences", 2, "--length", 32)
  return [folder, "--out", out, *data, *WINDOWS, *extra]


def test_quantize_evaluate_generate(folder, tmp_path, mxjax, monkeypatch):
  out, stages = tmp_path / "out", []
  follow = output.progress

  @contextlib.contextmanager
  def followed(form):
    """Notes every stage, with the name under which it is shown."""
    with follow(form) as begin:
      note = lambda name, tell, now: stages.append((name, now.stage)) or tell(now)
      yield lambda name: functools.partial(note, name, begin(name))

  monkeypatch.setattr(output, "progress", followed)
  measures = ("--operator-error", "--agreement")
  # KL and flips of this model and of RTN are measured without being asked for.
  words = arguments(folder, out, "--method", "gptq", measures[0])
  (row,) = mxjax("quantize", *words)
  assert row["method"] == "gptq"
  assert f"<h1>gptq on {folder.name}</h1>" in (out / "report.html").read_text()
  assert (out / "run" / "state.json").is_file()

  # RTN beside it, of one sequence, is that of all of them: no data decides its codes.
  (plain,) = mxjax("compare", *arguments(folder, tmp_path / "rtn", "--methods", "rtn"))
  assert row["baseline"]["perplexity"] == plain["perplexity"]
  assert row["baseline"]["size"] == plain["size"]
  assert row["baseline"]["agreement"]["kl_mean"] > 0 and plain["agreement"] is None
  # What takes long after the evaluations has a name of its own.
  assert [stage for stage in stages if stage[0].startswith("text of")] == [
    (f"text of the {name} model", f"evaluating, token {done}/24")
    for name in ("float", "quantized")
    for done in (0, 24)
  ]
  said = row["sample"]
  assert said["prompt"] and tiny.TEXT.startswith(said["prompt"])
  assert len(said) == 3 and said["float"] and said["quantized"]
  page = (out / "report.html").read_text()
  assert "How it writes" in page and 'href="result.csv"' in page
  assert (out / "result.csv").read_text().count("\n") == 4

  evaluate = ["evaluate", out, "--data", folder / "text.txt", *WINDOWS, *measures]
  evaluate += ["--model", folder]
  again = mxjax(*evaluate)
  assert again["perplexity"]["text"]["values"] == row["perplexity"]["text"]["values"]
  assert again["operator_error"] == row["operator_error"]
  assert again["agreement"] == row["agreement"]
  assert 0 < row["agreement"]["kl_mean"] < 1

  generate = ["generate", out, "--prompt", "the cat", "--max-new-tokens", 4]
  said = mxjax(*generate)
  assert said["text"].startswith("the cat")
  assert (said["tokens"], said["end"]) == (4, "4 new tokens")

  # The same model in less memory: the embedding changes it a little, and is told.
  packed = ("--storage", "int8-embeddings,float8-products")
  assert mxjax(*generate, *packed)["text"].startswith("the cat")
  small = mxjax(*evaluate, *packed)
  assert (again["storage"], small["storage"]) == ([], packed[1].split(","))
  assert small["size"]["other"] < 0.6 * again["size"]["other"]
  before, after = (r["perplexity"]["text"]["mean"] for r in (again, small))
  assert after != before and after == pytest.approx(before, rel=0.05)


def test_a_float_model_is_evaluated_and_continues_text(folder, mxjax):
  evaluate = ["evaluate", folder, "--data", folder / "text.txt", *WINDOWS]
  row = mxjax(*evaluate)
  assert row["perplexity"]["text"]["mean"] > 1
  assert row["size"]["bf16_over_total"] == 1.0
  assert "mxjax quantize" not in mxjax(*evaluate, as_json=False)
  generate = ["generate", folder, "--prompt", "the cat", "--temperature", 3]
  texts = [mxjax(*generate, "--seed", seed)["text"] for seed in (1, 1, 2)]
  assert texts[0] == texts[1] != texts[2]
  rest = texts[0].removeprefix("the cat")
  stopped = mxjax(*generate, "--seed", 1, "--stop", rest[2:4])
  assert stopped["text"] == "the cat" + rest[: rest.index(rest[2:4])]
  assert stopped["end"] == "stop string"
  # No token is made, or counted, beyond the one that completes it.
  made = stopped["tokens"]
  only = lambda n: mxjax(*generate, "--seed", 1, "--max-new-tokens", n)["text"]
  assert rest[2:4] in only(made) and rest[2:4] not in only(made - 1)
  last = ("--stop", rest[2:4], "--max-new-tokens", made)
  assert mxjax(*generate, "--seed", 1, *last)["end"] == "stop string"


def forget_generation():
  """Lets the programs of generation be traced anew, and no others."""
  for value in vars(generation).values():
    if hasattr(value, "clear_cache"):
      value.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--cache", "e4m3"]])
def test_generate_and_chat_keep_keys_and_values_as_asked(
  folder, chat_folder, mxjax, monkeypatch, words
):
  made, make = [], CausalLM.empty_cache
  keep = lambda self, *shape: made.append(shape[-1]) or make(self, *shape)
  monkeypatch.setattr(CausalLM, "empty_cache", keep)
  monkeypatch.setattr("sys.stdin", io.StringIO("the cat"))
  few = ["--max-new-tokens", "2", *words]
  forget_generation()
  assert mxjax("generate", folder, "--prompt", "the cat", *few)["tokens"] == 2
  forget_generation()
  assert main(["chat", str(chat_folder), *few]) == 0
  assert len(made) >= 2 and set(made) == {words[-1] if words else "compute"}


@pytest.fixture
def chat_folder(folder, tmp_path):
  place = shutil.copytree(folder, tmp_path / "chat")
  template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}a:"
  settings = {"chat_template": template}
  (place / "tokenizer_config.json").write_text(json.dumps(settings))
  return place


def test_chat_answers_what_is_piped(chat_folder, mxjax, monkeypatch, capsys):
  asked = []
  chat_prompt = Tokenizer.chat_prompt
  keep = lambda self, messages: (
    asked.append([dict(m) for m in messages]) or chat_prompt(self, messages)
  )
  monkeypatch.setattr(Tokenizer, "chat_prompt", keep)
  monkeypatch.setattr("sys.stdin", io.StringIO("the cat\nsat on\n"))
  options = ["--system", "be brief", "--max-new-tokens", "5", "--seed", "7"]
  assert main(["chat", str(chat_folder), *options]) == 0
  told = capsys.readouterr()
  assert told.out.strip()
  assert "5 tokens, " in told.err and "tokens/s" in told.err
  assert asked[1:] == [
    [
      {"role": "system", "content": "be brief"},
      {"role": "user", "content": "the cat\nsat on"},
    ]
  ]


def test_chat_at_a_terminal_keeps_the_conversation(chat_folder, monkeypatch, capsys):
  class Terminal(io.StringIO):
    isatty = lambda self: True

  lines = iter(["the cat", "", "the dog"])
  prompts = []

  def typed(prompt):
    del prompt
    try:
      return next(lines)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr("sys.stdin", Terminal())
  monkeypatch.setattr("builtins.input", typed)
  encode = Tokenizer.encode
  keep = lambda self, text: prompts.append(text) or encode(self, text)
  monkeypatch.setattr(Tokenizer, "encode", keep)
  options = ["--max-new-tokens", "4", "--temperature", "0"]
  assert main(["chat", str(chat_folder), *options]) == 0
  first = capsys.readouterr().out.splitlines()[0]
  assert prompts == ["u:the cat a:", f"u:the cat a:{first} u:the dog a:"]


@pytest.mark.slow
def test_the_embedded_model_answers(monkeypatch, capsys):
  if not importlib.util.find_spec(embedded.PACKAGE):
    pytest.skip("the wheel of the embedded model is not installed")
  asked = "What is the capital of France? Answer in one sentence."
  monkeypatch.setattr("sys.stdin", io.StringIO(asked))
  assert main(["chat", "--temperature", "0", "--max-new-tokens", "40"]) == 0
  told = capsys.readouterr()
  assert told.out == "The capital of France is Paris.\n"
  assert "end of text" in told.err


def test_chat_needs_a_message(chat_folder, refused, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
  assert "expected a message on standard input" in refused("chat", chat_folder)


@pytest.mark.slow
def test_layers_on_disk_give_the_same_bits(folder, tmp_path, mxjax):
  rows, manifests = [], []
  for flag in ("--on-disk", "--no-on-disk"):
    out = tmp_path / flag.strip("-")
    method = ("--method", "gptq")
    rows += mxjax("quantize", *arguments(folder, out, *method, flag))
    assert mxjax("verify", out)["faults"] == []
    manifests.append(json.loads((out / "checkpoint/mxjax.json").read_text()))
  assert manifests[0]["arrays"] == manifests[1]["arrays"]
  assert manifests[0]["nodes"] == manifests[1]["nodes"]
  assert [row["layers_on_disk"] for row in rows] == [True, False]
  assert rows[0]["perplexity"] == rows[1]["perplexity"]
  # The scratch folder is gone.
  assert sorted(p.name for p in tmp_path.iterdir()) == ["no-on-disk", "on-disk"]


@pytest.mark.slow
def test_a_tuned_run_is_sound_though_tuning_gives_it_maps(
  folder, tmp_path, mxjax, monkeypatch
):
  out = tmp_path / "out"
  tune = ("--method", "rtn+tune:epochs=1")
  mxjax("quantize", *arguments(folder, out, *tune))
  assert mxjax("verify", out)["faults"] == []
  read = run_folder.read_state

  def with_another_rule(place):
    state = read(place)
    nodes = state["layers"][0]["nodes"]
    nodes["mlp/up_proj/weight"]["children"]["rounding"]["type"] = "OneCode"
    return state

  monkeypatch.setattr(run_folder, "read_state", with_another_rule)
  assert mxjax("verify", out, code=1)["faults"] == [
    "layers_0/mlp/up_proj/weight is of another type in the checkpoint than in run/."
  ]


@pytest.mark.slow
def test_a_finished_run_keeps_the_time_that_came_after_its_layers(
  folder, tmp_path, mxjax
):
  words = arguments(folder, tmp_path / "out", "--method", "rtn")
  clock = lambda: json.loads((tmp_path / "out/result.json").read_text())[0]["record"]
  mxjax("quantize", *words)
  before = clock()["clock"]["seconds"]
  (row,) = mxjax("quantize", *words, "--resume")
  assert clock()["clock"]["seconds"]["sanity gate"] == before["sanity gate"] > 0
  assert row["seconds"] >= sum(before.values())


@pytest.mark.slow
def test_the_compute_dtype_is_that_of_the_option(folder, tmp_path, mxjax, refused):
  out, rows = tmp_path / "bfloat16", []
  # Of a folder, bfloat16 is the default.
  for dtype, option in (("bfloat16", []), ("float32", ["--dtype", "float32"])):
    words = arguments(folder, tmp_path / dtype, "--method", "rtn", *option)
    rows += mxjax("quantize", *words)
    manifest = json.loads((tmp_path / dtype / "checkpoint/mxjax.json").read_text())
    assert manifest["model_config"]["dtype"] == dtype == rows[-1]["dtype"]
    stated = manifest["extra"]["arithmetic"]
    assert stated["model"] == dtype
    assert stated["attention"] == {"sequences": "xla", "branching": "xla"}
    page = (tmp_path / dtype / "report.html").read_text()
    assert f"model: {dtype}; unquantized:" in page
  narrow, wide = (row["perplexity"]["text"]["mean"] for row in rows)
  assert narrow != wide
  assert narrow == pytest.approx(wide, rel=0.05)
  exact = [row["float_perplexity"]["text"] for row in rows]
  assert exact[0] != exact[1]

  words = ["--data", folder / "text.txt", *WINDOWS]
  again = mxjax("evaluate", out, *words)
  assert (again["dtype"], again["perplexity"]) == ("bfloat16", rows[0]["perplexity"])
  assert again["attention"] == {"sequences": "xla", "branching": "xla"}
  told = refused("evaluate", out, *words, "--dtype", "float32")
  assert "expected --dtype bfloat16, that of its build, got float32" in told
  for option, mean in (([], exact[0]), (["--dtype", "float32"], exact[1])):
    of_float = mxjax("evaluate", folder, *words, *option)
    assert of_float["perplexity"]["text"]["mean"] == mean
  resumed = arguments(folder, tmp_path / "float32", "--method", "rtn", "--resume")
  told = refused("quantize", *resumed)
  assert 'model dtype "float32", got one of model dtype "bfloat16"; resume with' in told
  both = ["compare", *arguments(folder, tmp_path / "both", "--methods", "rtn")]
  assert mxjax(*both)[0]["dtype"] == "bfloat16"
  told = refused(*both, "--dtype", "float32")
  assert "made with dtype float32, got dtype bfloat16; name another --out" in told


def test_plan_reads_the_config_alone(folder, tmp_path, mxjax):
  config = tmp_path / "config.json"
  config.write_text((folder / "config.json").read_text())
  # q, k, v and o, gate, up of width 64, down of 96.
  assert mxjax("plan", config, "--sequences", 4)["blocks"] == 6 * 2 + 3
  told = mxjax("plan", config, as_json=False)
  assert "packed layout" in told and "time on this machine, about" in told
  stored = mxjax("plan", config, "--method", "all,gptq:activations=float")["stored"]
  assert set(stored) == {*methods.METHODS, "gptq:activations=float"}
  assert stored["gptq"]["total"] == stored["gptq:activations=float"]["total"]
  assert "larger" in told
  told = mxjax(
    "plan", config, "--method", "hires,gptq:activations=float", as_json=False
  )
  assert "stored MiB by method" in told and "[W4A16]" in told
  assert "storage of HiRes" not in told and "build" in told
  told = mxjax("plan", config, "--method", "rtn+tune:code_rate=0.03", as_json=False)
  for place in ("memory", "disk"):
    assert f"{place} besides, what rtn+tune:code_rate=0.03 learns" in told
  # Each method has its time there; that of HiRes is none of RTN's.
  told = mxjax("plan", config, "--method", "rtn,spinquant", as_json=False)
  assert "build" in told and "time on this machine" not in told
  # So has one that learns.
  last = {line.split()[0]: line.split()[-1] for line in told.splitlines() if line}
  assert {last["rtn"], last["spinquant"]} <= {"s", "min", "h"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_is_for_the_dtype_of_the_run(folder, mxjax, monkeypatch, dtype):
  timed = []
  rate = lambda dtype: timed.append(dtype) or 1e9
  monkeypatch.setattr(estimates, "products_a_second", rate)
  words = ["plan", folder, *(["--dtype", dtype] if dtype == "float32" else [])]
  config = models.load_config(folder, dtype=dtype)
  length = config.max_positions
  expected = plan.plan(config, length=length, on_disk=False).to_dict()
  assert mxjax(*words, "--no-on-disk") == json.loads(json.dumps(expected))
  assert f"a run in {dtype}, layers in memory" in mxjax(*words, as_json=False)
  assert timed == [dtype]


@pytest.mark.slow
def test_compare_marks_rules_and_resumes(folder, tmp_path, mxjax, refused):
  out = tmp_path / "out"
  (folder / "other.txt").write_text(tiny.TEXT[7:])
  both = ("--data", f"{folder / 'text.txt'},{folder / 'other.txt'}")
  first = mxjax("compare", *arguments(folder, out, "--methods", "rtn", *both))
  assert list(first[0]["perplexity"]) == ["text", "other"]
  more = ("--methods", "rtn,gptq", "--scale-rules", "floor,even")
  rows = mxjax("compare", *arguments(folder, out, *more, *both))
  names = ["rtn", "rtn [even]", "gptq", "gptq [even]"]
  assert [row["method"] for row in rows] == names
  assert rows[0] == first[0]
  command = ["compare", *arguments(folder, out, *more, *both)]
  assert "made with agreement True, got agreement False;" in refused(
    *command, "--agreement"
  )
  assert not (out / "store").exists()
  assert "rtn [even]" in (out / "report.html").read_text()
  assert json.loads((out / "result.json").read_text())[0]["record"]["layers"]


def test_an_existing_output_folder_is_refused(folder, tmp_path, refused):
  (tmp_path / "mine").write_text("keep")
  said = refused("quantize", *arguments(folder, tmp_path))
  assert "never overwritten" in said and "--resume" not in said
  assert sorted(p.name for p in tmp_path.iterdir()) == ["mine"]
  # A person who starts an interrupted build again is told how it goes on.
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "state.json").write_text("{}")
  assert "add --resume" in refused("quantize", *arguments(folder, tmp_path))


def test_token_ids_out_of_range_are_named(folder, tmp_path, refused):
  path = tmp_path / "ids.npy"
  np.save(path, np.full((2, 32), 64))
  options = arguments(folder, tmp_path / "out", "--calib", path)
  assert "outside the vocabulary of 64" in refused("quantize", *options)


def test_compiled_programs_are_kept_where_a_command_says(tmp_path, monkeypatch):
  kept = []
  here = lambda name: lambda *where: kept.append((name, *where))
  for name in ("keep_compiled", "keep_compiled_on_gpu", "keep_none"):
    monkeypatch.setattr(kept_programs, name, here(name))
  generate = ["generate", str(tmp_path / "none"), "--prompt", "a"]
  main([*generate, "--compiled", "here"])
  main([*generate, "--no-compiled"])
  main(generate)
  assert kept == [("keep_compiled", "here"), ("keep_none",), ("keep_compiled_on_gpu",)]


def test_a_program_that_compiles_for_long_is_named(monkeypatch, capsys):
  def slow(options):
    jax.jit(lambda x: x @ x - 5).lower(jnp.ones((3, 3)))
    time.sleep(0.5)

  monkeypatch.setattr(cli, "COMPILING", 0.05)
  monkeypatch.setattr("mxjax.cli.plan.run", slow)
  assert cli.main(["plan", "somewhere"]) == 0
  assert "XLA has been compiling <lambda> for 0.05 s" in capsys.readouterr().err


def test_only_a_process_of_a_command_starts_devices_beforehand(tmp_path, monkeypatch):
  hurried = []
  monkeypatch.setattr(cli, "_hurry", lambda options: hurried.append(options.command))
  words = ["generate", str(tmp_path / "none"), "--prompt", "a"]
  assert main(words) == 2
  assert hurried == []
  monkeypatch.setattr("sys.argv", ["mxjax", *words])
  assert main() == 2
  assert hurried == ["generate"]
