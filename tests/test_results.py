"""What result files say of how they were made: a command that makes them again."""

import argparse
import itertools
import json
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
"""Those of GPUs, in a folder of their own, come from a machine that is lent whole."""
STUDIES = "payoff_noisy payoff_plain payoff_real_noisy payoff_real_plain"
OLDER = {
  "no command": {
    *("demo", "export_roundtrip", "harness_quantized", "hires_build"),
    *("hostile_programs", "perplexity_agreement_bfloat16", "plan_memory"),
    *("reference_protocol", "studies_payoff_real_stopped", "studies_ptq"),
    *("studies_world", *(f"studies_{name}" for name in STUDIES.split())),
  },
  "no script": {"gpu_counts", "gpu_predictions", "gpu_programs"},
  "no dtype": {
    *(f"compare_{family}" for family in ("llama", "qwen3", "mistral", "olmo2")),
    *("ablate_llama", "checks_llama", "next_llama", "next_qwen3", "stages"),
  },
  "other rows": {"hires_next"},
}
"""Files that were made before their scripts recorded what is missing, by what it is.

One that is made again leaves its set; none may join one.
"""


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
