"""The house stays small: files, functions and folders that a reader holds in mind."""

import ast
import pathlib
import statistics

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("mxjax", "pallas_kernels", "models", "evaluation", "discovery")
MOST_LINES, MEDIAN_LINES, FUNCTION_LINES, FOLDER_FILES = 400, 180, 60, 12


def sources():
  """Every library file once: `mxjax/` holds links to the other folders."""
  for top in ROOMS:
    for path in sorted((ROOT / top).rglob("*.py")):
      parts = path.relative_to(ROOT).parts
      if top != "mxjax" or parts[1] not in ROOMS:
        yield path


def lines(path):
  return len(path.read_text().splitlines())


def long_functions(path):
  """Functions over the limit, with their lines; a docstring does not count."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.FunctionDef):
      first = node.body[0]
      count = node.end_lineno - node.lineno + 1
      if ast.get_docstring(node) is not None:
        count -= first.end_lineno - first.lineno + 1
      if count > FUNCTION_LINES:
        yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {count} lines"


def test_no_file_is_too_long():
  counts = {str(path.relative_to(ROOT)): lines(path) for path in sources()}
  over = {name: count for name, count in counts.items() if count > MOST_LINES}
  assert not over, over


def test_half_of_the_files_fit_three_screens():
  assert statistics.median(lines(path) for path in sources()) <= MEDIAN_LINES


def test_no_function_is_too_long():
  over = [text for path in sources() for text in long_functions(path)]
  assert not over, "\n".join(over)


@pytest.mark.parametrize("top", ROOMS)
def test_a_folder_holds_at_most_twelve_files(top):
  counts = {}
  for path in sources():
    if path.relative_to(ROOT).parts[0] == top:
      counts[path.parent] = counts.get(path.parent, 0) + 1
  over = {str(folder): n for folder, n in counts.items() if n > FOLDER_FILES}
  assert not over, over
