"""The documents name files that exist, and show what the result files hold."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = sorted(
  [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)
TOPS = "benchmarks|discovery|docs|evaluation|examples|models|mxjax|pallas_kernels|tests"
PATHS = re.compile(rf"\b(?:{TOPS})/[\w./-]*\w\.(?:py|md|json|txt|svg)\b")
FOLDERS = re.compile(rf"`((?:{TOPS})/[\w/]*)`")
INCLUDES = re.compile(r"^```\{(?:include|literalinclude)\} (\S+)$", re.MULTILINE)


def name_of(document):
  return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_file_and_folder_that_is_named_exists(document):
  text = document.read_text()
  named = {*PATHS.findall(text), *FOLDERS.findall(text)}
  missing = [
    path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()
  ]
  assert not missing, f"{name_of(document)} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_included_result_exists(document):
  for place in INCLUDES.findall(document.read_text()):
    assert (document.parent / place).is_file(), place


def test_every_table_of_results_is_shown():
  shown = {
    (document.parent / place).resolve()
    for document in DOCUMENTS
    for place in INCLUDES.findall(document.read_text())
  }
  assert set((ROOT / "benchmarks" / "results").glob("*.md")) <= shown


def test_the_documents_are_short():
  words = sum(len(document.read_text().split()) for document in DOCUMENTS)
  assert words <= 15_500
  assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_figure_is_that_of_the_result_files():
  path = ROOT / "benchmarks" / "readme_figure.py"
  spec = importlib.util.spec_from_file_location("readme_figure", path)
  figure = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(figure)
  assert figure.draw() == figure.FIGURE.read_text(), f"run python {path.name}"


def test_the_imports_of_the_readme_work():
  code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
  assert code is not None
  compile(code[1], "README.md", "exec")
  lines = [line for line in code[1].splitlines() if re.match("import |from ", line)]
  assert lines
  exec("\n".join(lines), {})
