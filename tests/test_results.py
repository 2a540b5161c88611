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

from mxjax.evaluation import estimates
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
    ("maps searched", 7, r"without a descent takes (\d+) to (\d+) % off the KL"),
    ("maps descended", 7, r"the best of 84 takes (\d+) to (\d+) % off"),
    ("first map descended", 7, r"without the fit it is (\d+) to (\d+) % \("),
    ("hires-rotated", 7, r"`hires-rotated` takes (\d+) to (\d+) % off the KL of"),
    ("hires-rotated", 4, r"and (\d+) to (\d+) % off that of HiRes"),
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
    round(100 * (1 - kl[model, "hires-rotated"] / kl[model, last]))
    for model in ("llama", "qwen3", "mistral", "olmo2")
  ]
  least, most = re.search(r"takes another (\d+) to (\d+) % off on", words).groups()
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


TEXTS = "WikiText-2", "C4", "Python", "German"


def of_page(name):
  """The words of a page, without its line breaks."""
  return " ".join((ROOT / "docs" / name).read_text().split())


def rows_of(name):
  file = ROOT / "benchmarks" / "results" / f"{name}.json"
  return json.loads(file.read_text())["rows"]


def listed(values):
  *first, last = map(str, values)
  return f"{', '.join(first)} and {last}"


def clear_share(kl, better, worse, text):
  """How far a row is below another, which must be clear of zero by window.

  Returns the difference and 1.96 standard errors over windows, both in %.
  """
  apart = kl[worse, text] - kl[better, text]
  half = 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
  assert apart.mean() > half
  return 100 * np.array([apart.mean(), half]) / kl[worse, text].mean()


def test_the_page_of_learned_maps_tells_the_row_of_map_descent_on_smollm2():
  kl = kl_of_draw(["map_descent_smollm2", "hires_next"])
  texts = TEXTS[:2]
  of = [f"{kl['map-descent', text].mean():.3f}"[1:] for text in texts]
  below = [round(clear_share(kl, "map-descent", "hires", text)[0]) for text in texts]
  above = []
  for text in texts:
    assert clear_share(kl, "hires-next", "map-descent", text)[0] > 0
    share = kl["map-descent", text].mean() / kl["hires-next", text].mean()
    above.append(round(100 * (share - 1)))
  told = (
    f"its KL is {of[0]} on WikiText-2 and {of[1]} on C4, which is {below[0]} and "
    f"{below[1]} % below HiRes, and {above[0]} and {above[1]} % above `hires-next`"
  )
  assert told in of_page("results/hires_next.md")


@pytest.mark.parametrize(
  ("file", "verb"),
  [("maps_descended_512_rows_smollm2", "had"), ("maps_descended_smollm2", "has")],
)
def test_the_page_of_learned_maps_tells_what_a_descent_had_by_rows_seen(file, verb):
  [*kl] = kl_of_draw([file]).values()
  *first, last = (f"{of_text.mean():.3f}"[1:] for of_text in kl)
  numbers = re.escape(f"{', '.join(first)} and {last}")
  page = of_page("results/hires_next.md")
  assert re.search(rf"{verb} (a KL of )?{numbers}", page)


def test_the_page_tells_how_far_hires_rotated_is_below_others_on_smollm2():
  draws = [kl_of_draw(["hires_next_smollm2"], draw) for draw in (1, 2, 3)]
  mean = {key: np.mean([of[key] for of in draws], axis=0) for key in draws[0]}
  shares, by_draw, halves = {}, {}, {}
  for worse in ("hires", "hires-next"):
    of_texts = [clear_share(mean, "hires-rotated", worse, text) for text in TEXTS]
    shares[worse], halves[worse] = np.transpose(of_texts)
    by_draw[worse] = [
      100 * (1 - of["hires-rotated", text].mean() / of[worse, text].mean())
      for of in draws
      for text in TEXTS
    ]
  span = lambda values: f"{min(values):.0f} to {max(values):.0f} %"
  page = of_page("results/hires_next.md")
  for told in (
    f"its KL is {listed(map(round, shares['hires']))} % below HiRes, and "
    f"{listed(map(round, shares['hires-next']))} % below `hires-next`.",
    f"over windows are {span(halves['hires'])} and {span(halves['hires-next'])}.",
    f"it is {span(by_draw['hires'])} below HiRes and {span(by_draw['hires-next'])} "
    "below `hires-next`.",
  ):
    assert told in page, told
  told = f"`hires-rotated` takes {span(shares['hires-next'])} off the KL of "
  told += "`hires-next`, by text"
  assert told in of_page("status.md")


