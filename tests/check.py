"""The static checks of `make check`: every one runs, then a summary.

Run it with the Python of the environment that has the tools:
`.venv/bin/python tests/check.py`.
"""

import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = pathlib.Path(sys.executable).parent

CHECKS = {
  "format": ("ruff", "format", "--check", "--output-format", "concise", "."),
  "lint": ("ruff", "check", "."),
  "types": ("basedpyright", "--pythonpath", sys.executable),
  "floors": ("lint-imports",),
}


def main() -> int:
  """Runs every check from the repository's root; 1 if any failed."""
  verdicts = {}
  for name, (tool, *arguments) in CHECKS.items():
    command = [str(TOOLS / tool), *arguments]
    print(f"\n== {name}: {' '.join([tool, *arguments])}", flush=True)
    start = time.perf_counter()
    try:
      passed = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    except FileNotFoundError:
      print(f"{tool} is not in {TOOLS}; install the dev extra: pip install -e .[dev]")
      passed = False
    verdicts[name] = (passed, time.perf_counter() - start)
  print("\n== summary")
  for name, (passed, seconds) in verdicts.items():
    print(f"{'ok  ' if passed else 'FAIL'} {name} ({seconds:.1f} s)")
  return 0 if all(passed for passed, _ in verdicts.values()) else 1


if __name__ == "__main__":
  sys.exit(main())
