"""Help, versions and misspelled words: before anything heavy is loaded."""

import os
import pathlib
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from mxjax import methods
from mxjax.cli import completion
from mxjax.cli.discover import EXAMPLES
from mxjax.cli.main import GROUPS, build_parser, main

ROOT = pathlib.Path(__file__).parents[3]
COMMANDS = (
  "plan quantize verify evaluate compare reproduce generate chat demo export "
  "import discover completion"
).split()


def test_help_of_every_command_loads_no_array_library():
  program = f"""
import sys
from mxjax.cli import completion
from mxjax.cli.main import GROUPS, build_parser, main

heavy = ("jax", "flax", "numpy", "scipy", "rich", "transformers", "safetensors")
helps = [[name, "--help"] for name in {COMMANDS}]
for words in (["--help"], ["--version"], *helps, ["discover", "study", "--help"]):
  try:
    main(words)
  except SystemExit as stop:
    assert stop.code == 0, words
  assert not set(heavy) & set(sys.modules), (words, set(heavy) & set(sys.modules))
"""
  done = subprocess.run(
    [sys.executable, "-c", program],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert "mxjax 0." in done.stdout


def printed(words, capsys):
  with pytest.raises(SystemExit) as stop:
    main(words)
  return stop.value.code, capsys.readouterr()


def helped(command, capsys):
  with pytest.raises(SystemExit) as stop:
    main([command, "--help"])
  assert stop.value.code == 0
  return capsys.readouterr().out


def test_without_a_command_the_help_is_shown(capsys):
  assert main([]) == 2
  assert "Example" not in (shown := capsys.readouterr().out) and "quantize" in shown


def test_help_explains_each_command(capsys):
  for command in COMMANDS:
    assert len(helped(command, capsys)) > 200, command
  for command in ("quantize", "compare"):
    words = [word.strip(",;") for word in helped(command, capsys).split()]
    assert set(methods.METHODS) <= set(words)


DEFAULTS = {
  "quantize": {
    "--sequences N": 128,
    "--length T": 2048,
    "--method M": "hires",
    "--seed S": 0,
    "--replicates R": 1,
  },
  "chat": {"--temperature X": 0.7, "--max-new-tokens N": 512},
  "generate": {"--temperature X": 0.0, "--max-new-tokens N": 32},
  "compare": {"--methods NAMES": "rtn,gptq,brq,hires"},
}


def test_help_shows_every_default_once(capsys):
  for command, defaults in DEFAULTS.items():
    text = helped(command, capsys).partition("positional arguments")[2]
    for option, value in defaults.items():
      explained = " ".join(text.split()).split(f" {option} ", 1)[1].split(" --", 1)[0]
      assert explained.count("default: ") == 1, (command, option)
      assert f"; default: {value}" in explained


def test_commands_are_grouped_and_each_ends_in_an_example_that_parses(capsys):
  with pytest.raises(SystemExit):
    main(["--help"])
  told = capsys.readouterr().out
  examples = {name: words for group in GROUPS.values() for name, words in group.items()}
  assert sorted(examples) == sorted(COMMANDS)
  places = [told.index(f"\n{group}:\n") for group in GROUPS]
  assert places == sorted(places)
  for name, words in examples.items():
    assert told.count(f"\n  {name:12}") == 1
    assert " ".join(helped(name, capsys).split()).endswith(f"Example: mxjax {words}")
    assert build_parser().parse_args(shlex.split(words)).command == name


STEPS = ("freeze", "run", "close", "replay", "tables", "pack")


@pytest.mark.parametrize(
  "verbs", [*([verb] for verb in EXAMPLES), *(["trial", step] for step in STEPS)]
)
def test_each_verb_of_discover_ends_in_an_example_that_parses(verbs, capsys):
  code, told = printed(["discover", *verbs, "--help"], capsys)
  text, start = " ".join(told.out.split()), f"discover {' '.join(verbs)}"
  assert code == 0
  _, example = text.rsplit("Example: mxjax ", 1)
  assert example.startswith(start)
  assert build_parser().parse_args(shlex.split(example)).command == "discover"
  # A default that is no text would be told as nothing.
  assert not re.search(r"default:( -|$)", text)


def test_options_of_a_search_are_grouped_as_those_of_other_commands(capsys):
  for verb, alone in (("run", 2), ("plan", 1), ("study", 2)):
    _, told = printed(["discover", verb, "--help"], capsys)
    lines = told.out.splitlines()
    titles = [line[:-1] for line in lines if re.fullmatch(r"[a-z][^ ].*:", line)]
    searched = ["the task", "the search", "the proposer", "how candidates run"]
    assert set(searched) | {"options from a file"} <= set(titles)
    first = told.out.split("\noptions:\n")[1].split("\n\n")[0]
    # The help itself, and the folder of what is written.
    assert len(re.findall(r"^  -", first, re.M)) == alone
    start = " ".join(told.out.split()).partition(" --start PROGRAM ")[2]
    assert start.partition(" --")[0].endswith("default program when omitted")


COMPLETED = {
  "ver": ["verify"],
  "quantize --sampl": ["--sampling", "--sample"],
  "quantize --sampling d": ["documents"],
  "export runs/first --format g": ["gguf"],
  "discover r": ["run", "resume", "report"],
  "discover run --arm q": ["quantforge"],
  "quantize --method gp": ["gptq"],
  "compare --methods rtn,pa": ["rtn,paper"],
  "evaluate runs/first --tasks piqa,wi": ["piqa,wikitext2", "piqa,winogrande"],
}


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize("line", COMPLETED)
def test_bash_completes(line):
  words = ["mxjax", *line.split()]
  listed = " ".join(map(shlex.quote, words))
  program = completion.script(build_parser(), "bash") + (
    f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _mxjax\n"
    'printf "%s\\n" "${COMPREPLY[@]}"'
  )
  done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, "")
  assert sorted(done.stdout.split()) == sorted(COMPLETED[line])