def test_the_pages_tell_how_long_builds_took_on_smollm2():
  names = "hires", "hires-next", "hires-rotated"
  seconds = {
    (row["name"], row["draw"]): sum(row["stage_seconds"].values())
    for row in rows_of("hires_next_smollm2")
    if row["name"] in names
  }
  of = [np.array([seconds[name, draw] for draw in (1, 2, 3)]) for name in names]
  hires, following, rotated = (f"{min(one):.0f} to {max(one):.0f} s" for one in of)
  told = (
    f"A build took {hires} for HiRes, {following} for `hires-next` and {rotated} for "
    "`hires-rotated`"
  )
  assert told in of_page("results/hires_next.md")
  ratios = [one / of[0] for one in of[1:]]
  following, rotated = (f"{min(one):.1f} to {max(one):.1f} times" for one in ratios)
  told = (
    f"a build by `hires-next` took {following} as long as one by HiRes, by draw, and "
    f"one by `hires-rotated` {rotated} as long"
  )
  assert told in of_page("status.md")


def test_the_page_of_methods_tells_how_far_builds_on_two_machines_are_apart():
  apart = {}
  for file in ("hires_next_smollm2", "hires_next_kept_back"):
    kl, other = (kl_of_draw([f"{file}{machine}"]) for machine in ("", "_epyc"))
    for name, text in kl.keys() & other.keys():
      if name != "float":
        change = 100 * abs(kl[name, text].mean() / other[name, text].mean() - 1)
        apart.setdefault((file[11:], name), []).append(change)
  hires, following = (apart["smollm2", name] for name in ("hires", "hires-next"))
  most = max(*apart["kept_back", "hires"], *apart["kept_back", "hires-next"])
  told = (
    f"KL of HiRes differs by {min(hires):.1f} to {max(hires):.1f} % between them, and "
    f"that of `hires-next` by {min(following):.1f} to {max(following):.1f} %; on the "
    f"last eight windows of WikiText-2 and C4 they differ by up to {most:.1f} %"
  )
  assert told in of_page("results/methods.md")


def test_the_page_tells_what_windows_that_were_kept_back_told_before():
  kl = kl_of_draw(["hires_next_kept_back_epyc"])
  [name] = {name for name, _ in kl if "map_steps" in name}
  wikitext, c4 = (f"{kl[name, text].mean():.3f}"[1:] for text in ("WikiText-2", "C4"))
  assert f"had {wikitext} and {c4} there" in of_page("results/hires_next.md")


def test_the_page_tells_what_labels_do_on_smollm2():
  """What they add to KL, and how much of the gain in perplexity is adaptation."""
  kl = kl_of_draw(["hires_next_smollm2_labels"])
  rows = rows_of("hires_next_smollm2_labels")
  loss = {
    (row["name"], text): np.mean(row["texts"][text]["loss"])
    for row in rows
    for text in TEXTS
  }
  bare = "hires-rotated+tune:label_weight=0"
  moved = listed(
    f"{100 * (kl[bare, text].mean() / kl['hires-rotated', text].mean() - 1):+.0f}"
    for text in TEXTS
  )
  raised = [
    100 * np.expm1(loss[bare, text] - loss["hires-rotated", text]) for text in TEXTS
  ]
  gains = [loss["hires", text] - loss["hires-rotated", text] for text in TEXTS]
  adapted = [loss["float", text] - loss["float, labels", text] for text in TEXTS]
  pairs = zip(gains, adapted, strict=True)
  wikitext, c4, *others = (100 * (1 - less / gain) for gain, less in pairs)
  short = lambda value: f"{value:.3f}"[1:]
  page = of_page("results/hires_next.md")
  for told in (
    f"moves KL by {moved} % on the four texts, and raises perplexity by "
    f"{min(raised):.0f} to {max(raised):.0f} %.",
    f"perplexity by {short(min(gains))} to {short(max(gains))} from HiRes, and the "
    f"float model gains {short(min(adapted))} to {short(max(adapted))} from the labels",
    f"{c4:.0f} % of the gain on C4, {wikitext:.0f} % on WikiText-2, and "
    f"{min(others):.0f} to {max(others):.0f} % on Python and German",
    "has a KL of {} and {} on WikiText-2 and C4 after draw 1".format(
      *(short(kl[bare, text].mean()) for text in TEXTS[:2])
    ),
  ):
    assert told in page, told


