"""The static checks of `make check`: every one runs, then a summary.

Run it with the Python of the environment that has the tools:
`.venv/bin/python tests/check.py`.
"""

import os
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
  # The site with the reference from docstrings; needs no network.
  "docs": tuple("python -m sphinx -qEW --keep-going docs build/docs".split()),
  # Compiles every kernel for an H200 that need not be there, if `make kernels`, which
  # compiles for others too, or the environment has what that takes; it says so where it
  # does not.
  "kernels": ("python", "tests/compile_kernels.py", "", "sm_90a"),
}
SKIPPED = 77
CUDA_PLUGIN = ROOT / ".cuda-plugin"


def environment() -> dict[str, str]:
  """The process's own, with the CUDA plugin of `make kernels` on the path."""
  paths = [str(CUDA_PLUGIN)] if CUDA_PLUGIN.is_dir() else []
  paths += filter(None, [os.environ.get("PYTHONPATH")])
  return os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})


def main() -> int:
  """Runs every check from the repository's root; 1 if any failed."""
  verdicts = {}
  for name, (tool, *arguments) in CHECKS.items():
    executable = sys.executable if tool == "python" else str(TOOLS / tool)
    command = [executable, *arguments]
    print(f"\n== {name}: {' '.join([tool, *arguments])}", flush=True)
    start = time.perf_counter()
    try:
      code = subprocess.run(
        command, cwd=ROOT, env=environment(), check=False
      ).returncode
      verdict = {0: "ok  ", SKIPPED: "SKIP"}.get(code, "FAIL")
    except FileNotFoundError:
      print(f"{tool} is not in {TOOLS}; install the dev extra: pip install -e .[dev]")
      verdict = "FAIL"
    verdicts[name] = (verdict, time.perf_counter() - start)
  print("\n== summary")
  for name, (verdict, seconds) in verdicts.items():
    print(f"{verdict} {name} ({seconds:.1f} s)")
  return 1 if any(verdict == "FAIL" for verdict, _ in verdicts.values()) else 0


if __name__ == "__main__":
  sys.exit(main())