def test_zsh_gets_the_same_after_what_it_needs():
  bash, zsh = (completion.script(build_parser(), shell) for shell in ("bash", "zsh"))
  assert zsh.replace(completion.ZSH, "") == bash != zsh
  # As a length of a part of an array, zsh takes a letter for a modifier.
  assert not re.search(r"@\]:\d+:[A-Za-z]", zsh)


def shown_within(terminal, seconds, text=""):
  """What a terminal shows until it shows `text`, or for some seconds."""
  shown, end = b"", time.monotonic() + seconds
  while time.monotonic() < end and not (text and text.encode() in shown):
    if select.select([terminal], [], [], 0.1)[0]:
      shown += os.read(terminal, 4096)
  return shown.decode(errors="replace")


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
@pytest.mark.parametrize(
  ("typed", "completed"),
  [
    ("ver", "verify "),
    ("discover tri", "discover trial "),
    ("chat --se", "chat --seed"),
  ],
)
def test_zsh_completes_what_is_typed(tmp_path, typed, completed):
  script = tmp_path / "mxjax.zsh"
  script.write_text(completion.script(build_parser(), "zsh"))
  terminal, end = pty.openpty()
  shell = subprocess.Popen(
    ["zsh", "-f", "-i"],
    stdin=end,
    stdout=end,
    stderr=end,
    env={**os.environ, "TERM": "dumb"},
    start_new_session=True,
  )
  try:
    # The terminal shows what is typed, but not as it is printed.
    commands = f"autoload -U compinit && compinit -u -D; . {script}; print rea''dy"
    os.write(terminal, f"{commands}\n".encode())
    assert "ready" in shown_within(terminal, 30, "ready")
    os.write(terminal, f"mxjax {typed}\t".encode())
    assert f"mxjax {completed}" in shown_within(terminal, 30, f"mxjax {completed}")
  finally:
    shell.kill()
    shell.wait()
    os.close(end)
    os.close(terminal)