def test_the_page_tells_what_the_fit_of_maps_does_on_smollm2():
  fitted = kl_of_draw(["hires_next_smollm2"])
  other = kl_of_draw(["maps_descended_smollm2"])
  [name] = {name for name, _ in other}
  of = lambda text: fitted["hires-rotated", text].mean() / other[name, text].mean()
  found = listed(f"{100 * (of(text) - 1):+.0f}" for text in TEXTS)
  told = f"KL with the fit differs by {found} % on WikiText-2"
  assert told in of_page("results/hires_next.md")


def test_the_page_tells_the_windows_that_were_kept_back():
  kl = kl_of_draw(["hires_next_kept_back"])
  names = sorted({name for name, _ in kl}, key=lambda name: kl[name, "C4"].mean())
  assert names == ["hires-rotated", "hires-next", "hires"]
  for better, worse in itertools.pairwise(names):
    for text in ("WikiText-2", "C4"):
      assert clear_share(kl, better, worse, text)[0] > 0
  of = lambda text: [f"{kl[name, text].mean():.3f}"[1:] for name in names]
  (a, b, c), (d, e, f) = of("WikiText-2"), of("C4")
  told = f"a KL of {a}, {b} and {c} on WikiText-2 and of {d}, {e} and {f} on C4"
  assert told in of_page("results/hires_next.md")


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


def moved_by(kl, other, name, text):
  """By how many % a row's KL on a text is above that of another file's rows."""
  return 100 * (kl[name, text].mean() / np.mean([of[name, text] for of in other]) - 1)


def test_the_page_tells_what_more_calibration_text_brings():
  page = of_page("results/hires_next.md")
  # SmolLM2, from the mean of three draws of 8 rows.
  more = kl_of_draw(["hires_next_smollm2_128"], 128)
  # In one pass, which is another name.
  named = {
    (name.replace("+tune:epochs=1", ""), text): kl for (name, text), kl in more.items()
  }
  draws = [kl_of_draw(["hires_next_smollm2"], draw) for draw in (1, 2, 3)]
  hires, rotated = (
    listed(f"{moved_by(named, draws, name, text):+.0f}" for text in TEXTS)
    for name in ("hires", "hires-rotated")
  )
  assert f"KL of HiRes moves by {hires} % on the four texts" in page
  assert f"that of `hires-rotated` by {rotated} %." in page
  moves = [
    -moved_by(named, draws, name, text)
    for name, text in named
    if name in ("hires", "hires-rotated")
  ]
  assert f"takes {min(moves):.0f} to {max(moves):.0f} % off the KL of both" in page
  for name, text in named:
    if name != "float":
      apart = np.mean([of[name, text] for of in draws], axis=0) - named[name, text]
      assert apart.mean() > 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
  shares = listed(
    round(clear_share(named, "hires-rotated", "hires", text)[0]) for text in TEXTS
  )
  assert f"`hires-rotated` is {shares} % below HiRes" in page
  spent = {row["name"]: row for row in rows_of("hires_next_smollm2_128")}
  of_rotated = spent["hires-rotated+tune:epochs=1"]
  minutes = [
    f"{sum(row['stage_seconds'].values()) / 60:.0f} min"
    for row in (spent["hires"], of_rotated)
  ]
  tuning = of_rotated["stage_seconds"]["tuning"] / 60
  told = (
    f"HiRes took {minutes[0]} and `hires-rotated` {minutes[1]}, of which tuning was"
  )
  assert f"{told} {tuning:.0f}" in page
  peaks = [
    f"{max(row['stage_peak_bytes'].values()) / 1e9:.1f}"
    for row in (spent["hires"], of_rotated)
  ]
  assert f"peaked at {peaks[0]} and {peaks[1]} GB" in page
  short = lambda name: f"{named[name, 'WikiText-2'].mean():.3f}"[1:]
  told = (
    f"`hires` has {short('hires')}, and `hires-rotated`, tuned in one pass, has "
    f"{short('hires-rotated')}"
  )
  assert told in " ".join((ROOT / "README.md").read_text().split())
  # Two small models: means over texts, of two draws of 8 rows.
  before = rows_of("map_search")
  told, apart, lower, raised, below = [], [], [], [], {8: [], 128: []}
  steps = {True: [], False: []}
  for model in ("llama", "qwen3"):
    kl = kl_of_draw([f"hires_next_{model}_128"], 128)
    of = lambda name, kl=kl: np.mean([kl[name, text] for text in TEXTS])
    for name in ("hires", "hires-next", "hires-rotated"):
      same = [r["kl"] for r in before if (r["model"], r["name"]) == (model, name)]
      draws = [np.mean([np.mean(of_row[text]) for text in TEXTS]) for of_row in same]
      apart.append(100 * (max(draws) / min(draws) - 1))
      told.append(f"{100 * (of(name) / np.mean(draws) - 1):+.0f}")
    for end in ("", ":label_weight=0"):
      few = f"hires-rotated+tune{end}" if end else "hires-rotated"
      ratio = of(f"hires-rotated+tune:steps=256{end}") / of(few)
      steps[bool(end)].append(100 * (ratio - 1))
    of_paper = {
      name: [r["kl"] for r in before if (r["model"], r["name"]) == (model, name)]
      for name in ("hires", "hires-rotated")
    }
    means = [
      np.mean([[np.mean(kl[text]) for text in TEXTS] for kl in rows])
      for rows in of_paper.values()
    ]
    below[8].append(f"{100 * (1 - means[1] / means[0]):.0f}")
    below[128].append(f"{100 * (1 - of('hires-rotated') / of('hires')):.0f}")
    bare = "hires-rotated+tune:label_weight=0"
    loss = {
      (row["name"], text): np.mean(row["texts"][text]["loss"])
      for row in rows_of(f"hires_next_{model}_128")
      for text in TEXTS
    }
    raised += [
      100 * np.expm1(loss[bare, text] - loss["hires-rotated", text]) for text in TEXTS
    ]
    lower += [
      100 * (1 - kl[bare, text].mean() / kl["hires-rotated", text].mean())
      for text in TEXTS
    ]
  hires, following, rotated = (f"{told[i]} and {told[i + 3]} %" for i in range(3))
  assert (
    f"HiRes {hires}, `hires-next` {following} and `hires-rotated` {rotated}" in page
  )
  least, most = min(apart), max(apart)
  assert f"two draws of 8 rows differ by {least:.0f} to {most:.0f} %" in page
  low, high = min(lower), max(lower)
  assert (
    f"lowers the KL of `hires-rotated` by {low:.0f} to {high:.0f} %, text by text, and "
    f"raises perplexity by {min(raised):.0f} to {max(raised):.0f} %" in page
  )
  assert (
    f"after 128 rows `hires-rotated` is {below[128][0]} and {below[128][1]} % below "
    f"HiRes, and after 8 it is {below[8][0]} and {below[8][1]} % below" in page
  )
  labelled, bare = ([f"{value:.0f}" for value in steps[key]] for key in (False, True))
  assert (
    f"takes KL {labelled[0]} and {labelled[1]} % above that of 64 steps, and without "
    f"labels {bare[0]} and {bare[1]} %" in page
  )


