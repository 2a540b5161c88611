"""The documents name files that exist, and show results that were measured."""

import collections
import importlib.util
import json
import math
import pathlib
import re

import pytest

from mxjax.calibration import fisher
from mxjax.discovery.tasks.ptq import edit_templates
from mxjax.methods import METHODS, scale_distillation
from mxjax.numerics.realization import map_refit, two_sided
from mxjax.numerics.recovery import mlp_recovery
from mxjax.numerics.shaping import (
  dyadic_balance,
  local_interaction,
  map_descent,
  map_search,
  reference_chart,
)

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted(
  [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
TOPS = "benchmarks|discovery|docs|evaluation|examples|models|mxjax|pallas_kernels|tests"
PATHS = re.compile(rf"\b(?:{TOPS})/[\w./-]*\w\.(?:py|md|json|txt|svg)\b")
FOLDERS = re.compile(rf"`((?:{TOPS})/[\w/]*)`")
INCLUDES = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)$", re.MULTILINE)


def name_of(document):
  return str(document.relative_to(ROOT))


def test_every_file_and_folder_that_is_named_exists():
  missing = []
  for document in DOCUMENTS:
    text = document.read_text()
    named = {*PATHS.findall(text), *FOLDERS.findall(text)}
    missing += [
      f"{name_of(document)}: {path}"
      for path in sorted(named)
      if "NAME" not in path and not (ROOT / path).exists()
    ]
  assert not missing, "\n".join(missing)


def test_every_included_result_exists():
  missing = [
    f"{name_of(document)}: {place}"
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
    if not (document.parent / place).is_file()
  ]
  assert not missing, "\n".join(missing)


def test_every_table_of_results_is_shown():
  shown = {
    (document.parent / place).resolve()
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
  }
  assert set((ROOT / "benchmarks" / "results").glob("*.md")) <= shown


def test_the_figure_is_that_of_the_result_files():
  path = ROOT / "benchmarks" / "readme_figure.py"
  spec = importlib.util.spec_from_file_location("readme_figure", path)
  figure = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(figure)
  assert figure.draw() == figure.FIGURE.read_text(), f"run python {path.name}"


def test_the_readme_has_the_table_of_stored_bytes():
  table = ROOT / "benchmarks" / "results" / "stored_bytes.md"
  assert table.read_text() in (ROOT / "README.md").read_text()


def test_the_readme_shows_what_its_example_printed():
  shown = re.search(
    r"```python\n.*?```\n\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
  )
  result = ROOT / "benchmarks" / "results" / "readme_example.json"
  assert shown is not None
  assert shown[1].splitlines() == json.loads(result.read_text())["prints"]


DEMO = ["README.md", "docs/getting_started.md", "docs/results/methods.md"]


@pytest.mark.parametrize("page", DEMO)
def test_the_pages_tell_what_the_demo_takes(page):
  result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
  text = " ".join((ROOT / page).read_text().split())
  assert f"took {result['seconds']:.0f} seconds on two" in text
  # A busy machine would say more of other work than of the command.
  assert result["machine"]["load_at_start"] < 2


def test_the_imports_of_the_readme_work():
  code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  assert code is not None
  compile(code[1], "README.md", "exec")
  lines = [line for line in code[1].splitlines() if re.match("import |from ", line)]
  assert lines
  exec("\n".join(lines), {})


def numbers_of_hires():
  """The constants on the page of HiRes: what surrounds each, and the code's value."""
  after = METHODS["hires-next"]
  words = {"two": 2, "three": 3, "quarter": 1 / 4}
  return words, [
    (r"\$Cap_(\S+?)\$ bounds", reference_chart.MAX_CONDITION),
    (r"condition number by (\S+):", reference_chart.MAX_CONDITION),
    (r"\\\|K\\\|_2 \\le 1/(\d+)", 1 / local_interaction.RADIUS),
    (r"a \*ridge\*: (\S+) of the mean of its", reference_chart.RIDGE),
    (
      r"diagonal and \$2\^\{(\S+)\}\$ are added",
      math.log2(reference_chart.RIDGE_FLOOR),
    ),
    (r"with \$\|e\| \\le 1/(\d+)", 1 / dyadic_balance.BOUND),
    (r"\\eta\| \\le 1/(\d+)", 1 / mlp_recovery.L1_BOUND),
    (r"in (\w+) passes over the columns", METHODS["hires-descent"].descent),
    (r"\\omega_t = (\S+) \+", 1 - fisher.SHARE),
    (r"\\omega_t = \S+ \+ (\S+) w_t", fisher.SHARE),
    (r"\\\|\^2, (\d+) \\cdot", fisher.LARGEST),
    (r"B_b = (\S+)\\, \\frac\{W_b", 1 - fisher.SHARE),
    (r"W_b\}\{m\} \+ (\S+)\\,\n", fisher.SHARE),
    (r"where \$S = (\S+)\\, I", 1 - fisher.SHARE),
    (r"S = \S+ I \+ (\S+)\\, m", fisher.SHARE),
    (r"GPTQ damps \$H_\\omega\$ by (\S+)\.\n", after.damping),
    (r"max_condition=(\d+)`", after.max_condition),
    (r"Groups of (\d+)\s+output rows", two_sided.GROUP),
    (
      r"where there are (\S+) rows or more",
      2 * two_sided.GROUP * two_sided.MANY_GROUPS,
    ),
    (r"After rounding, (\w+) sweeps", map_refit.SWEEPS),
    (r"\\tfrac1(\d), \\dots", map_search.PHASES),
    (r"steps, each on a (\w+) of the tokens", 1 / map_descent.PARTS),
    (r"`changes=(\d+)`", after.changes),
    (r"on chunks of (\d+) tokens", after.tune.length),
    (r"in (\w+) passes over the\s+calibration set", after.tune.epochs),
    (r"labels is (\S+) times", scale_distillation.LABELS_BY_NAT),
    (r"divergence so far, but at most (\S+)\. ", after.tune.label_weight),
  ]


def test_the_page_of_hires_has_the_constants_of_the_code():
  page = (ROOT / "docs" / "concepts" / "hires.md").read_text()
  words, numbers = numbers_of_hires()
  for pattern, value in numbers:
    shown = re.findall(pattern, page)
    assert len(shown) == 1, pattern
    number = float(words.get(shown[0], shown[0].replace(",", "")))
    assert number == pytest.approx(value), pattern


@pytest.mark.parametrize(
  ("heading", "run", "count"),
  [
    ("## What was made a method", "ptq_by_a_model", 8),
    ("### One whole run by the present prompts", "ptq_again_by_a_model", 12),
  ],
)
def test_the_lineage_of_a_champion_is_that_of_its_log(heading, run, count):
  """Every KL of a row is that of a call of the row, or of a control of it."""
  page = (ROOT / "docs" / "results" / "discovery.md").read_text()
  table = page.partition(heading)[2].partition("| call |")[2]
  log = (ROOT / "tests" / "golden" / run / "log.jsonl").read_text().splitlines()
  events = [json.loads(line) for line in log]
  outcomes = [e for e in events if e["event"] == "outcome"]
  kl = [(e["call"], e["values"]["kl"]) for e in outcomes]
  edits = [e["call"] for e in outcomes if e["kind"] == "candidate"]
  rows = [line.split("|")[1:-1] for line in table.split("\n\n")[0].splitlines()[2:]]
  assert len(rows) == count
  for calls, _, *cells in rows:
    first, *_, last = [*map(int, calls.split(", "))] * 2
    after = min((call for call in edits if call > last), default=math.inf)
    known = {f"{value:.4f}"[1:] for call, value in kl if first <= call < after}
    shown = re.findall(r"\.\d{4}", " ".join(cells))
    assert shown and {*shown} <= known, (calls, shown, known)


def test_the_page_counts_what_the_whole_run_on_a_model_did():
  page = " ".join((ROOT / "docs" / "results" / "discovery.md").read_text().split())
  folder = ROOT / "tests" / "golden" / "ptq_again_by_a_model"
  rows = lambda name: map(json.loads, (folder / name).read_text().splitlines())
  events = [*rows("log.jsonl")]
  replies = sum("reply" in row for row in rows("cassette.jsonl"))
  outcomes = [e for e in events if e["event"] == "outcome"]
  assert {e["status"] for e in outcomes} == {"ok"}
  assert not [e for e in events if e["event"] == "refused"]
  made = collections.Counter(e["kind"] for e in outcomes)
  assert sum(e["charged"] for e in outcomes) == 40
  edits = made["candidate"] - 1
  assert f"It wrote {edits} edits in {replies} replies" in page
  assert f"The other {replies - edits} asked" in page
  assert made["probe"] == 1
  assert f"There were {made['control']} controls and one probe" in page
  kl = {e["call"]: e["values"]["kl"] for e in outcomes}
  best = min(kl, key=lambda call: kl[call])
  first, least = (f"{kl[call]:.4f}".removeprefix("0") for call in (1, best))
  assert f"KL fell from {first} to {least} at call {best}" in page
  ended = collections.Counter(e["verdict"] for e in events if e["event"] == "verdict")
  assert f"of {ended.total()} verdicts seven stayed unresolved and six found" in page
  assert (ended["unresolved"], ended["no_effect"]) == (7, 6)


def test_the_page_of_discovery_tells_the_recorded_run_as_its_log_does():
  page = " ".join((ROOT / "docs" / "results" / "discovery.md").read_text().split())
  log = (ROOT / "tests/golden/world_by_a_model/log.jsonl").read_text().splitlines()
  events = [json.loads(line) for line in log]
  outcomes = [e for e in events if e["event"] == "outcome"]
  controls = [e for e in outcomes if e["kind"] == "control"]
  edits = [e for e in outcomes if e["kind"] == "candidate"][1:]
  replies = [e for e in events if e["event"] == "replies"]
  losses = [e["values"]["loss"] for e in outcomes]
  words = {3: "three", 4: "four", 7: "seven", 8: "eight"}
  count, made, ran = (words[len(each)] for each in (replies, edits, controls))
  assert f"{count.capitalize()} replies led to {made} edits and {ran} controls" in page
  assert not [e for e in events if e["event"] == "refused"]
  told = re.search(r"loss fell from (\S+) to (\S+) at the (\w+)th call", page)
  best = min(losses)
  assert told.groups() == (
    f"{losses[0]:.3f}",
    f"{best:.3f}",
    words[outcomes[losses.index(best)]["call"]].removesuffix("t"),
  )
  spent = sum(e["charged"] for e in outcomes)
  assert f"left {words[15 - spent]} calls" in page
  verdicts = [e["verdict"] for e in events if e["event"] == "verdict"]
  assert verdicts[:2] == re.findall(r"verdict was `(\w+)`", page)
  assert f"{len(outcomes)} calls of `--task world --seed 1`" in page


def test_every_edit_is_shown_with_its_first_parameters():
  edits = {"useful": edit_templates.USEFUL, "decoy": edit_templates.DECOYS}
  expected = {"(initial program)": None} | {
    card.label(dict(card.params[0])): kind for kind in edits for card in edits[kind]
  }
  result = ROOT / "benchmarks" / "results" / "edit_cards.json"
  cards = json.loads(result.read_text())["cards"]
  shown = {label: row.get("kind") for label, row in cards.items()}
  assert shown == expected, "run python benchmarks/edit_cards.py"
