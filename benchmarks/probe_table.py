"""Runs the probe suite and writes down what every probe did.

  python benchmarks/probe_table.py

Runs the four test files that `TESTS` names. Probes of the jail and of the search hand
over the status, the charge and what they left behind as they were observed; the others,
whose test names begin with their number, whether they held. Writes results/probes.json
and results/probes.md.
"""

import collections
import datetime
import json
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

import jax

HERE = pathlib.Path(__file__).parent
RESULT = HERE / "results" / "probes.json"
TESTS = [
  "tests/discovery/sandbox/test_sandbox.py",
  "tests/discovery/sandbox/test_rebuilding.py",
  "tests/discovery/core/test_candidate_source.py",
  "tests/discovery/tasks/ptq/test_ptq.py",
]
PROBES = 44


def cases(folder):
  report = pathlib.Path(folder) / "report.xml"
  written = ["-o", "junit_family=legacy", f"--junitxml={report}"]
  command = [sys.executable, "-m", "pytest", "-q", *TESTS, *written]
  subprocess.run(command, cwd=HERE.parent, check=False)
  return list(ElementTree.parse(report).getroot().iter("testcase"))


def rows(testcases):
  for case in testcases:
    name = case.get("name")
    held = case.find("failure") is None and case.find("error") is None
    if case.find("skipped") is not None:
      continue
    found = [p.get("value") for p in case.iter("property")]
    for value in found:
      yield {**json.loads(value), "held": held}
    numbers = re.match(r"test_((?:\d+_(?:and_|to_)?)+)", name)
    if not found and numbers:
      yield {"probe": name.removeprefix("test_"), "held": held}


def numbered(probe):
  """The numbers that a probe's name begins with; `26_to_28` names all three."""
  head = re.match(r"[\d_ ]+(?:(?:and|to)[_ ][\d_ ]+)*", probe)
  text = head.group(0) if head else ""
  for first, last in re.findall(r"(\d+)_to_(\d+)", text):
    yield from range(int(first), int(last) + 1)
  yield from map(int, re.findall(r"\d+", text))


def table(found):
  by_number = collections.defaultdict(list)
  for row in found:
    for number in set(numbered(row["probe"])):
      by_number[number].append(row)
  lines = ["| probe | runs | observed | charged | left behind | held |"]
  lines += ["| --- | --- | --- | --- | --- | --- |"]
  for number in range(1, PROBES + 1):
    mine = by_number[number]
    statuses = sorted({r["status"] for r in mine if "status" in r})
    charged = sorted({r["charged"] for r in mine if "charged" in r})
    left = sum(len(r.get("left_behind", ())) for r in mine)
    held = f"{sum(r['held'] for r in mine)}/{len(mine)}"
    shown = ", ".join(statuses) or "by its own test"
    cost = ", ".join(map(str, charged)) or "-"
    lines.append(f"| {number} | {len(mine)} | {shown} | {cost} | {left} | {held} |")
  return "\n".join(lines), by_number


def main():
  with tempfile.TemporaryDirectory() as folder:
    found = list(rows(cases(folder)))
  text, by_number = table(found)
  result = {
    "command": "python benchmarks/probe_table.py",
    "date": datetime.date.today().isoformat(),
    "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    "python": platform.python_version(),
    "jax": jax.__version__,
    "probes_run": sum(bool(by_number[n]) for n in range(1, PROBES + 1)),
    "held": all(row["held"] for row in found),
    "rows": found,
  }
  RESULT.write_text(json.dumps(result, indent=1) + "\n")
  RESULT.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
  main()