def test_the_page_tells_of_other_methods_after_128_rows():
  files = "hires_next_smollm2_128", "hires_next_smollm2_128_others"
  named = {
    (name.replace("+tune:epochs=1", ""), text): kl
    for (name, text), kl in kl_of_draw(files, 128).items()
  }
  page, of = of_page("results/hires_next.md"), {}
  for name in ("wush", "hires-next"):
    of[name] = listed(f"{named[name, text].mean():.3f}"[1:] for text in TEXTS)
  assert f"WUSH has a KL of {of['wush']} on WikiText-2, C4, Python and German" in page
  assert f"`hires-next`, tuned in one pass, of {of['hires-next']}" in page
  chain = "hires-rotated", "hires-next", "hires", "wush"
  for better, worse, told in zip(
    chain,
    chain[1:],
    (
      "`hires-rotated` {} % below `hires-next`",
      "`hires-next` {} % below HiRes",
      "HiRes is {} % below WUSH",
    ),
    strict=False,
  ):
    shares = [round(clear_share(named, better, worse, text)[0]) for text in TEXTS]
    assert told.format(listed(shares)) in page
  draws = [kl_of_draw(["hires_next_smollm2"], draw) for draw in (1, 2, 3)]
  moves = [f"{moved_by(named, draws, 'hires-next', text):+.0f}" for text in TEXTS]
  assert f"KL of `hires-next` moves by {listed(moves)} %." in page
  minutes = [
    f"{sum(row['stage_seconds'].values()) / 60:.0f}"
    for row in rows_of("hires_next_smollm2_128_others")[1:]
  ]
  assert f"The builds took {' and '.join(minutes)} min" in page


