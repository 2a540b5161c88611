"""What result files say of how they were made: a command that makes them again."""

import argparse
import importlib
import itertools
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from mxjax.evaluation.tables.declared import TABLES

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
"""Those of GPUs, in a folder of their own, come from a machine that is lent whole."""
OLDER = {
  "no command": {
    *("export_roundtrip", "harness_quantized", "hires_build"),
    *("hostile_programs", "perplexity_agreement_bfloat16", "plan_memory"),
    *("reference_protocol", "studies_payoff_noisy", "studies_payoff_plain"),
    "studies_world",
  },
  "no script": {"gpu_counts", "gpu_predictions", "gpu_programs"},
  "no dtype": {"ablate_llama", "next_llama", "next_qwen3", "stages"},
  "other rows": {"hires_next"},
}
"""Files that were made before their scripts recorded what is missing, by what it is.

One that is made again leaves its set; none may join one.
"""


def test_the_tables_that_a_benchmark_asks_for_are_declared(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
  baselines = importlib.import_module("baselines")
  for wanted in (baselines.ABLATIONS, *baselines.PARTS.values()):
    assert not set(wanted.split(",")) - TABLES.keys()
  assert set(baselines.DRAWN) <= baselines.PARTS.keys()


def missing(file):
  """What keeps a result file from being made again by the command in it, if known."""
  result = json.loads(file.read_text())
  if not isinstance(result, dict) or not result.get("command"):
    return "no command"
  program, script, *words = shlex.split(result["command"])
  assert program == "python", file.name
  if not (ROOT / script).is_file():
    return "no script"
  shared = ROOT / "benchmarks" / "common.py"
  text = (ROOT / script).read_text() + shared.read_text()
  unknown = [word for word in words if word[:2] == "--" and f'"{word}"' not in text]
  assert not unknown, (file.name, unknown)
  # The default is the dtype of a checkpoint, which was another once.
  if "--dtype" not in shlex.split(result.get("mxjax", "--dtype")):
    return "no dtype"
  if file.stem.startswith("hires_next") and not has_rows_of(words, result):
    return "other rows"
  return None


def has_rows_of(words, result):
  """Whether a command of `hires_next.py` makes the rows of a file, by one code."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--rows", nargs="+")
  parser.add_argument("--draws", nargs="+", type=int, default=[1, 2, 3])
  options, _ = parser.parse_known_args(words)
  made = {(row["draw"], row["name"]) for row in result["rows"]}
  names = options.rows or {name for _, name in made}
  return "code" in result and made == {*itertools.product(options.draws, names)}


def test_every_result_file_holds_the_command_that_makes_it():
  of = {name: what for what, names in OLDER.items() for name in names}
  found = {file.stem: missing(file) for file in FILES}
  assert {name: what for name, what in found.items() if what is not None} == of


def test_the_page_of_hires_next_tells_what_its_rows_say():
  """The range of its gain in KL over HiRes, and that labels have no part in it."""
  page = (ROOT / "docs" / "results" / "hires_next.md").read_text()
  least, most = map(int, re.search(r"KL is (\d+) to (\d+) % below", page).groups())
  gains, by_labels = [], []
  for family in ("llama", "qwen3", "mistral", "olmo2"):
    text = (ROOT / "benchmarks/results" / f"hires_next_{family}.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| hires")]
    kl = {
      row[1].strip(): [float(c.split()[0]) for c in row[2:10:2]] for row in rows[:4]
    }
    for paper, ours, bare in zip(*(kl[name] for name in KL_ROWS), strict=True):
      gains.append(100 * (1 - ours / paper))
      by_labels.append(100 * (ours / bare - 1))
  assert (least, most) == (round(min(gains)), round(max(gains)))
  assert -1.5 < min(by_labels) and max(by_labels) < 3.5


KL_ROWS = ("hires", "hires-next", "hires-next, no labels")


def test_the_pages_of_searched_maps_tell_what_their_rows_say():
  """Their gains over three methods, where intervals are clear of zero."""
  page = (ROOT / "docs" / "results" / "hires_next.md").read_text()
  words = " ".join(page.split())
  text = (ROOT / "benchmarks" / "results" / "map_search.md").read_text()
  cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
  number = re.compile(r"(\S+) ± (\S+) \((\S+) %\)")
  told = (
    ("map-search", 4, r"`map-search` takes (\d+) to (\d+) % off the KL of HiRes"),
    ("map-search", 5, r"`map-search` is (\d+) to (\d+) % below it"),
    ("map-descent", 4, r"`map-descent` takes (\d+) to (\d+) % off the KL of HiRes"),
    ("map-descent", 7, r"is (\d+) to (\d+) % below `hires-next`"),
    ("maps searched", 7, r"alone takes another (\d+) to (\d+) % off the KL"),
    ("maps descended", 7, r"maps take another (\d+) to (\d+) % off the KL of"),
    ("maps descended", 4, r"and (\d+) to (\d+) % off that of HiRes"),
    ("first map descended", 7, r"candidate takes (\d+) to (\d+) % off KL"),
    ("descended and fitted", 7, r"as well, it takes (\d+) to (\d+) % off"),
  )
  [fitted] = [row for row in cells if row[1] == "hires-next, maps fitted"]
  assert (fitted[0], fitted[2]) == ("llama", "1")
  share = round(-float(number.fullmatch(fitted[7])[3]))
  assert re.findall(r"it takes (\d+) % off the KL of `hires-next`", words) == [
    str(share)
  ]
  kl = {(row[0], row[1]): float(row[3]) for row in cells}
  last = "hires-next, first map descended"
  further = [
    round(100 * (1 - kl[model, f"{last} and fitted"] / kl[model, last]))
    for model in ("llama", "qwen3", "mistral", "olmo2")
  ]
  least, most = re.search(r"it takes another (\d+) to (\d+) % off on", words).groups()
  assert (min(further), max(further)) == (int(least), int(most))
  for name, column, pattern in told:
    rows = [number.fullmatch(row[column]) for row in cells if row[1].endswith(name)]
    values = [[float(value) for value in row.groups()] for row in rows if row]
    assert len(values) == 4
    # An interval that holds zero is told as level with the other, and has no share.
    clear = [share for mean, half, share in values if mean + half < 0]
    assert len(clear) == (3 if column == 5 else 4), name
    shares = sorted(round(-share) for share in clear)
    assert re.findall(pattern, words) == [(str(shares[0]), str(shares[-1]))], name


def kl_of_draw(names, draw=1):
  """KL by window of the rows of some result files, by name of the row and text."""
  found = {}
  for name in names:
    text = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text()
    for row in json.loads(text)["rows"]:
      if row["draw"] == draw:
        of_row = {text: np.array(kl["kl"]) for text, kl in row["texts"].items()}
        found |= {(row["name"], text): kl for text, kl in of_row.items()}
  return found


@pytest.mark.parametrize(
  ("files", "row", "sign", "texts"),
  [
    (("map_descent_smollm2", "hires_next"), "map-descent", 1, ("WikiText-2", "C4")),
    (
      ("maps_descended_smollm2", "hires_next_smollm2"),
      "hires-next:use_interaction=false:use_balance=false:candidates=1:map_steps=300",
      -1,
      ("WikiText-2", "C4", "Python", "German"),
    ),
  ],
)
def test_the_page_of_learned_maps_tells_a_row_of_smollm2(files, row, sign, texts):
  """KL, and how far that is from two other rows, paired by window."""
  page = (ROOT / "docs" / "results" / "hires_next.md").read_text()
  words = " ".join(page.split())
  kl = kl_of_draw(files)
  expected = [round(1000 * kl[row, text].mean()) for text in texts]
  for name, direction in (("hires", -1), ("hires-next", sign)):
    for text in texts:
      apart = direction * (kl[row, text] - kl[name, text])
      assert apart.mean() > 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
      expected.append(round(100 * apart.mean() / kl[name, text].mean()))
  *first, last = (rf"\.(\d+) on {text}" for text in texts)
  shares = ", ".join([r"(\d+)"] * (len(texts) - 1)) + r" and (\d+) %"
  way = "above" if sign > 0 else "below"
  told = re.search(
    rf"{', '.join(first)} and {last}, which is {shares} below HiRes, "
    rf"and {shares} {way} `hires-next`",
    words,
  )
  assert told
  assert [int(number) for number in told.groups()] == expected


def test_the_page_of_learned_maps_tells_what_a_descent_on_some_rows_had():
  page = (ROOT / "docs" / "results" / "hires_next.md").read_text()
  [*kl] = kl_of_draw(["maps_descended_512_rows_smollm2"]).values()
  *first, last = (f"{of_text.mean():.3f}"[1:] for of_text in kl)
  told = f"the first map descended had a KL of {', '.join(first)} and {last}"
  assert told in " ".join(page.split())


def test_the_page_of_learned_maps_tells_the_windows_that_were_kept_back():
  page = (ROOT / "docs" / "results" / "hires_next.md").read_text()
  kl = kl_of_draw(["hires_next_kept_back"])
  names = sorted({name for name, _ in kl}, key=lambda name: kl[name, "C4"].mean())
  assert names[1:] == ["hires-next", "hires"]
  for better, worse in itertools.pairwise(names):
    for text in ("WikiText-2", "C4"):
      apart = kl[worse, text] - kl[better, text]
      assert apart.mean() > 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
  of = lambda text: [f"{kl[name, text].mean():.3f}"[1:] for name in names]
  (a, b, c), (d, e, f) = of("WikiText-2"), of("C4")
  told = f"a KL of {a}, {b} and {c} on WikiText-2 and of {d}, {e} and {f} on C4"
  assert told in " ".join(page.split())


def test_the_page_of_discovery_tells_how_much_of_the_program_was_ported():
  """Shares of the program's gain over HiRes that `map-search` keeps on both models."""
  page = (ROOT / "docs" / "results" / "discovery.md").read_text()
  result = ROOT / "benchmarks" / "results" / "discovery_recorded.json"
  rows = json.loads(result.read_text())["rows"]
  kl = {(r["model"], r["program"]): sum(r["kl"]) / len(r["kl"]) for r in rows}
  best = "best after 20 calls, rounding activations as hires does"
  kept = []
  for model in ("llama", "qwen3"):
    base = kl[model, "hires"]
    ours = base - kl[model, "map-search, the method of the library"]
    kept.append(str(round(100 * ours / (base - kl[model, best]))))
  words = r"keeps (\d+) % of what the program gains .*\n?.*, and (\d+) % held out"
  assert re.findall(words, page) == [tuple(kept)]
