"""Runs the probe suite and writes down what every probe did.

  python benchmarks/probe_table.py

Runs the four test files that `TESTS` names. Probes of the jail and of the search hand
over the status, the charge and what they left behind as they were observed; the others,
whose test names begin with their number, whether they held.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

import common

TESTS = [
  "tests/discovery/sandbox/test_sandbox.py",
  "tests/discovery/sandbox/test_rebuilding.py",
  "tests/discovery/core/test_candidate_source.py",
  "tests/discovery/tasks/ptq/test_ptq.py",
]
PROBES = 44


def cases():
  """The tests, as pytest's report tells them."""
  with tempfile.TemporaryDirectory() as folder:
    report = pathlib.Path(folder) / "report.xml"
    written = ["-o", "junit_family=legacy", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", "-q", *TESTS, *written]
    subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], check=False)
    return list(ElementTree.parse(report).getroot().iter("testcase"))


def rows():
  """What each probe showed."""
  for case in cases():
    name = case.get("name")
    held = case.find("failure") is None and case.find("error") is None
    if case.find("skipped") is not None:
      continue
    found = [p.get("value") for p in case.iter("property")]
    for value in found:
      yield {**json.loads(value), "held": held}
    if not found and re.match(r"test_((?:\d+_(?:and_|to_)?)+)", name):
      yield {"probe": name.removeprefix("test_"), "held": held}


def numbered(probe):
  """The numbers that a probe's name begins with; `26_to_28` names all three."""
  head = re.match(r"[\d_ ]+(?:(?:and|to)[_ ][\d_ ]+)*", probe)
  text = head.group(0) if head else ""
  for first, last in re.findall(r"(\d+)_to_(\d+)", text):
    yield from range(int(first), int(last) + 1)
  yield from map(int, re.findall(r"\d+", text))


def table(found):
  """A line a probe, and how many were run."""
  by_number = collections.defaultdict(list)
  for row in found:
    for number in set(numbered(row["probe"])):
      by_number[number].append(row)
  lines = []
  for number in range(1, PROBES + 1):
    mine = by_number[number]
    statuses = sorted({r["status"] for r in mine if "status" in r})
    charged = sorted({r["charged"] for r in mine if "charged" in r})
    left = sum(len(r.get("left_behind", ())) for r in mine)
    held = f"{sum(r['held'] for r in mine)}/{len(mine)}"
    shown = ", ".join(statuses) or "by its own test"
    cost = ", ".join(map(str, charged)) or "-"
    lines.append([str(number), str(len(mine)), shown, cost, str(left), held])
  head = ["probe", "runs", "observed", "charged", "left behind", "held"]
  run = sum(bool(by_number[number]) for number in range(1, PROBES + 1))
  return common.markdown(head, lines), run


def main():
  options = common.parser(__doc__).parse_args()
  found = list(rows())
  text, run = table(found)
  held = all(row["held"] for row in found)
  result = {**common.stamp(), "probes_run": run, "held": held, "rows": found}
  common.write(options.out, result, text)


if __name__ == "__main__":
  main()
