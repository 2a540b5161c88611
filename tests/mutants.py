"""Plants one mistake at a time into a copy of the library, and runs the tests on it.

    python tests/mutants.py                  all mutants, into tests/mutants.json
    python tests/mutants.py --only NAME ...  some, beside the results that are there
    python tests/mutants.py --check          only whether each fits the code
    python tests/mutants.py --table          the stored results, as Markdown

The mistakes are in tests/mutants.toml; its head says how to add one.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(__file__).with_suffix(".toml")
RESULTS = pathlib.Path(__file__).with_suffix(".json")
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "build")
SECONDS = 900


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One mistake: what it breaks, where, and the tests that should notice."""

  name: str
  file: str
  find: str
  replace: str
  tests: list[str]


def read() -> list[Mutant]:
  """The list, in its order; a field too few or too many is an error."""
  return [Mutant(**row) for row in tomllib.loads(LIST.read_text())["mutant"]]


def place(tree: pathlib.Path, mutant: Mutant) -> pathlib.Path:
  """The one file with the mutant's string, once; anything else is an error."""
  named = tree / mutant.file
  files = sorted(named.rglob("*.py")) if named.is_dir() else [named]
  counts = {file: file.read_text().count(mutant.find) for file in files}
  if sum(counts.values()) != 1:
    raise ValueError(
      f"mutants: {mutant.name!r}: expected once in {mutant.file}, got "
      f"{sum(counts.values())} times: {mutant.find.strip()!r}; repair the mutant to "
      "the code as it is now."
    )
  return next(file for file, count in counts.items() if count)


def misfits(tree: pathlib.Path, mutant: Mutant) -> list[str]:
  """What keeps a mutant from being planted or noticed: a sentence each."""
  told = [
    f"mutants: {mutant.name!r}: its test {test} is not in the tree."
    for test in mutant.tests
    if not (tree / test).exists()
  ]
  try:
    place(tree, mutant)
  except (ValueError, OSError) as error:
    told.append(str(error))
  return told


def run_tests(tree: pathlib.Path, tests: list[str]) -> tuple[int | None, str]:
  """Pytest's exit code (None: too slow) and its first failing test, or last lines."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE"]
  command += ["-p", "no:cacheprovider", *tests]
  environment = os.environ | {
    "PYTHONPATH": str(tree),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
  }
  try:
    done = subprocess.run(
      command,
      cwd=tree,
      env=environment,
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )
  except subprocess.TimeoutExpired:
    return None, f"no result within {SECONDS} s"
  failing = re.findall(
    r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE
  )
  told = failing[0] if failing else done.stdout[-2000:] + done.stderr[-2000:]
  return done.returncode, told


def judge(tree: pathlib.Path, mutant: Mutant) -> dict[str, object]:
  """Plants the mutant, runs its tests, and puts the file back."""
  file = place(tree, mutant)
  source = file.read_text()
  file.write_text(source.replace(mutant.find, mutant.replace))
  start = time.perf_counter()
  try:
    code, told = run_tests(tree, mutant.tests)
  finally:
    file.write_text(source)
  if code not in (0, 1, None):
    raise RuntimeError(f"mutants: {mutant.name!r}: pytest ended with {code}:\n{told}")
  return {
    "mutant": mutant.name,
    "file": file.relative_to(tree).as_posix(),
    "from": mutant.find.strip(),
    "to": mutant.replace.strip(),
    "caught by": None if code == 0 else told,
    "seconds": round(time.perf_counter() - start),
  }


def table(rows: list[dict[str, object]]) -> str:
  """The results as Markdown."""
  lines = ["| mutant | file | caught by |", "|---|---|---|"]
  for row in rows:
    caught = f"`{row['caught by']}`" if row["caught by"] else "**SURVIVED**"
    lines.append(f"| {row['mutant']} | `{row['file']}` | {caught} |")
  return "\n".join(lines)


def main() -> int:
  """Runs what is asked for; 1 where a mutant survived."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names")
  parser.add_argument("--table", action="store_true", help="print stored results")
  parser.add_argument("--check", action="store_true", help="only look for the strings")
  options = parser.parse_args()
  stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
  if options.table:
    print(table(stored))
    return 0
  mutants = read()
  asked = [
    mutant
    for mutant in mutants
    if not options.only or any(part in mutant.name for part in options.only)
  ]
  absent = [told for mutant in asked for told in misfits(ROOT, mutant)]
  if absent or options.check:
    print("\n".join(absent) or f"{len(asked)} mutants fit the code.")
    return 2 if absent else 0
  results = {row["mutant"]: row for row in stored}
  # Programs of the library as it is are compiled once for all mutants.
  with tempfile.TemporaryDirectory(prefix="mxjax-mutants-") as scratch:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{scratch}/compiled")
    tree = pathlib.Path(scratch) / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    tests = sorted({test for mutant in asked for test in mutant.tests})
    code, told = run_tests(tree, tests)
    if code != 0:
      raise RuntimeError(f"mutants: the tests fail without a mutant:\n{told}")
    for mutant in asked:
      results[mutant.name] = row = judge(tree, mutant)
      print(f"{row['seconds']:>4} s  {mutant.name}: {row['caught by'] or 'SURVIVED'}")
      order = [results[one.name] for one in mutants if one.name in results]
      RESULTS.write_text(json.dumps(order, indent=1) + "\n")
  return int(any(results[mutant.name]["caught by"] is None for mutant in asked))


if __name__ == "__main__":
  sys.exit(main())
