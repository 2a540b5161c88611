"""What pages show is true: Python, values that they mark, options that they name."""

import contextlib
import importlib.util
import io
import json
import pathlib
import pkgutil
import re
import shlex
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mxjax
from mxjax.cli.main import main
from mxjax.models import CausalLM
from tests import tiny

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(p.relative_to(ROOT)): p for p in sorted(DOCS.rglob("*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md")}
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARKED = re.compile(r"([\w.,]+)`?<!-- = ([\w.\-:]+) -->")
NUMBER = re.compile(r"[-+]?\d+\.?\d*")
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "eight": 8}
ELSEWHERE = (
  *("SummaryWriter", "orbax.checkpoint", "DESCRIPTION = ", "def clean(x)"),
  *("CompressedTensorsConfig", "mxjax.from_pretrained()"),
)
"""What marks a block that runs elsewhere: in its own process, as files, or by torch.

The last one is the README's, whose build of SmolLM2-135M takes minutes: a script in
`benchmarks/` runs it, and `test_docs.py` compares the page with what that printed.
"""


def blocks(page):
  """The fenced blocks of a page, as pairs of language and text."""
  return FENCE.findall(PAGES[page].read_text())


def python(page):
  """Each Python block that runs here, with the plain block that follows it, if any."""
  found = [*blocks(page), ("", "")]
  return [
    (text, "" if following[0] else following[1])
    for (language, text), following in zip(found, found[1:], strict=False)
    if language == "python" and not any(mark in text for mark in ELSEWHERE)
  ]


class Block(nn.Module):
  """A layer of the module below."""

  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(32)(nn.relu(nn.Dense(64)(x)))


class Network(nn.Module):
  """A Flax module of one's own: two blocks and a head."""

  @nn.compact
  def __call__(self, x):
    for index in range(2):
      x = Block(name=f"block_{index}")(x)
    return nn.Dense(8, name="head")(x)


def names_of(page):
  """What a reader of the page has by then: a model, its params and tokens."""
  model = CausalLM(tiny.config(vocab_size=64))
  tokens = jax.random.randint(jax.random.key(1), (2, 32), 0, 64)
  params = model.init(jax.random.key(0), tokens)["params"]
  names = dict(jax=jax, jnp=jnp, mxjax=mxjax, model=model, params=params, tokens=tokens)
  if page == "docs/guides/own_models.md":
    module, batch = Network(), jax.random.normal(jax.random.key(2), (8, 32))
    own = module.init(jax.random.key(3), batch)["params"]
    names |= {"module": module, "batch": batch, "params": own}
  return names


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A folder that looks like the repository's, in which pages may write."""
  for name in ("models", "examples"):
    (tmp_path / name).symlink_to(ROOT / name)
  monkeypatch.chdir(tmp_path)
  # The pages ask for meshes of machines that have more devices than this one.
  make = jax.make_mesh
  monkeypatch.setattr(
    jax, "make_mesh", lambda shape, axes: make((1,) * len(axes), axes)
  )


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if python(page)])
def test_the_python_of_a_page_runs_and_prints_what_it_shows(page, checkout):
  # The last digit of a sum may differ between processors; words may not.
  names = names_of(page)
  for code, shown in python(page):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), jax.numpy_rank_promotion("allow"):
      exec(compile(code, page, "exec"), names)
    if not printed.getvalue():
      continue
    assert NUMBER.sub("#", printed.getvalue()) == NUMBER.sub("#", shown)
    ours, theirs = (
      [float(number) for number in NUMBER.findall(text)]
      for text in (printed.getvalue(), shown)
    )
    assert ours == pytest.approx(theirs, rel=0.02, abs=2e-4)


def value_of(place):
  """The code's value: `module.NAME`, or `method:option` of a registered method.

  Of a table it is the number of entries.
  """
  method, _, option = place.partition(":")
  if option:
    value = mxjax.methods.get(method)
    for part in option.split("."):
      value = getattr(value, part)
    return value
  value = pkgutil.resolve_name(place)
  return len(value) if isinstance(value, Mapping) else value


def marked():
  for page, path in PAGES.items():
    for shown, place in MARKED.findall(path.read_text()):
      yield page, shown, place


@pytest.mark.parametrize(("page", "shown", "place"), [*marked()])
def test_a_value_that_a_page_marks_is_the_codes(page, shown, place):
  value = value_of(place)
  read = WORDS.get(
    shown, shown.replace(",", "") if type(value) in (int, float) else shown
  )
  assert type(value)(read) == value, f"{page} says {shown}, {place} is {value}"


def test_pages_mark_values():
  assert len([*marked()]) >= 20


def test_the_page_of_options_is_that_of_the_code():
  spec = importlib.util.spec_from_file_location(
    "method_options", DOCS / "method_options.py"
  )
  script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)
  page = DOCS / "reference" / "method_options.md"
  assert page.read_text() == script.page(), (
    f"run python docs/method_options.py > {page}"
  )


def commands(page):
  """The command lines of the shell blocks of a page, without continuations."""
  for language, text in blocks(page):
    if language == "shell":
      lines = text.replace("\\\n", " ").splitlines()
      yield from (line for line in lines if line.strip() and line[0] != "#")


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_say_what_they_are(page):
  # Unmarked blocks are what a command or a Python block printed.
  for language, text in blocks(page):
    if language.startswith("{"):
      continue
    words = {line.split(" ")[0] for line in text.splitlines() if line}
    if words & {"mxjax", "pip", "make", "python", "git"}:
      assert language == "shell", text


def options_of(words):
  """The options that a command of mxjax knows, from its help."""
  shown = io.StringIO()
  with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
    main([*words, "--help"])
  return set(re.findall(r"--[a-z0-9][a-z0-9-]*", shown.getvalue()))


def test_every_option_of_a_shell_block_exists():
  known, wrong = {}, []
  for page in PAGES:
    for line in commands(page):
      words = shlex.split(line, comments=True)
      if words[0] != "mxjax":
        continue
      path = [words[1]]
      if words[1] == "discover":
        # A step of a trial has options of its own.
        path = words[1:4] if words[2] == "trial" else words[1:3]
      if tuple(path) not in known:
        known[tuple(path)] = options_of(path)
      wrong += [
        f"{page}: {line}"
        for word in words
        if word.startswith("--") and word.partition("=")[0] not in known[tuple(path)]
      ]
  assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_discovery_task_of_the_how_to_is_searched(tmp_path, capsys):
  page = "docs/extend/discovery_task.md"
  folder = tmp_path / "denoise"
  folder.mkdir()
  files = [text for language, text in blocks(page) if language == "python"]
  (initial,) = [text for text in files if "DESCRIPTION = " not in text]
  (evaluate,) = [text for text in files if "DESCRIPTION = " in text]
  (folder / "initial.py").write_text(initial)
  (folder / "evaluate.py").write_text(evaluate)
  out = tmp_path / "run"
  run = ["discover", "run", "--task", str(folder), "--sandbox", "off", "--budget", "12"]
  main([*run, "--out", str(out)])
  log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
  verdicts = [event["verdict"] for event in log if event["event"] == "verdict"]
  assert verdicts == ["supported", "no_effect"]
  printed = capsys.readouterr().out
  shown = next(text for language, text in blocks(page) if not language)
  for line in shown.splitlines():
    assert NUMBER.sub("#", line) in NUMBER.sub("#", printed), line
