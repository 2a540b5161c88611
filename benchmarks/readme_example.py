"""Runs the Python example of the README, and keeps what it prints.

  python benchmarks/readme_example.py

Tests hold the output that the README shows to the result file.
"""

import contextlib
import io
import pathlib
import re
import tempfile

import common

README = pathlib.Path(__file__).parents[1] / "README.md"


def main():
  options = common.parser(__doc__).parse_args()
  result = common.stamp()
  (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
  printed = io.StringIO()
  # The example saves a checkpoint into the current folder.
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    with contextlib.redirect_stdout(printed):
      exec(compile(code, "README.md", "exec"), {})
  common.write(options.out, {**result, "prints": printed.getvalue().splitlines()})


if __name__ == "__main__":
  main()