def test_the_page_tells_what_whole_maps_bring_with_more_text():
  shares, clear = [], 0
  for model in ("llama", "qwen3"):
    kl = kl_of_draw([f"learned_maps_{model}"], 128)
    factors, maps = sorted({name for name, _ in kl}, key=len)
    assert maps == f"{factors}:map_rate=0.001"
    of = lambda name, kl=kl: np.mean([kl[name, text] for text in TEXTS])
    shares.append(f"{100 * (1 - of(maps) / of(factors)):.0f}")
    less = {text: kl[factors, text] - kl[maps, text] for text in TEXTS}
    by_text = {
      text: one.mean() / kl[factors, text].mean() for text, one in less.items()
    }
    assert max(by_text, key=by_text.get) == "C4"
    half = lambda one: 1.96 * one.std(ddof=1) / len(one) ** 0.5
    clear += sum(one.mean() > half(one) for one in less.values())
  page = of_page("results/hires_next.md")
  assert f"it takes {shares[0]} and {shares[1]} % off the KL of Llama and Qwen3" in page
  assert f"is clear of zero on {clear} of the 8 pairs of a model and a text" in page
  assert "largest on C4" in page


def codes_against_factors(file, base, draw):
  """By ending of a row's name and text: how far KL and perplexity moved, in %, and
  whether KL is clear of zero."""
  rows = {row["name"]: row for row in rows_of(file) if row["draw"] == draw}
  moves = {}
  for name, row in rows.items():
    if name in ("float", base):
      continue
    for text in TEXTS:
      kl, before = (np.array(of["texts"][text]["kl"]) for of in (row, rows[base]))
      apart = kl - before
      half = 1.96 * apart.std(ddof=1) / len(apart) ** 0.5
      loss = [np.mean(of["texts"][text]["loss"]) for of in (row, rows[base])]
      moves[name.removeprefix(base), text] = (
        100 * apart.mean() / before.mean(),
        100 * np.expm1(loss[0] - loss[1]),
        abs(apart.mean()) > half,
      )
  return moves


def test_the_page_tells_where_learned_codes_pay():
  page, base = of_page("results/hires_next.md"), "hires-rotated+tune:label_weight=0"
  taken, clear, perplexity = {}, {}, []
  for model, draws in (("llama", (512, 513, 1024)), ("qwen3", (512, 513))):
    for draw in draws:
      file = f"learned_codes_{model}"
      moves = codes_against_factors(file, base, draw)
      for (end, _), (move, of, is_clear) in moves.items():
        assert move < 0
        clear.setdefault(end, []).append(is_clear)
        perplexity += [of] * (end == ":code_rate=0.03")
      kl = kl_of_draw([file], draw)
      of = lambda name, kl=kl: np.mean([kl[name, text] for text in TEXTS])
      for rate in ("0.015", "0.03"):
        share = 100 * (1 - of(f"{base}:code_rate={rate}") / of(base))
        taken.setdefault((model, rate), []).append(f"{share:.0f}")
  of = {
    key: listed(shares) if len(shares) > 1 else shares[0]
    for key, shares in taken.items()
  }
  assert f"it takes {of['llama', '0.03']} % off the KL of Llama" in page
  assert f"and {of['qwen3', '0.03']} % off that of Qwen3" in page
  assert all(clear[":code_rate=0.03"])
  assert (
    f"At .015 it takes {of['llama', '0.015']} % and {of['qwen3', '0.015']} %, which is "
    f"clear of zero on {sum(clear[':code_rate=0.015'])} of the 20 pairs" in page
  )
  assert f"by {min(perplexity):+.0f} to {max(perplexity):+.0f} %" in page


def test_the_page_tells_of_other_rates_of_codes_and_of_labels_beside_them():
  page, base = of_page("results/hires_next.md"), "hires-rotated+tune:label_weight=0"
  kl = kl_of_draw(["learned_codes_rates_llama"], 512)
  of = lambda name: np.mean([kl[name, text] for text in TEXTS])
  ends = ":code_rate=0.06", ":code_rate=0.12", ":steps=256:code_rate=0.015"
  low, high, long = (100 * (of(base + end) / of(base) - 1) for end in ends)
  assert abs(long) < 0.5
  assert (
    f"codes take {-low:.0f} % off at a rate of .06, add {high:.0f} % at .12" in page
  )
  moves = codes_against_factors("learned_codes_rates_llama", "hires-rotated", 512)
  raised, lowered = (
    listed(f"{abs(moves['+tune:code_rate=0.03', text][place]):.0f}" for text in TEXTS)
    for place in (0, 1)
  )
  assert (
    f"raises the KL of `hires-rotated` by {raised} % on WikiText-2, C4, Python and "
    f"German, and lowers perplexity by {lowered} %" in page
  )


def test_the_page_tells_how_far_gradients_of_two_halves_agree():
  told = {"codes": [], "factors": []}
  files = (ROOT / "benchmarks" / "results").glob("gradient_agreement_*.json")
  models = [json.loads(file.read_text()) for file in sorted(files)]
  assert [one["model"][-5:] for one in models] == ["llama", "qwen3"]
  for part, by_rows in told.items():
    for rows in ("8", "32", "256"):
      values = [one["agreement_by_rows"][rows][part] for one in models]
      by_rows.append(" and ".join(f"{value:.2f}"[1:] for value in values))
  page, (few, more, most) = of_page("results/hires_next.md"), told["codes"]
  assert (
    f"at the codes is {few} on Llama and Qwen3 with 4,096 tokens in each half, {more} "
    f"with 16,384, and {most} with 131,072" in page
  )
  few, more, most = told["factors"]
  assert f"At the factors it is {few}, {more}, and {most}" in page


def test_the_page_tells_what_learned_codes_and_maps_do_on_smollm2():
  page, base = (
    of_page("results/hires_next.md"),
    "hires-rotated+tune:epochs=1:label_weight=0",
  )
  moves = codes_against_factors("learned_codes_smollm2", base, 128)
  moves |= codes_against_factors("learned_maps_smollm2", base, 128)
  column = lambda end, place, form: listed(
    form.format(moves[end, text][place]) for text in TEXTS
  )
  high, low = ":code_rate=0.03", ":code_rate=0.015"
  changed = {
    (name, row["name"], row["draw"]): 100
    * np.mean(row["tuning"]["changed_codes_by_layer"])
    for name in ("smollm2", "llama", "qwen3")
    for row in rows_of(f"learned_codes_{name}")
    if "code_rate" in row["name"]
  }
  of_small = {
    rate: [
      f"{share:.1f}"
      for (model, name, _), share in sorted(changed.items(), key=lambda one: one[1])
      if model != "smollm2" and name.endswith(rate)
    ]
    for rate in (high, low)
  }
  here = lambda rate: changed["smollm2", base + rate, 128]
  for told in (
    f"changes {here(high):.1f} % of the codes, as it does on the small models, where "
    f"it changes {of_small[high][0]} to {of_small[high][-1]} %, and "
    "raises KL on WikiText-2, C4, Python and German by "
    f"{column(high, 0, '{:.0f}')} %",
    f"changes {here(low):.2f} %, where it changes {of_small[low][0]} to "
    f"{of_small[low][-1]} % of those of the small models: it moves KL by "
    f"{column(low, 0, '{:+.1f}')} %",
    f"raise KL by {column(':map_rate=0.001', 0, '{:.0f}')} %",
  ):
    assert told in page, told
  kl = kl_of_draw(["hires_next_smollm2_128", "learned_codes_smollm2"], 128)
  labels = base.removesuffix(":label_weight=0")
  shares = [round(clear_share(kl, base, labels, text)[0]) for text in TEXTS]
  loss = {
    (row["name"], text): np.mean(row["texts"][text]["loss"])
    for file in ("hires_next_smollm2_128", "learned_codes_smollm2")
    for row in rows_of(file)
    for text in TEXTS
  }
  raised = [round(100 * np.expm1(loss[base, t] - loss[labels, t])) for t in TEXTS]
  told = (
    f"lowers the KL of `hires-rotated` by {listed(shares)} %, and raises perplexity by "
    f"{listed(raised)} %"
  )
  assert told in page, told
  values = listed(f"{kl[base, text].mean():.3f}"[1:] for text in TEXTS)
  assert f"Its KL is then {values}" in page, values


def test_the_estimates_of_maps_are_those_that_were_timed():
  file = ROOT / "benchmarks" / "results" / "map_work.json"
  timed = json.loads(file.read_text())["flop_for_an_element"]
  for name, told in (
    ("rounding", estimates.ROUNDING),
    ("descending, inputs", estimates.ROUNDING),
    ("descending, weights", estimates.ROUNDING),
    ("revisiting", estimates.REVISITING),
    ("fitting", estimates.FITTING),
  ):
    assert told == pytest.approx(timed[name], rel=0.1), name
